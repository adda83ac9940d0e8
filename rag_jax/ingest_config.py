"""What `rag_jax.ingest` may be asked for: its folder, its workdir, its configuration.

Everything here is settled or refused before a document is read.
"""

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from rag_jax.config import Config, ConfigError, TrainConfig, overrides, rules
from rag_jax.data.inputs import is_prepared
from rag_jax.documents import workdir as record_files
from rag_jax.documents.chunks import Chunking
from rag_jax.documents.document import Unreadable
from rag_jax.documents.folder import FolderEntry, content_of
from rag_jax.documents.workdir import INDEX, TRAINED, Record
from rag_jax.errors import near_matches
from rag_jax.retrieval.bm25 import bm25_missing
from rag_jax.training import changes
from rag_jax.training import workdir as workdirs

DENSE, LEXICAL = ("rag_token", "rag_sequence"), ("bm25", "bm25_sequence")  # runs of a workdir
RUNS = (*DENSE, *LEXICAL)
WARM_UPS = ("retriever_warmup.steps", "generator_warmup.steps")  # may be set to 0: there are none


def base_config(workdir: str | os.PathLike[str]) -> Config:
    """The configuration that an `ingest` starts from: that of the `ingest` before, or the defaults
    without training; with the `config.train` of `fine_tune` since then, if there was one.

    Raises:
      ConfigError: it is a workdir of `train`, or its config.json is damaged.
    """
    path = pathlib.Path(workdir).absolute()
    ours = record_files.exists(path) or (path / INDEX).exists()
    if workdirs.exists(path) and not ours:
        raise ConfigError(f"--workdir={path}: is a workdir of rag_jax.train; name another")
    config = Config(train=TrainConfig(steps=0))
    if ours and (path / "config.json").is_file():
        try:
            config = workdirs.read(path)
        except ConfigError as error:
            if is_prepared(path / TRAINED):  # trained with settings that nobody knows then
                raise
            raise ConfigError(f"{error}; or remove it, and run rag_jax.ingest again with the same "
                              "settings") from None
    if workdirs.exists(path / TRAINED):
        config = dataclasses.replace(config, train=workdirs.read(path / TRAINED).train)
    return config


def config_of(path: pathlib.Path, given: Config | Mapping[str, Any] | None) -> Config:
    """The configuration of a workdir with some fields replaced, or the whole one that is given.

    Raises:
      ConfigError: fields that are wrong, or change nothing; or a library is missing.
    """
    base = base_config(path)
    config = given if isinstance(given, Config) else overrides.replace(base, given)
    config = with_runs(config, isinstance(given, Mapping) and "runs" in given)
    not_default = overrides.not_default(config)
    for name in overrides.differences(base, config):
        value = overrides.value(config, name)
        if _is_unread(name) and name in not_default and (value or name not in WARM_UPS):
            raise ConfigError(
                f"config.{name}={overrides.shown(value)}: would change nothing: the passages are "
                "those of the documents, divided by --words or --tokens (in Python chunking=), "
                "--train and --dev name questions, and nothing is warmed up; leave it as it is")
    if config.retrieval.k == 0:
        raise ConfigError("config.retrieval.k=0: a workdir of documents answers from its passages; "
                          "set 1 or more")
    if config.train.document_encoder != "frozen":
        raise ConfigError(f"config.train.document_encoder={config.train.document_encoder}: the "
                          "encoder of passages stays as it is, so that documents can be added; set "
                          "frozen")
    if overrides.lexical(config) and (missing := bm25_missing("documents")):
        raise ConfigError(f"without an encoder, words are searched by BM25: {missing}")
    rules.check_prompt(rules.validate(config))
    return config


def _is_unread(name: str) -> bool:
    """Whether an ingest does not read a dotted field: its passages are those of the documents,
    arguments name the questions, and nothing is warmed up."""
    if name.startswith("data."):
        return name == "data.chunk_words" or changes.rule(name).opened == "unread"
    return name.startswith(("retriever_warmup.", "generator_warmup."))


def with_runs(config: Config, named: bool = False) -> Config:
    """The configuration with the runs that can be asked: those of BM25 where there is no encoder.
    Those that it names come first: the first one is trained, and asked where nobody names another.

    named: the caller has just named them, so that runs of the other kind are refused.

    Raises:
      ConfigError: it names other runs.
    """
    encoders = {"query_encoder", "document_encoder"} & set(config.model.sources)
    runs = DENSE if encoders else LEXICAL
    known = {*(runs if named else RUNS)}
    if not isinstance(config.runs, tuple) or not {*config.runs} <= known:
        raise ConfigError(f"config.runs={overrides.shown(config.runs)}: a workdir of documents has "
                          f"the runs {', '.join(DENSE)} with an encoder, {', '.join(LEXICAL)} "
                          "without; name one of those that are there, or leave it out")
    first = [run for run in config.runs if run in runs]
    return dataclasses.replace(config, runs=tuple(dict.fromkeys((*first, *runs))))


def chunking_of(given: Chunking | Mapping[str, Any] | None, earlier: Record | None) -> Chunking:
    """How documents are divided.

    Args:
      given: a `Chunking`, or fields of it; the others are as before, or as `Chunking()` has them.
      earlier: the record of the `ingest` before.

    Raises:
      ConfigError: an unknown field, or words and tokens together.
    """
    if isinstance(given, Chunking):
        return given
    given = dict(given or {})
    known = {f.name for f in dataclasses.fields(Chunking)}
    for name in set(given) - known:
        raise ConfigError(f"chunking: no field {name!r}; {near_matches(str(name), known)}")
    if "words" in given and given.get("tokens"):
        raise ConfigError(f"--words={given['words']} and --tokens={given['tokens']}: a passage is "
                          "bounded by words or by tokens; name one of them")
    words = {"tokens": 0} if "words" in given else {}  # words take the place of tokens
    before = {name: number for name, number in earlier.divided_by["chunking"].items()
              if name in known} if earlier else {}
    return Chunking(**before | words | given)


def check_folder(earlier: Record, source: pathlib.Path, path: pathlib.Path) -> None:
    """Raises ConfigError where `source` is not the folder that the workdir `path` was made from.
    Where that folder is gone, it may have been renamed: `source` must then hold one of its files,
    unchanged."""
    before = pathlib.Path(earlier.folder)
    if _is_same(before, source):
        return
    if before.exists():
        raise ConfigError(f"--workdir={path}: was made from {before}; name that folder, or another "
                          "--workdir")
    now = source if source.is_dir() else source.parent
    for name, file in earlier.files.items():
        with contextlib.suppress(Unreadable):
            if content_of(FolderEntry(name, now / name))[1] == file["sha256"]:
                return
    raise ConfigError(f"--workdir={path}: was made from {before}, which is gone, and {source} has "
                      "none of its files; name another --workdir")


def _is_same(folder: pathlib.Path, other: pathlib.Path) -> bool:
    """Whether two paths lead to one folder, which may be gone, however they are spelled."""
    with contextlib.suppress(OSError):
        return folder.samefile(other)
    return folder == other


def check_trained(config: Config, path: pathlib.Path) -> None:
    """Raises ConfigError for a field of another value than the models that were trained in the
    workdir have, or encoders of other weights: what they embed, those models would not find. A
    source may have another name, if it holds the same model."""
    if not is_prepared(path / TRAINED):
        return
    from rag_jax.hub.families import RERANKER  # these read models, which most ingests do not
    from rag_jax.training import pretrained, weights

    before, trained = workdirs.read(path), workdirs.read(path / TRAINED)
    renamed = renamed_sources(before, config) | renamed_sources(trained, config) if (
        path / TRAINED / weights.RECORD).exists() else {}

    def compare(then: Config, now: Config, sections: tuple[str, ...]) -> None:
        for name in overrides.differences(then, now):
            if name.startswith(sections) and name not in renamed and (
                    not changes.may_change(name, trained, path / TRAINED)):
                section, _, field = name.rpartition(".")
                had = overrides.shown(overrides.value(then, name))
                source = f"{section}.pretrained"
                if then is trained and source in renamed:  # another model has other fields
                    name, had = source, f"{overrides.value(then, source)}, where {field} is {had}"
                raise ConfigError(
                    f"config.{name}: {path / TRAINED} was trained with {had}; leave it as it is, "
                    f"remove {path / TRAINED} to train anew, or name another --workdir")

    compare(before, config, ("seed", "data.", "model.", "retrieval."))
    towers = [t for t in config.model.sources if t != "generator" or renamed]
    if renamed:
        compare(trained, pretrained.resolve(config), ("model.retriever.", "model.generator."))
        towers += [RERANKER] * bool(config.model.reranker.pretrained)
    weights.check(config, path / TRAINED, towers, record=False)


def renamed_sources(before: Config, config: Config) -> dict[str, str]:
    """The fields that name the source of a model by another name than before, and the new names:
    a folder may have moved."""
    names = [f"model.{part}.pretrained" for part in (
        "rag", "generator", "reranker", *changes.ENCODER_SECTIONS)]
    pairs = {name: (overrides.value(before, name), overrides.value(config, name)) for name in names}
    return {name: now for name, (then, now) in pairs.items() if then and now and then != now}
