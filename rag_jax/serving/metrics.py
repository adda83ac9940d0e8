"""Figures for Prometheus, under the names that vLLM gives them."""

from collections.abc import Callable

import jax.monitoring
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """What a server has done since it started.

    Args:
      model: its name, a label of every figure.
      running, waiting: give the number of questions that are computed now, and that wait.
    """

    def __init__(self, model: str, running: Callable[[], int], waiting: Callable[[], int]):
        self._registry = CollectorRegistry()
        self._model = model
        for name, what, now in (
                ("running", "Questions that are being computed.", running),
                ("waiting", "Questions that wait to be computed.", waiting)):
            self._of(Gauge, f"num_requests_{name}", what).set_function(now)
        self.first_token = self._of(Histogram, "time_to_first_token_seconds",
                                    "Until the first token of an answer is sent.", buckets=SECONDS)
        self.whole = self._of(Histogram, "e2e_request_latency_seconds",
                              "Until an answer is sent whole.", buckets=SECONDS)
        self.prompt = self._of(Counter, "prompt_tokens", "Tokens of questions, as asked.")
        self.generated = self._of(Counter, "generation_tokens", "Tokens of answers, without </s>.")
        self._success = Counter("vllm:request_success", "Answers by how they ended.",
                                ("model_name", "finished_reason"), registry=self._registry)
        self._requests = Counter("rag_jax:http_requests", "Requests by status, but those of "
                                 "/health, /ready and the page.",
                                 ("model_name", "status"), registry=self._registry)
        compiled = Counter("rag_jax:compilations", "Programs compiled; once it is ready, none but "
                           "by changes of /memory.", registry=self._registry)
        jax.monitoring.register_event_duration_secs_listener(
            lambda event, secs, **_: compiled.inc() if "backend_compile" in event else None)

    def _of(self, kind: type, name: str, what: str, **more):
        metric = kind(f"vllm:{name}", what, ("model_name",), registry=self._registry, **more)
        return metric.labels(self._model)

    def ended(self, reason: str) -> None:
        """Counts an answer by its finish_reason."""
        self._success.labels(self._model, reason).inc()

    def answered(self, status: int) -> None:
        """Counts a request by its HTTP status."""
        self._requests.labels(self._model, str(status)).inc()

    def text(self) -> bytes:
        """All figures, in Prometheus' text format."""
        return generate_latest(self._registry)
