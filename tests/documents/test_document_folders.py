"""Which files of a folder are read, by whom, and what a hostile one can do."""

import errno
import os
import pathlib
import random
import signal
import subprocess

import pytest
from made_files import MAKERS, docx, paragraph, sections

from rag_jax.documents import folder
from rag_jax.documents.document import Document, Unreadable, UnreadableNow
from rag_jax.documents.folder import content_of, files_of
from rag_jax.documents.readers import Readers


def test_files_are_found_and_what_is_not_read_has_its_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "LARGEST_FILE", 10)
    root, outside = tmp_path / "root", tmp_path / "outside"
    (root / "sub").mkdir(parents=True)
    (root / ".git").mkdir()
    outside.mkdir()
    for file in (root / "a.txt", root / "sub" / "b é.md", root / ".git" / "c.txt",
                 root / ".hidden.txt", outside / "secret.txt"):
        file.write_text("some text"[:9])
    (root / "photo.jpg").write_bytes(b"x")
    (root / "big.txt").write_text("12345678901")
    (root / "link.txt").symlink_to(outside / "secret.txt")
    (root / "linked").symlink_to(outside)
    os.mkfifo(root / "pipe.txt")
    (root / os.fsdecode(b"\xff.txt")).write_text("x")
    (root / "\\xff.txt").write_text("x")  # another file, which was left out of every list
    found = {one.name: str(one.problem or "") for one in files_of(root)}
    read = {name for name, reason in found.items() if not reason}
    assert read == {"a.txt", "sub/b é.md", "\\xff.txt"}
    assert ".git/c.txt" not in found and "linked/secret.txt" not in found
    for name, says in (("photo.jpg", "of this kind"), ("big.txt", "more than 10 bytes"),
                       ("link.txt", "a link"), ("linked", "a link"), ("pipe.txt", "a pipe"),
                       ("./\\xff.txt", "not UTF-8")):
        assert says in found[name]
    assert [one.name for one in files_of(root / "a.txt")] == ["a.txt"], "a file alone"


def test_workdirs_and_indexes_among_the_documents_are_no_documents(tmp_path):
    """Passages of documents that were gone were found in the passages.jsonl of another workdir."""
    for name in ("ingested/ingest.json", "ingested/index/x", "ingested/x.jsonl",
                 "index/versions/1/x.md", "index/rag_jax-index.json", "trained/config.json",
                 "trained/data/inputs.json", "trained/data/passages.jsonl", "notes/config.json",
                 "converted/config.json", "converted/data/digests.json", "converted/rag/0/x.txt",
                 "notes/ingest.json", "notes/data/x.md"):
        (tmp_path / "docs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "docs" / name).touch()
    found = {one.name: str(one.problem or "") for one in files_of(tmp_path / "docs")}
    assert found.keys() == {"ingested", "index", "trained", "converted", "notes/config.json",
                            "notes/ingest.json", "notes/data/x.md"}
    assert {name for name, told in found.items() if "a workdir or an index of" in told} == {
        "ingested", "index", "trained", "converted"}
    assert {one.name for one in files_of(tmp_path / "docs" / "ingested")} == {
        "ingest.json", "x.jsonl", "index/x"}, "what is named itself is read"


def test_a_folder_that_can_be_listed_and_not_entered_ends_nothing(tmp_path, monkeypatch):
    """Looking at one of its files raised an error, and no other file was read."""
    def refused(function):
        def looked(path, *args, **kwargs):
            if pathlib.PurePath(path).parent == tmp_path / "sub":
                raise PermissionError(errno.EACCES, "Permission denied", os.fspath(path))
            return function(path, *args, **kwargs)

        return looked

    (tmp_path / "sub" / "deep").mkdir(parents=True)
    for name in ("a.txt", "sub/b.txt"):
        (tmp_path / name).write_text("x")
    with monkeypatch.context() as patched:
        patched.setattr(os, "lstat", refused(os.lstat))
        patched.setattr(os, "stat", refused(os.stat))
        found = {one.name: one.problem for one in files_of(tmp_path)}
    assert found["a.txt"] is None and isinstance(found["sub/b.txt"], UnreadableNow)
    assert "Permission denied" in str(found["sub/b.txt"])


def test_a_file_that_changes_after_it_was_found_is_looked_at_again(tmp_path, monkeypatch):
    """Between the look and the reading, a link could lead to what nobody may see."""
    file = tmp_path / "a.txt"
    file.write_text("x")
    found, = files_of(tmp_path)
    assert content_of(found)[0] == b"x"
    file.unlink()
    with pytest.raises(Unreadable, match="cannot be read"):
        content_of(found)
    file.symlink_to("/etc/passwd")
    with pytest.raises(Unreadable, match="cannot be read"):
        content_of(found)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(Unreadable, match="no file any more"):
        content_of(found)
    file.unlink()
    file.write_text("12345678901")
    monkeypatch.setattr(folder, "LARGEST_FILE", 10)
    with pytest.raises(Unreadable, match="more than 10"):
        content_of(found)


@pytest.fixture(scope="module")
def readers():
    with Readers(2) as readers:
        yield readers


def test_all_kinds_come_back_in_order(readers):
    made = {f"a.{kind}": make(sections(random.Random(1))) for kind, make in MAKERS.items()}
    made |= {"b.txt": b"text", "c.pdf": b"no pdf", "d.csv": b"a,b\n1,2"}
    found = dict(zip(made, readers.read_each(made.items()), strict=True))
    assert {name for name, one in found.items() if isinstance(one, Document)} == {*made} - {"c.pdf"}
    assert found["b.txt"] == Document("", "text") and "damaged" in str(found["c.pdf"])
    assert found["a.pdf"].pages and found["a.md"].sections[1][1], "with what stands where"


def hostile(tmp_path: pathlib.Path, monkeypatch, code: str) -> None:
    """Has the workers read .txt by `code`, as a damaged library might."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if 'rag_jax.documents.worker' in ' '.join(sys.orig_argv):\n"
        "    from rag_jax.documents import read\n"
        f"    def reader(content):\n        {code}\n"
        "    read.READERS['.txt'] = reader\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.mark.parametrize("code, says", [
    ("import os; os.abort()", "crashed"), ("import time; time.sleep(60)", "more than 2 seconds"),
    ("return b'x' * 10**10", "too much memory"), ("raise RuntimeError('odd')", "odd"),
    ("import os; os.write(1, b'{}'); os._exit(0)", "crashed")])
def test_a_file_that_harms_its_reader_harms_nothing_else(tmp_path, monkeypatch, code, says):
    hostile(tmp_path, monkeypatch, code)
    with Readers(1, seconds=2 if "sleep" in code else 300, memory=2**31) as readers:
        with pytest.raises(Unreadable, match=says):
            readers.read("a.txt", b"x")
        readers._seconds = 300
        assert readers.read("b.html", b"<p>sound").text.strip() == "sound"


def test_programs_of_the_working_folder_are_not_run(tmp_path, monkeypatch):
    """A downloaded csv.py in the folder where one stands was run, for each reader."""
    for name in ("csv", "json", "queue", "struct"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'run')!r}, 'w'); 1 / 0\n")
    monkeypatch.chdir(tmp_path)
    with Readers(1) as readers:
        assert readers.read("a.csv", b"a,b\n1,2").text == "a: 1; b: 2\n\n"
    assert not (tmp_path / "run").exists()


def test_what_a_library_prints_is_no_answer(tmp_path, monkeypatch):
    hostile(tmp_path, monkeypatch, "import os; os.write(1, b'debug\\n'); print('more')\n"
            "        from rag_jax.documents.document import Document; return Document('', 'text')")
    with Readers(1) as readers:
        assert readers.read("a.txt", b"x").text == "text"


def test_who_stops_does_not_wait_for_what_is_being_read(tmp_path, monkeypatch):
    """Ctrl-C would wait for minutes."""
    hostile(tmp_path, monkeypatch, "import time; time.sleep(600)")
    with pytest.raises(KeyboardInterrupt), Readers(1, seconds=500) as readers:
        readers.read_each(iter([("a.txt", b"x"), ("b.txt", b"y")]))
        readers._threads.submit(readers.read, "a.txt", b"x")
        while not readers._processes:
            pass
        raise KeyboardInterrupt


def test_who_stops_does_not_wait_for_a_second_reading(tmp_path, monkeypatch):
    """A process that had read a file before seemed to have ended by itself; another was begun."""
    hostile(tmp_path, monkeypatch, "import time; len(content) > 1 and time.sleep(600)\n"
            "        from rag_jax.documents.document import Document; return Document('', 'text')")
    started, start = [], Readers._start
    monkeypatch.setattr(Readers, "_start", lambda self: started.append(self) or start(self))
    with pytest.raises(KeyboardInterrupt), Readers(1) as readers:
        readers.read("a.txt", b"x")
        readers._seconds = 3
        readers._threads.submit(readers.read, "a.txt", b"slow")
        while not readers._idle.empty():
            pass
        raise KeyboardInterrupt
    assert len(started) == 1


def test_where_no_process_can_be_started_that_is_said_each_time(monkeypatch):
    """Its place was taken for ever, and the next file waited for it."""
    def refused(*_, **__):
        raise BlockingIOError("Resource temporarily unavailable")

    with Readers(1) as own:
        with monkeypatch.context() as patch:
            patch.setattr(subprocess, "Popen", refused)
            with pytest.raises(BlockingIOError):
                own.read("a.txt", b"x")
            assert not own._idle.empty()
            with pytest.raises(BlockingIOError):
                list(own.read_each([("a.txt", b"x"), ("b.txt", b"y")]))
        assert own.read("a.txt", b"x").text == "x"


def test_a_docx_of_pictures_costs_no_more_than_its_text(readers):
    with_picture = docx(paragraph("words"), **{"word/media/a.png": bytes(10**7)})
    assert readers.read("a.docx", with_picture).text == "words\n\n"


def test_a_reader_that_has_died_before_it_reads_is_no_fault_of_the_file(tmp_path):
    """It is a broken pipe for who writes; another one is asked."""
    with Readers(1) as own:
        own.read("a.txt", b"x")
        process = own._idle.get()
        process.kill()
        process.wait()
        own._idle.put(process)
        assert own.read("a.txt", b"x" * 10**6).text == "x" * 10**6


def test_a_reader_ends_by_itself_where_nobody_waits(tmp_path, monkeypatch):
    """Who had started it was killed, and a file of nothing but <div> took it hours."""
    hostile(tmp_path, monkeypatch, "while True: pass")
    with Readers(1) as own:
        own._seconds = 0.2
        process = own._start()
        own._seconds = 300
        own._idle.get()
        own._idle.put(process)
        process.stdin.write(b'{"name": "a.txt", "bytes": 1}\nx')
        process.stdin.flush()
        assert process.wait(60) == -signal.SIGXCPU
