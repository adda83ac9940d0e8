"""Exact search by blocked matrix products, and recall, which is measured against it."""

from typing import Any

import numpy as np

from rag_jax.retrieval.joined import JoinedRows
from rag_jax.retrieval.protocol import Index, RetrievalError, SearchResult, stack

BLOCK_ROWS = 8192  # passages scored at a time
BLOCK_QUERIES = 256
RECALL_QUERIES = 256
PAIRS = 4096  # (query, passage) pairs scored at a time


class ExactIndex(Index):
    """Finds the true best passages, also among ties; the memory it needs does not grow with N.

    A float32 matrix product rounds differently with the shape of its block, so it only nominates
    candidates: every passage within its rounding error of the k-th best is scored again by
    inner_products, whose value depends on the two vectors alone.

    Args:
        embeddings: float32[N, E], may be memory-mapped; finite.
        valid: bool[N], the rows that a search may find; None = all. `size` counts them.
    """

    def __init__(self, embeddings: np.ndarray | JoinedRows, valid: np.ndarray | None = None):
        if embeddings.ndim != 2 or embeddings.dtype != np.float32 or 0 in embeddings.shape:
            raise RetrievalError(
                f"an index needs float32 embeddings [N, E] with N and E at least 1, got "
                f"{embeddings.dtype}{list(embeddings.shape)}.")
        self.size, self.width = embeddings.shape
        if valid is not None:
            valid = np.asarray(valid)
            if (valid.dtype, valid.shape) != (np.bool_, (self.size,)):
                raise RetrievalError(f"valid is {valid.dtype}{list(valid.shape)}: must be "
                                     f"bool[{self.size}], one for each embedding.")
            self.size = int(np.count_nonzero(valid))
        self._embeddings, self._valid = embeddings, valid
        self._largest_norms: dict[int, float] = {}  # by the first row of a block; see _largest_norm

    def _search(self, queries: np.ndarray, k: int) -> SearchResult:
        return stack([self._search_some(queries[begin : begin + BLOCK_QUERIES], k)
                      for begin in range(0, len(queries), BLOCK_QUERIES)])

    def _search_some(self, queries: np.ndarray, k: int) -> SearchResult:
        batch = len(queries)
        norms = np.linalg.norm(queries, axis=1)
        floor = np.full(batch, -np.inf)  # the k-th best score so far of each query
        best = np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.float32)
        for begin in range(0, len(self._embeddings), BLOCK_ROWS):
            block = self._embeddings[begin : begin + BLOCK_ROWS]
            # Twice the bound on the rounding error of an inner product, in any order of summation.
            slack = 2 * (self.width + 4) * 2.0**-24 * norms * self._largest_norm(begin, block)
            scores = queries @ block.T  # -> [B, BLOCK_ROWS]
            if self._valid is not None:
                scores[:, ~self._valid[begin : begin + BLOCK_ROWS]] = -np.inf
            bar = np.maximum(floor - slack, np.finfo(np.float32).min)  # -inf stays below it
            if k <= len(block) and np.isneginf(floor).any():
                kth = np.partition(scores, len(block) - k, axis=1)[:, len(block) - k]
                bar = np.maximum(bar, kth - slack)
            query, row = np.nonzero(scores >= bar[:, None])
            exact = pair_scores(queries, block, query, row)
            both = zip(best, (query, row + begin, exact), strict=True)
            query, row, score = map(np.concatenate, both)
            order = np.lexsort((row, -score, query))
            query, row, score = query[order], row[order], score[order]
            rank = np.arange(len(query)) - np.searchsorted(query, query)
            best = tuple(array[rank < k] for array in (query, row, score))
            last = rank == k - 1
            floor[query[last]] = score[last]
        return SearchResult(
            best[1].reshape(batch, k).astype(np.int32), best[2].reshape(batch, k)
        )

    def _largest_norm(self, begin: int, block: np.ndarray) -> float:
        if begin not in self._largest_norms:
            largest = float(np.sqrt(np.einsum("NE,NE->N", block, block).max()))
            if not np.isfinite(largest):
                raise RetrievalError(
                    f"embeddings of rows {begin} to {begin + len(block) - 1} are NaN, infinite or "
                    "too large to compare; build the index again.")
            self._largest_norms[begin] = largest
        return self._largest_norms[begin]


def pair_scores(queries: np.ndarray, embeddings: np.ndarray, query: np.ndarray, row: np.ndarray
                ) -> np.ndarray:
    """Returns float32[P]: the inner products of queries[query[p]] and embeddings[row[p]]."""
    scores = np.empty(len(query), np.float32)
    for begin in range(0, len(query), PAIRS):
        some = slice(begin, begin + PAIRS)
        scores[some] = inner_products(queries[query[some]], embeddings[row[some]])
    return scores


def row_scores(queries: np.ndarray, embeddings: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Returns float32[B, K]: the inner products of each query with K rows of embeddings.

    Twice as fast as `pair_scores` with the same pairs: queries are not copied.

    Args:
        queries: float32[B, E].
        embeddings: float32[N, E].
        ids: integers[B, K].
    """
    scores, step = np.empty(ids.shape, np.float32), max(1, PAIRS // max(1, ids.shape[1]))
    for begin in range(0, len(ids), step):
        some = slice(begin, begin + step)
        scores[some] = inner_products(queries[some, None], embeddings[ids[some]])
    return scores


def inner_products(queries: np.ndarray, passages: np.ndarray) -> np.ndarray:
    """The score that every index returns: summed in float64, rounded once to float32.

    Args:
        queries: float32[..., E].
        passages: float32[..., E], of a shape that broadcasts with the queries'.

    Returns:
        float32[...].
    """
    # vecdot, not matmul: the order of its sum depends on the width alone.
    return np.vecdot(queries, passages, dtype=np.float64).astype(np.float32)


class RecallSample:
    """Queries with their results of exact search, against which other indexes are measured.

    Args:
        embeddings: float32[N, E], those of the indexes.
        queries: float[Q, E]; None takes up to RECALL_QUERIES rows of embeddings with noise.
        k: passages per query, at most N are taken.
        seed: of the choice of rows and of the noise.
        valid: bool[N], the rows that a search may find; None = all.
    """

    def __init__(self, embeddings: np.ndarray | JoinedRows, queries: np.ndarray | None, k: int,
                 seed: int, valid: np.ndarray | None = None):
        source, exact = "given", ExactIndex(embeddings, valid)
        if queries is None:
            source = "passage embeddings with noise of half their norm"
            draw = np.random.default_rng(seed)
            rows = np.sort(draw.permutation(exact.size)[:RECALL_QUERIES])
            rows = rows if valid is None else np.flatnonzero(valid)[rows]
            noise = draw.standard_normal((len(rows), embeddings.shape[1]), np.float32)
            norms = np.linalg.norm(embeddings[rows], axis=1, keepdims=True)
            queries = embeddings[rows] + 0.5 * norms * noise / np.sqrt(embeddings.shape[1])
        if not len(queries):
            raise RetrievalError("no queries to measure recall on; give some, or None for "
                                 "passages.")
        k = min(k, exact.size)
        self._worst = exact.search(queries, k).scores[:, -1:]
        self._embeddings, self._queries = embeddings, np.asarray(queries, np.float32)
        self._of = {"k": k, "queries": len(queries), "source": source}

    def measure(self, index: Index) -> dict[str, Any]:
        """Returns "k", "queries" (their number), "source" (where they come from) and "recall": the
        mean share of the k passages whose score is at least that of the exact k-th best, so that
        ties count as hits."""
        k = self._of["k"]
        ids, _ = index.search(self._queries, k)
        scores = row_scores(self._queries, self._embeddings, ids)
        return {**self._of, "recall": float((scores >= self._worst).mean())}
