"""Files that the package ships beside its modules: tables and texts."""

import importlib.resources
import tomllib
from typing import Any


def text(package: str, name: str) -> str:
    """The content of a text file in a package of this project."""
    return importlib.resources.files(package).joinpath(name).read_text("utf-8")


def table(package: str, name: str) -> dict[str, Any]:
    """The content of a TOML file."""
    return tomllib.loads(text(package, name))
