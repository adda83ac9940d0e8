"""What every index answers and refuses: its protocol, its results, and the checks all share."""

import abc
import dataclasses
import operator
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from rag_jax.errors import NotFiniteError, UserError

LARGEST = 1e6  # of a coordinate; far above any encoder's, far below where squares overflow

# What each of several processes searches with an index: all passages, for its share of the queries;
# its share of the passages, for all queries, and the results are merged; or, with an index on
# devices that they share, all passages for all queries, at the same time as the others.
Division = Literal["queries", "passages", "devices"]
T = TypeVar("T")


class RetrievalError(UserError, ValueError):
    """Something about passages, an index or a query that the caller can mend; the text says how."""


class VectorError(RetrievalError, NotFiniteError):
    """An embedding that nothing can be compared with."""


class Passage(NamedTuple):
    """One unit of the non-parametric memory: at most about 100 words, with its page's title."""

    id: str
    title: str
    text: str


class SearchResult(NamedTuple):
    """The best passages of each query, best first, ties by ascending id.

    Attributes:
        ids: int32[B, K], rows of the passage store; always K real and different rows.
        scores: float32[B, K], inner products of query and passage embedding.
    """

    ids: np.ndarray
    scores: np.ndarray


@dataclasses.dataclass(frozen=True)
class Hosts:
    """The processes that build or open one index together, each from its own point of view.

    Attributes:
        index: the number of this process, from 0; process 0 does what one alone must do.
        count: of processes.
        each: calls what it is given, in every process, and returns what that gave once all have
            done so; where it fails in one process, it raises an error in all.
    """

    index: int = 0
    count: int = 1
    each: Callable[[Callable[[], T]], T] = lambda make: make()

    @property
    def leads(self) -> bool:
        """Whether this is process 0."""
        return self.index == 0

    def lead(self, make: Callable[[], T]) -> T | None:
        """make() of process 0, None in the others; returns once it is done, and fails in all."""
        return self.each(make if self.leads else lambda: None)


ALONE = Hosts()


class Index(abc.ABC):
    """Anything that finds the best passages. Threads may share one.

    Attributes:
        size: N, passages that a search can find.
        width: E, of queries and passage embeddings; None = it is not asked by vectors alone.
        division: how several processes search.
    """

    size: int
    width: int | None = None
    division: Division = "queries"

    def search(self, queries: np.ndarray | Sequence[str], k: int) -> SearchResult:
        """Finds the k best passages for B queries, of which there may be none.

        Args:
            queries: float[B, E], whose inner products are the scores; without `width` texts [B], or
                what `hybrid.asked` returns.
            k: passages per query.

        Raises:
            RetrievalError: k or the queries do not fit the index.
        """
        check_k(k, self.size)
        if self.width is not None:
            queries = check_queries(queries, self.width)
        if not len(queries):
            return SearchResult(np.zeros((0, k), np.int32), np.zeros((0, k), np.float32))
        return self._search(queries, k)

    @abc.abstractmethod
    def _search(self, queries: np.ndarray, k: int) -> SearchResult:
        """`search` for checked queries, at least one; vectors are float32[B, E]."""


class Around(Index):
    """An index around another one, whose passages it finds in a way of its own.

    Attributes:
        index: the other one.
    """

    index: Any

    @property
    def path(self) -> Path:
        return self.index.path

    @property
    def manifest(self) -> dict[str, Any]:
        return self.index.manifest

    @property
    def passages(self) -> Any:
        return self.index.passages

    @property
    def size(self) -> int:
        return self.index.size

    def embeddings(self, ids: np.ndarray) -> np.ndarray:
        """The embeddings float32[..., E] of rows integers[...]."""
        return self.index.embeddings(ids)


def check_k(k: int, size: int) -> None:
    """Refuses a number of passages per query that an index of `size` passages cannot give."""
    try:
        k = operator.index(k)
    except TypeError:
        raise RetrievalError(f"k must be an integer, got {k!r}.") from None
    if not 1 <= k <= size:
        raise RetrievalError(
            f"k={k}: an index of {size} passages allows 1 to {size}; lower k, or index more.")


def check_queries(queries: np.ndarray, width: int) -> np.ndarray:
    """Returns the queries as contiguous float32[B, E], or says what is wrong with them.

    An empty batch is allowed as [0, E].
    """
    queries = np.asarray(queries)
    if queries.ndim != 2 or queries.shape[1] != width:
        raise RetrievalError(
            f"queries have shape {queries.shape}, this index needs [batch, {width}]; use the "
            "encoder that the index was built with, and add a batch axis to a single query.")
    return check_vectors(queries, lambda row: f"query {row} of the batch")


def check_vectors(rows: np.ndarray, name: Callable[[int], str]) -> np.ndarray:
    """Returns vectors as contiguous float32[B, E], after checking that every number can be used.

    Args:
        rows: numbers [B, E], of any real dtype.
        name: function from a row number to its name in an error.
    """
    if rows.dtype.kind not in "fiuV":  # V: bfloat16
        raise RetrievalError(f"vectors must be real numbers, got dtype {rows.dtype}.")
    with np.errstate(over="ignore"):
        rows = np.ascontiguousarray(rows, "<f4")
    usable = np.abs(rows) <= LARGEST  # False for NaN
    if not usable.all():
        row, column = np.argwhere(~usable)[0]
        raise VectorError(
            f"{name(row)} holds {rows[row, column]} at coordinate {column}; allowed are finite "
            f"numbers up to {LARGEST:.0e}. Check the encoder's parameters for NaN or overflow.")
    return rows


def check_rows(rows: np.ndarray, size: int, what: str) -> None:
    """Refuses row numbers that are not integers from 0 to size - 1."""
    if rows.dtype.kind not in "iu":
        raise RetrievalError(f"{what}: rows must be integers, got dtype {rows.dtype}.")
    if rows.size and not (0 <= rows.min() and rows.max() < size):
        raise RetrievalError(
            f"{what}: row {rows.min() if rows.min() < 0 else rows.max()} is outside 0..{size - 1}; "
            "mask padding documents before looking them up.")


def merge(results: Sequence[SearchResult], k: int) -> SearchResult:
    """The k best of what was found among different passages."""
    ids, scores = (np.concatenate(arrays, axis=1) for arrays in zip(*results, strict=True))
    best = np.lexsort((ids, -scores), axis=1)[:, :k]
    rows = np.arange(len(best))[:, None]
    return SearchResult(ids[rows, best], scores[rows, best])


def stack(results: Sequence[SearchResult]) -> SearchResult:
    """The results of one batch of queries after another."""
    return SearchResult(*map(np.concatenate, zip(*results, strict=True)))
