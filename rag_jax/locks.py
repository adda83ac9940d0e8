"""One job at a time writes into a folder.

The operating system locks FOLDER/.lock for a process, also on a shared file system, and frees it
when the process ends, however it ends. FOLDER/.lock.json names who holds it.
"""

import contextlib
import datetime
import errno
import json
import logging
import os
import pathlib
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import filelock

from rag_jax import files, hosts
from rag_jax.errors import UserError

_HOLDER = ".lock.json"
_NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK}
_PATIENCE_SECS = 0.5  # how long a holder may take to end, or to write its name
_UNSEEN_SECS = 60.0  # how long NFS may hide a file that another host has written
_log = logging.getLogger(__name__)
_held: dict[tuple[str, int], "_Held"] = {}  # by folder and thread


class InUseError(UserError):
    """Another process, or thread, writes into the folder; the message names it."""


class _Held(NamedTuple):
    """A lock of the folder `path`, as it was named, and what its .lock.json says."""

    lock: filelock.BaseFileLock
    path: str
    inode: tuple[int, int] | None
    record: dict[str, Any]

    def still(self, folder: pathlib.Path) -> bool:
        """Whether it is the lock of the folder that has this name now: by the record, as file
        systems in the network may number their files anew; by the inode where none is left."""
        try:
            return json.loads((folder / _HOLDER).read_text("utf-8")) == self.record
        except (OSError, ValueError):
            return self.inode is not None and _inode(folder) == self.inode


@contextlib.contextmanager
def exclusive(folder: pathlib.Path) -> Iterator[None]:
    """Keeps all other processes from writing into a folder, which is made where it is missing.

    Of the processes of one job, process 0 holds the lock for all; all of them call this. A thread
    that holds it already may call it again.

    Raises:
      InUseError: another process holds it, or another thread; in every process of the job.
      UserError, OSError: it is a file, the lock file cannot be made, or a process of the job
        sees another folder of that name, or may not write there.
    """
    with contextlib.ExitStack() as stack:
        refusal = error = None
        if hosts.leads():
            try:
                stack.enter_context(own(folder))
            except (UserError, OSError) as caught:
                error, refusal = caught, str(caught)
        refusal = hosts.exchange(refusal)[0]
        if refusal is not None:
            raise error or InUseError(refusal)
        check_shared(folder)
        yield


def check_shared(folder: pathlib.Path) -> None:
    """Checks that all processes of this job can work in a folder whose lock process 0 holds.

    Raises:
      UserError: one of them sees another folder of that name, or may not write there; raised in
        every process.
    """
    if hindrances := [one for one in hosts.exchange(_hindrance(folder)) if one]:
        raise UserError(f"{folder}: {hindrances[0]}; name a folder on a file system that all hosts "
                        "share, into which all may write")


def seen(there: Callable[[], bool]) -> bool:
    """Whether there() is true of what another host has written, or becomes so in the time that NFS
    may hide it."""
    end = time.monotonic() + _UNSEEN_SECS
    while not (found := there()) and time.monotonic() < end:
        time.sleep(1)
    return found


def _hindrance(folder: pathlib.Path) -> str | None:
    """Why this process cannot work in the folder; None = it can."""
    try:
        if not seen(lambda: (folder / _HOLDER).exists()):
            return f"process {hosts.index()} does not see what process 0 writes there"
    except OSError as error:
        return f"process {hosts.index()} cannot look there ({error})"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"process {hosts.index()} may not write there"
    return None


@contextlib.contextmanager
def own(folder: pathlib.Path, waits: bool = False) -> Iterator[None]:
    """As `exclusive`, but for this process alone, whatever the others of its job do.

    waits: for the end of another process that holds the lock, instead of raising an InUseError.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: is a file; name a folder, or one that is yet to be made")
    folder.mkdir(parents=True, exist_ok=True)
    key = os.path.realpath(folder), threading.get_ident()
    if key in _held:
        yield
        return
    # A lock that is a file's mere existence would outlive its process.
    lock = filelock.FileLock(folder / ".lock", fallback_to_soft=False)
    holder = folder / _HOLDER
    try:  # an interrupt may come at any line: the lock is released in any case
        try:
            lock.acquire(timeout=_PATIENCE_SECS)
        except filelock.Timeout:
            ours = any(held == key[0] for held, _ in [*_held])
            who = "another thread of this process" if ours else _describe(holder)
            busy = f"{folder}: {who} is writing here"
            if not waits:
                raise InUseError(f"{busy}; wait until it has ended, or end it, and run the same "
                                 "command again (evaluate and generate need not wait)") from None
            _log.warning("%s; going on when it has ended.", busy)
            lock.acquire()
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            warnings.warn(f"{folder}: this file system has no locks ({error}): nothing keeps two "
                          "commands from writing here at the same time", stacklevel=4)
        now = datetime.datetime.now(datetime.UTC).isoformat(" ", "seconds")
        record = {"host": socket.gethostname(), "pid": os.getpid(), "since": now}
        _held[key] = _Held(lock, os.path.abspath(folder), _inode(folder), record)
        files.write_json(holder, record)
        yield
    finally:
        try:
            if (held := _held.pop(key, None)) and held.still(folder):
                holder.unlink(missing_ok=True)
        finally:
            lock.release()


def check_held(folder: pathlib.Path) -> None:
    """Checks that a folder that this process has locked, if it has, still has its name.

    Raises:
      UserError: it was moved, or the link to it was set to another one.
    """
    locked = [held for (path, _), held in [*_held.items()] if held.lock.is_locked
              and (os.path.realpath(folder) == path or os.path.abspath(folder) == held.path)]
    if not all(held.still(folder) for held in locked):
        raise UserError(f"{folder}: was moved, or replaced, while this process wrote there; give "
                        "the command again with the name that it has now")


def _inode(folder: pathlib.Path) -> tuple[int, int] | None:
    """(device, inode) of a folder; None = there is none of this name."""
    try:
        there = os.stat(folder)
    except OSError:
        return None
    return there.st_dev, there.st_ino


def _describe(holder: pathlib.Path) -> str:
    try:
        return "process {pid} on {host}, since {since},".format_map(
            json.loads(holder.read_text("utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
