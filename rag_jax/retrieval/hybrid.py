"""A hybrid index: embeddings and words both nominate passages, and both score all of them."""

import dataclasses
from typing import Any

import numpy as np

from rag_jax.fusion import Fusion
from rag_jax.retrieval.bm25 import Bm25Index
from rag_jax.retrieval.index import PassageIndex
from rag_jax.retrieval.joined import are_rows, kept_rows
from rag_jax.retrieval.protocol import (
    IndexWrapper,
    RetrievalError,
    SearchResult,
    VectorError,
    check_queries,
    merge,
)

WORDS = "words"  # folder of the BM25 index, in that of the index of embeddings
NOMINATED = 100  # passages by each of both, or 4 k if that is more


def hybrid_queries(vectors: np.ndarray, texts: np.ndarray, weight: Any) -> np.ndarray:
    """Queries of a hybrid index: records [B] of "vector" float32[E], "text" and "weight".

    The weight is that of words. It may be learned, so it comes with the vectors, from the same
    parameters.
    """
    queries = np.empty(len(texts), [("vector", "<f4", vectors.shape[1:]), ("text", object),
                                    ("weight", "<f4")])
    queries["vector"], queries["text"], queries["weight"] = vectors, texts, weight
    return queries


@dataclasses.dataclass
class HybridIndex(IndexWrapper):
    """An index of embeddings and a BM25 index of the same passages, searched as one.

    Attributes:
        index: that of embeddings. Row numbers are those of this one.
        words: the BM25 index of the same passages, in the same order.
        fusion: how the scores are joined; each query has a weight of words.
        to_words: int[N], the row of `words` for each row of `index`, -1 for deleted ones; None =
            the rows are the same.
    """

    index: PassageIndex
    words: Bm25Index
    fusion: Fusion
    to_words: np.ndarray | None = None

    def __post_init__(self):
        if self.index.division != "queries":
            raise RetrievalError(f"{self.path}: each process holds a share of its parts, and a "
                                 "hybrid index needs all; start one process, or more than it has "
                                 "parts.")
        if self.to_words is None:
            self.to_words = matching_rows(self.index, self.words)

    def scores(self, texts: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """BM25 scores float32[B, K] of rows integers[B, K]."""
        return self.words.scores(texts, ids if self.to_words is None else self.to_words[ids])

    def _search(self, queries: np.ndarray, k: int) -> SearchResult:
        """The k passages with the highest joined scores among those that either index nominates, in
        the order of their logits."""
        if getattr(queries, "dtype", np.dtype(object)).names is None:
            raise RetrievalError("queries of a hybrid index are what hybrid_queries returns, of "
                                 f"vectors and texts; got {queries!r:.60}.")
        vectors = check_queries(queries["vector"], self.index.width)
        if not (finite := np.isfinite(queries["weight"])).all():
            raise VectorError(f"query {finite.argmin()} of the batch: its weight of words is "
                              f"{queries['weight'][finite.argmin()]}; allowed are finite numbers.")
        count = min(self.size, max(NOMINATED, 4 * k))
        ids = np.concatenate([self.index.search(vectors, count).ids, self._by_words(
            queries["text"], count)], axis=1)
        ids.sort(axis=1)
        twice = np.pad(ids[:, 1:] == ids[:, :-1], ((0, 0), (1, 0)))
        dense, words = self._scores(queries, ids)
        for scores in (dense, words):
            scores[twice] = -np.inf  # ranks below all others
        by_ranks = self.fusion.kind == "reciprocal_rank"
        if by_ranks:
            ids, dense, words = _in_order_of_scores(ids, dense, words)
        with np.errstate(invalid="ignore"):
            joined = self._joined(dense, words, queries)
        joined[np.isneginf(dense)] = -np.inf
        if not by_ranks:
            return merge([SearchResult(ids, joined)], k)
        best, = _taken(np.argsort(-joined, axis=1, stable=True)[:, :k], ids)
        return self._ranked(queries, best)

    def _ranked(self, queries: np.ndarray, ids: np.ndarray) -> SearchResult:
        """Rows integers[B, K] in the order of their `logits`; ranks are among these rows alone."""
        ids, dense, words = _in_order_of_scores(ids, *self._scores(queries, ids))
        scores = self._joined(dense, words, queries)
        return SearchResult(*_taken(np.argsort(-scores, axis=1, stable=True), ids, scores))

    def logits(self, queries: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """Joined scores float32[B, K] of rows integers[B, K]; ranks are among these rows alone."""
        return self._joined(*self._scores(queries, ids), queries)

    def _scores(self, queries: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Inner products and BM25 scores float32[B, K] each of rows integers[B, K]."""
        return (self.index.scores(queries["vector"], ids), self.scores(queries["text"], ids))

    def _joined(self, dense: np.ndarray, words: np.ndarray, queries: np.ndarray) -> np.ndarray:
        return self.fusion.logits(dense, words, queries["weight"][:, None]).astype(np.float32)

    def _by_words(self, texts: np.ndarray, count: int) -> np.ndarray:
        """The rows int32[B, count], of the index of embeddings, that words nominate."""
        rows = self.words.search(texts, count).ids
        if self.to_words is None:
            return rows
        return np.flatnonzero(self.to_words >= 0).astype(np.int32)[rows]


def _in_order_of_scores(ids: np.ndarray, dense: np.ndarray, words: np.ndarray
                        ) -> list[np.ndarray]:
    """Rows integers[B, K] and their scores float32[B, K], by descending inner products. Where the
    scores of one index are equal, the other decides, and so ranks by place do not depend on the
    numbers of rows: most passages have no word of a question."""
    return _taken(np.lexsort((ids, -words, -dense), axis=1), ids, dense, words)


def _taken(order: np.ndarray, *columns: np.ndarray) -> list[np.ndarray]:
    """Arrays [B, K] in an order int[B, K] of each row."""
    return [np.take_along_axis(each, order, axis=1) for each in columns]


def matching_rows(dense: PassageIndex, words: Bm25Index) -> np.ndarray | None:
    """The row int64[N] of `words` for each row of `dense`, -1 for deleted ones.

    None = the rows are the same: both indexes hold all passages of one store.

    Raises:
        RetrievalError: they hold other passages, or the same in another order.
    """
    stores = [index.manifest["passages_fingerprint"] for index in (dense, words)]
    if dense.valid is None and stores[0] == stores[1]:
        return None
    valid = np.ones(len(dense.passages), bool) if dense.valid is None else dense.valid
    rows = np.flatnonzero(valid)
    if len(rows) != words.size or not are_rows(
            words.passages.stores[0], kept_rows(dense.passages, valid)):
        raise RetrievalError(f"{words.path}: its passages are not those of {dense.path}; count "
                             "their words again.")
    matching = np.full(len(dense.passages), -1)
    matching[rows] = np.arange(words.size)
    return matching
