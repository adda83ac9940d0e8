"""Batches for RAG fine-tuning: questions, retrieved with the current query encoder."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from rag_jax import parallel
from rag_jax.data import order
from rag_jax.data.batches import RagBatcher
from rag_jax.data.questions import QuestionTokens
from rag_jax.data.text import halved
from rag_jax.models import rag
from rag_jax.retrieval.hybrid import asked
from rag_jax.retrieval.retriever import Ask, Retriever
from rag_jax.training.loop import BatchSource


def asker(model: rag.RagModel, embed: Callable[[Any, Any, Any], Any], questions: QuestionTokens,
          mesh: Mesh, length_step: int) -> Ask:
    """What makes the queries of an index: the questions as they were asked, for one of words; else
    their embeddings, on the devices; or both, with the weight of their words.

    Questions are padded as in the batch that they are for, see `QuestionTokens.batch`. Embeddings
    that come with texts have the length that makes inner products logits.
    """
    def ask(params: Any, rows: np.ndarray) -> Any:
        texts = questions.texts[rows]
        if model.lexical:
            return texts
        inputs = halved(questions.ids[rows], questions.mask[rows], length_step)
        encoder = params["query_encoder"]
        vectors = embed(encoder, *parallel.put_batch(inputs, mesh))
        if not model.asks_with_texts:
            return vectors
        return _Both(vectors, rag.query_scale(model, encoder), texts,
                     rag.word_weight(model, params))

    return ask


@dataclasses.dataclass(frozen=True)
class _Both:
    """Queries of a hybrid index that become an array, `hybrid.asked`, when they are searched for:
    the embeddings may still be on their way."""

    vectors: Any
    scale: Any
    texts: np.ndarray
    weight: Any

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return asked(np.asarray(self.vectors) * np.float32(self.scale), self.texts,
                     self.weight)


class RagSource(BatchSource):
    """The batch of step t, its passages retrieved at step t - staleness.

    With staleness 0 the passages of every batch are retrieved with the parameters that train on
    it, and the device waits for the search. With staleness s, `begin` embeds the questions of
    step t + s before step t is dispatched, and `finish` searches for them while the device is
    busy. Document scores are recomputed in the step either way: only the set of candidates is
    stale, never a score or a gradient.

    Args:
      batcher: assembles batches.
      retriever: None = closed book.
      batch_size, seed: of the batch order.
      staleness: s.
      mesh: where batches go.
    """

    def __init__(self, batcher: RagBatcher, retriever: Retriever | None, batch_size: int,
                 seed: int, staleness: int, mesh: Mesh):
        self.lookahead = staleness if retriever is not None else 0
        self._batcher, self._retriever = batcher, retriever
        self._batch_size, self._seed, self._mesh = batch_size, seed, mesh
        self._begun: dict[int, Callable[[], np.ndarray]] = {}

    def _rows(self, step: int) -> np.ndarray:
        return order.batch_indices(len(self._batcher.questions), self._batch_size, self._seed, step)

    def begin(self, step: int, params: Any) -> None:
        if self._retriever is None:
            return
        queries = self._retriever.begin(params, self._rows(step))
        self._begun[step] = lambda: self._retriever.finish(queries)

    def finish(self, step: int) -> jax.Array:
        retrieved = self._begun.pop(step)() if self._retriever is not None else None
        index = self._retriever.index if self._retriever is not None else None
        rng = order.generator(self._seed, 4, step)
        rows = self._rows(step)
        own = parallel.own_rows(len(rows), self._mesh)
        return parallel.put_rows(self._batcher.batch(rows, retrieved, index, rng, own=own),
                                 self._mesh)

    def pending(self) -> dict:
        """{step: retrieved rows}; searches for what was begun."""
        found = {step: search() for step, search in self._begun.items()}
        self._begun = {step: lambda ids=ids: ids for step, ids in found.items()}
        return {str(step): ids.tolist() for step, ids in found.items()}

    def restore(self, pending: dict) -> None:
        found = {int(step): np.array(ids, np.int32) for step, ids in pending.items()}
        self._begun = {step: lambda ids=ids: ids for step, ids in found.items()}
