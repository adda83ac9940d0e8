"""The Python API: what a run is decides its configuration, and its answers are the commands'."""

import contextlib
import copy
import dataclasses
import functools
import itertools
import json
import os
import pathlib
import pickle
import shutil
import subprocess
import sys
import types
import warnings

import jax
import jax.monitoring
import numpy as np
import pytest

import rag_jax
from rag_jax import api, conversion, hosts, locks
from rag_jax.cli import evaluate, generate
from rag_jax.config import Config, ConfigError, overrides
from rag_jax.data.question_files import Example
from rag_jax.errors import DataError, UserError
from rag_jax.hub.load import HubError
from rag_jax.retrieval.hybrid import WORDS
from rag_jax.retrieval.index import PassageIndex
from rag_jax.retrieval.protocol import Passage, RetrievalError
from rag_jax.training import changes, indexing, pretrained, run_index, workdir
from rag_jax.training.job import Job

UNUSABLE = ("x" * 300, "x/" * 3000, "x\0y")  # names that no folder can have
TOWERS = {"model.generator.pretrained": "a/b", "model.retriever.pretrained": "a/b"}
QUESTIONS = ["Who is the President of Peru?", "What is the capital of Japan?"]
IMPORTS = """
import sys, rag_jax
heavy = {"jax", "flax", "numpy", "transformers", "rag_jax.api"} & set(sys.modules)
assert not heavy, heavy
assert {"load", "train", "Answer"} <= set(dir(rag_jax))
import rag_jax.train, rag_jax.build_index
from rag_jax import build_index, load, train
assert rag_jax.train is train is rag_jax.api.train and build_index is rag_jax.api.build_index
"""


def test_the_package_imports_nothing_until_it_is_used():
    """jax came with `import rag_jax`; and `import rag_jax.train` put a module in the place of the
    function."""
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, env={
        **os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parents[1])})
    assert done.returncode == 0, done.stderr
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        rag_jax.trian  # noqa: B018


class Opened(str):
    """An index of 70 passages, by its name."""

    size = 70
    path, manifest = pathlib.Path("i"), {"encoder_fingerprint": "f"}
    passages = types.SimpleNamespace(token_tables=())


@pytest.fixture
def path(tmp_path, monkeypatch):
    """A workdir with three runs, whose parameters and indexes are stubs."""
    runs = ("rag_token", "rag_sequence", "closed_book")
    workdir.start(overrides.replace(Config(), {"runs": runs}), tmp_path)

    def open_job(config, path):
        prepared = types.SimpleNamespace(stores={"now": None}, format=None)
        return Job(config, path, prepared, None)

    monkeypatch.setattr(Job, "model", types.SimpleNamespace(
        lexical=False, fusion=None, towers=("generator",)))
    monkeypatch.setattr(api.training, "open_job", open_job)
    monkeypatch.setattr(pretrained, "load_params", lambda job, run, step: (
        f"parameters of {run}", {"encoder_fingerprint": "f"}))
    monkeypatch.setattr(run_index.indexing.PassageIndex, "open",
                        lambda folder, *_, **__: Opened(folder.name))
    monkeypatch.setattr(indexing, "check_tokens", lambda *given: None)
    monkeypatch.setattr(run_index.on_device, "open_index", lambda *given: given[-1])
    return tmp_path


@pytest.mark.parametrize("run, kind, k, index", [
    (None, "token", 5, "now"), ("rag_sequence", "sequence", 5, "now"),
    ("closed_book", "token", 0, None)])
def test_the_workdirs_configuration_opens_each_run_as_what_it_is(path, run, kind, k, index):
    """rag_sequence decoded as RAG-Token, and closed_book read five passages."""
    config = workdir.read(path)
    for given in (None, config, overrides.for_run(config, run or "rag_token")):
        opened = api.load(path, run, config=given)
        found = opened.job.config
        assert (found.runs, found.kind, found.retrieval.k, opened.index) == (
            (run or "rag_token",), kind, k, index)
        assert opened.run == found.runs[0] and opened.params == f"parameters of {opened.run}"


def test_processes_that_open_different_indexes_are_refused(path, monkeypatch):
    """One is published between them, or each has a copy of its own: the rows of passages that they
    found would be of different passages."""
    said = []
    monkeypatch.setattr(hosts, "connected", lambda: True)
    monkeypatch.setattr(hosts, "exchange", lambda value: said.append(value) or [said[0], value])
    api.load(path)
    api.load(path)
    monkeypatch.setattr(Opened, "manifest", {**Opened.manifest, "size": 71})
    with pytest.raises(ConfigError, match="different values of the index now; start all of them"):
        api.load(path)


def test_an_index_that_processes_do_not_share_is_refused(tmp_path, monkeypatch):
    """Process 0 built its own, and process 1 found its own folder half built."""
    said, out = [], tmp_path / "own" / "index"
    monkeypatch.setattr(locks, "_UNSEEN_SECS", 0.0)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(hosts, "exchange", lambda value: said.append(value) or [None, value])
    with pytest.raises(UserError, match=f"{out}: process 1 does not see what process 0 writes"):
        api._build(None, None, "p.tsv", out, None, False)
    assert len(said) == 2 and not out.parent.exists()


def test_a_run_answers_as_it_was_trained_to_unless_other_settings_are_given(path):
    config = workdir.read(path)
    workdir.begin_run(path, "rag_sequence", overrides.replace(config, {"eval.k": 50}).eval)
    assert api.load(path, "rag_sequence").config.eval.k == 50
    assert api.load(path, "rag_sequence", config={"eval.num_beams": 2}).config.eval == (
        overrides.replace(config, {"eval.k": 50, "eval.num_beams": 2}).eval)
    for k in (0, 7):
        given = overrides.replace(config, {"eval.k": k, "eval.num_beams": 2})
        assert api.load(path, "rag_sequence", config=given).config.eval == given.eval


@pytest.mark.parametrize("fields", [
    {"data.passages": "p.tsv", "data.train": "t.tsv", "data.dev": "d.tsv"},
    {"generator_warmup.steps": 3}, {"data.prompt": "Read."}, {"data.world_task": "claims"},
    {"data.fictional_countries": 5}, {"train.batch_size": 3}, {"train.optimizer.b1": 0.5},
    {"train.bm25_weight_rate": 0.1, "retrieval.retriever": "hybrid"},
    {"retrieval.bm25_weight": 0.9}, {"retrieval.fusion": "reciprocal_rank"},
    {"model.retriever.dropout": 0.3}, {"model.generator.init_std": 0.5},
    {"dropout_keys": "unsafe_rbg"}])
def test_what_a_workdir_was_trained_with_is_not_set_otherwise(path, fields):
    """Its figures would be those of the former file."""
    told = "config.({}): .*would change nothing".format(
        "|".join(f"{name}={value}" for name, value in fields.items()))
    with pytest.raises(ConfigError, match=told):
        api.load(path, config=fields)
    with pytest.raises(ConfigError, match=f"{told}.*; leave the field out"):
        api.build_index("p.tsv", path / "i", path, config=fields)
    same = {name: overrides.value(workdir.read(path), name) for name in fields}
    assert api.load(path, config=same).run == "rag_token"


@pytest.mark.parametrize("fields, reads", [
    ({}, {"bm25_weight", "fusion"}), ({"retriever": "dpr"}, set()), ({"k": 0}, set()),
    ({"fusion": "reciprocal_rank"}, {"fusion"})])
def test_how_words_are_joined_is_set_where_they_are(fields, reads, tmp_path):
    """A weight of words that nothing reads changed nothing, and gave an evaluation its name."""
    trained = overrides.replace(Config(), {
        f"retrieval.{name}": value for name, value in {"retriever": "hybrid", **fields}.items()})
    others = {"convex": "reciprocal_rank", "reciprocal_rank": "convex"}
    for name, value in (("bm25_weight", 0.9), ("fusion", others[trained.retrieval.fusion])):
        config = overrides.replace(trained, {f"retrieval.{name}": value})
        for indexes in (False, True):
            if name in reads and not indexes:
                changes.check_opened(config, trained, tmp_path)
                continue
            with pytest.raises(ConfigError, match=f"{name}={value}: .*would change nothing"):
                changes.check_opened(config, trained, tmp_path, indexes)


@pytest.mark.parametrize("name, value", [
    ("index", "exact"), ("leaves_to_search", 1), ("scann_recall", 0.5), ("scann_parts", 2)])
def test_what_an_index_is_built_with_is_set_where_one_is_built(path, monkeypatch, name, value):
    """An evaluation with other leaves was one of the same index, under a name of its own."""
    with pytest.raises(ConfigError, match=f"config.retrieval.{name}={value}: .*change nothing"):
        api.load(path, config={f"retrieval.{name}": value})
    built = []
    monkeypatch.setattr(api, "_build", lambda job, *_: built.append(job.config.retrieval))
    api.build_index("p.tsv", path / "i", path, config={f"retrieval.{name}": value})
    assert getattr(built[0], name) == value


@pytest.mark.parametrize("retriever, name, value, read, built", [
    ("dpr", "bm25_k1", 5.0, False, False), ("hybrid", "bm25_k1", 5.0, True, False),
    ("bm25", "bm25_k1", 5.0, False, True), ("bm25", "index", "scann", False, False),
    ("hybrid", "index", "scann", False, True)])
def test_words_are_counted_where_they_are_indexed(path, monkeypatch, retriever, name, value, read,
                                                  built):
    """A hybrid index counts them where it is opened: where it was built, they did nothing."""
    monkeypatch.setattr(api, "_build", lambda *_: None)
    asked = {f"retrieval.{name}": value}
    if retriever == "bm25":
        workdir.start(overrides.replace(workdir.read(path), {"runs": ("bm25",)}), path)
    elif retriever == "hybrid":
        asked["retrieval.retriever"] = "hybrid"
    run = "bm25" if retriever == "bm25" else "rag_token"
    for ends, command in ((read, lambda: api.load(path, run, config=asked)), (built, lambda: (
            rag_jax.build_index("p.tsv", path / "i", path, run=run, config=asked)))):
        with contextlib.nullcontext() if ends else pytest.raises(
                ConfigError, match=f"config.retrieval.{name}={value}: .*change nothing"):
            command()


def test_a_trained_run_is_asked_in_ways_that_it_could_not_have_trained(path):
    """Its objective was refused with ranks, and then refused to be set otherwise."""
    workdir.write(overrides.replace(workdir.read(path), {
        "train.retriever_objective": "emdr2"}), path / "config.json")
    for fields in ({"retrieval.retriever": "hybrid", "retrieval.fusion": "reciprocal_rank"},
                   {"retrieval.k": 1}):
        assert api.load(path, config=fields).config.train.retriever_objective == "emdr2"


def test_a_run_without_passages_takes_nothing_that_is_said_of_them(path):
    """It answered as if nothing had been said; and an index was built that nothing could read."""
    for fields in ({"eval.k": 5}, {"model.reranker.pretrained": "r"}):
        name, value = next(iter(fields.items()))
        with pytest.raises(ConfigError, match=f"config.{name}={value}: "):
            api.load(path, "closed_book", config=fields)
    with pytest.raises(ConfigError, match="run 'closed_book' reads no passages, so that nothing"):
        api.build_index("p.tsv", path / "i", path, run="closed_book")
    workdir.begin_run(path, "closed_book", overrides.replace(Config(), {"eval.k": 5}).eval)
    assert api.load(path, "closed_book").config.eval.k == 5, "as the runs that it began with"


@pytest.mark.parametrize("name, value", [
    ("retriever.pooling", "mean"), ("retriever.normalize", True), ("retriever.scale", 2.0),
    ("retriever.query_prefix", "query: "), ("retriever.heads", 3), ("generator.activation", "relu"),
    ("retriever.scan_layers", True), ("generator.pretrained", "other"),
    ("retriever.pretrained", "other")])
def test_a_trained_model_is_opened_as_it_was_trained(path, name, value):
    """Questions were embedded in another way than the passages, and other towers were named, which
    nobody read: the answers were wrong, without a word."""
    field = f"model.{name}"
    told = f"config.{field}={overrides.shown(value)}: {path} was trained with .*another model"
    for open_ in (api.load, functools.partial(api.build_index, "p.tsv", path / "i")):
        with pytest.raises(ConfigError, match=told):
            open_(path, config={field: value})
    before = workdir.read(path)
    same = overrides.value(before, field)
    assert api.load(path, config={field: same}).config.model == before.model
    if not name.startswith("generator"):  # where passages are found by their words, none is read
        lexical = overrides.replace(before, {"retrieval.retriever": "bm25"})
        changes.check_opened(overrides.replace(lexical, {field: value}), lexical, path)


@pytest.mark.parametrize("run, fields", [
    ("rag_token", {"data.generator_tokenizer": "t"}),
    ("rag_token", {"data.retriever_tokenizer": "t"}),
    ("rag_token", {"model.null_document": "bias"}),
    ("rag_token", {"model.head": "classification", "eval.labels": ("yes", "no")}),
    ("rag_token", {"train.document_encoder": "refresh", "retrieval.where": "device"}),
    ("rag_token", {"retrieval.retriever": "bm25", "train.query_encoder_rate": None}),
    ("closed_book", {"retrieval.retriever": "bm25"})])
def test_a_trained_model_has_the_parts_that_were_trained(path, run, fields):
    """An index was said to be missing, or parameters of a checkpoint."""
    name, value = next(iter(fields.items()))
    told = f"config.{name}={value}: {path} was trained with .*, and would be another model"
    with pytest.raises(ConfigError, match=told):
        api.load(path, run, config=fields)


def test_a_field_that_the_run_sets_is_refused_as_by_the_commands(path):
    with pytest.raises(ConfigError, match="run 'closed_book' sets config.retrieval.k=0; leave the"):
        api.load(path, "closed_book", config={"retrieval.k": 3})
    for runs, told in (("nonsense", "no run 'nonsense'"), ((), "at least one"), (5, "expected")):
        with pytest.raises(ConfigError, match=f"config.runs.*{told}"):
            api.load(path, config={"runs": runs})
    assert api.load(path, "closed_book", config={"retrieval.k": 0}).config.retrieval.k == 0
    assert api.load(path, "rag_token", config={"retrieval.k": 3}).config.retrieval.k == 3


@pytest.mark.parametrize("fields", [
    {"model.generator.dtype": "bfloat16", "model.generator.param_dtype": "bfloat16"},
    {"model.retriever.dtype": "bfloat16", "model.generator.end_tokens": (5,)},
    {"model.generator.start_token": 3, "retrieval.retriever": "hybrid", "retrieval.bm25_b": 0.1},
    {"train.keep": 7, "generator_warmup.log_every": 3}])
def test_how_a_trained_model_computes_is_set_at_will(path, fields):
    for name, value in fields.items():
        assert overrides.value(api.load(path, config=fields).config, name) == value


def test_a_rate_that_its_family_decides_is_no_other_one(path):
    """A workdir has it as it was trained, and a config file as none."""
    asked = workdir.read(path)
    workdir.write(overrides.usual_rates(asked), path / "config.json")
    assert asked.model.generator.attention_dropout is None
    assert api.load(path, config=asked).config.model == asked.model


@pytest.mark.parametrize("fields, told", [
    ({"retrieval.k": -3}, "config.retrieval.k=-3: must be at least 0"),
    ({"retrieval.where": "device", "retrieval.retriever": "hybrid"}, "words are searched on the")])
def test_a_whole_configuration_is_checked_as_fields_are(path, fields, told):
    """It was opened, or ended in a TypeError."""
    for config in (fields, overrides.replace(workdir.read(path), fields)):
        with pytest.raises(ConfigError, match=told):
            api.load(path, "rag_token", config=config)


@pytest.mark.parametrize("k, index, told", [
    (71, None, r"config.eval.k=71: .*now has 70 passages; .*load\(config={'eval.k': 70}"),
    (5, "nosuch", r"^index 'nosuch': no such folder, and .*indexes has older"),
    (5, "", "^index '': no such folder")])
def test_a_wrong_index_fails_before_the_model_is_read(path, monkeypatch, k, index, told):
    """k above the number of passages, and a misspelt --index, were told after the checkpoint."""
    monkeypatch.setattr(pretrained, "load_params", lambda *_: pytest.fail("the model is read"))
    (path / "indexes" / "older").mkdir(parents=True)
    config = overrides.replace(workdir.read(path), {"eval.k": k})
    with pytest.raises(ConfigError, match=told):
        api.load(path, "rag_token", index=index, config=config)


def test_a_training_that_ended_before_its_first_checkpoint_is_to_go_on(path, monkeypatch):
    """Of a missing index one was told to build it, and that needs the checkpoint."""
    def missing(folder, *_, **__):
        raise RetrievalError(f"{folder.name}: no index here")

    monkeypatch.setattr(run_index.indexing.PassageIndex, "open", missing)
    (path / "indexes" / "elsewhere").mkdir(parents=True)
    with pytest.raises(ConfigError, match="rag_token: no checkpoint; train first, or go on, with "):
        api.load(path, "rag_token")
    with pytest.raises(RetrievalError, match="elsewhere: no index here"):
        api.load(path, "rag_token", index="elsewhere")
    monkeypatch.setattr(pretrained, "check_trained", lambda run: None)
    with pytest.raises(RetrievalError, match="now: no index here"):
        api.load(path, "rag_token")


def test_an_index_that_training_makes_at_its_end_is_waited_for(tmp_path, monkeypatch):
    """Whoever evaluated meanwhile was told to build one, with a command that does not."""
    workdir.start(overrides.replace(Config(), {
        "train.document_encoder": "refresh", "train.steps": 7}), tmp_path)
    (tmp_path / "rag_token" / "3").mkdir(parents=True)
    job = types.SimpleNamespace(config=workdir.read(tmp_path), workdir=tmp_path, trains_with="now",
                                model=types.SimpleNamespace(lexical=False))
    monkeypatch.setattr(pretrained, "check_trained", lambda run: None)
    with pytest.raises(ConfigError, match="has taken 3 of 7 steps, and its index is made after"):
        run_index.open_index(job, "rag_token", None)
    (tmp_path / "rag_token" / "7").mkdir()
    with pytest.raises(RetrievalError, match="now"):
        run_index.open_index(job, "rag_token", None)


def test_an_index_stays_where_it_was_when_it_was_opened(path, monkeypatch):
    """After os.chdir an edit went to the index of that name in the other folder."""
    opened = []
    monkeypatch.setattr(run_index.indexing.PassageIndex, "open", lambda folder, *_, **__: (
        opened.append(folder) or Opened(folder.name)))
    monkeypatch.chdir(path)
    (path / "beside").mkdir()
    api.load(path, index="beside").swap("beside")
    assert opened == [path / "beside"] * 2


def test_the_first_run_that_began_is_opened_where_none_is_named(path):
    (path / "rag_token" / "evaluation").mkdir(parents=True)  # of what did not train here
    workdir.begin_run(path, "rag_sequence", Config().eval)
    assert api.load(path).run == "rag_sequence"


def test_one_runs_configuration_does_not_open_another(path):
    with pytest.raises(ConfigError, match="'rag_sequence' is no run: .* has the runs rag_token"):
        api.load(path, "rag_sequence", config=overrides.for_run(workdir.read(path), "rag_token"))


def test_an_index_is_built_for_a_run_as_it_is(path, monkeypatch):
    asked = []
    monkeypatch.setattr(api.indexing, "job_of_file",
                        lambda job, *_: asked.append(job.config) or job)
    monkeypatch.setattr(pretrained, "restore_run", lambda *given: (asked.append(given[0]), {}))
    monkeypatch.setattr(api.indexing, "index_stores", lambda *given: {"out": "index"})
    (path / "out.passages").mkdir()  # somebody's, as good as any name
    api.build_index(path / "p.tsv", path / "out", path, run="rag_sequence")
    assert (path / "out.passages").is_dir()
    assert asked[0].kind == "sequence" and asked[1] == path / "rag_sequence"
    for queries, error, told in ((path / "none.jsonl", FileNotFoundError, r"none\.jsonl"),
                                 (["Who?"], DataError, "'Who[?]'.* names no file")):
        with pytest.raises(error, match=told):  # it was after all was written
            api.build_index(path / "p.tsv", path / "other", path, run="rag_sequence",
                            queries=queries)
    assert not (path / "other").exists()


@pytest.mark.parametrize("where", ["host", "device"])
def test_passages_are_added_deleted_and_replaced(uninterrupted, tmp_path, where):
    """Of delete="17", the passages 1 and 7 went, and dictionaries were added by their keys."""
    index = shutil.copytree(uninterrupted / "indexes" / "2018", tmp_path / "index")
    reader = PassageIndex.open(index)
    rag = rag_jax.load(uninterrupted, index=index, config={
        "retrieval.where": where, "retrieval.device_dtype": "float32", "eval.k": 2})
    rag.ask(QUESTIONS)
    first = rag.index.passages[0]
    new = [Passage(f"new {i}", "Atlantis", f"The capital of Atlantis is town {i}.")
           for i in range(3)]
    rag.add([new[0]._asdict(), *new[1:]])
    rag.delete(["new 1", first.id])
    rag.edit([first._replace(text="Sunk.")], "new 2")
    count = reader.size + 1
    found = rag.retrieve(QUESTIONS[0], count)[0]
    there = {passage.id: passage.text for passage in found}
    before = {p.id: p.text for p in reader.passages}
    assert there == {**before, first.id: "Sunk.", "new 0": new[0].text}
    row = rag.index.passages.row_of("new 0")
    np.testing.assert_allclose(rag.index.embeddings([row]), rag.embed_passages(new[:1]),
                               rtol=0.05, atol=0.02)
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, secs, **_: compiled.append(event) if "backend_compile" in event else None)
    assert rag.ask(QUESTIONS)[0].passages and compiled == []
    published = PassageIndex.open(index)
    recall = published.manifest["recall"]
    assert recall["recall"] == 1 and recall["source"] == "given"
    queries = rag.embed_queries(QUESTIONS)
    np.testing.assert_array_equal(published.search(queries, 9).ids,
                                  rag.index.search(queries, 9).ids)
    assert reader.size == len(before) and published.size == count
    for wrong, error in (
            ([("a", "b")], "passage 1 is"), ([("a", "b", 3)], "passage 1 is"),
            ([new[1], "abc"], "passage 2 is 'abc'"), ([5], "passage 1 is 5"),
            ([{"id": "a", "txt": "b"}], "passage 1: unknown or missing: text, txt"),
            (5, "passages: .*, not 5"), (b"abc", "passages: .*, not b'abc'")):
        with pytest.raises(DataError, match=error):
            rag.add(wrong)
    with pytest.raises(RetrievalError, match="has the id 'nosuch'"):
        rag.delete(["nosuch"])
    with pytest.raises(RetrievalError, match="has a passage 'new 0'"):
        rag.add(new[:1])
    with pytest.raises(RetrievalError, match="1 passages would be left, and 2 are read"):
        rag.delete([passage.id for passage in found[1:]])  # it was published, and could not be read
    rag.params = {**rag.params, "document_encoder": jax.tree.map(
        lambda x: 1 - x, rag.encoder("document_encoder"))}
    with pytest.raises(RetrievalError, match="built by the encoder"):
        rag.add([("late", "", "Nothing.")])
    assert PassageIndex.open(index).size == count and not list(index.glob(".added*"))


def test_embeddings_and_words_are_joined_in_one_prior(uninterrupted, tmp_path):
    index = shutil.copytree(uninterrupted / "indexes" / "2018", tmp_path / "index")
    rag = rag_jax.load(uninterrupted, index=index, config={
        "retrieval.retriever": "hybrid", "retrieval.bm25_weight": 0.3})
    answer, found = rag.ask(QUESTIONS[0])[0], rag.retrieve(QUESTIONS[0])[0]
    assert [p.id for p in found] == answer.passage_ids
    np.testing.assert_allclose([p.prior for p in found], answer.prior, rtol=1e-3, atol=1e-5)
    rows = np.array([[rag.index.passages.row_of(p.id) for p in found]])
    dense = rag.embed_queries(QUESTIONS[0]) @ rag.index.embeddings(rows)[0].T
    words = rag.index.words.scores(QUESTIONS[:1], rows)
    logits = (0.7 * dense + 0.3 * words)[0]
    np.testing.assert_allclose(np.log(answer.prior) - np.log(answer.prior[0]), logits - logits[0],
                               rtol=1e-3, atol=1e-3)
    for wrong, told in ((0.3, "name weights"), ("0.3", "name weights"), (["a"], "name weights"),
                        ([[0.1], [0.1, 0.2]], "name weights"), ([], "name weights"),
                        ([float("nan"), 0.5], "bm25_weight=nan"), ([0.5, 7.0], "bm25_weight=7.0")):
        with pytest.raises(ConfigError, match=told):
            rag.choose_weight(wrong)
    chosen = rag.choose_weight([0.0, 0.3, 1.0])
    assert chosen["bm25_weight"] == rag.config.retrieval.bm25_weight
    scores = [value for name, value in chosen.items() if name.startswith("dev_mrr@")]
    assert max(scores) == chosen[f"dev_mrr@2, weight {chosen['bm25_weight']:g}"]
    rag.edit([Passage("new", "Zyzzogeton", "A zyzzogeton is a leafhopper.")], [found[0].id])
    rag.choose_weight([1.0])
    assert rag.retrieve("What is a zyzzogeton?")[0][0].id == "new"
    again = rag_jax.load(uninterrupted, index=index, config={
        "retrieval.retriever": "hybrid", "retrieval.fusion": "reciprocal_rank"})
    prior = [passage.prior for passage in again.retrieve(QUESTIONS[0], k=7)[0]]
    assert prior == sorted(prior, reverse=True) and prior[-1] > 0.13, "61 to 67 at most"
    with pytest.raises(ConfigError, match="this run has hybrid and reciprocal_rank"):
        again.choose_weight([1.0])

    def counted_after(**changed):
        """When words were counted, by another load: again where it is of other settings."""
        rag_jax.load(uninterrupted, index=index, config={
            "retrieval.retriever": "hybrid", **changed})
        return max(file.stat().st_mtime_ns for file in (index / WORDS).rglob("*"))

    before = counted_after()
    assert counted_after() == before and counted_after(**{"retrieval.bm25_k1": 1.5}) > before
    plain = rag_jax.load(uninterrupted, index=index)
    assert found[0].id not in {p.id for p in plain.retrieve(QUESTIONS[0], plain.index.size)[0]}


@pytest.mark.parametrize("where", ["host", "device"])
def test_questions_do_not_read_passages_that_they_did_not_find(uninterrupted, tmp_path, where):
    """On the devices an edit numbers passages anew: those who had been found before it read others,
    without a word. On the host they read the version that they began with."""
    index = shutil.copytree(uninterrupted / "indexes" / "2018", tmp_path / "index")
    rag = rag_jax.load(uninterrupted, index=index, config={
        "retrieval.where": where, "eval.batch_size": 1})
    questions = QUESTIONS * 24  # six batches for the devices
    expected = [[passage.id for passage in answer.passages] for answer in rag.ask(questions)]
    answers = rag.ask_each(questions)
    found = [next(answers)]
    rag.add([Passage("new", "Atlantis", "Sunk.")])
    found += itertools.islice(answers, 16)  # begins another batch of the devices
    gone = [passage.id for passage in rag.index.passages][:5]
    rag.delete(gone, compact=True)
    if where == "device":
        with pytest.raises(RetrievalError, match="on the devices were numbered anew after these"):
            found += answers
        assert [[passage.id for passage in answer.passages] for answer in found] == expected[
            :len(found)]
    else:
        found += answers
        assert [[passage.id for passage in answer.passages] for answer in found] == expected
    assert not {each.id for answer in rag.ask(questions) for each in answer.passages} & set(gone)


def test_a_run_without_passages_has_nothing_to_edit(path):
    """An index that a closed-book run was given was ignored, even one that is not there."""
    with pytest.raises(ConfigError, match="reads no passages"):
        api.load(path, "closed_book").delete(["a"])
    with pytest.raises(ConfigError, match="index 'nosuch': run 'closed_book' reads no passages"):
        api.load(path, "closed_book", index="nosuch")


@pytest.fixture(scope="module")
def rag(uninterrupted):
    return rag_jax.load(uninterrupted)


def test_answers_are_those_of_the_command_line(rag, uninterrupted, tmp_path):
    """A notebook and a command that open the same run must not disagree."""
    out = tmp_path / "answers.jsonl"
    generate.main([f"--workdir={uninterrupted}", *QUESTIONS, f"--out={out}",
                   "--config.eval.num_beams=3"])
    answers = rag.ask(QUESTIONS, num_beams=3)
    records = [json.loads(line) for line in out.read_text().splitlines()]
    for answer, record in zip(answers, records, strict=True):
        assert {**record, **answer.record()} == record
        assert record["posterior"] == [passage.posterior for passage in answer.passages]
        assert len(answer.tokens) == len(answer.token_ids)
        for passage in answer.passages:
            store = rag.index.passages
            assert (passage.id, passage.title, passage.text) == store[store.row_of(passage.id)]
    assert rag.config.eval.num_beams is None, "what one question asks for holds for it alone"


@pytest.mark.parametrize("splits, split, told", [
    (("train", "dev"), (), "^the workdir has train, dev; name a file by --questions, as what is "
     "chosen on dev is for other questions$"),
    (("dev", "test"), ("--split=dev",), "^--split=dev: the workdir has dev, test; .*, as what is"),
    ((), (), "^the workdir has no questions"),
    (("dev",), ("--split=test",), "^--split=test: the workdir has dev; name a file by --q"),
])
def test_questions_that_are_not_there_are_to_be_named(
        uninterrupted, monkeypatch, splits, split, told):
    """An option was refused that nobody had given, and --questions was not spoken of."""
    monkeypatch.setattr(api, "load", lambda *given, **how: types.SimpleNamespace(
        job=types.SimpleNamespace(prepared=types.SimpleNamespace(splits=dict.fromkeys(splits)))))
    with pytest.raises(ConfigError, match=told):
        evaluate.main([f"--workdir={uninterrupted}", "--choose-k=1,2", *split])


def test_scores_are_those_of_the_command_line(rag, uninterrupted, tmp_path):
    """max_examples was ignored, and of an answer that is too long nobody was told."""
    evaluate.main([f"--workdir={uninterrupted}", "--split=dev", f"--out={tmp_path}"])
    found = rag.evaluate("dev")
    assert 0 < rag.config.eval.max_examples < len(rag.questions("dev")), "of training"
    assert found.metrics == json.loads((tmp_path / "metrics.json").read_text())
    examples = rag.questions("dev")
    assert found.examples == list(examples)
    log_p = rag.log_likelihood([e.question for e in examples], [e.answers[0] for e in examples])
    assert -log_p.mean() == pytest.approx(found.metrics["nll"], rel=1e-5)
    assert rag.log_likelihood(examples[0].question, examples[0].answers[0]) == pytest.approx(
        log_p[0], rel=1e-5)
    with pytest.warns(UserWarning, match=r"answer 2 has .* tokens: the first .*max_target_length="):
        rag.log_likelihood(QUESTIONS, ["Lima", "x " * 99])
    file = tmp_path / "one.jsonl"
    file.write_text(json.dumps({"question": QUESTIONS[0], "answers": ["Lima"]}) + "\n")
    few = rag.evaluate("dev", max_examples=3, likelihood=False)
    assert few.metrics["count"] == len(few.answers) == 3 and few.examples == found.examples[:3]
    assert rag.evaluate(file, num_beams=2).metrics["count"] == 1


def test_samples_are_drawn_by_a_seed(rag):
    """Every call drew the same answer."""
    def drawn(seed):
        return [answer.token_ids for answer in rag.ask(
            QUESTIONS, sample=True, temperature=9.0, seed=seed)]

    assert drawn(7) == drawn(7) and drawn(rag.config.seed) == drawn(None)
    assert len({str(drawn(seed)) for seed in (None, 7, 8)}) == 3


def test_what_is_retrieved_is_what_the_answers_read(rag):
    for answer, passages in zip(rag.ask(QUESTIONS), rag.retrieve(QUESTIONS, k=2), strict=True):
        assert [p.id for p in passages] == answer.passage_ids
        assert [p.prior for p in passages] == pytest.approx(answer.prior, abs=1e-5)
        assert all(p.posterior is None for p in passages)
    few, many = rag.retrieve(QUESTIONS[0], 1)[0], rag.retrieve(QUESTIONS[0], 7)[0]
    assert len(many) == 7 and few[0].id == many[0].id
    with pytest.raises(ConfigError, match="config.eval.k=100000: the index has"):
        rag.retrieve(QUESTIONS, k=100_000)


def test_vectors_are_those_of_the_index(rag):
    """Of a string, every letter was a passage; what was retrieved was refused."""
    rows = np.arange(3)
    vectors = rag.embed_passages([rag.index.passages[int(row)] for row in rows])
    np.testing.assert_allclose(vectors, rag.index.embeddings(rows), rtol=1e-4, atol=1e-5)
    assert len(rag.embed_passages("A town.")) == len(rag.embed_queries("A town?")) == 1
    untitled, titled = rag.embed_passages(["A town.", Passage("", "Lima", "A town.")])
    assert untitled.shape == titled.shape == vectors[0].shape and (untitled != titled).any()
    found = rag.retrieve(QUESTIONS[0], 3)[0]
    logits = rag.embed_queries(QUESTIONS[0]) @ rag.embed_passages(found).T
    p = np.exp(logits[0] - logits.max())
    np.testing.assert_allclose([each.prior for each in found], p / p.sum(), rtol=1e-3)
    np.testing.assert_array_equal(rag.embed_passages(found[0]), rag.embed_passages(found[:1]))
    queries = rag.embed_queries(QUESTIONS)
    best = rag.index.search(queries, 1).ids[:, 0]
    assert [rag.index.passages[int(row)].id for row in best] == [
        passages[0].id for passages in rag.retrieve(QUESTIONS, 1)]


def test_the_copy_of_a_subclass_is_one(uninterrupted):
    class Mine(rag_jax.Rag):
        pass

    assert type(copy.copy(Mine(**vars(rag_jax.load(uninterrupted))))) is Mine


def test_a_swapped_index_is_read_from_then_on(uninterrupted):
    rag = rag_jax.load(uninterrupted)
    before = copy.copy(rag)
    for copied in (copy.deepcopy, pickle.dumps):  # which said what cannot be pickled in it
        with pytest.raises(TypeError, match="cannot be pickled.*; call rag_jax.load in each proc"):
            copied(rag)
    rag.swap("2016")
    answer, = rag.ask(QUESTIONS[0])
    assert all(name.startswith("2016/") for name in answer.passage_ids)
    assert answer == rag_jax.load(uninterrupted, index="2016").ask(QUESTIONS[0])[0]
    with pytest.raises(ConfigError, match="nowhere': no such folder, and .*indexes has 2016, 2018"):
        rag.swap("nowhere")
    assert pathlib.Path(before.index.path).name == "2018", "a copy has its own"


@pytest.mark.parametrize("ask, error, text", [
    (lambda rag: rag.ask(QUESTIONS, num_beems=4), ConfigError, "did you mean num_beams"),
    (lambda rag: rag.ask(QUESTIONS, num_return_sequences=3), ConfigError, "num_return_sequences=3"),
    (lambda rag: rag.ask(["Who?", " "]), DataError, "question 2 is ' '"),
    (lambda rag: rag.log_likelihood(QUESTIONS, ["Lima"]), ConfigError, "2 questions and 1 answers"),
    (lambda rag: rag.evaluate("nowhere.jsonl"), FileNotFoundError, "nowhere.jsonl"),
    (lambda rag: rag.embed_passages([("t", "x")]), DataError, "passage 1 is"),
    (lambda rag: rag.embed_passages("A town.", batch_size=-1), ConfigError, "batch_size=-1: exp"),
    (lambda rag: rag.embed_queries(QUESTIONS, length_step=1.5), ConfigError, "length_step=1.5"),
    (lambda rag: rag.log_likelihood(QUESTIONS[0], ""), DataError, "answer 1 is ''"),
    (lambda rag: rag.ask("Who?", sample=True, seed=-1), ConfigError, "config.seed=-1"),
    (lambda rag: rag.ask(5), DataError, "questions: 5 is no text"),
    (lambda rag: rag.ask(b"abc"), DataError, "questions: b'abc' is no text"),
    (lambda rag: rag.ask(np.array("Who?")), DataError, "questions: array.'Who.*is no text"),
    (lambda rag: rag.log_likelihood("Who?", np.array("I")), DataError, "answers: array.*no text"),
    (lambda rag: rag.embed_passages(np.array("Lima")), DataError, "passages: .*, not array"),
    (lambda rag: rag.ask([], num_beems=4), ConfigError, "did you mean num_beams"),
    (lambda rag: rag.ask([], k=10**6), ConfigError, "config.eval.k=1000000: the index has"),
    (lambda rag: rag.ask([], seed=-1), ConfigError, "config.seed=-1"),
    (lambda rag: rag.retrieve(None), DataError, "questions: None is no text"),
    (lambda rag: rag.delete([5]), DataError, "id 1 is 5"),
    (lambda rag: rag.evaluate(5), DataError, "questions: 5; give a split"),
    (lambda rag: rag.evaluate(QUESTIONS), DataError, "questions: .*; give a split"),
    (lambda rag: rag.evaluate([Example("1", "Who?", "Lima")]), DataError,
     "question 1: answers is 'Lima': expected a tuple"),
    (lambda rag: rag.evaluate([Example("1", None, ("Lima",))]), DataError, "question is None"),
    (lambda rag: rag.evaluate([Example("1", "Who?", (2018,))]), DataError, r"answers\[0\] is 2018"),
    (lambda rag: rag.evaluate([Example("1", "Who?", ("(",), regex=True)]), DataError,
     "is not a regular expression"),
    (lambda rag: rag.evaluate([Example("1", "Who?", ())] * 2), DataError, "already used at"),
    (lambda rag: rag.evaluate([Example("1", "Who?", ("Lima",), evidence=("Lima",))]), DataError,
     r"evidence\[0\] is 'Lima': expected lines of WIKIPEDIA ID<TAB>TITLE"),
    (lambda rag: rag.evaluate([{"question": "Who?", "answers": {1}}]), DataError,
     r'question 1: "answers" is "\{1\}": expected a list of strings'),
    (lambda rag: rag.evaluate([{"question": "Who?", "answer": "Ada"}, {"answers": ["Lima"]}]),
     DataError, r"question 2: no \"question\" \(keys here: 'answers'\)"),
    (lambda rag: rag.evaluate("devv"), DataError, "no split 'devv' in .*, which has .*dev"),
    (lambda rag: rag.edit([("z", "", "z")], queries=["Who?"]), DataError, "give a split, a file"),
    (lambda rag: rag.embed_passages(["a", "\ud800"]), DataError, "passage 2, .*, is not UTF-8"),
    (lambda rag: rag.evaluate("dev", order=[[1], [1, 2]]), DataError, "order: .*; expected"),
    (lambda rag: rag.evaluate("dev", order=np.arange(3)), DataError, "order: .*; expected"),
    (lambda rag: rag.evaluate([Example("1", "Who?", ())], order=[-1]), DataError, "from 0 to 0"),
    (lambda rag: rag.choose_k(3), ConfigError, "choose_k: 3; name numbers"),
    (lambda rag: rag.choose_k(["1"]), ConfigError, "name numbers"),
    (lambda rag: rag.choose_k(np.array([0, 1])), ConfigError, "name numbers"),
    (lambda rag: rag.choose_k([10**6]), ConfigError, "^k=1000000 is more than the index's"),
    (lambda rag: rag.retrieve("Who?", k="many"), ConfigError, "config.eval.k='many'"),
    (lambda rag: rag_jax.load(rag.job.workdir, config={1: 2}), ConfigError, "config.1: no such"),
    (lambda rag: rag_jax.load(5), ConfigError, "source=5: expected the name of a folder"),
    (lambda rag: rag_jax.load(rag.job.workdir, step="10"), ConfigError, "^step='10': must be the"),
    *((lambda rag, name=name: rag_jax.load(name), ConfigError, "^source='.*: no folder can have")
      for name in UNUSABLE),
    *((lambda rag, name=name: rag_jax.train(Config(), name), ConfigError, "^workdir='.*: no folder")
      for name in UNUSABLE),
    *((lambda rag, name=name: rag_jax.load(rag.job.workdir, index=name), ConfigError,
       "^index '.*: no such folder, and .* has 2016") for name in UNUSABLE),
    *((lambda rag, name=name: rag.swap(name), ConfigError, "^index '.*: no such folder, and")
      for name in UNUSABLE),
    *((lambda rag, name=name: rag_jax.load(index=name, config=TOWERS), ConfigError,
       "^index=.*: without a workdir, name the folder") for name in UNUSABLE),
    *((lambda rag, name=name: rag_jax.load(index=".", config=dict.fromkeys(TOWERS, name)), HubError,
       "no workdir and no checkpoint '.*: there is no such folder") for name in UNUSABLE),
    *((lambda rag, name=name, given=given: rag_jax.load(index=".", config={**TOWERS, name: given}),
       ConfigError, told) for name, given, told in (
           ("retrieval.k", 0, "^run 'rag_token': without a workdir, .*config.retrieval.k is 0;"),
           ("data.train", "t.tsv", "data.train=t.tsv: without a workdir, the default is .none., "),
           ("train.document_encoder", "refresh",
            "document_encoder=refresh: without a workdir, the default is frozen, and this would "),
           ("train.steps", 5, "config.train.steps=5: without a workdir, the default is 1000,"),
           ("model.null_document", "bias",
            "^config.model.null_document=bias: it is learned, and nothing has been trained"))),
    *((lambda rag, given=given: rag_jax.load(rag.job.workdir, config=given), ConfigError,
       "is no configuration") for given in (5, [], "")),
    *((lambda rag, given=given: rag.evaluate("dev", labels=given), ConfigError,
       "config.eval.labels: ' *' is no answer; name every class") for given in (("a", ""), (" ",))),
    (lambda rag: rag.evaluate("dev", labels=("Lima", "the lima")), ConfigError,
     "'Lima' and 'the lima' are one answer to exact match"),
    (lambda rag: dataclasses.replace(rag, job=dataclasses.replace(
        rag.job, config=overrides.replace(rag.config, {"eval.labels": ("a", "A")}))).choose_k([1]),
     ConfigError, "are one answer to exact match"),
    (lambda rag: rag_jax.update_index(rag.index.path, rag.job.workdir, add=[("z", "", "z")],
                                      queries=""), DataError, "question source ''"),
    (lambda rag: rag_jax.build_index("p.tsv", rag.job.workdir / "new", rag.job.workdir,
                                     queries=""), DataError, "question source ''"),
    (lambda rag: rag_jax.train(5, "x"), ConfigError, "5 is neither a Config"),
])
def test_mistakes_are_named(rag, ask, error, text):
    """A wrong type was a TypeError from somewhere inside."""
    with pytest.raises(error, match=text):
        ask(rag)


def test_what_a_notebook_gives_is_taken(rag):
    """Numbers of numpy, a question whose answers are not known, a Rag as a key, the caller's own
    settings of jax."""
    found = rag.evaluate([Example("1", QUESTIONS[0], None)])
    assert found.correct == [None] and "nll" not in found.metrics
    asked = [{"question": QUESTIONS[0], "answers": ("Lima", "Ada")},
             {"id": 7, "question": QUESTIONS[1], "answer": "Tokyo", "unknown": 1}]
    assert rag.questions(asked) == [Example("1", QUESTIONS[0], ("Lima", "Ada")),
                                    Example("7", QUESTIONS[1], ("Tokyo",))]
    assert len(rag.evaluate(asked).answers) == 2
    assert rag.ask(QUESTIONS[0], num_beams=np.int64(1)) == rag.ask(QUESTIONS[0], num_beams=1)
    assert len(rag.retrieve(QUESTIONS[0], k=np.int64(1))[0]) == 1 and {rag: 1}[rag] == 1
    assert len(rag.embed_queries(QUESTIONS, batch_size=np.int64(2), length_step=np.int8(4))) == 2
    with jax.numpy_dtype_promotion("strict"):
        rag.ask(QUESTIONS[0], num_beams=2)
        rag.log_likelihood(QUESTIONS[0], "Lima")
        rag.ask(QUESTIONS[0], sample=True)
    with jax.set_mesh(jax.make_mesh((1,), ("x",))), pytest.raises(ConfigError, match="set_mesh"):
        rag.ask(QUESTIONS[0])
    with warnings.catch_warnings(action="error", category=FutureWarning), jax.enable_x64(True):
        rag.ask(QUESTIONS[0], sample=True)


def test_what_jax_logs_is_the_callers(rag, caplog):
    """Once a model was loaded, jax.log_compiles printed nothing any more."""
    rag_jax.load(rag.job.workdir)
    with jax.log_compiles(True):
        jax.jit(lambda x: x * 3.5)(2.0)
    assert "Finished tracing" in caplog.text


def test_a_checkpoint_of_hugging_face_answers_without_a_workdir(rag, uninterrupted, tmp_path):
    """What transformers would open, with an index of ours, answers as the run that it was."""
    folder, index = tmp_path / "exported", uninterrupted / "indexes" / "2018"
    conversion.convert(str(uninterrupted), str(folder))
    changes = {f"data.{name}": getattr(rag.config.data, name) for name in (
        "max_question_length", "max_source_length", "max_target_length", "length_buckets")}
    # A BART folder forces </s> at the limit, which an answer that is cut there does not have.
    changes |= {"eval.forced_eos": False, "retrieval.k": 2, "model.generator.scan_layers": True}
    opened = rag_jax.load(folder, index=index, config=changes)
    assert opened.config.kind == "token"
    assert rag_jax.load(folder, index=index, config=opened.config).config == opened.config
    for answer, other in zip(opened.ask(QUESTIONS), rag.ask(QUESTIONS), strict=True):
        assert (answer.text, answer.passage_ids) == (other.text, other.passage_ids)
        assert answer.log_prob == pytest.approx(other.log_prob, abs=1e-4)
    with pytest.raises(ConfigError, match="has no passages: name index="):
        rag_jax.load(folder)
    with pytest.raises(ConfigError, match="has no document encoder"):
        opened.embed_passages(["Lima"])
    with pytest.raises(ConfigError, match="a DPRContextEncoder with document_encoder; name a RAG"):
        rag_jax.load(folder / "document_encoder", index=index)
    with pytest.raises(ConfigError, match="not in the tokens of this generator"):
        opened.job.prepared.format.tokenizer = opened.job.prepared.retriever_tokenizer
        indexing.check_tokens(opened.index, opened.job.prepared)


@pytest.mark.parametrize("name, given, told", [
    ("model.retriever.heads", 1, "has 2, and would be another model"),
    ("model.retriever.pooling", "mean", "and would be another model"),
    ("model.head", "label_token", "has none, and would be another model"),
    ("model.retriever.width", 8, "and would be another model"),
    ("model.generator.activation", "relu", "has gelu, and would be another model"),
    ("model.generator.pretrained", "other", "has .none., and would be another model"),
    ("model.null_document", "bias", "it is learned"),
    ("train.steps", 5, "has 0, and this would change nothing"),
    ("data.fictional_countries", 7, "and this would change nothing"),
    ("data.prompt", "{passage} {question}", "none is read with"),
    ("retrieval.k", 0, " is 0; leave the field out")])
def test_a_checkpoint_is_opened_as_the_model_that_it_is(rag, uninterrupted, exported, name, given,
                                                        told):
    """Other heads were taken, and other answers given; other sizes ended in an error of flax."""
    lengths = {f"data.{field}": getattr(rag.config.data, field) for field in (
        "max_question_length", "max_source_length", "max_target_length")}
    labels = {"eval.labels": ("yes", "no")} if name == "model.head" else {}
    with pytest.raises(ConfigError, match=f"config.{name}.*{told}"):
        rag_jax.load(exported, index=uninterrupted / "indexes" / "2018",
                     config={**lengths, **labels, name: given})


@pytest.fixture(scope="module")
def exported(uninterrupted, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported") / "rag"
    conversion.convert(str(uninterrupted), str(folder))
    return folder


def test_what_a_checkpoint_says_gives_way_to_what_is_asked(rag, uninterrupted, tmp_path):
    """Its length penalty held in `thorough`, and its <s> refused a prefix, for a RAG folder and for
    all that `ask` was asked with; opened by its towers, it answered otherwise."""
    folder, index = tmp_path / "exported", uninterrupted / "indexes" / "2018"
    conversion.convert(str(uninterrupted), str(folder))
    said = json.loads((folder / "config.json").read_text())
    said["generator"] |= {"num_beams": 3, "length_penalty": 2.0, "min_length": 3,
                          "forced_bos_token_id": said["generator"]["bos_token_id"],
                          "forced_eos_token_id": said["generator"]["eos_token_id"]}
    (folder / "config.json").write_text(json.dumps(said))
    data = {f"data.{name}": getattr(rag.config.data, name) for name in (
        "max_question_length", "max_passage_length", "max_source_length", "max_target_length",
        "length_buckets")}

    def opened(**how):
        return rag_jax.load(folder, index=index, config={
            **data, **{f"eval.{name}": value for name, value in how.items()}})

    asked = opened()
    towers = rag_jax.load(index=index, config={
        **data, "train.steps": 0, "model.rag.pretrained": str(folder),
        "model.document_encoder.pretrained": str(folder / "document_encoder")})
    for how, expected in (
            ({}, (3, 2.0, 3, True, True)), ({"strategy": "thorough"}, (3, 0.0, 3, True, True)),
            ({"prefix": "The"}, (3, 2.0, 3, False, True)),
            ({"exact_nodes": 5, "num_beams": 2}, (2, 0.0, 3, True, False)),
            ({"labels": ("Lima", "Tokyo")}, (1, 0.0, 0, False, True))):
        for decoding in (opened(**how).answerer().decoding, asked.answerer(how).decoding,
                         towers.answerer(how).decoding):
            assert (decoding.num_beams, decoding.length_penalty, decoding.min_length,
                    decoding.forced_bos is not None, decoding.forced_eos) == expected, how
    assert opened(strategy="thorough").answerer({"strategy": "marginal"}).decoding.length_penalty
    with pytest.raises(DataError, match="no split 'test' in .*, which has no questions: name"):
        asked.evaluate()  # was told of the endings of files


def test_arguments_that_ask_for_nothing_are_refused(uninterrupted):
    rag = rag_jax.load(uninterrupted)
    for wrong, told in ((lambda: rag.evaluate([]), "there are none"),
                        (lambda: rag.choose_k([]), "numbers of passages"),
                        (lambda: rag.retrieve("Who?", k=0), "k=0: one passage")):
        with pytest.raises(UserError, match=told):
            wrong()
    with pytest.raises(ConfigError, match="config.eval.batch_size"):
        rag.ask("Who?", batch_size="many")


def test_what_would_do_nothing_is_refused():
    """Passages for a run that reads none, and questions for a recall that nobody measures."""
    job = types.SimpleNamespace(config=Config(), workdir="w", model=types.SimpleNamespace(
        lexical=True), prepared=types.SimpleNamespace(splits={}))
    closed = api.Rag(job, "closed_book", {"generator": {}}, None)
    with pytest.raises(ConfigError, match="k=3: run 'closed_book' reads no passages; leave it"):
        closed.ask("Who?", k=3)
    with pytest.raises(ConfigError, match="order: run 'closed_book' reads no passages"):
        closed.evaluate([Example("1", "Who?", ("Ada",))], order=[0])
    with pytest.raises(ConfigError, match="queries: BM25 .* leave them out"):
        api.Rag(job, "bm25", {"generator": {}}, types.SimpleNamespace()).edit(queries=[])


def test_words_are_counted_as_their_index_says(path):
    """Other values of BM25 did nothing, and the evaluation had a name of their own."""
    config = overrides.replace(workdir.read(path), {"runs": ("bm25",)})
    workdir.start(config, path)
    with pytest.raises(ConfigError, match="config.retrieval.bm25_k1=5.0: .*trained with 0.9"):
        api.load(path, "bm25", config={"retrieval.bm25_k1": 5.0})


def test_an_index_of_words_is_built_with_any_values(path, monkeypatch):
    config = overrides.replace(workdir.read(path), {"runs": ("bm25",)})
    workdir.start(config, path)
    built = []
    monkeypatch.setattr(api, "_build", lambda job, *_: built.append(job.config.retrieval.bm25_k1))
    rag_jax.build_index("p.tsv", path / "i", path, run="bm25", config={"retrieval.bm25_k1": 5.0})
    assert built == [5.0]
