"""A frozen document encoder is saved once, and neither the state nor its checkpoints have it."""

import dataclasses
import shutil

import jax
import numpy as np
import pytest
import tiny

from rag_jax import parallel
from rag_jax.config import Config, MeshConfig
from rag_jax.models import rag
from rag_jax.training import document_encoder, pretrained, step, verifying, warm_up
from rag_jax.training.checkpoint import (
    NO_OPTIMISER,
    CheckpointDamaged,
    Checkpointer,
    CheckpointError,
    CheckpointMismatch,
)
from rag_jax.training.loop import run_stage
from tests.training.test_loop import first_state, saved, stage
from tests.training.test_verifying import made  # noqa: F401 (a fixture)

ENCODER = document_encoder.TOWER
OTHERS = ("query_encoder", "generator")


@pytest.fixture(scope="module")
def mesh():
    return parallel.make_mesh(MeshConfig(1, 1, 1), jax.devices()[:1])


@pytest.fixture(scope="module")
def model():
    return tiny.rag_model()


@pytest.fixture(scope="module")
def params(model, mesh):
    return step.fresh_params(model, rag.TOWERS, 0, mesh)


def save(folder, params, number=0):
    with Checkpointer(folder, keep=9) as checkpointer:
        checkpointer.save(number, params, NO_OPTIMISER, {})


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_run_is_read_whole_whether_its_steps_have_the_encoder_or_not(
        model, mesh, params, tmp_path):
    """Runs of earlier versions have steps with it, and both kinds once such a run has gone on."""
    other = {ENCODER: jax.tree.map(lambda x: x + 1, params[ENCODER])}
    save(tmp_path, {**params, **other}, 1)
    assert_same(pretrained.restore_run(tmp_path, model, mesh)[0], {**params, **other})
    save(tmp_path, {tower: params[tower] for tower in OTHERS}, 2)
    with pytest.raises(CheckpointError, match="document_encoder: the document encoder of this run "
                                              "is missing; copy it back .* run the training"):
        pretrained.restore_run(tmp_path, model, mesh)
    document_encoder.save(tmp_path, other)
    document_encoder.save(tmp_path, {ENCODER: params[ENCODER]})  # in its place
    assert_same(pretrained.restore_run(tmp_path, model, mesh)[0], params)
    first, _ = pretrained.restore_towers(tmp_path, model.towers, model, mesh, 1, (ENCODER,))
    assert_same(first, {**params, **other})


def test_no_other_tower_may_be_missing(model, mesh, params, tmp_path):
    save(tmp_path, {tower: params[tower] for tower in ("generator", ENCODER)})
    with pytest.raises(CheckpointMismatch, match="query_encoder/.* is missing"):
        pretrained.restore_run(tmp_path, model, mesh)


def test_a_damaged_one_is_named_with_what_saves_it_anew(
        made, model, mesh, params, tmp_path):  # noqa: F811
    work = shutil.copytree(made[1], tmp_path / "w")
    run = work / "rag_token"
    document_encoder.save(run, {ENCODER: params[ENCODER]})
    names = [part.name for part in verifying.verify(work) if part.size == "checkpoint"]
    assert names == [str(run / "3"), str(run / ENCODER / "0")]
    array = max((run / ENCODER / "0" / "params").rglob("d/*"), key=lambda f: f.stat().st_size)
    array.write_bytes(b"\0" * array.stat().st_size)
    damaged, = [part for part in verifying.verify(work) if part.damage]
    assert damaged.name == str(run / ENCODER / "0")
    with pytest.raises(CheckpointDamaged, match="Or remove .*document_encoder and run the train"):
        document_encoder.read(run, model, mesh)


def test_a_run_of_an_earlier_version_goes_on_without_it(tmp_path):
    """Its last step has a tower that the state of this version has not."""
    toy, state = stage(tmp_path, steps=8)[0], first_state()
    old = {"k": np.ones(3, np.float32)}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(4, {**state.params, "old": old}, state.opt_state, {"pending": {}})
    with pytest.raises(CheckpointMismatch, match="old/k"):
        run_stage(toy)
    toy = dataclasses.replace(toy, apart={"old": {"k": jax.ShapeDtypeStruct((3,), np.float32)}})
    assert_same(run_stage(dataclasses.replace(toy, steps=4)).params, state.params)
    assert run_stage(toy).params.keys() == state.params.keys() and saved(tmp_path) == [8]
    with Checkpointer(tmp_path, read_only=True) as checkpointer:
        params, _ = checkpointer.restore_params(8, toy.abstract_state.params)
    assert params.keys() == state.params.keys()


def test_warm_towers_are_read_once_they_have_been_given_away(
        model, mesh, params, tmp_path, monkeypatch):
    """A run holds its state alone, not also what it began from."""
    job = type("Job", (), {"config": Config(), "model": model, "mesh": mesh, "workdir": tmp_path})
    save(tmp_path / "retriever", {tower: params[tower] for tower in warm_up.ENCODERS})
    save(tmp_path / "generator", {"generator": params["generator"]})
    reads, restore = [], pretrained.restore_towers
    monkeypatch.setattr(pretrained, "restore_towers", lambda folder, *given, **more: (
        reads.append(folder.name) or restore(folder, *given, **more)))
    warm = warm_up.WarmTowers(job, dict(params))
    assert warm.params(OTHERS)["generator"] is params["generator"] and not reads
    warm.forget()
    assert_same(warm.params((ENCODER,)), {ENCODER: params[ENCODER]})
    assert reads == ["retriever"]
    assert_same(warm.params(rag.TOWERS), params)
    assert reads == ["retriever", "generator"], "the query encoder came with the other"
    warm.forget()
    assert_same(warm.params(("generator",)), {"generator": params["generator"]})
    assert reads[2:] == ["generator"]
