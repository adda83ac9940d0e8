"""A server for the tests: the smallest model, with everything compiled."""

import contextlib
import json
import random
import threading
from collections.abc import Iterator

from starlette.testclient import TestClient

from rag_jax.serving.app import Server
from rag_jax.serving.indexes import Indexes
from rag_jax.serving.settings import Settings
from rag_jax.training.opened import Rag

TOKEN = {"Authorization": "Bearer change"}
QUESTIONS = ["Who is the President of Peru?", "What is the capital of Japan?", "Who?",
             "What do people in Kuwait pay with, and since when, and why do they?", "Is Lima big?"]
SIZES = (1, 4)


@contextlib.contextmanager
def client(rag: Rag, **settings) -> Iterator[TestClient]:
    """A client of a server that is ready; `client.server` is the server."""
    given = Settings(**{"model": rag.run, "memory_token": "change", "batch_sizes": SIZES,
                        **settings})
    started = threading.Event()
    server = Server(Indexes(rag, given), given, started=lambda failure: started.set())
    with TestClient(server.app, base_url="http://localhost") as asking:
        assert asking.get("/health").status_code == 200
        started.wait(300)
        ready = asking.get("/ready").json()
        assert server.worker.failure is None and ready["ready"]
        assert ready["compiled"] == ready["programs"] > 0
        asking.server = server
        yield asking


def chat(question: str, **fields) -> dict:
    """A request of OpenAI's clients."""
    return {"model": "rag_token", "messages": [{"role": "user", "content": question}], **fields}


def events(text: str) -> list[dict]:
    """The chunks of a stream, which must end with [DONE]."""
    *chunks, last = text.removesuffix("\n\n").split("\n\n")
    assert last == "data: [DONE]"
    return [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]


ROUTES = ("/answer", "/retrieve", "/v1/chat/completions", "/v1/embeddings", "/v1/rerank")
FIELDS = ("question", "k", "n", "temperature", "seed", "stop", "max_tokens", "memory", "model",
          "messages", "input", "query", "documents", "stream", "logprobs", "stream_options")
VALUES = (None, True, -1, 0.5, 10**30, 1e300, "", "\x00", "x" * 5000, [], [[]], {}, {"a": 1},
          ["a", 1], [{"role": "user"}], [{"role": "x", "content": "y"}], "../..", float("inf"))


def malformed(draw: random.Random) -> tuple[str, bytes]:
    """A route and a body that is no request: of wrong fields, or a damaged one."""
    body = {name: draw.choice(VALUES) for name in draw.sample(FIELDS, draw.randint(0, 6))}
    content = json.dumps({**body, "nosuch": 0}).encode()
    if draw.random() < 0.3:
        at = draw.randrange(len(content))
        content = content[:at] + bytes([draw.randrange(256)]) + content[at + 1:]
    return draw.choice(ROUTES), content[:draw.choice((None, None, draw.randrange(len(content))))]
