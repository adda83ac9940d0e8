"""Blinded pairs for human judges, as in the paper's table 4: sheets, key and tally.

Every judge gets the same pairs: two sentences about a subject, on sides drawn at random, and among
them control items whose right answer is known. Judges do not get the key.
"""

import csv
import io
import json
import pathlib
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rag_jax import files
from rag_jax.errors import DataError
from rag_jax.visible import csv_cell, html_page

QUESTIONS = {"factuality": "Which sentence is more factually true?",
             "specificity": "Which sentence is more specific?"}
CHOICES = {"factuality": {"A": "A is more true", "B": "B is more true", "both": "Both are true",
                          "neither": "Both are completely untrue"},
           "specificity": {"A": "A is more specific", "B": "B is more specific",
                           "both": "Both are specific", "neither": "Neither is specific"}}
FIELDS = ("annotator", "item", "subject", "sentence_a", "sentence_b", *QUESTIONS)
OUTCOMES = ("first", "second", "both", "neither", "no_majority")
CONTROLS_RIGHT = 0.75  # share of its control items that an annotator must get right


class Pair(NamedTuple):
    """Two sentences about a subject, by the first and by the second system."""

    subject: str
    first: str
    second: str


def write(folder: pathlib.Path, pairs: Sequence[Pair], controls: Sequence[Pair], seed: int) -> None:
    """Writes sheet.csv and sheet.html for the judges, and key.json.

    Args:
      folder: made where it is missing.
      pairs: to be judged.
      controls: pairs whose first sentence is true and whose second one is not.
      seed: draws sides and order; the same pairs and seed give the same sheets.
    """
    items = [(pair, False) for pair in pairs] + [(pair, True) for pair in controls]
    rng = random.Random(f"pairwise {seed}")
    rng.shuffle(items)
    rows, key = [], {}
    for number, (pair, control) in enumerate(items, 1):
        sides = ["first", "second"]
        rng.shuffle(sides)
        key[str(number)] = {"A": sides[0], "B": sides[1], "control": control}
        sentences = (getattr(pair, side) for side in sides)
        rows.append(dict(zip(FIELDS, ("", str(number), pair.subject, *sentences, "", ""),
                             strict=True)))
    folder.mkdir(parents=True, exist_ok=True)
    files.write_text(folder / "sheet.csv", _csv(rows))
    files.write_text(folder / "sheet.html", _page(rows))
    files.write_json(folder / "key.json", key)


def _csv(rows: Sequence[Mapping[str, str]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, FIELDS, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: csv_cell(text) for name, text in row.items()} for row in rows)
    return text.getvalue()


def _page(rows: Sequence[Mapping[str, str]]) -> str:
    """A form whose filled-in CSV is a download; nothing leaves the judge's machine."""
    return html_page("sheet.html", title="Two sentences about a subject", rows=rows, fields=FIELDS,
                     questions=QUESTIONS, choices=CHOICES)


class Tally(NamedTuple):
    """Percent of the pairs by question and outcome, and who was counted."""

    shares: dict[str, dict[str, float]]
    pairs: int
    kept: list[str]
    dropped: list[str]


def read_tally(folder: pathlib.Path) -> Tally | None:
    """tally.json of a folder, None where nothing was tallied.

    Raises:
      DataError: it is damaged.
    """
    file = folder / "tally.json"
    if not file.is_file():
        return None
    try:
        tallied = Tally(**json.loads(file.read_text("utf-8")))
        for question in QUESTIONS:
            for outcome in OUTCOMES:
                float(tallied.shares[question][outcome])
        ", ".join([*tallied.kept, *tallied.dropped])  # a TypeError where they are no texts
        return tallied
    except (TypeError, ValueError, KeyError) as error:
        raise DataError(f"{file}: damaged ({error}); tally the sheets again") from None


def write_tally(folder: pathlib.Path, sheets: Sequence[pathlib.Path]) -> Tally:
    """Tallies filled-in sheets with the folder's key, and keeps the result beside it.

    Raises:
      DataError: as of `tally`; or a sheet has other sentences than the folder's.
    """
    key = read_key(folder)
    counted = tally(key, sheets)
    for sheet in sheets:
        _check_sentences(sheet, key, folder / "sheet.csv")
    files.write_json(folder / "tally.json", counted._asdict())
    return counted


def read_key(folder: pathlib.Path) -> dict[str, dict]:
    """key.json of a folder.

    Raises:
      DataError: there is none, or it is damaged.
    """
    file = folder / "key.json"
    if not file.is_file():
        raise DataError(f"{file}: no such file; make the sheets first, or name their --workdir")
    try:
        key = json.loads(file.read_text("utf-8"))
        for item, sides in key.items() if isinstance(key, dict) else [("", key)]:
            if not (isinstance(sides, dict) and sides.keys() == {"A", "B", "control"}
                    and {sides["A"], sides["B"]} == {"first", "second"}
                    and isinstance(sides["control"], bool)):
                raise ValueError(f"item {item!r} is {sides!r:.60}")
        return key
    except (TypeError, ValueError) as error:
        raise DataError(f"{file}: damaged ({error}); the sheets cannot be told apart without it, "
                        "restore it") from None


def tally(key: Mapping[str, Mapping], sheets: Sequence[pathlib.Path]) -> Tally:
    """Unblinds filled-in sheets and counts the majority's outcome of every pair.

    Annotators who fail control items (less than CONTROLS_RIGHT of them right) are left out; a
    pair whose judges do not agree by more than half has no majority.

    Args:
      key: the sheets' key, as `read_key` returns it.
      sheets: .csv files in the form of sheet.csv, of one or more annotators each; a semicolon or a
        tab may stand for the comma.

    Raises:
      DataError: a damaged sheet (file, line and field are named), an answer given twice, or
        nobody left to count.
    """
    answers: dict[str, dict[str, dict[str, str]]] = {}
    for sheet in sheets:
        for where, row in _rows(sheet, key):
            given = answers.setdefault(row["annotator"], {})
            if row["item"] in given:
                raise DataError(f"{where}: {row['annotator']} judged item {row['item']} twice; "
                                 "keep one of the lines")
            given[row["item"]] = {
                name: key[row["item"]].get(row[name], row[name]) for name in QUESTIONS}
    if not answers:
        raise DataError("the sheets have no rows below their headers: nothing is judged")
    controls = {item for item, sides in key.items() if sides["control"]}

    def passes(given: Mapping[str, Mapping[str, str]]) -> bool:
        right = sum(given.get(item, {}).get("factuality") == "first" for item in controls)
        return right >= CONTROLS_RIGHT * len(controls)

    kept = sorted(name for name, given in answers.items() if passes(given))
    if not kept:
        raise DataError("every annotator failed the control items: nobody is left to count")
    shares, items = {}, sorted(set(key) - controls)
    judged = [i for i in items if any(i in answers[name] for name in kept)]
    for question in QUESTIONS:
        outcomes = Counter(_majority([answers[name][item][question] for name in kept
                                      if item in answers[name]]) for item in judged)
        shares[question] = {o: 100 * outcomes[o] / max(len(judged), 1) for o in OUTCOMES}
    return Tally(shares, len(judged), kept, sorted(set(answers) - set(kept)))


def _majority(votes: Sequence[str]) -> str:
    (outcome, count), = Counter(votes).most_common(1)
    return outcome if 2 * count > len(votes) else "no_majority"


def _check_sentences(sheet: pathlib.Path, key: Mapping[str, Mapping], given: pathlib.Path) -> None:
    """Raises DataError for a sheet on other models, with the same item numbers. Some rows may
    differ, as spreadsheets rewrite what looks like a date."""
    if not given.is_file():
        return
    asked = {row.get("item"): row for _, row in _lines(given)[1]}
    pairs = [(row, asked[row["item"]]) for _, row in _rows(sheet, key) if row["item"] in asked]
    same = [all(row[name] == (of.get(name) or "").strip() for name in ("sentence_a", "sentence_b"))
            for row, of in pairs]
    if 2 * sum(same) < len(same):
        raise DataError(f"{sheet}: its sentences are not those of {given}: name the --workdir "
                        "that it was made in")


def _rows(sheet: pathlib.Path, key: Mapping[str, Mapping]):
    """("FILE:LINE", row) of a filled-in sheet, checked."""
    if not sheet.is_file():
        raise DataError(f"--tally={sheet}: no such file")
    columns, rows = _lines(sheet)
    lacking = [name for name in FIELDS if name not in columns]
    if lacking:
        raise DataError(f"{sheet}:1: no column {', '.join(lacking)}; expected those of "
                        f"sheet.csv: {', '.join(FIELDS)}")
    for number, row in rows:
        where = f"{sheet}:{number}"
        row = {name: (row[name] or "").strip() for name in FIELDS}
        if row["item"] not in key:
            raise DataError(f"{where}: item {row['item']!r} is not in key.json: the sheet "
                            "belongs to another key")
        if not row["annotator"]:
            raise DataError(f"{where}: annotator is empty: write who judged")
        for name in QUESTIONS:
            if row[name] not in CHOICES[name]:
                raise DataError(f"{where}: {name} is {row[name]!r}: expected one of "
                                f"{', '.join(CHOICES[name])}")
        yield where, row


def _lines(sheet: pathlib.Path) -> tuple[Sequence[str], list[tuple[int, dict[str, str]]]]:
    """The columns of a sheet, and its rows with their line numbers."""
    try:
        text = sheet.read_text("utf-8-sig")
        separator = max(",;\t", key=text.partition("\n")[0].count)  # spreadsheets differ
        reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=separator)
        rows = [(reader.line_num, row) for row in reader]
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{sheet}: no CSV in UTF-8 ({error}): save it as such again") from None
    return reader.fieldnames or (), rows
