"""Making a version inside its index folder, and publishing it when it is complete.

The key of the next version's working folder (files.py) is its inputs: a folder begun for other
inputs is removed. Only one process at a time builds in an index folder (locks.py).
"""

import contextlib
import json
import logging
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from rag_jax import files, locks
from rag_jax.locks import InUseError
from rag_jax.retrieval.manifest import MANIFEST, read_manifest
from rag_jax.retrieval.passages import META, PassageStore
from rag_jax.retrieval.protocol import RetrievalError
from rag_jax.retrieval.verification import folder_entries
from rag_jax.retrieval.versions import (
    POINTER,
    opened,
    point,
    read_pointer,
    unheld,
    versions_of,
)

_log = logging.getLogger(__name__)

Opened = TypeVar("Opened")
# Inputs that change nothing in an index but rounding.
UNIMPORTANT = {"batch_size", "shard_rows", "length_buckets"}
_LOCKS = {".lock", ".lock.json"}


@contextlib.contextmanager
def publishing(out: Path, waits: bool = False) -> Iterator[None]:
    """Locks an index folder, so that no other process builds there; makes it if it is missing.

    A folder in which no version was begun is removed again, because it would look half built.

    waits: see `locks.own`.

    Raises:
        RetrievalError: something else than an index is there.
        InUseError: another process builds there; it is named.
    """
    check_ours(out)
    try:
        with locks.own(out, waits):
            if not (out / POINTER).exists() and not (out / "manifest.json").exists():
                point(out, None)
            versions_of(out).mkdir(exist_ok=True)
            files.remove_leftovers(out)
            if version := _unpublished(out):
                _log.warning("%s: what a killed process had made is complete, and published now as "
                             "version %s.", out, version.name)
                point(out, version)
            try:
                with files.naming(out):
                    yield
            finally:
                _remove_unbegun(out)
    finally:
        with contextlib.suppress(OSError):  # as a rule it is not empty
            out.rmdir()


@contextlib.contextmanager
def staging(out: Path, key: str | None = None, waits: bool = False) -> Iterator[Path]:
    """Locks an index folder as `publishing` does, and yields a temporary folder for its parts.

    key: with it other processes get the same folder from `staged`; None = they do not need it.
    waits: see `locks.own`.
    """
    with publishing(out, waits):
        if key is not None:  # a killed process may have left something in it
            files.discard_folder(staged(out, key))
        folder = staged(out, key)
        try:
            yield folder
        finally:
            files.discard_folder(folder)


def staged(out: Path, key: str | None) -> Path:
    """The folder that `staging` yields."""
    return files.begin_folder(out / "passages", key)


def _remove_unbegun(out: Path) -> None:
    """Empties an index folder if nothing but `publishing` has written into it."""
    names = {path.name for path in out.iterdir()} - _LOCKS
    with contextlib.suppress(RetrievalError):  # a damaged pointer is kept, to be reported
        if names == {POINTER, "versions"} and read_pointer(out) == "" and not any(
                versions_of(out).iterdir()):
            for name in (POINTER, ".lock"):  # who waits for the lock notices that it is gone
                (out / name).unlink(missing_ok=True)
            versions_of(out).rmdir()


def check_ours(out: Path) -> None:
    """Raises a RetrievalError if a path is neither free nor an index, or is a version of one."""
    if out.parent.name == "versions" and (out.parent.parent / POINTER).exists():
        raise RetrievalError(f"{out}: is a version of the index {out.parent.parent}, which is "
                             "never changed; name the index.")
    if not out.exists() or (out / POINTER).is_file():
        return
    if out.is_dir():
        if all(path.name in _LOCKS or ".rag_jax-" in path.name for path in out.iterdir()):
            return  # empty, or the first process was killed at once
        if (out / "manifest.json").is_file():
            with contextlib.suppress(RetrievalError):
                read_manifest(out)
                return
            raise RetrievalError(f"{out}: its manifest.json is not that of a sound index, so it is "
                                 "not replaced; remove the folder, or choose another path.")
    raise RetrievalError(
        f"{out}: exists and is no index, so it is not replaced; choose another path.")


@contextlib.contextmanager
def claimed(out: Path, inputs: dict, overwrite: bool, open_index: Callable[[Path], Opened]
            ) -> Iterator[Opened | None]:
    """Yields the index at out if it is finished; else None, and no other process builds there.

    Raises:
        RetrievalError, InUseError: as `finished` and `publishing`.
    """
    index = finished(out, inputs, overwrite, open_index)
    if index is not None:
        if _unfinished(out):
            with contextlib.suppress(InUseError, OSError), publishing(out):
                remove_old(out)
        yield index
        return
    with publishing(out):
        index = finished(out, inputs, overwrite, open_index)  # perhaps another process did it
        if index is not None:
            remove_old(out)
        yield index


def finished(out: Path, inputs: dict, overwrite: bool, open_index: Callable[[Path], Opened]
             ) -> Opened | None:
    """Opens the index at out if it is complete and of these inputs; None = it is to be built.

    An index that was edited later is opened as it is, but with `overwrite` it is replaced.

    Raises:
        RetrievalError: what is there is no index, or it cannot be used and `overwrite` is False.
    """
    def open_same(folder: Path) -> Opened:
        # An index from before there was a recall_target is accepted.
        manifest = read_manifest(folder)
        if overwrite and "edited" in manifest:
            raise RetrievalError("passages were added or deleted since it was built")
        built_from = {"recall_target": inputs.get("recall_target"), **manifest["inputs"]}
        differ = [key for key in inputs if built_from.get(key) != inputs[key]]
        if not set(differ) <= UNIMPORTANT:
            raise RetrievalError(f"an index of other inputs: {', '.join(differ)} differ")
        return open_index(folder)

    check_ours(out)
    try:
        if not (out / "manifest.json").exists() and not read_pointer(out):
            return None
        return opened(out, open_same)
    except RetrievalError as error:
        if overwrite:
            return None
        raise RetrievalError(f"{out}: what is there cannot be used ({error}); choose another path, "
                             "remove it, or let build_index --overwrite (in Python "
                             "overwrite=True) replace it.") from None


def begin_version(out: Path, inputs: dict) -> Path:
    """The folder in which the next version is made, as an earlier build of the same inputs left it.

    Its parent may hold files that only the build needs.
    """
    return files.begin_folder(versions_of(out) / "next", json.dumps(inputs, sort_keys=True))


def copy_store(store: PassageStore, content: Path) -> None:
    """Copies a passage store into the folder of a version, unless it is there already.

    Only the store's own files are copied, not those that an operating system put beside them.
    """
    (content / "manifest.json").unlink(missing_ok=True)  # from a killed process
    files.remove_leftovers(content, alone=True)
    path = content / "passages"
    try:
        if PassageStore.open(path).fingerprint == store.fingerprint:
            return
    except RetrievalError:
        files.remove_folder(path)
    copying = files.begin_folder(content.parent / "passages", "copy")
    for name in (META.name, *store.files.names):
        shutil.copy2(store.path / name, copying / name)
    PassageStore.open(copying, verify=True)
    files.publish_folder(copying, path)


def publish_index(content: Path, out: Path, manifest: dict,
                  known: Mapping[str, dict] = {}) -> None:  # noqa: B006 (never changed)
    """Writes the manifest and makes the version the current one, atomically.

    known: entries of files taken over from the version before, which are not read again.
    """
    (content / "manifest.json").unlink(missing_ok=True)  # of another state of the folder
    MANIFEST.write(content, {**manifest, "files": folder_entries(content, known)})
    version = versions_of(out) / str(max(_numbers(out), default=0) + 1)
    files.publish_folder(content, version)
    point(out, version)
    remove_old(out)


def remove_old(out: Path) -> None:
    """Removes all versions but the current one and those that somebody holds.

    What cannot be removed now is left for a later call: NFS keeps files that are mapped.
    """
    now = int(read_pointer(out) or 0)
    older = sorted(number for number in _numbers(out) if number < now)
    for number in older:
        folder = versions_of(out) / str(number)
        with unheld(folder, without_locks=number != older[-1]) as free:
            if free:
                with contextlib.suppress(OSError):
                    files.remove_folder(folder)
    if now and (out / "manifest.json").exists():
        with unheld(out, without_locks=True) as free:
            if free:
                _remove_unversioned(out)
    files.remove_leftovers(versions_of(out))


def _unfinished(out: Path) -> bool:
    """Whether the last process that published was killed before it had cleaned up."""
    versions = len(_numbers(out)) + (out / "manifest.json").exists()
    left = any(any(folder.glob(".*.rag_jax-*")) for folder in (out, versions_of(out)))
    return versions > 1 or left or (out / ".lock.json").exists()


def _numbers(out: Path) -> list[int]:
    folder = versions_of(out)
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return [int(name) for name in names if re.fullmatch("[1-9][0-9]*", name)]


def publish_killed(out: Path) -> None:
    """Publishes what a killed process had finished except for the pointer, if anything, so that an
    edit is planned for the version that it will find.

    Raises:
        InUseError: another process builds there; it is named.
    """
    if (out / POINTER).exists() and _unpublished(out):
        with publishing(out):
            pass


def _unpublished(out: Path) -> Path | None:
    """The version that a killed process had finished except for the pointer, or None.

    A version gets its number only when all of it is on the disk.
    """
    with contextlib.suppress(RetrievalError):
        now, last = int(read_pointer(out) or 0), max(_numbers(out), default=0)
        if last > now:
            read_manifest(versions_of(out) / str(last))
            return versions_of(out) / str(last)
    return None


def _remove_unversioned(out: Path) -> None:
    """Removes an index made before there were versions: the files that its manifest lists."""
    try:
        names = read_manifest(out)["files"]
    except RetrievalError:
        return
    folders = {(out / name).parent for name in names} - {out}
    if any(folder.is_symlink() for folder in folders):
        return
    for name in names:
        (out / name).unlink(missing_ok=True)
    for folder in folders:
        with contextlib.suppress(OSError):  # somebody has put something there
            folder.rmdir()
    (out / "manifest.json").unlink()
