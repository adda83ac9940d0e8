"""One byte of a checkpoint folder changes: whoever reads it gets what was saved, or is told."""

import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rag_jax.training.checkpoint import CheckpointDamaged, Checkpointer
from tests.campaigns import campaign
from tests.campaigns.flips import files_of, flip

SCORES = {1: 10.0, 2: 30.0, 3: 20.0}  # the best is not the latest
BEST = 2


def state(step):
    values = np.random.default_rng(step).standard_normal((2, 40, 8), np.float32)
    return {"generator": {"kernel": values[0]}}, {"mu": values[1], "count": jnp.array(step)}


def abstract(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def same(one, other):
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sound") / "run"
    with Checkpointer(folder, keep=9, best_metric=("em",)) as checkpointer:
        for step, score in SCORES.items():
            checkpointer.save(step, *state(step), {"step": step}, {"em": score})
    return folder


@pytest.mark.parametrize("count", campaign.counts(5, 100))
def test_no_flip_is_silent(sound, tmp_path, count, monkeypatch, capsys):
    """Neither for an answer, which takes the best step, nor for training, which takes the last."""
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)  # of Orbax

    def one_case(rng):
        folder = tmp_path / "run"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(sound, folder)
        step = folder / rng.choice([str(BEST), str(max(SCORES))])  # nobody reads the other
        file = rng.choice(files_of(step))
        flip(file, rng)
        named = f"step {file.relative_to(folder).parts[0]} in {folder} is damaged"
        capsys.readouterr()
        told = []
        with Checkpointer(folder, read_only=True, best_metric=("em",)) as reader:
            try:
                step, params, meta = reader.restore_best(abstract(state(BEST)[0]))
            except CheckpointDamaged as error:
                pytest.fail(f"two sound steps were there: {error}")
        told.append(named in capsys.readouterr().err)
        assert told[0] or step == BEST, "another step, without a word"
        assert same(params, state(step)[0]) and meta == {"step": step}
        with Checkpointer(folder, keep=9, best_metric=("em",)) as writer:
            step, *trees, meta = writer.restore_latest(*abstract(state(BEST)))
            told.append(named in capsys.readouterr().err)
            assert told[1] or (step == max(SCORES) and writer.best_step() == BEST)
        assert same(trees, state(step)) and meta == {"step": step}
        return "detected" if any(told) else "harmless"

    assert set(campaign.run("flips_checkpoints", count, one_case)) <= {"detected", "harmless"}
