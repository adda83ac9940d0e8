"""An index that nominates passages, and a reranker that chooses the best of them."""

import dataclasses
import itertools
import threading
from collections.abc import Callable, Sequence

import numpy as np

from rag_jax.retrieval.bm25 import Bm25Index
from rag_jax.retrieval.hybrid import HybridIndex
from rag_jax.retrieval.index import PassageIndex
from rag_jax.retrieval.protocol import IndexWrapper, Passage, SearchResult, check_texts, merge

KEPT = 2**18  # scores, the newest ones, that are kept and not computed again


@dataclasses.dataclass
class RerankedIndex(IndexWrapper):
    """An index of any kind, whose candidates a reranker scores together with the question.

    Queries are those of a hybrid index, or, around a BM25 index, texts. Threads may share it if
    they may share its parts.

    Attributes:
        index: nominates candidates.
        nominate: its search, by all processes: queries, n -> rows int32[B, n].
        score: R questions, R passages -> logits float32[R]. All processes call it with the same
            arguments.
        count: how many passages are nominated; k if that is more.
    """

    index: PassageIndex | Bm25Index | HybridIndex
    nominate: Callable[[np.ndarray, int], np.ndarray]
    score: Callable[[Sequence[str], Sequence[Passage]], np.ndarray]
    count: int
    _kept: dict[tuple[str, int], float] = dataclasses.field(default_factory=dict, repr=False)
    _lock: threading.Lock = dataclasses.field(default_factory=threading.Lock, repr=False)

    division = "devices"

    def _search(self, queries: np.ndarray, k: int) -> SearchResult:
        """The k passages with the highest logits among the candidates."""
        if not isinstance(queries, np.ndarray):
            queries = np.array(check_texts(queries), object)
        asked = queries
        if queries.dtype.names and not isinstance(self.index, HybridIndex):
            asked = queries["vector"]
        ids = self.nominate(asked, min(self.size, max(self.count, k)))
        return merge([SearchResult(ids, self.logits(queries, ids))], k)

    def logits(self, queries: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """The reranker's logits float32[B, K] of rows integers[B, K]."""
        return self.scores(queries["text"] if queries.dtype.names else queries, ids)

    def scores(self, texts: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """`logits` for questions [B]."""
        pairs = [(text, row) for text, rows in zip(texts, ids.tolist(), strict=True)
                 for row in rows]
        known = {pair: self._kept.get(pair) for pair in pairs}
        made: dict[tuple[str, int], float] = {}
        if new := [pair for pair in known if known[pair] is None]:
            scores = self.score([text for text, _ in new], [self.passages[row] for _, row in new])
            made = dict(zip(new, scores.tolist(), strict=True))
        known |= made
        with self._lock:
            self._kept |= made
            for pair in list(itertools.islice(self._kept, max(0, len(self._kept) - KEPT))):
                del self._kept[pair]
        return np.array([known[pair] for pair in pairs], np.float32).reshape(ids.shape)
