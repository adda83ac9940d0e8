"""What made a stored result: configuration, program and day; and whether it is another cell's."""

import datetime
import functools
import json
import os
import pathlib
import platform
import subprocess
from collections.abc import Mapping
from typing import Any

import jax

import rag_jax
from rag_jax.config import Config, ConfigError, config_files, overrides
from rag_jax.config.overrides import value
from rag_jax.data.inputs import QUESTIONS
from rag_jax.files import quick_digest
from rag_jax.reproduction.cells import Asked, Cell, File, Measurement
from rag_jax.training import changes

CHECKOUT = pathlib.Path(__file__).parents[2]
SOURCES = ("rag_jax", "configs", "setup.py")  # what a result depends on


def made_by(cell: Cell, root: pathlib.Path, what: Asked | None = None) -> dict[str, Any]:
    """The record of a result that is computed now: "configs" of the cell and of those that it
    starts from, digests of "files" that are asked or searched, "program" and "date" (UTC)."""
    files = {**_asked(cell, what), **cell.files(what)}
    return {"configs": [json.loads(_portable(config, root)) for config in _configs(cell)],
            "files": {name: quick_digest(file.path) for name, file in files.items()},
            "program": program(), "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"}


def stale(made: Mapping[str, Any] | None, cell: Cell, root: pathlib.Path,
          what: Asked | None = None) -> str:
    """Why a result with this record (None = without one) is not the cell's; empty if it is.

    Fields that may differ between commands on a workdir (`changes.always`) do not count, but
    for how the cell itself answers, `config.eval`. Nor does a file that has been removed since.
    """
    if made is None:
        return "there is no record of the configuration that made it"
    configs = _configs(cell)
    try:
        earlier = [_config(json.dumps(fields)) for fields in made["configs"]]
        now = [_config(_portable(config, root)) for config in configs]
    except ConfigError as error:
        return f"its configuration is of another version of the program ({error})"
    if len(earlier) != len(now):
        return "it started from other models"
    changed = [f"config.{name}: {value(a, name)!r} there, {value(b, name)!r} now"
               for number, (a, b) in enumerate(zip(earlier, now, strict=True))
               for name in overrides.differences(a, b)
               if not changes.always(name) or number == 0 and name.startswith("eval.")]
    read = made.get("files", {})
    asked = {name: file for name, file in _asked(cell, what).items() if name in read}
    files = {**asked, **cell.files(what)}  # earlier versions did not note what the cell asks
    changed += [f"{file.path} is another file now" for name, file in files.items()
                if os.path.exists(file.path) and quick_digest(file.path) != read.get(name)]
    return "; ".join(dict.fromkeys(changed))


def _asked(cell: Cell, what: Asked | None) -> dict[str, File]:
    """The file of a measurement's questions, by split, if it is one that config.data names."""
    if not isinstance(what, Measurement) or what.split not in QUESTIONS:
        return {}
    path = getattr(cell.config.data, what.split).removeprefix("kilt:")
    return {what.split: File(path, "")} if os.path.isfile(path) else {}


def _configs(cell: Cell) -> list[Config]:
    return [one.config for one in (cell, cell.first, cell.start) if one is not None]


@functools.lru_cache(maxsize=256)
def _config(text: str) -> Config:
    """Read once: a report compares the same few configurations hundreds of times."""
    return overrides.usual_rates(config_files.from_json(text))  # as earlier versions wrote them


def _portable(config: Config, root: pathlib.Path) -> str:
    """JSON in which folders below `root` are named from there: all of `root` can be moved."""
    return config_files.to_json(config).replace(json.dumps(str(root))[1:-1] + "/", "ROOT/")


@functools.cache
def program() -> str:
    """Commit of this checkout (or the version, where there is none), Python, jax and machine."""
    return (f"rag_jax {commit(CHECKOUT)}, Python {platform.python_version()}, "
            f"jax {jax.__version__}, {platform.machine()}")


def commit(checkout: pathlib.Path) -> str:
    """The commit, and whether SOURCES differ from it or have files that are not in git."""
    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", str(checkout), *arguments], capture_output=True,
                              text=True, check=True).stdout.strip()

    try:
        if pathlib.Path(git("rev-parse", "--show-toplevel")) != checkout:
            return rag_jax.__version__  # installed inside another repository
        changed = " with changes" if git("status", "--porcelain", "--", *SOURCES) else ""
        return f"commit {git('rev-parse', 'HEAD')}{changed}"
    except (OSError, subprocess.CalledProcessError):
        return rag_jax.__version__
