"""Retrieval on the devices: encode, search, gather and compose inside the jitted step."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from rag_jax import parallel
from rag_jax.config import Config
from rag_jax.data import order
from rag_jax.data.batches import PASSAGE_TABLE, QuestionTokens
from rag_jax.data.compose import compose
from rag_jax.data.text import GeneratorFormat
from rag_jax.models import rag
from rag_jax.retrieval import device_search
from rag_jax.retrieval.device import DeviceIndex, TokenSpec
from rag_jax.retrieval.device_search import DeviceSettings, Memory
from rag_jax.retrieval.exact import measure_recall
from rag_jax.retrieval.index import PassageIndex
from rag_jax.training.loop import PureSource
from rag_jax.training.step import Completion
from rag_jax.types import Batch, Params, QuestionBatch


def open_index(config: Config, format: GeneratorFormat, mesh: Mesh, index: PassageIndex,
               recall_queries: np.ndarray | None = None) -> PassageIndex | DeviceIndex:
    """The index where `config.retrieval.where` wants it.

    recall_queries: float32[Q, E]; an index on the devices is measured with them, and says so in
      its manifest in place of what the folder says.
    """
    retrieval = config.retrieval
    if retrieval.where == "host":
        return index
    settings = DeviceSettings(retrieval.device_dtype, retrieval.capacity, retrieval.recall_target)
    small = format.tokenizer.vocab_size <= 2**16
    spec = TokenSpec(format.max_length - 2, np.uint16 if small else np.int32)
    placed = DeviceIndex(index, mesh, settings, {PASSAGE_TABLE: spec})
    if recall_queries is not None:
        k = index.manifest["recall"]["k"]
        recall = measure_recall(placed, index.table, recall_queries, k, config.seed)
        kind = f"device ({retrieval.device_dtype})"
        placed.manifest = {**index.manifest, "kind": kind, "recall": recall}
    return placed


def question_source(questions: QuestionTokens, index: DeviceIndex, batch_size: int, seed: int,
                    mesh: Mesh) -> PureSource:
    """Batches (QuestionBatch, Memory) in the order, and with the answers, of `RagSource`."""

    def make(step: int) -> tuple[QuestionBatch, Memory]:
        rows = order.batch_indices(len(questions), batch_size, seed, step)
        batch = questions.batch(rows, order.generator(seed, 4, step))
        return parallel.put_batch(batch, mesh), index.memory

    return PureSource(make)


def completion(model: rag.RagModel, format: GeneratorFormat, k: int, index: DeviceIndex
               ) -> Completion:
    """(params, (questions, memory)) -> the `Batch` with passages found with these parameters.

    Only shapes and settings of `index` are used, not what it holds.
    """
    mesh, settings = index.mesh, index.settings

    def complete(params: Params, given: tuple[QuestionBatch, Memory]) -> Batch:
        questions, memory = given
        queries = rag.embed(model, params["query_encoder"], questions.question_ids,
                            questions.question_mask)
        ids = device_search.search(memory, queries, k, mesh, settings).ids
        doc_mask = ids >= 0
        tables = memory.embeddings, memory.tokens[PASSAGE_TABLE]
        embeddings, passages = device_search.lookup(tables, jnp.where(doc_mask, ids, 0), mesh)
        source_ids, source_mask = compose(
            format, *passages, questions.suffix_ids, questions.suffix_mask)
        batch = Batch(
            question_ids=questions.question_ids,
            question_mask=questions.question_mask,
            source_ids=source_ids,
            source_mask=source_mask,
            doc_embeddings=embeddings * doc_mask[..., None],
            doc_mask=doc_mask,
            target_ids=questions.target_ids,
            target_mask=questions.target_mask,
            weight=questions.weight,
        )
        return jax.lax.with_sharding_constraint(batch, parallel.batch_sharding(mesh))

    return Completion(complete, (parallel.batch_sharding(mesh), device_search.row_sharding(mesh)))

