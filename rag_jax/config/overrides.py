"""Single fields of a configuration by their dotted names, and the fields that a run sets.

    python -m rag_jax.train --config=configs/quickstart.py --config.train.steps=100

`None` is written as `none`, tuples with commas.
"""

import dataclasses
import functools
import os
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from rag_jax.config import GENERATORS, PRESETS, RUNS, Config, ConfigError, GeneratorConfig
from rag_jax.errors import near_matches

AnyConfig = typing.TypeVar("AnyConfig")  # a Config, or a section of one
DEFAULT = Config()
# Fields of earlier versions, which the config.json of a workdir may have, and the advice for them.
REMOVED = {
    "model.kind": "the run decides it; set config.runs, to rag_sequence for example",
    **{f"retriever_warmup.{name}": f"it did nothing there; set config.generator_warmup.{name}"
       for name in ("mask_ratio", "span_length", "permute_sentences")},
    "generator_warmup.hard_negatives":
        "it did nothing there; set config.retriever_warmup.hard_negatives",
}


# The types of fields: a plain one, one of some words, several values, or one of these or None.


def type_name(hint: Any) -> str:
    """How `--help` and errors write a type."""
    kinds = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return "|".join(kinds)
    if isinstance(hint, types.UnionType):
        return f"{type_name(kinds[0])}|none"
    return f"{type_name(kinds[0])},..." if kinds else hint.__name__


def accepts(hint: Any, given: Any) -> bool:
    """Whether a Python value is of a field's type. True and False do not count as integers."""
    kinds = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return given in kinds
    if isinstance(hint, types.UnionType):
        return given is None or accepts(kinds[0], given)
    if kinds:
        return isinstance(given, tuple) and all(accepts(kinds[0], part) for part in given)
    if isinstance(given, bool):
        return hint is bool
    return isinstance(given, int | float if hint is float else hint)


def _parse(hint: Any, text: str) -> Any:
    """A text of the command line as a value of a type.

    Raises:
      ValueError: it is not of that type.
    """
    kinds = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        if text not in kinds:
            raise ValueError(near_matches(text, kinds))
        return text
    if isinstance(hint, types.UnionType):
        return None if text.lower() == "none" else _parse(kinds[0], text)
    if kinds:
        return tuple(_parse(kinds[0], part.strip()) for part in text.split(",") if part.strip())
    if hint is bool:
        if text.lower() not in ("true", "false", "1", "0"):
            raise ValueError("true or false")
        return text.lower() in ("true", "1")
    return hint(text)


def fields(config: Any = DEFAULT, prefix: str = "") -> dict[str, dataclasses.Field]:
    """Every field that is not a section, by its dotted name."""
    leaves: dict[str, dataclasses.Field] = {}
    for f in dataclasses.fields(config):
        inner = getattr(config, f.name)
        leaves |= (fields(inner, f"{prefix}{f.name}.") if dataclasses.is_dataclass(inner)
                   else {prefix + f.name: f})
    return leaves


def differences(one: Any, other: Any) -> list[str]:
    """The fields that two configurations both have, with different values."""
    others = fields(other)
    return [name for name in fields(one)
            if name in others and value(one, name) != value(other, name)]


def value(config: Any, dotted: str) -> Any:
    """The value of a dotted field."""
    return functools.reduce(getattr, dotted.split("."), config)


def shown(given: Any) -> str:
    """A value as the command line writes it."""
    if isinstance(given, tuple):
        return ",".join(map(str, given))
    return str(given).lower() if given is None or isinstance(given, bool) else str(given)


def texts(config: Config) -> dict[str, str]:
    """Every field as the command line writes it, by its option."""
    return {f"--config.{name}": shown(value(config, name)) for name in fields(config)}


def not_default(config: Config) -> list[str]:
    """The fields that have another value than their default."""
    return differences(config, DEFAULT)


def replace(config: AnyConfig, changes: Mapping[str, Any] | None, path: str = "config"
            ) -> AnyConfig:
    """A copy of `config` with dotted fields replaced (None = no field); strings are parsed to the
    field's type.

    A section can be given as a dictionary of its fields; some (PRESETS) also as the name of a
    preset. Whatever their order, sections are replaced before single fields of them, and a
    generator's family before its other fields.

    Raises:
      ConfigError: an unknown field or a value of another type, with near matches.
    """
    if changes is None:
        return config
    if not isinstance(changes, Mapping):
        raise ConfigError(f"{path}: {changes!r:.60} is no configuration; give a Config, or a "
                          "dictionary of its fields, such as {'eval.num_beams': 4}")
    for dotted, new in sorted(changes.items(), key=lambda change: _widest_first(str(change[0]))):
        name, _, rest = str(dotted).partition(".")
        hints = {f.name: f.type for f in dataclasses.fields(config)}
        where, whole = f"{path}.{name}", f"{path}.{dotted}"
        if advice := REMOVED.get(whole.removeprefix("config.")):
            raise ConfigError(f"{whole}: no field any more: {advice}")
        if name not in hints:
            advice = "leave out 'config.'" if name == "config" else (
                near_elsewhere(str(dotted), path) or near_matches(name, hints))
            raise ConfigError(f"{where}: no such field; {advice}")
        section = dataclasses.is_dataclass(hints[name])
        if rest and not section:
            raise ConfigError(f"{where} is a single value and has no field {rest!r}")
        if rest:
            new = {rest: new}
        if section and isinstance(new, dict):
            new = replace(in_family(getattr(config, name), new.get("family")), new, where)
        else:
            new = (_preset if section else _parsed)(hints[name], new, where)
        config = dataclasses.replace(config, **{name: new})
    return config


def near_elsewhere(name: str, section: str) -> str:
    """The advice for a field that `section` ("config.train", "--config") lacks: fields of its name,
    below the section if there are any there; "" = none."""
    root = section.partition(".")[0]
    named = [f"{root}.{field}" for field in fields() if f".{field}".endswith(f".{name}")]
    below = [field for field in named if field.startswith(f"{section}.")]
    return near_matches(f"{section}.{name}", below or named, cutoff=0) if named else ""


def _widest_first(dotted: str) -> tuple[int, bool]:
    """The key that sorts fields in the order in which `replace` replaces them."""
    return dotted.count("."), not dotted.endswith(".family")


def in_family(section: Any, family: str | None) -> Any:
    """A generator's section as one of another family, with the fields of both that have been set;
    any other section as it is."""
    cls = GENERATORS.get(family) if isinstance(family, str) else None
    if not isinstance(section, GeneratorConfig) or cls in (None, type(section)):
        return section
    names = {f.name for f in dataclasses.fields(cls)} - {"family"}
    return cls(**{name: value(section, name)
                  for name in differences(section, type(section)()) if name in names})


def usual_rates(config: Config) -> Config:
    """The configuration with BART's usual rate, 0, where a dropout of the generator is None."""
    generator = config.model.generator
    rates = {name: 0.0 for name in ("attention_dropout", "activation_dropout")
             if getattr(generator, name, 0.0) is None}
    generator = dataclasses.replace(generator, **rates)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, generator=generator))


def _preset(section: type, name: Any, where: str) -> Any:
    presets = PRESETS.get(section, {})
    if not isinstance(name, str) or name not in presets:
        raise ConfigError(f"{where}={name!r:.60}: a section; set its fields ({where}.NAME=...)"
                          + f" or be one of {', '.join(presets)}" * bool(presets))
    return presets[name]


def _parsed(hint: Any, given: Any, where: str) -> Any:
    """A value of a field, converted from the text of a command line, or from what notebooks give:
    lists, numbers of numpy, paths. Any other value stays as it is, for `validate` to refuse."""
    if isinstance(given, os.PathLike):
        given = os.fspath(given)
    if hasattr(given, "tolist"):  # of numpy or jax
        given = given.tolist()
    if isinstance(given, list) and typing.get_origin(hint) is tuple:
        given = tuple(given)
    if not isinstance(given, str):
        return given
    try:
        return _parse(hint, given)
    except ValueError as error:
        raise ConfigError(f"{where}={given!r}: expected {type_name(hint)} ({error})") from None


def lexical(config: Config) -> bool:
    """Whether every run retrieves by words, so that there is no encoder."""
    return all(run in RUNS and for_run(config, run).retrieval.retriever == "bm25"
               for run in config.runs)


def by_ranks(config: Config) -> bool:
    """Whether a run retrieves by ranks, which have no gradient, given its configuration."""
    return config.retrieval.retriever == "hybrid" and config.retrieval.fusion != "convex"


def trains_query_encoder(config: Config) -> bool:
    """Whether the query encoder of a run learns, given the run's configuration: it has a rate, and
    what retrieves has a gradient, unlike words and ranks."""
    return (config.train.query_encoder_rate is not None and not by_ranks(config)
            and config.retrieval.retriever != "bm25")


def for_run(config: Config, run: str) -> Config:
    """The configuration of one of `config.runs`, with the fields that the run sets; of that run's
    own configuration, the same again.

    Raises:
      ConfigError: the run is not one of them.
    """
    if run not in config.runs:
        raise ConfigError(f"config.runs={','.join(config.runs)}: run {run!r} is not one of them")
    return replace(config, {**RUNS[run].sets, "runs": (run,)})


def set_by_runs(config: Config, name: str) -> bool:
    """Whether every run sets a field by itself, so that no run has the configuration's value."""
    return all(name in RUNS[run].sets for run in config.runs)


def set_otherwise(config: Config, names: Iterable[str]) -> Iterator[str]:
    """Yields what is wrong with those of the fields `names` to which every run of the configuration
    gives another value."""
    for name in names:
        if not set_by_runs(config, name):
            continue
        of_runs = [shown(RUNS[run].sets[name]) for run in config.runs]
        given = shown(value(config, name))
        if given not in of_runs:
            yield (f"config.{name}={given}: run {config.runs[0]!r} sets config.{name}="
                   f"{of_runs[0]}")
