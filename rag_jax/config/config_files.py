"""Config files, your own and those that are shipped, and config.json of a workdir.

A config file is python with `get_config() -> Config`, or one that takes what follows a colon:

    python -m rag_jax.train --config=configs/paper.py:table1/nq/rag_token
"""

import contextlib
import dataclasses
import difflib
import inspect
import json
import os
import pathlib
import runpy
import sys
import traceback
import types
from collections.abc import Iterator
from typing import Any

from rag_jax.config import Config, ConfigError
from rag_jax.config.overrides import REMOVED, replace
from rag_jax.config.rules import check_sections, validate
from rag_jax.errors import UserError

# The folder of shipped config files: inside the package in a wheel, beside it in a checkout.
_PACKAGE = pathlib.Path(__file__).absolute().parents[1]
CONFIGS = next((folder for folder in (_PACKAGE / "configs", _PACKAGE.parent / "configs")
                if folder.is_dir()), _PACKAGE / "configs")
QUICKSTART = CONFIGS / "quickstart.py"


def shipped() -> list[str]:
    """The config files that come with the package, by the names that `load_file` knows."""
    return sorted(f"configs/{file.name}" for file in CONFIGS.glob("*.py"))


def load_file(path: str) -> Config:
    """`get_config()` of a python file, or `get_config(argument)` for PATH:ARGUMENT.

    The file may import the python files beside it. configs/NAME.py is the shipped one, where the
    working folder has no such file.

    Raises:
      ConfigError: there is no such file, or it raises an error, whose line is named; or it gives
        something else, or something else for a section.
    """
    with _run_file(path) as (argument, names):
        get_config = names.get("get_config")
        if not callable(get_config):
            raise ConfigError(f"--config={path}: the file defines no get_config()")
        if argument and not inspect.signature(get_config).parameters:
            raise ConfigError(f"--config={path}: its get_config() takes no argument; drop "
                              f"':{argument}'")
        config = get_config(argument) if argument else get_config()
    if not isinstance(config, Config):
        raise ConfigError(f"--config={path}: get_config() must return a rag_jax.config.Config")
    check_sections(config)
    return config


def about(path: str) -> str:
    """The description of a config file: `describe(argument)`, or its docstring without that."""
    with _run_file(path) as (argument, names):
        text = names["describe"](argument) if "describe" in names else names["__doc__"]
    return inspect.cleandoc(text or "")


@contextlib.contextmanager
def _run_file(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(argument, the names that the file defines) of PATH or PATH:ARGUMENT.

    The body, too, may import the files beside it, and its mistakes are named. What was imported of
    them is forgotten at the end: another folder may have files of the same names.
    """
    file, argument = _divided(path)
    if file.suffix != ".py":
        raise ConfigError(f"--config={path}: a config file is python and ends in .py")
    beside, before = str(file.absolute().parent), set(sys.modules)
    sys.path.insert(0, beside)
    try:
        with _mistakes_named(path, file):
            names = runpy.run_path(str(file))
            with _as_module(names):
                yield argument, names
    finally:
        with contextlib.suppress(ValueError):  # the file may have edited the list
            sys.path.remove(beside)
        new = {name.partition(".")[0] for name in set(sys.modules) - before} - before
        own = {name for name in new if _folder_of(sys.modules.get(name)) == beside}
        for name in [name for name in sys.modules if name.partition(".")[0] in own]:
            del sys.modules[name]


@contextlib.contextmanager
def _as_module(names: dict[str, Any]) -> Iterator[None]:
    """Lets what a file defines be found by its module's name, as a dataclass in it needs."""
    module = types.ModuleType(names["__name__"])
    vars(module).update(names)
    former = sys.modules.get(module.__name__)  # of a file that reads this one
    sys.modules[module.__name__] = module
    try:
        yield
    finally:
        sys.modules.pop(module.__name__, None)
        if former is not None:
            sys.modules[module.__name__] = former


def _folder_of(module: Any) -> str:
    """The folder in which a module, or a package, lies; "" = it has no file."""
    places = [*getattr(module, "__path__", ()), getattr(module, "__file__", None) or ""]
    return os.path.dirname(places[0])


def _divided(path: str) -> tuple[pathlib.Path, str]:
    """(file, argument) of PATH or PATH:ARGUMENT; PATH may contain colons, too."""
    parts = path.split(":")
    for end in range(1, len(parts) + 1):
        file = pathlib.Path(":".join(parts[:end]))
        if not os.path.isfile(file) and file.as_posix() in shipped():
            file = CONFIGS / file.name
        if os.path.isfile(file):  # of a Path it is an error where the name is too long
            return file, ":".join(parts[end:])
    # All have the folder and the ending alike: what is between them is compared.
    names = {pathlib.PurePath(name).stem: name for name in shipped()}
    near = [names[stem] for stem in difflib.get_close_matches(pathlib.Path(parts[0]).stem, names)]
    raise ConfigError(f"--config={path}: no such file here, and none of the shipped ones; "
                      + (f"did you mean {' or '.join(near)}?" if near else
                         f"known: {', '.join(names.values())}"))


@contextlib.contextmanager
def _mistakes_named(path: str, file: pathlib.Path) -> Iterator[None]:
    """Turns an error of a config file into a ConfigError with the line that raised it."""
    try:
        yield
    except UserError:
        raise
    except SyntaxError as error:
        line = f":{error.lineno}" if error.lineno else ""
        text = f": {error.text.strip()}" if error.text else ""
        raise ConfigError(f"--config={path}: {error.filename or file}{line}: {error.msg}{text}"
                          ) from None
    except (Exception, SystemExit) as error:
        folder = str(file.absolute().parent)
        frames = [f"{f.filename}:{f.lineno}: {f.line}"
                  for f in traceback.extract_tb(error.__traceback__)
                  if os.path.dirname(os.path.abspath(f.filename)) == folder]
        raise ConfigError(f"--config={path}: {frames[-1] if frames else file}: "
                          f"{type(error).__name__}: {error}") from None


def to_json(config: Config) -> str:
    return json.dumps(dataclasses.asdict(config), indent=1)


def from_json(text: str) -> Config:
    """The inverse of `to_json`; the fields of `REMOVED` are dropped.

    Raises:
      ConfigError: unknown fields, or a configuration that is not valid.
    """
    tree = json.loads(text)
    for removed in REMOVED:
        section, _, name = removed.partition(".")
        tree.get(section, {}).pop(name, None)
    if "train" in tree:  # earlier versions, without these fields, trained as the paper does
        tree["train"] = {"full_information": 0.0, "in_batch_negatives": False, **tree["train"]}
    return validate(replace(Config(), tree))
