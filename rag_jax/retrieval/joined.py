"""Several arrays, passage stores or token tables, read as if they were one.

An edited index has the rows that it was built from, followed by the added ones.
"""

import itertools
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from rag_jax.citation import Citation
from rag_jax.retrieval.passages import PassageStore, TokenTable, unknown_id
from rag_jax.retrieval.protocol import Passage, RetrievalError, check_rows
from rag_jax.retrieval.store_writing import write_store

RUN = 2**14  # passages compared at a time
Part = TypeVar("Part", bound=Collection)


def split(parts: Collection[Part], rows: np.ndarray
          ) -> Iterator[tuple[Part, np.ndarray, np.ndarray]]:
    """Divides rows integers[...] of the parts, taken one after another, among these.

    Yields each part, bool[...], which of the rows are in it, and their numbers there, integers[R].

    Raises:
        RetrievalError: a row is in no part.
    """
    check_rows(rows, sum(map(len, parts)), "joined rows")
    first = 0
    for part in parts:
        inside = (rows >= first) & (rows < first + len(part))
        yield part, inside, rows[inside] - first
        first += len(part)


class JoinedRows:
    """Arrays [N, E] one after another, indexed by row as one array."""

    ndim = 2

    def __init__(self, arrays: Sequence[np.ndarray]):
        self._arrays, self.dtype = arrays, arrays[0].dtype
        self._firsts = _firsts(arrays)
        self.shape = (sum(map(len, arrays)), arrays[0].shape[1])

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice | np.ndarray) -> np.ndarray:
        """Rows [R, E] for a slice without a step, [..., E] for integers[...] from 0 on."""
        if isinstance(rows, slice):
            begin, end, _ = rows.indices(len(self))
            some = [array[max(begin - first, 0) : max(end - first, 0)]
                    for first, array in zip(self._firsts, self._arrays, strict=True)]
            some = [rows for rows in some if len(rows)]
            return some[0] if len(some) == 1 else np.concatenate(some or [self._arrays[0][:0]])
        rows = np.asarray(rows)
        result = np.empty((*rows.shape, self.shape[1]), self.dtype)
        for array, inside, local in split(self._arrays, rows):
            result[inside] = array[local]
        return result


class JoinedPassages:
    """Passage stores one after another, used as one PassageStore is.

    Args:
        stores: at least one.
        valid: bool[N], False for deleted rows. These can be read, but not found by their ids.
    """

    def __init__(self, stores: Sequence[PassageStore], valid: np.ndarray):
        self.stores, self._valid = tuple(stores), valid

    @property
    def path(self) -> Path:
        """The path of the first store."""
        return self.stores[0].path

    @property
    def token_tables(self) -> tuple[str, ...]:
        """Names of the token tables."""
        return self.stores[0].token_tables

    def __len__(self) -> int:
        return sum(map(len, self.stores))

    def __getitem__(self, row: int) -> Passage:
        store, local = _place(self.stores, row)
        return store[local]

    def source(self, row: int) -> Citation | None:
        """Where a passage stands in its document; see PassageStore.source."""
        store, local = _place(self.stores, row)
        return store.source(local)

    def find(self, passage_id: str) -> int | None:
        """The valid row of a passage id, or None; see PassageStore.find."""
        for first, store in zip(_firsts(self.stores), self.stores, strict=True):
            row = store.find(passage_id)
            if row is not None and self._valid[first + row]:
                return first + row
        return None

    def row_of(self, passage_id: str) -> int:
        """The valid row of a passage id.

        Raises:
            RetrievalError: no passage has this id; near matches are listed.
        """
        row = self.find(passage_id)
        if row is None:
            size = int(np.count_nonzero(self._valid))
            raise unknown_id(self.path, passage_id, size, self.ids())
        return row

    def ids(self) -> Iterator[str]:
        """The ids of the valid rows."""
        ids = itertools.chain.from_iterable(store.ids() for store in self.stores)
        return itertools.compress(ids, self._valid)

    def tokens(self, name: str) -> "JoinedTokens":
        """The token tables of that name, one after another."""
        return JoinedTokens([store.tokens(name) for store in self.stores])


class JoinedTokens:
    """Token tables one after another."""

    def __init__(self, tables: Sequence[TokenTable]):
        self._tables = tables

    def row(self, row: int) -> np.ndarray:
        """The token ids of one row."""
        table, local = _place(self._tables, row)
        return table.row(local)

    def lengths_of(self, row_ids: np.ndarray) -> np.ndarray:
        """int64[...]: tokens of some rows."""
        lengths = np.zeros(row_ids.shape, np.int64)
        for table, inside, rows in split(self._tables, row_ids):
            lengths[inside] = table.lengths_of(rows)
        return lengths

    def padded(self, row_ids: np.ndarray, length: int, pad_id: int
               ) -> tuple[np.ndarray, np.ndarray]:
        """Rows as one array of equal lengths; see TokenTable.padded."""
        row_ids = np.asarray(row_ids)
        tokens = np.full((*row_ids.shape, length), pad_id, np.int32)
        mask = np.zeros(tokens.shape, bool)
        for table, inside, rows in split(self._tables, row_ids):
            tokens[inside], mask[inside] = table.padded(rows, length, pad_id)
        return tokens, mask


def kept_rows(passages: PassageStore | JoinedPassages, kept: np.ndarray
              ) -> list[tuple[PassageStore, np.ndarray]]:
    """Each store of the passages with those of its rows int64[R] that `kept` bool[N] marks."""
    rows = map(np.flatnonzero, np.split(kept, _firsts(passages.stores)[1:]))
    return list(zip(passages.stores, rows, strict=True))


def copy_rows(path: Path, parts: Sequence[tuple[PassageStore, np.ndarray]]) -> PassageStore:
    """Writes a store of some rows int[R] of each of some stores, with their tokens and citations.

    Raises:
        RetrievalError: their token tables differ, two passages have the same id, or path exists.
    """
    tables = {frozenset(store.token_tables) for store, _ in parts}
    if len(tables) > 1:
        names = " and ".join(str(sorted(names)) for names in tables)
        raise RetrievalError(f"{path}: token tables {names} do not fit together.")

    def rows_of(name: str) -> Iterator[np.ndarray]:
        return (store.tokens(name).row(int(row)) for store, rows in parts for row in rows)

    rows = {name: rows_of(name) for name in parts[0][0].token_tables}
    encoders = {name: lambda chunk, name=name: list(itertools.islice(rows[name], len(chunk)))
                for name in rows}
    passages = (store[int(row)] for store, rows in parts for row in rows)
    sources = (store.source(int(row)) for store, rows in parts for row in rows)
    cited = any(store.cited for store, _ in parts)
    return write_store(path, passages, encoders,
                       source=(lambda passage_id: next(sources)) if cited else None)


def are_rows(store: PassageStore, parts: Sequence[tuple[PassageStore, np.ndarray]]) -> bool:
    """Whether a store begins with the passages of some rows int64[R], ascending, of each of some
    stores. Runs of consecutive rows are compared whole, because there may be millions."""
    place = 0
    for part, rows in parts:
        for begin in range(0, len(rows), RUN):
            some = rows[begin : begin + RUN]
            for run in np.split(some, np.flatnonzero(np.diff(some) != 1) + 1):
                if not store.same_rows(place, part, int(run[0]), len(run)):
                    return False
                place += len(run)
    return True


def _firsts(parts: Sequence) -> list[int]:
    """The first row of each part."""
    return [0, *itertools.accumulate(map(len, parts[:-1]))]


def _place(parts: Sequence[Part], row: int) -> tuple[Part, int]:
    """The part that has a row, and the row's number there; if none has it, the last part, which
    then raises an error."""
    for part in parts[:-1]:
        if row < len(part):
            return part, row
        row -= len(part)
    return parts[-1], row
