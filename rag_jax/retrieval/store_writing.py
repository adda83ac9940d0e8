"""Writing a passage store (its files: see passages.py), and checks of its passages."""

import contextlib
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rag_jax import files
from rag_jax.citation import Citation
from rag_jax.retrieval.passages import CITATIONS, META, TABLE_NAME, PassageStore
from rag_jax.retrieval.protocol import Passage, RetrievalError
from rag_jax.retrieval.verification import folder_entries, map_file

CHUNK = 1024  # passages tokenized and written at a time


class SeenIds:
    """The ids seen so far. Plain decimal ids (DPR's 21 million) take one bit each, others a str."""

    def __init__(self):
        self._bits, self._others = bytearray(), set()

    def add(self, passage_id: str) -> bool:
        """Returns True when the id is new."""
        if not re.fullmatch(r"0|[1-9][0-9]{0,8}", passage_id, re.ASCII):
            before = len(self._others)
            self._others.add(passage_id)
            return len(self._others) > before
        byte, bit = divmod(int(passage_id), 8)
        if byte >= len(self._bits):
            self._bits.extend(bytes(max(byte + 1 - len(self._bits), len(self._bits), 1024)))
        new = not self._bits[byte] >> bit & 1
        self._bits[byte] |= 1 << bit
        return new


def check_passage(passage: Passage, seen: SeenIds, where: str) -> None:
    """Refuses an empty id or text, an id in `seen`, and text that UTF-8 cannot hold.

    where: the place of the passage, for the message.
    """
    for field in ("id", "text"):
        if not getattr(passage, field).strip():
            raise RetrievalError(
                f"{where}: field {field!r} is empty; give it a value or remove the passage.")
    try:
        "".join(passage).encode()
    except UnicodeEncodeError as error:
        raise RetrievalError(
            f"{where}: half of a surrogate pair cannot be stored as UTF-8 ({error})."
        ) from None
    if not seen.add(passage.id):
        raise RetrievalError(
            f"{where}: id {passage.id!r} occurs a second time; ids must be unique.")


def write_store(path: str | os.PathLike, passages: Iterable[Passage],
                encoders: Mapping[str, Callable[[Sequence[Passage]], Sequence[Sequence[int]]]],
                progress: Callable[[int], Any] = lambda count: None,
                source: Callable[[str], Citation | None] | None = None) -> PassageStore:
    """Writes a store in one pass and publishes it by renaming: it is complete or absent.

    Args:
        path: the directory to make. It must not exist; its parents are made.
        passages: consumed CHUNK at a time, never all in memory. Ids must be unique.
        encoders: for each token table to write, a function from some passages to the token ids of
            each, by name. Ids are stored as uint16 if all of them fit, else as uint32.
        progress: called with the number of passages just written, as tqdm's update is.
        source: function from the id of a passage to its citation or None; it is called once for
            each passage, in their order.

    Raises:
        RetrievalError: the path exists, there are no passages, or a passage or a row of token ids
            is not valid.
    """
    path = Path(path).absolute()
    if path.exists():
        raise RetrievalError(f"{path}: already exists; remove it first or choose another path.")
    for name in encoders:
        if not re.fullmatch(TABLE_NAME, name):
            raise RetrievalError(f"token table {name!r}: use letters, digits, _ and - only.")
    files.remove_leftovers(path.parent)
    with files.new_folder(path) as content:
        count, largest = _write_rows(content, passages, encoders, progress, source)
        tokens = {name: _narrow(content, name, largest[name]) for name in encoders}
        META.write(content, {"format": 1 if source is None else META.format, "passages": count,
                             "tokens": tokens, "files": folder_entries(content)})
    return PassageStore.open(path)


def _write_rows(folder: Path, passages: Iterable[Passage], encoders: Mapping[str, Callable],
                progress: Callable[[int], Any], source: Callable[[str], Citation | None] | None
                ) -> tuple[int, dict[str, int]]:
    """Writes texts, tokens as uint32, and citations.

    Returns:
        The number of passages, and the largest token id of each table.
    """
    seen, count, largest = SeenIds(), 0, dict.fromkeys(encoders, 0)
    with contextlib.ExitStack() as stack:
        text = stack.enter_context(_RaggedWriter(folder / "text.blob", folder / "text.offsets"))
        tables = {name: stack.enter_context(
            _RaggedWriter(folder / f"tokens.{name}.ids", folder / f"tokens.{name}.offsets"))
            for name in encoders}
        cited = source and stack.enter_context(_RaggedWriter(*(folder / name
                                                               for name in CITATIONS)))
        passages = iter(passages)
        while chunk := list(itertools.islice(passages, CHUNK)):
            for number, passage in enumerate(chunk, count + 1):
                check_passage(passage, seen, f"passage {number}")
            fields = [field.encode() for passage in chunk for field in Passage(*passage)]
            text.write(b"".join(fields), [len(field) for field in fields])
            if cited is not None:
                records = [b"" if place is None else json.dumps(place.record()).encode()
                           for place in (source(passage.id) for passage in chunk)]
                cited.write(b"".join(records), [len(record) for record in records])
            for name, encode in encoders.items():
                ids, sizes = _flat_ids(encode(chunk), len(chunk), name)
                largest[name] = max(largest[name], int(ids.max(initial=0)))
                tables[name].write(ids.tobytes(), sizes)
            count += len(chunk)
            progress(len(chunk))
    if not count:
        raise RetrievalError(f"{folder}: no passages were given; a store needs at least one.")
    return count, largest


class _RaggedWriter(contextlib.AbstractContextManager):
    """Writes pieces end to end into one file, and the offset of each into another."""

    def __init__(self, data: Path, offsets: Path):
        self._data, self._offsets, self._end = data.open("wb"), offsets.open("wb"), 0
        self.write(b"", [0])

    def write(self, data: bytes, sizes: Sequence[int]) -> None:
        """Appends pieces of the given sizes, in the unit of the offsets."""
        self._data.write(data)
        ends = self._end + np.cumsum(sizes, dtype="<i8")
        self._offsets.write(ends.astype("<i8").tobytes())
        self._end = int(ends[-1])

    def __exit__(self, *error) -> None:
        self._data.close()
        self._offsets.close()


def _flat_ids(rows: Sequence[Sequence[int]], count: int, name: str) -> tuple[np.ndarray, list[int]]:
    """Returns the token ids of all rows, uint32[sum of sizes], and the size of each row."""
    if len(rows) != count:
        raise RetrievalError(
            f"token table {name!r}: its encoder gave {len(rows)} rows for {count} passages.")
    ids = np.fromiter(itertools.chain.from_iterable(rows), np.int64)
    if ids.size and not (0 <= ids.min() and ids.max() < 2**31):
        raise RetrievalError(
            f"token table {name!r}: ids from {ids.min()} to {ids.max()}; allowed are 0..2**31 - 1.")
    return ids.astype("<u4"), [len(row) for row in rows]


def _narrow(folder: Path, name: str, largest: int) -> str:
    """Rewrites the uint32 ids of a table as uint16 if all of them fit; returns their dtype."""
    if largest >= 2**16:
        return "<u4"
    path = folder / f"tokens.{name}.ids"
    ids = map_file(path, "<u4")
    with files.replaced(path, "wb") as narrow:
        for begin in range(0, len(ids), 2**22):
            narrow.write(ids[begin : begin + 2**22].astype("<u2").tobytes())
    return "<u2"
