"""Reading passages from TSV and JSON lines; every error names the file, the line and the field."""

import json
import os
import re
from collections.abc import Iterator

from rag_jax.errors import DataError
from rag_jax.lines import numbered_lines
from rag_jax.retrieval.protocol import Passage, RetrievalError


class SeenIds:
    """The ids met so far. Plain decimal ids (DPR's 21 million) cost one bit each, others a str."""

    def __init__(self):
        self._bits, self._others = bytearray(), set()

    def add(self, passage_id: str) -> bool:
        """Returns True when the id is new."""
        if not re.fullmatch(r"0|[1-9][0-9]{0,8}", passage_id, re.ASCII):
            before = len(self._others)
            self._others.add(passage_id)
            return len(self._others) > before
        byte, bit = divmod(int(passage_id), 8)
        if byte >= len(self._bits):
            self._bits.extend(bytes(max(byte + 1 - len(self._bits), len(self._bits), 1024)))
        new = not self._bits[byte] >> bit & 1
        self._bits[byte] |= 1 << bit
        return new


def read_passages(path: str | os.PathLike) -> Iterator[Passage]:
    """Yields the passages of a .tsv, .tsv.gz, .jsonl or .jsonl.gz file, in order, one at a time.

    TSV has a header that names id, text and title in any order (DPR's psgs_w100.tsv is one). A
    field is unquoted when it begins and ends with a double quote and all quotes within are doubled,
    as csv.QUOTE_MINIMAL writes it; any other quote is text. JSONL has {"id", "title", "text"} per
    line, title optional. Blank lines are skipped.

    Raises:
        RetrievalError: names file, line and field: a missing column, an empty id or text, an id met
            before, bad JSON, bytes that are not UTF-8, a damaged .gz, a file without passages.
    """
    name = os.fspath(path)
    kind = os.path.splitext(name.removesuffix(".gz"))[1]
    if kind not in (".tsv", ".jsonl"):
        raise RetrievalError(
            f"{name}: unknown kind of passage file; allowed are .tsv, .tsv.gz, .jsonl, .jsonl.gz.")
    seen, passage = SeenIds(), None
    for where, passage in _tsv(name) if kind == ".tsv" else _jsonl(name):
        check_passage(passage, seen, where)
        yield passage
    if passage is None:
        raise RetrievalError(f"{name}: no passages in this file; it needs at least one.")


def _tsv(name: str) -> Iterator[tuple[str, Passage]]:
    """Yields ("FILE:LINE", the passage in it) of a file with a header."""
    columns: list[str] = []
    for where, line in _lines(name):
        fields = [_unquote(field) for field in line.split("\t")]
        if not columns:
            columns = fields
            missing = [column for column in ("id", "text", "title") if columns.count(column) != 1]
            if missing:
                raise RetrievalError(
                    f"{where}: the header must name {', '.join(missing)} exactly once, with tabs "
                    f"between; got {columns[:8]}. Write the first line as id<TAB>text<TAB>title.")
        elif len(fields) != len(columns):
            raise RetrievalError(
                f"{where}: {len(fields)} fields where the header has {len(columns)} "
                f"({', '.join(columns)}); replace tabs and line breaks inside a field by spaces.")
        else:
            row = dict(zip(columns, fields, strict=True))
            yield where, Passage(row["id"], row["title"], row["text"])


def _unquote(field: str) -> str:
    inner = field[1:-1]
    if len(field) < 2 or field[0] != '"' or field[-1] != '"' or '"' in inner.replace('""', ""):
        return field
    return inner.replace('""', '"')


def _jsonl(name: str) -> Iterator[tuple[str, Passage]]:
    """Yields ("FILE:LINE", the passage in it) of a file with an object on each line."""
    for where, line in _lines(name):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise RetrievalError(
                f"{where}: not valid JSON ({error}); write one object per line."
            ) from None
        if not isinstance(row, dict):
            raise RetrievalError(f'{where}: expected {{"id", "title", "text"}}, got {line[:60]!r}.')
        fields = {"id": row.get("id"), "title": row.get("title", ""), "text": row.get("text")}
        if type(fields["id"]) is int:
            fields["id"] = str(fields["id"])
        for field, value in fields.items():
            if not isinstance(value, str):
                raise RetrievalError(
                    f"{where}: field {field!r} must be a string, got {value!r:.60}; the line has "
                    f"the fields {sorted(row)[:8]}.")
        yield where, Passage(**fields)


def check_passage(passage: Passage, seen: SeenIds, where: str) -> None:
    """Refuses an empty id or text, an id met before, and text that UTF-8 cannot hold."""
    for field in ("id", "text"):
        if not getattr(passage, field).strip():
            raise RetrievalError(
                f"{where}: field {field!r} is empty; give it a value or remove the passage.")
    try:
        "".join(passage).encode()
    except UnicodeEncodeError as error:
        raise RetrievalError(
            f"{where}: half of a surrogate pair cannot be stored as UTF-8 ({error})."
        ) from None
    if not seen.add(passage.id):
        raise RetrievalError(
            f"{where}: id {passage.id!r} occurs a second time; ids must be unique.")


def _lines(name: str) -> Iterator[tuple[str, str]]:
    """Yields ("FILE:LINE", text without its line end) for every line that is not blank."""
    try:
        for where, _, line in numbered_lines(name):
            yield where, line
    except DataError as error:
        raise RetrievalError(str(error)) from None
    except OSError as error:
        raise RetrievalError(f"{name}: cannot be read ({error}); check the path.") from None
