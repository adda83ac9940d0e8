"""A workdir and the configuration that it was started with.

    config.json     of the last command; its `runs` are those of all commands
    RUN/eval.json   `config.eval` of the last command that asked for the run
    STAGE/stopped.json  where a stage last stopped because a number became NaN or infinite

Until the data are prepared, a later command may set any field otherwise: a mistyped path is no
reason for another workdir. After that, `changes` says which. Of runs, those count that have begun,
if any has: another may have been refused.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any

from rag_jax import files, hosts, locks
from rag_jax.config import Config, ConfigError, EvalConfig, config_files, overrides, rules
from rag_jax.config.overrides import value
from rag_jax.data.inputs import RECORD, is_prepared
from rag_jax.lines import is_utf8
from rag_jax.retrieval.json_files import read_sealed, write_sealed
from rag_jax.retrieval.protocol import RetrievalError
from rag_jax.retrieval.versions import POINTER
from rag_jax.steps import has_checkpoint, stages_in
from rag_jax.training import changes


def named(argument: str, given: str | os.PathLike[str]) -> pathlib.Path:
    """The folder that an argument names; ConfigError where it names none."""
    if not isinstance(given, str | os.PathLike) or not os.fspath(given):
        raise ConfigError(f"{argument}={given!r:.60}: expected the name of a folder")
    if not files.can_exist(given):
        raise ConfigError(f"{argument}={given!r:.60}: no folder can have this name, which is too "
                          "long, or has NUL in it; name another")
    return pathlib.Path(given)


def start(config: Config, workdir: pathlib.Path) -> pathlib.Path:
    """Makes the workdir, or checks that it belongs to this configuration; writes config.json.

    Runs add up: those of earlier commands stay in its config.runs, before new ones.

    Process 0 does it for all: other hosts may see later what was written there.

    Raises:
      ConfigError: an earlier command used other values, by name; or a prompt would not be read. In
        other processes than 0 it is a UserError.
    """
    workdir = workdir.absolute()
    hosts.lead(lambda: _start(config, workdir))
    return workdir


def _start(config: Config, workdir: pathlib.Path) -> None:
    """`start` of process 0."""
    _check_folder(workdir)
    file, began = workdir / "config.json", False
    if file.exists():
        earlier = read(workdir)
        began = is_prepared(workdir) or bool(stages_in(workdir))
        if overrides.lexical(config) and began:
            kept = {name: getattr(earlier.model, name) for name in changes.ENCODER_SECTIONS}
            config = dataclasses.replace(config, model=dataclasses.replace(config.model, **kept))
        config = overrides.replace(config, {
            name: value(earlier, name) for name in overrides.differences(earlier, config)
            if overrides.set_by_runs(config, name)})
        # Of a run that was refused before it began, nothing depends on its fields.
        begun = tuple(run for run in earlier.runs if _has_begun(workdir, run))
        judged = dataclasses.replace(earlier, runs=begun or earlier.runs)
        refused = [name for name in overrides.differences(earlier, config)
                   if began and not overrides.set_by_runs(judged, name)
                   and not changes.may_change(name, judged, workdir)]
        if refused:
            shown = "\n".join(f"  config.{name}: {value(earlier, name)!r} there, "
                              f"{value(config, name)!r} now" for name in refused)
            moved = "; at the old name of a folder that has moved, a link to it will do" * any(
                name.endswith(".pretrained") for name in refused)
            raise ConfigError(f"{workdir} was started with another configuration:\n{shown}\n"
                              "use the same values (--config and fields of the command before), or "
                              f"another --workdir{moved}")
        config = dataclasses.replace(
            config, runs=tuple(dict.fromkeys((*earlier.runs, *config.runs))))
    elif stages_in(workdir):
        hosts.warn(f"{workdir} has checkpoints, and its config.json is missing: they are taken to "
                   "be of this configuration")
    if not began:
        rules.check_prompt(config)
        rules.check_labels(config)
    workdir.mkdir(parents=True, exist_ok=True)
    write(config, file)


def write(config: Config, file: pathlib.Path) -> None:
    """Writes the configuration of a workdir, with the digest of its content."""
    write_sealed(file, dataclasses.asdict(config))


def check_place(workdir: pathlib.Path) -> None:
    """Refuses a folder that is no workdir before anything is written into it.

    Raises:
      FolderError: there are files in it, and none are a workdir's.
      ConfigError: its config.json is damaged.
    """
    _check_folder(workdir)
    if (workdir / "config.json").is_file():
        read(workdir)
    else:  # a user may copy the data there first, and rag_jax.ingest writes its index first
        files.check_own(workdir, (f"data/{RECORD}", f"index/{POINTER}"))


def _check_folder(workdir: pathlib.Path) -> None:
    """Raises a ConfigError where the workdir, or a folder above it, is a file or a link to nowhere,
    or where its name is not UTF-8, which readers of tokenizers and tables need."""
    if not is_utf8(str(workdir.absolute())):
        raise ConfigError(f"--workdir={workdir}: the name is not UTF-8; name another folder")
    for path in (workdir, *workdir.parents):
        if what := files.in_the_way(path):
            raise ConfigError(f"--workdir={workdir}: {what}; name another")


def exists(path: str | pathlib.Path) -> bool:
    """Whether a folder is a workdir: its config.json is one of this package."""
    try:
        content = (pathlib.Path(path) / "config.json").read_bytes()
    except (OSError, ValueError):  # ValueError: NUL in the path
        return False
    # It is not parsed: a workdir with a damaged one is a workdir, and `read` names the damage.
    return b'"retriever_warmup"' in content or b'"generator_warmup"' in content


def is_checkpoint(folder: pathlib.Path) -> bool:
    """Whether the config.json of a folder is one of Hugging Face."""
    return not exists(folder) and b'"architectures"' in (folder / "config.json").read_bytes()


@contextlib.contextmanager
def writing(path: pathlib.Path) -> Iterator[None]:
    """Keeps other processes from writing into the workdir that a path is in, and into that which
    what it links to is in, if they are in one.

    Raises:
      InUseError: another process writes there; the message names it.
    """
    target = pathlib.Path(os.path.realpath(path))
    workdirs = {next(filter(exists, one.parents), None) for one in (path, target)} - {None}
    with contextlib.ExitStack() as stack:
        for workdir in sorted(workdirs):  # all processes of a job in one order
            stack.enter_context(locks.exclusive(workdir))
        yield


def read(workdir: pathlib.Path) -> Config:
    """The configuration of a trained workdir.

    Raises:
      ConfigError: there is no config.json, it is Hugging Face's, or it is damaged.
    """
    _check_folder(workdir)
    file = workdir / "config.json"
    if not file.is_file():
        what = "no config.json" if workdir.is_dir() else "there is no such folder"
        raise ConfigError(f"{workdir}: {what}; name a workdir of rag_jax.train or rag_jax.ingest")
    if is_checkpoint(workdir):
        raise ConfigError(
            f"{workdir}: is a checkpoint of Hugging Face, and no workdir. Without --workdir, "
            f"name it as config.model.rag.pretrained={workdir} (or .retriever.pretrained, "
            ".generator.pretrained), the encoder of passages, and --index; in Python "
            f"rag_jax.load({str(workdir)!r}, index=...)")
    return _read(file)


def _read(file: pathlib.Path, **others: Any) -> Config:
    """The configuration in a file, with `others` for the sections that it leaves out."""
    try:
        return config_files.from_json(json.dumps({**others, **read_sealed(file)}))
    except (ConfigError, RetrievalError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{file} is damaged, or not of this version ({error}); restore it, or "
                          "train in another --workdir") from None


def run_of(workdir: pathlib.Path, config: Config, named: str | None = None) -> str:
    """The run that a command names, else the first of config.runs that has begun.

    Raises:
      ConfigError: the workdir has no run of that name.
    """
    if named is None:
        return next((run for run in config.runs if _has_begun(workdir, run)), config.runs[0])
    if named not in config.runs:
        raise ConfigError(f"{named!r} is no run: {workdir} has the runs {', '.join(config.runs)}")
    return named


def _has_begun(workdir: pathlib.Path, run: str) -> bool:
    return (workdir / run / "eval.json").is_file() or has_checkpoint(workdir / run)


def read_run(workdir: pathlib.Path, named: str | None = None) -> Config:
    """The configuration of the run that `run_of` returns, with the `eval_of` that run."""
    config = read(workdir)
    run = run_of(workdir, config, named)
    return dataclasses.replace(overrides.for_run(config, run), eval=eval_of(workdir, run))


def begin_run(workdir: pathlib.Path, run: str, how: EvalConfig) -> None:
    """Writes the run's `config.eval`: a later command may evaluate other runs by other settings."""
    (workdir / run).mkdir(exist_ok=True)
    write_sealed(workdir / run / "eval.json", {"eval": dataclasses.asdict(how)})


def eval_of(workdir: pathlib.Path, run: str) -> EvalConfig:
    """The `config.eval` of a run, of which a command may set fields otherwise."""
    file = workdir / run / "eval.json"
    if not file.exists():
        return _read(workdir / "config.json").eval
    # The file has no other section, so the family of generators is one that allows every field.
    return _read(file, model={"generator": {"family": "causal"}}).eval
