"""Passages of whatever files hold them: folders, order, ids, and memory."""

import bz2
import json
import os
import tracemalloc

import pyarrow
import pytest
from pyarrow import parquet

from rag_jax.data import corpora
from rag_jax.data.corpora import checked_passages, read_corpus
from rag_jax.data.wikipedia import read_dump
from rag_jax.errors import DataError
from rag_jax.retrieval.protocol import Passage, RetrievalError
from tests.data.official_files import ARTICLES, DUMP, ROWS, lines, to_arrow, to_parquet


def message_of(path):
    with pytest.raises(RetrievalError) as error:
        list(read_corpus(path))
    return str(error.value)


def renumbered(start):
    return {**ROWS, "id": [str(start + n) for n in range(3)]}


@pytest.mark.parametrize("write, suffix", [(to_parquet, "parquet"), (to_arrow, "arrow")])
def test_a_folder_of_tables_is_read_in_the_order_of_names(tmp_path, write, suffix):
    (tmp_path / "data").mkdir()
    for number in (2, 0, 1):
        name = f"train-0000{number}-of-00003.{suffix}"
        (tmp_path / "data" / name).write_bytes(write(renumbered(10 * number)))
    (tmp_path / "dataset_info.json").write_text("{}")
    (tmp_path / f"a folder.{suffix}").mkdir()
    passages = list(read_corpus(tmp_path))
    assert [p.id for p in passages] == "0 1 2 10 11 12 20 21 22".split()
    assert passages[0] == Passage("0", "Aaron", "Aaron is é.")


def test_both_formats_of_arrow_are_read(tmp_path):
    """The one that is usually called .arrow was said to be damaged."""
    table = pyarrow.table({**ROWS, "other": [0, 1, 2]})
    for name, writer in (("stream", pyarrow.ipc.new_stream), ("file", pyarrow.ipc.new_file)):
        with writer(tmp_path / f"{name}.arrow", table.schema) as opened:
            opened.write_table(table, max_chunksize=2)
    stream, file = (list(read_corpus(tmp_path / f"{name}.arrow")) for name in ("stream", "file"))
    assert file == stream and len(file) == 3
    no_id = table.drop_columns(["id"])
    with pyarrow.ipc.new_file(tmp_path / "file.arrow", no_id.schema) as opened:
        opened.write_table(no_id)
    assert "no column id" in message_of(tmp_path / "file.arrow")


def test_other_columns_of_a_table_are_not_even_read(tmp_path, monkeypatch):
    """wiki_dpr's embeddings are 65 of its 80 GB."""
    path = tmp_path / "a.parquet"
    path.write_bytes(to_parquet(ROWS))
    asked, real = [], parquet.ParquetFile.iter_batches

    def noted(self, size, columns):
        asked.append(columns)
        return real(self, size, columns=columns)

    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", noted)
    assert len(list(read_corpus(path))) == 3 and asked == [["id", "title", "text"]]


def test_wikiextractors_folder_is_read_in_order(tmp_path):
    for folder, name, rows in (("AB", "wiki_00", ARTICLES[1:]), ("AA", "wiki_01", ARTICLES[:1])):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_bytes(lines(rows))
    assert [p.title for p in read_corpus(tmp_path)] == ["Anarchism", "Albedo"]


def test_folders_behind_links_are_read_once_and_hidden_files_not(tmp_path):
    """Their passages were missing, and nobody said so."""
    folder, disk = tmp_path / "w", tmp_path / "disk"
    for place, rows in ((folder, ARTICLES[:1]), (disk, ARTICLES[1:])):
        place.mkdir(parents=True)
        (place / "wiki_00").write_bytes(lines(rows))
    (folder / "AB").symlink_to(disk)
    (disk / "loop").symlink_to(folder)
    (folder / ".AC").mkdir()
    (folder / ".AC" / "wiki_00").write_text("not JSON")
    (folder / "._p.parquet").write_text("no table")
    assert [p.title for p in read_corpus(folder)] == ["Albedo", "Anarchism"]
    (folder / "wiki_01").symlink_to(disk / "gone")
    assert message_of(folder).startswith(f"{folder}/wiki_01: cannot be read (a link to nothing")


@pytest.mark.parametrize("names", [["AA/wiki_00", "AB/wiki_00"], ["a.parquet", "b/c.parquet"]])
def test_a_folder_that_cannot_be_looked_at_is_named(tmp_path, monkeypatch, names):
    scandir = os.scandir
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    closed = str((tmp_path / names[1]).parent)

    def refuse(path):
        if path == closed:
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert message_of(tmp_path).startswith(
        f"{closed}: cannot be read (Permission denied): its passages would be missing")


def test_a_table_whose_name_is_not_utf8_is_named(tmp_path):
    path = tmp_path / os.fsdecode(b"\xff.parquet")
    path.write_bytes(to_parquet(ROWS))
    assert "\\udcff.parquet': its name is not UTF-8" in message_of(path)


def test_ids_that_two_files_share_are_refused(tmp_path):
    for name in ("a.parquet", "b.parquet"):
        (tmp_path / name).write_bytes(to_parquet(ROWS))
    assert message_of(tmp_path).startswith(
        f"{tmp_path}/b.parquet: row 1: id '1' occurs a second time")


def test_folders_of_nothing_or_of_both_are_refused(tmp_path):
    assert "it has neither" in message_of(tmp_path)
    (tmp_path / "a.parquet").write_bytes(to_parquet(ROWS))
    (tmp_path / "wiki_00").write_bytes(lines(ARTICLES))
    assert "it has both" in message_of(tmp_path)


@pytest.mark.parametrize("name", ["none.parquet", "none.arrow", "none.tsv"])
def test_missing_files_are_named(tmp_path, name):
    assert name in message_of(tmp_path / name)


def test_a_dump_without_articles_is_no_corpus(tmp_path):
    path = tmp_path / "x-pages-articles.xml"
    path.write_text(DUMP[: DUMP.index("  <page>")] + "</mediawiki>")
    assert message_of(path) == f"{path}: no passages in it; it needs at least one."


@pytest.mark.parametrize("old, new, message", [
    ("<ns>0</ns>\n    <id>12</id>", "<id>12</id>", ":31: page 'Anarchism': <ns> is 'missing'"),
    ("<title>Anarchism</title>", "<title> </title>", ":32: page ' ': <title> is ' '"),
    ("<id>12</id>", "<id>no</id>", "<id> is 'no'"),
    ("<text>Albedo is the measure.</text>", "", "<text> is 'missing'"),
    ("</page>\n  <page>\n    <title>Merc", "<page>\n <title>Merc", "mismatched tag"),
    ("<mediawiki ", "<feed ", ":1: <feed> where <mediawiki> was expected"),
])
def test_a_damaged_page_is_named_with_its_line(tmp_path, old, new, message):
    path = tmp_path / "x-pages-articles.xml"
    assert old in DUMP
    path.write_text(DUMP.replace(old, new, 1))
    assert message in message_of(path)


def test_a_dump_is_never_in_memory(tmp_path):
    """English Wikipedia has 70 GB of XML."""
    page = ("<page><title>T{0}</title><ns>0</ns><id>{0}</id><revision><id>1</id><text>"
            + "word " * 2000 + "</text></revision></page>")
    path = tmp_path / "x-pages-articles.xml.bz2"
    pages = "".join(page.format(number) for number in range(1, 301))
    path.write_bytes(bz2.compress(f"<mediawiki>{pages}</mediawiki>".encode()))
    list(read_dump(str(path)))  # compiles expressions
    tracemalloc.start()
    assert sum(1 for _ in read_dump(str(path))) == 300
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(pages) > 3e6 and peak < 1e6, peak


def test_a_wikipedia_dump_becomes_a_memory_of_hundred_word_chunks(tmp_path):
    from rag_jax.config import Config
    from rag_jax.config.overrides import replace
    from rag_jax.data.prepare import prepare

    words = " ".join(f"word{n}" for n in range(250))
    dump = tmp_path / "x-pages-articles.xml.bz2"
    dump.write_bytes(bz2.compress(DUMP.replace("Albedo is the measure.", words).encode()))
    (tmp_path / "q.jsonl").write_text(json.dumps(
        {"question": "What is it?", "answers": ["word7"], "positive_ids": ["39.0"]}))
    config = replace(Config(), {
        "data.passages": str(dump), "data.train": str(tmp_path / "q.jsonl"),
        "data.dev": str(tmp_path / "q.jsonl"), "data.chunk_words": 100,
        "data.generator_vocab": 320, "data.retriever_vocab": 120})
    store = prepare(config, tmp_path / "work").stores["passages"]
    found = [store[row] for row in range(len(store))]
    assert [p.id for p in found] == ["12", "39.0", "39.1", "39.2"]
    assert [len(p.text.split()) for p in found[1:]] == [100, 100, 50]
    assert " ".join(p.text for p in found[1:]) == words


def test_long_tables_come_batch_by_batch(tmp_path):
    path = tmp_path / "a.parquet"
    count = 5000
    table = pyarrow.table({"id": [str(n) for n in range(count)], "title": ["T"] * count,
                           "text": ["x" * 10] * count})
    parquet.write_table(table, path)
    assert [p.id for p in read_corpus(path)] == [str(n) for n in range(count)]


def test_damage_that_has_no_text_is_named_too(tmp_path, monkeypatch):
    """An error without text ended in an IndexError of our own."""
    monkeypatch.setattr(corpora, "_record_batches", lambda path: (_ for _ in ()).throw(OSError()))
    with pytest.raises(RetrievalError, match=r"row 1: damaged file \(OSError\)"):
        list(read_corpus(tmp_path / "a.parquet"))


def test_a_passage_that_a_caller_gives_without_a_title_may_say_so():
    """As in a line of JSON, where a title may be null."""
    given = [{"id": "a", "title": None, "text": "x"}, {"id": "b", "text": "y"}]
    assert [*checked_passages(given)] == [("a", "", "x"), ("b", "", "y")]
    with pytest.raises(DataError, match="passage 1 is .* all strings"):
        next(checked_passages([{"id": None, "text": "x"}]))
