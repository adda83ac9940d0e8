"""The record of the weights that a workdir trains from: WORKDIR/weights.json.

It has the files with the weights of each tower that comes from a source, and of the reranker, as
`rag_jax.data.inputs` has those of the data: contents are compared, and a file of the same size and
time is not read again. Of a source that is a workdir, it has the last checkpoint: the file with the
digests of its arrays.
"""

import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rag_jax import hosts
from rag_jax.config import Config, ConfigError, overrides
from rag_jax.data import inputs
from rag_jax.errors import first_of
from rag_jax.hub import families
from rag_jax.hub import load as hub
from rag_jax.retrieval.json_files import read_sealed, write_sealed
from rag_jax.steps import has_checkpoint, steps_taken
from rag_jax.training import pretrained, workdir

RECORD = "weights.json"


def check(config: Config, path: pathlib.Path, names: Sequence[str], record: bool = True) -> None:
    """Compares the weights of sources with the record of a workdir, before they are read; those of
    which it has nothing are recorded. Process 0 does it, and all processes call it alike.

    Args:
      config: names the sources.
      path: the workdir.
      names: of towers that have a source; families.RERANKER.
      record: False = nothing is recorded.

    Raises:
      ConfigError: a source has changed since something was made from it, or the record is damaged.
    """
    hosts.lead(lambda: _check(config, path, names, record))


def _check(config: Config, path: pathlib.Path, names: Sequence[str], record: bool) -> None:
    earlier = read(path / RECORD) or {}
    sources = {**config.model.sources, families.RERANKER: config.model.reranker.pretrained}
    known = {entry["path"]: entry for one in earlier.values() for entry in one["files"].values()}
    now: dict[str, Any] = {}
    for name in names:
        now[name] = {"source": sources[name], "files": {}}
        for key, file in _files(sources[name], name).items():
            entry = inputs.entry(file, known.get(str(file.absolute())))
            now[name]["files"][key] = known[entry["path"]] = entry  # towers may share a file
    changed = {name: difference for name in names if name in earlier and (
        difference := _difference(earlier[name]["files"], now[name]["files"]))}
    if made := _made_from(path, changed):
        what = "\n".join(f"  {name}, from {sources[name]}: {difference}"
                         for name, difference in changed.items())
        raise ConfigError(
            f"{path}: {', '.join(made)} were made from other weights than there are now:\n{what}\n"
            "restore what has changed, or name another --workdir")
    if record and {**earlier, **now} != earlier:
        write_sealed(path / RECORD, {"sources": {**earlier, **now}})


def _files(source: str, name: str) -> dict[str, pathlib.Path]:
    """The files that say which weights a tower, or the reranker, gets from a source."""
    if not workdir.exists(source):
        return hub.weight_files(source)
    folder = pretrained.folder_of_source(source, name)[0]
    step = steps_taken(folder)
    file = folder / str(step) / "meta" / "metadata"
    return {f"{folder.name}/{step}": file} if file.is_file() else {}


def _difference(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """How two records of a source differ, in words; "" where they do not."""
    other = sorted(key for key in then.keys() & now.keys()
                   if then[key]["sha256"] != now[key]["sha256"])
    lines = {"other content now": other,
             "read then": sorted(then.keys() - now.keys()),
             "read now": sorted(now.keys() - then.keys())}
    return "; ".join(f"{what}: {first_of(keys, 3)}" for what, keys in lines.items() if keys)


def _made_from(path: pathlib.Path, names: Iterable[str]) -> list[str]:
    """What a workdir has that was made from the weights of these: indexes, and runs that began."""
    made, saved = {}, workdir.read(path)
    for name in names:
        if name in pretrained.ENCODERS and any((path / "indexes").glob("[!.]*")):
            made["indexes"] = None
        made |= dict.fromkeys(
            run for run in saved.runs if has_checkpoint(path / run) and (
                name != families.RERANKER or overrides.for_run(saved, run).retrieval.k))
    return list(made)


def read(file: pathlib.Path) -> dict[str, Any] | None:
    """A record, by the names of `check`; None where there is none.

    Raises:
      ConfigError: it is damaged.
    """
    if not file.exists():
        return None
    try:
        record = read_sealed(file)["sources"]
        for one in record.values():
            _difference(one["files"], one["files"])
            for entry in one["files"].values():
                entry["path"], entry["bytes"], entry["mtime_ns"], entry["read_ns"]
        return record
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{file} is damaged ({error!r}); restore it, or remove it: then nobody "
                          "knows whether the weights have changed") from None
