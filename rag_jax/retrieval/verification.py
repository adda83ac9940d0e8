"""Files that were handed over: no byte of them is used before it agrees with its digest.

A table of files, part of an index's manifest.json or a passage store's meta.json, says of each

    bytes     its size
    sha256    of all of it
    blocks    of a file above BLOCK_BYTES: {"bytes": of a block, "sha256": [of each block]}

Small folders are read whole when they are opened. Large ones are read in the background, and a
block that is asked for before its turn is read then.
"""

import concurrent.futures
import dataclasses
import hashlib
import json
import logging
import os
import re
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rag_jax import files
from rag_jax.retrieval.json_files import (
    FILE_NAME,
    REMEDY,
    digest_of,
    is_count,
    read_object,
    read_sealed,
    regular_file,
    write_sealed,
)
from rag_jax.retrieval.protocol import RetrievalError

BLOCK_BYTES = 64 * 2**20
AT_ONCE_BYTES = 256 * 2**20  # a folder up to this size is read whole at opening
DIGESTS = "digests.json"
_log = logging.getLogger(__name__)


def file_entry(path: Path) -> dict[str, Any]:
    """What the table says about a file."""
    data, whole, blocks = map_file(path, np.uint8), hashlib.sha256(), []
    for begin in range(0, len(data), BLOCK_BYTES):
        block = data[begin : begin + BLOCK_BYTES]
        whole.update(block)
        blocks.append(hashlib.sha256(block).hexdigest())
    entry = {"bytes": len(data), "sha256": whole.hexdigest()}
    return entry | ({"blocks": {"bytes": BLOCK_BYTES, "sha256": blocks}} if len(blocks) > 1 else {})


def folder_entries(folder: Path, known: Mapping[str, dict[str, Any]] = {}  # noqa: B006 (read)
                   ) -> dict[str, dict[str, Any]]:
    """The table of all files of a folder and of the folders in it, by their names there.

    What has a name that none of ours has is left out: nobody could open a folder that lists it.

    known: entries of files that are not read: they were taken over from another table.
    """
    names = {path.relative_to(folder).as_posix(): path
             for path in sorted(folder.rglob("*")) if _is_ours(folder, path)}
    return {name: known.get(name) or file_entry(path) for name, path in names.items()}


def _is_ours(folder: Path, path: Path) -> bool:
    """Whether a path below a folder is a file, and has a name that ours have."""
    return path.is_file() and all(
        re.fullmatch(FILE_NAME, part) for part in path.relative_to(folder).parts)


def _is_sha256(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


def check_table(table: Any, source: Path) -> dict[str, dict[str, Any]]:
    """Returns a table of files, or says what in it cannot be.

    Raises:
        RetrievalError: an entry is not as `file_entry` makes it.
    """
    for name, entry in table.items() if isinstance(table, dict) else [("files", table)]:
        good = (isinstance(entry, dict) and is_count(entry.get("bytes"))
                and _is_sha256(entry.get("sha256")))
        if good and "blocks" in entry:
            blocks = entry["blocks"]
            good = (isinstance(blocks, dict) and is_count(blocks.get("bytes"), 1)
                    and isinstance(blocks.get("sha256"), list)
                    and all(map(_is_sha256, blocks["sha256"]))
                    and len(blocks["sha256"]) == -(-entry["bytes"] // blocks["bytes"]))
        if not good:
            raise RetrievalError(f"{source}: its entry {name!r:.80} is damaged; {REMEDY}.")
    return table


class _File:
    """A file of the table, mapped, in blocks; one without blocks is a single block.

    Attributes:
        bytes: its size.
        block_bytes: of a block; the last one may be shorter.
        digests: the sha256 of each block.
        pending: numbers of the blocks that nobody has verified yet.
        data: uint8[bytes], which stays readable when the file is removed.
    """

    def __init__(self, path: Path, entry: Mapping[str, Any]):
        whole = {"bytes": max(entry["bytes"], 1), "sha256": [entry["sha256"]]}
        blocks = entry.get("blocks", whole)
        self.bytes, self.block_bytes, self.digests = (
            entry["bytes"], blocks["bytes"], blocks["sha256"])
        self.data = map_file(path, np.uint8)
        self.forget()

    def forget(self) -> None:
        """All blocks are to be verified before they are used."""
        self.pending = set(range(len(self.digests)))

    def pending_of(self, begins: Any, ends: Any) -> set[int]:
        """The pending blocks that hold bytes from begins to ends, ints or int64[...] each."""
        count = len(self.digests) + 1
        firsts = np.ravel(begins) // self.block_bytes
        ends = (np.ravel(ends) - 1) // self.block_bytes + 1
        opened = np.bincount(firsts, minlength=count) - np.bincount(ends, minlength=count)
        return self.pending & set(np.flatnonzero(np.cumsum(opened)).tolist())


class VerifiedFiles:
    """The files of one folder, mapped, and read no further than they are verified.

    Threads may share it. Once damage is seen, every later check raises too.

    Args:
        folder: where they are.
        table: see `check_table`.

    Raises:
        RetrievalError: a file is missing, is none, or has another size.
    """

    def __init__(self, folder: Path, table: Mapping[str, Mapping[str, Any]]):
        self.folder = folder
        self._damage: str | None = None
        self._files: dict[str, _File] = {}
        for name, entry in table.items():
            path = regular_file(folder, name)
            size = path.stat().st_size
            if size != entry["bytes"]:
                raise RetrievalError(f"{folder}: {name} has {size} bytes, should have "
                                     f"{entry['bytes']}; {REMEDY}.")
            self._files[name] = _File(path, entry)

    def forget(self) -> None:
        """All is to be read again before it is used."""
        for file in self._files.values():
            file.forget()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._files)

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self._files.values())

    @property
    def pending_bytes(self) -> int:
        """Bytes that nobody has verified yet."""
        return sum(len(file.pending) * file.block_bytes for file in self._files.values())

    def map(self, name: str, dtype: str) -> np.ndarray:
        """All of a file as a read-only array; what is read of it must be checked before."""
        return self._files[name].data.view(dtype)

    def check(self, name: str, begins: np.ndarray | int, ends: np.ndarray | int) -> None:
        """Verifies pieces of a file, which go from `begins` to `ends` (exclusive).

        Args:
            name: of the file.
            begins, ends: int64[...] each, bytes.

        Raises:
            RetrievalError: they, or any seen before, differ from their digests.
        """
        self._raise_damage()
        if self._files[name].pending:
            for block in self._files[name].pending_of(begins, ends):
                self._verify(name, block)

    def check_all(self, names: Iterable[str] | None = None) -> None:
        """Verifies whole files, all of them by default, with several threads where they are large.

        Raises:
            RetrievalError: names what is damaged.
        """
        self._raise_damage()
        names = list(self._files if names is None else names)
        # From the end, as the thread in the background comes from the beginning.
        pieces = [(name, block) for name in names
                  for block in sorted(self._files[name].pending, reverse=True)]
        if sum(self._files[name].bytes for name in names) < AT_ONCE_BYTES:
            for piece in pieces:
                self._verify(*piece)
            return
        with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            list(pool.map(lambda piece: self._verify(*piece), pieces))  # the first error ends it

    def damaged(self) -> list[str]:
        """Reads everything again; the names of the files that differ from their digests."""
        self.forget()
        self._damage, names = None, []
        for name in self._files:
            try:
                self.check_all([name])
            except RetrievalError:
                names.append(name)
            self._damage = None
        return names

    def _raise_damage(self) -> None:
        if self._damage is not None:
            raise RetrievalError(self._damage)

    def _verify(self, name: str, block: int) -> None:
        file = self._files[name]
        if block not in file.pending:
            return
        begin = block * file.block_bytes
        piece = file.data[begin : begin + file.block_bytes]
        if hashlib.sha256(piece).hexdigest() != file.digests[block]:
            where = f" in bytes {begin} to {begin + len(piece)}" if len(file.digests) > 1 else ""
            self._damage = f"{self.folder}: {name} differs from its sha256{where}; {REMEDY}."
            self._raise_damage()
        file.pending.discard(block)

    def verify(self, at_once: bool | None = None) -> None:
        """Verifies everything: now, or in the background, which this begins.

        Args:
            at_once: None = now up to AT_ONCE_BYTES.

        Raises:
            RetrievalError: names what is damaged.
        """
        if at_once or at_once is None and self.bytes <= AT_ONCE_BYTES:
            self.check_all()
        elif self.pending_bytes:
            _log.warning("%s: %.1f GB are verified in the background, and what is needed before "
                         "that at once.", self.folder, self.pending_bytes / 1e9)
            threading.Thread(target=_verify_pending, args=(weakref.ref(self),), daemon=True).start()


def _verify_pending(reference: Callable[[], VerifiedFiles | None]) -> None:
    """The thread in the background; it ends with the one who asked for it."""
    while (all_files := reference()) is not None:
        pending = ((name, file.pending) for name, file in all_files._files.items() if file.pending)
        name, blocks = next(pending, (None, ()))
        if name is None:
            _log.info("%s: verified.", all_files.folder)
            return
        try:
            all_files._verify(name, min(blocks.copy(), default=0))
        except (RetrievalError, OSError) as error:
            all_files._damage = str(error)
            _log.error("%s", error)
            return
        del all_files, pending


def map_file(path: Path, dtype) -> np.ndarray:
    """A flat file as a read-only memory-mapped array; an empty file as an empty array."""
    if not path.stat().st_size:
        return np.zeros(0, dtype)
    return np.asarray(np.memmap(path, dtype, "r"))


@dataclasses.dataclass(frozen=True)
class Record:
    """A kind of JSON file that vouches for the folder it is in: its format, table and own digest.

    Attributes:
        name: of the file.
        of: what the folder is, in words.
        digest: the field with the sha256 of all other fields.
        again: what to do where the file is damaged.
        format: the newest; all from 1 on are read. It is written unless the content names another.
    """

    name: str
    of: str
    digest: str
    again: str
    format: int = 1

    def read(self, folder: Path) -> tuple[dict[str, Any], str]:
        """The fields, and their digest.

        Raises:
            RetrievalError: damaged, of a newer format, or with a table that cannot be.
        """
        content = read_object(folder, self.name)
        digest, format_ = content.pop(self.digest, None), content.get("format")
        if isinstance(format_, int) and format_ > self.format:
            raise RetrievalError(
                f"{folder}: {self.of} format {format_}, this version of rag_jax reads up to "
                f"{self.format}; upgrade rag_jax or {self.again}.")
        if format_ not in range(1, self.format + 1) or digest != digest_of(content):
            raise RetrievalError(f"{folder}: {self.name} does not agree with its own "
                                 f"{self.digest}, so it is damaged; {self.again}.")
        check_table(content.get("files"), folder / self.name)
        return content, digest

    def need(self, folder: Path, good: bool, what: str) -> None:
        """Refuses a file of which `what` cannot be: anybody can make a digest."""
        if not good:
            raise RetrievalError(f"{folder}: {self.name} is damaged: {what}; {self.again}.")

    def write(self, folder: Path, content: Mapping[str, Any]) -> None:
        """Writes the fields with their digest, and waits until the disk holds them."""
        content = {"format": self.format, **content}
        content[self.digest] = digest_of(content)
        # Without a line end, so that a file that lacks its last byte is no JSON.
        files.write_text(folder / self.name, json.dumps(content, indent=1))


def write_digests(folder: Path, names: Iterable[str]) -> None:
    """Lists files and all that is in folders with their digests in FOLDER/digests.json.

    Args:
        folder: of them.
        names: what is finished; what is not there is left out, and what has a name that none of
            ours has.
    """
    found = [file for name in names for file in (folder / name, *(folder / name).rglob("*"))]
    table = {file.relative_to(folder).as_posix(): file_entry(file)
             for file in sorted(found) if _is_ours(folder, file)}
    write_sealed(folder / DIGESTS, {"files": table})


def open_digests(folder: Path) -> VerifiedFiles | None:
    """The files that `write_digests` listed, of which nothing is read yet; None without a list.

    Raises:
        RetrievalError: the list is damaged, or a file is missing or has another size.
    """
    if not os.path.lexists(folder / DIGESTS):
        return None
    table = read_sealed(folder / DIGESTS, needs_digest=True).get("files")
    return VerifiedFiles(folder, check_table(table, folder / DIGESTS))
