"""Who opens an index sees one version whole, whatever is published; nobody else's is touched."""

import errno
import fcntl
import gc
import os
import shutil
import sys
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest

from rag_jax.locks import InUseError
from rag_jax.retrieval import versions
from rag_jax.retrieval.index import PassageIndex
from rag_jax.retrieval.protocol import RetrievalError
from rag_jax.retrieval.publish import publishing
from rag_jax.retrieval.versions import POINTER, current, opened
from tests.retrieval.indexing import build_index
from tests.retrieval.test_build import INPUTS, Embedder, content, make_store


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("store") / "s", size=10)


def publish(store, out, name="encoder-one"):
    """The n-th index on this path, whose embeddings are n times those of the first."""
    times = len(name)
    return build_index(store, Embedder(change=lambda x: x * times), out,
                       **{**INPUTS, "encoder_fingerprint": name}, overwrite=True)


@pytest.fixture
def out(store, tmp_path):
    publish(store, tmp_path / "index", "a")
    return tmp_path / "index"


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_version_stays_while_somebody_has_it_open_and_then_goes(store, out):
    reader = PassageIndex.open(out)
    before = np.array(reader.table)
    publish(store, out, "bb")
    publish(store, out, "ccc")
    assert names(out / "versions") == ["1", "3"], "held, and current"
    np.testing.assert_array_equal(reader.table, before)
    assert reader.passages[3] == store[3] and reader.path == out
    np.testing.assert_array_equal(PassageIndex.open(out).table, 3 * before)
    passages = reader.passages
    del reader
    publish(store, out, "dddd")
    assert names(out / "versions") == ["1", "4"], "its passages are in use"
    del passages
    publish(store, out, "eeeee")
    assert names(out / "versions") == ["5"]


def test_an_index_that_nobody_refers_to_any_more_is_closed_without_a_warning(out, monkeypatch):
    """Under -W error every load, swap and edit printed one."""
    met = []
    monkeypatch.setattr(sys, "unraisablehook", met.append)
    with warnings.catch_warnings(action="error"):
        index = PassageIndex.open(out)
        assert not index.hold.closed
        del index
        gc.collect()
    assert not met


@pytest.mark.filterwarnings("ignore:.*has no locks")
def test_without_locks_the_last_two_versions_stay(store, out, monkeypatch):
    """Some shared file systems have none: nobody knows who reads, so an open has time."""
    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    reader = PassageIndex.open(out)
    publish(store, out, "bb")
    assert names(out / "versions") == ["1", "2"]
    publish(store, out, "ccc")
    assert names(out / "versions") == ["2", "3"]
    assert reader.passages[3] == store[3] and reader.passages.tokens("bert").lengths.size == 10
    assert reader.search(np.ones((1, reader.width), np.float32), 2).ids.shape == (1, 2)


def test_an_open_that_meets_a_removal_opens_the_next_version(store, out, monkeypatch):
    """5,105 opens failed with a message about half-built indexes."""
    folders = []

    def make(folder):
        folders.append(folder.name)
        if len(folders) == 1:
            monkeypatch.setattr(versions.fcntl, "flock", lambda *_: None)  # as if nobody held it
            publish(store, out, "bb")
            monkeypatch.undo()
        return PassageIndex.open(folder)

    assert opened(out, make).manifest["encoder_fingerprint"] == "bb"
    assert folders == ["1", "2"]


def test_an_index_made_again_by_hand_while_it_is_opened_is_not_mixed(store, out, tmp_path):
    def make(folder):
        index = PassageIndex.open(folder)
        shutil.rmtree(out)
        publish(store, out, "a")
        return index

    with pytest.raises(RetrievalError, match="removed or replaced while it was opened"):
        opened(out, make)


def unversioned(out, folder):
    """An index as it was before there were versions."""
    return shutil.copytree(current(out), folder)


def test_an_index_from_before_there_were_versions_is_opened_and_replaced(store, out, tmp_path):
    old = unversioned(out, tmp_path / "old")
    (old / "passages" / "notes.txt").write_text("mine")
    reader = PassageIndex.open(old, "a", verify=True)
    build_index(store, Embedder(fail_after=0), old, **{**INPUTS, "encoder_fingerprint": "a"})
    with pytest.raises(RetrievalError, match="encoder_fingerprint differ"):
        build_index(store, Embedder(), old, **INPUTS)
    publish(store, old, "bb")
    np.testing.assert_array_equal(PassageIndex.open(old, "bb").table, 2 * np.array(reader.table))
    assert (old / "manifest.json").exists(), "somebody reads it"
    del reader
    publish(store, old, "ccc")
    assert names(old) == [".lock", "passages", POINTER, "versions"]
    assert names(old / "passages") == ["notes.txt"], "not ours, so not removed"


def test_nothing_of_others_is_read_renamed_or_removed(store, tmp_path):
    """An unrelated OUT.partial was deleted, an OUT.replaced renamed to OUT."""
    for name in ("index.partial", "index.replaced", "index.passages", ".index.rag_jax-work",
                 "s.partial", "index.lock"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.txt").write_text("precious")
    before = content(tmp_path)
    make_store(tmp_path / "s", size=10)
    publish(store, tmp_path / "index", "a")
    publish(store, tmp_path / "index", "bb")
    after = content(tmp_path)
    assert before.items() <= after.items()
    assert {name.split("/")[0] for name in after.keys() - before.keys()} == {"index", "s"}


def test_a_folder_in_which_no_version_was_begun_goes_again(store, out, tmp_path):
    """It passed for a half built index, which the same build would never finish."""
    for folder in (tmp_path / "new", out):
        with pytest.raises(RetrievalError, match="no passages"), publishing(folder):
            raise RetrievalError("no passages")
    assert not (tmp_path / "new").exists() and PassageIndex.open(out).size == 10
    with pytest.raises(ZeroDivisionError):
        build_index(store, Embedder(change=lambda x: 1 / 0), tmp_path / "new", **INPUTS)
    assert (tmp_path / "new" / POINTER).exists(), "what was begun can be finished"


def test_what_only_resembles_an_index_is_not_replaced(store, out, tmp_path):
    """A manifest.json is the file of many programs."""
    other = tmp_path / "extension"
    (other / "versions" / "1").mkdir(parents=True)
    (other / "versions" / "1" / "mine").write_text("precious")
    with pytest.raises(RetrievalError, match="not replaced"):
        publish(store, other)
    (other / "manifest.json").write_text('{"name": "extension", "files": {"mine": 1}}')
    with pytest.raises(RetrievalError, match="not replaced"):
        publish(store, other)
    assert names(other) == ["manifest.json", "versions"]
    with pytest.raises(RetrievalError, match="a version of the index"):
        publish(store, out / "versions" / "1", "bb")


@pytest.mark.parametrize("change", [
    lambda text: b"", lambda text: text[:-3], lambda text: text + b" ",
    lambda text: text.replace(b'"1"', b'"2"'), lambda text: text.replace(b'"1"', b'"../1"'),
    lambda text: text.replace(b'"1"', b"[1]"), lambda text: text.replace(b": 2", b": 3"),
    lambda text: b"[" * 10**5,
])
def test_a_damaged_pointer_is_named_and_can_be_replaced(store, out, change):
    file = out / POINTER
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(RetrievalError, match=f"{POINTER}|upgrade"):
        PassageIndex.open(out)
    with pytest.raises(RetrievalError, match=r"cannot be used.*overwrite=True"):
        build_index(store, Embedder(), out, **INPUTS)
    publish(store, out, "bb")
    assert PassageIndex.open(out).manifest["encoder_fingerprint"] == "bb"
    assert names(out / "versions") == ["2"]


@pytest.mark.parametrize("name", [POINTER, "versions/1/manifest.json"])
def test_a_pipe_keeps_nobody_waiting(out, name):
    """In a folder that somebody handed over; opened, it waits for a writer for ever."""
    (out / name).unlink()
    os.mkfifo(out / name)
    for folder in (out, out / "versions" / "1") if name != POINTER else (out,):
        with pytest.raises(RetrievalError):
            PassageIndex.open(folder)


def test_a_manifest_of_any_size_is_not_read_whole(out, monkeypatch):
    """One that says it has 40 GB, and takes none on the disk, ended in a MemoryError."""
    os.truncate(current(out) / "manifest.json", 40 * 2**30)
    monkeypatch.setattr(Path, "read_bytes", lambda path: pytest.fail(f"{path}: was read"))
    with pytest.raises(RetrievalError, match="manifest.json: 42949672960 bytes, at most"):
        PassageIndex.open(out)


def test_a_linked_version_is_refused(out, tmp_path):
    """A folder that somebody handed over reads nothing outside itself."""
    (out / "versions").rename(tmp_path / "elsewhere")
    (out / "versions").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RetrievalError, match="is a link"):
        PassageIndex.open(out)


def test_the_second_publisher_is_given_the_name_of_the_first(store, out):
    """Two at once removed each other's folders."""
    inside, leave = threading.Event(), threading.Event()

    def hold():
        with publishing(out):
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        inside.wait(60)
        assert PassageIndex.open(out).size == 10, "who only reads need not wait"
        publish(store, out, "a")  # finished: nothing to build
        with pytest.raises(InUseError, match="another thread of this process is"):
            publish(store, out, "bb")
    finally:
        leave.set()
        thread.join()
    publish(store, out, "bb")
