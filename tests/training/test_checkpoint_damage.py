"""Damage never passes for weights, and kills leave the last complete checkpoint."""

import gc
import json
import os
import pathlib
import random
import resource
import shutil
import signal
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from test_checkpoint import (
    abstract,
    assert_same_bits,
    make_state,
    restore,
    save_scored,
    save_small,
    save_steps,
)

from rag_jax.training import orbax_noise
from rag_jax.training.checkpoint import Checkpointer, CheckpointError, CheckpointMismatch

ROOT = pathlib.Path(__file__).resolve().parents[2]


def files_of(step_dir):
    return sorted(path for path in step_dir.rglob("*") if path.is_file() and path.stat().st_size)


@pytest.fixture
def told(monkeypatch):
    """What Python would dump on stderr because it cannot be raised."""
    told = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: told.append(unraisable.exc_value))
    return told


def assert_harmless_or_reported(directory, step, expected):
    """Restores a tampered step: either the saved bits come back or one clear sentence does."""
    try:
        params, opt_state, meta = restore(directory, step, expected)
    except CheckpointError as error:
        assert not isinstance(error, CheckpointMismatch)
        text = str(error)
        assert len(text.splitlines()) == 1 and len(text) < 600
        assert f"step {step}" in text and "try --step=1 " in text
        assert error.__cause__ is None and error.__context__ is None
        return True
    assert_same_bits(params, expected[0])
    assert_same_bits(opt_state, expected[1])
    assert meta == {"step": step}
    return False


def test_flipped_bytes_are_reported_or_harmless_in_every_file(tmp_path, told):
    save_steps(tmp_path, [1, 2])
    expected = make_state(2)
    rng = random.Random(0)
    reported = 0
    for path in files_of(tmp_path / "2"):
        sound = path.read_bytes()
        for _ in range(2):
            damaged = bytearray(sound)
            damaged[rng.randrange(len(sound))] ^= 1 << rng.randrange(8)
            path.write_bytes(damaged)
            reported += assert_harmless_or_reported(tmp_path, 2, expected)
        path.write_bytes(sound)
    assert reported > 5
    assert not assert_harmless_or_reported(tmp_path, 2, expected)
    gc.collect()
    assert told == [], "a failed read left a dump for stderr"


def test_only_reports_of_orbax_are_dropped(told):
    class Careless:
        def __del__(self):
            raise KeyError("mine")

    orbax_noise.drop_orphans()
    orbax_noise.drop_orphans()
    Careless()
    gc.collect()
    assert [repr(error) for error in told] == ["KeyError('mine')"]


@pytest.mark.parametrize("item", ["params", "opt_state"])
def test_sound_files_with_other_values_are_reported(tmp_path, item):
    """What Orbax reads without complaint is compared with the digests."""
    save_steps(tmp_path, [1, 2])
    shutil.rmtree(tmp_path / "2" / item)
    shutil.copytree(tmp_path / "1" / item, tmp_path / "2" / item)
    with pytest.raises(CheckpointError, match="stored bytes of .* have changed.*try --step=1"):
        restore(tmp_path, 2)


def test_changed_meta_is_reported(tmp_path):
    save_steps(tmp_path, [1, 2])
    path = tmp_path / "2" / "meta" / "metadata"
    stored = json.loads(path.read_text())
    stored["content"]["meta"]["step"] = 3
    path.write_text(json.dumps(stored))
    with pytest.raises(CheckpointError, match="meta item have changed"):
        restore(tmp_path, 2)


def test_missing_and_truncated_files_are_reported_or_harmless(tmp_path, told):
    save_steps(tmp_path, [1, 2])
    expected = make_state(2)
    reported = set()
    for path in files_of(tmp_path / "2"):
        sound = path.read_bytes()
        path.write_bytes(sound[: len(sound) // 2])
        if assert_harmless_or_reported(tmp_path, 2, expected):
            reported.add(path.name)
        path.unlink()
        if assert_harmless_or_reported(tmp_path, 2, expected):
            reported.add(path.name)
        path.write_bytes(sound)
    assert {"_METADATA", "metadata", "manifest.ocdbt"} <= reported


@pytest.mark.parametrize("item", ["params", "opt_state", "meta"])
def test_missing_item_is_reported_and_the_step_is_not_the_latest(tmp_path, item):
    save_steps(tmp_path, [1, 2])
    shutil.rmtree(tmp_path / "2" / item)
    assert assert_harmless_or_reported(tmp_path, 2, make_state(2))
    with Checkpointer(tmp_path, read_only=True, best_metric=("em",)) as checkpointer:
        assert checkpointer.latest_step() == 1


def test_damaged_meta_keeps_no_directory_from_opening(tmp_path):
    """One damaged step must not lock the others away; the writer goes on beside it."""
    with Checkpointer(tmp_path, keep=3, best_metric=("em",)) as checkpointer:
        save_scored(checkpointer, {1: 1.0, 2: 2.0})
    (tmp_path / "2" / "meta" / "metadata").write_text("{")
    with Checkpointer(tmp_path, keep=3, best_metric=("em",)) as checkpointer:
        assert checkpointer.best_step() == 1
        save_scored(checkpointer, {3: 3.0})
        assert checkpointer.best_step() == 3


def test_absent_step_names_those_there_are(tmp_path):
    save_steps(tmp_path, [1, 2])
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 7 .*steps there: 1, 2"):
        restore(tmp_path, 7)


def test_failed_background_save_surfaces_and_later_saves_work(tmp_path):
    """A disk that fills up while the save is written, here by a limit on the size of files."""
    large = {"w": jnp.asarray(np.random.default_rng(0).standard_normal(1 << 18, np.float32))}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Checkpointer(tmp_path) as checkpointer:
        save_small(checkpointer, 1)
        checkpointer.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
        try:
            checkpointer.save(2, large, large, {})
            with pytest.raises(CheckpointError, match="Saving .* failed .*free space") as caught:
                save_small(checkpointer, 3)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert len(str(caught.value).splitlines()) == 1
        checkpointer.check()
        assert checkpointer.all_steps() == [1]
        save_small(checkpointer, 2)
        assert checkpointer.all_steps() == [1, 2]


# Kills.

CHILD = """
import sys
sys.path[:0] = [{root!r}, {here!r}]
from test_checkpoint_damage import Checkpointer, make_large_state
with Checkpointer(sys.argv[1], keep=2) as checkpointer:
    for step in range(1 + (checkpointer.latest_step() or 0), 1000):
        state = make_large_state(step)
        print("saving", step, flush=True)
        checkpointer.save(step, *state, {{"step": step}})
        print("writing", step, flush=True)
"""


def make_large_state(step):
    """Two trees that take a while to write, a function of the step."""
    values = np.random.default_rng(step).standard_normal((2, 8, 64, 1024), np.float32)
    return tuple({str(i): jnp.asarray(array) for i, array in enumerate(tree)} for tree in values)


def test_kill_in_the_middle_of_saves_leaves_the_last_complete_step(tmp_path):
    """Each child goes on in the directory that the one before it left behind."""
    code = CHILD.format(root=str(ROOT), here=str(pathlib.Path(__file__).parent))
    rng = random.Random(1)
    complete = 0
    for _ in range(3):
        child = subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        for _ in range(rng.randrange(5, 12)):
            word, step = child.stdout.readline().split()
        os.kill(child.pid, signal.SIGKILL)
        child.communicate()
        # A save waits for the one before it.
        complete = max(complete, int(step) - (1 if word == "writing" else 2))
        with Checkpointer(tmp_path, read_only=True) as checkpointer:
            latest = checkpointer.latest_step()
            assert latest >= complete >= 1, "a step that was complete is gone"
            expected = make_large_state(latest)
            params, opt_state, meta = checkpointer.restore(latest, *map(abstract, expected))
        assert_same_bits(params, expected[0])
        assert_same_bits(opt_state, expected[1])
        assert meta == {"step": latest}
        complete = latest
