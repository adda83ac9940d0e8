"""docs/serving.md's clients, as they are installed, against a server that listens."""

import importlib.util
import re
import socket
import threading

import numpy as np
import pytest
import uvicorn

import rag_jax
from rag_jax.serving.app import Server
from rag_jax.serving.indexes import Indexes
from rag_jax.serving.settings import Settings
from tests.serving.served import QUESTIONS
from tests.test_docs import DOCS, blocks

CLIENTS = dict(zip(("openai", "langchain", "llama_index", "cohere"), blocks(DOCS / "serving.md"),
                   strict=True))


@pytest.fixture(scope="module")
def rag(uninterrupted, one_device):
    return rag_jax.load(uninterrupted)


@pytest.fixture(scope="module")
def address(rag):
    settings, started = Settings("rag_token", batch_sizes=(1, 4)), threading.Event()
    server = Server(Indexes(rag, settings), settings, started=lambda failure: started.set())
    web = uvicorn.Server(uvicorn.Config(server.app, log_level="warning"))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=web.run, args=([listening],))
        thread.start()
        assert started.wait(300) and server.worker.failure is None
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        web.should_exit = True
        thread.join(60)
    assert not thread.is_alive()


def run(client: str, address: str) -> dict:
    """The names that the page's block of a client leaves behind."""
    block = CLIENTS[client]
    for module in re.findall(r"^(?:from|import) ([\w.]+)", block, re.M):
        name = module.partition(".")[0]
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed: pip install 'rag_jax[clients]'")
    names = {"__name__": "__main__"}
    exec(compile(block.replace("127.0.0.1:8000", address), str(DOCS / "serving.md"), "exec"), names)
    return names


def test_openai(address, rag):
    names = run("openai", address)
    answer, = rag.ask(QUESTIONS[:1])
    assert names["message"].content == answer.text
    client = names["client"]
    asked = {"model": "rag_token", "messages": [{"role": "user", "content": QUESTIONS[0]}]}
    stream = client.chat.completions.create(**asked, stream=True, logprobs=True, n=1,
                                            stream_options={"include_usage": True})
    *chunks, usage = stream
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer.text
    assert usage.usage.completion_tokens == len(answer.token_ids) - answer.finished  # no </s>
    assert chunks[-1].choices[0].delta.model_extra["annotations"]
    found = client.embeddings.create(model="rag_token-query", input=QUESTIONS[:2])
    np.testing.assert_allclose([each.embedding for each in found.data],
                               rag.embed_queries(QUESTIONS[:2]), atol=1e-5)
    import openai
    with pytest.raises(openai.NotFoundError, match="expected one of rag_token"):
        client.chat.completions.create(**asked | {"model": "gpt"})
    with pytest.raises(openai.UnprocessableEntityError, match='"temperature" is 3'):
        client.chat.completions.create(**asked, temperature=3)


def test_langchain(address, rag):
    names = run("langchain", address)
    assert names["chat"].invoke(QUESTIONS[0]).content == rag.ask(QUESTIONS[0])[0].text
    pieces = list(names["chat"].stream(QUESTIONS[0]))
    assert "".join(piece.content for piece in pieces) == rag.ask(QUESTIONS[0])[0].text
    oracle, = rag.retrieve(QUESTIONS[0], 2)
    assert [(each.id, each.page_content) for each in names["documents"]] == [
        (each.id, each.text) for each in oracle]
    np.testing.assert_allclose(names["vector"], rag.embed_queries(QUESTIONS[0])[0], atol=1e-5)


def test_llama_index(address, rag):
    names = run("llama_index", address)
    assert names["llm"].complete(QUESTIONS[0]).text == rag.ask(QUESTIONS[0])[0].text
    oracle, = rag.retrieve(QUESTIONS[0], 2)
    assert [each.node.text for each in names["nodes"]] == [each.text for each in oracle]
    np.testing.assert_allclose(names["embedding"], rag.embed_queries(QUESTIONS[0])[0], atol=1e-5)


def test_cohere(address, rag):
    names, texts = run("cohere", address), ["Lima is the capital of Peru.",
                                            "The President of Peru is Martín Vizcarra."]
    scores = rag.embed_passages(texts) @ rag.embed_queries(QUESTIONS[0])[0]
    found = names["ranked"].results
    assert [each.index for each in found] == np.argsort(-scores).tolist()
    np.testing.assert_allclose([each.relevance_score for each in found], sorted(
        (np.exp(scores) / np.exp(scores).sum()).tolist(), reverse=True), atol=1e-5)
    import cohere
    first = cohere.Client(api_key="any", base_url=f"http://{address}").rerank(
        model="rag_token", query=QUESTIONS[0], documents=texts, top_n=1)
    assert [each.index for each in first.results] == [int(np.argmax(scores))]
