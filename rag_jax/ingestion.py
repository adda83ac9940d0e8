"""From a folder of documents to an index that cites them: what `rag_jax.ingest` does.

Nothing here needs jax where nothing has changed, or no encoder and no generator is named.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import logging
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rag_jax import files, locks, overrides, rules
from rag_jax.citation import Citation
from rag_jax.config import Config, ConfigError
from rag_jax.data.inputs import is_prepared
from rag_jax.documents import workdir as record_files
from rag_jax.documents.chunks import Chunking, Window, passage_id, passages_of
from rag_jax.documents.document import Document, ReaderLost, Unreadable
from rag_jax.documents.folder import Found, content_of, files_of
from rag_jax.documents.read import versions
from rag_jax.documents.readers import Readers
from rag_jax.documents.workdir import INDEX, TRAINED, FileRecords, Record
from rag_jax.errors import UserError, near_matches
from rag_jax.retrieval.bm25 import Bm25Settings, bm25_missing, build_bm25
from rag_jax.retrieval.manifest import MANIFEST, IndexFolder, open_folder
from rag_jax.retrieval.passages import PassageStore, write_store
from rag_jax.retrieval.protocol import Passage, RetrievalError
from rag_jax.retrieval.publish import remove_old, staging
from rag_jax.retrieval.versions import current
from rag_jax.training import workdir as workdirs

DENSE, LEXICAL = ("rag_token", "rag_sequence"), ("bm25", "bm25_sequence")  # runs of a workdir
# Fields of what is not read here: the documents are the passages, and arguments name the questions.
NOT_READ = (*workdirs.TRAINED_WITH, "data.chunk_words", "data.fictional_countries", "data.world_")
WARM_UPS = ("retriever_warmup.steps", "generator_warmup.steps")  # 0 is what they are
_log = logging.getLogger(__name__)
Path = str | os.PathLike[str]


@dataclasses.dataclass(frozen=True)
class Ingested:
    """What became of the files of a folder.

    Attributes:
      workdir: the folder of everything.
      files: those that have passages.
      read: names of files that are new or changed, and were read.
      removed: names of files that are gone, or can be read no more.
      skipped: why each other file was not read, by name.
      remarks: what is to be said of files that were read, by name.
      passages: in the index.
      embedded: how many of them were; the others' embeddings were there.
      lexical: they are found by their words.
      answers: there is a generator.
    """

    workdir: pathlib.Path
    files: int
    read: tuple[str, ...]
    removed: tuple[str, ...]
    skipped: Mapping[str, str]
    remarks: Mapping[str, tuple[str, ...]]
    passages: int
    embedded: int
    lexical: bool
    answers: bool


def base_config(workdir: Path) -> Config:
    """The configuration from which an `ingest` starts: that of the call before, if there was one,
    with the `config.train` of the training since, if there was any."""
    path = pathlib.Path(workdir).absolute()
    _check_ours(path)
    config = workdirs.read(path) if workdirs.exists(path) else Config(
        train=dataclasses.replace(Config().train, steps=0))
    trained = path / TRAINED
    return dataclasses.replace(
        config, train=workdirs.read(trained).train if workdirs.exists(trained) else config.train)


def ingest(folder: Path, workdir: Path, *, chunking: Chunking | Mapping[str, int] | None = None,
           config: Config | Mapping[str, Any] | None = None) -> Ingested:
    """Makes an index of the documents of a folder, or brings the one that there is up to date.

    What was read, divided and embedded before, and is as it was, is not again.

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
    _check_ours(path)
    workdirs.check_place(path)
    with locks.own(path):
        files.remove_leftovers(path, alone=True)
        earlier = record_files.read(path) if record_files.exists(path) else None
        if earlier:
            _check_folder(earlier, source, path)
        config = _config(path, config)
        _check_trained(config, path)
        if not isinstance(chunking, Chunking):
            chunking = _chunking(dict(chunking or {}), earlier)
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
    config = _config(path, config)
    steps = (config.train.steps or 1000) if steps is None else steps
    if "generator" not in config.model.sources:
        raise ConfigError("--train: there is no generator that could learn to answer; name "
                          "config.model.generator.pretrained. To train models from random weights: "
                          "rag_jax.train --config=configs/own_data.py")
    from rag_jax.training import run

    passages, trained = path / "passages.jsonl", path / TRAINED
    if is_prepared(trained):  # it goes on with its own, wherever the workdir was then
        passages = pathlib.Path(workdirs.read(trained).data.passages)
    else:
        there = open_folder(current(path / INDEX)).passages
        with locks.own(path), files.replaced(passages) as file:
            for known in there.ids():
                file.write(json.dumps(there[there.row_of(known)]._asdict()) + "\n")
    return run.train(overrides.replace(config, {  # a warm-up would leave the encoder of the index
        "runs": config.runs[:1], "train.steps": steps, "retriever_warmup.steps": 0,
        "data.passages": str(passages), "data.train": train, "data.dev": dev}), trained)


def _check_ours(path: pathlib.Path) -> None:
    """Raises ConfigError for a workdir of `train`."""
    if workdirs.exists(path) and not (record_files.exists(path) or (path / INDEX).exists()):
        raise ConfigError(f"--workdir={path}: is a workdir of rag_jax.train; name another")


def _check_folder(earlier: Record, source: pathlib.Path, path: pathlib.Path) -> None:
    """Raises ConfigError for another folder than the one that a workdir was made from, or than what
    that one is called now: where it is gone, one that has a file of it."""
    before = pathlib.Path(earlier.folder)
    if _is_same(before, source):
        return
    if before.exists():
        raise ConfigError(f"--workdir={path}: was made from {before}; name that folder, or another "
                          "--workdir")
    now = source if source.is_dir() else source.parent
    for name, file in earlier.files.items():
        with contextlib.suppress(Unreadable):
            if content_of(Found(name, now / name))[1] == file["sha256"]:
                return
    raise ConfigError(f"--workdir={path}: was made from {before}, which is gone, and {source} has "
                      "none of its files; name another --workdir")


def _chunking(given: dict[str, Any], earlier: Record | None) -> Chunking:
    """How documents are divided: as given, and else as before, or as usual."""
    known = {f.name for f in dataclasses.fields(Chunking)}
    for name in set(given) - known:
        raise ConfigError(f"chunking: no field {name!r}; {near_matches(str(name), known)}")
    if "words" in given and given.get("tokens"):
        raise ConfigError(f"--words={given['words']} and --tokens={given['tokens']}: a passage is "
                          "bounded by words or by tokens; name one of them")
    words = {"tokens": 0} if "words" in given else {}  # in place of tokens
    before = {name: number for name, number in earlier.divided_by["chunking"].items()
              if name in known} if earlier else {}
    return Chunking(**before | words | given)


def _is_same(folder: pathlib.Path, other: pathlib.Path) -> bool:
    """Whether two paths lead to one folder, which may be gone, however they are spelled."""
    with contextlib.suppress(OSError):
        return folder.samefile(other)
    return folder == other


def _check_trained(config: Config, path: pathlib.Path) -> None:
    """Raises ConfigError for a field that what was trained in the workdir was not trained with."""
    if not is_prepared(path / TRAINED):
        return
    before = workdirs.read(path)
    for name in overrides.differences(before, config):
        if name.startswith(("seed", "data.", "model.", "retrieval.")) and not name.startswith(
                workdirs.CHANGEABLE):
            raise ConfigError(
                f"config.{name}: {path / TRAINED} was trained with "
                f"{overrides.shown(overrides.value(before, name))}; leave it as it is, or name "
                "another --workdir")


def with_runs(config: Config) -> Config:
    """The configuration with the runs that can be asked: those of BM25 where there is no encoder.

    Raises:
      ConfigError: it names other runs.
    """
    if not isinstance(config.runs, tuple) or not {*config.runs} <= {*DENSE, *LEXICAL}:
        raise ConfigError(f"config.runs={overrides.shown(config.runs)}: a workdir of documents has "
                          f"the runs {', '.join(DENSE)} with an encoder, {', '.join(LEXICAL)} "
                          "without; leave it out")
    encoders = {"query_encoder", "document_encoder"} & set(config.model.sources)
    return dataclasses.replace(config, runs=DENSE if encoders else LEXICAL)


def _config(path: pathlib.Path, given: Config | Mapping[str, Any] | None) -> Config:
    """The configuration of a workdir with fields set otherwise, or the whole one that is given.

    Raises:
      ConfigError: fields that are wrong, or change nothing; or a library is missing.
    """
    base = base_config(path)
    config = with_runs(given if isinstance(given, Config) else overrides.replace(base, given or {}))
    changed = overrides.not_default(config)
    for name in overrides.differences(base, config):
        none = name in WARM_UPS and not overrides.value(config, name)
        if name.startswith(NOT_READ) and name in changed and not none:
            raise ConfigError(
                f"config.{name}={overrides.shown(overrides.value(config, name))}: would change "
                "nothing: the passages are those of the documents, divided by --words or --tokens "
                "(in Python chunking=), --train and --dev name questions, and nothing is warmed "
                "up; leave it as it is")
    if config.train.document_encoder != "frozen":
        raise ConfigError(f"config.train.document_encoder={config.train.document_encoder}: the "
                          "encoder of passages stays as it is, so that documents can be added; set "
                          "frozen")
    if config.runs == LEXICAL and (missing := bm25_missing()):
        raise ConfigError(f"without an encoder, words are searched by BM25: {missing}")
    return rules.validate(config)


@dataclasses.dataclass
class _Ingestion:
    """One call of `ingest`, which holds the workdir."""

    source: pathlib.Path
    path: pathlib.Path
    config: Config
    chunking: Chunking
    earlier: Record | None

    def run(self) -> Ingested:
        lexical = overrides.lexical(self.config)
        made_by = {"towers": stamps(self.config), "config": _settings(self.config)}
        divided_by = {"chunking": dataclasses.asdict(self.chunking), "readers": versions(),
                      "window": None if lexical else [
                          made_by["towers"]["query_encoder"], self.config.data.max_passage_length,
                          made_by["towers"].get("retriever_tokenizer", ""),
                          made_by["config"]["model"]["retriever"]]}
        found = self._found()
        digests, closed = _digests(found)
        index, before = self._index(), self.earlier.files if self.earlier else {}
        kept = {name: file for name, file in before.items()
                if self.earlier.divided_by == divided_by
                and (index is not None or "reason" in file)
                and digests.get(name) == file["sha256"]}
        gone = [name for name in _with_text(before) if name not in kept]
        same = index is not None and self.earlier.made_by == made_by
        if same and not gone and kept.keys() == digests.keys():
            self._write_config()
            record = self.earlier._replace(folder=str(self.source), files=kept)
            if record != self.earlier:
                record_files.write(self.path, record)
            return self._result(closed | kept, kept, 0)
        reading = Reading(found, closed | kept, self.chunking, self.source)
        edits = same and not lexical and bool(_with_text(kept))
        embedded = self._make(reading, index, gone if edits else None)
        self._write_config()
        record_files.write(self.path, Record(
            str(self.source), divided_by, made_by, MANIFEST.read(current(self.path / INDEX))[1],
            reading.files))
        return self._result(reading.files, kept, embedded)

    def _write_config(self) -> None:
        """Keeps what has changed of the configuration; what trained here answers as it says now."""
        before = workdirs.read(self.path) if workdirs.exists(self.path) else None
        if before is None or overrides.differences(before, self.config):
            workdirs.write(self.config, self.path / "config.json")
        if before and before.eval != self.config.eval:
            for file in (self.path / TRAINED).glob("*/eval.json"):
                workdirs.begin_run(self.path / TRAINED, file.parent.name, self.config.eval)

    def _found(self) -> list[Found]:
        """All files by name, but for those of a workdir that is in the folder."""
        own = self.path.resolve()
        return sorted((one for one in files_of(self.source)
                       if not own.is_relative_to(self.source.resolve())
                       or not (one.path.parent.resolve() / one.path.name).is_relative_to(own)),
                      key=lambda one: one.name)

    def _index(self) -> IndexFolder | None:
        """The current version of the index, if it is the one of the record, and whole."""
        if self.earlier is None:
            return None
        try:
            folder = current(self.path / INDEX)
            if MANIFEST.read(folder)[1] != self.earlier.index:
                return None
            index = open_folder(folder)
            for there in (index.files, *(store.files for store in index.passages.stores)):
                there.check_all()
            return index
        except RetrievalError as error:
            _log.warning("%s It is made again now, of all documents.", error)
        return None

    def _make(self, reading: "Reading", index: IndexFolder | None, gone: list[str] | None) -> int:
        """Publishes an index of all files; or, where `gone` names files whose passages go, edits
        the one there is. Returns how many passages were embedded."""
        maker: Any = _Words(self.config)
        if self.config.model.sources:
            from rag_jax.training.ingested import Maker

            maker = Maker(self.config, self.path)
        out = self.path / INDEX
        with staging(out) as folder:
            write = functools.partial(maker.write, folder / "store", source=reading.citations.pop)
            if gone is None:
                maker.index(write(reading.passages(maker.window, index)), out)
            else:
                passages = reading.passages(maker.window, None)
                new = list(itertools.islice(passages, 1))
                added = write(itertools.chain(new, passages)) if new else None
                maker.edit(added, [passage_id for name in gone for passage_id in _ids(
                    name, self.earlier.files[name])], out)
            remove_old(out)  # by now nobody holds the one whose embeddings were taken over
        return maker.embedded

    def _result(self, made: FileRecords, kept: FileRecords, embedded: int) -> Ingested:
        texts, before = _with_text(made), self.earlier.files if self.earlier else {}
        return Ingested(
            self.path, len(texts), tuple(name for name in texts if name not in kept),
            tuple(sorted(_with_text(before).keys() - texts.keys())),
            {name: file["reason"] for name, file in sorted(made.items()) if "reason" in file},
            {name: tuple(file["remarks"]) for name, file in texts.items() if file["remarks"]},
            sum(file["passages"] for file in texts.values()), embedded,
            overrides.lexical(self.config), "generator" in self.config.model.sources)


def _with_text(records: FileRecords) -> FileRecords:
    """Those of files that have been read."""
    return {name: file for name, file in records.items() if "reason" not in file}


def _ids(name: str, file: Mapping[str, Any]) -> list[str]:
    """The ids of the passages of a file."""
    return [passage_id(name, number) for number in range(1, file.get("passages", 0) + 1)]


class Reading:
    """The passages of files: those of files that are kept as they are, of others by their readers.

    Attributes:
      citations: of the passages that came last, by id; to be taken out.
      files: what the record says of the files, so far.
    """

    def __init__(self, found: list[Found], kept: FileRecords, chunking: Chunking,
                 folder: pathlib.Path):
        """
        Args:
          found: the files of a folder.
          kept: what the record says of the files that are not to be read, by name.
          chunking: how documents are divided.
          folder: the name of it.
        """
        self._found, self._kept, self._chunking, self._folder = found, kept, chunking, folder
        self.citations: dict[str, Citation] = {}
        self.files: dict[str, dict[str, Any]] = {}
        self._digests: dict[str, str] = {}
        self._lost: dict[str, Unreadable] = {}  # what could not be opened any more, and why

    def passages(self, window: Window | None, index: IndexFolder | None) -> Iterator[Passage]:
        """The passages of all files, by name.

        Args:
          window: of the encoder.
          index: holds those of the files that are kept; None leaves them out.

        Raises:
          UserError: none of the files has any.
        """
        with Readers() as readers:
            answers = readers.read_each(self._contents())
            for one in self._found:
                pairs = (self._stored(one.name, index) if one.name in self._kept
                         else self._divided(one.name, next(answers), window))
                for passage, citation in pairs:
                    self.citations[passage.id] = citation
                    yield passage
        if not _with_text(self.files):
            some = "; ".join(f"{name}: {file['reason']}"
                             for name, file in list(self.files.items())[:3])
            kept = ("; the index is as it was, with the passages of before: put documents into the "
                    "folder, or remove the workdir if they are to be found no more")
            raise UserError(f"{self._folder}: none of its {len(self._found)} files has a text that "
                            f"can be read{f' ({some})' if some else ''}{kept if index else ''}")

    def _contents(self) -> Iterator[tuple[str, bytes]]:
        for one in self._found:
            if one.name not in self._kept:
                try:
                    content, self._digests[one.name] = content_of(one)
                except Unreadable as error:  # it has changed since: the next run knows
                    content, self._digests[one.name] = b"", ""
                    self._lost[one.name] = error
                yield one.name, content

    def _stored(self, name: str, index: IndexFolder | None) -> Iterator[tuple[Passage, Citation]]:
        self.files[name] = self._kept[name]
        for known in _ids(name, self._kept[name]) if index else ():
            row = index.passages.row_of(known)
            yield index.passages[row], index.passages.source(row)

    def _divided(self, name: str, answer: Document | Unreadable, window: Window | None
                 ) -> list[tuple[Passage, Citation]]:
        digest, answer = self._digests.pop(name), self._lost.pop(name, answer)
        if isinstance(answer, Unreadable):
            again = isinstance(answer, ReaderLost)  # it is tried each time
            self.files[name] = {"sha256": "" if again else digest, "reason": str(answer)}
            return []
        pairs = passages_of(name, answer, self._chunking, window)
        self.files[name] = {"sha256": digest, "passages": len(pairs),
                            "remarks": list(answer.remarks)}
        return pairs


class _Words:
    """Makes an index of words, for BM25; nothing reads its passages but people."""

    window = None
    embedded = 0

    def __init__(self, config: Config):
        self._settings = Bm25Settings.of_config(config.retrieval)

    def write(self, path: pathlib.Path, passages: Iterator[Passage],
              source: Callable[[str], Citation]) -> PassageStore:
        return write_store(path, passages, {}, source=source)

    def index(self, store: PassageStore, out: pathlib.Path) -> None:
        build_bm25(store, out, overwrite=True, settings=self._settings)


def _digests(found: list[Found]) -> tuple[dict[str, str], FileRecords]:
    """sha256 of each file that can be opened, and the records of the others, by name."""
    digests, closed = {}, {}
    for one in found:
        try:
            digests[one.name] = content_of(one)[1]
        except Unreadable as error:
            closed[one.name] = {"sha256": "", "reason": str(error)}
    return digests, closed


def _settings(config: Config) -> dict[str, Any]:
    """All of a configuration that an index or its passages may depend on."""
    values = json.loads(json.dumps(dataclasses.asdict(config)))
    return {name: values[name] for name in ("seed", "runs", "data", "model", "retrieval")}


def stamps(config: Config) -> dict[str, list[str]]:
    """The source of every tower, and of tokenizers that are named beside, and what tells whether it
    has changed: the names, sizes and times of its files."""
    sources = dict(config.model.sources)
    for name in ("retriever_tokenizer", "generator_tokenizer"):
        if source := getattr(config.data, name):
            sources[name] = source
    return {name: [source, files.stamp(pathlib.Path(source))]
            for name, source in sorted(sources.items())}
