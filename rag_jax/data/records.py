"""JSON records and fields of data files; every complaint names file, line and field."""

import json
import os
import re
from collections.abc import Iterator
from typing import Any

from rag_jax.errors import DataError
from rag_jax.lines import numbered_lines

_QUOTED_FIELD = re.compile(r'"((?:[^"]|"")*)"')


def can_iterate(given: Any) -> bool:
    """Whether it can be iterated over: an array of no dimension is an Iterable, and cannot be."""
    try:
        iter(given)
    except TypeError:
        return False
    return True


class Record:
    """One JSON object and the place that it came from.

    Args:
        where: place of the record, for errors.
        value: the decoded JSON.

    Raises:
        DataError: `value` is not an object.
    """

    def __init__(self, where: str, value: Any):
        if not isinstance(value, dict):
            raise DataError(f"{where}: a JSON {type(value).__name__}: expected an object")
        self.where, self.fields = where, value

    def has(self, key: str) -> bool:
        """Whether the record has the key; null counts as absent."""
        return self.fields.get(key) is not None

    def error(self, key: str, expected: str) -> DataError:
        """The error about a field that is missing or wrong."""
        if key in self.fields:
            what = f'"{key}" is {json.dumps(self.fields[key], default=repr)[:60]}'
        else:
            keys = ", ".join(map(repr, self.fields)) or "none"
            what = f'no "{key}" (keys here: {keys[:200]})'
        return DataError(f"{self.where}: {what}: expected {expected}")

    def text(self, key: str, blank: bool = False) -> str:
        """A string, stripped; `blank` = it may hold nothing."""
        value = self.fields.get(key)
        if not isinstance(value, str) or not (blank or value.strip()):
            raise self.error(key, "a string" if blank else "a string with some text in it")
        return value.strip()

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings, stripped."""
        value = self.fields.get(key)
        if not isinstance(value, list | tuple) or not all(isinstance(text, str) for text in value):
            raise self.error(key, "a list of strings")
        return tuple(text.strip() for text in value)

    def name(self, key: str) -> str:
        """A string, or an integer as one: files often number their records."""
        value = self.fields.get(key)
        if isinstance(value, bool) or not isinstance(value, str | int) or not str(value).strip():
            raise self.error(key, "a string with some text in it, or an integer")
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


def json_lines(path: str | os.PathLike) -> Iterator[tuple[int, Record]]:
    """Yields (line number from 1, record) of a file with one JSON object per line."""
    for where, number, line in numbered_lines(path):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: not JSON ({error}): expected one object per line") from None
        yield number, Record(where, value)


def unquoted(field: str) -> str:
    """Undoes CSV quoting; a quote that does not enclose the whole field is part of the text."""
    match = _QUOTED_FIELD.fullmatch(field)
    return match[1].replace('""', '"') if match else field
