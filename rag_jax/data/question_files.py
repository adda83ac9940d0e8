"""`Example`, the checks that every example must pass, and its readers from JSONL and TSV."""

import ast
import gzip
import json
import os
import re
import warnings
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

_QUOTED_FIELD = re.compile(r'"((?:[^"]|"")*)"')


class Example(NamedTuple):
    """One question.

    Attributes:
        id: unique within its source.
        question: the text asked, never empty.
        answers: the accepted answers, at least one; the first is the usual training target.
        positive_ids: ids, as in the passage file, of passages known to hold the answer.
        negative_ids: ids of passages known not to hold it (hard negatives).
        targets: the texts that train where they are not the answers; empty = the answers.
        regex: the answers are regular expressions.
        titles: titles of the pages known to hold the answer.
    """

    id: str
    question: str
    answers: tuple[str, ...]
    positive_ids: tuple[str, ...] = ()
    negative_ids: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    regex: bool = False
    titles: tuple[str, ...] = ()


def collect(source: str, rows: Iterable[tuple[str, Example]]) -> list[Example]:
    """Checks rows and returns their examples.

    Args:
        source: what is read, for errors.
        rows: pairs of the place of an example, for errors, and the example.

    Raises:
        ValueError: an invalid example, a duplicate id, or no examples at all.
    """
    examples, seen = [], {}
    for where, example in rows:
        _check(where, example)
        if example.id in seen:
            raise ValueError(
                f"{where}: id {example.id!r} was already used at {seen[example.id]}: ids must be "
                "unique; rename or remove one"
            )
        seen[example.id] = where
        examples.append(example)
    if not examples:
        raise ValueError(f"{source}: no examples in it: expected at least one question")
    return examples


def _check(where: str, example: Example) -> None:
    """Raises ValueError for an example that could not be trained on or evaluated."""
    if not example.answers:
        raise ValueError(f"{where}: no answers: give at least one accepted answer")
    named = [("id", example.id), ("question", example.question)]
    if not isinstance(example.regex, bool):
        raise ValueError(f"{where}: regex is {example.regex!r}: expected true or false")
    for field in ("answers", "positive_ids", "negative_ids", "targets", "titles"):
        named += [(f"{field}[{i}]", text) for i, text in enumerate(getattr(example, field))]
    for field, text in named:
        if not isinstance(text, str):
            raise ValueError(f"{where}: {field} is {text!r}: expected a string")
        if not text.strip():
            raise ValueError(f"{where}: {field} is empty: give it some text, or remove it")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{where}: {field} holds half of a surrogate pair, {text[error.start]!r}: "
                "write the whole character"
            ) from None
    both = set(example.positive_ids) & set(example.negative_ids)
    if both:
        raise ValueError(
            f"{where}: passage {min(both)!r} is named as positive and as negative: keep one"
        )
    if example.regex:
        _check_patterns(where, example.answers)


def _check_patterns(where: str, patterns: Iterable[str]) -> None:
    for i, pattern in enumerate(patterns):
        try:
            with warnings.catch_warnings(action="ignore"):  # of sets such as [[a]
                re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(
                f"{where}: answers[{i}], {pattern[:60]!r}, is not a regular expression ({error}): "
                'mend it, or leave "regex" out'
            ) from None


def _lines(path: str) -> Iterator[tuple[str, int, str]]:
    """Yields ("FILE:LINE", line number from 1, text without line end) of the lines with content."""
    if not os.path.exists(path):
        raise FileNotFoundError(f"no question file {path}: check the path")
    opener = gzip.open if path.endswith(".gz") else open
    try:
        with opener(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                where = f"{path}:{number}"
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    raise ValueError(
                        f"{where}: byte {error.start} is not UTF-8 ({error.reason}): convert the "
                        "file to UTF-8"
                    ) from None
                if text.strip():
                    yield where, number, text.rstrip("\r\n")
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: damaged gzip file ({error}): write it again") from None


def read_jsonl(path: str) -> Iterator[tuple[str, Example]]:
    """Yields ("FILE:LINE", example), unchecked, of a JSONL file as `load_examples` describes."""
    for where, number, line in _lines(path):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}: not JSON ({error}): expected one object per line") from None
        if not isinstance(record, dict):
            raise ValueError(
                f"{where}: a JSON {type(record).__name__}: expected an object such as "
                '{"question": "...", "answers": ["..."]}'
            )
        if not isinstance(record.get("question"), str):
            raise ValueError(
                f"{where}: {_found(record, 'question')}: expected a string (keys here: "
                f"{', '.join(map(repr, record)) or 'none'})"
            )
        negatives = _one_of(where, record, "hard_negative_ids", "negative_ids") or "negative_ids"
        example = Example(
            id=_id(where, "id", record["id"]) if record.get("id") is not None else str(number),
            question=record["question"].strip(),
            answers=_answers(where, record),
            positive_ids=_ids(where, record, "positive_ids"),
            negative_ids=_ids(where, record, negatives),
            targets=_texts(where, record, "targets"),
            regex=False if record.get("regex") is None else record["regex"],
            titles=_texts(where, record, "titles"),
        )
        yield where, example


def _found(record: dict, key: str) -> str:
    """Says what a record holds under a key, for errors."""
    return f'"{key}" is {json.dumps(record[key])[:60]}' if key in record else f'no "{key}"'


def _one_of(where: str, record: dict, *keys: str) -> str | None:
    """Returns the one key that the record has (null counts as absent), or None."""
    present = [key for key in keys if record.get(key) is not None]
    if len(present) > 1:
        raise ValueError(f'{where}: both "{keys[0]}" and "{keys[1]}": keep one of them')
    return present[0] if present else None


def _answers(where: str, record: dict) -> tuple[str, ...]:
    key = _one_of(where, record, "answers", "answer")
    if key is None:
        raise ValueError(f'{where}: no "answers": expected a list of strings, or "answer"')
    if key == "answer" and isinstance(record[key], str):
        return (record[key].strip(),)
    return _texts(where, record, key)


def _texts(where: str, record: dict, key: str) -> tuple[str, ...]:
    value = record.get(key)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise ValueError(f"{where}: {_found(record, key)}: expected a list of strings")
    return tuple(text.strip() for text in value)


def _id(where: str, field: str, value: Any) -> str:
    """A string, or an integer as one: passage files often number their lines."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError(f"{where}: {field} is {value!r}: expected a string or an integer")
    return str(value)


def _ids(where: str, record: dict, key: str) -> tuple[str, ...]:
    value = record.get(key)
    if value is None:
        return ()
    if not isinstance(value, list):
        raise ValueError(f"{where}: {_found(record, key)}: expected a list of passage ids")
    return tuple(_id(where, f"{key}[{i}]", item) for i, item in enumerate(value))


def read_tsv(path: str) -> Iterator[tuple[str, Example]]:
    """Yields ("FILE:LINE", example), unchecked, of a TSV file as `load_examples` describes."""
    for where, number, line in _lines(path):
        question, *fields = (_unquote(field) for field in line.split("\t"))
        if number == 1 and (question.lower(), *map(str.lower, fields)) == ("question", "answers"):
            continue
        if not fields:
            raise ValueError(
                f"{where}: no tab: expected question<TAB>answers (tab separated, also in a .csv)"
            )
        if len(fields) == 1 and fields[0].startswith("["):
            fields = _literal_list(where, fields[0])
        answers = tuple(text.strip() for text in fields)
        yield where, Example(id=str(number), question=question, answers=answers)


def _unquote(field: str) -> str:
    """Undoes CSV quoting; a quote that does not enclose the whole field is part of the text."""
    field = field.strip()
    match = _QUOTED_FIELD.fullmatch(field)
    return match[1].replace('""', '"').strip() if match else field


def _literal_list(where: str, text: str) -> list[str]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        try:
            with warnings.catch_warnings(action="ignore"):  # Python warns of escapes such as \d
                value = ast.literal_eval(text)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            value = None
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError(
            f"{where}: the answers {text[:60]!r} start with '[' but are not a list of strings: "
            "expected one such as ['Lima', \"Côte d'Ivoire\"], or tab-separated answers"
        )
    return value
