"""Sheets for judges: blinded, unblinded again, and counted as by hand."""

import csv
import json
import re
from collections import Counter

import pytest

from rag_jax.errors import DataError
from rag_jax.reproduction.pairwise import (
    CHOICES,
    FIELDS,
    OUTCOMES,
    QUESTIONS,
    Pair,
    read_key,
    read_tally,
    tally,
    write,
    write_tally,
)

PAIRS = [Pair(f"subject {i}", f"first {i}", f"second {i}") for i in range(40)]
CONTROLS = [Pair(f"control {i}", f"true {i}", f"false {i}") for i in range(4)]


@pytest.fixture
def folder(tmp_path):
    write(tmp_path, PAIRS, CONTROLS, seed=0)
    return tmp_path


def sheet(folder):
    with (folder / "sheet.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def judged(folder, name, verdict):
    """A filled-in sheet; verdict(pair's text of the first sentence, question) -> outcome."""
    key, rows = read_key(folder), sheet(folder)
    for row in rows:
        sides = key[row["item"]]
        first = row["sentence_a"] if sides["A"] == "first" else row["sentence_b"]
        row["annotator"] = name
        for question in CHOICES:
            outcome = verdict(first, question)
            row[question] = next((side for side in "AB" if sides[side] == outcome), outcome)
    file = folder / f"{name}.csv"
    with file.open("w", encoding="utf-8", newline="") as out:
        writer = csv.DictWriter(out, FIELDS)
        writer.writeheader()
        writer.writerows(rows)
    return file


def honest(outcome):
    return lambda first, question: "first" if first.startswith("true") else outcome


def test_sheets_hold_every_pair_once_on_random_sides_and_do_not_tell_them(folder):
    rows, key = sheet(folder), read_key(folder)
    assert len(rows) == 44 and [row["item"] for row in rows] == [str(i) for i in range(1, 45)]
    sides = Counter(key[row["item"]]["A"] for row in rows)
    assert 10 < sides["first"] < 34
    for row in rows:
        texts = {"first": row["sentence_a"], "second": row["sentence_b"]}
        if key[row["item"]]["A"] == "second":
            texts = {"first": row["sentence_b"], "second": row["sentence_a"]}
        pair = next(p for p in (*PAIRS, *CONTROLS) if p.subject == row["subject"])
        assert texts == {"first": pair.first, "second": pair.second}
        assert key[row["item"]]["control"] == (pair in CONTROLS)
    page = (folder / "sheet.html").read_text("utf-8")
    assert page.count("<fieldset>") == 44 and '"control"' not in page
    for choices in CHOICES.values():
        assert all(text in page for text in choices.values())
    controls = [int(row["item"]) for row in rows if key[row["item"]]["control"]]
    assert min(controls) < 40, "control items at the end could be told apart"


def test_the_same_seed_gives_the_same_sheets(folder, tmp_path):
    again = tmp_path / "again"
    write(again, PAIRS, CONTROLS, seed=0)
    for name in ("sheet.csv", "sheet.html", "key.json"):
        assert (again / name).read_bytes() == (folder / name).read_bytes()
    write(again, PAIRS, CONTROLS, seed=1)
    assert (again / "key.json").read_bytes() != (folder / "key.json").read_bytes()


def test_html_and_script_of_a_sentence_are_text(tmp_path):
    write(tmp_path, [Pair("<b>", "</script><i>", 'say "&"')], [], seed=0)
    page = (tmp_path / "sheet.html").read_text("utf-8")
    assert "<i>" not in page and "&lt;b&gt;" in page and page.count("</script>") == 1
    data = json.loads(re.search(r"const rows = (\[.*?\]), fields", page)[1])
    assert {data[0]["sentence_a"], data[0]["sentence_b"]} == {"</script><i>", 'say "&"'}


def test_verdicts_are_unblinded_and_the_majority_counts(folder):
    def mixed(first, question):
        return "both" if question == "specificity" else "second"

    sheets = [judged(folder, "ann", honest("second")), judged(folder, "bob", honest("second")),
              judged(folder, "cat", lambda f, q: honest(mixed(f, q))(f, q))]
    counted = tally(read_key(folder), sheets)
    assert counted.pairs == 40 and counted.kept == ["ann", "bob", "cat"] and not counted.dropped
    assert counted.shares["factuality"]["second"] == counted.shares["specificity"]["second"] == 100
    two = tally(read_key(folder), sheets[1:])
    assert two.shares["specificity"] == {"first": 0, "second": 0, "both": 0, "neither": 0,
                                         "no_majority": 100}
    assert sum(two.shares["factuality"].values()) == 100


@pytest.mark.parametrize("separator", [";", "\t"])
def test_a_sheet_may_have_the_separator_of_its_spreadsheet(folder, separator):
    """Excel writes a semicolon wherever the comma is the decimal sign."""
    file = judged(folder, "ann", honest("second"))
    counted = tally(read_key(folder), [file])
    with file.open(encoding="utf-8", newline="") as given:
        rows = list(csv.reader(given))
    with file.open("w", encoding="utf-8-sig", newline="") as out:
        csv.writer(out, delimiter=separator).writerows(rows)
    assert tally(read_key(folder), [file]) == counted


def test_who_fails_the_control_items_is_not_counted(folder):
    good = judged(folder, "ann", honest("second"))
    bad = judged(folder, "eve", lambda first, question: "first" if "first" in first else "second")
    counted = write_tally(folder, [good, bad])
    assert counted.kept == ["ann"] and counted.dropped == ["eve"]
    assert counted.shares["factuality"]["second"] == 100
    assert read_tally(folder) == counted
    with pytest.raises(ValueError, match="nobody is left"):
        tally(read_key(folder), [bad])
    bad.write_text(",".join(FIELDS) + "\n")
    with pytest.raises(DataError, match="no rows below their headers"):
        tally(read_key(folder), [bad])


def test_a_sheet_on_other_models_is_refused(folder, tmp_path):
    """Items have the same numbers everywhere: verdicts on earlier models were counted as these."""
    earlier, good = tmp_path / "earlier", judged(folder, "ann", honest("second"))
    write(earlier, [pair._replace(second=f"before {pair.second}") for pair in PAIRS], CONTROLS, 0)
    with pytest.raises(DataError, match=f"ann.csv: its sentences are not those of {folder}"):
        write_tally(folder, [judged(earlier, "ann", honest("second"))])
    assert read_tally(folder) is None
    good.write_text(good.read_text().replace("second 1", "2nd 1"))  # of a quarter of the rows
    assert write_tally(folder, [good]).kept == ["ann"]
    (folder / "sheet.csv").unlink()
    assert write_tally(folder, [good]).kept == ["ann"]


@pytest.mark.parametrize(("change", "message"), [
    (lambda row: row.update(factuality="maybe"), r"ann.csv:2: factuality is 'maybe'.*A, B, both"),
    (lambda row: row.update(annotator=" "), r"ann.csv:2: annotator is empty"),
    (lambda row: row.update(item="99"), r"ann.csv:2: item '99' is not in key.json"),
    (lambda row: row.update(item="2"), r"ann.csv:3: ann judged item 2 twice"),
])
def test_a_damaged_sheet_names_file_line_and_field(folder, change, message):
    file = judged(folder, "ann", honest("second"))
    rows = list(csv.DictReader(file.open(encoding="utf-8", newline="")))
    change(rows[0])
    with file.open("w", encoding="utf-8", newline="") as out:
        writer = csv.DictWriter(out, FIELDS)
        writer.writeheader()
        writer.writerows(rows)
    with pytest.raises(ValueError, match=message):
        tally(read_key(folder), [file])


def test_missing_files_and_columns_are_named(folder, tmp_path):
    with pytest.raises(ValueError, match="none.csv: no such file"):
        tally(read_key(folder), [tmp_path / "none.csv"])
    (tmp_path / "short.csv").write_text("annotator,item\nann,1\n")
    with pytest.raises(ValueError, match="short.csv:1: no column subject"):
        tally(read_key(folder), [tmp_path / "short.csv"])
    with pytest.raises(ValueError, match="key.json: no such file"):
        read_key(tmp_path / "nowhere")


def test_sentences_are_no_formulas_and_steer_nothing(tmp_path):
    """A generated sentence =HYPERLINK(...) ran in the judge's spreadsheet."""
    write(tmp_path, [Pair("s", "=HYPERLINK(\"http://x\")", "@a\x1b[2J\u202e")], [], seed=0)
    (row,) = sheet(tmp_path)
    assert {row["sentence_a"], row["sentence_b"]} == {"'=HYPERLINK(\"http://x\")",
                                                      r"'@a\x1b[2J\u202e"}
    page = (tmp_path / "sheet.html").read_text("utf-8")
    assert not set(page) & set("\x1b\u202e") and r"/^\s*[=+@＝＋－＠\t\r\n-]/" in page


@pytest.mark.parametrize("content", ["annotator,Namé".encode("latin-1"),
                                     b"annotator\n" + b"x" * 200_000])
def test_a_sheet_that_is_no_csv_is_named(content, folder, tmp_path):
    (tmp_path / "bad.csv").write_bytes(content)
    with pytest.raises(DataError, match=r"bad.csv: no CSV in UTF-8"):
        tally(read_key(folder), [tmp_path / "bad.csv"])


@pytest.mark.parametrize("content", ["{", "null", '{"1": 3}', '{"1": {"A": "first"}}', '{"1": {'
                                     '"A": "first", "B": "zzz", "control": false}}', '{"1": {'
                                     '"A": [], "B": "first", "control": false}}'])
def test_a_damaged_key_is_named(folder, content):
    """A side that is none lost its votes."""
    (folder / "key.json").write_text(content)
    with pytest.raises(DataError, match=r"key.json: damaged"):
        read_key(folder)


@pytest.mark.parametrize("content", [
    "x", "[]", '{"shares": 1}', "3", '{"shares": {}, "pairs": 1, "kept": [], "dropped": []}',
    json.dumps({"shares": {question: dict.fromkeys(OUTCOMES, 1.0) for question in QUESTIONS},
                "pairs": 1, "kept": [], "dropped": 3})])
def test_a_damaged_tally_is_named(tmp_path, content):
    (tmp_path / "tally.json").write_text(content)
    with pytest.raises(DataError, match=r"tally.json: damaged"):
        read_tally(tmp_path)
