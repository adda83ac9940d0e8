"""The protocol of every index, its results, and the checks of vectors, rows and k."""

import abc
import dataclasses
import operator
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from rag_jax.errors import NotFiniteError, UserError

LARGEST = 1e6  # of a coordinate; far above any encoder's, far below where squares overflow

# How several processes divide a search. "queries": each searches all passages for its share of the
# queries. "passages": each searches its share of the passages for all queries, and the results are
# merged. "devices": the index is on devices that they share, and all make the same call together.
Division = Literal["queries", "passages", "devices"]
T = TypeVar("T")


class RetrievalError(UserError, ValueError):
    """An error in passages, an index or a query; the message says what to do."""


class VectorError(RetrievalError, NotFiniteError):
    """A vector that is not finite or too large."""


class OtherEncoderError(RetrievalError):
    """An index was built by another encoder than the one that asks it."""


class PassageIdError(RetrievalError):
    """An id of a passage is unknown, or taken; those in the message may look like paths."""


class Passage(NamedTuple):
    """A passage of at most about 100 words, with the title of its page."""

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
    """The processes that build or open one index together, and which of them this one is.

    Attributes:
        index: the number of this process, from 0; process 0 does what only one may do.
        count: how many processes there are.
        each: calls a function in every process, and returns its result once all have called it; if
            the call fails in one process, it raises an error in all.
    """

    index: int = 0
    count: int = 1
    each: Callable[[Callable[[], T]], T] = lambda make: make()

    @property
    def leads(self) -> bool:
        """Whether this is process 0."""
        return self.index == 0

    def lead(self, make: Callable[[], T]) -> T | None:
        """Calls make in process 0 alone. Returns its result there, None in the others, once it has
        returned; an error is raised in all."""
        return self.each(make if self.leads else lambda: None)


ALONE = Hosts()


class Index(abc.ABC):
    """Finds the best passages for queries. Threads may share one.

    Attributes:
        size: N, passages that a search can find.
        width: E, of queries and passage embeddings; None = queries are not vectors alone.
        division: how several processes divide a search.
    """

    size: int
    width: int | None = None
    division: Division = "queries"

    def search(self, queries: np.ndarray | Sequence[str], k: int) -> SearchResult:
        """Finds the k best passages for each of B queries; B may be 0.

        Args:
            queries: float[B, E], whose inner products are the scores. Where `width` is None, texts
                [B], or what `hybrid.hybrid_queries` returns.
            k: passages per query.

        Raises:
            RetrievalError: k or the queries do not fit the index.
        """
        k = check_k(k, self.size)
        if self.width is not None:
            queries = check_queries(queries, self.width)
        if not len(queries):
            return SearchResult(np.zeros((0, k), np.int32), np.zeros((0, k), np.float32))
        return self._search(queries, k)

    @abc.abstractmethod
    def _search(self, queries: np.ndarray, k: int) -> SearchResult:
        """`search` for checked queries, at least one; vectors are float32[B, E]."""


class IndexWrapper(Index):
    """An index that wraps another one, and ranks the passages of that one in another way.

    Attributes:
        index: the wrapped one.
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


def check_k(k: int, size: int) -> int:
    """Returns k, of any type of integers, as an int; numpy's narrow ones overflow.

    Raises:
        RetrievalError: k is no integer from 1 to `size`.
    """
    try:
        k = int(operator.index(k))
    except TypeError:
        raise RetrievalError(f"k must be an integer, got {k!r}.") from None
    if not 1 <= k <= size:
        raise RetrievalError(
            f"k={k}: an index of {size} passages allows 1 to {size}; lower k, or index more.")
    return k


def check_queries(queries: np.ndarray, width: int) -> np.ndarray:
    """Returns the queries as contiguous float32[B, E]; an empty batch is allowed as [0, E].

    Raises:
        RetrievalError: another shape, or as `check_vectors`.
    """
    queries = np.asarray(queries)
    if queries.ndim != 2 or queries.shape[1] != width:
        raise RetrievalError(
            f"queries have shape {queries.shape}, this index needs [batch, {width}]; use the "
            "encoder that the index was built with, and add a batch axis to a single query.")
    return check_vectors(queries, lambda row: f"query {row} of the batch")


def check_texts(queries: Iterable[str]) -> list[str]:
    """Returns the queries of an index of words; a text alone is refused, whose letters they would
    be.

    Raises:
        RetrievalError: no list of texts.
    """
    texts = list(queries)
    if isinstance(queries, str) or not all(isinstance(text, str) for text in texts):
        raise RetrievalError(f"queries must be a list of texts, got {queries!r:.60}.")
    return texts


def check_vectors(rows: np.ndarray, name: Callable[[int], str]) -> np.ndarray:
    """Returns vectors as contiguous float32[B, E].

    Args:
        rows: numbers [B, E], of any real dtype.
        name: function from a row number to its name in an error.

    Raises:
        RetrievalError: another dtype, or a number that is not finite or above LARGEST.
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
    """Raises a RetrievalError unless all row numbers are integers from 0 to size - 1."""
    if rows.dtype.kind not in "iu":
        raise RetrievalError(f"{what}: rows must be integers, got dtype {rows.dtype}.")
    if rows.size and not (0 <= rows.min() and rows.max() < size):
        raise RetrievalError(
            f"{what}: row {rows.min() if rows.min() < 0 else rows.max()} is outside 0..{size - 1}; "
            "mask padding documents before looking them up.")


def merge(results: Sequence[SearchResult], k: int) -> SearchResult:
    """The k best of several results for the same queries, found among different passages."""
    ids, scores = (np.concatenate(arrays, axis=1) for arrays in zip(*results, strict=True))
    best = np.lexsort((ids, -scores), axis=1)[:, :k]
    rows = np.arange(len(best))[:, None]
    return SearchResult(ids[rows, best], scores[rows, best])


def stack(results: Sequence[SearchResult]) -> SearchResult:
    """The results of several batches of queries, one after another."""
    return SearchResult(*map(np.concatenate, zip(*results, strict=True)))
