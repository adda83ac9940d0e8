"""A run's memories: with which questions recall is measured, and those of other files."""

import concurrent.futures
import errno
import threading
import types

import jax
import numpy as np
import pytest

from rag_jax import files, locks, parallel, searching
from rag_jax.config import Config, MeshConfig, overrides
from rag_jax.data.prepared import Prepared
from rag_jax.fusion import Fusion
from rag_jax.retrieval import bm25
from rag_jax.retrieval.protocol import RetrievalError
from rag_jax.training import indexing
from rag_jax.training.job import Job
from tests import tiny
from tests.retrieval.indexing import build_index
from tests.retrieval.test_build import INPUTS, Embedder, make_store


@pytest.mark.parametrize("questions", [5, 256, 1000])
def test_recall_is_measured_with_a_seeded_sample_of_many_questions(
        monkeypatch, capsys, tmp_path, questions):
    """Exact search reads the whole index for them, which may be 65 GB."""
    prepared = types.SimpleNamespace(splits={"dev": list(range(questions))}, stores={"now": None})
    job = types.SimpleNamespace(config=Config(), prepared=prepared, tokenize=np.array)
    answerer = types.SimpleNamespace(embed_questions=lambda params, asked: asked)
    monkeypatch.setattr(indexing, "make_answerer", lambda *given: answerer)
    monkeypatch.setattr(indexing, "unstack_layers", lambda params: params)
    monkeypatch.setattr(indexing, "index_store", lambda job, params, store, out, sample, _: sample)
    once, again = (indexing.index_stores(job, {}, tmp_path)["now"] for _ in range(2))
    np.testing.assert_array_equal(once, again)
    assert len(once) == min(questions, 256) == len(set(once)) and set(once) <= set(range(questions))
    said = capsys.readouterr().out
    if questions > 256:
        assert "with 256 of the 1000 dev questions, drawn by config.seed=0" in said
        assert max(once) > 500, "not the first ones"
    else:
        assert not said and once.tolist() == list(range(questions))


def test_passages_are_padded_to_steps_of_16_tokens_on_a_cpu_and_as_configured_elsewhere(
        monkeypatch):
    """Padding is a third of the work in steps of 64; on an accelerator every length compiles long.
    """
    cpu = parallel.make_mesh(MeshConfig(), jax.devices()[:1])

    def shapes(rows, step, mesh=cpu):
        return indexing.batch_shapes(overrides.replace(Config(), {
            "data.max_passage_length": 200, "data.length_buckets": step,
            "retrieval.embed_batch_size": rows}), mesh)

    assert shapes(64, 64) == (8, [*range(16, 200, 16), 200])
    assert shapes(4, 10) == (4, [*range(10, 200, 10), 200])
    monkeypatch.setattr(parallel, "own_mesh", lambda mesh: mesh)
    chips = types.SimpleNamespace(devices=np.array([types.SimpleNamespace(platform="tpu")]),
                                  size=6, shape={"data": 6, "fsdp": 1, "model": 1})
    assert shapes(64, 64, chips) == (66, [64, 128, 192, 200])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_index_holds_the_vectors_of_the_encoder(dtype):
    """Norms or token tables would be rounded together with the matrices, or the neighbours of a
    passage and how far it is padded would change its vector."""
    model = tiny.rag_model(retriever={"dtype": dtype, "layers": 2})
    encoder = tiny.perturbed(model.init(
        jax.random.key(0), ("document_encoder",)))["document_encoder"]
    mesh = parallel.make_mesh(MeshConfig(), jax.devices()[:1])
    embed = indexing.embed_passages(model, encoder, mesh)
    ids, mask = np.random.default_rng(0).integers(5, 30, (8, 6)).astype(np.int32), np.ones((8, 6))
    whole = np.asarray(searching.jit_embed(model)(encoder, ids, mask > 0))
    np.testing.assert_array_equal(embed(ids, mask > 0), whole)
    wider = (np.pad(x, ((0, 0), (0, 4)))[::-1] for x in (ids, mask > 0))
    close = {"float32": 1e-5, "bfloat16": 1e-2}[dtype] * np.abs(whole).max()
    np.testing.assert_allclose(embed(*wider)[::-1], whole, atol=close)


@pytest.mark.parametrize(("lexical", "document_encoder", "built"), [
    (True, "frozen", "words"), (False, "frozen", "w/indexes"),
    (False, "refresh", "w/rag_token/indexes")])
def test_a_memory_of_a_file_is_indexed_as_the_run_searches(
        monkeypatch, tmp_path, lexical, document_encoder, built):
    config = overrides.replace(Config(), {"train.document_encoder": document_encoder})
    tables = types.SimpleNamespace(passages=lambda titles, texts: [[1]] * len(texts),
                                   kept=lambda passage, question: passage, max_length=16)
    prepared = Prepared(None, None, tables, {"own": None}, {})
    job = Job(config, tmp_path / "w", prepared, None)
    monkeypatch.setattr(Job, "model", types.SimpleNamespace(lexical=lexical, fusion=None))
    monkeypatch.setattr("rag_jax.data.prepare.encoder_input", lambda _, a, *rest: [[1]] * len(a))
    monkeypatch.setattr(indexing, "restore_run", lambda *given: ({"document_encoder": "best"}, {}))
    monkeypatch.setattr(indexing, "fingerprint", lambda model, encoder: encoder)
    monkeypatch.setattr(indexing, "index_words", lambda job: {
        name: (store, "words", None) for name, store in job.prepared.stores.items()})
    monkeypatch.setattr(indexing, "index_stores", lambda job, params, folder, overwrite=False: {
        name: (store, str(folder.relative_to(tmp_path)), params)
        for name, store in job.prepared.stores.items()})
    file = tmp_path / "p.tsv"
    file.write_text("id\ttitle\ttext\n7\tPeru\tone two three four five\n")

    def memory():
        return indexing.index_of_file(job, "rag_token", lambda: "warm", "old", str(file), 2)

    store, how, params = memory()
    assert [store[row].text for row in range(len(store))] == ["one two", "three four", "five"]
    assert (how, params) == (built, {"frozen": "warm", "refresh": {"document_encoder": "best"}}[
                                 document_encoder]
                             if not lexical else None)
    file.unlink()
    assert memory()[0].fingerprint == store.fingerprint, "read once"


def test_of_a_runs_own_indexes_only_those_of_another_encoder_are_replaced(monkeypatch, tmp_path):
    """One that was lost took the edits of the others with it."""
    config = overrides.replace(Config(), {"train.document_encoder": "refresh"})
    job = Job(config, tmp_path, Prepared(None, None, None, {"2016": None, "2018": None}, {}), None)
    monkeypatch.setattr(Job, "model", types.SimpleNamespace(lexical=False))
    monkeypatch.setattr(indexing, "restore_run", lambda *given: ({"document_encoder": None}, {}))
    monkeypatch.setattr(indexing, "fingerprint", lambda *given: INPUTS["encoder_fingerprint"])
    monkeypatch.setattr(indexing, "index_store", lambda *given: given[-1])
    build_index(make_store(tmp_path / "s"), Embedder(), tmp_path / "rag_token/indexes/2018",
                **INPUTS)
    assert indexing.indexes_of(job, "rag_token", {}) == {"2016": True, "2018": False}


def test_who_opens_a_hybrid_index_waits_while_another_counts_its_words(monkeypatch, tmp_path):
    """The second reader was refused, and told that who only reads need not wait."""
    index = build_index(make_store(tmp_path / "s"), Embedder(), tmp_path / "i", **INPUTS)
    job = types.SimpleNamespace(model=types.SimpleNamespace(fusion=Fusion()), config=Config())
    counts, begun, awaited, count = [], threading.Event(), threading.Event(), bm25.index_words

    def counted(*given):
        begun.set()
        assert awaited.wait(10)
        counts.append(given)
        count(*given)

    monkeypatch.setattr(bm25, "index_words", counted)
    monkeypatch.setattr(locks._log, "warning", lambda *said: awaited.set())
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        first = pool.submit(indexing.with_words, job, index)
        assert begun.wait(60)
        second = indexing.with_words(job, index)
        assert first.result().words.size == second.words.size == index.size
    assert len(counts) == 1


def test_words_that_cannot_be_counted_are_told_of_as_such(monkeypatch, tmp_path):
    """It was "Read-only file system" and a folder."""
    index = build_index(make_store(tmp_path / "s"), Embedder(), tmp_path / "i", **INPUTS)
    job = types.SimpleNamespace(model=types.SimpleNamespace(fusion=Fusion()), config=Config())

    def counting(error):
        def refused(*given, **settings):
            raise error

        monkeypatch.setattr(indexing, "staging", refused)
        indexing.with_words(job, index)

    for number in (errno.EACCES, errno.EROFS):
        with pytest.raises(RetrievalError, match="words: the words of the passages are counted once"
                           ".* cannot be written here .*not you"):
            counting(OSError(number, "not you"))
    for error in (files.FolderError("in use"), OSError(errno.ENOSPC, "full")):
        with pytest.raises(OSError) as told:
            counting(error)
        assert told.value is error


def test_an_index_that_misses_the_recall_asked_for_says_so():
    """The manifest alone told it, which nobody reads."""
    recall = {"k": 10, "queries": 40, "source": "given", "recall": 0.97, "target": 0.99}
    manifest = {"kind": "scann", "size": 200_000, "recall": recall,
                "scann": {"leaves_to_search": 31, "parts": 2}}
    index = types.SimpleNamespace(size=200_000, manifest=manifest)
    assert indexing.describe(index) == (
        "200000 passages, scann, 31 of 411 leaves searched, recall@10 against exact search 0.9700 "
        "instead of the 0.99 asked for (40 queries)")
    recall["recall"] = 0.99
    assert "asked for" not in indexing.describe(index)
