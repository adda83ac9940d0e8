"""The loop that runs every training stage: resume, train, watch, evaluate, save.

The order within a step is fixed: what is saved is the state before any step beyond it began, and
the batch of a step depends on (seed, step) and, for RAG, on the parameters at that step alone.
"""

import contextlib
import dataclasses
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import jax
import numpy as np

from rag_jax import hosts
from rag_jax.errors import NotFiniteError, UserError
from rag_jax.training import tree_record, workdir
from rag_jax.training.checkpoint import BEST_METRIC, Checkpointer
from rag_jax.training.collapse import CollapseGuard
from rag_jax.training.log import MetricWriter, Progress
from rag_jax.training.preemption import PreemptionGuard
from rag_jax.training.step import TrainState


class TrainingError(UserError, RuntimeError):
    """Training cannot go on; the message says from which step it can be taken up."""


class Preempted(Exception):
    """A signal asked the process to stop; a checkpoint of this very step has been saved."""


class BatchSource(Protocol):
    """Device batches by step. Warm-up stages ignore `params`; RAG retrieves with them."""

    lookahead: int  # how many steps before its use a batch is begun (retrieval staleness)

    def begin(self, step: int, params: Any) -> None:
        """Starts on the batch of `step` with the current parameters; returns without waiting."""

    def finish(self, step: int) -> Any:
        """The batch of `step`, placed on the mesh."""

    def pending(self) -> dict:
        """What was begun and not yet used, as JSON: it belongs to a checkpoint."""

    def restore(self, pending: dict) -> None:
        """The inverse of `pending`."""


class PureSource:
    """A source whose batches are a function of the step alone."""

    lookahead = 0

    def __init__(self, make: Callable[[int], Any]):
        self._make = make

    def begin(self, step: int, params: Any) -> None:
        pass

    def finish(self, step: int) -> Any:
        return self._make(step)

    def pending(self) -> dict:
        return {}

    def restore(self, pending: dict) -> None:
        pass


@dataclasses.dataclass(frozen=True)
class Stage:
    """One training stage.

    Attributes:
      name: shown in progress and metrics.
      directory: its checkpoints and metrics.
      steps, log_every, save_every, eval_every, keep: counts of steps; eval_every 0 = never.
      make_state, abstract_state: the first state, and its shapes and shardings.
      train_step: (state, batch, step) -> (state, metrics).
      source: batches.
      evaluate: params -> metrics, among them one of BEST_METRIC.
      meta: JSON that belongs to the checkpoints (encoder fingerprint, configuration).
      guard: against retrieval collapse; the metrics then hold what the step read as "doc_ids".
      frozen_step: takes the place of train_step once the guard has frozen the retriever.
    """

    name: str
    directory: pathlib.Path
    steps: int
    log_every: int
    save_every: int
    make_state: Callable[[], TrainState]
    abstract_state: TrainState
    train_step: Callable
    source: BatchSource
    meta: Mapping[str, Any]
    eval_every: int = 0
    evaluate: Callable[[Any], Mapping[str, float]] | None = None
    keep: int = 1
    tensorboard: bool = True
    guard: CollapseGuard | None = None
    frozen_step: Callable | None = None


class _Watch:
    """Reads the metrics of a step while a later one runs; stops at NaN and infinity."""

    def __init__(
        self, stage: Stage, writer: MetricWriter, progress: Progress, checkpointer: Checkpointer
    ):
        self.stage, self.writer, self.progress = stage, writer, progress
        self.checkpointer = checkpointer
        self.waiting: tuple[int, Any] | None = None
        self.window: list[dict[str, float]] = []

    def note(self, step: int, metrics: Any) -> None:
        """Takes the device metrics of `step` and settles those of the step before."""
        self.settle()
        self.waiting = (step, metrics)

    def settle(self) -> None:
        if self.waiting is None:
            return
        (step, device_metrics), self.waiting = self.waiting, None
        doc_ids = device_metrics.pop("doc_ids", None)
        metrics = {name: float(np.asarray(value)) for name, value in device_metrics.items()}
        self.window.append(metrics)
        done = step + 1
        if self.stage.guard is not None:
            self._guard(done, doc_ids)
        if not all(math.isfinite(value) for value in metrics.values()):
            bad = [name for name, value in metrics.items() if not math.isfinite(value)]
            raise _diverged(
                self.stage, self.checkpointer, step,
                f"{', '.join(bad)} became NaN or infinite in step {step} (steps "
                f"{done - len(self.window)} to {step} were being averaged)")
        if done % self.stage.log_every == 0 or done == self.stage.steps:
            means = {name: float(np.mean([m[name] for m in self.window])) for name in metrics}
            self.writer.write(done, {f"{self.stage.name}/{n}": v for n, v in means.items()})
            self.progress.update(done, {"nll": means["nll"]})
            self.window = []
        else:
            self.progress.update(done, {"nll": metrics["nll"]})

    def _guard(self, done: int, doc_ids: jax.Array) -> None:
        guard = self.stage.guard
        before, effective = guard.collapsed_at, guard.note(done, doc_ids)
        if effective is not None:
            self.writer.write(done, {f"{self.stage.name}/effective_passages": effective})
        if guard.collapsed_at != before and guard.action in _SAID and hosts.leads():
            print(f"{self.stage.name}: {guard}; {_SAID[guard.action]}", flush=True)


def _diverged(stage: Stage, checkpointer: Checkpointer, step: int, what: str) -> TrainingError:
    """The error for numbers that are finite no more, noted in the stage's folder."""
    section = f"{stage.name}_warmup" if stage.name in ("retriever", "generator") else "train"
    last = checkpointer.latest_step()  # waits for a save under way
    if hosts.leads():
        workdir.stop(stage.directory, step, what, last)
    from_there = (f"the last good checkpoint is step {last} in {stage.directory}"
                  if last is not None else "no checkpoint was saved before")
    return TrainingError(
        f"{stage.name}: {what}; {from_there}. Run the same command with a lower "
        f"config.{section}.optimizer.learning_rate, or a longer warmup_steps: both may change now, "
        "and training goes on from there.")


@contextlib.contextmanager
def _stopped_by_numbers(watch: _Watch, step: int) -> Iterator[None]:
    """Retrieval and evaluation may meet what is not finite before the metrics are read."""
    try:
        yield
    except NotFiniteError as error:
        met = str(error)
    else:
        return
    watch.settle()
    raise _diverged(watch.stage, watch.checkpointer, step, met)


_SAID = {
    "freeze": "the retriever trains no further",
    "warn": "training goes on, but the passages may no longer help; lower "
    "config.train.query_encoder_rate or the learning rate, or set config.train.collapse_guard to "
    "freeze or stop",
}


def run_stage(stage: Stage) -> TrainState:
    """Runs a stage to its end, or takes it up where its last checkpoint stands.

    Returns:
      The state after the last step.

    Raises:
      Preempted: SIGTERM or Ctrl-C; the state has been saved and the same command goes on.
      TrainingError: a loss became NaN or infinite, or the guard stops at a retrieval collapse.
    """
    best = BEST_METRIC if stage.evaluate else ()
    with (
        Checkpointer(stage.directory, keep=stage.keep, best_metric=best) as checkpointer,
        MetricWriter(
            stage.directory, tensorboard=stage.tensorboard, active=hosts.leads()) as writer,
        PreemptionGuard() as guard,
    ):
        state, start = _resume(stage, checkpointer, writer)
        if start >= stage.steps:
            if not stage.steps:  # nothing to train, but something to answer with
                _save(stage, checkpointer, 0, state, None)
            return state
        with Progress(
            stage.steps, start, stage.name, stage.log_every, active=hosts.leads()) as progress:
            watch = _Watch(stage, writer, progress, checkpointer)
            for step in range(start, stage.steps):
                if any(hosts.exchange(guard.requested)):  # all stop at the same step
                    watch.settle()
                    _save(stage, checkpointer, step, state, None)
                    raise Preempted(f"{stage.name}: stopped at step {step}, checkpoint saved")
                take = _step_now(stage, checkpointer, watch, step, state)
                with _stopped_by_numbers(watch, step):
                    ahead = step + stage.source.lookahead
                    if ahead < stage.steps:
                        stage.source.begin(ahead, state.params)
                    batch = stage.source.finish(step)
                    state, metrics = take(state, batch, np.int32(step))
                    watch.note(step, metrics)
                    _after_step(stage, checkpointer, writer, watch, step + 1, state)
        if any(hosts.exchange(guard.requested)):
            raise Preempted(f"{stage.name}: stopped after its last step, checkpoint saved")
    return state


def _step_now(
    stage: Stage, checkpointer: Checkpointer, watch: _Watch, done: int, state: TrainState
) -> Callable:
    """The step to take after so many, which depends on what all of these have retrieved."""
    guard = stage.guard
    if guard is None:
        return stage.train_step
    if guard.due(done):
        watch.settle()
    if guard.collapsed_at is None or guard.action == "warn":
        return stage.train_step
    if guard.action == "freeze":
        return stage.frozen_step
    _save(stage, checkpointer, done, state, None)
    raise TrainingError(
        f"{stage.name}: {guard}; stopped, with checkpoint {done} in {stage.directory}. To go on "
        "from there, run the same command with config.train.collapse_guard=freeze or off; to "
        "begin again, name another --workdir and a lower config.train.query_encoder_rate or "
        "learning rate, and look whether the passages help to answer at all."
    )


def _after_step(
    stage: Stage,
    checkpointer: Checkpointer,
    writer: MetricWriter,
    watch: _Watch,
    done: int,
    state: TrainState,
) -> None:
    last = done == stage.steps
    metrics = None
    if stage.evaluate and stage.eval_every and (done % stage.eval_every == 0 or last):
        watch.settle()
        metrics = dict(stage.evaluate(state.params))
        writer.write(done, {f"dev/{name}": value for name, value in metrics.items()})
    if metrics is not None or done % stage.save_every == 0 or last:
        watch.settle()
        _save(stage, checkpointer, done, state, metrics)


def _save(
    stage: Stage,
    checkpointer: Checkpointer,
    step: int,
    state: TrainState,
    metrics: Mapping[str, float] | None,
) -> None:
    if step in checkpointer.all_steps():
        return
    if bad := tree_record.non_finite(state.params):
        raise _diverged(stage, checkpointer, step,
                        f"parameter {bad[0]} is NaN or infinite after {step} steps")
    meta = {**stage.meta, "pending": stage.source.pending()}
    if stage.guard is not None:
        meta["guard"] = stage.guard.state()
    checkpointer.save(step, state.params, state.opt_state, meta, metrics)


def _resume(
    stage: Stage, checkpointer: Checkpointer, writer: MetricWriter
) -> tuple[TrainState, int]:
    abstract = stage.abstract_state
    found = checkpointer.restore_latest(abstract.params, abstract.opt_state)
    if found is None:
        writer.truncate_after(0)
        state, start, pending = stage.make_state(), 0, {}
    else:
        start, params, opt_state, meta = found
        writer.truncate_after(start)
        state, pending = TrainState(params, opt_state), meta["pending"]
        if stage.guard is not None and "guard" in meta:  # not if it was off until now
            stage.guard.restore(meta["guard"])
    stage.source.restore(pending)
    if not pending:
        for step in range(start, min(start + stage.source.lookahead, stage.steps)):
            stage.source.begin(step, state.params)
    return state, start
