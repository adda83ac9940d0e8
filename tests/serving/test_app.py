"""The routes: what OpenAI's clients send is answered with what the Python API answers."""

import asyncio
import base64
import concurrent.futures
import contextlib
import dataclasses
import errno
import gc
import json
import os
import pathlib
import random
import re
import shutil
import socket
import threading
import types
import weakref
from urllib.parse import quote

import httpx2
import jax.monitoring
import numpy as np
import pytest
import uvicorn
from starlette.testclient import TestClient

import rag_jax
from rag_jax import hosts
from rag_jax.cli import flags, serve
from rag_jax.config import Config, ConfigError, overrides
from rag_jax.data.text import Tokenizer
from rag_jax.retrieval import hybrid
from rag_jax.serving import app, failures, indexes
from rag_jax.serving.events import Events
from rag_jax.serving.failures import _without_paths
from rag_jax.serving.fields import Refused
from rag_jax.serving.indexes import OpenIndex, Question
from rag_jax.serving.settings import Settings
from rag_jax.serving.sockets import bound, listen
from tests.serving.served import QUESTIONS, TOKEN, chat, client, events, malformed

ASK = QUESTIONS[0]


@pytest.fixture(scope="module")
def rag(uninterrupted, one_device):
    return rag_jax.load(uninterrupted, config={"eval.num_beams": 2})


@pytest.fixture(scope="module")
def compiled():
    """A list that grows with every compilation."""
    events = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, secs, **_: events.append(event) if "backend_compile" in event else None)
    return events


@pytest.fixture(scope="module")
def asking(rag, compiled):
    with client(rag) as asking:
        yield asking


@pytest.fixture(autouse=True)
def nothing_is_compiled(asking, compiled, request):
    """A program of a shape that the start has not met would stop all users for seconds."""
    before = len(compiled)
    yield
    if request.node.get_closest_marker("asks_python") is None:
        assert compiled[before:] == []


asks_python = pytest.mark.asks_python  # the oracle compiles, too
maps_are_told = pytest.mark.skipif(
    not pathlib.Path("/proc/self/maps").exists(),
    reason="only Linux tells which files a process has open or mapped, in /proc")


def held(asking, monkeypatch):
    """Batches wait: an event that one has begun, one that lets them go, and their sizes."""
    entered, gate, sizes = threading.Event(), threading.Event(), []
    index = asking.server.indexes.current
    run = index.run
    monkeypatch.setattr(index, "run", lambda program, given: (
        entered.set(), gate.wait(60), sizes.append(len(given)), run(program, given))[-1])
    return entered, gate, sizes


@asks_python
def test_a_chat_is_answered_as_python_answers(asking, rag):
    models = [each["id"] for each in asking.get("/v1/models").json()["data"]]
    assert models == ["rag_token", "rag_token-query", "rag_token-document"]
    assert asking.get(f"/v1/models/{models[1]}").json()["id"] == models[1]
    assert asking.get("/v1/models/gpt").status_code == 404
    assert "expected one of" in asking.get("/v1/models/a%0Ab").text
    assert asking.get("/v1/models/").json()["object"] == "list"
    done = asking.post("/v1/chat/completions", json=chat(ASK, logprobs=True, n=2)).json()
    answer, = rag.ask([ASK], num_return_sequences=2)
    assert [choice["message"]["content"] for choice in done["choices"]] == [
        answer.text, answer.alternatives[0].text]
    first, second = (choice["message"]["evidence"] for choice in done["choices"])
    for evidence, oracle in ((first, answer), (second, answer.alternatives[0])):
        np.testing.assert_allclose(evidence["log_prob"], oracle.log_prob, atol=1e-5)
        np.testing.assert_allclose(evidence["token_posterior"], oracle.token_posterior, atol=1e-6)
        np.testing.assert_allclose([p["posterior"] for p in evidence["passages"]],
                                   oracle.posterior, atol=1e-6)
    assert [(p["id"], p["title"], p["text"]) for p in first["passages"]] == [
        p[:3] for p in answer.passages]
    np.testing.assert_allclose([p["prior"] for p in first["passages"]], answer.prior, atol=1e-6)
    tokens = done["choices"][0]["logprobs"]["content"]
    np.testing.assert_allclose([each["logprob"] for each in tokens],
                               answer.token_log_probs[:len(tokens)], atol=1e-5)
    assert done["usage"]["completion_tokens"] == sum(
        len(choice["logprobs"]["content"]) for choice in done["choices"])
    for citation, passage in zip(done["choices"][0]["message"]["annotations"], sorted(
            answer.passages, key=lambda each: -each.posterior), strict=True):
        cited = citation["url_citation"]
        assert citation["type"] == "url_citation" and cited["title"] == passage.title
        assert asking.get(cited["url"]).json()["text"] == passage.text


@asks_python
def test_samples_are_those_of_python_and_the_seed(asking, rag):
    """Samples of one request that were all the same, or that others' requests changed."""
    seeded = rag_jax.Rag(**{**vars(rag), "job": rag.job.__class__(**{
        **vars(rag.job), "config": overrides.replace(rag.config, {"seed": 7})})})
    oracle, warmer = (seeded.ask([ASK] * 3, sample=True, temperature=temperature, batch_size=4)
                      for temperature in (0.4, 1.0))
    assert [answer.text for answer in oracle] != [answer.text for answer in warmer]
    for _ in range(2):
        done = asking.post("/answer", json={
            "question": ASK, "n": 3, "temperature": 0.4, "seed": 7}).json()
        found = [done, *done["alternatives"]]
        assert [each["answer"] for each in found] == [answer.text for answer in oracle]
        np.testing.assert_allclose([each["log_prob"] for each in found],
                                   [answer.log_prob for answer in oracle], atol=1e-5)
    assert len({each["answer"] for each in found}) > 1


def test_a_stream_gives_the_same_answer_in_pieces(asking):
    body = chat(ASK, logprobs=True, n=2, temperature=1, seed=3)
    whole = asking.post("/v1/chat/completions", json=body).json()
    done = asking.post("/v1/chat/completions", json={
        **body, "stream": True, "stream_options": {"include_usage": True}})
    assert done.headers["content-type"].startswith("text/event-stream")
    *chunks, usage = events(done.text)
    assert usage["choices"] == [] and usage["usage"] == whole["usage"]
    for choice in whole["choices"]:
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(c["delta"].get("content", "") for c in own) == choice["message"]["content"]
        assert own[0]["delta"]["role"] == "assistant"
        assert own[-1]["finish_reason"] == choice["finish_reason"]
        for name in ("annotations", "evidence"):
            assert own[-1]["delta"][name] == choice["message"][name]
        tokens = [token for c in own for token in (c["logprobs"] or {"content": []})["content"]]
        assert tokens == choice["logprobs"]["content"]
    assert len({chunk["id"] for chunk in chunks}) == 1 and all(c["usage"] is None for c in chunks)


def test_answers_that_are_joined_are_those_of_single_requests(asking, monkeypatch):
    """A batch mixed up whose answer is whose, or its padding changed a probability."""
    def ask(question, found):
        found[question] = asking.post("/answer", json={"question": question}).json()

    alone, joined = {}, {}
    for question in QUESTIONS:
        ask(question, alone)
    worker, (entered, gate, sizes) = asking.server.worker, held(asking, monkeypatch)
    threads = [threading.Thread(target=ask, args=(question, joined)) for question in QUESTIONS]
    threads[0].start()
    assert entered.wait(60)
    with worker._changed:  # submitting notifies, and the worker is busy with the first
        for thread in threads[1:]:
            thread.start()
        assert worker._changed.wait_for(lambda: worker.waiting == 4, 60)
    gate.set()
    for thread in threads:
        thread.join()
    assert sizes == [1, 4]
    for question in QUESTIONS:
        assert joined[question]["answer"] == alone[question]["answer"]
        np.testing.assert_allclose(joined[question]["log_prob"], alone[question]["log_prob"],
                                   atol=1e-5)


@asks_python
def test_vectors_passages_and_ranks_are_those_of_python(asking, rag):
    texts = QUESTIONS[:3]
    plain, packed = (asking.post("/v1/embeddings", json={
        "model": "rag_token-query", "input": texts, "encoding_format": form}).json()["data"]
        for form in ("float", "base64"))
    vectors = np.array([each["embedding"] for each in plain], np.float32)
    np.testing.assert_array_equal(vectors, [
        np.frombuffer(base64.b64decode(each["embedding"]), "<f4") for each in packed])
    np.testing.assert_allclose(vectors, rag.embed_queries(texts), atol=1e-5)
    documents = asking.post("/v1/embeddings", json={
        "model": "rag_token-document", "input": texts}).json()
    counts = documents["usage"]
    assert counts["prompt_tokens"] == counts["total_tokens"] == sum(map(
        len, rag.job.prepared.retriever_tokenizer.encode(texts))) > 0
    documents = documents["data"]
    oracle = rag.embed_passages(texts)
    np.testing.assert_allclose([each["embedding"] for each in documents], oracle, atol=1e-5)
    for route in ("/v1/rerank", "/v2/rerank"):
        ranked = asking.post(route, json={
            "model": "rag_token", "query": ASK, "top_n": 2, "documents": texts, "priority": 0,
            "max_tokens_per_doc": 4096}).json()["results"]
        scores = rag.embed_queries(ASK)[0].astype(float) @ oracle.T
        p = np.exp(scores - scores.max())
        order = np.argsort(-p)[:2]
        assert [each["index"] for each in ranked] == order.tolist()
        np.testing.assert_allclose([each["relevance_score"] for each in ranked],
                                   (p / p.sum())[order], atol=1e-5)
        longest = rag.config.data.max_passage_length
        for field, value in (("max_tokens_per_doc", longest - 1), ("priority", 1)):
            refused = asking.post(route, json={
                "model": "rag_token", "query": ASK, "documents": texts, field: value})
            assert (refused.status_code, refused.json()["error"]["param"]) == (422, field)
    whole = "Lima is in Peru. " * 1_000  # of which the model reads the beginning
    equal = asking.post("/v2/rerank", json={
        "model": "rag_token", "query": ASK, "documents": [whole, whole[:4_000]]}).json()["results"]
    assert [each["relevance_score"] for each in equal] == pytest.approx([0.5, 0.5])
    for k in (1, 3):
        reply = asking.post("/retrieve", json={"question": ASK, "k": k}).json()
        found = reply["passages"]
        assert reply["matched"] is True
        oracle, = rag.retrieve(ASK, k)
        assert [each["id"] for each in found] == [each.id for each in oracle]
        np.testing.assert_allclose([each["prior"] for each in found],
                                   [each.prior for each in oracle], atol=1e-5)


@asks_python
def test_of_a_long_document_no_more_is_tokenized_than_may_be_read(asking, rag, monkeypatch):
    """Documents of a megabyte each kept all others waiting, and took gigabytes."""
    read, encode = [], Tokenizer.encode
    monkeypatch.setattr(Tokenizer, "encode",
                        lambda own, texts: read.extend(texts) or encode(own, texts))
    whole = "Lima is in Peru, " * 1_000 + "Lima"
    ranked, = asking.post("/v1/rerank", json={
        "model": "rag_token", "query": ASK, "return_documents": True,
        "documents": [{"title": whole, "text": whole}]}).json()["results"]
    assert ranked["document"]["text"] == whole
    assert max(map(len, read)) == 64 * rag.config.data.max_passage_length


def test_passages_that_hold_no_word_of_the_question_are_said_to_be_so(asking, monkeypatch):
    """The page showed them as found."""
    for matched in (True, False):
        monkeypatch.setattr(rag_jax.Rag, "matches", lambda rag, question, told=matched: told)
        choice, = asking.post("/v1/chat/completions", json=chat(ASK)).json()["choices"]
        assert choice["message"]["evidence"]["matched"] is matched
        assert asking.post("/answer", json={"question": ASK}).json()["matched"] is matched


@asks_python
def test_a_search_draws_nothing_where_the_configuration_draws(uninterrupted, one_device):
    """What was answered depended on which other questions were in the batch."""
    drawing = rag_jax.load(uninterrupted, config={"eval.sample": True, "eval.temperature": 2.0})
    searching = OpenIndex("2018", drawing, Settings("rag_token", batch_sizes=(4,)))
    first, second = searching.search([Question(ASK)] * 2)
    oracle, = rag_jax.load(uninterrupted).ask([ASK], num_beams=1)
    assert first.text == second.text == oracle.text
    np.testing.assert_allclose(first.log_prob, oracle.log_prob, atol=1e-5)


@asks_python
@pytest.mark.parametrize("where", ["host", "device"])
def test_k_passages_are_those_that_python_finds_with_this_k(
        uninterrupted, one_device, where, monkeypatch):
    """What a hybrid index finds with k=3 was cut from what it finds with 128."""
    monkeypatch.setattr(hybrid, "NOMINATED", 1)
    fields = {"retrieval.where": where} if where == "device" else {
        "retrieval.retriever": "hybrid", "retrieval.fusion": "reciprocal_rank"}
    rag = rag_jax.load(uninterrupted, config={**fields, "eval.k": 0})
    index = OpenIndex("2018", rag, Settings("rag_token", batch_sizes=(4,)))
    for k in (1, 2, 5):
        asked = list(zip(QUESTIONS, (k, 3, k, index.most), strict=False))
        for (question, k), found in zip(asked, index.retrieve(asked), strict=True):
            oracle, = rag.retrieve(question, k)
            assert [each.id for each in found] == [each.id for each in oracle]
            np.testing.assert_allclose([each.prior for each in found],
                                       [each.prior for each in oracle], atol=1e-5)


@asks_python
def test_vectors_have_one_width_and_an_unknown_model_is_told_first(asking, rag):
    """An unknown model was answered with 422 in place of 404 where another width was asked for."""
    retriever = rag.config.model.retriever
    width = retriever.projection or retriever.width
    for model, dimensions, status, told in (
            ("rag_token", width, 200, None), ("rag_token", width - 1, 422, "dimensions"),
            ("rag_token", True, 422, "dimensions"), ("unknown", width - 1, 404, "model")):
        response = asking.post("/v1/embeddings", json={
            "model": model, "input": ASK, "dimensions": dimensions})
        assert response.status_code == status
        assert response.json().get("error", {}).get("param") == told
    for tower in ("query", "document"):  # one named another field, and one embedded it
        told = asking.post("/v1/embeddings", json={
            "model": f"rag_token-{tower}", "input": [ASK, " \n", ""]})
        assert told.status_code == 422 and told.json()["error"]["param"] == "input"
        told = asking.post("/v1/embeddings", json={
            "model": f"rag_token-{tower}", "input": [ASK, " \n"]}).json()["error"]
        assert told["param"] == "input" and "not blank, as text 2 is" in told["message"]


@contextlib.contextmanager
def one_that_runs(asking, monkeypatch):
    """A request whose batch waits until it is let go; then it is answered, and nothing after it."""
    entered, gate, sizes = held(asking, monkeypatch)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        first = pool.submit(asking.post, "/answer", json={"question": ASK})
        assert entered.wait(60)
        try:
            yield gate
        finally:
            gate.set()
        assert first.result(60).status_code == 200
    assert asking.server.worker.waiting == 0 and sizes == [1]


def test_a_request_past_its_time_is_refused_and_costs_nothing(asking, monkeypatch):
    with one_that_runs(asking, monkeypatch):
        monkeypatch.setattr(asking.server, "settings", dataclasses.replace(
            asking.server.settings, timeout=0.01))
        done = asking.post("/answer", json={"question": "Late?"})
        assert done.status_code == 504 and "0.01 seconds" in done.json()["error"]["message"]
        assert asking.server.worker.waiting == 0


def test_what_a_client_asked_for_that_has_left_is_not_computed(asking, monkeypatch, caplog):
    waits, sent = threading.Event(), []
    parts = iter([{"type": "http.request", "body": b'{"question": "Gone?"}'}])

    async def receive():
        for part in parts:
            return part
        assert await asyncio.to_thread(waits.wait, 60)
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/answer", "raw_path": b"/answer",
             "query_string": b"", "root_path": "", "scheme": "http", "http_version": "1.1",
             "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")]}
    with one_that_runs(asking, monkeypatch):
        worker = asking.server.worker
        submit = worker.submit
        monkeypatch.setattr(worker, "submit", lambda *a: (submit(*a), waits.set())[0])
        asking.portal.call(asking.server.app, scope, receive, send)
        assert worker.waiting == 0
    assert sent[0]["status"] == 499 and not caplog.records


@pytest.mark.parametrize("given", ["0", "-1", "nan", "inf", "soon"])
def test_a_time_limit_is_seconds_above_0(given, capsys):
    with pytest.raises(SystemExit):
        serve.main([f"--timeout={given}"])
    assert "must be seconds, above 0" in capsys.readouterr().err


def test_a_port_that_is_taken_is_told_before_anything_is_read(monkeypatch):
    """uvicorn said so, in its own form, after all was compiled."""
    monkeypatch.setattr(flags, "asked_config", lambda options: Config())
    monkeypatch.setattr(rag_jax.api, "load", lambda *_, **__: pytest.fail("the model is read"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port={port}: nothing can listen there"):
            serve.main([f"--port={port}"])


@pytest.mark.parametrize("port", [-1, 65536, 70000])
def test_a_port_is_one_that_there_is(monkeypatch, port):
    """70000 was said to be ready, and 4464 listened."""
    monkeypatch.setattr(flags, "asked_config", lambda options: Config())
    with pytest.raises(ConfigError, match=f"--port={port}: must be 0 .* to 65535"):
        serve.main([f"--port={port}"])


@pytest.mark.parametrize("host", [".example.com", "a" * 64, "a..b"])
def test_a_host_that_is_no_name_is_told(monkeypatch, host):
    monkeypatch.setattr(flags, "asked_config", lambda options: Config())
    with pytest.raises(ConfigError, match=f"--host={host} .*nothing can listen there"):
        serve.main([f"--host={host}"])


def test_an_address_that_the_machine_lacks_leaves_the_others_of_its_name(monkeypatch):
    """localhost is ::1, too, in the hosts file of many a container without IPv6."""
    here, lacks = ("127.0.0.1", 0), ("203.0.113.1", 0)  # of TEST-NET-3, which nobody has
    found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", address) for address in (lacks, here)]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    listening, = bound("localhost", 0)
    with listening:
        assert listening.getsockname()[0] == "127.0.0.1"
    del found[1]
    with pytest.raises(ConfigError, match="nothing can listen there .*assign"):
        bound("localhost", 0)


def test_a_port_that_another_server_takes_meanwhile_is_told(monkeypatch):
    """Both bound it, and the second compiled everything before a bad file descriptor ended it."""
    with contextlib.ExitStack() as closing:
        first = closing.enter_context(bound("127.0.0.1", 0)[0])
        port = first.getsockname()[1]
        others = bound("127.0.0.1", port)
        assert listen([first]) == [first]
        with closing.enter_context(others[0]), pytest.raises(
                ConfigError, match=f"--host=127.0.0.1 --port={port}: nothing can listen"):
            listen(others)


def test_one_of_several_processes_serves_alone_where_it_is_told_so(monkeypatch):
    """"Start one on each host" was the advice to who had done that, under Slurm."""
    monkeypatch.setattr(flags, "asked_config", lambda options: Config())
    monkeypatch.setattr(rag_jax.api, "load", lambda *_, **__: pytest.fail("the model is read"))
    monkeypatch.setattr(hosts, "count", lambda: 2)
    with pytest.raises(ConfigError, match="one process; give each --num_processes=1"):
        serve.main(["--port=0"])


@pytest.fixture
def served(monkeypatch):
    """`serve` of a model that is not there, which ends once it has begun: the settings and the
    indexes that it was given."""
    given = []

    def run(web, sockets):
        assert sockets[0].getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        web.config.app(None)  # the start is over
        sockets[0].close()

    monkeypatch.setattr(flags, "asked_config", lambda options: Config())
    monkeypatch.setattr(rag_jax.api, "load", lambda *_, **__: types.SimpleNamespace(run="fid"))
    monkeypatch.setattr(indexes, "Indexes", lambda rag, settings: (
        given.append(settings), types.SimpleNamespace(open_also=given.append))[1])
    monkeypatch.setattr(app, "Server", lambda indexes, settings, compiled, started: (
        types.SimpleNamespace(app=started, to_compile=8,
                              worker=types.SimpleNamespace(failure=None, compiling=False))))
    monkeypatch.setattr(gc, "freeze", lambda: None)
    monkeypatch.setattr(uvicorn, "Config", lambda app, **_: types.SimpleNamespace(app=app))
    monkeypatch.setattr(uvicorn.Server, "run", run)
    return given


def test_a_free_port_is_the_one_that_is_printed(served, capsys):
    """Which port was listened at was said nowhere, and for minutes nothing at all."""
    serve.main(["--port=0"])
    first, *rest = capsys.readouterr().out.splitlines()
    assert first == "compiling 8 programs; the first time takes minutes"
    assert re.fullmatch(r"ready: http://127.0.0.1:[1-9]\d+", *rest)


def test_ctrl_c_ends_it_at_once_while_it_compiles(served, monkeypatch):
    """The interpreter ended under the thread that compiled, by a segmentation fault."""
    def interrupted(web, sockets):
        sockets[0].close()
        raise KeyboardInterrupt

    class Left(Exception):
        pass

    def leave(status):
        raise Left(status)

    monkeypatch.setattr(uvicorn.Server, "run", interrupted)
    monkeypatch.setattr(os, "_exit", leave)
    with pytest.raises(KeyboardInterrupt):
        serve.main(["--port=0"])
    monkeypatch.setattr(app, "Server", lambda *_: types.SimpleNamespace(
        app=None, to_compile=8, worker=types.SimpleNamespace(failure=None, compiling=True)))
    with pytest.raises(Left, match="130"):
        serve.main(["--port=0"])


def test_lists_of_flags_may_have_spaces_and_large_numbers(served):
    """" 2018" was no index; and for a batch of 512 max_waiting was too small, which has no flag."""
    serve.main(["--port=0", "--open=2016, 2018,", "--batch_sizes=1, 512"])
    settings, *opened = served
    assert opened == ["2016", "2018"] and settings.max_waiting == 512
    serve.main(["--port=0"])
    assert served[3].max_waiting == 256


@pytest.mark.parametrize("fields, told", [
    ({"eval.exact_nodes": 9}, "config.eval.exact_nodes=9: .* set --config.eval.exact_nodes=0$"),
    ({"eval.prefix_mib": 5, "model.reranker.pretrained": "x"},
     "config.eval.prefix_mib=5, config.model.reranker.pretrained='x': .* set "
     "--config.eval.prefix_mib=0 --config.model.reranker.pretrained=''$")])
def test_what_cannot_be_served_is_named_with_what_to_set(fields, told):
    """"Leave all three out" was the advice where the workdir's own configuration had one."""
    rag = types.SimpleNamespace(config=overrides.replace(Config(), fields))
    with pytest.raises(ConfigError, match=told):
        indexes.Indexes(rag, Settings("rag_token"))


def test_a_server_that_ends_answers_what_it_has_begun(asking, monkeypatch):
    """A stream that was cut where an answer looks whole."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    web = uvicorn.Server(uvicorn.Config(asking.server.app, port=port, lifespan="off",
                                        log_level="critical", timeout_graceful_shutdown=60))
    whole = asking.post("/v1/chat/completions", json=chat(ASK)).json()
    entered, gate, _ = held(asking, monkeypatch)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        running = pool.submit(web.run)
        while not web.started:
            assert not running.done()
        stream = pool.submit(httpx2.post, f"http://127.0.0.1:{port}/v1/chat/completions",
                             json=chat(ASK, stream=True), timeout=60)
        assert entered.wait(60)
        web.should_exit = True
        while web.servers and web.servers[0].is_serving():
            assert not running.done()
        with pytest.raises(httpx2.ConnectError):
            httpx2.get(f"http://127.0.0.1:{port}/health")
        gate.set()
        chunks = events(stream.result(60).text)
        running.result(60)
    assert "".join(choice["delta"].get("content", "") for chunk in chunks
                   for choice in chunk["choices"]) == whole["choices"][0]["message"]["content"]


BAD = [  # of /answer: what is sent, and what is said of it
    (b"{", 400, "not JSON"), (b'{"question": "\\ud800"}', 400, "surrogates"),
    (b"[" * 100_000, 400, "recursion"), (b"\xff", 400, "utf-8"), (b"[]", 422, "JSON object"),
    (b'{"question": NaN}', 400, "NaN"), ({}, 422, 'no "question"'),
    ({"question": " "}, 422, '"question" is'), ({"question": "a" * 4001}, 422, "4000"),
    ({"question": ASK, "n": 3}, 422, '"n" is 3'), ({"question": ASK, "n": True}, 422, '"n" is'),
    ({"question": ASK, "n": 99, "temperature": 1}, 422, "from 1 to 16"),
    (b'{"question": "Who?", "temperature": 1e999}', 422, '"temperature" is Infinity'),
    ({"question": ASK, "temprature": 1}, 422, "did you mean temperature?"),
    ({"question": ASK, "stop": [""]}, 422, '"stop" is'),
    ({"question": ASK, "memory": "../2016"}, 422, "expected one of 2018"),
    ({"question": ASK, "stop": [], "n": 3}, 422, '"n" is 3'),
]


@pytest.mark.parametrize("body, status, told", BAD, ids=range(len(BAD)))
def test_what_is_malformed_is_refused_with_a_reason(asking, body, status, told):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    done = asking.post("/answer", content=content, headers={"Content-Type": "application/json"})
    assert done.status_code == status and told in done.json()["error"]["message"], done.text


def test_limits_methods_and_models(asking):
    done = asking.post("/answer", content=b'{"question": "' + b"a" * 2**20 + b'"}',
                       headers={"Content-Type": "application/json"})
    assert done.status_code == 413
    assert asking.post("/answer", content=b"{}").status_code == 415
    assert asking.get("/answer").status_code == 405 and asking.get("/nosuch").status_code == 404
    assert 'rag_jax:http_requests_total{model_name="rag_token",status="405"}' in asking.get(
        "/metrics").text
    for host, status in (("evil.example", 400), ("127.0.0.1:x@evil.com", 400), ("[::1]:80", 200)):
        assert asking.get("/health", headers={"Host": host}).status_code == status, host
    unknown = asking.post("/v1/chat/completions", json=chat(ASK) | {"model": "gpt"})
    assert unknown.status_code == 404 and "rag_token" in unknown.json()["error"]["message"]
    for field in ({"tools": [{}]}, {"top_p": True}, {"top_p": 0.5}):
        assert asking.post("/v1/chat/completions", json=chat(ASK, **field)).status_code == 422
    assert asking.post("/answer", content=json.dumps({"question": ASK}), headers={
        "Content-Type": "Application/JSON; charset=utf-8"}).status_code == 200
    assert asking.post("/v1/chat/completions", json=chat(ASK, top_p=1, user="me", tools=[])
                       ).status_code == 200
    text = asking.get("/metrics").text
    for name in ("num_requests_running", "num_requests_waiting", "time_to_first_token_seconds_sum",
                 "e2e_request_latency_seconds_count", "generation_tokens_total"):
        assert f'vllm:{name}{{model_name="rag_token"' in text, name


def test_a_server_answers_to_the_address_that_it_prints():
    """It refused its own, where that was one of IPv6 in another spelling than ::1."""
    there = types.SimpleNamespace(current=types.SimpleNamespace(programs={}), open={})
    server = app.Server(there, Settings("rag_token", "0:0:0:0:0:0:0:1"))
    asking = TestClient(server.app)  # whose worker has not begun
    for host, status in (("[0:0:0:0:0:0:0:1]:8000", 200), ("evil.example", 400)):
        assert asking.get("/health", headers={"Host": host}).status_code == status


def test_a_method_that_is_not_allowed_is_told_those_that_are(asking):
    """HTTP requires it; and of two routes at one path, both are allowed."""
    for method, path, allowed in (("GET", "/answer", "POST"), ("PUT", "/memory", "GET, HEAD, POST"),
                                  ("POST", "/", "GET, HEAD")):
        refused = asking.request(method, path)
        assert refused.status_code == 405 and refused.headers["allow"] == allowed


def counted(asking, name):
    """A figure of /metrics by its labels, those that all have left out."""
    found = re.findall(rf'^{name}_total{{model_name="rag_token",?(.*?)}} (\S+)$',
                       asking.get("/metrics").text, re.M)
    return {labels: float(number) for labels, number in found}


def test_every_request_is_counted_by_its_status(asking):
    """Those that no route has seen were not: of another host, and to a path with a slash more."""
    asking.get("/metrics")
    before = counted(asking, "rag_jax:http_requests")
    asking.get("/memory", headers={"Host": "evil.example"})
    asking.post("/answer/", json={}, follow_redirects=False)
    for path in ("/health", "/ready", "/", "/page.js"):
        assert asking.get(path).status_code == 200
    after = counted(asking, "rag_jax:http_requests")
    more = {status: number - before.get(status, 0) for status, number in after.items()}
    assert {status: number for status, number in more.items() if number} == {
        'status="400"': 1, 'status="307"': 1, 'status="200"': 1}  # /metrics itself


def test_tokens_of_every_question_and_answer_are_counted(asking, rag):
    """Those of questions to /answer were not."""
    tokens = len(rag.job.prepared.generator_tokenizer.encode([ASK])[0])
    for path, body in (("/answer", {"question": ASK}), ("/v1/chat/completions", chat(ASK)),
                       ("/v1/chat/completions", chat(ASK, stream=True))):
        before = counted(asking, "vllm:prompt_tokens")[""]
        assert asking.post(path, json=body).status_code == 200
        assert counted(asking, "vllm:prompt_tokens")[""] - before == tokens > 0


def test_what_the_machine_refuses_is_no_defect(asking, monkeypatch, capsys):
    """A full disk was called a defect of the server; and clients learn no folder of it."""
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/srv/secret/versions/2")

    monkeypatch.setattr(asking.server.indexes, "_edit", full)
    done = asking.post("/memory", json={"delete": ["x"]}, headers=TOKEN)
    assert done.status_code == 503
    assert done.json()["error"]["message"] == "the server's machine: No space left on device"
    told = capsys.readouterr().err
    assert "/srv/secret/versions/2" in told and "Traceback" not in told


def test_an_event_is_one_line_to_whoever_reads_lines():
    """U+2028 and U+0085, which PDFs have, end a line of text: half of the JSON was read."""
    async def chunks():
        yield {"text": "b\u0085"}
        raise ValueError

    async def sent():
        response = Events({"text": "a\u2028"}, chunks(), lambda _: failures.response("\u2029", 500))
        return "".join([event async for event in response.body_iterator])

    texts = [json.loads(line.removeprefix("data: ")) for line in asyncio.run(sent()).splitlines()
             if line]
    assert texts[:2] == [{"text": "a\u2028"}, {"text": "b\u0085"}]
    assert texts[2]["error"]["message"] == "\u2029" and len(texts) == 3


@asks_python
def test_an_empty_list_of_a_change_counts_as_absent(asking, rag):
    new = {"id": "new", "title": "", "text": "A leafhopper."}
    for change in ({"add": [new], "delete": []}, {"add": [], "delete": ["new"]}):
        done = asking.post("/memory", json=change, headers=TOKEN)
        assert done.status_code == 200, done.text
    for change in ({"add": [], "delete": []}, {"swap": "2018", "delete": ["new"]}):
        refused = asking.post("/memory", json=change, headers=TOKEN)
        assert refused.status_code == 422 and "alone" in refused.json()["error"]["message"]


def test_random_requests_are_all_refused_with_a_reason(asking):
    """A malformed request that is a defect (5xx) hides a hole."""
    draw = random.Random(0)
    for _ in range(100):
        route, body = malformed(draw)
        done = asking.post(route, content=body, headers={"Content-Type": "application/json"})
        assert 400 <= done.status_code < 500 and done.json()["error"]["message"], (body, done.text)


def files_of(folder):
    """How many files below a folder this process has open or mapped."""
    opened = [os.readlink(f"/proc/self/fd/{each}") for each in os.listdir("/proc/self/fd")
              if os.path.lexists(f"/proc/self/fd/{each}")]
    mapped = pathlib.Path("/proc/self/maps").read_text().splitlines()
    return sum(str(folder) in each for each in (*opened, *mapped))


@asks_python
@maps_are_told
def test_an_edited_index_is_let_go(asking, rag, monkeypatch):
    """Each version stayed open for ever, at 17 files, until no edit could open another one; and an
    edit was made in the index that was current when its turn came."""
    new, folder = {"id": "new", "title": "", "text": "A leafhopper."}, rag.job.workdir / "indexes"
    gc.collect()
    gc.disable()  # what refers to itself stays, as it does behind `gc.freeze`
    monkeypatch.setattr(gc, "collect", lambda: 0)
    try:
        counts, versions = [], []
        for change in [{"add": [new], "memory": "2018"}, {"delete": ["new"]}] * 3:
            assert asking.post("/memory", json=change, headers=TOKEN).status_code == 200
            versions.append(asking.post("/answer", json={"question": ASK}).json()["version"])
            counts.append(files_of(folder))
    finally:
        gc.enable()
    assert counts[2:4] == counts[4:], counts
    assert len(set(versions)) > 1 and all(each.startswith("2018:") for each in versions)
    other = asking.post("/memory", json={"add": [new], "memory": "2014"}, headers=TOKEN)
    assert other.status_code == 422 and "expected one of 2018" in other.json()["error"]["message"]


@asks_python
@maps_are_told
def test_a_refused_edit_is_let_go(asking, rag, monkeypatch):
    """Each refusal left an open index behind, which its error's traceback held."""
    gc.collect()
    gc.disable()
    monkeypatch.setattr(gc, "collect", lambda: 0)
    try:
        counts = []
        for _ in range(4):
            done = asking.post("/memory", json={"delete": ["nosuch"]}, headers=TOKEN)
            assert done.status_code == 422
            asking.server.indexes._changes.submit(int).result(60)  # the thread has let the edit go
            counts.append(files_of(rag.job.workdir / "indexes"))
    finally:
        gc.enable()
    assert counts[1] == counts[3], counts


@asks_python
@pytest.mark.parametrize("change", [{"delete": ["nosuch"]}, {"swap": "2018"}], ids=["edit", "swap"])
def test_what_refers_to_itself_goes_with_the_next_change(asking, change):
    """Versions that are kept by a cycle stayed: behind `gc.freeze`, a collection hardly comes."""
    itself = type("Loop", (), {})()
    itself.itself, kept = itself, weakref.ref(itself)
    gc.disable()
    try:
        del itself
        asking.post("/memory", json=change, headers=TOKEN)
        assert kept() is None
    finally:
        gc.enable()


@asks_python
def test_indexes_are_swapped_and_edited_by_who_knows_the_token(asking, rag):
    """What hides the server's folders left of an id its last part, '2018capital'."""
    for headers, told in ((None, "a token is needed"),
                          ({"Authorization": "Bearer x"}, "another token is needed")):
        refused = asking.post("/memory", json={"swap": "2016"}, headers=headers)
        assert refused.status_code == 401 and refused.json()["error"]["message"].startswith(told)
    refused = asking.post("/memory", json={"swap": "../../x/2016"}, headers=TOKEN)
    assert refused.status_code == 422 and "'../../x/2016'" in refused.json()["error"]["message"]
    there = asking.get("/memory").json()
    assert there["there"] == ["2016", "2018"] and there["open"] == ["2018"]
    assert asking.post("/memory", json={"swap": "2016"}, headers=TOKEN).json()["current"] == "2016"
    assert asking.server.indexes.current._answerers, "compiled before anybody is answered from it"
    found = asking.post("/answer", json={"question": ASK}).json()
    assert found["memory"] == "2016" and all(
        each["id"].startswith("2016/") for each in found["passages"])
    named = asking.post("/answer", json={"question": ASK, "memory": "2018"}).json()
    assert named["memory"] == "2018" and all(
        each["id"].startswith("2018/") for each in named["passages"])
    new = {"id": "new", "title": "<script>", "text": "A zyzzogeton is a leafhopper."}
    done = asking.post("/memory", json={"add": [new]}, headers=TOKEN)
    assert done.status_code == 200, done.text
    again = asking.post("/memory", json={"add": [new]}, headers=TOKEN)
    assert again.status_code == 422 and "/" not in again.json()["error"]["message"]
    assert asking.get("/passages/2016/new").json()["title"] == "<script>"
    assert asking.post("/memory", json={"delete": ["new"]}, headers=TOKEN).status_code == 200
    assert asking.get("/passages/2016/new").status_code == 404
    for name in ("/wiki/Paris", "/wiki/Rome"):
        added = {"id": name, "title": "", "text": "A leafhopper."}
        assert asking.post("/memory", json={"add": [added]}, headers=TOKEN).status_code == 200
    again = asking.post("/memory", json={"add": [added]}, headers=TOKEN).json()["error"]
    assert again["message"].startswith("2016: has a passage '/wiki/Rome'; to replace it")
    far = asking.post("/memory", json={"delete": ["/wiki/Pariss"]}, headers=TOKEN).json()["error"]
    assert "the id '/wiki/Pariss'; near matches are ['/wiki/Paris'," in far["message"]
    known = rag.index.passages[0].id.replace("2018/", "2016/")
    refused = asking.post("/memory", json={"delete": [f"{known}y"]}, headers=TOKEN)
    told = refused.json()["error"]["message"]
    assert refused.status_code == 422 and f"'{known}y'" in told and f"'{known}'" in told
    assert str(rag.job.workdir) not in told and told.startswith("passages: none of its ")
    assert asking.post("/memory", json={"swap": "2018"}, headers=TOKEN).json()["current"] == "2018"


@asks_python
def test_an_index_that_is_gone_cannot_be_edited_and_answers_on(asking, rag):
    """The edit was called a defect of the server."""
    folder = rag.job.workdir / "indexes"
    shutil.copytree(folder / "2016", folder / "other")
    try:
        assert asking.post("/memory", json={"swap": "other"}, headers=TOKEN).status_code == 200
    finally:
        shutil.rmtree(folder / "other")
    new = {"id": "new", "title": "", "text": "A leafhopper."}
    refused = asking.post("/memory", json={"add": [new]}, headers=TOKEN)
    assert refused.status_code == 422
    assert refused.json()["error"]["message"] == (
        "index 'other' is not there any more: there is 2016, 2018")
    assert asking.post("/answer", json={"question": ASK}).json()["memory"] == "other"
    assert asking.post("/memory", json={"swap": "2018"}, headers=TOKEN).json()["current"] == "2018"


@asks_python
def test_a_passage_is_fetched_whatever_its_id_is(asking):
    """One with a newline could be added, and its citation led nowhere."""
    for name in ("two\nlines", "ends\n", "a/b c?"):
        new = {"id": name, "title": "", "text": "A leafhopper."}
        assert asking.post("/memory", json={"add": [new]}, headers=TOKEN).status_code == 200
        found = asking.get(f"/passages/2018/{quote(name, safe='')}")
        assert found.status_code == 200 and found.json()["id"] == name
        assert asking.post("/memory", json={"delete": [name]}, headers=TOKEN).status_code == 200


@asks_python
def test_a_model_without_passages_says_that_it_has_none(uninterrupted, one_device):
    """It named numbers from 1 to 0, and one of no names. A change before it was ready hung."""
    rag = rag_jax.load(uninterrupted)
    rag.index = None
    settings = Settings("rag_token", memory_token="change", batch_sizes=(1,))
    server = app.Server(indexes.Indexes(rag, settings), settings)
    asking = TestClient(server.app, base_url="http://localhost")  # whose worker has not begun
    early = asking.post("/memory", json={"swap": "2018"}, headers=TOKEN)
    assert early.status_code == 503 and "/ready tells" in early.json()["error"]["message"]
    server.worker.ready = True
    for path, body in (("/retrieve", {"question": ASK, "k": 5}), ("/memory", {"swap": "2018"}),
                       ("/answer", {"question": ASK, "memory": "2018"})):
        refused = asking.post(path, json=body, headers=TOKEN)
        assert refused.status_code == 422
        assert refused.json()["error"]["message"].startswith("this model reads no passages: ")
    with pytest.raises(ConfigError, match="--open=2018: run .* reads no passages"):
        server.indexes.open_also("2018")


def test_the_current_index_named_again_is_not_opened_twice(uninterrupted, one_device):
    """Its tables were there twice, and requests with its name were not joined with others."""
    rag = rag_jax.load(uninterrupted)
    there = indexes.Indexes(rag, Settings("rag_token", batch_sizes=(1,)))
    current = there.current
    for name in ("2016", "2018"):
        there.open_also(name)
    assert there.named("2018") is there.current is current
    assert sorted(there.open) == ["2016", "2018"]
    there.close()


def test_an_index_of_another_folder_has_a_name_of_its_own(
        uninterrupted, one_device, tmp_path, monkeypatch):
    """It hid the one of the workdir, which --open and swaps then named in vain."""
    folder = shutil.copytree(uninterrupted / "indexes" / "2018", tmp_path / "2016")
    settings = Settings("rag_token", batch_sizes=(1,))
    with pytest.raises(ConfigError, match="2016 is another index of this name.*; rename one"):
        indexes.Indexes(rag_jax.load(uninterrupted, index=folder), settings)
    folder = folder.rename(tmp_path / "outside")
    there = indexes.Indexes(rag_jax.load(uninterrupted, index=folder), settings)
    assert [*there.paths] == ["2016", "2018", "outside"]
    shutil.rmtree(folder)
    assert [*there.paths] == ["2016", "2018"]
    with pytest.raises(Refused, match="expected one of 2016, 2018$"):
        there.swap("outside")
    monkeypatch.setattr(there, "_of_workdir", lambda rag: {})
    with pytest.raises(Refused, match="'outside': there is no index any more$"):
        there.swap("outside")
    with pytest.raises(Refused, match="is not there any more: there is none$"):
        there._path("outside")
    there.close()


def test_an_error_names_no_folder_whatever_it_is_called():
    """Of a folder with a space, all from the space on was told; of a version, its number alone."""
    known = [pathlib.Path("/home/jane doe/runs"), pathlib.Path("/home/jane doe/runs/indexes/my 18")]
    told = _without_paths(
        "/home/jane doe/runs/indexes/my 18/passages/meta.json: damaged; build "
        "/home/jane doe/runs/indexes/my 18 again, not '2018/capital' or /mnt/other/x.tsv", known)
    assert told == "meta.json: damaged; build my 18 again, not '2018/capital' or x.tsv"
    told = _without_paths("/home/jane doe/runs/indexes/my 18/versions/12: passages/meta.json is "
                          "missing in /home/jane doe/runs, /mnt/a/versions/3 and /tmp", known)
    assert told == "my 18: passages/meta.json is missing in runs, 3 and /tmp"


def test_no_answer_mixes_two_indexes(asking):
    """Passages of one index beside the probabilities of another's, or an answer that is lost."""
    found, over = [], threading.Event()

    def ask():
        while not over.is_set():
            found.append(asking.post("/answer", json={"question": ASK}))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for name in ["2016", "2018"] * 3:
        assert asking.post("/memory", json={"swap": name}, headers=TOKEN).status_code == 200
    over.set()
    for thread in threads:
        thread.join()
    assert {done.status_code for done in found} == {200}
    seen = {}
    for answer in (done.json() for done in found):
        name = answer["memory"]
        assert all(each["id"].startswith(f"{name}/") for each in answer["passages"])
        first = seen.setdefault(name, answer)
        np.testing.assert_allclose(answer["log_prob"], first["log_prob"], atol=1e-5)
    assert set(seen) == {"2016", "2018"}
