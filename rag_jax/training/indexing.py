"""Builds and edits the indexes of a run: of embeddings by its document encoder, or of words."""

import contextlib
import dataclasses
import errno
import functools
import itertools
import pathlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from rag_jax import hosts, parallel
from rag_jax.config import Config, ConfigError
from rag_jax.data.batches import ENCODER_TABLE, PASSAGE_TABLE
from rag_jax.data.corpora import read_corpus
from rag_jax.data.prepare import chunked, write_passages
from rag_jax.data.prepared import Prepared, has_encoder_tokens_of, has_tokens_of
from rag_jax.data.question_files import Example
from rag_jax.models.rag import RagModel
from rag_jax.models.stack import unstack_layers
from rag_jax.retrieval.bm25 import Bm25Index, Bm25Settings, build_bm25
from rag_jax.retrieval.build import RecallSettings, build_index
from rag_jax.retrieval.editing import edit_index, edit_words
from rag_jax.retrieval.exact import RECALL_QUERIES
from rag_jax.retrieval.hybrid import WORDS, HybridIndex, matching_rows
from rag_jax.retrieval.index import PassageIndex
from rag_jax.retrieval.joined import copy_rows, kept_rows
from rag_jax.retrieval.kept import KeptEmbeddings
from rag_jax.retrieval.manifest import IndexFolder, open_folder, read_manifest
from rag_jax.retrieval.passages import PassageStore
from rag_jax.retrieval.protocol import Hosts, Passage, RetrievalError
from rag_jax.retrieval.publish import staging
from rag_jax.retrieval.scann import ScannSettings
from rag_jax.retrieval.shards import PassageEmbedder
from rag_jax.retrieval.versions import current
from rag_jax.searching import jit_embed
from rag_jax.training import on_device
from rag_jax.training.answer_settings import make_answerer
from rag_jax.training.job import Index, Job, fingerprint
from rag_jax.training.pretrained import restore_run
from rag_jax.types import Params

WORD_INDEXES = "indexes_bm25"  # folder of a workdir
CPU_ROWS, CPU_STEP = 8, 16  # passages per batch and steps of their lengths on a CPU, at most


def all_hosts() -> Hosts:
    """The processes of this job, which build and open an index together."""
    return Hosts(hosts.index(), hosts.count(), hosts.each)


def rounded(encoder: Params, dtype: str) -> Params:
    """An encoder with its matrices in the dtype of their products."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf.astype(dtype) if path[-1].key == "kernel" else leaf, encoder)


def embed_passages(model: RagModel, encoder: Params, mesh: Mesh
                   ) -> Callable[[np.ndarray, np.ndarray], Any]:
    """The jitted document encoder for the index builder, on this process's devices.

    Its matrices are rounded to the dtype of their products once, not for every batch, which saves a
    tenth of the time in bfloat16 on a CPU.
    """
    own = parallel.own_mesh(mesh)
    if own is not mesh:
        encoder = jax.device_put(parallel.fetch(encoder), parallel.replicated(own))
    embed = functools.partial(jit_embed(model), rounded(encoder, model.retriever.dtype))
    return lambda ids, mask: embed(*parallel.put_batch((ids, mask), own))


def embed_rows(config: Config, mesh: Mesh) -> int:
    """Passages that a host embeds at a time; on CPUs small batches are as fast as large ones."""
    rows = config.retrieval.embed_batch_size
    return min(rows, CPU_ROWS) if _on_cpu(mesh) else rows


def batch_shapes(config: Config, mesh: Mesh) -> tuple[int, list[int]]:
    """Passages per batch, and the lengths that batches are padded to. On a CPU, more lengths cost
    less than padding."""
    longest, step = config.data.max_passage_length, config.data.length_step
    if _on_cpu(mesh):
        step = min(step, CPU_STEP)
    rows = parallel.filled_up(embed_rows(config, mesh), parallel.own_mesh(mesh))
    return rows, [*range(step, longest, step), longest]


def _on_cpu(mesh: Mesh) -> bool:
    return mesh.devices.flat[0].platform == "cpu"


def passage_embedder(job: Job, model: RagModel, encoder: Params, name: str) -> PassageEmbedder:
    """The embedder of passages for an index.

    Args:
      job: sets lengths, batches and devices.
      model: the architecture; its layers are looped or scanned as in the parameters.
      encoder: parameters of the document encoder.
      name: its fingerprint.
    """
    batch_size, lengths = batch_shapes(job.config, job.mesh)
    return PassageEmbedder(
        embed_passages(model, encoder, job.mesh),
        token_table=ENCODER_TABLE,
        encoder_fingerprint=name,
        max_length=job.config.data.max_passage_length,
        batch_size=batch_size,
        length_buckets=lengths,
        pad_id=job.prepared.retriever_tokenizer.pad)


def index_store(job: Job, params: Any, store: PassageStore, out: pathlib.Path,
                recall_queries: np.ndarray | None = None, overwrite: bool = False,
                kept: KeptEmbeddings | None = None) -> PassageIndex:
    """Embeds a passage store with the document encoder and publishes its index at `out`.

    Embeddings that `kept` has are copied from it.

    Returns:
      The index, opened where `config.retrieval.where` says.
    """
    retrieval = job.config.retrieval
    given = {"num_leaves": retrieval.num_leaves, "leaves_to_search": retrieval.leaves_to_search,
             "pre_reorder_num_neighbors": retrieval.reorder}
    settings = ScannSettings(brute_force_below=retrieval.brute_force_below,
                             parts=retrieval.scann_parts,
                             **{name: v for name, v in given.items() if v is not None})
    kind = "exact" if (retrieval.where, retrieval.index) == ("device", "auto") else retrieval.index
    encoder = params["document_encoder"]
    embedder = passage_embedder(job, job.model, encoder, fingerprint(job.model, encoder))
    if kept is not None:
        embedder = kept.around(embedder, store)
    index = build_index(store, embedder, out, kind=kind, scann=settings,
                        recall=RecallSettings(recall_queries, seed=job.config.seed,
                                              target=retrieval.scann_recall),
                        overwrite=overwrite, hosts=all_hosts())
    placed = on_device.open_index(job.config, job.prepared.format, job.mesh, index)
    if placed is not index:
        on_device.measure(placed, index, recall_queries, job.config)
    return placed


def index_stores(job: Job, params: Any, folder: pathlib.Path, overwrite: Collection[str] = (),
                 queries: Sequence[Example] | None = None) -> dict[str, PassageIndex]:
    """An index of every passage store, in FOLDER; recall is measured with `queries`.

    Args:
      job: its passage stores are indexed.
      params: of both encoders, as they are trained, with scanned layers if they have them.
      folder: where the indexes are published.
      overwrite: the names of those that are replaced where they are others.
      queries: None = those of `recall_questions`, or the passages' vectors without a dev split.
    """
    sample = None
    if queries is None and "dev" in job.prepared.splits:
        queries = recall_questions(job)
    if queries:
        sample = make_answerer(job, None).embed_questions(
            unstack_layers(params), job.tokenize(queries))
    return {name: index_store(job, params, store, folder / name, sample, name in overwrite)
            for name, store in job.prepared.stores.items()}


def recall_questions(job: Job) -> list[Example]:
    """The dev questions that recall is measured with: a sample where there are many, as exact
    search reads the whole index for them."""
    dev = job.prepared.splits["dev"]
    drawn = np.random.default_rng(job.config.seed).permutation(len(dev))[:RECALL_QUERIES]
    if len(drawn) < len(dev):
        hosts.say(f"recall is measured with {len(drawn)} of the {len(dev)} dev questions, drawn by "
                  f"config.seed={job.config.seed}")
    return [dev[row] for row in sorted(drawn)]


def check_tokens(index: Index | IndexFolder, prepared: Prepared, remedy: str = "build an index for "
                 "it (in a workdir of rag_jax.ingest, remove its index and run that again), or, if "
                 "it was made again since this model was opened, open the model again") -> None:
    """Raises ConfigError where an index has no tokens for a generator, or those of another one."""
    if PASSAGE_TABLE not in index.passages.token_tables:
        raise ConfigError(f"{index.path}: was made without a generator, and its passages have no "
                          f"tokens that one reads; {remedy}")
    if not has_tokens_of(index.passages, prepared.format):
        raise ConfigError(f"{index.path}: its passages are not in the tokens of this generator, as "
                          f"this version of rag_jax writes them; {remedy}")


def check_encoder_tokens(index: Index | IndexFolder, job: Job, remedy: str = "leave the field as "
                         "it was when the index was built, or build it again") -> None:
    """Raises a RetrievalError where the passages of an index were embedded from other tokens than
    the job's retriever reads."""
    if ENCODER_TABLE in index.passages.token_tables and not has_encoder_tokens_of(
            index.passages, job.prepared.retriever_tokenizer, job.config.model.retriever):
        raise RetrievalError(
            f"{index.path}: its passages were embedded from other tokens than config.data."
            f"retriever_tokenizer={job.config.data.retriever_tokenizer or '(none)'} gives; "
            f"{remedy}")


def edit_passages(job: Job, out: pathlib.Path, embedder: PassageEmbedder | None,
                  add: Iterable[Passage], delete: Sequence[str], recall: RecallSettings,
                  compact: bool | None, answers: bool) -> Index:
    """Adds passages to an index and deletes others from it; opens the version that it publishes.

    Args:
      job: makes the tokens of passages; so many as a question reads have to be left.
      out: folder of the index.
      embedder: of the encoder that built it; None = an index of words.
      add, delete, recall, compact: see `editing.edit_index`.
      answers: a generator reads its passages.

    Raises:
      ConfigError: the index has been made again, for another generator, or without one.
      RetrievalError: it has been made again, for another tokenizer of the retriever.
    """
    open_folder(current(out))  # raises where there is no index
    prepared, least = job.prepared, job.config.eval.k or 1

    def edited() -> Index:
        if hosts.leads():
            with staging(out) as folder:
                before, remedy = open_folder(current(out)), (
                    "it was made again since this model was opened: open the model again")
                tables = before.passages.token_tables
                if answers or PASSAGE_TABLE in tables:
                    check_tokens(before, prepared, remedy)
                if embedder is not None:
                    check_encoder_tokens(before, job, remedy)
                passages, store = iter(add), None
                first = list(itertools.islice(passages, 1))
                if first:
                    store = write_passages(
                        folder / "added", itertools.chain(first, passages), job.config,
                        prepared.retriever_tokenizer if ENCODER_TABLE in tables else None,
                        prepared.format if PASSAGE_TABLE in tables else None)
                if embedder is None:
                    edit_words(out, store, delete, least)
                else:
                    edit_index(out, embedder, store, delete, recall, compact, least)
        return open_host_index(out, embedder is None)

    return hosts.first(edited)


def open_host_index(folder: pathlib.Path, words: bool) -> PassageIndex | Bm25Index:
    """Opens an index of embeddings, or of words, for all processes."""
    return Bm25Index.open(folder) if words else PassageIndex.open(folder, hosts=all_hosts())


def index_store_words(job: Job, store: PassageStore, out: pathlib.Path, overwrite: bool = False
                      ) -> Bm25Index:
    """Publishes the BM25 index of a passage store at `out`."""
    settings = Bm25Settings.of_config(job.config.retrieval)
    return hosts.first(lambda: build_bm25(store, out, overwrite, settings))


def index_words(job: Job) -> dict[str, Bm25Index]:
    """A BM25 index of every passage store, in WORKDIR/indexes_bm25."""
    return {name: index_store_words(job, store, job.workdir / WORD_INDEXES / name)
            for name, store in job.prepared.stores.items()}


def with_words(job: Job, index: Index) -> Index:
    """The index as the model retrieves from it: joined with an index of its words where the model
    retrieves by embeddings and words.

    The index of words is in its folder WORDS. It is built where it is missing, damaged, or of other
    passages or settings; a process that opens it while another one builds it waits.
    """
    fusion = job.model.fusion
    if fusion is None:
        return index
    settings = Bm25Settings.of_config(job.config.retrieval)
    folder = pathlib.Path(index.path) / WORDS

    def counted() -> tuple[Bm25Index, np.ndarray | None]:
        """The index of words, and its rows by those of `index`; None = they are not yet matched."""
        if folder.is_dir():
            with contextlib.suppress(RetrievalError):  # it is damaged, or of other passages
                words = Bm25Index.open(folder)
                if words.settings.record == settings.record:
                    return words, matching_rows(index, words)
        try:
            with staging(folder, waits=True) as made:
                store = index.passages
                if index.valid is not None:
                    store = copy_rows(made / "store", kept_rows(store, index.valid))
                return build_bm25(store, folder, overwrite=True, settings=settings), None
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            raise RetrievalError(
                f"{folder}: the words of the passages are counted once, by the first command that "
                f"retrieves by them, and cannot be written here ({error}); run it once as somebody "
                "who may write there, or copy the index") from error

    words, rows = hosts.first(counted)
    return HybridIndex(index, words, fusion, rows)


def describe(index: Index) -> str:
    """Describes an index in a line: its size, kind, edits and recall."""
    words, recall = f"{index.size} passages, {index.manifest['kind']}", index.manifest.get("recall")
    if index.manifest["kind"] == "scann":
        scann = ScannSettings(**index.manifest["scann"])
        leaves, searched = scann.leaves(index.manifest["size"] // scann.parts)
        words += f", {searched} of {leaves} leaves searched"
    edited = index.manifest.get("edited", {"added": 0, "deleted": 0})
    if edited["added"] or edited["deleted"]:
        words += f", {edited['added']} added and {edited['deleted']} deleted since it was built"
    if recall is None:
        return words
    missed = recall["recall"] < recall.get("target", 0)
    asked = f" instead of the {recall['target']} asked for" if missed else ""
    return (f"{words}, recall@{recall['k']} against exact search {recall['recall']:.4f}{asked} "
            f"({recall['queries']} queries)")


def indexes_of(job: Job, run: str, indexes: Mapping[str, PassageIndex]) -> Mapping[str, Index]:
    """The indexes that a run can be asked with, by name: the given ones; those of BM25; or, where
    the run trained the document encoder, those in RUN/indexes.

    The last are embedded with the run's best checkpoint, and built where they are missing.

    job: with the configuration of the run.
    """
    if job.model.lexical:
        return index_words(job)
    if job.config.train.document_encoder == "frozen":
        return {name: with_words(job, index) for name, index in indexes.items()}
    params, _ = restore_run(job.workdir / run, job.model, job.mesh)
    folder, name = job.workdir / run / "indexes", fingerprint(job.model, params["document_encoder"])

    def same(index: pathlib.Path) -> bool:
        with contextlib.suppress(RetrievalError):
            return read_manifest(current(index))["encoder_fingerprint"] == name
        return False

    # An edited index is kept; those of an earlier best checkpoint are replaced.
    other = hosts.exchange([store for store in job.prepared.stores if not same(folder / store)])[0]
    return index_stores(job, params, folder, overwrite=other)


def job_of_file(job: Job, name: str, passages: str, words: int, folder: pathlib.Path) -> Job:
    """The job with one passage store, NAME: the passages of a file.

    Args:
      job: everything else is taken from it.
      passages: whatever `read_corpus` reads.
      words: the most that a passage may have; longer ones are split. 0 = none are split.
      folder: of their store, which is written where it is missing.
    """
    prepared = job.prepared

    def store() -> PassageStore:
        if not folder.exists():
            write_passages(folder, chunked(read_corpus(passages), words), job.config,
                            prepared.retriever_tokenizer, prepared.format)
        return PassageStore.open(folder)

    stores = {name: hosts.first(store)}
    return dataclasses.replace(job, prepared=dataclasses.replace(prepared, stores=stores))


def index_of_file(job: Job, run: str, warm: Callable[[], Params], name: str, passages: str,
                  words: int) -> Index:
    """A further index of a run, of the passages of a file.

    Their store, WORKDIR/data/memories/NAME, and their index among the run's indexes are made where
    they are missing.

    Args:
      job, run: of the run that will be asked with it.
      warm: reads the encoders as they were when the run began.
      name: of these passages alone: a store or index of that name is taken for theirs.
      passages, words: as in `job_of_file`.
    """
    job = job_of_file(job, name, passages, words, job.workdir / "data" / "memories" / name)
    if job.model.lexical or job.config.train.document_encoder != "frozen":
        return indexes_of(job, run, {})[name]
    return with_words(job, index_stores(job, warm(), job.workdir / "indexes")[name])
