"""A single JSON document read piece by piece: files of gigabytes, one value in memory.

ijson does not take its place: it names no line, and its C parser makes a "?" of half a surrogate
pair.
"""

import codecs
import contextlib
import json
import re
from collections.abc import Iterator
from typing import Any

from rag_jax.data.records import Record
from rag_jax.errors import DataError
from rag_jax.lines import damage_named, open_packed

_SPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()
_CHUNK = 1 << 16  # bytes read at a time, or as many as are waiting
_LONGEST_TOKEN = 16  # characters: the most that a piece may cut of what is no string: "-Infinity"


class JsonDocument:
    """A cursor in a JSON document.

    Attributes:
        number: the record being read, counted from 1 by `json_array`; 0 = outside of its array.

    Raises (all methods):
        DataError: names file, line and record: not JSON, not UTF-8, cut short, damaged .gz; of an
            object that is read piece by piece, also a key that it has twice.
    """

    def __init__(self, path: str):
        self.number = 0
        self._path, self._file = path, open_packed(path)
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._text, self._at, self._ended = "", 0, False
        self._line, self._counted = 1, 0  # the line of a place in the text, and that place

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    @property
    def where(self) -> str:
        """FILE:LINE, and the record's number inside an array."""
        self._count_lines()
        return f"{self._path}:{self._line}" + (f": record {self.number}" if self.number else "")

    def value(self) -> Any:
        """The value at the cursor, decoded whole."""
        self._peek()
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
                # At the end, 12 may become 123, or 12. or 12e- become 12.5 or 12e-7.
                if end < len(self._text) - len("e-") or not self._fill():
                    self._at = end
                    return value
            except json.JSONDecodeError as error:
                cut = (error.msg.startswith("Unterminated string")
                       or error.pos > len(self._text) - _LONGEST_TOKEN)
                if not (cut and self._fill()):
                    raise self._error(error.msg) from None
            except RecursionError:
                raise self._error("nested too deeply") from None
            except ValueError as error:  # a number of more digits than Python reads
                raise self._error(str(error)) from None

    def skip(self) -> None:
        """Skips the value at the cursor; the elements of an array or object one by one."""
        kind = {"[": "[]", "{": "{}"}.get(self._peek())
        for _ in self.items(kind) if kind else [None]:
            self.value()

    def items(self, kind: str) -> Iterator[str | None]:
        """Moves to each value of the array ("[]") or object ("{}") at the cursor, and yields its
        key, in an array None; the caller reads or skips the value."""
        start, end = kind
        seen: set[str] = set()
        self._take(start)
        if self._peek() == end:
            self._take(end)
            return
        while True:
            key = None
            if kind == "{}":
                key = self.value()
                if not isinstance(key, str):
                    raise self._error(f"a key {key!r:.40}")
                if key in seen:
                    raise DataError(f'{self.where}: "{key}" occurs a second time')
                seen.add(key)
                self._take(":")
            self._peek()
            yield key
            if self._take("," + end) == end:
                return

    def end(self) -> None:
        """Checks that nothing follows."""
        if self._peek():
            raise self._error("text after the end of the document")

    def _take(self, allowed: str) -> str:
        character = self._peek()
        if not character or character not in allowed:
            expected = " or ".join(map(repr, allowed))
            raise self._error(f"{character!r} where {expected} was expected" if character else
                              f"it ends where {expected} was expected")
        self._at += 1
        return character

    def _peek(self) -> str:
        """The next character that is not white space; empty at the end."""
        while True:
            self._at = _SPACE.match(self._text, self._at).end()
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._fill():
                return ""

    def _fill(self) -> bool:
        """Reads another piece; False at the end of the file."""
        if self._ended:
            return False
        with damage_named(lambda: self.where):
            data = self._file.read(max(_CHUNK, len(self._text) - self._at))
            more = self._decoder.decode(data, final=not data)
        self._count_lines()
        self._counted = 0
        self._text, self._at, self._ended = self._text[self._at:] + more, 0, not data
        return True

    def _count_lines(self) -> None:
        """Each character once: a text with one large value may hold many small ones behind it."""
        self._line += self._text.count("\n", self._counted, self._at)
        self._counted = self._at

    def _error(self, what: str) -> DataError:
        return DataError(f"{self.where}: not JSON ({what}): fetch or write the file again")


def json_array(path: str, key: str | None = None) -> Iterator[tuple[int, Record]]:
    """Yields (number from 1, record) of a document that is an array of objects.

    Args:
        path: the file.
        key: the array is under this key of an object; None = it is the whole document.
    """
    with contextlib.closing(JsonDocument(path)) as document:
        is_there = key is None
        for name in [None] if key is None else document.items("{}"):
            if name != key:
                document.skip()
                continue
            is_there = True
            for _ in document.items("[]"):
                document.number += 1
                yield document.number, Record(document.where, document.value())
            document.number = 0
        if not is_there:
            raise DataError(f'{document.where}: no "{key}" in it: expected {{"{key}": [...]}}')
        document.end()


def json_columns(path: str, columns: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """The named columns of a document {"column": {"row": value, ...}, ...}; the others are skipped.

    Raises:
        DataError: also a missing column, or columns that do not have the same rows.
    """
    table: dict[str, dict[str, Any]] = {}
    with contextlib.closing(JsonDocument(path)) as document:
        for column in document.items("{}"):
            if column in columns:
                table[column] = {row: document.value() for row in document.items("{}")}
            else:
                document.skip()
        document.end()
        for column in columns:
            if column not in table:
                raise DataError(f'{document.where}: no column "{column}": it has '
                                 f"{', '.join(map(repr, table)) or 'none of those expected'}")
            missing = table[columns[0]].keys() ^ table[column].keys()
            if missing:
                raise DataError(f'{document.where}: record {min(missing)} is not in both '
                                 f'"{columns[0]}" and "{column}": fetch the file again')
    return table
