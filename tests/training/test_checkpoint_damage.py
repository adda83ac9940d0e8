"""Damage never passes for weights, and kills leave the last complete checkpoint."""

import errno
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

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
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

from rag_jax import files, hosts, locks
from rag_jax.training import orbax_noise
from rag_jax.training.checkpoint import (
    CheckpointDamaged,
    Checkpointer,
    CheckpointError,
    CheckpointMismatch,
)

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
        assert f"step {step}" in text and "other steps there: 1." in text
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
    with pytest.raises(CheckpointError, match="stored bytes of .* have changed.*steps there: 1"):
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


def test_damaged_meta_keeps_no_directory_from_opening(tmp_path, capsys):
    """One damaged step must not lock the others away; the writer goes on beside it."""
    with Checkpointer(tmp_path, keep=3, best_metric=("em",)) as checkpointer:
        save_scored(checkpointer, {1: 1.0, 2: 2.0})
    (tmp_path / "2" / "meta" / "metadata").write_text("{")
    with Checkpointer(tmp_path, keep=3, best_metric=("em",)) as checkpointer:
        assert checkpointer.best_step() == 1
        save_scored(checkpointer, {3: 3.0})
        assert checkpointer.best_step() == 3
    assert "step 2 in" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["1", "3", "damaged-2"]


@pytest.mark.parametrize("name", ["1", "3"])
def test_a_step_under_the_name_of_another_is_damaged(tmp_path, capsys, name):
    """By its name alone, a run that had been copied or renamed was taken to have come further, or
    went on with the numbers of another step."""
    save_steps(tmp_path, [1, 2])
    shutil.rmtree(tmp_path / name, ignore_errors=True)
    shutil.copytree(tmp_path / "2", tmp_path / name)
    told = f"step {name} in .*: it is step 2 under another name.; other steps there: "
    with Checkpointer(tmp_path, read_only=True) as reader, pytest.raises(
            CheckpointDamaged, match=told):
        reader.verify(int(name))
    with Checkpointer(tmp_path) as writer:
        assert writer.restore_latest(*abstract_of(2))[0] == 2
    assert sorted(os.listdir(tmp_path)) == sorted({"1", "2", f"damaged-{name}"} - {name})
    assert "is step 2 under another name" in capsys.readouterr().err


def abstract_of(step):
    """What a step that `save_steps` saved is restored as."""
    return [abstract(tree) for tree in make_state(step)]


@pytest.mark.parametrize("read", ["verify", "train"])
def test_a_step_that_is_a_link_is_not_read(tmp_path, read):
    """As no link in it is. The step behind it may be sound, so that nothing is set aside."""
    save_steps(tmp_path / "run", [1, 2])
    (tmp_path / "run" / "2").rename(tmp_path / "2")
    (tmp_path / "run" / "2").symlink_to(tmp_path / "2")
    told = r"step 2 in .*\(2 is a link.*may be sound, and nothing is changed there"
    with pytest.raises(CheckpointError, match=told) as caught:
        with Checkpointer(tmp_path / "run", read_only=read == "verify") as checkpointer:
            checkpointer.verify(2)
    assert not isinstance(caught.value, CheckpointDamaged)
    assert sorted(os.listdir(tmp_path / "run")) == ["1", "2"]


def test_a_second_damaged_step_of_a_number_is_kept_too(tmp_path):
    for _ in range(2):
        save_steps(tmp_path, [1])
        shutil.rmtree(tmp_path / "1" / "params")
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.all_steps() == []
    assert sorted(os.listdir(tmp_path)) == ["damaged-1", "damaged-1-2"]


SCORES = {1: 10.0, 2: 30.0, 3: 20.0}
DAMAGE = {
    "flip": lambda step: flip(step / "meta" / "metadata"),
    "params": lambda step: shutil.rmtree(step / "params"),
    "meta": lambda step: shutil.rmtree(step / "meta"),
    "array": lambda step: [flip(file) for file in files_of(step / "params")],
}


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def restore_best(directory):
    with Checkpointer(directory, read_only=True, best_metric=("em",)) as checkpointer:
        return checkpointer.restore_best({"w": jax.ShapeDtypeStruct((2,), jnp.int32)})


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_best_step_is_named_when_the_next_best_takes_its_place(tmp_path, damage, capsys):
    """Otherwise another model answers, and nobody knows."""
    with Checkpointer(tmp_path, keep=9, best_metric=("em",)) as checkpointer:
        save_scored(checkpointer, SCORES)
    assert restore_best(tmp_path)[0] == 2 and capsys.readouterr().err == ""
    DAMAGE[damage](tmp_path / "2")
    step, params, _ = restore_best(tmp_path)
    assert step == 3 and params["w"].tolist() == [3, 3]
    line, = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: Checkpoint step 2 in {tmp_path} is damaged")
    assert line.endswith("Taking step 3 in its place.")
    assert sorted(os.listdir(tmp_path)) == ["1", "2", "3"], "a reader changes nothing"
    for other in "13":
        DAMAGE[damage](tmp_path / other)
    with pytest.raises(CheckpointDamaged, match="step [123] in"):
        restore_best(tmp_path)


def test_what_answering_does_not_read_may_be_damaged(tmp_path, capsys):
    with Checkpointer(tmp_path, keep=9, best_metric=("em",)) as checkpointer:
        save_scored(checkpointer, SCORES)
    shutil.rmtree(tmp_path / "2" / "opt_state")
    assert restore_best(tmp_path)[0] == 2 and capsys.readouterr().err == ""


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_parameters_that_are_not_finite_are_refused_by_name(tmp_path, bad):
    """A NaN made every answer empty, and of probability 1."""
    params = {"generator": {"layer": {"bias": jnp.zeros(3), "kernel": jnp.array([0.0, bad])}}}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, params, {"count": jnp.zeros(())}, {})
        for call in (checkpointer.restore_best, lambda tree: checkpointer.restore_params(1, tree)):
            with pytest.raises(CheckpointDamaged, match="step 1 .*r/layer/kernel holds NaN"):
                call(abstract(params))


def test_a_step_that_gives_way_while_it_is_read_is_not_damaged(tmp_path, monkeypatch, capsys):
    """A training run beside the reader; the step that took its place answers."""
    with Checkpointer(tmp_path, keep=9, best_metric=("em",)) as checkpointer:
        save_scored(checkpointer, SCORES)
    read = Checkpointer.restore_params

    def slow(self, step, tree):
        shutil.rmtree(tmp_path / "2", ignore_errors=True)
        return read(self, step, tree)

    monkeypatch.setattr(Checkpointer, "restore_params", slow)
    assert restore_best(tmp_path)[0] == 3 and capsys.readouterr().err == ""


def test_a_step_goes_as_a_whole(tmp_path, monkeypatch):
    """Half a checkpoint, after a kill, would read as a damaged one, perhaps the best."""
    remove, seen = shutil.rmtree, []

    def watched(path):
        seen.append([name for name in sorted(os.listdir(tmp_path)) if name.isdigit()])
        assert set(os.listdir(path / "removed")) >= {"params", "opt_state", "meta"}
        remove(path)

    monkeypatch.setattr(files.shutil, "rmtree", watched)
    with Checkpointer(tmp_path, keep=1) as checkpointer:
        save_scored(checkpointer, {1: 1.0, 2: 2.0, 3: 3.0})
    assert seen == [["2"], ["3"]], "its name is gone before anything in it"
    assert os.listdir(tmp_path) == ["3"]


def trees_of_small():
    """Of what `save_small` saves."""
    return [{"w": jax.ShapeDtypeStruct((2,), jnp.int32)},
            {"count": jax.ShapeDtypeStruct((), jnp.int32)}]


# What resumes, and what answers.
READERS = [lambda writer: writer.restore_latest(*trees_of_small()),
           lambda writer: writer.restore_best(trees_of_small()[0])]


def fails_in_orbax(monkeypatch, error):
    """Makes Orbax meet an error while it reads an array, which it then wraps."""
    async def fail(**_):
        raise error

    monkeypatch.setattr("orbax.checkpoint._src.serialization.serialization._read_shard", fail)


@pytest.mark.parametrize("read", READERS, ids=["latest", "best"])
@pytest.mark.parametrize("error, told", [
    (MemoryError("Unable to allocate"), "MemoryError: Unable to allocate"),
    (ValueError("RESOURCE_EXHAUSTED: no 'cast' driver [os_error_code='24']"), "Too many open"),
    (OSError(errno.EIO, "Input/output error"), "Input/output error")])
def test_what_the_machine_could_not_do_is_no_damage(tmp_path, monkeypatch, capsys, read, error,
                                                    told):
    """Short of memory or of open files for a moment, a resumed stage put its only sound checkpoint
    aside and began again at step 0; an evaluation took a worse one."""
    with Checkpointer(tmp_path, keep=9, best_metric=("em",)) as writer:
        save_scored(writer, SCORES)
        fails_in_orbax(monkeypatch, error)
        with pytest.raises(CheckpointError, match=f"could not be read .*{told}") as caught:
            read(writer)
        assert not isinstance(caught.value, CheckpointDamaged)
        assert sorted(os.listdir(tmp_path)) == ["1", "2", "3"] and capsys.readouterr().err == ""
        monkeypatch.undo()
        assert read(writer)[0] in (2, 3)


@pytest.mark.parametrize("read", READERS, ids=["latest", "best"])
def test_ctrl_c_while_a_step_is_read_is_no_damage(tmp_path, monkeypatch, read):
    """Orbax makes an ordinary error of it: the only checkpoint was put aside."""
    with Checkpointer(tmp_path, best_metric=("em",)) as writer:
        save_scored(writer, {3: 10.0})
        fails_in_orbax(monkeypatch, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            read(writer)
    assert os.listdir(tmp_path) == ["3"]


def test_a_reader_takes_another_step_where_the_disk_cannot_read_the_best(
        tmp_path, monkeypatch, capsys):
    """It changes nothing, and says so; the sector may never be read again."""
    with Checkpointer(tmp_path, keep=9, best_metric=("em",)) as writer:
        save_scored(writer, SCORES)
    read = ocp.Checkpointer.restore

    def restore(self, folder, **given):
        if folder.name == "2":
            raise OSError(errno.EIO, "Input/output error")
        return read(self, folder, **given)

    with Checkpointer(tmp_path, best_metric=("em",), read_only=True) as reader:
        monkeypatch.setattr(ocp.Checkpointer, "restore", restore)
        assert reader.restore_best(trees_of_small()[0])[0] == 3
    assert "Taking step 3 in its place" in capsys.readouterr().err


def test_all_processes_are_told_what_one_could_not_read(tmp_path, monkeypatch):
    """Or one would put the step aside, and the others wait for it elsewhere."""
    with Checkpointer(tmp_path) as writer:
        save_small(writer, 1)
        other = ["Exception: wrapped", "MemoryError"]
        monkeypatch.setattr(hosts, "exchange", lambda value: [value, other] if isinstance(
            value, list) and value == [None, None] else [value])
        with pytest.raises(CheckpointError, match=r"could not be read \(MemoryError\)"):
            writer.restore_latest(*trees_of_small())
    assert os.listdir(tmp_path) == ["1"]


@pytest.fixture
def second(tmp_path, monkeypatch):
    """(steps that this process, the second of two, does not see yet; what Orbax has read; answers
    of process 0 otherwise than that it sees all of steps 1 and 2)."""
    save_steps(tmp_path, [1, 2])
    hidden, read, answers = {2}, [], {}
    complete, restore = Checkpointer._is_complete, ocp.Checkpointer.restore

    def exchange(value):
        kind = "there" if isinstance(value, bool) else (
            "steps" if value and isinstance(value[0], int) else "none")
        sees = {"there": True, "steps": [1, 2], "none": value and [None, None]}
        return [answers.get(kind, sees[kind]), value]

    monkeypatch.setattr(hosts, "index", lambda: 1)
    monkeypatch.setattr(hosts, "exchange", exchange)
    monkeypatch.setattr(Checkpointer, "_is_complete", lambda self, step, *items: (
        step not in hidden and complete(self, step, *items)))
    monkeypatch.setattr(ocp.Checkpointer, "restore", lambda self, folder, **given: (
        read.append(folder.name), restore(self, folder, **given))[1])
    return hidden, read, answers


def test_a_step_that_another_host_has_just_saved_is_waited_for(second, tmp_path, monkeypatch):
    """Orbax reads by all processes together: the one that did not see the step had left, and the
    others waited for it for ever."""
    hidden, _, _ = second
    monkeypatch.setattr(locks.time, "sleep", lambda secs: hidden.clear())
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.all_steps() == [1, 2]
        assert checkpointer.restore_latest(*abstract_of(2))[0] == 2


def test_a_step_that_one_process_never_sees_is_not_damaged(second, tmp_path, monkeypatch):
    _, read, _ = second
    monkeypatch.setattr(locks, "_UNSEEN_SECS", 0.0)
    told = r"could not be read \(process 1 does not see all of params.*nothing is changed there"
    with pytest.raises(CheckpointError, match=told) as caught:
        Checkpointer(tmp_path)
    assert not isinstance(caught.value, CheckpointDamaged)
    assert read == ["1"] and sorted(os.listdir(tmp_path)) == ["1", "2"]


def test_a_step_that_process_0_finds_incomplete_is_read_by_none(second, tmp_path):
    hidden, read, answers = second
    hidden.clear()
    answers["there"] = False
    Checkpointer(tmp_path).close()
    assert read == []


def test_all_processes_take_the_steps_that_process_0_sees(second, tmp_path, monkeypatch):
    """Where one did not see the last yet, it saved that again, and waited for the others alone."""
    hidden, _, _ = second
    hidden.clear()
    with Checkpointer(tmp_path) as checkpointer:
        hidden.add(2)
        assert checkpointer.all_steps() == [1, 2] and checkpointer.latest_step() == 2
        assert checkpointer.latest_here() == 1


def test_a_folder_that_cannot_be_listed_has_steps_all_the_same(tmp_path, monkeypatch):
    """With too many files open it looked empty, and training began again at step 0."""
    def refuse(path):
        raise OSError(errno.EMFILE, "Too many open files")

    with Checkpointer(tmp_path) as writer:
        save_small(writer, 1)
        for name in ("listdir", "scandir"):
            monkeypatch.setattr(os, name, refuse)
        with pytest.raises(OSError, match="Too many open files"):
            writer.restore_latest(*trees_of_small())
        monkeypatch.undo()


def test_absent_step_names_those_there_are(tmp_path):
    save_steps(tmp_path, [1, 2])
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 7 .*steps there: 1, 2"):
        restore(tmp_path, 7)


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_failed_save_surfaces_and_later_saves_work(tmp_path, monkeypatch, caplog, platform):
    """A disk that fills up while the save is written, here by a limit on the size of files: 300
    lines of tracebacks stood around the error, which did not get as far as the reason."""
    large = {"w": jnp.asarray(np.random.default_rng(0).standard_normal(1 << 18, np.float32))}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    with Checkpointer(tmp_path) as checkpointer:
        save_small(checkpointer, 1)
        checkpointer.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
        try:
            with pytest.raises(CheckpointError, match="Saving .* failed .*large") as caught:
                checkpointer.save(2, large, large, {})
                assert platform == "tpu", "it is written when save returns"
                save_small(checkpointer, 3)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert len(str(caught.value).splitlines()) == 1 and not caplog.records
        assert caught.value.__cause__ is not None, "a program may look for an error of its own"
        checkpointer.wait()
        assert checkpointer.all_steps() == [1]
        save_small(checkpointer, 3)  # threads of the other save may still write where 2 was
        assert checkpointer.all_steps() == [1, 3]


def test_save_that_cannot_begin_leaves_no_writer_open(tmp_path, monkeypatch):
    closed = []

    def refuse(self, *_, **__):
        raise OSError("no space left")

    with Checkpointer(tmp_path) as checkpointer:
        monkeypatch.setattr(ocp.AsyncCheckpointer, "save", refuse)
        monkeypatch.setattr(ocp.AsyncCheckpointer, "close", lambda self: closed.append(self))
        with pytest.raises(CheckpointError, match="Saving .* failed .*no space left"):
            save_small(checkpointer, 1)
        assert len(closed) == 1
        monkeypatch.undo()
        save_small(checkpointer, 1)
        assert checkpointer.all_steps() == [1]


def test_a_save_that_waited_for_a_process_in_vain_is_not_told_as_disk_trouble(
        tmp_path, monkeypatch):
    """Where one of several processes had died, the others advised to look at the free space."""
    def wait(self):
        raise TimeoutError("Timed out while waiting for async_write_complete barrier.")

    with Checkpointer(tmp_path) as checkpointer:
        monkeypatch.setattr(ocp.AsyncCheckpointer, "wait_until_finished", wait)
        for count, advice in ((1, "check the free space"), (2, "process of the job is gone")):
            monkeypatch.setattr(hosts, "count", lambda count=count: count)
            monkeypatch.setattr(hosts, "exchange", lambda value: [value])
            with pytest.raises(CheckpointError, match=f"barrier.*{advice}"):
                save_small(checkpointer, count)


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
