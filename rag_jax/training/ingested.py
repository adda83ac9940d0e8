"""Workdirs of `rag_jax.ingest`: how they are indexed, and how they are opened to answer."""

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rag_jax.citation import Citation
from rag_jax.config import Config, ConfigError, overrides
from rag_jax.config.rules import changed
from rag_jax.data.batches import PASSAGE_TABLE
from rag_jax.data.prepare import write_passages
from rag_jax.data.text import encoder_input
from rag_jax.documents.chunks import Window
from rag_jax.documents.workdir import INDEX, answering
from rag_jax.retrieval.build import RecallSettings
from rag_jax.retrieval.editing import edit_index
from rag_jax.retrieval.index import PassageIndex
from rag_jax.retrieval.kept import KeptEmbeddings
from rag_jax.retrieval.manifest import read_manifest
from rag_jax.retrieval.passages import PassageStore
from rag_jax.retrieval.protocol import OtherEncoderError, Passage, RetrievalError
from rag_jax.retrieval.versions import current
from rag_jax.training import changes, indexing, pretrained, workdir
from rag_jax.training.answer_settings import decoding_settings
from rag_jax.training.job import Job, fingerprint
from rag_jax.training.opened import Rag
from rag_jax.training.run_index import check_k
from rag_jax.training.untrained import check_parts, open_untrained, towers, untrained_job
from rag_jax.types import Params


class Maker:
    """Writes and indexes passages for the towers that a configuration names.

    Attributes:
      window: how much text the document encoder can read; None = there is no such encoder.
      embedded: how many passages were embedded for the index; 0 until it is made.
    """

    def __init__(self, config: Config, path: pathlib.Path):
        self._config = _untrained(config, config.runs[0])
        self._towers = towers(self._config)
        # Models that were trained in the workdir, and answer, read by tokenizers of their own.
        folder = answering(path)
        own = {f"data.{name}": str(folder / "data" / name) for tower, name in (
            ("document_encoder", "retriever_tokenizer"), ("generator", "generator_tokenizer"))
            if tower in self._towers and folder != path}
        self._job = _job(overrides.replace(self._config, own), path)
        if "generator" in self._towers:
            self._check_decoding(config, None if folder == path else workdir.read(folder))
        self.window = self._window() if "document_encoder" in self._towers else None
        self.embedded = 0

    def _check_decoding(self, config: Config, trained: Config | None) -> None:
        """Raises a ConfigError for settings by which the generator could not answer: as it is, or,
        as it may yet be trained, by them.

        trained: what the models that were trained in the workdir, and answer, were trained with.
        """
        tokenizer = self._job.prepared.generator_tokenizer
        if trained is None:
            said = pretrained.generation_defaults(
                self._config, self._config.model.sources["generator"])
            with contextlib.suppress(ConfigError):
                decoding_settings(
                    pretrained.with_generation_defaults(self._job.config, said), tokenizer)
                return
        trained = dataclasses.replace(trained or config, eval=config.eval)
        run = next((run for run in config.runs if run in trained.runs), trained.runs[0])
        decoding_settings(overrides.for_run(trained, run), tokenizer)

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
        """Publishes the index of a store; embeddings that the earlier index has are copied."""
        if self._job.model.lexical:
            indexing.index_store_words(self._job, store, out, overwrite=True)
            return
        kept = None
        with contextlib.suppress(RetrievalError):
            kept = KeptEmbeddings(PassageIndex.open(out, verify=True))
        indexing.index_store(self._job, self._encoders(), store, out, overwrite=True, kept=kept)
        self.embedded = len(store) if kept is None else kept.embedded

    def edit(self, added: PassageStore | None, gone: Sequence[str], out: pathlib.Path) -> None:
        """Publishes the index without the passages of the ids `gone` and with those of `added`."""
        encoder = self._encoders()["document_encoder"]
        embedder = indexing.passage_embedder(
            self._job, self._job.model, encoder, fingerprint(self._job.model, encoder))
        if added is not None:  # most passages of a changed file may have their embeddings already
            kept = KeptEmbeddings(PassageIndex.open(out))
            embedder = kept.around(embedder, added)
            self.embedded = kept.embedded
        edit_index(out, embedder, added, gone, RecallSettings(seed=self._config.seed))

    def _encoders(self) -> Params:
        return pretrained.load(self._job, pretrained.ENCODERS)


def _untrained(config: Config, run: str) -> Config:
    """The configuration of a run without training: its steps, and the parts of the model that they
    make, are those of `rag_jax.ingest --train`, which trains in another folder."""
    learned = {"model.null_document": "none", **(
        {"model.head": "none"} if config.head_classes else {})}
    return overrides.replace(overrides.for_run(config, run), {"train.steps": 0, **learned})


def _job(config: Config, path: pathlib.Path) -> Job:
    """`untrained_job` of a workdir, for the configuration of one run, which names the towers.

    Raises:
      ConfigError, HubError: a source cannot be used, has no tokenizer, or is no retriever.
    """
    if "document_encoder" in towers(config):
        pretrained.check_retriever(config)
    return untrained_job(pretrained.resolve(config), config, path)


def _check_index(config: Config, made: Config, path: pathlib.Path) -> None:
    """Raises ConfigError where passages are found otherwise than a workdir was indexed: by words or
    by an encoder, without one, or by words with other settings of BM25, whose index holds their
    weights."""
    words, encoders = overrides.lexical(config), [
        f"model.{name}.pretrained" for name in changes.ENCODER_SECTIONS]
    for name in overrides.differences(made, config):
        fixed = name == "retrieval.retriever" and words != overrides.lexical(made)
        if fixed or words and name.startswith((*changes.WORDS, *encoders)) or (
                name in encoders and not overrides.value(config, name)):
            now, then = (overrides.shown(overrides.value(one, name)) for one in (config, made))
            raise ConfigError(f"config.{name}={now}: {path} was indexed with {then or '(none)'}; "
                              "leave the field out, or run rag_jax.ingest with it")


def open_ingested(path: pathlib.Path, run: str | None, index: str | os.PathLike | None,
                  config: Config | Mapping[str, Any] | None) -> Rag:
    """Opens a workdir of `rag_jax.ingest`: the towers that it names, with its index.

    Arguments and errors as of `api.load`.
    """
    if not isinstance(config, Config):
        config = changed(workdir.read_run(path, run), config)
    run = workdir.run_of(path, config, run)
    made = overrides.for_run(workdir.read(path), run)
    if {"model.null_document", "model.head"} & {*overrides.differences(made, config)}:
        check_parts(config)
    asked, config = overrides.for_run(config, run), _untrained(config, run)
    _check_index(config, _untrained(made, run), path)
    changes.check_untrained(asked, made, f"{path} was indexed with")
    if not config.retrieval.k:
        raise ConfigError(f"config.retrieval.k=0: {path} answers from its documents; set 1 "
                          "or more")
    folder = path / INDEX if index is None else pathlib.Path(index)
    try:
        opened = indexing.open_host_index(folder, overrides.lexical(config))
    except RetrievalError:
        if index is None:
            _check_kind(path, overrides.lexical(config))
        raise
    check_k(config, opened, folder)
    job, named = _job(config, path), towers(config)
    if "generator" in named:
        if PASSAGE_TABLE not in opened.passages.token_tables:
            raise ConfigError(f"{folder}: was made without a generator; run rag_jax.ingest again "
                              "with the same config.model.generator.pretrained")
        indexing.check_tokens(opened, job.prepared, "run rag_jax.ingest again, with every field "
                              "that is set here")
    defaults = pretrained.generation_defaults(config, config.model.sources.get("generator"))
    try:
        return open_untrained(job, job.config, named, indexing.with_words(job, opened), defaults)
    except OtherEncoderError as error:
        raise ConfigError(f"{error} For its own index, run rag_jax.ingest again on {path}, with "
                          "the same fields.") from None


def _check_kind(path: pathlib.Path, lexical: bool) -> None:
    """Raises ConfigError where an ingest was killed between its index and config.json, which are of
    words and of vectors, or the other way round."""
    words = lexical
    with contextlib.suppress(RetrievalError):  # it is damaged
        words = read_manifest(current(path / INDEX))["kind"] == "bm25"
    if words != lexical:
        raise ConfigError(f"{path}: the last rag_jax.ingest was interrupted after it had made its "
                          f"index of {'words' if words else 'vectors'}, for which config.json is "
                          "not; run it again, with the same fields") from None
