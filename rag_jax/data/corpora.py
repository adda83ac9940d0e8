"""Passages from whatever file, folder or caller holds them; a large file is never in memory as a
whole."""

import errno
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rag_jax.data import wikipedia
from rag_jax.data.records import can_iterate, json_lines, unquoted
from rag_jax.errors import DataError
from rag_jax.lines import is_utf8, numbered_lines
from rag_jax.retrieval.protocol import Passage, RetrievalError
from rag_jax.retrieval.store_writing import SeenIds, check_passage

_DUMPS = (".xml", ".xml.bz2", ".xml.gz")
_TABLES = (".parquet", ".arrow")
_COLUMNS = ["id", "title", "text"]
_ROWS = 1024  # read at a time
_ARROW_FILE = b"ARROW1"  # first bytes of Arrow's file format; its stream format has others
# What callers may give.
Passages = Passage | Mapping[str, str] | Iterable[Passage | Mapping[str, str]]


def read_corpus(path: str | os.PathLike) -> Iterator[Passage]:
    """Yields the passages or articles of a source, in order, one at a time.

    Args:
        path: one of
            `FILE.tsv[.gz]`: a header that names id, text and title in any order (DPR's
                psgs_w100.tsv is one), then a passage a line. A field is unquoted when it begins and
                ends with a double quote and all quotes within are doubled, as csv.QUOTE_MINIMAL
                writes it; any other quote is text;
            `FILE.jsonl[.gz]`: {"id", "title", "text"} per line, title optional, null as none;
            `FILE.parquet`, `FILE.arrow`, or a folder of them: the layout of Hugging Face's
                wiki_dpr, columns id, title and text; others, such as embeddings, are not read;
            `...pages-articles.xml.bz2` (.xml, .xml.gz): a Wikipedia dump, whole articles;
            a folder that wikiextractor --json wrote (AA/wiki_00, ...): whole articles.

    Raises:
        RetrievalError: names file, line (of a table: row) and field: a missing column, an empty id
            or text, an id met before, damaged files of any kind, no passages.
    """
    name, seen, count = os.fspath(path), SeenIds(), 0
    try:
        for where, passage in _rows(name):
            check_passage(passage, seen, where)
            count += 1
            yield passage
    except DataError as error:
        raise RetrievalError(str(error)) from None
    except OSError as error:
        raise RetrievalError(f"{name}: cannot be read: {error}.") from None
    if not count:
        raise RetrievalError(f"{name}: no passages in it; it needs at least one.")


def checked_passages(given: Passages | str | Iterable[str], untitled: bool = False
                     ) -> Iterator[Passage]:
    """One or several passages that a caller gives: each an id, a title and a text, a dictionary of
    these, or an Evidence, of which only these are read.

    Args:
        given: the passages.
        untitled: a string is the text of a passage.

    Raises:
        DataError: one of them is no passage; the message has its number.
    """
    if isinstance(given, bytes) or not can_iterate(given):
        raise DataError(f"passages: expected a list of them, not {given!r:.60}")
    alone = isinstance(given, str | Mapping) or _named(given)
    for number, passage in enumerate([given] if alone else given, 1):
        fields = passage[:3] if _named(passage) else passage
        if untitled and isinstance(passage, str):
            fields = "", "", passage
        elif isinstance(passage, Mapping):
            named = {"title": "", **passage}
            if wrong := named.keys() ^ set(Passage._fields):
                raise DataError(f"passage {number}: unknown or missing: "
                                f"{', '.join(sorted(map(str, wrong)))}; its fields are id, title "
                                "and text")
            named["title"] = "" if named["title"] is None else named["title"]  # JSON's null
            fields = tuple(named[field] for field in Passage._fields)
        if (not isinstance(fields, tuple | list) or len(fields) != 3
                or not all(isinstance(field, str) for field in fields)):
            raise DataError(f"passage {number} is {passage!r:.80}: give its id, its title and its "
                            "text, all strings")
        if not all(map(is_utf8, fields)):
            raise DataError(f"passage {number}, {passage!r:.80}, is not UTF-8: write it so")
        yield Passage(*fields)


def _named(given: Any) -> bool:
    """Whether it has a Passage's fields first, as `types.Evidence`, whose module imports jax."""
    return getattr(given, "_fields", ())[:3] == Passage._fields


def corpus_files(path: str | os.PathLike) -> list[str]:
    """The existing files that `read_corpus` reads of a source."""
    name = os.fspath(path)
    if os.path.isdir(name):
        tables, extracted = _files_below(name)
        return tables or extracted
    return [name] if os.path.exists(name) else []


def _files_below(folder: str) -> tuple[list[str], list[str]]:
    """The tables, and wikiextractor's files AA/wiki_00, AA/wiki_01, ..., in a folder or below it,
    in order. Links are followed; hidden files, which operating systems write, do not count.

    Raises:
        RetrievalError: a folder or a file cannot be looked at, whose passages would be missing.
    """
    def refuse(error: OSError) -> None:
        raise RetrievalError(f"{error.filename}: cannot be read ({error.strerror}): its passages "
                             "would be missing. Make it readable, or move it away.")

    tables, extracted, seen = [], [], set()
    for parent, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        if (real := os.path.realpath(parent)) in seen:  # a second link leads there, or a loop
            folders.clear()
            continue
        seen.add(real)
        folders[:] = [name for name in folders if name[0] != "."]
        for name in names:
            kind = (tables if name.endswith(_TABLES) else
                    extracted if name.startswith("wiki_") else None)
            path = os.path.join(parent, name)
            if kind is None or name[0] == ".":
                continue
            if not os.path.exists(path):
                refuse(FileNotFoundError(errno.ENOENT, "a link to nothing", path))
            if os.path.isfile(path):
                kind.append(path)
    return sorted(tables), sorted(extracted)


def _rows(name: str) -> Iterator[tuple[str, Passage]]:
    """Pairs of place and passage."""
    if os.path.isdir(name):
        tables, extracted = _files_below(name)
        if bool(tables) == bool(extracted):
            raise RetrievalError(
                f"{name}: expected a folder of {' or '.join(_TABLES)} files, or of wikiextractor's "
                f"wiki_00, wiki_01, ...; it has {'both' if tables else 'neither'}. A folder of "
                "documents (PDF, DOCX, HTML, text, ...) is read by rag_jax.ingest."
            )
        return _table_rows(tables) if tables else wikipedia.read_extracted(extracted)
    if name.endswith(_DUMPS):
        return wikipedia.read_dump(name)
    if name.endswith(_TABLES):
        return _table_rows([name])
    readers = {".tsv": _tsv, ".jsonl": _jsonl}
    kind = os.path.splitext(name.removesuffix(".gz"))[1]
    if kind not in readers:
        raise RetrievalError(
            f"{name}: unknown kind of passage file; allowed are .tsv, .tsv.gz, .jsonl, .jsonl.gz, "
            f"{', '.join((*_TABLES, *_DUMPS))}.")
    return readers[kind](name)


def _tsv(name: str) -> Iterator[tuple[str, Passage]]:
    """Yields ("FILE:LINE", the passage in it) of a file with a header."""
    columns: list[str] = []
    for where, _, line in numbered_lines(name):
        fields = [unquoted(field) for field in line.split("\t")]
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


def _jsonl(name: str) -> Iterator[tuple[str, Passage]]:
    """Yields ("FILE:LINE", the passage in it) of a file with an object on each line."""
    for _, record in json_lines(name):
        row = record.fields
        identity = str(row["id"]) if type(row.get("id")) is int else row.get("id")
        title = row["title"] if record.has("title") else ""
        fields = (identity, title, row.get("text"))
        yield record.where, _passage(record.where, fields,
                                     f"; the line has the fields {sorted(row)[:8]}")


def _passage(where: str, fields: Iterable[Any], present: str = "") -> Passage:
    """A passage of its id, title and text, which must be strings; `present` ends the error."""
    passage = Passage(*fields)
    for field, value in passage._asdict().items():
        if not isinstance(value, str):
            raise RetrievalError(
                f"{where}: field {field!r} must be a string, got {value!r:.60}{present}.")
    return passage


def _table_rows(paths: list[str]) -> Iterator[tuple[str, Passage]]:
    """Yields (place, passage) of tables, some rows at a time."""
    import pyarrow  # 0.2 s, so only where it is needed

    for path in paths:
        row = 0
        try:
            for batch in _record_batches(path):
                batch.validate(full=True)
                for start in range(0, batch.num_rows, _ROWS):
                    columns = batch.slice(start, _ROWS).columns
                    for values in zip(*(column.to_pylist() for column in columns), strict=True):
                        row += 1
                        where = f"{path}: row {row}"
                        yield where, _passage(where, values)
        except FileNotFoundError:
            raise RetrievalError(f"{path}: no such file; check the path.") from None
        except UnicodeEncodeError:
            raise RetrievalError(f"{path!r}: its name is not UTF-8, and pyarrow opens no such "
                                 "file; rename it.") from None
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise RetrievalError(
                f"{path}: row {row + 1}: damaged file ({reason}); fetch it again.") from None


def _record_batches(path: str) -> Iterator:
    """Yields pyarrow's batches of the columns id, title and text."""
    import pyarrow
    from pyarrow import ipc, parquet

    if path.endswith(".parquet"):
        with parquet.ParquetFile(path) as file:
            _check_columns(path, file.schema_arrow.names)
            yield from file.iter_batches(_ROWS, columns=_COLUMNS)
    else:
        with pyarrow.memory_map(path) as file:
            whole = file.read(len(_ARROW_FILE)) == _ARROW_FILE  # or else a stream
            file.seek(0)
            with ipc.open_file(file) if whole else ipc.open_stream(file) as opened:
                _check_columns(path, opened.schema.names)
                batches = opened if not whole else map(
                    opened.get_batch, range(opened.num_record_batches))
                for batch in batches:
                    yield batch.select(_COLUMNS)


def _check_columns(path: str, names: list[str]) -> None:
    missing = [name for name in _COLUMNS if names.count(name) != 1]
    if missing:
        raise RetrievalError(f"{path}: row 0: no column {', '.join(missing)}, or several; it has "
                             f"{', '.join(names) or 'none'}.")
