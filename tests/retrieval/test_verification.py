"""What was handed over is verified before it is used: flipped bytes, tables that lie, links."""

import errno
import json
import os
import pickle
import shutil
import threading

import numpy as np
import pytest

from rag_jax.retrieval import json_files, verification
from rag_jax.retrieval.bm25 import Bm25Index
from rag_jax.retrieval.index import PassageIndex
from rag_jax.retrieval.manifest import MANIFEST
from rag_jax.retrieval.passages import META, PassageStore
from rag_jax.retrieval.protocol import Passage, RetrievalError
from rag_jax.retrieval.store_writing import write_store
from rag_jax.retrieval.verification import VerifiedFiles, file_entry
from rag_jax.retrieval.versions import current
from tests.retrieval import small_blocks
from tests.retrieval.small_blocks import WIDTH


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder of each kind, made with small blocks."""
    return small_blocks.folder_of_each_kind(tmp_path_factory)


def damage(path, name, place):
    data = bytearray((path / name).read_bytes())
    data[place] ^= 1
    (path / name).write_bytes(data)


@pytest.mark.parametrize("needs_digest", [False, True])
def test_a_record_that_was_changed_is_refused_with_advice_that_helps(tmp_path, needs_digest):
    """Without its last line alone it was no JSON; and some may not lack it."""
    path = tmp_path / "r.json"
    json_files.write_sealed(path, {"k": 1})
    path.write_text(path.read_text().replace('"k": 1', '"k": 2'))
    with pytest.raises(RetrievalError, match="differs from the sha256 in its last line") as error:
        json_files.read_sealed(path, needs_digest)
    said = str(error.value).partition("If it was changed on purpose, ")[2]
    assert said == ("" if needs_digest else "remove that line, and the comma before it.")
    path.write_text(path.read_text().rpartition(",")[0] + "}")
    assert json_files.read_sealed(path) == {"k": 2}


def test_the_background_finds_what_nobody_reads_and_says_so(folders, tmp_path, monkeypatch, caplog):
    """A search after that is an error, whatever it reads: nothing of the folder is to be trusted"""
    monkeypatch.setattr(verification, "AT_ONCE_BYTES", 0)
    path = shutil.copytree(folders["store"], tmp_path / "s")
    damage(path, "text.blob", -1)
    before = set(threading.enumerate())
    store = PassageStore.open(path)
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
    assert "text.blob differs from its sha256 in bytes" in caplog.text
    with pytest.raises(RetrievalError, match="text.blob differs"):
        store[0]


def test_a_block_is_read_once_and_only_when_it_is_needed(folders, monkeypatch):
    monkeypatch.setattr(verification, "_verify_pending", lambda reference: None)
    store = PassageStore.open(folders["store"], verify=False)
    pending = store.files.pending_bytes
    store[20]
    after = store.files.pending_bytes
    assert 0 < after < pending
    store[20]
    assert store.files.pending_bytes == after
    store.files.check_all()
    assert store.files.pending_bytes == 0


@pytest.mark.parametrize("pieces", [1, 5])
def test_exactly_the_blocks_of_the_pieces_are_read(folders, pieces):
    """At the edge of a block, one too few would let bytes pass that nobody has verified."""
    files, draw = PassageStore.open(folders["store"]).files, np.random.default_rng(0)
    size, block = files.map("text.blob", "u1").size, 64
    for _ in range(300):
        begins = draw.integers(0, size // 8, pieces) * 8  # one in eight is at the edge of a block
        ends = np.minimum(begins + draw.integers(1, 20, pieces) * 8, size)
        files.forget()
        before = files.pending_bytes
        if pieces == 1:
            files.check("text.blob", int(begins[0]), int(ends[0]))
        else:
            files.check("text.blob", begins, ends)
        blocks = {place // block for begin, end in zip(begins, ends, strict=True)
                  for place in range(begin, end)}
        assert before - files.pending_bytes == block * len(blocks)
        files.check("text.blob", begins, ends)
        assert before - files.pending_bytes == block * len(blocks)


def test_a_large_file_without_blocks_is_one_block(folders, tmp_path, monkeypatch):
    """Indexes of before have one digest a file, and are verified whole at the first look."""
    monkeypatch.setattr(verification, "_verify_pending", lambda reference: None)
    path = shutil.copytree(folders["store"], tmp_path / "s")
    meta = json.loads((path / "meta.json").read_text())
    for entry in meta["files"].values():
        entry.pop("blocks", None)
    write_meta(path, meta)
    damage(path, "text.blob", -1)
    store = PassageStore.open(path, verify=False)
    with pytest.raises(RetrievalError, match="text.blob differs from its sha256;"):
        store[0]


def test_a_large_scann_index_verifies_the_rows_that_it_nominates(folders, tmp_path, monkeypatch):
    """ScaNN's own files are verified at opening, the embeddings that score what it finds are not"""
    monkeypatch.setattr(verification, "AT_ONCE_BYTES", 0)
    monkeypatch.setattr(verification, "_verify_pending", lambda reference: None)
    path = shutil.copytree(folders["scann"], tmp_path / "i")
    index = PassageIndex.open(path)
    queries = np.eye(WIDTH, dtype=np.float32)[:2]
    ids = index.search(queries, 1).ids
    row = next(row for row in range(0, 40, 2) if not {row, row + 1} & set(ids.ravel().tolist()))
    file = next(path.rglob("embeddings.f32"))
    damage(file.parent, file.name, 4 * WIDTH * row)  # a block has two rows
    np.testing.assert_array_equal(index.search(queries, 1).ids, ids)
    for read in (lambda: index.search(queries, 40), lambda: index.embeddings(np.array([row])),
                 lambda: index.table):
        index.files._damage = None
        with pytest.raises(RetrievalError, match="embeddings.f32 differs from its sha256 in bytes"):
            read()


def test_a_large_exact_index_is_verified_whole_before_it_is_searched(
        folders, tmp_path, monkeypatch):
    """Every row has a part in every search, also one that is not among the answers."""
    monkeypatch.setattr(verification, "AT_ONCE_BYTES", 0)
    monkeypatch.setattr(verification, "_verify_pending", lambda reference: None)
    path = shutil.copytree(folders["exact"], tmp_path / "i")
    file = next(path.rglob("embeddings.f32"))
    damage(file.parent, file.name, -1)
    index = PassageIndex.open(path)
    assert index.embeddings(np.array([0])).shape == (1, WIDTH)
    with pytest.raises(RetrievalError, match="embeddings.f32 differs from its sha256 in bytes"):
        index.search(np.ones((1, WIDTH), np.float32), 1)


def test_several_threads_verify_a_large_folder(folders, tmp_path, monkeypatch):
    monkeypatch.setattr(verification, "AT_ONCE_BYTES", 0)
    path = shutil.copytree(folders["store"], tmp_path / "s")
    PassageStore.open(path, verify=True)
    damage(path, "text.blob", 100)
    with pytest.raises(RetrievalError, match="text.blob differs"):
        PassageStore.open(path, verify=True)


def test_the_thread_in_the_background_ends_with_its_folder(folders, monkeypatch):
    """After a hot swap nobody must go on reading the old index."""
    entered, go_on = threading.Event(), threading.Event()

    def slow(self, name, block):
        entered.set()
        go_on.wait(60)

    store = PassageStore.open(folders["store"], verify=True)
    store.files.forget()
    monkeypatch.setattr(VerifiedFiles, "_verify", slow)
    before = set(threading.enumerate())
    store.files.verify(at_once=False)
    thread, = set(threading.enumerate()) - before
    entered.wait(60)
    del store
    go_on.set()
    thread.join(60)
    assert not thread.is_alive()


def write_meta(path, meta):
    META.write(path, {key: value for key, value in meta.items() if key != "fingerprint"})


@pytest.mark.parametrize("change, says", [
    (lambda m: m["tokens"].update(bert="O"), "dtype 'O'"),
    (lambda m: m["tokens"].update(bert="<u8"), "dtype '<u8'"),
    (lambda m: m["tokens"].update(bert=["<u2"]), "dtype"),
    (lambda m: m["tokens"].update({"../x": "<u2"}), "../x"),
    (lambda m: m["tokens"].clear(), "do not fit its tables"),
    (lambda m: m.update(tokens=None), "tokens is None"),
    (lambda m: m.update(passages=39), "does not fit 39"),
    (lambda m: m.update(passages=-1), "passages is -1"),
    (lambda m: m.update(passages=2.0), "passages is 2.0"),
    (lambda m: m.update(passages=10**30), "passages is"),
    (lambda m: m.update(files=[]), "'files' is damaged"),
    (lambda m: m["files"].update({"/etc/passwd": m["files"]["text.blob"]}), "/etc/passwd"),
    (lambda m: m["files"].pop("text.offsets"), "text.offsets"),
    (lambda m: m["files"]["text.blob"].pop("sha256"), "'text.blob' is damaged"),
    (lambda m: m["files"]["text.blob"].update(bytes="9"), "'text.blob' is damaged"),
    (lambda m: m["files"]["text.blob"].update(sha256="0"), "'text.blob' is damaged"),
    (lambda m: m["files"]["text.blob"].update(blocks={"bytes": 0, "sha256": []}), "damaged"),
    (lambda m: m["files"]["text.blob"].update(blocks={"bytes": 64, "sha256": []}), "damaged"),
    (lambda m: m["files"]["text.blob"].update(blocks=None), "damaged"),
    (lambda m: m["files"].update({"tokens.bert.ids": {"bytes": 3, "sha256": "0" * 64}}),
     "fit 40 passages"),
])
def test_a_store_whose_meta_data_lie_is_refused_before_anything_is_mapped(
        folders, tmp_path, change, says):
    """A dtype "O" was a segmentation fault: anybody can write a fitting fingerprint."""
    path = shutil.copytree(folders["store"], tmp_path / "s")
    meta = json.loads((path / "meta.json").read_text())
    change(meta)
    write_meta(path, meta)
    with pytest.raises(RetrievalError, match="(?s)" + str(path)) as caught:
        PassageStore.open(path)
    assert says in str(caught.value)


@pytest.mark.parametrize("name, values", [
    ("text.offsets", [-5, 0]), ("text.offsets", [2**40, 2**41]), ("text.offsets", [9, 3]),
    ("tokens.bert.offsets", [-5, 0]), ("tokens.bert.offsets", [2**40, 2**41]),
    ("tokens.bert.offsets", [9, 3]), ("text.blob", [-1, -1]),
])
def test_offsets_that_lead_nowhere_are_an_error(folders, tmp_path, name, values):
    """With digests that fit: a hostile store, not a damaged one."""
    path = shutil.copytree(folders["store"], tmp_path / "s")
    data = np.fromfile(path / name, "<i8" if "offsets" in name else "i1")
    for place in (slice(1, 3), slice(0, 2), slice(len(data) - 2, len(data))):
        changed = data.copy()
        changed[place] = values
        changed.tofile(path / name)
        meta = json.loads((path / "meta.json").read_text())
        meta["files"][name] = file_entry(path / name)
        write_meta(path, meta)
        with pytest.raises(RetrievalError, match="damaged"):
            store = PassageStore.open(path)
            [store[row] for row in range(40)]
            store.tokens("bert").padded(np.arange(40), 5, 0)


def test_links_and_names_that_lead_out_of_a_folder_are_refused(folders, tmp_path):
    path = shutil.copytree(folders["store"], tmp_path / "s")
    os.symlink(path, tmp_path / "link")
    assert PassageStore.open(tmp_path / "link")[0].id == "p0"
    (path / "text.blob").rename(tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", path / "text.blob")
    with pytest.raises(RetrievalError, match="text.blob is a link"):
        PassageStore.open(path)
    (path / "text.blob").unlink()
    os.mkfifo(path / "text.blob")  # opening it would wait for ever
    with pytest.raises(RetrievalError, match="text.blob is a link or no regular file"):
        PassageStore.open(path)
    for name in ("../s/meta.json", "/etc/passwd", "a/../b", "", "a//b", "a\\b", ".hidden", "a\n"):
        with pytest.raises(RetrievalError, match="allowed are names inside"):
            VerifiedFiles(path, {name: {"bytes": 1, "sha256": "0" * 64}})


class Attack:
    """Unpickled, it writes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("way", ["listed", "unlisted", "link", "folder", "asset", "parts"])
def test_no_code_runs_from_an_index_folder(folders, tmp_path, way):
    """ScaNN unpickled a scann_docids.pkl that the manifest listed, or that a link led to."""
    path = shutil.copytree(current(folders["scann"]), tmp_path / "i")
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["checksum"]
    attack = pickle.dumps(Attack(tmp_path / "hacked"))
    if way == "folder":  # all of ScaNN's files behind one link
        (path / "scann").rename(tmp_path / "s")
        (tmp_path / "s" / "scann_docids.pkl").write_bytes(attack)
        os.symlink(tmp_path / "s", path / "scann")
    elif way == "link":
        (tmp_path / "x").write_bytes(attack)
        os.symlink(tmp_path / "x", path / "scann" / "scann_docids.pkl")
    elif way == "asset":
        shutil.copy(path / "scann" / "ah_codebook.pb", tmp_path / "outside.pb")
        file = path / "scann" / "scann_assets.pbtxt"
        file.write_text(file.read_text().replace("ah_codebook.pb", "../../outside.pb"))
        manifest["files"]["scann/scann_assets.pbtxt"] = file_entry(file)
    elif way == "parts":
        manifest["scann"]["parts"] = 10**9
    else:
        (path / "scann" / "scann_docids.pkl").write_bytes(attack)
    if way == "listed":
        name = "scann/scann_docids.pkl"
        manifest["files"][name] = file_entry(path / name)
    MANIFEST.write(path, manifest)
    with pytest.raises(RetrievalError, match=str(path)):
        PassageIndex.open(path)
    assert not (tmp_path / "hacked").exists()


@pytest.mark.parametrize("change", [
    lambda m: m.update(width=9), lambda m: m.update(size=41), lambda m: m.update(width=None),
    lambda m: m.update(kind="bm25"), lambda m: m.update(kind=["exact"]),
    lambda m: m.update(kind="scann", scann={"parts": 1, "odd": 2}), lambda m: m.pop("files"),
    lambda m: m["files"].pop("embeddings.f32"), lambda m: m.pop("versions"),
    lambda m: m["files"].update({"../x": m["files"]["embeddings.f32"]}),
    lambda m: m.update(passages_fingerprint=None), lambda m: m.update(recall=[]),
    lambda m: m.update(kind="scann", scann={"num_leaves": "x"}), lambda m: m.update(format=None),
    lambda m: m["recall"].update(target="high"), lambda m: m["recall"].update(recall=10**400),
    lambda m: m.update(kind="scann", scann={"avq": 10**400}), lambda m: m.update(inputs={}),
    lambda m: m["inputs"].update(kind="scann"), lambda m: m["inputs"].update(kind=["exact"]),
    lambda m: m["inputs"].update(kind="scann", scann={"odd": 1}), lambda m: m.pop("scann"),
    lambda m: m["inputs"].update(kind="scann", scann={}, recall_target="high"),
    lambda m: m.update(auto={}), lambda m: m.update(auto=[1]),
    lambda m: m.update(auto={"scann": {}, "recall_target": []}),
    lambda m: m["inputs"].update(encoder_fingerprint="other"),
])
def test_a_manifest_that_lies_is_refused(folders, tmp_path, change):
    path = shutil.copytree(current(folders["exact"]), tmp_path / "i")
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["checksum"]
    change(manifest)
    MANIFEST.write(path, manifest)
    with pytest.raises(RetrievalError, match=str(path)):
        PassageIndex.open(path)


@pytest.mark.parametrize("name, change", [
    ("indices.csc.index.npy", lambda a: np.save(a, np.load(a) + 40)),
    ("indptr.csc.index.npy", lambda a: np.save(a, np.load(a)[::-1])),
    ("data.csc.index.npy", lambda a: np.save(a, np.load(a)[:-1])),
    ("data.csc.index.npy", lambda a: np.save(a, np.array([Attack(a)]), allow_pickle=True)),
    ("vocab.index.json", lambda a: a.write_text('{"red": -7}')),
    ("vocab.index.json", lambda a: a.write_text('["red"]')),
    ("vocab.index.json", lambda a: a.write_text('{"red": 0.5}')),
    ("vocab.index.json", lambda a: a.write_text(json.dumps({"red": 2**70}))),
    ("vocab.index.json", lambda a: a.write_text("[" * 100_000)),
    ("vocab.index.json", lambda a: a.write_text(json.dumps(
        {"red": len(np.load(a.with_name("indptr.csc.index.npy"))) - 1}))),
    ("data.csc.index.npy", lambda a: np.save(a, np.load(a) * np.float32(np.nan))),
    ("indptr.csc.index.npy", lambda a: np.save(a, np.load(a) * (np.arange(len(np.load(a))) != 1))),
    ("params.index.json", lambda a: a.write_text(a.read_text().replace("float32", "object"))),
    ("params.index.json", lambda a: a.write_text(a.read_text().replace("int32", "float32"))),
    ("params.index.json", lambda a: a.write_text(a.read_text().replace("int32", "int8"))),
    ("data.csc.index.npy", lambda a: np.save(a, -np.load(a))),
    ("data.csc.index.npy", lambda a: np.save(a, np.load(a) * np.float32(0))),
    ("data.csc.index.npy", lambda a: np.save(a, np.load(a) * np.float32(1e30))),
    ("params.index.json", lambda a: a.write_text(a.read_text().replace("lucene", "bm25l"))),
])
def test_a_word_index_that_would_read_elsewhere_is_refused(folders, tmp_path, name, change):
    path = shutil.copytree(current(folders["bm25"]), tmp_path / "i")
    change(path / "bm25" / name)
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["checksum"]
    manifest["files"][f"bm25/{name}"] = file_entry(path / "bm25" / name)
    MANIFEST.write(path, manifest)
    with pytest.raises(RetrievalError, match="bm25/"):
        Bm25Index.open(path)


def test_no_table_of_all_ids_is_made_for_a_few(tmp_path):
    """Printing five passages took 3 s at a million: a dictionary of every id was made."""
    passages = [Passage(f"id{i:04d}", "", f"text {i}") for i in range(3000)]
    passages[7:7] = [Passage("é", "", "e"), Passage("an id of many letters", "", "m")]
    store = write_store(tmp_path / "s", passages, {})
    for row in (0, 6, 7, 8, 9, 3001):
        assert store.row_of(passages[row].id) == row
    with pytest.raises(RetrievalError, match="near matches are .*id2999"):
        store.row_of("id29999")
    assert store._rows_by_id is None
    for row in range(0, 3001, 30):  # many: a table is quicker
        assert store.row_of(passages[row].id) == row
    assert store._rows_by_id is not None


def test_a_folder_that_cannot_be_looked_into_is_not_taken_for_one_without_links(
        tmp_path, monkeypatch):
    """os.walk passes over it: short of open files, nothing at all was looked at."""
    def refuse(path):
        raise OSError(errno.EMFILE, "Too many open files")

    json_files.refuse_links(tmp_path / "absent")
    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(OSError, match="Too many open files"):
        json_files.refuse_links(tmp_path)
