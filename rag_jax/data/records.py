"""Lines and JSON records of data files; every complaint names file, line and field."""

import bz2
import contextlib
import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

_OPENERS = {".gz": gzip.open, ".bz2": bz2.open}


def open_packed(path: str) -> BinaryIO:
    """The bytes of a file, unpacked when its name ends in .gz or .bz2."""
    if not os.path.exists(path):
        raise FileNotFoundError(f"no file {path}: check the path")
    return _OPENERS.get(os.path.splitext(path)[1], open)(path, "rb")


@contextlib.contextmanager
def damage_named(where: Callable[[], str]) -> Iterator[None]:
    """Turns what a damaged file raises when it is read into a ValueError that says where."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{where()}: byte {error.start} is not UTF-8 ({error.reason}): convert the file to "
            "UTF-8, or fetch it again"
        ) from None
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{where()}: damaged file ({error}): fetch or write it again") from None


def numbered_lines(path: str) -> Iterator[tuple[str, int, str]]:
    """Yields ("FILE:LINE", line number from 1, text without line end) of the lines with content.

    Raises:
        FileNotFoundError: no such file.
        ValueError: bytes that are not UTF-8, or a damaged .gz or .bz2; names file and line.
    """
    reading = 1
    with open_packed(path) as file, damage_named(lambda: f"{path}:{reading}"):
        for raw in file:
            text = raw.decode("utf-8-sig" if reading == 1 else "utf-8").rstrip("\r\n")
            if text.strip():
                yield f"{path}:{reading}", reading, text
            reading += 1


class Record:
    """One JSON object and the place that it came from.

    Args:
        where: for errors.
        value: what was read there.

    Raises:
        ValueError: `value` is not an object.
    """

    def __init__(self, where: str, value: Any):
        if not isinstance(value, dict):
            raise ValueError(f"{where}: a JSON {type(value).__name__}: expected an object")
        self.where, self.fields = where, value

    def has(self, key: str) -> bool:
        """Whether the record has the key; null counts as absent."""
        return self.fields.get(key) is not None

    def error(self, key: str, expected: str) -> ValueError:
        """What to raise for a field that is missing or wrong."""
        if key in self.fields:
            found = f'"{key}" is {json.dumps(self.fields[key])[:60]}'
        else:
            keys = ", ".join(map(repr, self.fields)) or "none"
            found = f'no "{key}" (keys here: {keys[:200]})'
        return ValueError(f"{self.where}: {found}: expected {expected}")

    def text(self, key: str, blank: bool = False) -> str:
        """A string, stripped; `blank` = it may hold nothing."""
        value = self.fields.get(key)
        if not isinstance(value, str) or not (blank or value.strip()):
            raise self.error(key, "a string" if blank else "a string with some text in it")
        return value.strip()

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings, stripped."""
        value = self.fields.get(key)
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            raise self.error(key, "a list of strings")
        return tuple(text.strip() for text in value)

    def name(self, key: str) -> str:
        """A string, or an integer as one: files often number their records."""
        value = self.fields.get(key)
        if isinstance(value, bool) or not isinstance(value, str | int) or not str(value).strip():
            raise self.error(key, "a string or an integer")
        return str(value)

    def record(self, key: str) -> "Record":
        """An object."""
        if not isinstance(self.fields.get(key), dict):
            raise self.error(key, "an object")
        return Record(f"{self.where}: {key}", self.fields[key])

    def records(self, key: str) -> list["Record"]:
        """A list of objects."""
        value = self.fields.get(key)
        if not isinstance(value, list):
            raise self.error(key, "a list of objects")
        return [Record(f"{self.where}: {key}[{i}]", item) for i, item in enumerate(value)]


def json_lines(path: str) -> Iterator[tuple[int, Record]]:
    """Yields (line number from 1, record) of a file with one JSON object per line."""
    for where, number, line in numbered_lines(path):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}: not JSON ({error}): expected one object per line") from None
        yield number, Record(where, value)
