"""A workdir and the configuration that it was started with.

    config.json     of the last command; its `runs` are those of all commands
    RUN/eval.json   `config.eval` of the last command that asked for the run
    STAGE/stopped.json  where a stage last stopped because its numbers were finite no more

Until its data are there, a later command may set any field otherwise: a mistyped path is no reason
for another workdir. From then on, it may set those of CHANGEABLE; the fields of a stage until its
first checkpoint; of a stage that has stopped because its numbers were finite no more, those of
RATES until its next checkpoint; and ENCODERS where no run, or none of the command, has one: the
others' are kept.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from rag_jax import config_files, files, hosts, locks, overrides, rules
from rag_jax.config import Config, ConfigError, EvalConfig
from rag_jax.data.inputs import RECORD, is_prepared
from rag_jax.overrides import value
from rag_jax.retrieval.json_files import read_sealed, write_sealed
from rag_jax.retrieval.protocol import RetrievalError
from rag_jax.retrieval.versions import POINTER

# What may differ from the configuration of an earlier command on the same workdir.
CHANGEABLE = ("runs", "tensorboard", "data.data_dir", "data.length_buckets", "eval.", "mesh.",
              "train.log_every", "train.keep", "train.collapse_guard", "retriever_warmup.log_every",
              "generator_warmup.log_every", "model.generator.dtype", "model.retriever.dtype",
              "model.reranker.dtype", "model.generator.remat", "model.retriever.remat",
              "model.generator.fused_attention", "model.retriever.fused_attention",
              "model.generator.logit_chunk")

# What was read when a workdir was trained: set otherwise afterwards, it would change nothing.
TRAINED_WITH = ("data.passages", "data.train", "data.dev", "data.test", "data.generator_vocab",
                "data.retriever_vocab", "retriever_warmup.", "generator_warmup.")

# Of config.model: read by no run that retrieves by words, for which they are not resolved either.
ENCODERS = ("retriever", "query_encoder", "document_encoder")
# By prefix of a field, the folder of the stage that is the first to read it; None = those of runs.
FIRST_READ_BY = {"retriever_warmup.": "retriever", "generator_warmup.": "generator",
                 "train.": None, "retrieval.k": None, "retrieval.staleness": None}
# What a stopped stage may change: its optimiser's state fits whatever they are.
RATES = ("optimizer.learning_rate", "optimizer.warmup_steps", "optimizer.end_fraction")


def named(argument: str, given: str | os.PathLike[str]) -> pathlib.Path:
    """A folder that an argument names."""
    if not isinstance(given, str | os.PathLike) or not os.fspath(given):
        raise ConfigError(f"{argument}={given!r:.60}: expected the name of a folder")
    return pathlib.Path(given)


def start(config: Config, workdir: pathlib.Path) -> pathlib.Path:
    """Makes the workdir, or checks that it belongs to this configuration; writes config.json.

    Runs add up: those of earlier commands stay in its config.runs, before new ones.

    Raises:
      ConfigError: an earlier command used other values, by name; or nobody would read a prompt.
    """
    workdir = workdir.absolute()
    _check_folder(workdir)
    file, began = workdir / "config.json", False
    if file.exists():
        earlier = read(workdir)
        began = is_prepared(workdir) or any(map(_steps, workdir.iterdir()))
        if overrides.lexical(config) and began:
            kept = {name: getattr(earlier.model, name) for name in ENCODERS}
            config = dataclasses.replace(config, model=dataclasses.replace(config.model, **kept))
        config = overrides.replace(config, {
            name: value(earlier, name) for name in overrides.differences(earlier, config)
            if overrides.set_by_runs(config, name)})
        changed = [name for name in overrides.differences(earlier, config)
                   if began and not overrides.set_by_runs(earlier, name)
                   and not _may_change(name, earlier, workdir)]
        if changed:
            shown = "\n".join(f"  config.{name}: {value(earlier, name)!r} there, "
                              f"{value(config, name)!r} now" for name in changed)
            raise ConfigError(f"{workdir} was started with another configuration:\n{shown}\n"
                              "use the same values, or another --workdir")
        config = dataclasses.replace(
            config, runs=tuple(dict.fromkeys((*earlier.runs, *config.runs))))
    if not began:
        rules.check_prompt(config)
    workdir.mkdir(parents=True, exist_ok=True)
    hosts.lead(lambda: write(config, file))
    return workdir


def write(config: Config, file: pathlib.Path) -> None:
    """Writes the configuration of a workdir, with the digest of its content."""
    write_sealed(file, dataclasses.asdict(config))


def check_place(workdir: pathlib.Path) -> None:
    """Refuses a folder of others before anything is written into it.

    Raises:
      FolderError: there are files in it, and none of a workdir.
      ConfigError: its config.json is damaged.
    """
    _check_folder(workdir)
    if (workdir / "config.json").is_file():
        read(workdir)
    else:  # data may be copied first, and rag_jax.ingest begins with its index
        files.check_own(workdir, (f"data/{RECORD}", f"index/{POINTER}"))


def _check_folder(workdir: pathlib.Path) -> None:
    """Raises a ConfigError where the workdir, or a folder above it, is a file."""
    for path in (workdir, *workdir.parents):
        if path.exists() and not path.is_dir():
            raise ConfigError(f"--workdir={workdir}: {path} is a file, not a folder; name another")


def _may_change(name: str, earlier: Config, workdir: pathlib.Path) -> bool:
    if name == "eval.labels" and earlier.classes:
        return False
    if name.startswith(CHANGEABLE):
        return True
    if overrides.lexical(earlier) and name.startswith(tuple(f"model.{e}." for e in ENCODERS)):
        return True
    for prefix, stage in FIRST_READ_BY.items():
        if name.startswith(prefix):
            folders = [workdir / run for run in earlier.runs] if stage is None else [
                workdir / stage]
            begun = [folder for folder in folders if _steps(folder)]
            if not name.removeprefix(prefix).startswith(RATES):
                return not begun
            last = value(earlier, "train.steps" if stage is None else prefix + "steps")
            unfinished = [folder for folder in begun if steps_taken(folder) < last]
            stopped = [folder for folder in folders if has_stopped(folder)]
            return not begun or bool(stopped) and set(unfinished) <= set(stopped)
    return False


def check_trained_with(config: Config, trained: Config, workdir: pathlib.Path,
                       *further: str) -> None:
    """Raises ConfigError where a field of TRAINED_WITH, or another one, is not as a workdir was
    trained; and where the prompt is not, if none is read."""
    for name in overrides.differences(trained, config):
        unread = name == "data.prompt" and not config.prompted
        if unread or name.startswith((*TRAINED_WITH, *further)):
            raise ConfigError(
                f"config.{name}={overrides.shown(value(config, name))}: {workdir} was trained with "
                f"{overrides.shown(value(trained, name)) or '(none)'}, and this would change "
                "nothing; other questions are named with --questions, in Python evaluate(FILE), "
                "other passages with --index")


def check_classes(config: Config, trained: tuple[str, ...], path: pathlib.Path) -> Config:
    """Raises ConfigError for other classes than a model was trained with."""
    if config.classes != trained:
        raise ConfigError(f"config.eval.labels: {path} was trained with the classes "
                          f"{', '.join(trained) or '(none)'}; leave config.eval.labels and "
                          "config.model.head as they are")
    return config


def check_weight(config: Config, began: float, path: pathlib.Path) -> None:
    """Raises ConfigError for another weight of words where a run has learned it, from `began`."""
    weight = config.retrieval.bm25_weight
    if config.train.bm25_weight_rate is not None and weight != began:
        raise ConfigError(f"config.retrieval.bm25_weight={weight:g}: {path} has learned its "
                          f"weight, from {began:g} on; leave it as it is, and use "
                          f"--choose-weight={weight:g} of evaluate, Rag.choose_weight in Python, "
                          "for a fixed one")


def _steps(folder: pathlib.Path) -> list[int]:
    """The checkpoints of a stage."""
    return [int(path.name) for path in folder.glob("[0-9]*") if path.name.isdigit()]


def steps_taken(folder: pathlib.Path) -> int:
    """Those of the last checkpoint of a stage; 0 without one."""
    return max(_steps(folder), default=0)


def stop(folder: pathlib.Path, step: int, why: str, checkpoint: int | None) -> None:
    """Notes that a stage stopped at a step because its numbers were finite no more.

    checkpoint: its last one.
    """
    write_sealed(folder / "stopped.json",
                 {"step": step, "why": why, "checkpoint": checkpoint})


def has_stopped(folder: pathlib.Path) -> bool:
    """Whether a stage stopped so, and has saved nothing since.

    Raises:
      RetrievalError: the note of it is damaged.
    """
    file = folder / "stopped.json"
    if not file.is_file():
        return False
    kept = read_sealed(file).get("checkpoint")
    return max(_steps(folder), default=None) == kept


def exists(path: str | pathlib.Path) -> bool:
    """Whether a folder is a workdir: its config.json is one of this package."""
    try:
        content = (pathlib.Path(path) / "config.json").read_bytes()
    except OSError:
        return False
    # Not as JSON: that of a workdir may be damaged, and `read` says so.
    return b'"retriever_warmup"' in content or b'"generator_warmup"' in content


def writing(path: pathlib.Path) -> contextlib.AbstractContextManager[None]:
    """Keeps others from writing into the workdir that a path is in, if it is in one.

    Raises:
      InUseError: another process writes there; it is named.
    """
    around = [folder for folder in path.parents if exists(folder)]
    return locks.exclusive(around[0]) if around else contextlib.nullcontext()


def read(workdir: pathlib.Path) -> Config:
    """The configuration of a trained workdir.

    Raises:
      ConfigError: there is none, it is of Hugging Face, or it is damaged.
    """
    _check_folder(workdir)
    file = workdir / "config.json"
    if not file.is_file():
        raise ConfigError(f"{workdir}: no config.json; name a workdir of rag_jax.train "
                          f"(python -m rag_jax.train --workdir={workdir})")
    if not exists(workdir) and b'"architectures"' in file.read_bytes():
        raise ConfigError(
            f"{workdir}: is a checkpoint of Hugging Face, and no workdir. Without --workdir, "
            f"name it as config.model.rag.pretrained={workdir} (or .retriever.pretrained, "
            ".generator.pretrained), the encoder of passages, and --index; in Python "
            f"rag_jax.load({str(workdir)!r}, index=...)")
    return _read(file)


def _read(file: pathlib.Path, others: Mapping[str, Any] = {}) -> Config:  # noqa: B006 (not changed)
    try:
        return config_files.from_json(json.dumps({**others, **read_sealed(file)}))
    except (ConfigError, RetrievalError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{file} is damaged, or not of this version ({error}); restore it, or "
                          "train in another --workdir") from None


def run_of(workdir: pathlib.Path, config: Config, named: str | None = None) -> str:
    """The run that a command means: the one it names, else the first of config.runs that began.

    Raises:
      ConfigError: the workdir has no run of that name.
    """
    if named is None:
        began = (run for run in config.runs
                 if (workdir / run / "eval.json").is_file() or _steps(workdir / run))
        return next(began, config.runs[0])
    if named not in config.runs:
        raise ConfigError(f"{named!r} is no run: {workdir} has the runs {', '.join(config.runs)}")
    return named


def read_run(workdir: pathlib.Path, named: str | None = None) -> Config:
    """The configuration of the run that `run_of` finds, answering as it was last trained to."""
    config = read(workdir)
    run = run_of(workdir, config, named)
    return dataclasses.replace(overrides.for_run(config, run), eval=eval_of(workdir, run))


def begin_run(workdir: pathlib.Path, run: str, how: EvalConfig) -> None:
    """Keeps how the run is evaluated: a later command may evaluate another one otherwise."""
    (workdir / run).mkdir(exist_ok=True)
    write_sealed(workdir / run / "eval.json", {"eval": dataclasses.asdict(how)})


def eval_of(workdir: pathlib.Path, run: str) -> EvalConfig:
    """How a run is evaluated, unless a command sets other values."""
    file = workdir / run / "eval.json"
    if not file.exists():
        return _read(workdir / "config.json").eval
    # By itself: a family of generators that allows every field of it stands in for the run's own.
    return _read(file, {"model": {"generator": {"family": "causal"}}}).eval
