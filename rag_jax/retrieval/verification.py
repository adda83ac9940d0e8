"""Files from elsewhere: no byte of them is used before it was compared with its digest.

A table of files, in an index's manifest.json or a passage store's meta.json, has for each file

    bytes     its size
    sha256    of the whole file
    blocks    only of a file above BLOCK_BYTES: {"bytes": of a block, "sha256": [of each block]}

A small folder is verified whole when it is opened. A large one is verified in the background, and
a block that is needed earlier is verified then.
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
AT_ONCE_BYTES = 256 * 2**20  # a folder up to this size is verified whole when it is opened
DIGESTS = "digests.json"
_log = logging.getLogger(__name__)


def file_entry(path: Path) -> dict[str, Any]:
    """The entry of a file in such a table."""
    data, whole, blocks = map_file(path, np.uint8), hashlib.sha256(), []
    for begin in range(0, len(data), BLOCK_BYTES):
        block = data[begin : begin + BLOCK_BYTES]
        whole.update(block)
        blocks.append(hashlib.sha256(block).hexdigest())
    entry = {"bytes": len(data), "sha256": whole.hexdigest()}
    return entry | ({"blocks": {"bytes": BLOCK_BYTES, "sha256": blocks}} if len(blocks) > 1 else {})


def folder_entries(folder: Path, known: Mapping[str, dict[str, Any]] = {},  # noqa: B006 (read)
                   within: Iterable[str] = (".",)) -> dict[str, dict[str, Any]]:
    """The table of the files of a folder and of the folders in it, by their names there.

    Files that do not have a FILE_NAME are left out: a folder that lists one could not be opened.

    Args:
        folder: what is listed.
        known: entries from another table, of files that need not be read again.
        within: the files and folders of it that are listed; those that do not exist are left out.
    """
    paths = sorted(path for name in within
                   for path in (folder / name, *(folder / name).rglob("*")) if path.is_file())
    names = {path.relative_to(folder).as_posix(): path for path in paths}
    return {name: known.get(name) or file_entry(path) for name, path in names.items()
            if all(re.fullmatch(FILE_NAME, part) for part in name.split("/"))}


def _is_sha256(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


def check_table(table: Any, source: Path) -> dict[str, dict[str, Any]]:
    """Returns a table of files after a check of its entries.

    Raises:
        RetrievalError: an entry is not as `file_entry` makes it; source is named.
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
    """A file of the table, memory-mapped, in blocks; a small file is one block.

    Attributes:
        block_bytes: of a block; the last one may be shorter.
        digests: the sha256 of each block.
        pending: numbers of the blocks that are not verified yet.
        data: all bytes, uint8[...]; it stays readable when the file is removed.
    """

    def __init__(self, path: Path, entry: Mapping[str, Any]):
        whole = {"bytes": max(entry["bytes"], 1), "sha256": [entry["sha256"]]}
        blocks = entry.get("blocks", whole)
        self.block_bytes, self.digests = blocks["bytes"], blocks["sha256"]
        self.data = map_file(path, np.uint8)
        self.forget()

    def forget(self) -> None:
        """Makes all blocks pending again."""
        self.pending = set(range(len(self.digests)))

    def pending_of(self, begins: Any, ends: Any) -> set[int]:
        """The pending blocks that hold bytes from begins to ends, ints or int64[...] each."""
        count = len(self.digests) + 1
        firsts = np.ravel(begins) // self.block_bytes
        ends = (np.ravel(ends) - 1) // self.block_bytes + 1
        opened = np.bincount(firsts, minlength=count) - np.bincount(ends, minlength=count)
        return self.pending & set(np.flatnonzero(np.cumsum(opened)).tolist())


class VerifiedFiles:
    """The files of one folder, memory-mapped, whose pieces are verified before they are read.

    Threads may share it. After damage was noticed, every later check raises too.

    Args:
        folder: of the files.
        table: a checked table; see `check_table`.

    Raises:
        RetrievalError: a file is missing, is not a regular file, or has another size.
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
        """Verifies everything again before it is used."""
        for file in self._files.values():
            file.forget()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._files)

    @property
    def bytes(self) -> int:
        return sum(file.data.nbytes for file in self._files.values())

    @property
    def pending_bytes(self) -> int:
        """Bytes that are not verified yet."""
        return sum(len(file.pending) * file.block_bytes for file in self._files.values())

    def map(self, name: str, dtype: str) -> np.ndarray:
        """A file as a read-only array; each piece must be verified by `check` before it is read."""
        return self._files[name].data.view(dtype)

    def check(self, name: str, begins: np.ndarray | int, ends: np.ndarray | int) -> None:
        """Verifies pieces of a file.

        Args:
            name: of the file.
            begins, ends: bytes int64[...] at which each piece begins and ends (exclusive).

        Raises:
            RetrievalError: a block of them, or one verified earlier, differs from its digest.
        """
        self._raise_damage()
        if self._files[name].pending:
            for block in self._files[name].pending_of(begins, ends):
                self._verify(name, block)

    def check_all(self, names: Iterable[str] | None = None) -> None:
        """Verifies whole files, all of them by default, with several threads where they are large.

        Raises:
            RetrievalError: a file is damaged; it is named.
        """
        self._raise_damage()
        names = list(self._files if names is None else names)
        # From the end, because the thread in the background begins at the beginning.
        pieces = [(name, block) for name in names
                  for block in sorted(self._files[name].pending, reverse=True)]
        if sum(self._files[name].data.nbytes for name in names) < AT_ONCE_BYTES:
            for piece in pieces:
                self._verify(*piece)
            return
        with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            list(pool.map(lambda piece: self._verify(*piece), pieces))  # the first error ends it

    def damaged(self) -> list[str]:
        """Verifies everything again; returns the names of files that differ from their digests."""
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
        """Verifies everything, now or in a background thread.

        Args:
            at_once: whether now; None = if there are at most AT_ONCE_BYTES.

        Raises:
            RetrievalError: a file is damaged; it is named.
        """
        if at_once or at_once is None and self.bytes <= AT_ONCE_BYTES:
            self.check_all()
        elif self.pending_bytes:
            _log.warning("%s: %.1f GB are verified in the background, and what is needed before "
                         "that at once.", self.folder, self.pending_bytes / 1e9)
            threading.Thread(target=_verify_pending, args=(weakref.ref(self),), daemon=True).start()


def _verify_pending(reference: Callable[[], VerifiedFiles | None]) -> None:
    """The background thread; it ends when the VerifiedFiles are garbage collected."""
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
class FolderRecord:
    """A kind of JSON file that describes its folder: a format, a table of files, its own digest.

    Attributes:
        name: of the file.
        of: what the folder is, for messages.
        digest: name of the field with the sha256 of all other fields.
        again: what to do if the file is damaged, for messages.
        format: the newest; all from 1 on are read. It is written unless the content has another.
    """

    name: str
    of: str
    digest: str
    again: str
    format: int = 1

    def read(self, folder: Path) -> tuple[dict[str, Any], str]:
        """The fields, and their digest.

        Raises:
            RetrievalError: it is damaged or of a newer format, or its table is not valid.
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
        """Raises a RetrievalError that names `what` unless `good`: anybody can make a digest."""
        if not good:
            raise RetrievalError(f"{folder}: {self.name} is damaged: {what}; {self.again}.")

    def write(self, folder: Path, content: Mapping[str, Any]) -> None:
        """Writes the fields with their digest, flushed to the disk."""
        content = {"format": self.format, **content}
        content[self.digest] = digest_of(content)
        # Without a newline at the end, so that a file without its last byte is not valid JSON.
        files.write_text(folder / self.name, json.dumps(content, indent=1))


def write_digests(folder: Path, names: Iterable[str]) -> None:
    """Lists the named files, and those in the named folders, in FOLDER/digests.json, with their
    digests; see `folder_entries`."""
    write_sealed(folder / DIGESTS, {"files": folder_entries(folder, within=names)})


def open_digests(folder: Path) -> VerifiedFiles | None:
    """The files that `write_digests` listed, not verified yet; None without a list.

    Raises:
        RetrievalError: the list is damaged, or a file is missing or has another size.
    """
    if not os.path.lexists(folder / DIGESTS):
        return None
    table = read_sealed(folder / DIGESTS, needs_digest=True).get("files")
    return VerifiedFiles(folder, check_table(table, folder / DIGESTS))
