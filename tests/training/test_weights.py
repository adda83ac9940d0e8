"""A workdir trains from the weights that it began with: a source that changes must not mix in."""

import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest

from rag_jax.cli import verify
from rag_jax.config import Config, ConfigError, overrides
from rag_jax.data.inputs import DONE
from rag_jax.training import pretrained, weights, workdir
from rag_jax.training.checkpoint import Checkpointer
from rag_jax.training.run import train
from tests.hub.checkpoints import edit_config, edit_weights
from tests.training.test_pretrained import (  # noqa: F401 (fixtures)
    config,
    params,
    sources,
    with_files,
)
from tests.training.test_reranker import cross_encoder  # noqa: F401 (a fixture)


def doubled(tensors):
    return {name: 2 * value for name, value in tensors.items()}


def copies(sources, cross_encoder, folder):  # noqa: F811
    """Sources that may change, by their names."""
    for name in ("rag", "context"):
        shutil.copytree(sources[name], folder / name)
    shutil.copytree(cross_encoder, folder / "reranker")
    return {name: str(folder / name) for name in ("rag", "context", "reranker")}


def began(work, run="rag_token"):
    (work / run / "3").mkdir(parents=True)


def test_further_runs_train_from_the_weights_of_the_first_or_are_refused(
        sources, cross_encoder, tmp_path):  # noqa: F811
    """A source that had changed between two commands, or while a run was stopped, was mixed in
    without a word: one run began from other weights than the next, and p(z|x) was another."""
    own = copies(sources, cross_encoder, tmp_path)
    asked = overrides.replace(
        with_files(config(own, rag="rag", document_encoder="context"), tmp_path),
        {"train.steps": 0, "model.reranker.pretrained": own["reranker"],
         "retrieval.reranked": 2, "train.query_encoder_rate": None})
    work = tmp_path / "work"

    def run(name):
        train(overrides.replace(asked, {"runs": (name,)}), work)

    run("closed_book")
    edit_weights(tmp_path / "reranker", doubled)  # closed_book has not read it
    before = (tmp_path / "rag" / "model.safetensors").read_bytes()
    edit_weights(tmp_path / "rag", doubled)
    with pytest.raises(ConfigError, match="work: indexes, closed_book were made from other weights "
                       r"than there are now:\n  query_encoder, from .*rag: other content now: "
                       r"model.safetensors\nrestore what has changed, or name another --workdir"):
        run("frozen")
    (tmp_path / "rag" / "model.safetensors").write_bytes(before)  # of another time
    run("frozen")
    edit_weights(tmp_path / "reranker", doubled)
    with pytest.raises(ConfigError, match=r"work: frozen were made .*\n  reranker, from .*reranker:"
                       " other content now: model.safetensors"):
        run("closed_book")  # the report reads it, too
    assert verify.main([str(work)]) == 0


def test_weights_of_which_nothing_was_made_may_change(sources, cross_encoder, tmp_path):  # noqa: F811
    """A wrong download that is mended is no reason for another workdir; nor is a workdir of an
    earlier version, which has no record."""
    own, path = copies(sources, cross_encoder, tmp_path), tmp_path / "work"
    asked = config(own, rag="rag", document_encoder="context")
    work = workdir.start(asked, path)
    weights.check(asked, work, ("generator",))
    kept = (work / weights.RECORD).read_text()
    weights.check(asked, work, ("generator",))
    assert json.loads((work / weights.RECORD).read_text())["sources"].keys() == {"generator"}
    edit_weights(tmp_path / "rag", doubled)
    weights.check(asked, work, ("generator",))
    assert (work / weights.RECORD).read_text() != kept
    began(work)
    weights.check(asked, work, ("query_encoder", "document_encoder"))  # recorded now
    edit_weights(tmp_path / "context", doubled)
    weights.check(asked, work, ("generator", "query_encoder"))
    with pytest.raises(ConfigError, match="document_encoder, from .*context: other content"):
        weights.check(asked, work, ("document_encoder",))
    (work / weights.RECORD).unlink()
    weights.check(asked, work, ("document_encoder",))


def test_process_0_alone_compares_and_records(sources, tmp_path, monkeypatch):  # noqa: F811
    """All read its verdict: gigabytes are digested once, and nobody goes on where it refuses."""
    asked = config(sources, generator="rag")
    work = workdir.start(asked, tmp_path)
    monkeypatch.setattr(weights.hosts, "leads", lambda: False)
    weights.check(asked, work, ("generator",))
    assert not (work / weights.RECORD).exists()


def test_a_file_of_the_same_size_and_time_is_read_once(
        sources, cross_encoder, tmp_path, monkeypatch):  # noqa: F811
    """Weights have gigabytes, and a RAG checkpoint has two towers in one file."""
    own, read = copies(sources, cross_encoder, tmp_path), []
    asked = config(own, rag="rag", document_encoder="context")
    work = workdir.start(asked, tmp_path / "work")
    digest = weights.inputs.hashlib.file_digest
    monkeypatch.setattr(weights.inputs, "_SETTLED_NS", -(10**12))
    monkeypatch.setattr(weights.inputs.hashlib, "file_digest",
                        lambda file, kind: read.append(file.name) or digest(file, kind))
    for _ in range(2):
        weights.check(asked, work, ("query_encoder", "document_encoder"))
        weights.check(asked, work, ("generator",))
    assert sorted(read) == [f"{tmp_path}/{name}/model.safetensors" for name in ("context", "rag")]


def test_of_a_reranker_its_settings_and_its_tokenizer_count(cross_encoder, tmp_path):  # noqa: F811
    """The configuration has its name alone. A run without passages does not read it."""
    shutil.copytree(cross_encoder, tmp_path / "reranker")
    asked = overrides.replace(Config(), {"model.reranker.pretrained": str(tmp_path / "reranker"),
                                         "runs": ("closed_book", "rag_token")})
    work = workdir.start(asked, tmp_path / "work")
    weights.check(asked, work, ("reranker",))
    began(work, "closed_book")
    edit_config(tmp_path / "reranker", layer_norm_eps=0.25)
    weights.check(asked, work, ("reranker",))
    began(work)
    for edit, name in ((lambda: edit_config(tmp_path / "reranker", layer_norm_eps=0.5), "config"),
                       (lambda: (tmp_path / "reranker/tokenizer.json").write_text("{}"),
                        "config.json, tokenizer")):
        edit()
        with pytest.raises(ConfigError, match="work: rag_token were made from .*\n.*reranker: "
                           f"other content now: {name}.json"):
            weights.check(asked, work, ("reranker",))


def step_of(folder, step, value):
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(step, {"generator": jnp.full(4, value)}, {"m": np.ones(2)}, {})


def test_a_warm_up_that_goes_on_is_other_weights(tmp_path, capsys):
    """The source was a workdir whose warm-up had been stopped half way, and was finished later: two
    runs of one workdir began from different weights."""
    source = workdir.start(overrides.replace(Config(), {"generator_warmup.steps": 6}),
                           tmp_path / "source")
    (source / "data").mkdir()
    (source / "data" / DONE).touch()
    step_of(source / "generator", 4, 1.0)
    asked = overrides.replace(Config(), {"model.generator.pretrained": str(source)})
    pretrained.warn_of_unfinished_sources(asked)
    assert capsys.readouterr().err == (
        f"warning: {source}/generator: has taken 4 of 6 steps, and what starts from it starts from "
        "there; to finish it, give the command again that began it\n")
    work = workdir.start(asked, tmp_path / "work")
    weights.check(asked, work, ("generator",))
    began(work)
    weights.check(asked, work, ("generator",))
    step_of(source / "generator", 6, 2.0)
    pretrained.warn_of_unfinished_sources(asked)
    assert not capsys.readouterr().err
    with pytest.raises(ConfigError, match="work: rag_token were made .*\n  generator, from .*source"
                       ": read then: generator/4; read now: generator/6\n"):
        weights.check(asked, work, ("generator",))
    shutil.rmtree(source / "generator")
    step_of(source / "generator", 4, 1.0)
    weights.check(asked, work, ("generator",))
    shutil.rmtree(source / "generator")
    step_of(source / "generator", 4, 3.0)
    with pytest.raises(ConfigError, match="other content now: generator/4"):
        weights.check(asked, work, ("generator",))


@pytest.mark.parametrize("content", ["{", '{"sources": 3}', '{"sources": {"generator": {}}}',
                                     '{"sources": {"generator": {"files": {"a": {}}}}}'])
def test_a_damaged_record_is_named(tmp_path, content, capsys):
    work = workdir.start(Config(), tmp_path / "work")
    (work / weights.RECORD).write_text(content)
    with pytest.raises(ConfigError, match=r"work/weights.json is damaged .* or remove it: then"):
        weights.check(Config(), work, ())
    assert verify.main([str(work)]) == 1
    assert "weights.json is damaged" in capsys.readouterr().err
