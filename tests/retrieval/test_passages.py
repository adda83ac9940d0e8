"""Passage files and the passage store."""

import csv
import gzip
import json
import random
import types

import numpy as np
import pytest

from rag_jax.citation import Citation
from rag_jax.data.corpora import read_corpus
from rag_jax.retrieval.passages import PassageStore, check_token_ids
from rag_jax.retrieval.protocol import Passage, RetrievalError
from rag_jax.retrieval.store_writing import write_store

TRICKY = [
    Passage("1", "Plain", "one two three"),
    Passage("2", 'The "Title"', '"Golden" she said, and "silver"'),
    Passage("x-3", "", 'a lone " quote, é, 東京, \u2028 and a trailing space '),
    Passage("007", '"', '""'),
]


def words(passages):
    return [[len(word) for word in p.text.split()] for p in passages]


def make_store(path, passages=TRICKY, **encoders):
    return write_store(path, passages, encoders or {"words": words})


def test_dpr_files_written_by_csv_round_trip(tmp_path):
    for name, opener in (("p.tsv", open), ("p.tsv.gz", gzip.open)):
        with opener(tmp_path / name, "wt", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, delimiter="\t")
            writer.writerow(["id", "text", "title"])
            writer.writerows([p.id, p.text, p.title] for p in TRICKY)
        assert list(read_corpus(tmp_path / name)) == TRICKY


@pytest.mark.parametrize(
    "field, text",
    [
        ('"a ""b"" c"', 'a "b" c'),
        ('"a, b"', "a, b"),
        ('"Hello" and "bye"', '"Hello" and "bye"'),
        ('say "hi"', 'say "hi"'),
        ('"', '"'),
        ('"""x"""', '"x"'),
        ('"""', '"""'),
    ],
)
def test_only_a_field_that_csv_quoted_is_unquoted(tmp_path, field, text):
    path = tmp_path / "p.tsv"
    path.write_text(f"title\tid\ttext\nT\t1\t{field}\n", encoding="utf-8")
    assert list(read_corpus(path)) == [Passage("1", "T", text)]


def test_jsonl_title_is_optional_and_a_number_may_be_an_id(tmp_path):
    path = tmp_path / "p.jsonl.gz"
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.write('{"id": 5, "text": "a"}\n\n{"id": "b", "title": "T", "text": "c", "more": 1}\n'
                   '{"id": 6, "title": null, "text": "d"}\n')
    assert list(read_corpus(path)) == [Passage("5", "", "a"), Passage("b", "T", "c"),
                                       Passage("6", "", "d")]


def test_a_byte_order_mark_and_windows_line_ends_are_no_part_of_a_field(tmp_path):
    (tmp_path / "p.tsv").write_bytes(b"\xef\xbb\xbfid\ttext\ttitle\r\n1\ta b\tT\r\n")
    assert list(read_corpus(tmp_path / "p.tsv")) == [Passage("1", "T", "a b")]


HEADER = b"id\ttext\ttitle\n"


@pytest.mark.parametrize(
    "name, content, line, says",
    [
        ("p.tsv", b"id\ttext\n1\ta\n", 1, "title"),
        ("p.tsv", b"1\tsome text\tT\n", 1, "header"),
        ("p.tsv", b"id\ttext\ttitle\ttext\n1\ta\tT\tb\n", 1, "text"),
        ("p.tsv", HEADER + b"1\ta\tT\n2\tb\n", 3, "2 fields"),
        ("p.tsv", HEADER + b"1\ta\tT\n2\tb\tT\textra\n", 3, "4 fields"),
        ("p.tsv", HEADER + b"1\t \tT\n", 2, "'text' is empty"),
        ("p.tsv", HEADER + b"\ta\tT\n", 2, "'id' is empty"),
        ("p.tsv", HEADER + b"\t\t\n", 2, "empty"),
        ("p.tsv", HEADER + b"1\ta\tT\n2\tb\tT\n1\tc\tT\n", 4, "second time"),
        ("p.tsv", HEADER + b"1\t\xff\xfe\tT\n", 2, "UTF-8"),
        ("p.tsv", HEADER, None, "no passages"),
        ("p.tsv", b"", None, "no passages"),
        ("p.jsonl", b'{"id": "1", "text": "a"}\n{"id": "2", "text"\n', 2, "JSON"),
        ("p.jsonl", b'["1", "a"]\n', 1, "expected"),
        ("p.jsonl", b'{"id": "1"}\n', 1, "'text'"),
        ("p.jsonl", b'{"text": "a"}\n', 1, "'id'"),
        ("p.jsonl", b'{"id": true, "text": "a"}\n', 1, "'id'"),
        ("p.jsonl", b'{"id": "1", "text": "a", "title": false}\n', 1, "'title'"),
        ("p.jsonl", b'{"id": "1", "text": ""}\n', 1, "'text' is empty"),
        ("p.jsonl", b'{"id": 1, "text": "a"}\n{"id": "1", "text": "b"}\n', 2, "second time"),
        ("p.jsonl", b'{"id": "1", "text": "\\ud800"}\n', 1, "surrogate"),
        ("p.jsonl", b"[" * 100_000 + b"\n", 1, "JSON"),
        ("p.tsv.gz", b"not gzip at all", 1, "gzip"),
        ("p.tsv.gz", gzip.compress(HEADER + b"1\ta\tT\n", mtime=0)[:-9], None, "gzip"),
        ("p.csv", b"id,text,title\n", None, "unknown kind"),
    ],
)
def test_a_damaged_file_names_file_line_and_field(tmp_path, name, content, line, says):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RetrievalError) as caught:
        list(read_corpus(tmp_path / name))
    assert says in str(caught.value)
    assert f"{name}:{line}:" in str(caught.value) or line is None and name in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(RetrievalError, match="nothing.tsv"):
        list(read_corpus(tmp_path / "nothing.tsv"))


@pytest.mark.parametrize("name", ["p.tsv", "p.jsonl"])
def test_random_damage_is_read_or_refused_but_never_another_exception(tmp_path, name):
    rows = [HEADER] + [f"{i}\ttext {i}\tT\n".encode() for i in range(20)]
    if name == "p.jsonl":
        rows = [json.dumps({"id": str(i), "text": f"é {i}"}).encode() + b"\n" for i in range(20)]
    draw, refused = random.Random(0), 0
    for _ in range(400):
        data = bytearray(b"".join(rows))
        for _ in range(draw.randint(1, 4)):
            place = draw.randrange(len(data))
            data[place : place + draw.choice([0, 1, 5])] = draw.choice(
                [b"", b"\t", b"\n", b'"', b"\xff", b"\x00", b"{", b"}"]
            )
        (tmp_path / name).unlink(missing_ok=True)  # ext4 would wait for the disk
        (tmp_path / name).write_bytes(data)
        try:
            found = list(read_corpus(tmp_path / name))
            assert len({p.id for p in found}) == len(found) and all(p.text.strip() for p in found)
        except RetrievalError as error:
            refused += 1
            assert f"{name}:" in str(error)
    assert refused > 100


def test_ids_of_every_form_are_told_apart(tmp_path):
    ids = ["0", "00", "7", "07", "-7", "+7", "7.0", "٧", "999999999", "9999999999", "a"]
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(json.dumps({"id": i, "text": "t"}) for i in ids), encoding="utf-8")
    assert [p.id for p in read_corpus(path)] == ids
    for repeated in ids:
        with open(path, "a", encoding="utf-8") as file:
            file.write("\n" + json.dumps({"id": repeated, "text": "t"}))
        with pytest.raises(RetrievalError, match=f":{len(ids) + 1}: id .* second time"):
            list(read_corpus(path))
        path.write_text("\n".join(json.dumps({"id": i, "text": "t"}) for i in ids), "utf-8")


def test_a_store_gives_back_what_was_written(tmp_path):
    store = make_store(tmp_path / "deep" / "store")
    assert list(store) == TRICKY and len(store) == 4 and store[np.int64(1)] == TRICKY[1]
    again = PassageStore.open(tmp_path / "deep" / "store")
    assert list(again) == TRICKY and again.fingerprint == store.fingerprint
    assert again.token_tables == ("words",)
    for row in (-1, 4):
        with pytest.raises(IndexError):
            store[row]


def test_many_chunks_are_streamed_and_keep_their_order(tmp_path):
    alive, most = 0, 0

    def generate():
        nonlocal alive, most
        for i in range(3000):
            alive += 1
            most = max(most, alive)
            yield Passage(f"p{i}", f"t{i}", f"text {i}")

    def take(passages):
        nonlocal alive
        alive -= len(passages)
        return [[int(p.id[1:])] * (i % 3) for i, p in enumerate(passages)]

    steps = []
    store = write_store(tmp_path / "s", generate(), {"n": take}, steps.append)
    assert most <= 1024 and sum(steps) == 3000
    assert store[2999] == Passage("p2999", "t2999", "text 2999")
    assert store.tokens("n").row(2051).tolist() == [2051] * ((2051 - 2048) % 3)
    assert store.row_of("p2048") == 2048


def test_token_ids_take_two_bytes_when_all_fit_and_four_otherwise(tmp_path):
    rows = {"small": [0, 65535], "large": [0, 65536], "none": []}
    store = make_store(
        tmp_path / "s", **{n: lambda ps, r=r: [r] * len(ps) for n, r in rows.items()}
    )
    for name, dtype in (("small", "<u2"), ("large", "<u4"), ("none", "<u2")):
        assert store.tokens(name).row(3).tolist() == rows[name]
        assert store.tokens(name).row(3).dtype == dtype
    tokens, mask = store.tokens("none").padded(np.array([1, 2]), 3, 9)
    assert tokens.tolist() == [[9] * 3] * 2 and not mask.any()


def test_padded_cuts_fills_and_masks(tmp_path):
    table = make_store(tmp_path / "s").tokens("words")
    assert table.lengths.tolist() == [3, 5, 10, 1]
    tokens, mask = table.padded(np.array([[0, 3], [1, 0]]), 4, -7)
    assert tokens.dtype == np.int32 and mask.dtype == bool
    assert tokens.tolist() == [[[3, 3, 5, -7], [2, -7, -7, -7]], [[8, 3, 5, 3], [3, 3, 5, -7]]]
    assert mask.sum(-1).tolist() == [[3, 1], [4, 3]]
    for bad in (np.array([-1]), np.array([4]), np.array([0.0])):
        with pytest.raises(RetrievalError, match="words"):
            table.padded(bad, 4, 0)
        with pytest.raises(RetrievalError, match="words"):
            table.row(bad[0])


def test_unknown_names_list_what_is_there(tmp_path):
    store = make_store(tmp_path / "s")
    assert [store.row_of(p.id) for p in TRICKY] == [0, 1, 2, 3]
    with pytest.raises(RetrievalError, match="x-3"):
        store.row_of("x-33")
    with pytest.raises(RetrievalError, match="words"):
        store.tokens("bart")


def test_the_fingerprint_follows_content_alone(tmp_path):
    first = make_store(tmp_path / "a").fingerprint
    assert make_store(tmp_path / "b").fingerprint == first
    other = [TRICKY[0]._replace(title="Plan"), *TRICKY[1:]]
    assert make_store(tmp_path / "c", other).fingerprint != first
    assert make_store(tmp_path / "d", TRICKY[::-1]).fingerprint != first
    assert make_store(tmp_path / "e", words=lambda ps: [[1]] * len(ps)).fingerprint != first


@pytest.mark.parametrize(
    "passages, encoder, says",
    [
        ([], words, "no passages"),
        ([TRICKY[0], TRICKY[0]], words, "passage 2: id .* a second time"),
        ([Passage("1", "", " ")], words, "passage 1: field 'text' is empty"),
        (TRICKY, lambda ps: [[1]], "1 rows for 4"),
        (TRICKY, lambda ps: [[-1]] * 4, "-1"),
        (TRICKY, lambda ps: [[2**31]] * 4, "2147483648"),
    ],
)
def test_a_store_that_cannot_be_written_leaves_no_directory(tmp_path, passages, encoder, says):
    with pytest.raises(RetrievalError, match=says):
        make_store(tmp_path / "s", passages, words=encoder)
    assert not (tmp_path / "s").exists()
    make_store(tmp_path / "s")  # what the failed try left does not disturb
    with pytest.raises(RetrievalError, match="already exists"):
        make_store(tmp_path / "s")


def test_a_damaged_store_is_refused(tmp_path):
    store = make_store(tmp_path / "s")
    for file in sorted((tmp_path / "s").iterdir()):
        whole = file.read_bytes()
        for damaged in (None, whole[:-1], whole + b"x"):
            file.unlink() if damaged is None else file.write_bytes(damaged)
            with pytest.raises(RetrievalError, match=file.name):
                PassageStore.open(store.path)
        file.write_bytes(whole)
    meta = tmp_path / "s" / "meta.json"
    text = meta.read_text()
    for damaged in ("", "[]", text.replace('"passages": 4', '"passages": 3'),
                    text.replace('"words": "<u2"', '"words": "<u4"')):
        meta.write_text(damaged)
        with pytest.raises(RetrievalError, match="meta.json"):
            PassageStore.open(store.path)
    meta.write_text(text.replace('"format": 1', '"format": 3'))
    with pytest.raises(RetrievalError, match="format 3"):
        PassageStore.open(store.path)
    meta.write_text(text)
    assert list(PassageStore.open(store.path)) == TRICKY
    PassageStore.open(store.path, verify=True)
    blob = tmp_path / "s" / "text.blob"
    blob.write_bytes(blob.read_bytes().replace(b"two", b"too"))
    with pytest.raises(RetrievalError, match="text.blob differs"):
        PassageStore.open(store.path, verify=True)
    with pytest.raises(RetrievalError, match="no such"):
        PassageStore.open(tmp_path / "elsewhere")


CITED = {p.id: Citation(f"ordner/datei {i} é.pdf", (10 * i, 10 * i + 7), (i + 1, i + 2),
                        ("A > B", "A > C")[:i]) for i, p in enumerate(TRICKY)}


def test_a_store_keeps_where_its_passages_stand(tmp_path):
    """The place that an answer cites is that of its passage, and damage to it is named."""
    plain = make_store(tmp_path / "plain")
    assert plain.source(0) is None and '"format": 1' in (plain.path / "meta.json").read_text()
    store = write_store(tmp_path / "s", TRICKY, {"words": words}, source=CITED.__getitem__)
    assert [store.source(row) for row in range(4)] == list(CITED.values())
    assert list(store) == TRICKY and store.fingerprint != plain.fingerprint
    other = write_store(tmp_path / "o", TRICKY, {"words": words},
                        source=lambda name: CITED[name]._replace(pages=()))
    assert other.fingerprint != store.fingerprint, "what vouches for a store covers its citations"
    for row in (-1, 4):
        with pytest.raises(RetrievalError, match="outside"):
            store.source(row)
    for name in ("citations.blob", "citations.offsets"):
        whole = (store.path / name).read_bytes()
        for damaged in (whole[:-1], whole[:-1] + b"x"):
            (store.path / name).write_bytes(damaged)
            with pytest.raises(RetrievalError, match=name):
                PassageStore.open(store.path)
        (store.path / name).write_bytes(whole)
    meta = (store.path / "meta.json").read_text()
    (store.path / "meta.json").write_text(meta.replace('"format": 2', '"format": 1'))
    with pytest.raises(RetrievalError, match="meta.json"):
        PassageStore.open(store.path)


@pytest.mark.parametrize("record", [
    [], {}, "file", {"file": "f", "span": [0, 1], "pages": []}, {"span": [0, 1]},
    {"file": 1, "span": [0, 1], "pages": [], "headings": []},
    {"file": "f", "span": [0], "pages": [], "headings": []},
    {"file": "f", "span": [2, 1], "pages": [], "headings": []},
    {"file": "f", "span": [0, 1.5], "pages": [], "headings": []},
    {"file": "f", "span": [0, 1], "pages": [True], "headings": []},
    {"file": "f", "span": [0, 1], "pages": 3, "headings": []},
    {"file": "f", "span": [0, 1], "pages": [], "headings": [None]},
    {"file": "f", "span": [0, 1], "pages": [], "headings": [], "more": 1},
    {"file": "f", "span": [0, 1], "pages": "", "headings": "Setup"},
    {"file": "f", "span": [0, 1], "pages": [0], "headings": []},
])
def test_a_citation_that_somebody_else_has_written_is_refused(tmp_path, record):
    """Anybody can make a store with sound digests."""
    hostile = types.SimpleNamespace(record=lambda: record)
    store = write_store(tmp_path / "s", TRICKY[:1], {}, source=lambda name: hostile)
    with pytest.raises(RetrievalError, match="citation of row 0"):
        store.source(0)


def test_a_citation_reads_as_people_cite():
    assert list(map(str, CITED.values())) == [
        "ordner/datei 0 é.pdf, pages 1 to 2", "ordner/datei 1 é.pdf, pages 2 to 3, A > B",
        "ordner/datei 2 é.pdf, pages 3 to 4, A > B to A > C",
        "ordner/datei 3 é.pdf, pages 4 to 5, A > B to A > C"]
    assert str(Citation("a.pdf", (0, 1), (7,))) == "a.pdf, page 7"


@pytest.mark.parametrize("first", [0, 1, 5])
def test_numbers_as_ids_are_looked_up_by_id_wherever_they_begin(tmp_path, first):
    """Ids that begin at 0 would each give the passage before."""
    ids = [str(first + row) for row in range(4)]
    store = make_store(tmp_path / "store", [Passage(i, "", f"text {i}") for i in ids])
    assert [store[store.row_of(i)].text for i in ids] == [f"text {i}" for i in ids]
    for missing in (str(first + 4), f"0{first}", *([str(first - 1)] if first else [])):
        with pytest.raises(RetrievalError, match=f"the id '{missing}'"):
            store.row_of(missing)


def test_a_token_id_that_no_embedding_table_has_is_refused(tmp_path):
    """Of a table of four bytes, 2^32 - 2 is -2 on a device, which read the row before the last."""
    check_token_ids(np.array([[0, 9]], np.int32), 10, tmp_path, "bart")
    check_token_ids(np.zeros((0, 2), np.int32), 10, tmp_path, "bart")
    for wrong in (10, -2):
        with pytest.raises(RetrievalError, match=f"'bart' has the id {wrong}, .* are 0[.][.]9"):
            check_token_ids(np.array([[0, wrong]], np.int32), 10, tmp_path, "bart")
