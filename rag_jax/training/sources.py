"""Batches for RAG fine-tuning: questions, retrieved with the current query encoder."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from rag_jax import hosts, parallel
from rag_jax.data import order
from rag_jax.data.batches import RagBatcher, Searchable
from rag_jax.data.padding import halved
from rag_jax.data.questions import QuestionTokens
from rag_jax.models import rag
from rag_jax.retrieval.hybrid import hybrid_queries
from rag_jax.retrieval.json_files import digest_of
from rag_jax.training.loop import BatchSource

_INDEX = "index"  # beside the steps in what is pending
Search = Callable[[np.ndarray], np.ndarray]  # queries -> rows int32[B, K] of an index
# (parameters, rows of questions) -> a function that waits for their query vectors and searches.
Find = Callable[[Any, np.ndarray], Callable[[], np.ndarray]]


def finder(model: rag.RagModel, embed: Callable[[Any, Any, Any], Any], search: Search,
           questions: QuestionTokens, mesh: Mesh, length_step: int) -> Find:
    """Returns the function that begins a search for questions: the devices embed them meanwhile.

    An index of words is searched with the texts of the questions; a hybrid one with their vectors,
    scaled so that inner products are logits, their texts, and the weight of words. Questions are
    padded as in the batch that they are for, see `QuestionTokens.batch`.
    """
    def find(params: Any, rows: np.ndarray) -> Callable[[], np.ndarray]:
        texts = questions.texts[rows]
        if model.lexical:
            return lambda: search(texts)
        inputs = halved(questions.ids[rows], questions.mask[rows], length_step)
        encoder = params["query_encoder"]
        vectors = embed(encoder, *parallel.put_batch(inputs, mesh))
        if not model.asks_with_texts:
            return lambda: search(np.asarray(vectors))
        scale, weight = rag.query_scale(model, encoder), rag.word_weight(model, params)
        return lambda: search(
            hybrid_queries(np.asarray(vectors) * np.float32(scale), texts, weight))

    return find


class RagSource(BatchSource):
    """The batch of step t, its passages retrieved at step t - staleness.

    With staleness 0 the passages of every batch are retrieved with the parameters that train on
    it, and the device waits for the search. With staleness s, `begin` embeds the questions of
    step t + s before step t is dispatched, and `finish` searches for them while the device is
    busy. Document scores are recomputed in the step either way: only the set of candidates is
    stale, never a score or a gradient.

    Args:
      batcher: assembles batches.
      index: where passages are retrieved; None = closed book.
      find: begins a search of it, as `finder` returns it.
      batch_size, seed: of the batch order.
      staleness: s.
      mesh: where batches go.
    """

    def __init__(self, batcher: RagBatcher, index: Searchable | None, find: Find, batch_size: int,
                 seed: int, staleness: int, mesh: Mesh):
        self.lookahead = staleness if index is not None else 0
        self._batcher, self._index, self._find = batcher, index, find
        self._batch_size, self._seed, self._mesh = batch_size, seed, mesh
        self._begun: dict[int, Callable[[], np.ndarray]] = {}

    def _rows(self, step: int) -> np.ndarray:
        return order.batch_indices(len(self._batcher.questions), self._batch_size, self._seed, step)

    def begin(self, step: int, params: Any) -> None:
        if self._index is not None:
            self._begun[step] = self._find(params, self._rows(step))

    def finish(self, step: int) -> jax.Array:
        retrieved = self._begun.pop(step)() if self._index is not None else None
        rng = order.generator(self._seed, 4, step)
        rows = self._rows(step)
        own = parallel.own_rows(len(rows), self._mesh)
        return parallel.put_rows(self._batcher.batch(rows, retrieved, self._index, rng, own=own),
                                 self._mesh)

    def pending(self) -> dict:
        """{step: retrieved rows} and the index that they are rows of; finishes the searches that
        were begun."""
        retrieved = {step: search() for step, search in self._begun.items()}
        self._take(retrieved)
        rows = {str(step): ids.tolist() for step, ids in retrieved.items()}
        return {**rows, _INDEX: self._version()} if rows else {}

    def restore(self, pending: dict) -> None:
        """As `BatchSource.restore`; rows of another version of the index are left out."""
        retrieved = {int(step): np.array(ids, np.int32)
                     for step, ids in pending.items() if step != _INDEX}
        if retrieved and not self._are_own(retrieved, pending.get(_INDEX)):
            hosts.say(f"{self._index.path}: has changed since the checkpoint was saved, so the "
                      f"passages of steps {', '.join(map(str, retrieved))} are retrieved again")
            retrieved = {}
        self._take(retrieved)

    def _take(self, retrieved: dict[int, np.ndarray]) -> None:
        self._begun = {step: lambda ids=ids: ids for step, ids in retrieved.items()}

    def _version(self) -> str:
        """Names the version of the index: a digest of those of its files."""
        return digest_of(self._index.manifest["files"])

    def _are_own(self, retrieved: dict[int, np.ndarray], version: str | None) -> bool:
        """Whether rows are of this index. version: of theirs; None = as an earlier version of this
        package left them, which did not say it."""
        if version is not None:
            return version == self._version()
        return all((ids < len(self._index.passages)).all() for ids in retrieved.values())
