"""Reading configurations: files, single fields from the command line, checks, JSON.

A config file is python with `get_config() -> Config`; flags override single fields:

    python -m rag_jax.train --config=configs/quickstart.py --config.train.steps=100

`None` is written as `none`, tuples with commas.
"""

import contextlib
import dataclasses
import importlib.util
import inspect
import json
import os
import pathlib
import sys
import traceback
import types
import typing
from typing import Any, Literal

from rag_jax.config import PRESETS, RUNS, Config, ConfigError
from rag_jax.errors import UserError, near_matches

# The config files that are shipped: a wheel has them inside the package, a checkout beside it.
_HERE = pathlib.Path(__file__).absolute().parent
CONFIGS = next((folder for folder in (_HERE / "configs", _HERE.parent / "configs")
                if folder.is_dir()), _HERE / "configs")
# Fields of earlier versions and what is in their place: the config.json of a workdir may have them.
REMOVED = {
    "model.kind": "the run decides it; set config.runs, to rag_sequence for example",
    **{f"retriever_warmup.{name}": f"it did nothing there; set config.generator_warmup.{name}"
       for name in ("mask_ratio", "span_length", "permute_sentences")},
    "generator_warmup.hard_negatives":
        "it did nothing there; set config.retriever_warmup.hard_negatives",
}


def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def fields(cls: type = Config, prefix: str = "") -> dict[str, tuple[Any, Any, str]]:
    """Every leaf field: dotted name -> (type, default, help text)."""
    found: dict[str, tuple[Any, Any, str]] = {}
    hints = _hints(cls)
    for f in dataclasses.fields(cls):
        if dataclasses.is_dataclass(hints[f.name]):
            found |= fields(hints[f.name], f"{prefix}{f.name}.")
        else:
            found[prefix + f.name] = (hints[f.name], f.default, f.metadata["doc"])
    return found


def type_name(hint: Any) -> str:
    """How `--help` and errors write a field's type."""
    if typing.get_origin(hint) is Literal:
        return "|".join(typing.get_args(hint))
    if isinstance(hint, types.UnionType):
        return "|".join("none" if a is type(None) else type_name(a)
                        for a in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return f"{type_name(typing.get_args(hint)[0])},..."
    return hint.__name__


def _parse(hint: Any, text: str) -> Any:
    """`text` from the command line as a value of type `hint`; ValueError when it is none."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(hint, types.UnionType):
        if text.lower() == "none":
            return None
        return _parse(next(a for a in arguments if a is not type(None)), text)
    if origin is Literal:
        if text not in arguments:
            raise ValueError(near_matches(text, arguments))
        return text
    if origin is tuple:
        return tuple(_parse(arguments[0], part) for part in text.split(",") if part)
    if hint is bool:
        if text.lower() not in ("true", "false", "1", "0"):
            raise ValueError("true or false")
        return text.lower() in ("true", "1")
    return hint(text)


def _accepts(hint: Any, value: Any) -> bool:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(hint, types.UnionType):
        return any(_accepts(a, value) for a in arguments)
    if origin is Literal:
        return value in arguments
    if origin is tuple:
        return isinstance(value, tuple) and all(_accepts(arguments[0], v) for v in value)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(value, hint) and not (hint is int and isinstance(value, bool))


def replace(config: Any, overrides: dict[str, Any], path: str = "config") -> Any:
    """A copy of `config` with dotted fields replaced; strings are parsed to the field's type.

    A model section can be set to the name of a preset.

    Raises:
      ConfigError: an unknown field or a value of another type, with near matches.
    """
    for dotted, value in overrides.items():
        name, _, rest = dotted.partition(".")
        hints = _hints(type(config))
        removed = f"{path}.{dotted}".removeprefix("config.")
        if removed in REMOVED:
            raise ConfigError(f"config.{removed}: no field any more: {REMOVED[removed]}")
        if name not in hints:
            raise ConfigError(f"{path}.{name}: no such field; {near_matches(name, hints)}")
        hint, where = hints[name], f"{path}.{name}"
        if rest:
            if not dataclasses.is_dataclass(hint):
                raise ConfigError(f"{where} is a single value and has no field {rest!r}")
            new = replace(getattr(config, name), {rest: value}, where)
        elif hint in PRESETS and value in PRESETS[hint]:
            new = PRESETS[hint][value]
        elif dataclasses.is_dataclass(hint):
            presets = f" or be one of {', '.join(PRESETS[hint])}" if hint in PRESETS else ""
            raise ConfigError(f"{where}={value!r}: a section; set its fields ({where}.NAME=...)"
                              f"{presets}")
        else:
            new = value
            if isinstance(value, str) and not _accepts(hint, value):
                try:
                    new = _parse(hint, value)
                except ValueError as error:
                    raise ConfigError(
                        f"{where}={value!r}: expected {type_name(hint)} ({error})") from None
        config = dataclasses.replace(config, **{name: new})
    return config


def _problems(config: Any, path: str = "config") -> typing.Iterator[str]:
    hints = _hints(type(config))
    for f in dataclasses.fields(config):
        value, where = getattr(config, f.name), f"{path}.{f.name}"
        if dataclasses.is_dataclass(hints[f.name]):
            if isinstance(value, hints[f.name]):
                yield from _problems(value, where)
            else:
                yield (f"{where}: a {type(value).__name__}; expected "
                       f"{hints[f.name].__name__}(...)")
        elif not _accepts(hints[f.name], value):
            yield f"{where}={value!r}: expected {type_name(hints[f.name])}"
        elif value is not None:
            least, most = f.metadata["at_least"], f.metadata["at_most"]
            if least is not None and not value >= least:
                yield f"{where}={value!r}: must be at least {least}"
            elif most is not None and not value <= most:
                yield f"{where}={value!r}: must be at most {most}"


def _conflicts(config: Config, resolved: bool) -> typing.Iterator[str]:
    data, model = config.data, config.model
    for run in config.runs:
        if run not in RUNS:
            yield f"config.runs: no run {run!r}; {near_matches(run, RUNS)}"
        else:
            yield from _run_conflicts(for_run(config, run), run)
    if not config.runs or len(set(config.runs)) < len(config.runs):
        yield "config.runs: name at least one run, each once"
    named = [name for name in ("passages", "train", "dev", "test") if getattr(data, name)]
    missing = [name for name in ("passages", "train", "dev") if name not in named]
    if named and missing:
        yield (f"config.data.{named[0]} is set but config.data.{missing[0]} is empty: own data "
               "need passages, train and dev; the countries that are shipped need none of them")
    for name, tower in (("retriever", model.retriever), ("generator", model.generator)):
        if tower.width % tower.heads and not tower.pretrained:
            yield (f"config.model.{name}.heads={tower.heads}: must divide "
                   f"config.model.{name}.width={tower.width}")
    decoder_heads = model.generator.decoder_heads
    if decoder_heads and model.generator.width % decoder_heads and not model.generator.pretrained:
        yield (f"config.model.generator.decoder_heads={decoder_heads}: must divide "
               f"config.model.generator.width={model.generator.width}")
    encoders = {"query_encoder", "document_encoder"} & set(model.sources)
    if len(encoders) == 1 and not lexical(config):
        missing = ({"query_encoder", "document_encoder"} - encoders).pop()
        yield (f"config.model.{missing}.pretrained: the other encoder comes from "
               f"{model.sources[encoders.pop()]!r}; name this one too (a RAG checkpoint holds no "
               "document encoder: facebook/dpr-ctx_encoder-single-nq-base fits the released ones)")
    read_by = []
    if resolved or not encoders:
        read_by += [(model.retriever, ("max_question_length", "max_passage_length"))]
    if resolved or "generator" not in model.sources:
        classified = ("max_question_length",) * (model.head == "classification")
        read_by += [(model.generator, ("max_source_length", "max_target_length", *classified))]
    for tower, names in read_by:
        for name in names:
            if getattr(data, name) > tower.max_positions:
                yield (f"config.data.{name}={getattr(data, name)}: the model has "
                       f"{tower.max_positions} positions (max_positions)")
    if model.head != "none" and len(config.eval.labels) < 2:
        yield (f"config.eval.labels: config.model.head={model.head} chooses among them; name the "
               "classes, two or more, as the data's answers do")
    for name in ("train", "generator_warmup"):
        stage = getattr(config, name)
        if stage.batch_size % stage.optimizer.accumulate:
            yield (f"config.{name}.batch_size={stage.batch_size}: must be a multiple of "
                   f"optimizer.accumulate={stage.optimizer.accumulate}")
    if config.retrieval.where == "device" and config.retrieval.staleness:
        yield (f"config.retrieval.staleness={config.retrieval.staleness}: with "
               "config.retrieval.where=device the step retrieves for itself; set 0")
    if config.train.document_encoder == "refresh" and (
            config.retrieval.where != "device" or not config.retrieval.k):
        yield ("config.train.document_encoder=refresh: the passages are embedded again on the "
               "devices; set config.retrieval.where=device and config.retrieval.k above 0")
    if config.retriever_warmup.optimizer.accumulate > 1:
        yield ("config.retriever_warmup.optimizer.accumulate: the passages of a batch are each "
               "other's negatives, so a batch cannot be split; set 1")


def _run_conflicts(config: Config, run: str) -> typing.Iterator[str]:
    """What is wrong with the configuration of one run."""
    train, null = config.train, config.model.null_document
    if config.retrieval.retriever == "bm25":
        if train.query_encoder_rate is not None:
            yield (f"config.retrieval.retriever=bm25: run {run!r} has no query encoder to train; "
                   "name the run bm25 or bm25_sequence, or set config.train.query_encoder_rate="
                   "none")
        if config.retrieval.where == "device":
            yield ("config.retrieval.retriever=bm25: words are searched on the host; set "
                   "config.retrieval.where=host")
        if null in ("embedding", "mlp"):
            yield (f"config.model.null_document={null}: run {run!r} retrieves by BM25 and has no "
                   "query vector for it; set bias or none")
    if null != "none" and not config.retrieval.k:
        yield (f"config.model.null_document={null}: without passages (config.retrieval.k=0) there "
               "is nothing that it could be chosen over; set none")
    if train.collapse_guard == "freeze" and train.generator_rate is None:
        yield ("config.train.collapse_guard=freeze: with config.train.generator_rate=none nothing "
               "would be left to train; set stop")


def validate(config: Config, resolved: bool = False) -> Config:
    """Returns `config`, or raises a ConfigError that lists everything that is wrong with it.

    resolved: the sizes of pretrained towers have been filled in, and are checked too.
    """
    problems = list(_problems(config)) or list(_conflicts(config, resolved))
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))  # several runs may share one
    return config


def lexical(config: Config) -> bool:
    """Whether every run retrieves by words, so that there is no encoder."""
    return all(run in RUNS and for_run(config, run).retrieval.retriever == "bm25"
               for run in config.runs)


def for_run(config: Config, run: str) -> Config:
    """The configuration of one of `config.runs`; of that run's own configuration, the same again.

    Raises:
      ConfigError: `config` is that of other runs.
    """
    if run not in config.runs:
        raise ConfigError(f"config.runs={','.join(config.runs)}: run {run!r} is not one of them")
    return replace(config, {**RUNS[run].sets, "runs": (run,)})


def set_otherwise(config: Config, names: typing.Iterable[str]) -> typing.Iterator[str]:
    """Of the fields `names`, those that every run of the configuration has another value of."""
    for name in names:
        of_runs = [str(RUNS[run].sets.get(name, "")).lower() for run in config.runs]
        given = str(value(config, name)).lower()
        if all(of_runs) and given not in of_runs:
            yield (f"config.{name}={given}: run {config.runs[0]!r} sets config.{name}="
                   f"{of_runs[0]}")


def check_runs_allow(config: Config, names: typing.Iterable[str]) -> None:
    """Fields that a command or a config file sets must not be what all its runs set otherwise.

    Raises:
      ConfigError: names the field and the run.
    """
    for problem in set_otherwise(config, names):
        raise ConfigError(f"{problem}; leave the field out, or name another run")


def not_default(config: Config) -> list[str]:
    """The fields that have another value than their default."""
    default = Config()
    return [name for name in fields() if value(config, name) != value(default, name)]


def value(config: Config, dotted: str) -> Any:
    """The value of a dotted field."""
    for name in dotted.split("."):
        config = getattr(config, name)
    return config


def shipped() -> list[str]:
    """The config files that come with the package, by the names that `load_file` knows."""
    return sorted(f"configs/{file.name}" for file in CONFIGS.glob("*.py"))


def load_file(path: str) -> Config:
    """`get_config()` of a python file, or `get_config(argument)` for PATH:ARGUMENT.

    The file may import the python files beside it. configs/NAME.py is the shipped one, where the
    working folder has no such file.

    Raises:
      ConfigError: it is no such file, or raises an error, whose line is named.
    """
    file, argument, module = _load_module(path)
    if not callable(getattr(module, "get_config", None)):
        raise ConfigError(f"--config={path}: the file defines no get_config()")
    if argument and not inspect.signature(module.get_config).parameters:
        raise ConfigError(f"--config={path}: its get_config() takes no argument; drop "
                          f"':{argument}'")
    with _mistakes_named(path, file):
        config = module.get_config(argument) if argument else module.get_config()
    if not isinstance(config, Config):
        raise ConfigError(f"--config={path}: get_config() must return a rag_jax.config.Config")
    return config


def about(path: str) -> str:
    """What a config file says of itself: `describe(argument)` if it has that, or its docstring."""
    file, argument, module = _load_module(path)
    with _mistakes_named(path, file):
        text = module.describe(argument) if hasattr(module, "describe") else module.__doc__
    return inspect.cleandoc(text or "")


def _load_module(path: str) -> tuple[pathlib.Path, str, types.ModuleType]:
    """(file, argument, module) of PATH or PATH:ARGUMENT."""
    name, _, argument = path.partition(":")
    file = pathlib.Path(name)
    if not file.is_file() and file.as_posix() in shipped():
        file = CONFIGS / file.name
    if not file.is_file():
        raise ConfigError(f"--config={path}: no such file here, and none of the shipped ones; "
                          f"{near_matches(name, shipped())}")
    spec = importlib.util.spec_from_file_location("rag_jax_config_file", file)
    if spec is None:
        raise ConfigError(f"--config={path}: a config file is python and ends in .py")
    module = importlib.util.module_from_spec(spec)
    beside = str(file.absolute().parent)
    sys.path.insert(0, beside)
    try:
        with _mistakes_named(path, file):
            spec.loader.exec_module(module)
    finally:
        sys.path.remove(beside)
    return file, argument, module


@contextlib.contextmanager
def _mistakes_named(path: str, file: pathlib.Path) -> typing.Iterator[None]:
    """Turns what a config file raises into a ConfigError with the line where it did."""
    try:
        yield
    except UserError:
        raise
    except SyntaxError as error:
        raise ConfigError(f"--config={path}: {error.filename or file}:{error.lineno}: "
                          f"{error.msg}: {(error.text or '').strip()}") from None
    except Exception as error:
        folder = str(file.absolute().parent)
        frames = [f"{f.filename}:{f.lineno}: {f.line}"
                  for f in traceback.extract_tb(error.__traceback__)
                  if os.path.dirname(os.path.abspath(f.filename)) == folder]
        raise ConfigError(f"--config={path}: {frames[-1] if frames else file}: "
                          f"{type(error).__name__}: {error}") from None


def to_json(config: Config) -> str:
    return json.dumps(dataclasses.asdict(config), indent=1)


def from_json(text: str) -> Config:
    """The inverse of `to_json`; fields that are none (`REMOVED` aside) are a ConfigError."""

    def flat(tree: dict, prefix: str = "") -> dict[str, Any]:
        leaves: dict[str, Any] = {}
        for key, value in tree.items():
            if isinstance(value, dict):
                leaves |= flat(value, f"{prefix}{key}.")
            else:
                leaves[prefix + key] = tuple(value) if isinstance(value, list) else value
        return leaves

    kept = {name: v for name, v in flat(json.loads(text)).items() if name not in REMOVED}
    return validate(replace(Config(), kept))
