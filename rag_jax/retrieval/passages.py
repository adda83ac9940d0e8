"""Passage stores: text and token ids of all passages, memory-mapped.

A store is a directory of flat files. Row number is position, so a search result's id is a row:

    meta.json             sizes, checksums, fingerprint; written last
    text.blob             UTF-8: id, title, text of row 0, id, title, text of row 1, ...
    text.offsets          int64[3N + 1], where each of those fields begins in text.blob
    tokens.NAME.ids       uint16 or uint32, the rows of one token table, end to end
    tokens.NAME.offsets   int64[N + 1], where each row begins in tokens.NAME.ids

All numbers are little-endian. Nothing is read at opening but meta.json.
"""

import difflib
import hashlib
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from rag_jax.retrieval.reading import (
    Passage,
    RetrievalError,
    SeenIds,
    check_passage,
    read_passages,
)

__all__ = [
    "Passage",
    "PassageStore",
    "RetrievalError",
    "TokenTable",
    "check_rows",
    "map_file",
    "read_passages",
    "write_store",
]

STORE_FORMAT = 1
CHUNK = 1024  # passages tokenized and written at a time


class TokenTable:
    """Ragged rows of token ids, one per passage, memory-mapped."""

    def __init__(self, ids: np.ndarray, offsets: np.ndarray, name: str):
        self._ids, self._offsets, self._name = ids, offsets, name

    @property
    def lengths(self) -> np.ndarray:
        """int64[N]: tokens per row."""
        return np.diff(self._offsets)

    def lengths_of(self, row_ids: np.ndarray) -> np.ndarray:
        """int64[...]: tokens of some rows."""
        check_rows(row_ids, len(self._offsets) - 1, f"token table {self._name!r}")
        return self._offsets[row_ids + 1] - self._offsets[row_ids]

    def rows(self, row: int) -> np.ndarray:
        """The token ids of one row: uint16 or uint32, read-only."""
        check_rows(np.asarray(row), len(self._offsets) - 1, f"token table {self._name!r}")
        return self._ids[self._offsets[row] : self._offsets[row + 1]]

    def padded(
        self, row_ids: np.ndarray, length: int, pad_id: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Rows in one rectangle, longer ones cut, shorter ones filled with pad_id.

        Args:
            row_ids: integers[...], rows of the store.
            length: tokens per row of the result.
            pad_id: token id for the filled places.

        Returns:
            token ids int32[..., length], and mask bool[..., length], True where a token is real.
        """
        row_ids = np.asarray(row_ids)
        check_rows(row_ids, len(self._offsets) - 1, f"token table {self._name!r}")
        starts, place = self._offsets[row_ids], np.arange(length)
        mask = place < (self._offsets[row_ids + 1] - starts)[..., None]
        places = np.where(mask, starts[..., None] + place, 0)
        tokens = self._ids[places] if self._ids.size else places
        return np.where(mask, tokens.astype(np.int32), np.int32(pad_id)), mask


def check_rows(rows: np.ndarray, size: int, what: str) -> None:
    """Refuses row numbers that are not integers from 0 to size - 1."""
    if rows.dtype.kind not in "iu":
        raise RetrievalError(f"{what}: rows must be integers, got dtype {rows.dtype}.")
    if rows.size and not (0 <= rows.min() and rows.max() < size):
        raise RetrievalError(
            f"{what}: row {rows.min() if rows.min() < 0 else rows.max()} is outside 0..{size - 1}; "
            "mask padding documents before looking them up."
        )


class PassageStore:
    """The passages of an index, by row. Threads may share one."""

    def __init__(self, path: Path, meta: dict):
        self.path, self.fingerprint, self._meta = path, meta["fingerprint"], meta
        self._blob = map_file(path / "text.blob", np.uint8)
        self._offsets = map_file(path / "text.offsets", "<i8")
        self._rows_by_id: dict[str, int] | None = None

    @classmethod
    def open(cls, path: str | os.PathLike) -> "PassageStore":
        """Opens a store without reading it. Checks the meta data's checksum and every file's size.

        Raises:
            RetrievalError: the directory is not a store, or is damaged.
        """
        path = Path(path)
        meta = _read_meta(path)
        for name, file in meta["files"].items():
            if not (path / name).is_file():
                raise RetrievalError(f"{path}: {name} is missing; copy or write the store again.")
            if (path / name).stat().st_size != file["bytes"]:
                raise RetrievalError(
                    f"{path}: {name} has {(path / name).stat().st_size} bytes, its meta.json says "
                    f"{file['bytes']}; copy or write the store again."
                )
        return cls(path, meta)

    def __len__(self) -> int:
        return self._meta["passages"]

    def __getitem__(self, row: int) -> Passage:
        if not 0 <= row < len(self):  # -1 is never a passage: it would hide a padded search result
            raise IndexError(f"{self.path}: row {row} is outside 0..{len(self) - 1}.")
        begin, title, text, end = (int(o) for o in self._offsets[3 * row : 3 * row + 4])
        raw = self._blob[begin:end].tobytes()
        cuts = (0, title - begin, text - begin, end - begin)
        return Passage(*(raw[a:b].decode() for a, b in itertools.pairwise(cuts)))

    @property
    def token_tables(self) -> tuple[str, ...]:
        """Names of the token tables."""
        return tuple(self._meta["tokens"])

    def tokens(self, name: str) -> TokenTable:
        """The token table of that name."""
        if name not in self._meta["tokens"]:
            raise RetrievalError(
                f"{self.path}: no token table {name!r}; it has {list(self.token_tables)}."
            )
        ids = map_file(self.path / f"tokens.{name}.ids", self._meta["tokens"][name])
        return TokenTable(ids, map_file(self.path / f"tokens.{name}.offsets", "<i8"), name)

    def verify(self) -> None:
        """Reads every file and compares it with its checksum: about 1 second per GB."""
        for name, file in self._meta["files"].items():
            with open(self.path / name, "rb") as data:
                if hashlib.file_digest(data, "sha256").hexdigest() != file["sha256"]:
                    raise RetrievalError(
                        f"{self.path}: {name} differs from its sha256; write the store again."
                    )

    def row_of(self, passage_id: str) -> int:
        """The row of a passage id. Ids that count rows from 0 or 1 need no table in memory.

        Raises:
            RetrievalError: no passage has this id; near matches are listed.
        """
        if re.fullmatch(r"[0-9]{1,18}", passage_id, re.ASCII):
            for row in (int(passage_id) - 1, int(passage_id)):
                if 0 <= row < len(self) and self[row].id == passage_id:
                    return row
        if self._rows_by_id is None:
            self._rows_by_id = {passage.id: row for row, passage in enumerate(self)}
        if passage_id not in self._rows_by_id:
            some = list(itertools.islice(self._rows_by_id, 100_000))
            near = difflib.get_close_matches(passage_id, some, 3, 0.5) or some[:3]
            raise RetrievalError(
                f"{self.path}: none of its {len(self)} passages has the id {passage_id!r}; near "
                f"matches are {near}."
            )
        return self._rows_by_id[passage_id]


def _read_meta(path: Path) -> dict:
    if not path.is_dir():
        raise RetrievalError(f"{path}: no such passage store; check the path.")
    try:
        meta = json.loads((path / "meta.json").read_text("utf-8"))
        format_, fingerprint = meta["format"], meta["fingerprint"]
    except FileNotFoundError:
        raise RetrievalError(
            f"{path}: not a passage store, or half written: it has no meta.json; write it again."
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise RetrievalError(
            f"{path}: meta.json is damaged ({error!r}); copy or write the store again."
        ) from None
    if format_ != STORE_FORMAT:
        raise RetrievalError(
            f"{path}: store format {format_!r}, this version reads {STORE_FORMAT}; write the store "
            "again, or use the version of rag_jax that wrote it."
        )
    if fingerprint != _fingerprint(meta):
        raise RetrievalError(
            f"{path}: meta.json does not agree with its own fingerprint, so it is damaged; copy or "
            "write the store again."
        )
    return meta


def _fingerprint(meta: Mapping) -> str:
    """sha256 over every file's checksum, hence over the content, and over the rest of meta.json."""
    rest = {key: value for key, value in meta.items() if key != "fingerprint"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def map_file(path: Path, dtype) -> np.ndarray:
    """A flat file as a read-only memory-mapped array; an empty file as an empty array."""
    if not path.stat().st_size:
        return np.zeros(0, dtype)
    return np.asarray(np.memmap(path, dtype, "r"))


class _HashedFile:
    """A new file that knows its size and checksum, and is on the disk once it is closed."""

    def __init__(self, path: Path):
        self._path, self._file, self._sha256 = path, open(path, "wb"), hashlib.sha256()

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self._sha256.update(data)

    def close(self) -> dict[str, int | str]:
        """Returns the file's entry of meta.json."""
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())
            return {"bytes": self._file.tell(), "sha256": self._sha256.hexdigest()}


class _RaggedWriter:
    """Writes pieces end to end into one file and where each begins into another."""

    def __init__(self, data: Path, offsets: Path):
        self._names = data.name, offsets.name
        self._data, self._offsets, self._end = _HashedFile(data), _HashedFile(offsets), 0
        self._offsets.write(np.zeros(1, "<i8").tobytes())

    def write(self, data: bytes, sizes: Sequence[int]) -> None:
        """Appends pieces of the given sizes, counted in the unit of the offsets."""
        self._data.write(data)
        ends = self._end + np.cumsum(sizes, dtype="<i8")
        self._offsets.write(ends.astype("<i8").tobytes())
        self._end = int(ends[-1])

    def close(self) -> dict[str, dict]:
        return {
            self._names[0]: self._data.close(),
            self._names[1]: self._offsets.close(),
        }


def write_store(
    path: str | os.PathLike,
    passages: Iterable[Passage],
    encoders: Mapping[str, Callable[[Sequence[Passage]], Sequence[Sequence[int]]]],
    progress: Callable[[int], None] | None = None,
) -> PassageStore:
    """Writes a store in one pass and publishes it by renaming, so that it is whole or not there.

    Args:
        path: the directory to make. It must not exist; its parents are made.
        passages: consumed CHUNK at a time, never all in memory. Ids must be unique.
        encoders: token tables to write: a name, and a function from some passages to the token ids
            of each. Ids are kept as uint16 when all of them fit, else as uint32.
        progress: called with the number of passages newly written (tqdm's update fits).

    Raises:
        RetrievalError: the path exists, there are no passages, or a passage or a row of token ids
            is not valid.
    """
    path = Path(path).absolute()
    if path.exists():
        raise RetrievalError(f"{path}: already exists; remove it first or choose another path.")
    for name in encoders:
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            raise RetrievalError(f"token table {name!r}: use letters, digits, _ and - only.")
    partial = path.with_name(path.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    meta = _write_files(partial, iter(passages), encoders, progress)
    meta["fingerprint"] = _fingerprint(meta)
    file = _HashedFile(partial / "meta.json")
    file.write(json.dumps(meta, indent=1).encode())
    file.close()
    publish(partial, path)
    return PassageStore.open(path)


def _write_files(directory: Path, passages, encoders, progress) -> dict:
    text = _RaggedWriter(directory / "text.blob", directory / "text.offsets")
    tables = {
        name: _RaggedWriter(directory / f"tokens.{name}.wide", directory / f"tokens.{name}.offsets")
        for name in encoders
    }
    seen, count, largest = SeenIds(), 0, dict.fromkeys(encoders, 0)
    while chunk := list(itertools.islice(passages, CHUNK)):
        for row, passage in enumerate(chunk, count):
            check_passage(passage, seen, f"passage {row}")
        fields = [field.encode() for passage in chunk for field in Passage(*passage)]
        text.write(b"".join(fields), [len(field) for field in fields])
        for name, encode in encoders.items():
            ids, sizes = _flat_ids(encode(chunk), len(chunk), name)
            largest[name] = max(largest[name], int(ids.max(initial=0)))
            tables[name].write(ids.tobytes(), sizes)
        count += len(chunk)
        if progress is not None:
            progress(len(chunk))
    if not count:
        raise RetrievalError(f"{directory}: no passages were given; a store needs at least one.")
    files, tokens = text.close(), {}
    for name, table in tables.items():
        files.update(table.close())
        tokens[name] = "<u2" if largest[name] < 2**16 else "<u4"
        del files[f"tokens.{name}.wide"]
        files[f"tokens.{name}.ids"] = _narrow(directory, name, tokens[name])
    return {"format": STORE_FORMAT, "passages": count, "tokens": tokens, "files": files}


def _flat_ids(rows: Sequence[Sequence[int]], count: int, name: str) -> tuple[np.ndarray, list[int]]:
    """Returns all token ids uint32[sum of sizes], and the size of each row."""
    if len(rows) != count:
        raise RetrievalError(
            f"token table {name!r}: its encoder gave {len(rows)} rows for {count} passages."
        )
    ids = np.fromiter(itertools.chain.from_iterable(rows), np.int64)
    if ids.size and not (0 <= ids.min() and ids.max() < 2**31):
        raise RetrievalError(
            f"token table {name!r}: ids from {ids.min()} to {ids.max()}; allowed are 0..2**31 - 1."
        )
    return ids.astype("<u4"), [len(row) for row in rows]


def _narrow(directory: Path, name: str, dtype: str) -> dict:
    """Rewrites the uint32 ids of a table in the narrowest dtype that holds them all."""
    wide = directory / f"tokens.{name}.wide"
    ids, file = map_file(wide, "<u4"), _HashedFile(directory / f"tokens.{name}.ids")
    for begin in range(0, len(ids), 2**22):
        file.write(ids[begin : begin + 2**22].astype(dtype).tobytes())
    wide.unlink()
    return file.close()


def publish(partial: Path, path: Path) -> None:
    """Renames a finished directory, and waits until the disk holds the new name."""
    sync_directory(partial)
    os.rename(partial, path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Waits until the names in a directory are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
