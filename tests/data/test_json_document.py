"""A document read piece by piece is the document, wherever the pieces end."""

import contextlib
import gzip
import json
import random
import re

import pytest

from rag_jax.data import json_document
from rag_jax.data.json_document import JsonDocument, json_array, json_columns

RECORDS = [{"a": [1, -2.5e-3, True, None], "é": 'x "y" \\ \n \u2028 𝄞', "b": {"c": []}}, {},
           {"a": 12345678901234567890, "long": "w" * 300}]


def written(tmp_path, value, indent=None, ascii_only=False):
    path = tmp_path / "document.json"
    path.write_text(json.dumps(value, indent=indent, ensure_ascii=ascii_only), "utf-8")
    return str(path)


@pytest.mark.parametrize("number", ["1.5", "1e5", "1e-5", "1E+05", "-1.25e-07", "12"])
@pytest.mark.parametrize("chunk", range(1, 12))
def test_a_number_at_the_cursor_may_lie_across_two_pieces(tmp_path, monkeypatch, number, chunk):
    """The 1 of 1.5 was taken for the whole, and the point for damage."""
    monkeypatch.setattr(json_document, "_CHUNK", chunk)
    path = tmp_path / "document.json"
    path.write_text(f'{{"Version": {number}, "Data": [{{"a": {number}}}]}}')
    assert [record.fields for _, record in json_array(str(path), "Data")] == [
        {"a": json.loads(number)}]


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 64, 1 << 16])
@pytest.mark.parametrize("indent", [None, 2])
def test_pieces_of_any_size_give_the_same_records(tmp_path, monkeypatch, chunk, indent):
    """A number, an escape or a letter of several bytes may lie across two pieces."""
    monkeypatch.setattr(json_document, "_CHUNK", chunk)
    path = written(tmp_path, RECORDS, indent, ascii_only=indent is None)
    assert [record.fields for _, record in json_array(path)] == RECORDS
    path = written(tmp_path, {"x": RECORDS, "Data": RECORDS, "y": 12, "z": [[1], "]"]}, indent)
    assert [record.fields for _, record in json_array(path, "Data")] == RECORDS
    columns = {name: {str(i): r for i, r in enumerate(RECORDS)} for name in "pqr"}
    path = written(tmp_path, columns, indent)
    assert json_columns(path, ("r", "p")) == {"p": columns["p"], "r": columns["r"]}
    with contextlib.closing(JsonDocument(written(tmp_path, 123456))) as document:
        assert document.value() == 123456
        document.end()


def test_lines_are_counted_once_behind_a_large_value(tmp_path):
    """For each record all before it was counted again: a minute for 32 MB."""
    class Counted(str):
        """A text that adds up how many characters are looked through."""

        seen = 0

        def count(self, what, begin=0, end=None):
            Counted.seen += (len(self) if end is None else end) - begin
            return super().count(what, begin, end)

    records = [{"a": "x" * 10_000}, *[{"a": str(i)} for i in range(500)]]
    with contextlib.closing(JsonDocument(written(tmp_path, records, indent=1))) as document:
        document._fill()
        document._text = Counted(document._text)
        places = []
        for _ in document.items("[]"):
            places.append(document.where)
            document.skip()
    assert Counted.seen <= len(document._text)
    assert [int(each.rpartition(":")[2]) for each in places] == [2 + 3 * i for i in range(501)]


def test_the_largest_piece_in_memory_is_a_value(tmp_path, monkeypatch):
    """Files of this form have gigabytes."""
    monkeypatch.setattr(json_document, "_CHUNK", 100)
    path = written(tmp_path, {"skipped": list(range(20000)), "Data": [{"a": "x" * 50}] * 2000})
    with contextlib.closing(JsonDocument(path)) as document:
        held = []
        for name in document.items("{}"):
            if name == "skipped":
                document.skip()
                continue
            for _ in document.items("[]"):
                document.value()
                held.append(len(document._text))
    assert len(held) == 2000 and max(held) < 1000


@pytest.mark.parametrize("text, message", [
    ('[{"a": 1},\n {"a": }]', r":2: record 2: not JSON \(Expecting value"),
    ('[{"a": 1}\n {"a": 2}]', r":2: record 1: not JSON \('\{' where ',' or '\]' was expected"),
    ('[{"a": 1},\n\n3]', ":3: record 2: a JSON int: expected an object"),
    ('[{"a": 1}, {"a": "cut', ":1: record 2: not JSON .*Unterminated string"),
    ('[{"a": 1}', r":1: record 1: not JSON \(it ends where ',' or '\]' was expected"),
    ('[{"a": 1}]\n[]', ":2: not JSON .*text after the end"),
    ('{"a": 1}', r":1: not JSON \('\{' where '\[' was expected"),
    ("", r":1: not JSON \(it ends where '\[' was expected"),
    (f'[{"9" * 5000}]', ":1: record 1: not JSON .*Exceeds the limit"),
    ("[" * 100_000, ":1: record 1: not JSON .*nested too deeply"),
    ('[{"a": "\x01"}]', ":1: record 1: not JSON .*Invalid control character"),
])
def test_errors_name_line_and_record(tmp_path, text, message):
    path = tmp_path / "bad.json"
    path.write_text(text, "utf-8")
    with pytest.raises(ValueError, match=re.escape(str(path)) + message):
        list(json_array(str(path)))


def test_damage_in_the_middle_is_found_without_reading_the_rest(tmp_path, monkeypatch):
    """A gigabyte read on in the hope of an end would be a gigabyte in memory."""
    monkeypatch.setattr(json_document, "_CHUNK", 100)
    path = tmp_path / "bad.json"
    path.write_text('[{"a": nul}, ' + '{"a": 1}, ' * 10_000 + "{}]")
    document = JsonDocument(str(path))
    with contextlib.closing(document), pytest.raises(ValueError, match="bad.json:1: not JSON"):
        for _ in document.items("[]"):
            document.value()
    assert len(document._text) < 1000


def test_bytes_that_are_not_text_and_damaged_packing(tmp_path):
    path = tmp_path / "bad.json"
    path.write_bytes(b'[{"a": "\xff"}]')
    with pytest.raises(ValueError, match=r"bad.json:1.*not UTF-8"):
        list(json_array(str(path)))
    path.write_bytes(b'[{"a": "\xc3')
    with pytest.raises(ValueError, match=r"bad.json:1.*not UTF-8"):
        list(json_array(str(path)))
    packed = tmp_path / "bad.json.gz"
    letters = "".join(random.Random(0).choices("abcdefgh", k=300_000))
    packed.write_bytes(gzip.compress(json.dumps([{"a": "b"}, {"a": letters}]).encode())[:-50])
    with pytest.raises(ValueError, match=r"bad.json.gz:1: record 2: damaged file"):
        list(json_array(str(packed)))
    with pytest.raises(FileNotFoundError, match="no file"):
        list(json_array(str(tmp_path / "none.json")))


@pytest.mark.parametrize("value, message", [
    ({"p": {"0": 1}}, 'no column "q": it has \'p\''),
    ({"p": {"0": 1}, "q": {"1": 1}}, 'record 0 is not in both "p" and "q"'),
    ({"p": {"0": 1}, "q": {}}, "record 0 is not in both"),
    ({"p": {"0": 1}, "q": []}, r"'\[' where '\{' was expected"),
    ({}, "none of those expected"),
])
def test_columns_must_have_the_same_rows(tmp_path, value, message):
    with pytest.raises(ValueError, match=message):
        json_columns(written(tmp_path, value), ("p", "q"))


def test_a_column_or_row_that_comes_twice_is_refused(tmp_path):
    path = tmp_path / "twice.json"
    path.write_text('{"p": {"0": 1}, "p": {"0": 2}}')
    with pytest.raises(ValueError, match='"p" occurs a second time'):
        json_columns(str(path), ("p",))
    path.write_text('{"p": {"0": 1, "0": 2}}')
    with pytest.raises(ValueError, match='"0" occurs a second time'):
        json_columns(str(path), ("p",))


def test_an_array_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match='no "Data" in it'):
        list(json_array(written(tmp_path, {"data": []}), "Data"))
