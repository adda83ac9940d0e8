"""From a folder of documents to an index that cites them: what `rag_jax.ingest` does.

Nothing here needs jax where nothing has changed, or no encoder and no generator is named.
"""

import dataclasses
import functools
import itertools
import json
import logging
import os
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rag_jax import files, ingest_config, locks
from rag_jax.citation import Citation
from rag_jax.config import Config, ConfigError, overrides
from rag_jax.data import tokenizer_file
from rag_jax.data.inputs import is_prepared
from rag_jax.data.question_sources import load_examples
from rag_jax.documents import workdir as record_files
from rag_jax.documents.chunks import Chunking
from rag_jax.documents.document import Unreadable, UnreadableNow
from rag_jax.documents.folder import FolderEntry, content_of, files_of
from rag_jax.documents.read import versions
from rag_jax.documents.reading import Reading, passage_ids, with_text
from rag_jax.documents.workdir import INDEX, TRAINED, FileRecords, Record
from rag_jax.errors import UserError
from rag_jax.retrieval.bm25 import Bm25Settings, build_bm25
from rag_jax.retrieval.manifest import MANIFEST, IndexFolder, open_folder
from rag_jax.retrieval.passages import PassageStore
from rag_jax.retrieval.protocol import Passage, RetrievalError
from rag_jax.retrieval.publish import publish_killed, remove_old, staging
from rag_jax.retrieval.store_writing import write_store
from rag_jax.retrieval.versions import current
from rag_jax.training import workdir as workdirs

_log = logging.getLogger(__name__)
Path = str | os.PathLike[str]
TOKENS = "tokenizers"  # the key of `_tokens` in a record
READ_AGAIN = "other tokens"  # in place of the sha256 of a file that could not be read anew


@dataclasses.dataclass(frozen=True)
class Ingested:
    """What became of the files of a folder.

    Attributes:
      workdir: the folder of everything that was made.
      files: how many files the index was made from.
      read: names of files that are new or changed, and were read.
      removed: names of files of the index before that are gone, or can be read no more.
      skipped: why each other file was not read, by name.
      stay: why files cannot be read now whose passages of before are in the index, by name.
      remarks: remarks of the readers on files of the index, by name.
      passages: how many passages the index has.
      embedded: how many of them were embedded; the embeddings of the others were kept.
      lexical: passages are found by their words.
      answers: there is a generator.
    """

    workdir: pathlib.Path
    files: int
    read: tuple[str, ...]
    removed: tuple[str, ...]
    skipped: Mapping[str, str]
    stay: Mapping[str, str]
    remarks: Mapping[str, tuple[str, ...]]
    passages: int
    embedded: int
    lexical: bool
    answers: bool


def ingest(folder: Path, workdir: Path, *, chunking: Chunking | Mapping[str, int] | None = None,
           config: Config | Mapping[str, Any] | None = None) -> Ingested:
    """Makes an index of the documents of a folder, or brings the index of the last call up to date.

    Files that have not changed since then are not read, divided and embedded again.

    Args:
      folder: of documents, with all folders in it; or a single file.
      workdir: the folder of everything that is made.
      chunking: how documents are divided, or fields of it to set, {"overlap": 2}; the others are as
        before, or as `Chunking()` says.
      config: fields to set, {"model.retriever.pretrained": ...}, the others as they were before; or
        a whole configuration. It names the encoder and the generator; without an encoder the
        index is one of words, for BM25.

    Raises:
      UserError: the folder has no document that can be read, or is another one than before; and
        all that can be wrong with a configuration, an encoder or an index.
      InUseError: another process writes into the workdir.
    """
    source = workdirs.named("folder", folder).absolute()
    path = workdirs.named("workdir", workdir).absolute()
    if not source.exists():
        raise UserError(f"{folder}: there is no such folder; name one with documents in it")
    if path.resolve() == source.resolve():
        raise ConfigError(f"--workdir={workdir}: is the folder of the documents; name another")
    if sys.getfilesystemencoding() != "utf-8":
        raise ConfigError("documents are known by their names, which are taken for "
                          f"{sys.getfilesystemencoding()} here: set LC_ALL=C.UTF-8, or another "
                          "locale of UTF-8, and leave out PYTHONUTF8=0")
    ingest_config.base_config(path)  # complains before anything is written, as the next line
    workdirs.check_place(path)
    with locks.own(path):
        files.remove_leftovers(path, alone=True)
        earlier = record_files.read(path) if record_files.exists(path) else None
        if earlier:
            ingest_config.check_folder(earlier, source, path)
        config = ingest_config.config_of(path, config)
        ingest_config.check_trained(config, path)
        chunking = ingest_config.chunking_of(chunking, earlier)
        return _Ingestion(source, path, config, chunking, earlier).run()


def fine_tune(workdir: Path, train: str, dev: str, *, steps: int | None = None,
              config: Config | Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Trains the models of a workdir on questions about its documents; they answer from then on.

    What was interrupted goes on where it was. The documents may change before and afterwards: the
    encoder of passages does not train.

    Args:
      workdir: of `ingest`, with a generator.
      train, dev: questions, as `config.data.train` and `config.data.dev`.
      steps: of training; None = config.train.steps, or 1000 where that is 0.
      config: fields to set, as for `ingest`, or a whole configuration.

    Returns:
      As `rag_jax.train`.

    Raises:
      ConfigError: there is no generator, or as `rag_jax.train`.
    """
    path = pathlib.Path(workdir).absolute()
    record_files.read(path)
    config = ingest_config.config_of(path, config)
    steps = (config.train.steps or 1000) if steps is None else steps
    _check_generator(config)
    ingest_config.check_trained(config, path)
    from rag_jax.training import run

    passages, trained = path / "passages.jsonl", path / TRAINED
    if not is_prepared(trained):  # else it goes on with its passages
        store = open_folder(current(path / INDEX)).passages
        with locks.own(path), files.replaced(passages) as file:
            for name in store.ids():
                file.write(json.dumps(store[store.row_of(name)]._asdict()) + "\n")
    if workdirs.exists(trained):  # where this workdir has moved, or what it was trained from
        _set(trained, {"data.passages": str(passages), **ingest_config.renamed_sources(
            workdirs.read(trained), config)})
    report = run.train(overrides.replace(config, {  # a warm-up would leave the encoder of the index
        "runs": config.runs[:1], "train.steps": steps, "retriever_warmup.steps": 0,
        "data.passages": str(passages), "data.train": train, "data.dev": dev}), trained)
    _put_first(trained, config.runs)
    return report


def check_training(workdir: str | os.PathLike[str], config: Config, train: str, dev: str) -> None:
    """Checks what `fine_tune` will need, before the documents are read for it.

    Raises:
      ConfigError: there is no generator.
      DataError, FileNotFoundError: as `load_examples` of the questions, which training that has
        begun does not read again.
    """
    _check_generator(config)
    if not is_prepared(pathlib.Path(workdir) / TRAINED):
        for questions in (train, dev):
            load_examples(questions, data_dir=config.data.data_dir)


def _check_generator(config: Config) -> None:
    if "generator" not in config.model.sources:
        raise ConfigError("--train: there is no generator that could learn to answer; name "
                          "config.model.generator.pretrained. To train models from random weights: "
                          "rag_jax.train --config=configs/own_data.py")


def _put_first(trained: pathlib.Path, runs: Sequence[str]) -> None:
    """Puts the runs of a trained workdir, if there is one, into this order: the first that began is
    the one that is asked."""
    if workdirs.exists(trained):
        begun = workdirs.read(trained).runs
        _set(trained, {"runs": tuple(sorted(begun, key=[*runs, *begun].index))})


def _set(trained: pathlib.Path, fields: Mapping[str, Any]) -> None:
    """Sets fields in the configuration of a trained workdir."""
    config = workdirs.read(trained)
    changed = overrides.replace(config, fields)
    if changed != config:
        workdirs.write(changed, trained / "config.json")


@dataclasses.dataclass
class _Ingestion:
    """One call of `ingest`, which holds the lock of the workdir.

    Attributes:
      source: the folder of documents.
      path: the workdir.
      config: its configuration.
      chunking: how documents are divided.
      earlier: the record of the call before; None = this is the first.
      stay: as in `Ingested`, of the files that were looked at.
    """

    source: pathlib.Path
    path: pathlib.Path
    config: Config
    chunking: Chunking
    earlier: Record | None
    stay: dict[str, str] = dataclasses.field(default_factory=dict)

    def run(self) -> Ingested:
        """Reads the files that have changed, and publishes the index and the record of it."""
        lexical = overrides.lexical(self.config)
        tokens = self._tokens()
        made_by = {"towers": stamps(self.config), "config": _settings(self.config), **tokens}
        divided_by = {"chunking": dataclasses.asdict(self.chunking), "readers": versions(),
                      "window": None if lexical else [
                          made_by["towers"]["query_encoder"], self.config.data.max_passage_length,
                          made_by["towers"].get("retriever_tokenizer", ""),
                          made_by["config"]["model"]["retriever"]]}
        entries, digests, unreadable = self._looked_at()
        index, before = self._index(), self.earlier.files if self.earlier else {}
        usable = {name: file for name, file in before.items()
                  if self.earlier.divided_by == divided_by
                  and (index is not None or "reason" in file)}
        same_tokens = lexical or not self.earlier or (
            self.earlier.made_by.get(TOKENS) == tokens.get(TOKENS))
        kept = {name: file for name, file in usable.items() if digests.get(name) == file["sha256"]
                and (same_tokens or name in self.stay)}
        gone = [name for name in with_text(before) if name not in kept]
        same = index is not None and self.earlier.made_by == made_by
        if same and not gone and kept.keys() == digests.keys():
            if workdirs.exists(self.path) and workdirs.read(self.path).eval != self.config.eval:
                self._maker()
            self._write_config()
            record = self.earlier._replace(folder=str(self.source), files=kept)
            if record != self.earlier:
                record_files.write(self.path, record)
            return self._result(unreadable | kept, kept, 0)
        reading = Reading(
            entries, unreadable | kept, self.chunking, self.source, with_text(usable))
        edits = same and not lexical and bool(with_text(kept))
        embedded, made = self._make(reading, index, gone if edits else None)
        self.stay |= reading.stay
        kept |= {name: usable[name] for name in reading.stay}
        files = reading.files if same_tokens else {
            name: {**file, "sha256": READ_AGAIN} if name in self.stay else file
            for name, file in reading.files.items()}
        self._write_config()
        record_files.write(self.path, Record(
            str(self.source), divided_by, made_by, made, files))
        return self._result(files, kept, embedded)

    def _tokens(self) -> dict[str, Any]:
        """On what it depends, besides the files of tokenizers, as which tokens a text is read.

        Where models that were trained in this workdir answer, by tokenizers of their own, the
        record keeps what it has, so that nothing is read again.
        """
        if record_files.answering(self.path) != self.path:
            made_by = self.earlier.made_by if self.earlier else {}
            return {TOKENS: made_by[TOKENS]} if TOKENS in made_by else {}
        return {TOKENS: tokenizer_file.versions()} if self.config.model.sources else {}

    def _write_config(self) -> None:
        """Writes the configuration where it has changed; the models that were trained in this
        workdir answer as it says, too."""
        before = workdirs.read(self.path) if workdirs.exists(self.path) else None
        if before is None or overrides.differences(before, self.config):
            workdirs.write(self.config, self.path / "config.json")
        if before and before.runs != self.config.runs:
            _put_first(self.path / TRAINED, self.config.runs)
        if before and before.eval != self.config.eval:
            for file in (self.path / TRAINED).glob("*/eval.json"):
                workdirs.begin_run(self.path / TRAINED, file.parent.name, self.config.eval)

    def _looked_at(self) -> tuple[list[FolderEntry], dict[str, str], FileRecords]:
        """The files of the folder, sha256 of those that can be opened, and the records of the
        others, by name.

        Files that were read before and cannot be opened now, or not listed with their folder, keep
        their sha256, and so their passages. (Divided in another way they cannot, and are removed.)
        """
        entries, digests, unreadable, for_now = self._entries(), {}, {}, {}
        for one in entries:
            try:
                digests[one.name] = content_of(one)[1]
            except Unreadable as error:
                unreadable[one.name] = {"sha256": "", "reason": str(error)}
                if isinstance(error, UnreadableNow):
                    for_now[one.name] = error
        found = {one.name for one in entries}
        for name, file in (with_text(self.earlier.files) if self.earlier else {}).items():
            folders = list(map(str, pathlib.PurePosixPath(name).parents))[:-1]  # the last is "."
            hidden = next((each for each in (name, *folders) if each in for_now), None)
            if hidden is None:
                continue
            self.stay[name], digests[name] = str(for_now[hidden]), file["sha256"]
            if name not in found:
                entries.append(FolderEntry(name, self.source / name, for_now[hidden]))
        return sorted(entries, key=lambda one: one.name), digests, unreadable

    def _entries(self) -> list[FolderEntry]:
        """All files of the folder by name, without those of the workdir if it is in the folder."""
        every = sorted(files_of(self.source), key=lambda one: one.name)
        workdir = self.path.resolve()
        if not workdir.is_relative_to(self.source.resolve()):
            return every
        return [one for one in every
                if not (one.path.parent.resolve() / one.path.name).is_relative_to(workdir)]

    def _index(self) -> IndexFolder | None:
        """The current version of the index, if the record is of that version, and it is whole."""
        if self.earlier is None:
            return None
        publish_killed(self.path / INDEX)
        try:
            folder = current(self.path / INDEX)
            if MANIFEST.read(folder)[1] != self.earlier.index:
                return None
            index = open_folder(folder)
            for checked in (index.files, *(store.files for store in index.passages.stores)):
                checked.check_all()
        except RetrievalError as error:
            _log.warning("%s It is made again now, of all documents.", error)
            return None
        return index

    def _maker(self) -> Any:
        """What writes and indexes passages; it refuses settings by which nothing could be answered.
        """
        if not self.config.model.sources:
            return _Words(self.config)
        from rag_jax.training.ingested import Maker

        return Maker(self.config, self.path)

    def _make(self, reading: Reading, index: IndexFolder | None, gone: list[str] | None
              ) -> tuple[int, str]:
        """Publishes an index of all files, or edits the current one.

        Args:
          reading: the passages.
          index: of which `reading` keeps passages.
          gone: the files of which the edit deletes the passages, but for those that turn out to be
            unreadable now; None = make an index of all files.

        Returns:
          How many passages were embedded, and the digest of the index's manifest.
        """
        maker, out = self._maker(), self.path / INDEX
        with staging(out) as folder:
            write = functools.partial(maker.write, folder / "store", source=reading.citations.pop)
            if gone is None:
                maker.index(write(reading.passages(maker.window, index)), out)
            else:
                passages = reading.passages(maker.window, None)
                new = list(itertools.islice(passages, 1))
                added = write(itertools.chain(new, passages)) if new else None
                maker.edit(added, [each for name in gone if name not in reading.stay
                                   for each in passage_ids(name, self.earlier.files[name])], out)
            remove_old(out)  # only now: embeddings were taken over from the version before
            return maker.embedded, MANIFEST.read(current(out))[1]

    def _result(self, records: FileRecords, kept: FileRecords, embedded: int) -> Ingested:
        texts, before = with_text(records), self.earlier.files if self.earlier else {}
        return Ingested(
            workdir=self.path,
            files=len(texts),
            read=tuple(name for name in texts if name not in kept),
            removed=tuple(sorted(with_text(before).keys() - texts.keys())),
            skipped={name: file["reason"] for name, file in sorted(records.items())
                     if "reason" in file},
            stay={name: reason for name, reason in sorted(self.stay.items()) if name in kept},
            remarks={name: tuple(file["remarks"]) for name, file in texts.items()
                     if file["remarks"]},
            passages=sum(file["passages"] for file in texts.values()),
            embedded=embedded,
            lexical=overrides.lexical(self.config),
            answers="generator" in self.config.model.sources)


class _Words:
    """Writes and indexes passages for BM25, as `training.ingested.Maker` does for models."""

    window = None
    embedded = 0

    def __init__(self, config: Config):
        self._settings = Bm25Settings.of_config(config.retrieval)

    def write(self, path: pathlib.Path, passages: Iterator[Passage],
              source: Callable[[str], Citation]) -> PassageStore:
        return write_store(path, passages, {}, source=source)

    def index(self, store: PassageStore, out: pathlib.Path) -> None:
        build_bm25(store, out, overwrite=True, settings=self._settings)


def _settings(config: Config) -> dict[str, Any]:
    """The sections of a configuration that an index or its passages may depend on."""
    values = json.loads(json.dumps(dataclasses.asdict(config)))
    values["runs"] = [run for run in ingest_config.RUNS if run in config.runs]  # in any order
    return {name: values[name] for name in ("seed", "runs", "data", "model", "retrieval")}


def stamps(config: Config) -> dict[str, list[str]]:
    """(source, digest of the names, times and ends of its files) of every tower, and of the
    tokenizers that config.data names: they tell whether a source has changed."""
    sources = dict(config.model.sources)
    for name in ("retriever_tokenizer", "generator_tokenizer"):
        if source := getattr(config.data, name):
            sources[name] = source
    return {name: [source, files.stamp(pathlib.Path(source), lasting=True)]
            for name, source in sorted(sources.items())}
