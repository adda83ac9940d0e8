"""Single fields of a configuration by their dotted names, and what a run makes of them.

    python -m rag_jax.train --config=configs/quickstart.py --config.train.steps=100

`None` is written as `none`, tuples with commas.
"""

import dataclasses
import types
import typing
from typing import Any, Literal

from rag_jax.config import PRESETS, RUNS, Config, ConfigError
from rag_jax.errors import near_matches

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
