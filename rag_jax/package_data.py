"""Files that the package ships beside its modules: tables and texts."""

import importlib.resources
import tomllib
from typing import Any


def text(package: str, name: str) -> str:
    """The content of a file of text in a package of ours."""
    return importlib.resources.files(package).joinpath(name).read_text("utf-8")


def table(package: str, name: str) -> dict[str, Any]:
    """The content of a file of TOML."""
    return tomllib.loads(text(package, name))
