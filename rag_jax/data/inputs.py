"""The record of what the data of a workdir were made from: WORKDIR/data/inputs.json.

It has the fields of the configuration that shape the data, and the size, time and SHA-256 of each
file that was read. Contents are compared; a file that has not changed since is not read again.
"""

import hashlib
import os
import pathlib
import time
from collections.abc import Mapping
from typing import Any

from rag_jax.config import Config
from rag_jax.data import tokenizer_file
from rag_jax.data.corpora import corpus_files
from rag_jax.data.task_sources import task_files_of
from rag_jax.data.tfds_data import directory_and_split
from rag_jax.errors import UserError, first_of
from rag_jax.retrieval.json_files import read_sealed

RECORD = "inputs.json"  # in the folder of the data; written first
DONE = "names.txt"  # of passage stores and splits; written last
QUESTIONS = ("train", "dev", "test")
_SHAPE = ("chunk_words", "generator_vocab", "retriever_vocab", "source_format",
          "max_passage_length", "max_source_length")
_ENCODER = ("passage_prefix", "titles")
_WORLD = ("fictional_countries", "world_task")
_LATER_FILES = ("spiece.model", "sentencepiece.bpe.model", "tokenizer.model",
                "added_tokens.json")  # of tokenizers; earlier records do not have them
_ABSENT = {"source": None, "files": {}}
_SETTLED_NS = 2 * 10**9  # a file may change again within the tick of its file system's clock


def is_prepared(workdir: pathlib.Path) -> bool:
    """Whether a workdir has all its data."""
    return (workdir / "data" / DONE).exists()


def world_seed(config: Config) -> int:
    """The seed of the fictional countries."""
    return config.seed if config.data.world_seed is None else config.data.world_seed


def describe(config: Config, tokenizers: Mapping[str, str | os.PathLike | None],
             earlier: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The record of the configuration and the files as they are now, as JSON.

    Args:
      config: `config.data` names the sources.
      tokenizers: file, folder or Hugging Face name of each that is not trained on the passages.
      earlier: an earlier record of the same; files that have not changed since are not read.
    """
    data = config.data
    fields = {f"data.{name}": getattr(data, name) for name in _SHAPE}
    fields |= {f"model.retriever.{name}": value  # absent where earlier records lack them
               for name, value in config.model.retriever.beyond_dpr.items() if name in _ENCODER}
    if data.prompt:  # earlier versions had none
        fields["data.prompt"] = data.prompt
    sources = {name: str(source) for name, source in tokenizers.items() if source}
    if data.passages:
        sources |= {name: getattr(data, name) for name in ("passages", *QUESTIONS)}
    else:
        fields |= {f"data.{name}": getattr(data, name) for name in _WORLD}
        fields["data.world_seed"] = world_seed(config)
        if data.world_cards != "gold":  # earlier records do not have it
            fields["data.world_cards"] = data.world_cards
    known, described = earlier["inputs"] if earlier else {}, {}
    for name, source in sources.items():
        if source:
            shown, files = _contents(name, source, data.data_dir)
            entries = known.get(name, _ABSENT)["files"]
            described[name] = {"source": shown, "files": {
                key: entry(path, entries.get(key)) for key, path in files.items()}}
    return {"fields": fields, "inputs": described}


def _contents(name: str, source: str, data_dir: str) -> tuple[str, dict[str, pathlib.Path]]:
    """What of a source's name says what it contains, and its existing files, by their path in its
    folder; "" = the source itself."""
    if source.startswith("tfds:"):
        return source, {}  # the data set's own version
    if source.startswith("task:"):
        return source, {path.name: path for path in task_files_of(source, data_dir)}
    shown, path = "", pathlib.Path(source.removeprefix("kilt:"))
    if source.startswith("tfds-dir:"):
        path, split = directory_and_split(source)
        shown = f":{split}"
    if path.is_file():
        beside = () if name in ("passages", *QUESTIONS) else map(
            path.with_name, tokenizer_file.BESIDE)
        return shown, {"": path, **{file.name: file for file in beside if file.is_file()}}
    if name == "passages":
        paths = [pathlib.Path(file) for file in corpus_files(source)]
    elif name in QUESTIONS:
        paths = [file for file in sorted(path.rglob("*")) if file.is_file()]
    else:
        paths = [path / file for file in tokenizer_file.FILES if (path / file).is_file()]
    files = {file.relative_to(path).as_posix(): file for file in paths}
    return shown or source * (files.keys() <= set(_LATER_FILES)), files


def entry(path: pathlib.Path, known: Mapping[str, Any] | None) -> dict[str, Any]:
    """The record of one file.

    known: an earlier one of this path, which is taken over where size and time are the same, and
      where nothing has been put in the file's place with the time of the one before (by tar or
      rsync), as its ctime tells.
    """
    status, now = path.stat(), time.time_ns()
    changed = max(status.st_mtime_ns, status.st_ctime_ns)
    if known and (known["bytes"], known["mtime_ns"]) == (status.st_size, status.st_mtime_ns) and (
            known["read_ns"] - changed > _SETTLED_NS):
        return dict(known)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"path": str(path.absolute()), "bytes": status.st_size, "mtime_ns": status.st_mtime_ns,
            "read_ns": now, "sha256": digest}


def differences(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """Differences in content between two records, in words, by the name of the input or field.

    Files that are gone cannot be compared.
    """
    changed = {}
    for name in earlier["fields"].keys() | now["fields"].keys():
        values = [record["fields"].get(name) for record in (earlier, now)]
        if values[0] != values[1]:
            changed[name] = f"config.{name}: {values[0]!r} then, {values[1]!r} now"
    for name in earlier["inputs"].keys() | now["inputs"].keys():
        then, new = (record["inputs"].get(name, _ABSENT) for record in (earlier, now))
        other = _other_files(then["files"], new["files"])
        gone = then["files"] and not new["files"] and new is not _ABSENT
        if other:
            changed[name] = f"{name}: {first_of(other, 3)}"
        elif not (_is_same(then["source"], new["source"]) or gone):
            changed[name] = f"{name}: {_shown(then)} then, {_shown(new)} now"
    return changed


def _other_files(then: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Paths of the files whose contents differ; none where either has no files. Hidden files, such
    as .DS_Store, do not count."""
    if not then or not new:
        return []
    digests = [{key: entry["sha256"] for key, entry in files.items()} for files in (then, new)]
    known = (then.keys() | new.keys()) - (set(_LATER_FILES) - then.keys())
    if "" in then:  # earlier records of a file have nothing of what is beside it
        known -= set(tokenizer_file.BESIDE) - then.keys()
    known = {key for key in known if not any(part[:1] == "." for part in key.split("/"))}
    return sorted((new.get(key) or then[key])["path"] for key in known
                  if digests[0].get(key) != digests[1].get(key))


def _is_same(then: str | None, new: str | None) -> bool:
    """Whether two sources are the same; earlier records of a tfds-dir name all of it, or none."""
    if then is not None and new is not None and new.startswith(":"):
        return not then or then.endswith(new)
    return then == new


def _shown(one: Mapping[str, Any]) -> str:
    if one is _ABSENT:
        return "none"
    return ("split " * one["source"].startswith(":")) + one["source"] or "files"


def merged(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """The record `now`, with the earlier entries of inputs whose files are gone."""
    kept = {name: one for name, one in earlier["inputs"].items() if one["files"]
            and not now["inputs"].get(name, _ABSENT)["files"]}
    return {**now, "inputs": {**now["inputs"], **kept}}


def read(path: pathlib.Path) -> dict[str, Any] | None:
    """A record; None where there is none.

    Raises:
      UserError: it is damaged.
    """
    if not path.exists():
        return None
    try:
        record = read_sealed(path)
        differences(record, record)
        return record
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is damaged ({error!r}); restore it, or remove it: then nobody "
                        "knows what the data were made from") from None
