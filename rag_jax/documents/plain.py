"""Text files: plain, Markdown, and tables of records."""

import codecs
import collections
import contextlib
import csv
import dataclasses
import io
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rag_jax.documents.document import Document, Unreadable, Writer

_MARKS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF32_LE, "utf-32-le"),
          (codecs.BOM_UTF32_BE, "utf-32-be"), (codecs.BOM_UTF16_LE, "utf-16-le"),
          (codecs.BOM_UTF16_BE, "utf-16-be"))
GUESSED_FROM = 2**16  # bytes
SEPARATORS = ",;\t|"  # of the fields of a table
FIRST_ROWS = 20  # of a table, with its header, that show its separator
# The encodings that browsers use for some names: mostly the superset of Windows; and a page that
# declares UTF-16 in ASCII bytes is UTF-8.
ENCODINGS = {name: encoding for encoding, names in {
    "cp1252": ("iso-8859-1", "iso8859-1", "latin1", "ascii", "us-ascii", "x-cp1252"),
    "cp1254": ("iso-8859-9", "iso8859-9", "latin5"),
    "cp874": ("iso-8859-11", "iso8859-11", "tis-620", "windows-874"),
    "cp932": ("shift-jis", "sjis", "x-sjis"),
    "cp949": ("euc-kr", "ks-c-5601-1987", "korean"),
    "gb18030": ("gb2312", "gbk", "x-gbk"),
    "iso-8859-8": ("iso-8859-8-i", "logical"),
    "mac-cyrillic": ("x-mac-cyrillic", "x-mac-ukrainian"),
    "big5hkscs": ("big5", "big5-hkscs"),
    "utf-8": ("utf-16", "utf-16le", "utf-16be")}.items() for name in names}
_CONTROL = re.compile(rb"[\0-\x08\x0e-\x1a\x1c-\x1f]")  # not text in any encoding that is guessed
_LINE = re.compile(r"\r\n|\r|\n")  # no other line ends of Unicode, which a JSON string may contain
_QUOTED = re.compile(r'(?<![^,;\t|]) *"[^"]*(?:""[^"]*)*(?:"|$)')  # a field of a table
_SEPARATOR = re.compile("sep=(.)")  # the first line of a table that Excel is to open
# A "---" before an empty line is a horizontal rule.
_FRONT_MATTER = re.compile(r"---[ \t]*\n(?!\s*?$).*?^(---|\.\.\.)[ \t]*$", re.S | re.M)


def decoded(content: bytes) -> tuple[str, tuple[str, ...]]:
    """The text of a file without its byte order mark, and remarks.

    Raises:
      Unreadable: it is not text.
    """
    for mark, encoding in _MARKS:
        if content.startswith(mark):
            try:
                return content[len(mark) :].decode(encoding), ()
            except UnicodeDecodeError as error:
                if almost := decoded_with_damage(content[len(mark) :], encoding):
                    return almost
                raise Unreadable(f"its first bytes say {encoding}, which byte "
                                 f"{len(mark) + error.start} is not; convert it to UTF-8") from None
    if b"\0" in content[:GUESSED_FROM]:
        raise Unreadable("it is no text: it has zero bytes")
    try:
        return content.decode(), ()
    except UnicodeDecodeError as error:
        if almost := decoded_with_damage(content, "utf-8"):
            return almost
        begin = max(0, error.start - GUESSED_FROM // 2)
        sample = content[begin : begin + GUESSED_FROM]
        if len(_CONTROL.findall(sample)) > len(sample) / 100:
            raise Unreadable("it is no text: it is full of control characters") from None
        import chardetng_py  # only if the encoding must be guessed

        encoding = encoding_named(chardetng_py.detect(sample))
        try:
            return content.decode(encoding), (f"read as {encoding}, by a guess: it is not UTF-8",)
        except UnicodeDecodeError as other:  # with damage, any text would be what is guessed
            raise Unreadable(f"byte {error.start} is not UTF-8, and byte {other.start} is not "
                             f"{encoding} either; convert it to UTF-8") from None


def encoding_named(name: str) -> str:
    """Python's name of the encoding that browsers use for a name."""
    name = name.lower().replace("_", "-")
    usual = name
    with contextlib.suppress(LookupError):  # it may be one of several, as latin-1 is
        usual = codecs.lookup(name).name.replace("_", "-")
    return ENCODINGS.get(name) or ENCODINGS.get(usual, name)


def decoded_with_damage(content: bytes, encoding: str) -> tuple[str, tuple[str, ...]] | None:
    """A slightly damaged text, such as one cut within a character, with a remark.

    None if more than a fifth of the characters beyond ASCII are damaged: the text seems to be in
    another encoding.
    """
    text = content.decode(encoding, "replace")
    bad, beyond = text.count("\ufffd"), len(text) - len(text.encode("ascii", "ignore"))
    if 5 * bad > beyond:
        return None
    line = text.count("\n", 0, text.find("\ufffd")) + 1
    damaged = "one character is" if bad == 1 else f"{bad} characters are"
    return text, (f"{damaged} no {encoding}, but damaged, in line {line} first",)


def read_text(content: bytes) -> Document:
    """Plain text, unchanged."""
    text, remarks = decoded(content)
    return Document("", text, remarks=remarks)


def read_markdown(content: bytes) -> Document:
    """Markdown with its markup, divided into sections by its headings."""
    from markdown_it import MarkdownIt

    text, remarks = decoded(content)
    # As many characters as before, so that places are those in the text.
    lines = text.replace("\r\n", " \n").replace("\r", "\n").replace("\0", " ")
    if front := _FRONT_MATTER.match(lines):
        lines = re.sub("[^\n]", " ", front[0]) + lines[front.end() :]
    begins = [0, *(line.end() for line in re.finditer("\n", lines))]
    writer, tokens = Writer(), MarkdownIt().parse(lines)
    for token, inside in zip(tokens, tokens[1:], strict=False):
        if token.type == "heading_open" and token.map and not token.level:
            writer.text(text[writer.size : begins[token.map[0]]])
            writer.heading(int(token.tag[1]), "".join(
                " " if part.type in ("softbreak", "hardbreak") else part.content
                for part in inside.children or ()
                if part.type in ("text", "code_inline", "softbreak", "hardbreak")))
    writer.text(text[writer.size :])
    return writer.document(remarks=remarks)


def read_csv(content: bytes) -> Document:
    """A table with a header; every row becomes a paragraph "column: value; ..."."""
    text, remarks = decoded(content)
    begin = text.lstrip()[:GUESSED_FROM]  # characters here
    separator = _SEPARATOR.fullmatch(_first_line(begin).rstrip())
    # The quoted fields may contain line ends.
    between = separator[1] if separator else _separator(text, _first_line(_QUOTED.sub("", begin)))
    form = {"delimiter": between, "skipinitialspace": _has_spaces(text, between)}
    if _is_open(text, form):
        remarks = (*remarks, "a quote is never closed: all that follows it is one field")
    elif line := _joined(text, form):
        remarks = (*remarks, "a quote of an earlier line is closed within a field, in line "
                             f"{line}: all between them is one field")
    return _headed_table(text, form, remarks)


def _first_line(text: str) -> str:
    return _LINE.split(text, maxsplit=1)[0]


def read_tsv(content: bytes) -> Document:
    """`read_csv` with tabs."""
    (text, remarks), form = decoded(content), {"delimiter": "\t"}
    unquoted = {**form, "quoting": csv.QUOTE_NONE}
    if _is_open(text, form):
        form = unquoted
        remarks = (*remarks, "a quote is never closed: quotes are read as they are")
    elif line := _joined(text, form):
        form = unquoted
        remarks = (*remarks, "a quote of an earlier line is closed within a field, in line "
                             f"{line}: quotes are read as they are")
    return _headed_table(text, form, remarks)


def _separator(text: str, header: str) -> str:
    """What separates the fields of a table: what gives its first rows as many as its header.

    header: the first line, without its quoted fields. Where several do, or none does, it is the
    most frequent one there, but rather one without a space after it: a comma may be that of a
    title, "Price, net", and of numbers.
    """
    even = [one for one in SEPARATORS if one in header and _is_even(text, one)]
    if even:
        return max(even, key=lambda one: (f"{one} " not in header, header.count(one)))
    return max(SEPARATORS, key=header.count)


def _is_even(text: str, between: str) -> bool:
    """Whether a separator divides the first rows into as many fields as the header."""
    with contextlib.suppress(csv.Error), _reader(text, {"delimiter": between}) as reader:
        rows = (row for row in reader if "".join(row).strip())
        return len({len(row) for row in itertools.islice(rows, FIRST_ROWS)}) == 1
    return False


def _headed_table(text: str, form: Mapping[str, Any], remarks: tuple[str, ...]) -> Document:
    longer: list[int] = []
    shorter: list[int] = []
    document = _table(_rows(text, form, longer, shorter), remarks)
    for what, found in (("more", longer), ("fewer", shorter)):
        if found:
            rows = f"{len(found)} row{'s have' if len(found) > 1 else ' has'}"
            remarks = (*remarks, f"{rows} {what} fields than the header; the first is {found[0]}")
    return dataclasses.replace(document, remarks=remarks)


@contextlib.contextmanager
def _reader(text: str, form: Mapping[str, Any]) -> Iterator[Any]:
    """csv's reader of a table, whose fields may be as long as the table; csv's limit is global.

    form: csv's parameters.
    """
    limit = csv.field_size_limit(len(text) + 1)
    try:
        yield csv.reader(io.StringIO(text, newline=""), **form)
    finally:
        csv.field_size_limit(limit)


def _has_spaces(text: str, between: str) -> bool:
    """Whether spaces may stand before the quotes of a field: if the rows are then more even; where
    they are as even without, not if a quote after spaces is one of the text, as such a quote would
    not be closed at the end of its field, or only in another row.
    """
    form = {"delimiter": between, "skipinitialspace": True}
    with_spaces, without = _uneven(text, form), _uneven(text, {"delimiter": between})
    if with_spaces != without:
        return with_spaces < without
    with contextlib.suppress(csv.Error), _reader(text, {**form, "strict": True}) as rows:
        return not any("\n" in field or "\r" in field for row in rows for field in row)
    return False


def _uneven(text: str, form: Mapping[str, Any]) -> int:
    """How many rows have more or fewer fields than the first."""
    with contextlib.suppress(csv.Error), _reader(text, form) as rows:
        sizes = [len(row) for row in rows if any(row)]
        return sum(size != sizes[0] for size in sizes)
    return len(text)


def _is_open(text: str, form: Mapping[str, Any]) -> bool:
    """Whether a table ends within quotes: then an empty line after it is not an empty row."""
    with contextlib.suppress(csv.Error), _reader(f"{text}\n\n", form) as rows:
        return collections.deque(rows, 1).pop() != []
    return False


def _joined(text: str, form: Mapping[str, Any]) -> int:
    """The first line in which a quote of an earlier line is closed, and the field goes on: they may
    be no quotes of a table, but of texts in two of its rows. 0 = there is none."""
    lines, before = io.StringIO(text, newline="").readlines(), 0
    with contextlib.suppress(csv.Error), _reader(text, form) as rows:
        for _ in rows:
            row, before = lines[before : rows.line_num], rows.line_num
            if len(row) > 1:
                strict = csv.reader(row, strict=True, **form)
                try:
                    next(strict)
                except csv.Error:
                    if strict.line_num > 1:
                        return before - len(row) + strict.line_num
    return 0


def _rows(text: str, form: Mapping[str, Any], longer: list[int], shorter: list[int]
          ) -> Iterator[tuple[int, list[tuple[str, str]]]]:
    """Number and pairs of column and value of each row.

    longer: gets the numbers of the rows with values beyond the last column of the header.
    shorter: gets those of the rows with values that end before a column with a name.
    """
    try:
        with _reader(text, form) as reader:
            rows = enumerate(reader, 1)
            header = next((row for _, row in rows if any(row) and row[0] != "sep="), [])
            header = [name.strip() for name in header]
            for number, row in rows:
                if any(row[len(header):]):
                    longer.append(number)
                if any(row) and any(header[len(row):]):
                    shorter.append(number)
                names = [*header, *(f"column {n + 1}" for n in range(len(header), len(row)))]
                yield number, [(name, value.strip())
                               for name, value in zip(names, row, strict=False)]
    except csv.Error as error:
        raise Unreadable(f"line {reader.line_num}: {error}") from None


def read_jsonl(content: bytes) -> Document:
    """A JSON object per line; each becomes a paragraph "field: value; ..."."""
    text, remarks = decoded(content)
    bad: list[int] = []
    document = _table(_objects(text, bad), remarks)
    if not bad:
        return document
    if not document.text:
        raise Unreadable(f"line {bad[0]}: no JSON object; each line has to be one")
    left = (f"line {bad[0]} is left out, which is no JSON object" if len(bad) == 1 else
            f"{len(bad)} lines are left out, which are no JSON objects; the first is {bad[0]}")
    return dataclasses.replace(document, remarks=(*remarks, left))


def _objects(text: str, bad: list[int]) -> Iterator[tuple[int, list[tuple[str, str]]]]:
    for number, line in enumerate(_LINE.split(text), 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line, parse_int=_Number, parse_float=_Number,
                               object_pairs_hook=_Object)
            if not isinstance(found, _Object):
                raise ValueError("no object")
            yield number, [(name, value if isinstance(value, str) else _as_json(value))
                           for name, value in found if value is not None]
        except (ValueError, RecursionError):
            bad.append(number)


class _Number(str):
    """A number of JSON as it is written: 1.50 is no 1.5, and one may have any number of digits."""


class _Object(list):
    """The pairs of name and value of a JSON object, also those with the same name."""


def _as_json(value: Any) -> str:
    """A value of JSON as one line, with its numbers as they were written."""
    if isinstance(value, _Number):
        return value
    if isinstance(value, _Object):
        pairs = (f"{json.dumps(name, ensure_ascii=False)}: {_as_json(one)}" for name, one in value)
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_as_json, value))}]"
    return json.dumps(value, ensure_ascii=False)


def _table(rows: Iterable[tuple[int, list[tuple[str, str]]]], remarks: tuple[str, ...]
           ) -> Document:
    """Rows as paragraphs. Each is a section, named by its number in the file, from 1."""
    writer = Writer()
    for number, row in rows:
        parts = [f"{name}: {value}" if name else value for name, value in row if value]
        if parts:
            writer.heading(1, f"row {number}")
            writer.text("; ".join(parts) + "\n\n")
    return dataclasses.replace(writer.document(remarks=remarks), title="", headed=False)
