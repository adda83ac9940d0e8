"""From questions to passages: the query encoder on the device, the index on the host.

`begin` dispatches the embedding and returns at once; `finish` waits for it and searches. What
runs between the two overlaps: in training with staleness 1, the device's work on another batch.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from rag_jax.retrieval.index import PassageIndex

Embedder = Callable[[Any, Any, Any], Any]
Search = Callable[[np.ndarray], np.ndarray]


class Retriever:
    """Searches `index` with queries made by `embed(params, ids, mask)`, an array on the device.

    search: queries float32[B, E] to rows int32[B, K] of the index.
    """

    def __init__(self, index: PassageIndex, embed: Embedder, search: Search):
        self.index = index
        self.embed = embed
        self.search = search

    def begin(self, params: Any, ids: Any, mask: Any) -> Any:
        """Starts to embed questions int32[B, L]; does not wait."""
        return self.embed(params, ids, mask)

    def finish(self, queries: Any) -> np.ndarray:
        """The rows int32[B, K] of the best passages, best first."""
        return self.search(np.asarray(queries, np.float32))
