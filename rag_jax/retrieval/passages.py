"""Passage stores: text and token ids of all passages, memory-mapped.

A store is a directory of flat files. Row number is position, so a search result's id is a row:

    meta.json             sizes, checksums, fingerprint; written last
    text.blob             UTF-8: id, title, text of row 0, id, title, text of row 1, ...
    text.offsets          int64[3N + 1], where each of those fields begins in text.blob
    tokens.NAME.ids       uint16 or uint32, the rows of one token table, end to end
    tokens.NAME.offsets   int64[N + 1], where each row begins in tokens.NAME.ids
    citations.blob        only of passages from documents: JSON, where each stands in its document
    citations.offsets     int64[N + 1], where each citation begins in citations.blob

All numbers are little-endian. A small store is verified whole when it is opened; of a large one
only meta.json is read then; see verification.py.

Why not Arrow IPC files: reading 160 random ones of a million passages took 0.74 ms from those
(97 ms by take) and takes 0.33 ms here, and Arrow's reader trusts the offsets of a file unless all
of it is validated at opening.
"""

import difflib
import functools
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rag_jax.citation import Citation
from rag_jax.retrieval.json_files import is_count
from rag_jax.retrieval.protocol import Passage, PassageIdError, RetrievalError, check_rows
from rag_jax.retrieval.verification import FolderRecord, VerifiedFiles

# A store without citations is still written in format 1, which earlier versions read.
META = FolderRecord("meta.json", "store", "fingerprint", "copy or write the store again", 2)
CITATIONS = ("citations.blob", "citations.offsets")
TABLE_NAME = r"[A-Za-z0-9_-]+"  # of a token table
_FIELDS = len(Passage._fields)
SEARCHES = 64  # ids searched for in the file before a dict of all ids is made
ROWS = 2**18  # rows whose ids are compared at a time


class Ragged:
    """Rows of unequal length, end to end in one file; another has the offset of each part of a row.

    Args:
        files: those of the store.
        names: the file of data and the file of offsets.
        dtype: of the data.
        parts: how many parts a row has, each with an offset.

    Attributes:
        data: all rows; a piece must be verified by `check` before it is read.

    Raises:
        RetrievalError: the offsets do not end where the data do.
    """

    def __init__(self, files: VerifiedFiles, names: tuple[str, str], dtype: str, parts: int = 1):
        self._files, self._names, self._parts = files, names, parts
        self.data, self._offsets = files.map(names[0], dtype), files.map(names[1], "<i8")
        first, last = self._offsets[0], self._offsets[-1]
        if first != 0 or last != len(self.data):
            raise RetrievalError(
                f"{files.folder}: {names[1]} is damaged: it goes from {first} to {last}, and must "
                f"go from 0 to {len(self.data)}; copy or write the store again.")

    def __len__(self) -> int:
        return (len(self._offsets) - 1) // self._parts

    def bounds(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where rows integers[...] begin and end in the data: int64[...] each.

        Raises:
            RetrievalError: the offsets are damaged.
        """
        firsts = rows.astype(np.int64) * self._parts
        lasts = firsts + self._parts
        self._files.check(self._names[1], firsts * 8, lasts * 8 + 8)
        begins, ends = self._offsets[firsts], self._offsets[lasts]
        self._check_bounds(((begins >= 0) & (begins <= ends) & (ends <= len(self.data))).all())
        return begins, ends

    def offsets(self, first: int, last: int) -> np.ndarray:
        """The begins of the parts of rows first to last - 1, and the end of the last: int64[...].

        Faster than `bounds` for consecutive rows. Raises as it does.
        """
        begin, end = first * self._parts, last * self._parts + 1
        self._files.check(self._names[1], 8 * begin, 8 * end)
        offsets = self._offsets[begin:end]
        self._check_bounds(0 <= offsets[0] and offsets[-1] <= len(self.data)
                           and (offsets[:-1] <= offsets[1:]).all())
        return offsets

    def row(self, row: int) -> list[np.ndarray]:
        """The parts of one row, verified."""
        offsets, size = self.offsets(row, row + 1).tolist(), self.data.itemsize
        self._files.check(self._names[0], offsets[0] * size, offsets[-1] * size)
        return [self.data[begin:end] for begin, end in itertools.pairwise(offsets)]

    def check(self, begins: np.ndarray, ends: np.ndarray) -> None:
        """Verifies the pieces of the data from begins to ends, int64[...] each."""
        full, size = ends > begins, self.data.itemsize
        self._files.check(self._names[0], begins[full] * size, ends[full] * size)

    def _check_bounds(self, good: bool) -> None:
        if not good:
            raise RetrievalError(f"{self._files.folder}: {self._names[1]} is damaged: rows lie "
                                 "outside their file; write the store again.")


class TokenTable:
    """Rows of token ids, one per passage, memory-mapped."""

    def __init__(self, files: VerifiedFiles, name: str, dtype: str):
        self._name = f"token table {name!r}"
        self._rows = Ragged(files, (f"tokens.{name}.ids", f"tokens.{name}.offsets"), dtype)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def lengths(self) -> np.ndarray:
        """int64[N]: tokens per row."""
        return np.diff(self._rows.offsets(0, len(self._rows)))

    def lengths_of(self, row_ids: np.ndarray) -> np.ndarray:
        """int64[...]: tokens of some rows."""
        begins, ends = self._bounds(row_ids)
        return ends - begins

    def row(self, row: int) -> np.ndarray:
        """The token ids of one row: uint16 or uint32, read-only."""
        check_rows(np.asarray(row), len(self._rows), self._name)
        return self._rows.row(int(row))[0]

    def _bounds(self, row_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where the rows begin and end in the ids, int64[...] each."""
        check_rows(row_ids, len(self._rows), self._name)
        return self._rows.bounds(row_ids)

    def padded(self, row_ids: np.ndarray, length: int, pad_id: int
               ) -> tuple[np.ndarray, np.ndarray]:
        """Rows as one array of equal lengths: longer ones are cut, shorter ones padded.

        Args:
            row_ids: integers[...], rows of the store.
            length: tokens per row of the result.
            pad_id: token id for the padded places.

        Returns:
            token ids int32[..., length], and mask bool[..., length], True where a token is real.
        """
        begins, ends = self._bounds(np.asarray(row_ids))
        self._rows.check(begins, ends)
        place = np.arange(length)
        mask = place < (ends - begins)[..., None]
        places = np.where(mask, begins[..., None] + place, 0)
        tokens = self._rows.data[places] if self._rows.data.size else places
        return np.where(mask, tokens.astype(np.int32), np.int32(pad_id)), mask


class PassageStore:
    """The passages of an index, by row. Threads may share one."""

    def __init__(self, path: Path, meta: Mapping[str, Any], fingerprint: str):
        self.path, self.fingerprint = path, fingerprint
        self.files = VerifiedFiles(path, meta["files"])
        self._text = Ragged(self.files, ("text.blob", "text.offsets"), "u1", _FIELDS)
        self._tables = {name: TokenTable(self.files, name, dtype)
                        for name, dtype in meta["tokens"].items()}
        self._citations = Ragged(self.files, CITATIONS, "u1") if (
            CITATIONS[0] in meta["files"]) else None
        self._rows_by_id: dict[str, int] | None = None
        self._searches = 0

    @classmethod
    def open(cls, path: str | os.PathLike, verify: bool | None = None) -> "PassageStore":
        """Opens a store. Sizes and shapes are always checked.

        Args:
            path: the directory.
            verify: compare everything with its sha256 now; None does so for a small store. False:
                what is read is verified then, and all of it in the background.

        Raises:
            RetrievalError: the directory is not a store, or is damaged.
        """
        store = cls.mapped(path)
        store.files.verify(verify)
        return store

    @classmethod
    def mapped(cls, path: str | os.PathLike) -> "PassageStore":
        """`open` without verification: each block is verified before it is first read."""
        return cls(Path(path), *_read_meta(Path(path)))

    def __len__(self) -> int:
        return len(self._text)

    def __getitem__(self, row: int) -> Passage:
        if not 0 <= row < len(self):  # also -1, which pads search results
            raise IndexError(f"{self.path}: row {row} is outside 0..{len(self) - 1}.")
        fields = self._text.row(int(row))
        try:
            return Passage(*(field.tobytes().decode() for field in fields))
        except UnicodeDecodeError:
            raise RetrievalError(f"{self.path}: the text of row {row} is damaged in text.blob or "
                                 "text.offsets; copy or write the store again.") from None

    def same_rows(self, place: int, other: "PassageStore", first: int, count: int) -> bool:
        """Whether `count` passages from row `place` on are those of another store from `first`."""
        ours = self._text.offsets(place, place + count)
        theirs = other._text.offsets(first, first + count)
        if not np.array_equal(ours - ours[0], theirs - theirs[0]):
            return False
        self._text.check(ours[:1], ours[-1:])
        other._text.check(theirs[:1], theirs[-1:])
        return np.array_equal(self._text.data[ours[0] : ours[-1]],
                              other._text.data[theirs[0] : theirs[-1]])

    def source(self, row: int) -> Citation | None:
        """Where a passage stands in its document; None = it has no citation."""
        if self._citations is None:
            return None
        check_rows(np.asarray(row), len(self), f"{self.path}: citations")
        record = self._citations.row(int(row))[0].tobytes()
        try:
            return Citation.of_record(json.loads(record)) if record else None
        except (ValueError, RecursionError):
            raise RetrievalError(f"{self.path}: the citation of row {row} is damaged in "
                                 f"{CITATIONS[0]} or {CITATIONS[1]}; copy or write the store again."
                                 ) from None

    @property
    def cited(self) -> bool:
        """Whether the store has citations."""
        return self._citations is not None

    @property
    def stores(self) -> tuple["PassageStore", ...]:
        """The stores whose passages these are: one, as JoinedPassages has several."""
        return (self,)

    @property
    def token_tables(self) -> tuple[str, ...]:
        """Names of the token tables."""
        return tuple(self._tables)

    def tokens(self, name: str) -> TokenTable:
        """The token table of that name."""
        if name not in self._tables:
            raise RetrievalError(
                f"{self.path}: no token table {name!r}; it has {list(self.token_tables)}.")
        return self._tables[name]

    def row_of(self, passage_id: str) -> int:
        """The row of a passage id.

        Raises:
            RetrievalError: no passage has this id; near matches are listed.
        """
        row = self.find(passage_id)
        if row is None:
            raise unknown_id(self.path, passage_id, len(self), self.ids())
        return row

    def find(self, passage_id: str) -> int | None:
        """The row of a passage id, or None.

        An id that may be a row number, from 0 or 1, is first looked for at that row. The first
        SEARCHES others are searched for in the file; then a dict of all ids is made.
        """
        if re.fullmatch(r"[0-9]{1,18}", passage_id, re.ASCII):
            for row in (int(passage_id) - 1, int(passage_id)):
                if 0 <= row < len(self) and self[row].id == passage_id:
                    return row
        self._searches += 1
        if self._searches <= SEARCHES:
            return self._search(passage_id.encode("utf-8", "replace"))
        self._rows_by_id = self._rows_by_id or {one: at for at, one in enumerate(self.ids())}
        return self._rows_by_id.get(passage_id)

    def ids(self) -> Iterator[str]:
        """The ids of all rows, without their texts."""
        for _, begins, ends in self._id_places():
            self._text.check(begins, ends)
            data = memoryview(self._text.data)
            for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
                yield str(data[begin:end], "utf-8", "replace")

    def _id_places(self) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yields, for some rows at a time, the first one, and where their ids begin and end."""
        for first in range(0, len(self), ROWS):
            offsets = self._text.offsets(first, min(first + ROWS, len(self)))
            yield first, offsets[:-1:_FIELDS], offsets[1::_FIELDS]

    def _search(self, key: bytes) -> int | None:
        """The row whose id is these bytes; only ids of that length are compared."""
        for first, begins, ends in self._id_places():
            rows = np.flatnonzero(ends - begins == len(key))
            self._text.check(begins[rows], ends[rows])
            for place in reversed(range(len(key))):  # the last bytes differ most
                if not rows.size:
                    break
                rows = rows[self._text.data.take(begins[rows] + place, mode="clip") == key[place]]
            if rows.size:
                return first + int(rows[0])
        return None


def check_token_ids(ids: np.ndarray, limit: int, path: Path, name: str) -> None:
    """Raises a RetrievalError unless all ids of a token table are from 0 to `limit` - 1: beyond the
    end of an embedding table, a device would read another row without an error."""
    wrong = [int(one) for one in (ids.min(initial=0), ids.max(initial=0)) if not 0 <= one < limit]
    if wrong:
        raise RetrievalError(f"{path}: token table {name!r} has the id {wrong[0]}, and the tokens "
                             f"of the model that reads it are 0..{limit - 1}; build the index "
                             "again with this model.")


def unknown_id(path: Path, passage_id: str, size: int, ids: Iterable[str]) -> PassageIdError:
    """The error for an id that none of `size` passages has; it lists near matches among `ids`."""
    some = list(itertools.islice(ids, 100_000))
    near = difflib.get_close_matches(passage_id, some, 3, 0.5) or some[:3]
    return PassageIdError(f"{path}: none of its {size} passages has the id {passage_id!r}; near "
                          f"matches are {near}.")


def _read_meta(path: Path) -> tuple[dict[str, Any], str]:
    """The checked content of a store's meta.json, and its fingerprint."""
    if not path.is_dir():
        raise RetrievalError(f"{path}: no such passage store; check the path.")
    if not os.path.lexists(path / "meta.json"):
        raise RetrievalError(
            f"{path}: not a passage store, or half written: it has no meta.json; write it again.")
    meta, fingerprint = META.read(path)
    need = functools.partial(META.need, path)  # what follows is true of all stores written
    size, tokens = meta.get("passages"), meta.get("tokens")
    need(is_count(size, 1), f"passages is {size!r:.80}, must be a number from 1 on")
    need(isinstance(tokens, dict), f"tokens is {tokens!r:.80}, must name the token tables")
    widths = {"text.blob": 1}  # the size of a file is a multiple of so many bytes
    exact = {"text.offsets": 8 * (_FIELDS * size + 1)}
    for name, dtype in tokens.items():
        need(re.fullmatch(TABLE_NAME, name) is not None and dtype in ("<u2", "<u4"),
             f"token table {name!r:.80} of dtype {dtype!r:.80}; allowed are <u2 and <u4")
        widths[f"tokens.{name}.ids"] = int(dtype[-1])
        exact[f"tokens.{name}.offsets"] = 8 * (size + 1)
    if meta["format"] > 1 or CITATIONS[0] in meta["files"]:
        widths[CITATIONS[0]], exact[CITATIONS[1]] = 1, 8 * (size + 1)
    odd = sorted({*widths, *exact} ^ set(meta["files"]))
    need(not odd, f"its files do not fit its tables ({', '.join(odd)[:200]})")
    for name, entry in meta["files"].items():
        need(entry["bytes"] % widths.get(name, 8) == 0
             and entry["bytes"] == exact.get(name, entry["bytes"]),
             f"{name} of {entry['bytes']} bytes does not fit {size} passages")
    return meta, fingerprint
