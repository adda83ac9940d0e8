"""One writer a folder: what it guards against is two commands that mix in one workdir."""

import errno
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
from contextlib import nullcontext

import filelock
import jax
import pytest

from rag_jax import hosts, locks
from rag_jax.errors import UserError

HOLDER = """
import pathlib, sys
from rag_jax import hosts, locks
hosts.leads, hosts.exchange = lambda: True, lambda value: [value]  # without jax: seconds
with locks.exclusive(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process, which holds the folder."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], text=True,
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_the_second_process_hears_who_holds_the_folder(holder, tmp_path):
    with pytest.raises(locks.InUseError) as error, locks.exclusive(tmp_path):
        pytest.fail("two at once")
    since = json.loads((tmp_path / ".lock.json").read_text())["since"]
    assert (f"{tmp_path}: process {holder.pid} on {socket.gethostname()}, since {since}, is "
            "writing here" in str(error.value))
    holder.communicate()  # its input ends, and so does it
    with locks.exclusive(tmp_path):
        assert json.loads((tmp_path / ".lock.json").read_text())["pid"] == os.getpid()
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_a_killed_process_holds_nothing(holder, tmp_path):
    """A lock that a kill leaves behind would close the workdir for ever."""
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert (tmp_path / ".lock.json").exists()
    with locks.exclusive(tmp_path):
        pass


def test_a_thread_may_ask_twice_and_another_may_not(tmp_path):
    """Stages ask again for what their caller holds; two threads would mix as two processes do."""
    refused = []

    def second():
        try:
            with locks.exclusive(tmp_path):
                pass
        except locks.InUseError as error:
            refused.append(str(error))

    with locks.exclusive(tmp_path):
        link = tmp_path.with_name("link")
        link.symlink_to(tmp_path)
        with locks.exclusive(link):
            pass
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
    assert len(refused) == 1 and f"{tmp_path}: another thread of this process is" in refused[0]
    second()
    assert len(refused) == 1, "freed at the end of the outer one"


@pytest.mark.parametrize("then, moved", [
    ("", False), ("cleaned", False), ("other network", False), ("without locks", False),
    ("gone", True), ("another's", True), ("another", True)])
def test_a_folder_that_was_moved_is_no_longer_written_into(tmp_path, monkeypatch, then, moved):
    """A training made the old name again and wrote there, beside the one that had begun there."""
    folder = tmp_path / "run"
    locks.check_held(folder)
    with locks.exclusive(folder):
        if moved:
            folder.rename(tmp_path / "moved")
        if then == "cleaned":
            (folder / ".lock.json").unlink()
            (folder / ".lock").unlink()
        if then == "other network":
            monkeypatch.setattr(socket, "gethostname", lambda: "laptop.home")
        if then == "without locks":
            monkeypatch.setattr(filelock.FileLock, "is_locked", False)
        if then in ("another", "another's", "without locks"):
            folder.mkdir(exist_ok=True)
        if then in ("another's", "without locks"):
            (folder / ".lock.json").write_text(json.dumps({
                "host": socket.gethostname(), "pid": os.getpid(), "since": "2026-01-01"}))
        with pytest.raises(UserError, match="run: was moved") if moved else nullcontext():
            locks.check_held(folder)
    assert (folder / ".lock.json").exists() == (then in ("another's", "without locks"))


def test_a_link_that_is_set_to_another_folder_is_no_longer_written_through(tmp_path):
    """The results of a finished training behind it were overwritten."""
    link = tmp_path / "latest"
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    link.symlink_to("one")
    with locks.exclusive(link):
        locks.check_held(link)
        link.unlink()
        link.symlink_to("two")
        locks.check_held(tmp_path / "one")
        with pytest.raises(UserError, match="latest: was moved"):
            locks.check_held(link)


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "f").touch()
    with pytest.raises(UserError, match=r"/f: is a file; name a folder"):
        with locks.exclusive(tmp_path / "f"):
            pass


def test_an_interrupt_as_it_is_let_go_frees_it(tmp_path, monkeypatch):
    """IPython keeps the last exception, and with it the lock: until its kernel ended, "another
    process" wrote in the folder."""
    def interrupted(self, missing_ok=False):
        monkeypatch.undo()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as kept, locks.exclusive(tmp_path):
        monkeypatch.setattr(pathlib.Path, "unlink", interrupted)
    with locks.exclusive(tmp_path):
        assert kept.value is not None and len(locks._held) == 1


def test_an_error_inside_frees_it(tmp_path):
    with pytest.raises(KeyError), locks.exclusive(tmp_path):
        raise KeyError
    assert not locks._held
    with locks.exclusive(tmp_path):
        pass


def test_all_processes_of_a_job_end_when_the_first_is_refused(monkeypatch, holder, tmp_path):
    """The others would wait for it, without a word."""
    heard = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(hosts, "exchange", lambda value: heard.append(value) or heard[:1])
    for process in (0, 1):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        with pytest.raises(locks.InUseError, match=f"process {holder.pid} on"):
            with locks.exclusive(tmp_path):
                pytest.fail("refused")
    assert heard[1] is None, "the second never asks for the lock itself"


@pytest.mark.parametrize("process,seen,writable,hindrance", [
    (0, True, True, None),
    (1, False, True, "process 1 does not see what process 0 writes there"),
    (1, True, False, "process 1 may not write there")])
def test_all_processes_end_where_one_cannot_work_in_the_folder(
        monkeypatch, tmp_path, process, seen, writable, hindrance):
    """Of a workdir that was not shared, process 1 took what process 0 had written for the name of
    a tokenizer at Hugging Face; where it could not write, it said so at the first checkpoint."""
    said, answers = [], iter([[None, None], [None, hindrance or "process 1 is not there"]])
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: process)
    monkeypatch.setattr(hosts, "exchange", lambda value: said.append(value) or next(answers))
    monkeypatch.setattr(locks, "_UNSEEN_SECS", 0.0)
    if process and seen:
        (tmp_path / ".lock.json").touch()
    monkeypatch.setattr(os, "access", lambda path, mode: writable or not mode & os.W_OK)
    with pytest.raises(UserError, match=f"^{tmp_path}: process 1 .*; name a folder on a file"):
        with locks.exclusive(tmp_path):
            pytest.fail("process 1 cannot go on")
    assert said == [None, hindrance]


def test_a_process_that_may_not_look_tells_the_others(monkeypatch, tmp_path):
    """They waited for it until it was taken for dead."""
    def forbidden(there):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(locks, "seen", forbidden)
    with pytest.raises(UserError, match="process 0 cannot look there .*denied.*; name a"):
        locks.check_shared(tmp_path)


def test_a_file_of_another_host_may_be_seen_later(monkeypatch, tmp_path):
    """NFS remembers for a while what was not there."""
    waited = []
    monkeypatch.setattr(locks.time, "sleep", lambda secs: (
        waited.append(secs), (tmp_path / ".lock.json").touch()))
    locks.check_shared(tmp_path)
    assert len(waited) == 1


def test_a_file_system_without_locks_is_told_and_used(monkeypatch, tmp_path):
    """Some network file systems have none: a run there must go on, and not fall back to a lock
    file that outlives its process."""
    import fcntl

    def flock(descriptor, operation):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    for _ in range(2):
        with pytest.warns(UserWarning, match="this file system has no locks"):
            with locks.exclusive(tmp_path):
                pass


