"""Retrieval on the devices: encode, search, gather and compose inside the jitted step.

On CPUs they are a program of their own, so that the step computes no padding (`packing`). Where the
document encoder trains, it embeds the retrieved passages again inside the step, and the embeddings
of the whole index on a schedule (`Refresher`).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from rag_jax import hosts, parallel
from rag_jax.config import Config
from rag_jax.data import order, packed
from rag_jax.data.batches import ENCODER_TABLE, PASSAGE_TABLE, RagBatcher, assemble
from rag_jax.data.compose import compose
from rag_jax.data.packed import Groups
from rag_jax.data.prepared import Prepared
from rag_jax.data.questions import QuestionTokens
from rag_jax.data.text import GeneratorFormat
from rag_jax.models import rag
from rag_jax.retrieval import device_search
from rag_jax.retrieval.device import DeviceIndex, TokenSpec
from rag_jax.retrieval.device_search import DeviceSettings, DeviceTables
from rag_jax.retrieval.exact import RecallSample
from rag_jax.retrieval.index import PassageIndex
from rag_jax.training.job import groups_of
from rag_jax.training.loop import BatchSource
from rag_jax.training.step import Completion
from rag_jax.types import Batch, Params, QuestionBatch


def open_index(config: Config, format: GeneratorFormat, mesh: Mesh, index: PassageIndex
               ) -> PassageIndex | DeviceIndex:
    """The index, loaded onto the devices where `config.retrieval.where` says so; its recall there
    is not measured."""
    if config.retrieval.where == "host":
        return index
    settings, tables = layout(config, format)
    if PASSAGE_TABLE not in index.passages.token_tables:  # there is no generator to read them
        del tables[PASSAGE_TABLE]
    return DeviceIndex(index, mesh, settings, tables)


def updated(placed: DeviceIndex, index: PassageIndex, queries: np.ndarray | None, config: Config,
            format: GeneratorFormat) -> DeviceIndex:
    """A later version of an index directory on the devices, with its recall measured.

    Where the tables have too few rows for it, it gets new ones, for which programs are compiled
    again.
    """
    if len(index.passages) <= placed.capacity:
        placed.update(index)
    else:
        placed = open_index(config, format, placed.mesh, index)
    measure(placed, index, queries, config)
    return placed


def measure(placed: DeviceIndex, index: PassageIndex, queries: np.ndarray | None, config: Config
            ) -> None:
    """Measures the recall of an index on the devices, and writes it into the manifest there.

    queries: float32[Q, E]; None = passages with noise, as `RecallSample` has them.
    """
    recall = RecallSample(index.table, queries, index.manifest["recall"]["k"], config.seed,
                          index.valid).measure(placed)
    placed.manifest = {**placed.manifest, "recall": recall}


def layout(config: Config, format: GeneratorFormat) -> tuple[DeviceSettings, dict[str, TokenSpec]]:
    """The settings of an index on the devices, and the token tables that it holds."""
    retrieval = config.retrieval
    settings = DeviceSettings(retrieval.device_dtype, retrieval.capacity, retrieval.recall_target)
    rows = format.tokenizer.vocab_size
    tables = {PASSAGE_TABLE: TokenSpec(
        format.room, np.uint16 if rows <= 2**16 else np.int32, rows)}
    if config.train.document_encoder == "refresh":
        tables[ENCODER_TABLE] = TokenSpec(config.data.max_passage_length, np.int32)
    return settings, tables


Given = tuple[QuestionBatch, DeviceTables, jax.Array]  # questions, index, step


class Refresher:
    """Embeds the passages of a DeviceIndex again, with a document encoder that trains.

    Args:
      model: the architecture.
      index: with the token table of the document encoder.
      pad_id: of the document encoder's tokens.
      batch_size: passages at a time.
    """

    def __init__(self, model: rag.RagModel, index: DeviceIndex, pad_id: int, batch_size: int):
        self.index, self.next = index, 0
        self._batch_size = parallel.filled_up(batch_size, index.mesh)

        def run(params: Params, tokens: Any, ids: jax.Array, step: jax.Array) -> DeviceTables:
            rows = device_search.lookup(tokens, jnp.maximum(ids, 0), index.mesh)
            inputs = jax.lax.with_sharding_constraint(
                encoder_inputs(*rows, pad_id), parallel.batch_sharding(index.mesh))
            columns = device_search.encoded(
                rag.embed(model, params, *inputs), index.settings.dtype, jnp)
            return DeviceTables(*columns, None, jnp.broadcast_to(step, ids.shape), {})

        self._run = jax.jit(run, out_shardings=parallel.replicated(index.mesh))

    def refresh(self, params: Any, step: int, passages: int = 0) -> None:
        """Embeds the next `passages` rows in turn, or all (0), as of `step`."""
        size = len(self.index.passages)
        first, count = (self.next % size, min(passages, size)) if passages else (0, size)
        self.next = (first + count) % size
        for begin in range(0, count, self._batch_size):
            places = begin + np.arange(self._batch_size)
            ids = np.where(places < count, (first + places) % size, -1).astype(np.int32)
            values = self._run(params["document_encoder"], self.index.tables.tokens[ENCODER_TABLE],
                               ids, np.int32(step))
            self.index.write(ids, values)


def encoder_inputs(rows: jax.Array, lengths: jax.Array, pad_id: int
                   ) -> tuple[jax.Array, jax.Array]:
    """Token ids int32[..., L] and mask of table rows [..., L] with lengths int32[...]."""
    mask = jax.lax.broadcasted_iota(jnp.int32, rows.shape, rows.ndim - 1) < lengths[..., None]
    return jnp.where(mask, rows, pad_id), mask


class QuestionSource(BatchSource):
    """Batches of `Given`, in the order, and with the answers, of `RagSource`.

    Args:
      questions: the tokenized questions.
      index: where passages are retrieved.
      batch_size, seed: of the batch order.
      refresher: of the document encoder; None = frozen.
      every, passages: steps between refreshes, and passages in each.
      whole: step -> whether all passages are embedded before it. They always are before the first
        step of a process, so that a resumed run continues as it would have without interruption;
        one that a signal stopped between two regular checkpoints embeds them earlier than that.

    Attributes:
      length_step, groups: as for `QuestionTokens.batch`; the passages have one length.
    """

    length_step: int | None = None
    groups: Groups | None = None

    def __init__(self, questions: QuestionTokens, index: DeviceIndex, batch_size: int, seed: int,
                 refresher: Refresher | None = None, every: int = 1, passages: int = 0,
                 whole: Callable[[int], bool] = lambda step: False):
        self._questions, self._index = questions, index
        self._batch_size, self._seed = batch_size, seed
        self._refresher, self._every, self._passages = refresher, every, passages
        self._whole, self._fresh = whole, False

    def begin(self, step: int, params: Any) -> None:
        if self._refresher is None:
            return
        if self._whole(step) or not self._fresh:
            self._refresher.refresh(params, step)
            self._refresher.next, self._fresh = 0, True
        elif step % self._every == 0:
            self._refresher.refresh(params, step, self._passages)

    def finish(self, step: int) -> Given:
        rows = order.batch_indices(len(self._questions), self._batch_size, self._seed, step)
        batch = self._questions.batch(rows, order.generator(self._seed, 4, step),
                                      length_step=self.length_step, groups=self.groups)
        mesh = self._index.mesh
        return (parallel.put_batch(batch, mesh), self._index.tables,
                parallel.put_number(step, parallel.replicated(mesh)))

    def restore(self, pending: dict) -> None:
        self._fresh = False


def training(model: rag.RagModel, config: Config, prepared: Prepared, questions: QuestionTokens,
             index: DeviceIndex) -> tuple[QuestionSource, Completion, Refresher | None]:
    """The batches, how the step completes them, and the refresher; None = a frozen encoder."""
    train, refresher, pad_id = config.train, None, None
    if train.document_encoder == "refresh":
        pad_id = prepared.retriever_tokenizer.pad
        refresher = Refresher(model, index, pad_id, config.retrieval.embed_batch_size)

    def whole(step: int) -> bool:  # after a checkpoint or an evaluation
        return step % train.save_every == 0 or step % train.eval_every == 0

    source = QuestionSource(questions, index, train.batch_size, config.seed, refresher,
                            train.refresh_every, train.refresh_passages, whole)
    source.length_step = config.data.length_step
    source.groups = groups_of(model, index.mesh, train.optimizer.accumulate)
    complete = completion(model, prepared.format, config.retrieval.k, index.mesh, index.settings,
                          pad_id)
    # Accelerators would wait for the host in every step, and processes for each other.
    near = index.mesh.devices.flat[0].platform == "cpu" and hosts.count() == 1
    if source.groups is not None and near:
        batcher = RagBatcher(questions, source.length_step, model.embedding_width,
                             model.null_document != "none", source.groups)
        complete = complete._replace(
            packed=packing(batcher, index, train.batch_size, config.retrieval.k))
    return source, complete, refresher


def packing(batcher: RagBatcher, index: DeviceIndex, batch_size: int, k: int
            ) -> Callable[[Batch], Batch]:
    """`Completion.packed`: says where the tokens of the inputs stand in the room for usual inputs.

    The usual length is estimated from a sample of the questions and passages. The room is a
    sixteenth larger, as retrieved passages are longer than others. A batch that needs more room is
    not packed.

    batcher: makes the same inputs on the host, in groups that are packed.
    """
    questions = packed.sample(len(batcher.questions))
    passages = np.resize(packed.sample(len(index.passages)), (len(questions), k))
    usual = batcher.lengths(questions, passages, index).sum(axis=1) * 17 / 16
    room = packed.room(usual, batch_size // batcher.groups.count)

    def pack(batch: Batch) -> Batch:
        mask = np.asarray(batch.source_mask)
        places = packed.places(mask.reshape(len(mask), -1), batcher.groups, room)
        if places is None:
            return batch
        return batch._replace(source_places=parallel.put_batch(places, index.mesh))

    return pack


def completion(model: rag.RagModel, format: GeneratorFormat, k: int, mesh: Mesh,
               settings: DeviceSettings, encoder_pad_id: int | None = None) -> Completion:
    """(params, Given) -> the `Batch` with the passages that these parameters retrieve.

    With `encoder_pad_id`, the batch also holds the document encoder's tokens, padded with it, so
    that this encoder trains.
    """

    def complete(params: Params, given: Given) -> Batch:
        questions, device_tables, number = given
        queries = rag.embed_queries(model, params["query_encoder"], questions.question_ids,
                                    questions.question_mask)
        ids = device_search.search(device_tables, queries, k, mesh, settings).ids
        doc_mask = ids >= 0
        tables = device_tables._replace(codes=None, scales=None, valid=None)
        passages = device_search.lookup(tables, jnp.where(doc_mask, ids, 0), mesh)
        rows, lengths = passages.tokens[PASSAGE_TABLE]
        if model.null_document != "none":  # an empty passage
            rows, lengths = (jnp.pad(x, ((0, 0), (0, 1)) + ((0, 0),) * (x.ndim - 2))
                             for x in (rows, lengths))
        source_ids, source_mask = compose(
            format, rows, lengths, questions.suffix_ids, questions.suffix_mask)
        trained = {}
        if encoder_pad_id is not None:
            rows = encoder_inputs(*passages.tokens[ENCODER_TABLE], encoder_pad_id)
            trained = {"passage_ids": rows[0], "passage_mask": rows[1],
                       "passage_age": (number - passages.steps) * doc_mask.astype(jnp.float32)}
        batch = assemble(questions, source_ids, source_mask, doc_mask,
                         passages.embeddings * doc_mask[..., None], doc_ids=ids, **trained)
        return jax.lax.with_sharding_constraint(batch, parallel.batch_sharding(mesh))

    shardings = (parallel.batch_sharding(mesh), device_search.row_sharding(mesh),
                 parallel.replicated(mesh))
    return Completion(complete, shardings)

