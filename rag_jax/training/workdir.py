"""A workdir and the configuration that it was started with.

    config.json     of the last command; its `runs` are those of all commands
    RUN/eval.json   `config.eval` of the last command that asked for the run
    STAGE/stopped.json  where a stage last stopped because a number became NaN or infinite

Until the data are prepared, a later command may change any field: a mistyped path is no reason for
another workdir. After that, it may change
  - the fields of UNTIL_MADE, until a stage or an index is made of the data;
  - the fields of CHANGEABLE;
  - the fields of a stage until its first checkpoint;
  - the fields of RATES of a stage that stopped because a number became NaN or infinite, until its
    next checkpoint;
  - ENCODER_SECTIONS, if no run has an encoder, and nothing was made by one. A command whose runs
    have none keeps those of the workdir.

Of runs, those count that have begun, if any has: another may have been refused.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
from typing import Any

from rag_jax import config_files, files, hosts, locks, overrides, rules
from rag_jax.config import RUNS, Config, ConfigError, EvalConfig
from rag_jax.data.inputs import RECORD, is_prepared
from rag_jax.lines import is_utf8
from rag_jax.overrides import value
from rag_jax.retrieval.json_files import read_sealed, write_sealed
from rag_jax.retrieval.protocol import RetrievalError
from rag_jax.retrieval.versions import POINTER
from rag_jax.steps import has_checkpoint, last_step, made_of_data, stages_in, steps_taken

# Fields that a later command on the same workdir may always change.
CHANGEABLE = ("runs", "tensorboard", "data.data_dir", "data.length_buckets", "eval.", "mesh.",
              "train.keep", "train.collapse_guard", "retrieval.embed_batch_size",
              "retrieval.capacity",
              *(f"{stage}.{name}" for stage in ("train", "retriever_warmup", "generator_warmup")
                for name in ("log_every", "optimizer.update_ratios")),
              "model.generator.dtype", "model.retriever.dtype", "model.reranker.dtype",
              "model.generator.remat", "model.retriever.remat", "model.generator.fused_attention",
              "model.retriever.fused_attention", "model.generator.logit_chunk")

# Fields that are read in training alone: a command that opens the workdir may not change them.
TRAINED_WITH = ("data.passages", "data.train", "data.dev", "data.test", "data.generator_vocab",
                "data.retriever_vocab", "data.world_", "data.fictional_countries",
                "retriever_warmup.", "generator_warmup.")
# Fields of config.model that runs which retrieve by words neither read nor resolve.
ENCODER_SECTIONS = ("retriever", "query_encoder", "document_encoder")
ENCODERS = tuple(f"model.{section}." for section in ENCODER_SECTIONS)
# What an index of words holds.
WORDS = ("retrieval.bm25_k1", "retrieval.bm25_b", "retrieval.bm25_language")
# What a trained model is; but the fields CHANGEABLE and these, with which it may be opened at will.
MODEL = (*ENCODERS, "model.generator.", "model.rag.", "model.null_document.",
         "train.document_encoder.", "data.generator_tokenizer.", "data.retriever_tokenizer.")
NOT_TRAINED = ("param_dtype", "dropout", "attention_dropout", "activation_dropout", "init_std",
               "position_init", "start_token", "end_tokens")

# Prefix of a field -> the folder of the first stage that reads it; None = the folders of runs.
FIRST_READ_BY = {"retriever_warmup.": "retriever", "generator_warmup.": "generator",
                 "train.": None, "retrieval.k": None, "retrieval.staleness": None}
# Fields on which only data depend until something is made of them: data are compared with these,
# except NOT_COMPARED, and made again.
UNTIL_MADE = ("model.", "retrieval.", "retriever_warmup.", "generator_warmup.", "train.")
NOT_COMPARED = ("model.head", "model.generator.family")
# Fields that a stopped stage may change: the optimiser's state does not depend on them.
RATES = ("optimizer.learning_rate", "optimizer.warmup_steps", "optimizer.end_fraction")


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
            kept = {name: getattr(earlier.model, name) for name in ENCODER_SECTIONS}
            config = dataclasses.replace(config, model=dataclasses.replace(config.model, **kept))
        config = overrides.replace(config, {
            name: value(earlier, name) for name in overrides.differences(earlier, config)
            if overrides.set_by_runs(config, name)})
        # Of a run that was refused before it began, nothing depends on its fields.
        begun = tuple(run for run in earlier.runs if _has_begun(workdir, run))
        judged = dataclasses.replace(earlier, runs=begun or earlier.runs)
        changed = [name for name in overrides.differences(earlier, config)
                   if began and not overrides.set_by_runs(judged, name)
                   and not _may_change(name, judged, workdir)]
        if changed:
            shown = "\n".join(f"  config.{name}: {value(earlier, name)!r} there, "
                              f"{value(config, name)!r} now" for name in changed)
            raise ConfigError(f"{workdir} was started with another configuration:\n{shown}\n"
                              "use the same values, or another --workdir")
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
    """Raises a ConfigError where the workdir, or a folder above it, is a file, or where its name is
    not UTF-8, which readers of tokenizers and tables need."""
    if not is_utf8(str(workdir.absolute())):
        raise ConfigError(f"--workdir={workdir}: the name is not UTF-8; name another folder")
    for path in (workdir, *workdir.parents):
        if path.exists() and not path.is_dir():
            raise ConfigError(f"--workdir={workdir}: {path} is a file, not a folder; name another")


def _may_change(name: str, earlier: Config, workdir: pathlib.Path) -> bool:
    """Whether a command may change a field of a workdir that has begun with `earlier`."""
    if name == "eval.labels" and earlier.classes:
        return False
    if name.startswith(CHANGEABLE):
        return True
    # Links lead to another workdir's data, which are not compared here.
    linked = any((workdir / data).is_symlink() for data in ("data", "data/memories"))
    if name.startswith(UNTIL_MADE) and name not in NOT_COMPARED and not linked and (
            not made_of_data(workdir)):
        return True
    if overrides.lexical(earlier) and name.startswith(ENCODERS):
        return not has_checkpoint(workdir / "retriever") and not any(
            (workdir / "indexes").glob("[!.]*"))
    prefix = next((prefix for prefix in FIRST_READ_BY if name.startswith(prefix)), None)
    if prefix is None:
        return False
    stage = FIRST_READ_BY[prefix]
    readers = [run for run in earlier.runs if name not in RUNS[run].sets]
    folders = [workdir / folder for folder in (readers if stage is None else (stage,))]
    begun = [folder for folder in folders if has_checkpoint(folder)]
    if not name.removeprefix(prefix).startswith(RATES):
        return not begun
    last = value(earlier, f"{prefix}steps")
    unfinished = [folder for folder in begun if steps_taken(folder) < last]
    stopped = [folder for folder in folders if has_stopped(folder)]
    return not begun or bool(stopped) and set(unfinished) <= set(stopped)


def check_trained_with(config: Config, trained: Config, workdir: pathlib.Path,
                       *further: str) -> None:
    """Raises ConfigError where a field of TRAINED_WITH or `further`, a prompt that is not read, or
    what a tower is, differs from what a workdir was trained with."""
    for name in overrides.differences(trained, config):
        asked = (f"config.{name}={overrides.shown(value(config, name))}: {workdir} was trained "
                 f"with {overrides.shown(value(trained, name)) or '(none)'}")
        unread = name == "data.prompt" and not config.prompted
        if unread or name.startswith((*TRAINED_WITH, *further)):
            raise ConfigError(
                f"{asked}, and this would change nothing; other questions are named with "
                "--questions, in Python evaluate(FILE), other passages with --index")
        may = name.startswith(CHANGEABLE) or name.rpartition(".")[2] in NOT_TRAINED or (
            overrides.lexical(config) and name.startswith(ENCODERS))
        words = name == "retrieval.retriever" and overrides.lexical(config) != (
            overrides.lexical(trained))
        if words or f"{name}.".startswith(MODEL) and not may:
            raise ConfigError(f"{asked}, and would be another model; leave the field out, or train "
                              "with it in another workdir")


def check_classes(config: Config, trained: tuple[str, ...], path: pathlib.Path) -> Config:
    """Raises ConfigError for other classes than a model was trained with."""
    if config.classes != trained:
        raise ConfigError(f"config.eval.labels: {path} was trained with the classes "
                          f"{', '.join(trained) or '(none)'}; leave config.eval.labels and "
                          "config.model.head as they are")
    return config


def check_weight(config: Config, trained: Config, path: pathlib.Path) -> None:
    """Raises ConfigError for another weight of words, or another way of joining their scores, where
    a run has learned its own.

    trained: the configuration of its training.
    """
    if trained.train.bm25_weight_rate is None:
        return
    for name in overrides.differences(trained, config):
        if name in ("retrieval.retriever", "retrieval.fusion", "retrieval.bm25_weight",
                    "train.bm25_weight_rate"):
            raise ConfigError(f"config.{name}={overrides.shown(value(config, name))}: "
                              f"{path} has learned its weight of words; leave it at "
                              f"{overrides.shown(value(trained, name))}, and use --choose-weight "
                              "of evaluate, Rag.choose_weight in Python, for a fixed weight")


def stop(folder: pathlib.Path, step: int, why: str, checkpoint: int | None) -> None:
    """Records that a stage stopped at a step because a number became NaN or infinite.

    checkpoint: the step of its last checkpoint; None = it has none.
    """
    write_sealed(folder / "stopped.json",
                 {"step": step, "why": why, "checkpoint": checkpoint})


def has_stopped(folder: pathlib.Path) -> bool:
    """Whether `stop` was called for a stage that has saved no checkpoint since.

    Raises:
      RetrievalError: stopped.json is damaged.
    """
    file = folder / "stopped.json"
    if not file.is_file():
        return False
    kept = read_sealed(file).get("checkpoint")
    return last_step(folder) == kept


def exists(path: str | pathlib.Path) -> bool:
    """Whether a folder is a workdir: its config.json is one of this package."""
    try:
        content = (pathlib.Path(path) / "config.json").read_bytes()
    except (OSError, ValueError):  # ValueError: NUL in the path
        return False
    # It is not parsed: a workdir with a damaged one is a workdir, and `read` names the damage.
    return b'"retriever_warmup"' in content or b'"generator_warmup"' in content


def writing(path: pathlib.Path) -> contextlib.AbstractContextManager[None]:
    """Keeps other processes from writing into the workdir that a path is in, if it is in one.

    Raises:
      InUseError: another process writes there; the message names it.
    """
    workdir = next((folder for folder in path.parents if exists(folder)), None)
    return locks.exclusive(workdir) if workdir else contextlib.nullcontext()


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
    if not exists(workdir) and b'"architectures"' in file.read_bytes():
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
