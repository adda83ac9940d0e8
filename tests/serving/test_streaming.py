"""A stream shows an answer while it is decoded: the same one, for as long as somebody looks."""

import concurrent.futures
import dataclasses
import functools
import json
import logging
import socket
import threading
import time

import anyio
import httpx2
import numpy as np
import pytest
import uvicorn

import rag_jax
from tests.serving.served import QUESTIONS, TOKEN, chat, client, events

ASK, LEAST = QUESTIONS[0], 5


@pytest.fixture(scope="module")
def rag(uninterrupted, one_device):
    return rag_jax.load(uninterrupted, config={"eval.num_beams": 1, "eval.min_length": LEAST})


@pytest.fixture(scope="module")
def asking(rag):
    """Nothing is compiled while it is asked."""
    with client(rag) as asking:
        before = asking.get("/metrics").text
        yield asking
        assert compilations(asking.get("/metrics").text) == compilations(before)


def compilations(text):
    return [line for line in text.splitlines() if line.startswith("rag_jax:compilations_total")]


class Stream:
    """A request of its own thread whose client sees every event as it comes, and may leave."""

    def __init__(self, asking, **fields):
        body, given = json.dumps(chat(**{"question": ASK, "stream": True, **fields})).encode(), []
        self.sent, self._gone, self._changed = b"", threading.Event(), threading.Condition()
        self.status = None

        async def receive():
            if not given:
                given.append(body)
                return {"type": "http.request", "body": body}
            while not self._gone.is_set():
                await anyio.sleep(0.001)
            return {"type": "http.disconnect"}

        async def send(message):
            with self._changed:
                self.status = message.get("status", self.status)
                self.sent += message.get("body", b"")
                self._changed.notify_all()

        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions",
                 "raw_path": b"/v1/chat/completions", "query_string": b"", "root_path": "",
                 "scheme": "http", "http_version": "1.1", "asgi": {"spec_version": "2.3"},
                 "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")]}
        self._thread = threading.Thread(target=asking.portal.call, args=(
            asking.server.app, scope, receive, send))
        self._thread.start()

    def seen(self):
        """The text so far."""
        text = self.sent.decode()
        chunks = [json.loads(each.removeprefix("data: ")) for each in text.split("\n\n")[:-1]
                  if each != "data: [DONE]"]
        return "".join(choice["delta"].get("content", "") for chunk in chunks
                       for choice in chunk.get("choices", []))

    def wait(self):
        """Until there is some text."""
        with self._changed:
            assert self._changed.wait_for(self.seen, 60)
        return self.seen()

    def leave(self):
        self._gone.set()
        self._thread.join(60)

    def whole(self):
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self.sent.decode()


@pytest.fixture
def steps(asking, monkeypatch):
    """A gate before every token but the first of an answer, and how many have passed; a gate with
    a `fault` raises it."""
    gate, passed = threading.Event(), []
    gate.fault = None
    gate.set()

    def waits(go_on, *given):
        assert gate.wait(60)
        if gate.fault:
            raise gate.fault
        passed.append(1)
        return go_on(*given)

    for answerer in asking.server.indexes.current._answerers.values():
        monkeypatch.setattr(answerer, "_go_on", functools.partial(waits, answerer._go_on))
    yield gate, passed
    gate.set()


def pieces(text, index=0):
    """The choice's text in pieces, its tokens with their log p, and its last delta."""
    own = [choice for chunk in events(text) for choice in chunk["choices"]
           if choice["index"] == index]
    tokens = [token for choice in own for token in (choice["logprobs"] or {"content": []})[
        "content"]]
    assert own[0]["delta"]["role"] == "assistant"
    return [choice["delta"].get("content", "") for choice in own[1:-1]], tokens, own[-1]


@pytest.mark.parametrize("how", [
    {}, {"max_tokens": 3}, {"max_tokens": 1}, {"temperature": 1, "seed": 5, "n": 2}],
    ids=["greedy", "three tokens", "one", "samples"])
def test_the_pieces_are_those_of_the_answer_at_once(asking, steps, how):
    """Other tokens, other probabilities, or letters lost between two pieces."""
    for question in QUESTIONS[:3]:
        body = chat(question, logprobs=True, **how)
        whole = asking.post("/v1/chat/completions", json=body).json()
        assert not steps[1], "nobody looks, and the answer comes at once"
        done = asking.post("/v1/chat/completions", json={**body, "stream": True})
        for choice in whole["choices"]:
            texts, tokens, last = pieces(done.text, choice["index"])
            message = choice["message"]
            assert "".join(texts) == message["content"]
            assert tokens == choice["logprobs"]["content"]
            assert last["delta"] == {name: message[name] for name in ("annotations", "evidence")}
            assert last["finish_reason"] == choice["finish_reason"]
        assert len(steps[1]) >= LEAST - 1
        steps[1].clear()


def test_a_stop_text_is_never_shown(asking):
    whole = asking.post("/v1/chat/completions", json=chat(ASK)).json()
    text = whole["choices"][0]["message"]["content"]
    for begin in range(1, len(text) - 1):
        for stop in (text[begin : begin + 2], text[begin:]):
            done = asking.post("/v1/chat/completions", json=chat(ASK, stop=stop, stream=True))
            texts, _, last = pieces(done.text)
            assert "".join(texts) == text[:text.find(stop)] and last["finish_reason"] == "stop"


def test_the_first_piece_comes_before_the_second_token_is_decoded(asking, steps):
    gate, passed = steps
    gate.clear()
    stream = Stream(asking)
    first = stream.wait()
    assert first and not passed and "evidence" not in stream.sent.decode()
    gate.set()
    assert "".join(pieces(stream.whole())[0]).startswith(first) and len(passed) >= LEAST - 1


def test_streams_are_joined_with_what_is_asked_at_once(asking, monkeypatch):
    """One batch, and each gets its own."""
    alone = [asking.post("/v1/chat/completions", json=chat(question)).json()["choices"][0]
             for question in QUESTIONS[:4]]
    index, sizes, worker = asking.server.indexes.current, [], asking.server.worker
    run, gate, entered = index.run, threading.Event(), threading.Event()
    monkeypatch.setattr(index, "run", lambda program, given: (
        entered.set(), gate.wait(60), sizes.append(len(given)), run(program, given))[-1])
    busy = Stream(asking)
    assert entered.wait(60)
    found = {}
    plain = [threading.Thread(target=lambda question=question: found.update({
        question: asking.post("/v1/chat/completions", json=chat(question)).json()}))
        for question in QUESTIONS[:2]]
    with worker._changed:
        for thread in plain:
            thread.start()
        streams = [Stream(asking, question=question) for question in QUESTIONS[2:4]]
        assert worker._changed.wait_for(lambda: worker.waiting == 4, 60)
    gate.set()
    for thread in plain:
        thread.join()
    busy.whole()
    joined = [found[question]["choices"][0]["message"] for question in QUESTIONS[:2]]
    for stream in streams:
        texts, _, last = pieces(stream.whole())
        joined.append({"content": "".join(texts), **last["delta"]})
    assert sizes == [1, 4]
    for one, other in zip(alone, joined, strict=True):
        assert one["message"]["content"] == other["content"]
        np.testing.assert_allclose(one["message"]["evidence"]["log_prob"],
                                   other["evidence"]["log_prob"], atol=1e-5)


def test_what_still_runs_when_the_grace_is_over_is_told(asking, steps, caplog):
    """An empty answer with status 499, a stream that was cut where an answer looks whole, and a
    page of the log for each."""
    async def app(scope, receive, send):
        if scope["type"] != "lifespan":
            return await asking.server.app(scope, receive, send)
        for state in ("startup", "shutdown"):
            await receive()
            while state == "shutdown" and web.server_state.tasks:
                await anyio.sleep(0.001)
            await send({"type": f"lifespan.{state}.complete"})

    gate, _ = steps
    gate.clear()
    listening = socket.create_server(("127.0.0.1", 0))
    web = uvicorn.Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=0))
    log = logging.getLogger("uvicorn.error")
    log.addHandler(caplog.handler)
    log.setLevel("ERROR")
    running = threading.Thread(target=web.run, kwargs={"sockets": [listening]})
    running.start()
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    with httpx2.stream("POST", f"{url}/v1/chat/completions", timeout=60,
                       json=chat(ASK, stream=True)) as stream:
        lines = stream.iter_lines()
        assert "chat.completion.chunk" in next(lines)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            plain = pool.submit(httpx2.post, f"{url}/answer", json={"question": ASK}, timeout=60)
            while not asking.server.worker.waiting:
                time.sleep(0.001)
            web.should_exit = True
            told = plain.result(60)
        *_, last = filter(None, lines)
    running.join(60)
    log.removeHandler(caplog.handler)
    assert [each.getMessage() for each in caplog.records if each.exc_info] == []
    assert told.status_code == 503 and "is ending" in told.json()["error"]["message"]
    assert "is ending" in json.loads(last.removeprefix("data: "))["error"]["message"]
    gate.set()
    idle(asking)


def idle(asking):
    """Waits until nothing runs."""
    while asking.server.worker.running or asking.server.worker.waiting:
        time.sleep(0.001)


def test_what_a_client_looked_at_that_has_left_is_not_decoded_to_its_end(asking, steps, caplog):
    gate, passed = steps
    gate.clear()
    stream = Stream(asking)
    assert stream.wait()
    stream.leave()
    gate.set()
    idle(asking)
    assert len(passed) <= 1 < LEAST - 2 and not caplog.records, "but for a token that was begun"
    assert asking.post("/v1/chat/completions", json=chat(ASK, stream=True)).status_code == 200


def test_one_that_has_left_ends_no_other(asking, steps):
    gate, passed = steps
    whole = asking.post("/v1/chat/completions", json=chat(ASK)).json()["choices"][0]["message"]
    gate.clear()
    busy = Stream(asking)
    assert busy.wait()
    worker = asking.server.worker
    with worker._changed:
        stays, leaves = Stream(asking), Stream(asking)
        assert worker._changed.wait_for(lambda: worker.waiting == 2, 60)
    gate.set()
    leaves.wait()
    leaves.leave()
    texts, _, last = pieces(stays.whole())
    assert "".join(texts) == whole["content"] and "".join(pieces(busy.whole())[0]) == whole[
        "content"]
    np.testing.assert_allclose(last["delta"]["evidence"]["token_log_probs"],
                               whole["evidence"]["token_log_probs"], atol=1e-5)


def test_a_stream_keeps_the_memory_with_which_it_began(asking, steps):
    gate, _ = steps
    whole = asking.post("/v1/chat/completions", json=chat(ASK)).json()
    gate.clear()
    stream = Stream(asking)
    assert stream.wait()
    swapped = threading.Thread(target=lambda: asking.post(
        "/memory", json={"swap": "2016"}, headers=TOKEN))
    swapped.start()
    swapped.join(60)
    assert asking.get("/memory").json()["current"] == "2016"
    gate.set()
    text = stream.whole()
    assert {chunk["system_fingerprint"] for chunk in events(text)} == {whole["system_fingerprint"]}
    assert pieces(text)[2]["delta"]["evidence"] == whole["choices"][0]["message"]["evidence"]
    assert asking.post("/memory", json={"swap": "2018"}, headers=TOKEN).status_code == 200


@pytest.mark.parametrize("how", ["late", "fault"])
def test_what_fails_in_the_middle_of_a_stream_is_said_in_it(asking, steps, monkeypatch, how):
    """A stream that was cut where an answer looks whole."""
    gate, _ = steps
    if how == "late":
        monkeypatch.setattr(asking.server, "settings", dataclasses.replace(
            asking.server.settings, timeout=0.5))
    gate.clear()
    stream = Stream(asking)
    assert stream.wait() and stream.status == 200
    if how == "fault":
        gate.fault = MemoryError("no room")
        gate.set()
    *_, last = stream.whole().removesuffix("\n\n").split("\n\n")
    told = json.loads(last.removeprefix("data: "))["error"]
    assert told["type"] == "server_error"
    assert ("0.5 seconds" if how == "late" else "defect of the server") in told["message"]
    gate.fault = None
    gate.set()
    idle(asking)
    monkeypatch.undo()
    assert asking.post("/v1/chat/completions", json=chat(ASK, stream=True)).status_code == 200
