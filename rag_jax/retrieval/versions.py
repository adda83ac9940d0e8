"""The versions of an index folder. Whoever opens the folder sees one complete version.

    rag_jax-index.json   the pointer: names the current version, and marks the folder as an index
    versions/1/          a version (manifest.py), never changed once it has this name
    versions/.next.rag_jax-work/    the next one, while it is built (publish.py)

An open index holds a lock on its version (flock, shared, on its manifest.json) until it is garbage
collected. Old versions that nobody holds are removed. A folder that has a manifest.json of its own
is a single version: an index made before there were several.
"""

import contextlib
import hashlib
import io
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from rag_jax import files
from rag_jax.retrieval.json_files import read_json_bytes, regular_file
from rag_jax.retrieval.protocol import RetrievalError

try:
    import fcntl
except ImportError:  # Windows, which does not remove open files
    fcntl = None

POINTER = "rag_jax-index.json"
AGAIN = "copy it again from where it is whole, or build it again"
_FORMAT = 2
Opened = TypeVar("Opened")


def versions_of(path: Path) -> Path:
    """The folder of an index folder's versions."""
    return path / "versions"


def current(path: Path) -> Path:
    """The folder of the version that an index folder's pointer names; `path` if it has none.

    Raises:
        RetrievalError: no version is published yet, or the pointer or the version is damaged.
    """
    version = read_pointer(path)
    if version is None:
        return path
    if not version:
        raise RetrievalError(f"{path}: this is a half built index; run the same build again to "
                             "finish it.")
    return versions_of(path) / version


def read_pointer(path: Path) -> str | None:
    """The name of the current version; "" if none is published yet; None without a pointer.

    Raises:
        RetrievalError: the pointer is damaged, or it has another digest than the version.
    """
    text = _pointer_text(path)
    if text is None:
        return None
    try:
        pointer = json.loads(text)
        format_, version, digest = (pointer[name] for name in ("format", "version", "manifest"))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise RetrievalError(f"{path}: {POINTER} is damaged ({error!r}); {AGAIN}.") from None
    if isinstance(format_, int) and format_ > _FORMAT:
        raise RetrievalError(f"{path}: index folder of format {format_}, this version of rag_jax "
                             f"reads up to {_FORMAT}; upgrade rag_jax or build the index again.")
    sound = isinstance(version, str) and re.fullmatch(r"([1-9][0-9]*)?", version)
    if not sound or text != _text(version, digest).encode():
        raise RetrievalError(f"{path}: {POINTER} is damaged; {AGAIN}.")
    if version:
        try:
            regular_file(path, f"versions/{version}/manifest.json")
        except RetrievalError as error:
            raise RetrievalError(f"{path}: {POINTER} is damaged, or the version that it names: "
                                 f"{error}") from None
        if digest != _digest(versions_of(path) / version):
            raise RetrievalError(f"{path}: versions/{version}/manifest.json is not the one that "
                                 f"{POINTER} means; {AGAIN}.")
    return version


def point(path: Path, version: Path | None) -> None:
    """Replaces the pointer, atomically: `version` becomes the current one; None = none yet."""
    name, digest = ("", "") if version is None else (version.name, _digest(version))
    files.write_bytes(path / POINTER, _text(name, digest).encode())


def opened(path: Path, make: Callable[[Path], Opened]) -> Opened:
    """Returns make(folder of the current version), during which that is not removed or replaced.

    The result holds the version: it gets the attributes `path`, the index folder, and `hold`, the
    lock, which its `passages` get too.

    Raises:
        RetrievalError: as make, or there is no index.
    """
    while True:
        before = _pointer_text(path)
        try:
            folder = current(path)
            hold = _hold(folder)
            index = make(folder)
            if hold is not None and not _holds(hold, folder):
                raise RetrievalError(f"{path}: was removed or replaced while it was opened; "
                                     "open it again.")
        except (RetrievalError, FileNotFoundError):
            if _pointer_text(path) == before:
                raise
            continue  # a newer version was published, and this one removed
        index.path = path
        index.hold = index.passages.hold = hold
        return index


@contextlib.contextmanager
def unheld(folder: Path, without_locks: bool) -> Iterator[bool]:
    """Locks an old version, so that nobody opens it while it is removed.

    Yields whether it is locked: False if somebody holds it.

    Args:
        folder: of the version.
        without_locks: what to yield if the file system has no locks.
    """
    with contextlib.ExitStack() as stack:
        free = True
        try:
            file = stack.enter_context(open(folder / "manifest.json", "rb+"))
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:  # half removed by hand
            pass
        except (BlockingIOError, PermissionError):
            free = False
        except OSError:
            free = without_locks
        yield free


class _Hold(io.FileIO):
    """An open file, closed without a ResourceWarning when nothing refers to it any more."""

    def __del__(self) -> None:
        self.close()


def _hold(folder: Path) -> _Hold | None:
    """The open manifest.json, locked if the file system has locks; None if it cannot be opened."""
    try:
        regular_file(folder, "manifest.json")  # opening a pipe would block
        file = _Hold(folder / "manifest.json")  # lives as long as the index
    except (OSError, RetrievalError):
        return None  # `make` raises an error that says why
    if fcntl is not None:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:  # it is being removed
            fcntl.flock(file, fcntl.LOCK_SH)
        except OSError:
            pass
    return file


def _holds(file: _Hold, folder: Path) -> bool:
    """Whether the file is still the manifest.json of the folder, neither removed nor replaced."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), (folder / "manifest.json").stat())
    except FileNotFoundError:
        return False


def _pointer_text(path: Path) -> bytes | None:
    if not os.path.lexists(path / POINTER):
        return None
    with open(regular_file(path, POINTER), "rb") as file:
        return file.read(4096)  # it has some 150 bytes


def _text(version: str, digest: str) -> str:
    return json.dumps({"format": _FORMAT, "version": version, "manifest": digest}, indent=1) + "\n"


def _digest(folder: Path) -> str:
    """sha256 of a version's manifest, and so of all its files."""
    return hashlib.sha256(read_json_bytes(folder, "manifest.json")).hexdigest()
