"""What the readers of official files refuse, by name; what they read is in test_damaged_files."""

import io
import zipfile

import pytest

from rag_jax.data import task_files
from tests.data.official_files import (
    BIENCODER,
    CLUES,
    FEVER,
    KILT,
    TRIVIA,
    WEB,
    clue,
    document,
    zipped,
)
from tests.data.official_files import lines as to_lines

NO_EVIDENCE, EVIDENCE = FEVER[2]["evidence"], FEVER[1]["evidence"]


def one_trivia(**answer):
    record = TRIVIA["Data"][0]
    return {"Data": [{**record, "Answer": {**record["Answer"], **answer}}]}


def zipped_text(text, how=zipfile.ZIP_DEFLATED):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", how) as archive:
        archive.writestr("train/000001.json", text)
    return out.getvalue()


def damaged_lzma(text):
    content = bytearray(zipped_text(text, zipfile.ZIP_LZMA))
    place = content.index(b"train/000001.json") + len("train/000001.json") + 4
    content[place:place + 9] = b"\xff" * 9  # what LZMA is told, and the beginning of its data
    return bytes(content)


@pytest.mark.parametrize("read, write, content, message", [
    ("fever", to_lines, [{**FEVER[0], "label": "Supports"}],
     ':1: "label" is "Supports": expected one of SUPPORTS, REFUTES, NOT ENOUGH INFO'),
    ("fever", to_lines, [FEVER[0], {**FEVER[1], "evidence": NO_EVIDENCE}],
     ":2: .*expected pages for REFUTES"),
    ("fever", to_lines, [{**FEVER[2], "evidence": EVIDENCE}],
     ":1: .*expected no page for NOT ENOUGH INFO"),
    ("fever", to_lines, [{**FEVER[1], "evidence": [[[1, 2, "Page"]]]}], "expected sets of"),
    ("fever", to_lines, [{**FEVER[1], "evidence": [[[1, 2, 3, 4]]]}], "expected sets of"),
    ("fever", to_lines, [{**FEVER[1], "evidence": [[]]}], "expected sets of"),
    ("web_questions", document, [WEB[0], {**WEB[1], "targetValue": "(description Padmé)"}],
     r": record 2: .targetValue. is .*expected \(list \(description"),
    ("web_questions", document, [{**WEB[1], "targetValue": "(list)"}], "targetValue"),
    ("web_questions", document, [{**WEB[1], "targetValue": '(list (description "a) (b "c"))'}],
     "targetValue"),
    ("kilt", to_lines, [{**KILT[1], "output": [{"anwser": "He"}]}],
     r":1: output\[0\]: keys anwser: expected answer, provenance, meta"),
    ("kilt", to_lines, [{**KILT[1], "output": [{"answer": "He", "provenance": [{"title": "T"}]}]}],
     r':1: output\[0\]: provenance\[0\]: no "wikipedia_id"'),
    ("dpr_json", document, [{**BIENCODER[1], "positive_ctxs": [{"title": "T", "text": "x"}]}],
     r': record 1: positive_ctxs\[0\]: no "passage_id"'),
    ("trivia_qa", document, one_trivia(Aliases="one"), ': record 1: Answer: "Aliases" is "one"'),
    ("trivia_qa", document, one_trivia(HumanAnswers=[1]), '"HumanAnswers" is'),
    ("search_qa", zipped, {**CLUES, "000009.json": {**clue("q", "a", 50), "answer": 5}},
     r": record 4 \(train/000009.json\): .answer. is 5"),
    ("search_qa", lambda digits: zipped_text(f'{{"answer": {digits}}}'), "9" * 5000,
     r": record 1 \(train/000001.json\): not JSON \(Exceeds the limit"),
    ("search_qa", damaged_lzma, "x" * 900, ": record 1 .*: damaged zip file"),
    ("search_qa", zipped_text, " " * (task_files.LARGEST_MEMBER + 1), ": record 1 .*zip bombs"),
    ("dpr_json", str.encode, '[{"question": ' + "9" * 5000, ":1: record 1: not JSON .*Exceeds"),
])
def test_what_is_wrong_is_named_with_its_place(tmp_path, read, write, content, message):
    path = tmp_path / "file"
    path.write_bytes(write(content))
    with pytest.raises(ValueError, match=str(path) + ".*" + message):
        list(getattr(task_files, f"read_{read}")(str(path)))


def test_what_annotators_answered_counts_too(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(document(one_trivia(HumanAnswers=["Sunset", "Sunset Blvd", " "])))
    ((_, example),) = task_files.read_trivia_qa(str(path))
    assert example.answers == ("Sunset Boulevard", "Sunset Blvd", "West Sunset Boulevard", "Sunset")


@pytest.mark.parametrize("page, title", [
    ("Gladiator_-LRB-2000_film-RRB-", "Gladiator (2000 film)"),
    ("Star_Trek-COLON-_Generations", "Star Trek: Generations"),
    ("Cafe\u0301", "Café"), ("-LSB-x-RSB-_-LCB-y-RCB-", "[x] {y}")])
def test_pages_of_fever_are_written_as_wikipedia_does(page, title):
    assert task_files.fever_title(page) == title


def test_a_line_break_of_a_clue_separates_its_words(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(zipped({"000001.json": clue("Lima<br />is in <i>Peru</i>", "It<br>is", 41)}))
    ((_, example),) = task_files.read_search_qa(str(path))
    assert (example.question, example.answers) == ("It is", ("Lima is in Peru",))
