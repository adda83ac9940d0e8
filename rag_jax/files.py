"""Writing files so that an interruption leaves the old content or the new, never a part."""

import contextlib
import pathlib
from collections.abc import Iterator
from typing import TextIO


@contextlib.contextmanager
def replaced(path: pathlib.Path) -> Iterator[TextIO]:
    """A UTF-8 file to write; it takes the name `path` when the body ends without an error."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        yield file
    temporary.replace(path)


def write_text(path: pathlib.Path, text: str) -> None:
    """Replaces `path` by `text` as a whole."""
    with replaced(path) as file:
        file.write(text)
