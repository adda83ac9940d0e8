"""`Example`, the checks that every example must pass, and its readers from JSONL and TSV."""

import ast
import csv
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from rag_jax.data.records import Record, can_iterate, json_lines, unquoted
from rag_jax.errors import DataError
from rag_jax.lines import is_utf8, numbered_lines
from rag_jax.quiet import no_warnings

# Strings with commas between them: Python would join 'a' 'b', as numpy prints lists, to one.
_STRING = r"""(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
_ANSWERS = re.compile(r"answers?[\W_]*\d*[\W_]*")  # columns of a table, as headers name them
_ASKED = ("question", "questions")
_OR_HEADER = "unless its header names the columns, question,answer"
_LIST = re.compile(rf"\[\s*(?:{_STRING}(?:\s*,\s*{_STRING})*)?\s*,?\s*\]")


class Example(NamedTuple):
    """One question.

    Attributes:
        id: unique within its source.
        question: the text asked, never empty.
        answers: the accepted answers; the first is the usual training target. Empty where they are
            not known: such a question can be answered, and neither trained on nor scored.
        positive_ids: ids, as in the passage file, of passages known to hold the answer.
        negative_ids: ids of passages known not to hold it (hard negatives).
        targets: the texts that train where they are not the answers; empty = the answers.
        regex: the answers are regular expressions.
        titles: titles of the pages known to hold the answer.
        evidence: KILT's evidence sets: the pages that support an answer together, each as
            "WIKIPEDIA ID<TAB>TITLE", a line a page.
    """

    id: str
    question: str
    answers: tuple[str, ...]
    positive_ids: tuple[str, ...] = ()
    negative_ids: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    regex: bool = False
    titles: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()


LISTS = ("positive_ids", "negative_ids", "targets", "titles", "evidence")  # may be empty


def collect(source: str, rows: Iterable[tuple[str, Example]], hidden: bool = False
            ) -> list[Example]:
    """Checks rows and returns their examples.

    Args:
        source: name of the source, for errors.
        rows: pairs of the place of an example, for errors, and the example.
        hidden: the answers are not known.

    Raises:
        DataError: an invalid example, a duplicate id, or no examples at all.
    """
    examples, seen = [], {}
    for where, example in rows:
        _check(where, example, hidden)
        if example.id in seen:
            raise DataError(
                f"{where}: id {example.id!r} was already used at {seen[example.id]}: ids must be "
                "unique, and a question without one has its line's number; rename or remove one"
            )
        seen[example.id] = where
        examples.append(example)
    if not examples:
        raise DataError(f"{source}: no examples in it: expected at least one question")
    return examples


def check_labels(source: str, examples: Iterable[Example], labels: tuple[str, ...]) -> None:
    """Raises DataError for an answer that is none of a classifier's classes; () = anything is."""
    for example in examples:
        for answer in (*example.answers, *example.targets):
            if labels and answer not in labels:
                raise DataError(
                    f"{source}: question {example.id!r}: the answer {answer!r} is no class: "
                    f"config.eval.labels are {', '.join(map(repr, labels))}; correct the one or "
                    "the other"
                )


def _check(where: str, example: Example, hidden: bool) -> None:
    """Raises DataError for an example that could not be trained on or evaluated."""
    if not example.answers and not hidden:
        raise DataError(f"{where}: no answers: give at least one accepted answer")
    named = [("id", example.id), ("question", example.question)]
    if not isinstance(example.regex, bool):
        raise DataError(f"{where}: regex is {example.regex!r}: expected true or false")
    for field in ("answers", *LISTS):
        given = getattr(example, field)
        if not isinstance(given, tuple | list):
            raise DataError(f"{where}: {field} is {given!r:.60}: expected a tuple of strings")
        named += [(f"{field}[{i}]", text) for i, text in enumerate(given)]
    for field, text in named:
        if not isinstance(text, str):
            raise DataError(f"{where}: {field} is {text!r}: expected a string")
        if not text.strip():
            raise DataError(f"{where}: {field} is empty: give it some text, or remove it")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise DataError(
                f"{where}: {field} holds half of a surrogate pair, {text[error.start]!r}: "
                "write the whole character"
            ) from None
    for i, pages in enumerate(example.evidence):
        if not all("\t" in page for page in pages.split("\n")):
            raise DataError(f"{where}: evidence[{i}] is {pages!r:.60}: expected lines of "
                            "WIKIPEDIA ID<TAB>TITLE, one for each page")
    both = set(example.positive_ids) & set(example.negative_ids)
    if both:
        raise DataError(
            f"{where}: passage {min(both)!r} is named as positive and as negative: keep one"
        )
    if example.regex:
        _check_patterns(where, example.answers)


def _check_patterns(where: str, patterns: Iterable[str]) -> None:
    for i, pattern in enumerate(patterns):
        try:
            with no_warnings():  # of sets such as [[a]
                re.compile(pattern)
        except (re.error, ValueError, OverflowError, RecursionError) as error:
            raise DataError(
                f"{where}: answers[{i}], {pattern[:60]!r}, is not a regular expression ({error}): "
                'mend it, or leave "regex" out'
            ) from None


def read_jsonl(path: str) -> Iterator[tuple[str, Example]]:
    """Yields ("FILE:LINE", example), unchecked, of a JSONL file as `load_examples` describes."""
    for number, record in json_lines(path):
        yield record.where, example_of(record, number)


def example_of(record: Record, number: int) -> Example:
    """The example of a JSON object as `load_examples` describes it, unchecked; its id is `number`
    if it has none."""
    negatives = _one_of(record, "hard_negative_ids", "negative_ids") or "negative_ids"
    answers = _one_of(record, "answers", "answer") or "answers"
    one_answer = answers == "answer" and isinstance(record.fields["answer"], str)
    return Example(
        id=_id(record, number),
        question=record.text("question"),
        answers=(record.text("answer"),) if one_answer else record.texts(answers),
        positive_ids=_ids(record, "positive_ids"),
        negative_ids=_ids(record, negatives),
        targets=record.texts("targets") if record.has("targets") else (),
        regex=record.fields["regex"] if record.has("regex") else False,
        titles=record.texts("titles") if record.has("titles") else (),
    )


def read_asked(path: str) -> list[tuple[str, str]]:
    """(id, question) of every question of a file, whether or not it has answers.

    .jsonl: the fields "question" and "id"; .tsv and .csv: the first field of each line, with tabs
    between, or the columns "question" and "id" of a .csv with a header; other files: a question a
    line. Without an id, the line number, as in `load_examples`.

    Raises:
        FileNotFoundError: no such file.
        DataError: a damaged line, an id that occurs twice, or no question at all.
    """
    suffix = _suffix(path)
    if suffix == ".jsonl":
        rows = [(record.where, _id(record, number), record.text("question"))
                for number, record in json_lines(path)]
    elif suffix == ".json":
        raise DataError(f"{path}: expected an object a line, in a file named .jsonl; or .tsv, or a "
                        "question a line")
    elif suffix in (".tsv", ".csv"):
        rows = [(where, name, question) for where, name, (question, *_) in _table(path)]
    else:
        rows = [(where, str(number), line.strip()) for where, number, line in numbered_lines(path)]
    if not rows:
        raise DataError(f"{path}: no question in it")
    examples = collect(path, ((where, Example(name, text, ())) for where, name, text in rows), True)
    return [(example.id, example.question) for example in examples]


def checked_texts(given: str | Iterable[str], what: str = "question") -> list[str]:
    """The texts as a list; a string is one of them.

    Args:
        given: the texts.
        what: the noun for one of them, for errors.

    Raises:
        DataError: no strings, or one is blank or holds half of a surrogate pair.
    """
    if isinstance(given, bytes | Mapping) or not can_iterate(given):
        raise DataError(f"{what}s: {given!r:.60} is no text: expected a string, or a list of them")
    texts = [given] if isinstance(given, str) else list(given)
    for number, text in enumerate(texts, 1):
        if not isinstance(text, str) or not text.strip():
            raise DataError(f"{what} {number} is {text!r:.60}: expected a text")
        if not is_utf8(text):
            raise DataError(f"{what} {number}, {text!r:.60}, is not UTF-8: write it so")
    return texts


def _id(record: Record, number: int) -> str:
    """The record's id, or else the number of its line."""
    return record.name("id") if record.has("id") else str(number)


def _one_of(record: Record, *keys: str) -> str | None:
    """Returns the one key that the record has, or None."""
    present = [key for key in keys if record.has(key)]
    if len(present) > 1:
        raise DataError(f'{record.where}: both "{keys[0]}" and "{keys[1]}": keep one of them')
    return present[0] if present else None


def _ids(record: Record, key: str) -> tuple[str, ...]:
    if not record.has(key):
        return ()
    ids = record.fields[key]
    if not isinstance(ids, list | tuple) or any(
            isinstance(i, bool) or not isinstance(i, str | int) for i in ids):
        raise record.error(key, "a list of passage ids, strings or integers")
    return tuple(map(str, ids))


def read_tsv(path: str) -> Iterator[tuple[str, Example]]:
    """Yields ("FILE:LINE", example), unchecked, of a TSV file as `load_examples` describes."""
    for where, name, (question, *fields) in _table(path, answered=True):
        if not fields:
            raise DataError(f"{where}: no tab: expected question<TAB>answers (tab separated, also "
                            f"in a .csv, {_OR_HEADER})")
        while len(fields) > 1 and not fields[-1]:  # a spreadsheet makes all rows as long
            fields.pop()
        if fields[0].startswith("[") and len(fields) == 1 or any(map(_listed, fields)):
            fields = _literal_list(where, "\t".join(fields))
        answers = tuple(text.strip() for text in fields)
        yield where, Example(id=name, question=question, answers=answers)


def _suffix(path: str) -> str:
    """The extension of a file's name, before one that says how it is packed."""
    return os.path.splitext(path.lower().removesuffix(".gz").removesuffix(".bz2"))[1]


def _table(path: str, answered: bool = False) -> Iterator[tuple[str, str, list[str]]]:
    """Yields ("FILE:LINE", id, fields) of the questions of a table, without its header. The first
    field is the question; the id is the number of its line, if the table has no ids.

    answered: whether the further fields are read, as answers.
    """
    if _suffix(path) == ".csv":
        line = next((line for _, _, line in numbered_lines(path)), "")
        if separator := next((mark for mark in ",;" if _names_columns(line, mark)), ""):
            yield from _columns(path, separator, answered)
            return
    # Whether questions are the only column; the last field whose quote is still open.
    alone, before = False, ("", "")
    for row, (where, number, line) in enumerate(numbered_lines(path)):
        written = [field.strip() for field in line.split("\t")]
        _check_quotes(before, where, written)
        before = (where, written[-1]) if _is_open(written[-1]) else ("", "")
        fields = [unquoted(field) for field in written]
        alone |= row == 0 and len(fields) == 1 and fields[0].lower() in _ASKED
        # A spreadsheet quotes a question that has a comma; in a .tsv it needs no quotes.
        separated = _suffix(path) == ".csv" and "," in line and fields == written and not alone
        if len(fields) == 1 and (separated or row == 0 and any(
                _names_columns(line, mark) for mark in ",;")):
            raise DataError(f"{where}: no tab: a table's fields are separated by tabs, also in a "
                            f".csv, {_OR_HEADER}, and a question that has commas stands in quotes")
        fields = [field.strip() for field in fields]
        if row > 0 or not _is_header(where, fields, answered):
            yield where, str(number), fields


def _columns(path: str, separator: str, answered: bool) -> Iterator[tuple[str, str, list[str]]]:
    """`_table` of a CSV file whose header names its columns, in any order."""
    rows = _csv_rows(path, separator)
    where, _, header = next(rows)
    names = [name.lower() for name in header]
    asked = [i for i, name in enumerate(names) if name in _ASKED]
    if len(asked) != 1:  # the quotes of the header divide it otherwise
        raise DataError(f"{where}: the columns {', '.join(header)!r:.60}: expected question, "
                        f"answer, with {separator!r} between them")
    answers = [i for i, name in enumerate(names) if _ANSWERS.fullmatch(name)]
    other = {*names} - {names[i] for i in answers} - {"id", *_ASKED, ""}
    if answered and (other or not answers):
        what = f"the column {min(other)!r:.60}" if other else "no column of answers"
        raise DataError(f"{where}: {what}: expected question, answer (or answers, or several, such "
                        "as answer 1) and perhaps id: rename or remove it, or write .jsonl")
    for where, number, fields in rows:
        if len(fields) != len(header):
            raise DataError(f"{where}: the header has {len(header)} fields, and this row "
                            f"{len(fields)}: a field with {separator!r} in it stands in quotes")
        given = [fields[i] for i in answers]
        yield (where, fields[names.index("id")] if "id" in names else str(number),
               [fields[asked[0]], *(filter(None, given) if any(given) else given)])


def _csv_rows(path: str, separator: str) -> Iterator[tuple[str, int, list[str]]]:
    """Yields ("FILE:LINE", line number, fields) of each row, by the line that it begins with."""
    begun: list[tuple[str, int]] = []

    def lines() -> Iterator[str]:
        for where, number, line in numbered_lines(path):
            empty = number - begun[-1][1] - 1 if begun else 0  # lines within quotes
            begun.append((where, number))
            yield "\n" * empty + f"{line}\n"

    rows = csv.reader(lines(), delimiter=separator, skipinitialspace=True, strict=True)
    while True:
        begun.clear()
        try:
            row = next(rows, None)
        except csv.Error as error:
            raise DataError(f"{begun[0][0]}: {error}: a field with quotes, line breaks or "
                            f"{separator!r} in it stands in quotes, and its quotes are doubled"
                            ) from None
        if row is None:
            return
        if any(map(str.strip, row)):  # a spreadsheet may end with rows of commas alone
            yield *begun[0], [field.strip() for field in row]


def _is_open(field: str) -> bool:
    """Whether a field begins with a quote and may not close it; it may be a quote of the text."""
    return field.startswith('"') and field.count('"') % 2 == 1


def _check_quotes(before: tuple[str, str], where: str, fields: Sequence[str]) -> None:
    """Raises DataError for a field that a tab or line break splits: a later one closes its quote.

    before: the place of the line before, and its last field where its quote is open, else "".
    """
    opened = [before] if before[1] else []
    for field in fields:
        if opened and field.endswith('"') and not _is_open(field) and field.count('"') % 2:
            place, begun = opened[0]
            raise DataError(f"{place}: {begun[:60]!r}: the quote that it begins with is closed in "
                            "another field: write spaces for the tabs and line breaks of a field")
        if _is_open(field):
            opened.append((where, field))


def _names_columns(line: str, separator: str) -> bool:
    """Whether a line is a header with such a separator: of the columns, one has the questions, and
    another one their ids or answers."""
    names = [name.strip(' "').lower() for name in line.split(separator)]
    return sum(name in _ASKED for name in names) == 1 and any(
        name == "id" or _ANSWERS.fullmatch(name) for name in names)


def _is_header(where: str, fields: list[str], answered: bool) -> bool:
    """Whether the first line of a table names its columns, which begin with the question."""
    low = [field.lower() for field in fields]
    if {"id", "text", "title"} <= set(low):
        raise DataError(f"{where}: the header of a file of passages: expected questions, with "
                        "their answers after a tab where they are known")
    if set(_ASKED) & set(low[1:]) and {"id", "answer", "answers"} & set(low):
        raise DataError(f"{where}: a header with other columns before the question: the first "
                        "has to be the question, and the others its answers; or write .jsonl")
    header = low[0] in _ASKED
    named = list(filter(None, fields[1:]))
    other = [name for name in named if not _ANSWERS.fullmatch(name.lower())]
    if header and answered and other and len(named) > 1:  # a column alone has the answers
        raise DataError(f"{where}: the column {other[0]!r:.60}: all columns after the question are "
                        "its answers: name it answer if it is one, else remove it, or write .jsonl")
    return header


def _listed(field: str) -> bool:
    """Whether a field begins or ends as a written list does."""
    return field.startswith(("['", '["')) or field.endswith(("']", '"]'))


def _literal_list(where: str, text: str) -> list[str]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        try:
            with no_warnings():  # Python warns of escapes such as \d
                value = ast.literal_eval(text)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            value = None
    if (not isinstance(value, list) or not all(isinstance(item, str) for item in value)
            or not _LIST.fullmatch(text)):
        raise DataError(
            f"{where}: the answers {text[:60]!r} have a bracket but are not a list of strings: "
            "expected one such as ['Lima', \"Côte d'Ivoire\"], or tab-separated answers"
        )
    return value
