"""From questions to passages: what the index is asked, and the search on the host.

`begin` starts to make the queries and returns at once: the query encoder runs on the device.
`finish` waits for them and searches. What runs between the two overlaps: in training with
staleness 1, the device's work on another batch.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from rag_jax.retrieval.bm25 import Bm25Index
from rag_jax.retrieval.index import PassageIndex

Ask = Callable[[Any, np.ndarray], Any]  # (params, rows of questions) -> queries
Search = Callable[[np.ndarray], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Retriever:
    """Searches an index.

    Attributes:
        index: what is searched.
        ask: makes the queries: vectors, or for BM25 the questions.
        search: queries to rows int32[B, K] of the index.
    """

    index: PassageIndex | Bm25Index
    ask: Ask
    search: Search

    def begin(self, params: Any, rows: np.ndarray) -> Any:
        """Starts to make the queries of questions int[B]; does not wait."""
        return self.ask(params, rows)

    def finish(self, queries: Any) -> np.ndarray:
        """The rows int32[B, K] of the best passages, best first."""
        return self.search(np.asarray(queries))
