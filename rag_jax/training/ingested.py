"""What `rag_jax.ingest` and its workdirs need of encoders and generators, as their sources have
them; either may be missing."""

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rag_jax import overrides, parallel
from rag_jax.citation import Citation
from rag_jax.config import Config, ConfigError
from rag_jax.data.batches import PASSAGE_TABLE
from rag_jax.data.prepare import write_passages
from rag_jax.data.prepared import Prepared, generator_format
from rag_jax.data.text import Tokenizer, encoder_input, train_bart_tokenizer
from rag_jax.documents.chunks import Window
from rag_jax.documents.workdir import INDEX
from rag_jax.models.stack import unstack_layers
from rag_jax.retrieval.build import RecallSettings
from rag_jax.retrieval.editing import edit_index
from rag_jax.retrieval.index import PassageIndex
from rag_jax.retrieval.kept import KeptEmbeddings
from rag_jax.retrieval.passages import PassageStore
from rag_jax.retrieval.protocol import Passage, RetrievalError
from rag_jax.rules import changed
from rag_jax.training import indexing, pretrained, workdir
from rag_jax.training.job import Index, Job, fingerprint
from rag_jax.training.opened import Rag, check_vectors
from rag_jax.training.run_index import check_k, check_tokens, placed
from rag_jax.types import Params


def towers(config: Config) -> list[str]:
    """Those that the configuration names, and its run reads."""
    unread = pretrained.ENCODERS if overrides.lexical(config) else ()
    return [tower for tower in config.model.sources if tower not in unread]


def job_as_they_are(config: Config, named: Config, path: pathlib.Path) -> Job:
    """What reads with towers as their sources have them: no passages, no questions.

    Where a tower is not named, its tokenizer is one of bytes, which nobody reads with.

    Args:
      config: with their architecture.
      named: the same with their sources.
      path: the workdir, or what stands in its place.

    Raises:
      ConfigError: a source has no tokenizer.
    """
    tokenizers, known = [], towers(named)
    for tower, section in (("query_encoder", "retriever"), ("generator", "generator")):
        folder = getattr(config.data, f"{section}_tokenizer") or (
            pretrained.tokenizer_folder(named, tower) if tower in known else None)
        rows = getattr(config.model, section).vocab_size
        tokenizers.append(
            Tokenizer.load(folder, rows) if folder else train_bart_tokenizer((), 300))
    format = generator_format(config, tokenizers[1])
    prepared = Prepared(tokenizers[0], format.tokenizer, format, {}, {})
    return Job(config, path, prepared, parallel.make_mesh(config.mesh))


def job_of(config: Config, path: pathlib.Path) -> Job:
    """`job_as_they_are` of a workdir, for a configuration of one run, as it was asked for.

    Raises:
      ConfigError, HubError: a source that is none, has no tokenizer, or is no retriever.
    """
    if "document_encoder" in towers(config):
        pretrained.check_retriever(config)
    return job_as_they_are(pretrained.resolve(config), config, path)


def as_they_are(job: Job, named: Config, names: Sequence[str], index: Index,
                said: Mapping[str, Any]) -> Rag:
    """Opens towers as their sources have them.

    Args:
      job, named: as for `job_as_they_are`.
      names: of the towers.
      index: what is read, on the host.
      said: as of `Rag`.
    """
    if "generator" in names:
        check_tokens(index, job.prepared)
    params = pretrained.load(dataclasses.replace(job, config=named), names, answers=True)
    rag = Rag(job, job.config.runs[0], unstack_layers(params), index, said)
    if "document_encoder" in names:
        check_vectors(rag)
    return dataclasses.replace(rag, index=placed(job, index))


class Maker:
    """Writes and indexes passages for the towers that a configuration names.

    Attributes:
      window: what the encoder can read; None = there is none.
      embedded: passages that were embedded, once there is an index.
    """

    def __init__(self, config: Config, path: pathlib.Path):
        self._config = _untrained(config, config.runs[0])
        self._job = job_of(self._config, path)
        self._towers = towers(self._config)
        self.window = self._window() if "document_encoder" in self._towers else None
        self.embedded = 0

    def _window(self) -> Window:
        data, encoder = self._job.config.data, self._job.config.model.retriever
        source = self._config.model.sources["document_encoder"]
        known = pretrained.described(source).longest
        tokenizer = self._job.prepared.retriever_tokenizer

        def measure(titles: Sequence[str], texts: Sequence[str]) -> list[int]:
            rows = encoder_input(tokenizer, titles, [" ".join(text.split()) for text in texts],
                                 10**9, encoder=encoder)
            return [len(row) for row in rows]

        return Window(min(known or data.max_passage_length, data.max_passage_length), measure)

    def write(self, path: pathlib.Path, passages: Iterator[Passage],
              source: Callable[[str], Citation]) -> PassageStore:
        """A passage store with the tokens of each tower."""
        prepared = self._job.prepared
        return write_passages(
            path, passages, self._job.config,
            prepared.retriever_tokenizer if "document_encoder" in self._towers else None,
            prepared.format if "generator" in self._towers else None, source)

    def index(self, store: PassageStore, out: pathlib.Path) -> None:
        """Publishes the index of a store; embeddings that the one before has are taken from it."""
        if self._job.model.lexical:
            indexing.index_store_words(self._job, store, out, overwrite=True)
            return
        kept = None
        with contextlib.suppress(RetrievalError):
            kept = KeptEmbeddings(PassageIndex.open(out, verify=True))
        indexing.index_store(self._job, self._encoders(), store, out, overwrite=True, kept=kept)
        self.embedded = len(store) if kept is None else kept.embedded

    def edit(self, added: PassageStore | None, gone: Sequence[str], out: pathlib.Path) -> None:
        """Publishes the index without the passages of some ids, and with those of a store."""
        encoder = self._encoders()["document_encoder"]
        embedder = indexing.passage_embedder(
            self._job, self._job.model, encoder, fingerprint(self._job.model, encoder))
        if added is not None:  # of a file that has changed, most passages may be as they were
            kept = KeptEmbeddings(PassageIndex.open(out))
            embedder = kept.around(embedder, added)
            self.embedded = kept.embedded
        edit_index(out, embedder, added, gone, RecallSettings(seed=self._config.seed))

    def _encoders(self) -> Params:
        return pretrained.load(self._job, pretrained.ENCODERS)


def _untrained(config: Config, run: str) -> Config:
    """The configuration of a run whose checkpoints answer as they say: the steps that it may have
    are of a training that is yet to come."""
    return overrides.replace(overrides.for_run(config, run), {"train.steps": 0})


def _check_words(config: Config, made: Config, path: pathlib.Path) -> None:
    """Raises ConfigError for another way to count words, or an encoder, than a workdir whose
    passages are found by their words was made with: its index has the weights of words."""
    encoders = [f"model.{name}.pretrained" for name in workdir.ENCODERS]
    for name in overrides.differences(made, config):
        if name.startswith(("retrieval.bm25_", *encoders)):
            now, then = (overrides.shown(overrides.value(one, name)) for one in (config, made))
            raise ConfigError(f"config.{name}={now}: {path} was indexed with {then or '(none)'}, "
                              "and this would change nothing; run rag_jax.ingest with it")


def open_ingested(path: pathlib.Path, run: str | None, index: str | os.PathLike | None,
                  config: Config | Mapping[str, Any] | None) -> Rag:
    """Opens a workdir of `rag_jax.ingest`: what is named in it answers from its index.

    Arguments and errors as of `api.load`.
    """
    if not isinstance(config, Config):
        config = changed(workdir.read_run(path, run), config or {})
    run = workdir.run_of(path, config, run)
    config = _untrained(config, run)
    if overrides.lexical(config):
        _check_words(config, overrides.for_run(workdir.read(path), run), path)
    folder = path / INDEX if index is None else pathlib.Path(index)
    opened = indexing.open_host_index(folder, overrides.lexical(config))
    check_k(config, opened, folder)
    job, named = job_of(config, path), towers(config)
    if "generator" in named:
        if PASSAGE_TABLE not in opened.passages.token_tables:
            raise ConfigError(f"{folder}: was made without a generator; run rag_jax.ingest again "
                              "with the same config.model.generator.pretrained")
    said = pretrained.left_open(config, config.model.sources.get("generator"))
    return as_they_are(job, job.config, named, indexing.with_words(job, opened), said)
