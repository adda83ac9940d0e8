"""One reader of lines: what ends a line, what is skipped, and true words about what is not text."""

import bz2
import gzip

import pytest

from rag_jax.data.corpora import read_corpus
from rag_jax.data.question_files import checked_texts, read_asked, read_jsonl
from rag_jax.errors import DataError
from rag_jax.lines import numbered_lines
from rag_jax.retrieval.protocol import RetrievalError

SEPARATORS = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg"  # str.splitlines() would end lines at all


def lines(path):
    return [text for _, _, text in numbered_lines(path)]


def test_only_newlines_end_a_line_and_a_mark_is_skipped(tmp_path):
    """U+2028 inside a JSON string cut the record in two; a BOM made the first one no JSON."""
    file = tmp_path / "q.jsonl"
    file.write_bytes(f"\ufeff{SEPARATORS}\r\n\r\n  \n last\t".encode())
    assert list(numbered_lines(file)) == [
        (f"{file}:1", 1, SEPARATORS), (f"{file}:4", 4, " last\t")]  # an empty field of a table


@pytest.mark.parametrize("reader, line", [
    (read_asked, '{"question": "%s", "answers": ["x"]}'),
    (read_jsonl, '{"question": "%s", "answers": ["x"]}'),
    (read_corpus, '{"id": "1", "text": "%s"}'),
])
def test_every_reader_keeps_separators_inside_json(reader, line, tmp_path):
    file = tmp_path / "f.jsonl"
    text = "a\u2028b\u2029c\x85d"
    file.write_text("\ufeff" + line % text + "\n", "utf-8")
    (row,) = reader(str(file))
    assert text in (row[1] if reader is read_jsonl else row)


@pytest.mark.parametrize("content, told", [
    (b"one\rtwo\rthree", "carriage return alone"),
    (gzip.compress(b"one\n", mtime=0), "gzip, rename it to end in .gz"),
    (bz2.compress(b"one\n"), "rename it to end in .bz2"),
    (b"PK\x03\x04rest", "a zip archive"),
    ("one\n".encode("utf-16"), ":1: byte 0 is not UTF-8"),
    (b'{"id": 1, "text": "x"}\n\xff\n', ":2: byte 0 is not UTF-8"),
])
def test_what_is_no_text_of_lines_is_named(content, told, tmp_path):
    """A gzip file without .gz was "not UTF-8"; a file of CRs was one line that is no JSON."""
    file = tmp_path / "file.jsonl"
    file.write_bytes(content)
    with pytest.raises(DataError) as error:
        lines(file)
    assert told in str(error.value) and str(file) in str(error.value)
    with pytest.raises(RetrievalError) as error:
        list(read_corpus(file))
    assert told in str(error.value)


def test_a_folder_is_named_as_one(tmp_path):
    """It was a bare "[Errno 21] Is a directory"."""
    with pytest.raises(DataError, match="a folder, where a file is expected"):
        read_asked(str(tmp_path))


def test_a_carriage_return_inside_a_line_is_text(tmp_path):
    file = tmp_path / "f.tsv"
    file.write_bytes(b"a\rb\nc\r\r\n")
    assert lines(file) == ["a\rb", "c"]


def test_questions_without_answers_are_read_by_their_ids(tmp_path):
    table, plain, objects = (tmp_path / f"q.{kind}" for kind in ("tsv", "txt", "jsonl"))
    table.write_text('question\tanswers\n"Who ""is"" it?"\tShe\tHe\nWhere?\n')
    plain.write_text("Who?\n\n  Where?\n")
    objects.write_text('{"question": "Who?"}\n{"id": 7, "question": "Where?"}\n')
    assert read_asked(str(table)) == [("2", 'Who "is" it?'), ("3", "Where?")]
    assert read_asked(str(plain)) == [("1", "Who?"), ("3", "Where?")]
    assert read_asked(str(objects)) == [("1", "Who?"), ("7", "Where?")]


def test_a_string_is_one_question_and_every_question_a_text():
    """`answer("Who is ...?")` answered thirty questions of a letter each."""
    assert checked_texts("Who is it?") == ["Who is it?"]
    assert checked_texts(["Who?", "Where?"]) == ["Who?", "Where?"]
    assert checked_texts([]) == []
    for bad in ("", ["Who?", None], ["Who?", "\t"], [5], ["\ud800"]):
        with pytest.raises(DataError, match="question [12]"):
            checked_texts(bad)
    for bad in (None, 5, b"Who?", {"question": "Who?"}):  # of the dictionary, its key was asked
        with pytest.raises(DataError, match="is no text: expected a string, or a list of them"):
            checked_texts(bad)


@pytest.mark.parametrize("content, told", [
    ('{"question": 5}', ':1: "question" is 5'), ('{"q": "x"}', 'no "question"'), ("[", "not JSON"),
    ("", "no question in it"), ('{"id": "a", "question": "x"}\n' * 2, ":2: id 'a' was already"),
])
def test_a_file_that_asks_nothing_is_refused(content, told, tmp_path):
    file = tmp_path / "q.jsonl"
    file.write_text(content)
    with pytest.raises(DataError) as error:
        read_asked(str(file))
    assert told in str(error.value)
