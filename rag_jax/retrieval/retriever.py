"""From questions to passages: the query encoder on the device, the index on the host.

`begin` dispatches the embedding and returns at once; `finish` waits for it and searches. What
runs between the two overlaps: in training with staleness 1, the device's work on another batch.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from rag_jax.retrieval.index import PassageIndex

Embedder = Callable[[Any, Any, Any], Any]


class Retriever:
    """Searches `index` with queries made by `embed(params, ids, mask)`, an array on the device."""

    def __init__(self, index: PassageIndex, embed: Embedder, k: int):
        self.index = index
        self.embed = embed
        self.k = k

    def begin(self, params: Any, ids: Any, mask: Any) -> Any:
        """Starts to embed questions int32[B, L]; does not wait."""
        return self.embed(params, ids, mask)

    def finish(self, queries: Any) -> np.ndarray:
        """The rows int32[B, K] of the best passages, best first."""
        return self.index.search(np.asarray(queries, np.float32), self.k).ids
