"""A file or folder is replaced as a whole or not at all, and nobody else's is ever touched."""

import contextlib
import errno
import os
import pathlib
import signal
import subprocess
import sys

import numpy as np
import pytest

from rag_jax import files
from rag_jax.retrieval.publish import publishing


def test_an_error_while_writing_keeps_the_old_content(tmp_path):
    path = tmp_path / "answers.jsonl"
    files.write_text(path, "old\n")
    with pytest.raises(KeyError), files.replaced(path) as file:
        file.write("half of the n")
        raise KeyError
    assert path.read_text("utf-8") == "old\n"
    files.write_text(path, "São Tomé\n")
    assert path.read_text("utf-8") == "São Tomé\n"
    files.write_bytes(path, b"\0")
    assert path.read_bytes() == b"\0"
    assert list(tmp_path.iterdir()) == [path]


def test_content_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """After a power cut a renamed file of no bytes would stand where the old one was."""
    events = []
    fsync, rename = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (events.append("sync"), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda *args: (events.append("name"), rename(*args)))
    files.write_text(tmp_path / "a", "x")
    assert events == ["sync", "name", "sync"]


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    path = tmp_path / "deep" / "index"
    with pytest.raises(KeyError), files.new_folder(path) as content:
        (content / "half").write_text("h")
        raise KeyError
    assert list(path.parent.iterdir()) == []
    path.mkdir()  # an empty folder is no obstacle
    with files.new_folder(path) as content:
        (content / "whole").write_text("w")
    assert [p.name for p in path.iterdir()] == ["whole"]
    assert list(path.parent.iterdir()) == [path]
    with pytest.raises(files.FolderError, match="already exists"), files.new_folder(path):
        pass
    assert [p.name for p in path.iterdir()] == ["whole"]
    assert list(path.parent.iterdir()) == [path]


def test_a_folder_with_a_key_is_taken_up_again(tmp_path):
    path = tmp_path / "index"
    (files.begin_folder(path, "one") / "shard").write_text("s")
    content = files.begin_folder(path, "one")
    assert (content / "shard").read_text() == "s"
    content = files.begin_folder(path, "two")
    assert list(content.iterdir()) == []
    files.publish_folder(content, path)
    assert [p.name for p in tmp_path.iterdir()] == ["index"]


@pytest.mark.parametrize("key", ["one", "two"])
def test_a_folder_without_the_mark_is_never_touched(tmp_path, key):
    """It may be anybody's, whatever its name."""
    files.begin_folder(tmp_path / "index", "one")
    folder, = tmp_path.iterdir()
    (folder / files.MARK).unlink()
    (folder / "thesis.tex").write_text("years")
    with pytest.raises(files.FolderError, match="none of ours"):
        files.begin_folder(tmp_path / "index", key)
    assert (folder / "thesis.tex").read_text() == "years"


def test_leftovers_of_dead_processes_are_removed_and_nothing_else(tmp_path):
    script = ("import os, pathlib, sys; from rag_jax import files\n"
              "here = pathlib.Path(sys.argv[1])\n"
              "(files.begin_folder(here / 'index') / 'a').write_text('a')\n"
              "(files.begin_folder(here / 'kept', 'key') / 'a').write_text('a')\n"
              "with files.replaced(here / 'file') as f: f.write('x'); f.flush(); os._exit(9)")
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    left = {path.name for path in tmp_path.iterdir()}
    assert len(left) == 3
    unmarked = next(name for name in left if name.startswith(".index"))[:-8] + "00000000"
    (tmp_path / unmarked / "content").mkdir(parents=True)
    (tmp_path / ".notes.tmp").write_text("mine")
    with files.replaced(tmp_path / "now") as file:  # this process is alive
        file.write("n")
        removed = files.remove_leftovers(tmp_path)
    assert len(removed) == 2 and set(removed) < left
    assert {path.name for path in tmp_path.iterdir()} == {
        ".kept.rag_jax-work", unmarked, ".notes.tmp", "now"}


def test_leftovers_that_are_somebody_elses_stay(tmp_path, monkeypatch):
    """Nobody could write answers into a folder that all share, where another's command had died."""
    for name in ("theirs", "ours"):
        (tmp_path / f".{name}.rag_jax-{files._HOST}-{2**22 + 1}-0123abcd").write_text(name)
    unlink = pathlib.Path.unlink

    def refused(path, missing_ok=False):
        if path.name.startswith(".theirs"):
            raise PermissionError(errno.EPERM, "Operation not permitted", str(path))
        unlink(path, missing_ok)

    monkeypatch.setattr(pathlib.Path, "unlink", refused)
    assert files.remove_leftovers(tmp_path) == [
        f".ours.rag_jax-{files._HOST}-{2**22 + 1}-0123abcd"]
    closed = tmp_path / f".index.rag_jax-{files._HOST}-{2**22 + 1}-0123abcd"
    closed.mkdir()
    is_file = pathlib.Path.is_file

    def unseen(path):
        if path.parent == closed:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return is_file(path)

    monkeypatch.setattr(pathlib.Path, "is_file", unseen)
    assert files.remove_leftovers(tmp_path) == []


def test_what_was_written_can_be_kept(tmp_path, capsys):
    """Answers that were computed for hours, before the disk was full or the process stopped."""
    path = tmp_path / "answers.jsonl"
    for number in range(2):
        with pytest.raises(KeyboardInterrupt), files.replaced(path, keep=True) as file:
            file.write(f"{number}\n")
            raise KeyboardInterrupt
    kept = {p.name: p.read_text() for p in tmp_path.iterdir()}
    assert kept == {"unfinished-answers.jsonl": "0\n", "unfinished-answers.jsonl-2": "1\n"}
    assert str(tmp_path / "unfinished-answers.jsonl-2") in capsys.readouterr().err
    with files.replaced(path, keep=True) as file:
        file.write("all")
    assert path.read_text() == "all" and len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_what_was_written_can_be_kept_when_a_scheduler_ends_the_process(tmp_path, number):
    """SIGTERM left the answers in a hidden file that nobody was told of."""
    path = tmp_path / "answers.jsonl"
    with pytest.raises(KeyboardInterrupt), files.replaced(path, keep=True) as file:
        file.write("one\n")
        assert signal.getsignal(number) != signal.SIG_DFL, "it would end the tests"
        signal.raise_signal(number)
    assert signal.getsignal(number) == signal.SIG_DFL
    assert [p.name for p in tmp_path.iterdir()] == ["unfinished-answers.jsonl"]


def test_a_place_that_cannot_be_written_to_is_named_before_the_work(tmp_path, monkeypatch):
    files.check_place(tmp_path / "a")
    files.check_place(tmp_path / "b" / "c" / "a", make_parents=True)
    assert not any(tmp_path.iterdir())
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("disk")
    for path, parents, says in ((tmp_path / "link" / "a", True, "link is a link to disk, which is"),
                                (tmp_path / "link" / "b" / "a", True, "link is a link to disk"),
                                (tmp_path / "link" / "a", False, "link is a link to disk, which"),
                                (tmp_path / "b" / "a", False, "no folder .*b; make it"),
                                (tmp_path / "file" / "a", True,
                                 "file is a file, not a folder; name another"),
                                (tmp_path, False, "is a folder; name a file"),
                                (pathlib.Path(os.devnull), False, "no regular file")):
        with pytest.raises(files.FolderError, match=says):
            files.check_place(path, make_parents=parents)
    with pytest.raises(files.FolderError, match="would take the place of"):
        files.check_place(tmp_path / "file", source=str(tmp_path / ".." / tmp_path.name / "file"))
    files.check_place(tmp_path / "file", source="task:nq:test")
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    with pytest.raises(files.FolderError, match="may not be written into"):
        files.check_place(tmp_path / "a")


def test_what_another_host_still_writes_into_is_no_leftover(tmp_path):
    """A folder's own time is that of its making; its files may be an hour old."""
    content = tmp_path / ".store.rag_jax-elsewhere-77-0123abcd" / "content"
    content.mkdir(parents=True)
    (content.parent / files.MARK).write_text("{}")
    (content / "blob").write_text("b")
    for path in (content.parent / files.MARK, content, content.parent):
        os.utime(path, (0, 0))
    assert files.remove_leftovers(tmp_path) == [] and (content / "blob").exists()
    os.utime(content / "blob", (0, 0))
    assert files.remove_leftovers(tmp_path) == [".store.rag_jax-elsewhere-77-0123abcd"]
    (tmp_path / ".meta.json.rag_jax-elsewhere-77-0123abcd").write_text("{")
    assert files.remove_leftovers(tmp_path) == []
    assert files.remove_leftovers(tmp_path, alone=True) and not any(tmp_path.iterdir())


@pytest.mark.parametrize("module, name, found", [
    (files.socket, "gethostname", "n-11-1"), (os, "readlink", "pid:[7]")])
def test_hosts_and_containers_are_told_from_one_another(
        tmp_path, monkeypatch, module, name, found):
    """What a process of such a host wrote was removed: this host had no process of its number."""
    monkeypatch.setattr(files.socket, "gethostname", lambda: "n-1-11")
    mine = files._host()
    assert files._host() == mine
    monkeypatch.setattr(module, name, lambda *_: found)
    assert files._host() != mine
    monkeypatch.setattr(files, "_HOST", mine)
    path = tmp_path / f".a.rag_jax-{files._host()}-999999999-0123abcd"
    path.write_text("x")
    assert files.remove_leftovers(tmp_path) == []
    path.rename(tmp_path / f".a.rag_jax-{mine}-999999999-0123abcd")
    assert len(files.remove_leftovers(tmp_path)) == 1


def test_a_file_that_is_replaced_stays_as_private_as_it_was(tmp_path):
    path = tmp_path / "answers.jsonl"
    path.touch(0o600)
    files.write_text(path, "x")
    assert path.stat().st_mode & 0o777 == 0o600 and path.read_text() == "x"


def test_what_another_host_renames_meanwhile_is_no_error(tmp_path, monkeypatch):
    """It was finished between the listing of the folder and the look at its time."""
    path = tmp_path / ".meta.json.rag_jax-elsewhere-77-0123abcd"
    path.write_text("{}")
    last_change = files._last_change

    def finished(one):
        path.rename(tmp_path / "meta.json")
        return last_change(one)

    monkeypatch.setattr(files, "_last_change", finished)
    files.remove_leftovers(tmp_path)
    assert (tmp_path / "meta.json").read_text() == "{}"


@pytest.mark.parametrize("link", ["", "content"])
def test_a_link_in_a_working_folder_leads_nowhere(tmp_path, link):
    """In a folder that somebody handed over it may lead into the home of who builds there."""
    home = tmp_path / "home"
    home.mkdir()
    (home / files.MARK).write_text('{"key": "one"}')
    (home / "thesis.tex").write_text("years")
    working = tmp_path / ".index.rag_jax-work"
    if link:
        working.mkdir()
        (working / files.MARK).write_text('{"key": "one"}')
    (working / link).symlink_to(home)
    with contextlib.suppress(files.FolderError):
        assert not files.begin_folder(tmp_path / "index", "one").is_symlink()
    assert sorted(path.name for path in home.iterdir()) == [files.MARK, "thesis.tex"]


def test_what_is_replaced_goes_when_the_new_is_whole(tmp_path):
    path = tmp_path / "questions"
    for number in ("1", "2"):
        with files.new_folder(path, replace=True) as content:
            (content / number).write_text(number)
    with pytest.raises(KeyError), files.new_folder(path, replace=True):
        raise KeyError
    assert [p.name for p in path.iterdir()] == ["2"] and list(tmp_path.iterdir()) == [path]
    files.remove_folder(path)
    files.remove_folder(path)  # it may be gone
    assert not any(tmp_path.iterdir())


@pytest.mark.skipif(not pathlib.Path("/dev/full").exists(),
                    reason="needs /dev/full, Linux's file on a full disk")
def test_an_error_of_a_full_disk_names_what_is_written(tmp_path):
    """It was "61220 requested and 4064 written", or had no name."""
    def fill():
        with open("/dev/full", "wb") as file:
            np.zeros(10**5).tofile(file)

    def fill_plainly():
        with open("/dev/full", "w") as file:
            file.write("x" * 10**5)

    for write in (fill, fill_plainly):
        for place in (files.replaced, files.new_folder, publishing):
            with pytest.raises(OSError, match="No space left on device: .*named") as told:
                with place(tmp_path / "named"):
                    write()
            assert told.value.errno == errno.ENOSPC
    with pytest.raises(OSError, match="another"), files.naming(tmp_path / "named"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "another")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("number", [errno.EDQUOT, errno.EFBIG])
def test_an_error_of_a_quota_or_a_limit_names_what_is_written(tmp_path, number):
    with pytest.raises(OSError, match=f"{os.strerror(number)}: .*named"):
        with files.replaced(tmp_path / "named"):
            raise OSError(number, os.strerror(number))
    with pytest.raises(OSError, match="error$"), files.replaced(tmp_path / "named"):
        raise OSError(errno.EIO, "error")  # it may be of what is read


@pytest.mark.parametrize("folder", [True, False])
def test_what_is_removed_needs_no_room(tmp_path, monkeypatch, folder):
    """On a full disk, the rest of a failed checkpoint stayed and kept the disk full."""
    def full(path, *text):
        path.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(pathlib.Path, "write_text", full)
    before = set(files._alive)
    doomed = tmp_path / "doomed"
    if folder:
        (doomed / "in").mkdir(parents=True)
    else:
        doomed.touch()
    files.remove_folder(doomed)
    with pytest.raises(OSError, match="No space left on device: .*made"):
        files.begin_folder(tmp_path / "made")
    assert not any(tmp_path.iterdir()) and files._alive == before


def test_an_interrupt_between_two_renames_leaves_the_old_folder(tmp_path, monkeypatch):
    """Both were gone: the old one was in the working folder, which was removed."""
    path = tmp_path / "questions"
    with files.new_folder(path) as content:
        (content / "old").write_text("o")
    rename = os.rename

    def interrupted(source, target):
        rename(source, target)
        if source == path:
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt), files.new_folder(path, replace=True) as content:
        (content / "new").write_text("n")
    assert [p.name for p in path.iterdir()] == ["old"] and list(tmp_path.iterdir()) == [path]


def test_a_kill_between_two_renames_leaves_the_old_folder_among_what_is_kept(tmp_path):
    script = """if True:
        import os, pathlib, sys
        from rag_jax import files
        path, rename = pathlib.Path(sys.argv[1]), os.rename
        with files.new_folder(path) as content:
            (content / "old").write_text("o")
        os.rename = lambda source, target: (rename(source, target), source == path and os._exit(9))
        with files.new_folder(path, replace=True):
            pass
    """
    path = tmp_path / "questions"
    subprocess.run([sys.executable, "-c", script, str(path)], check=False)
    left, = tmp_path.iterdir()
    assert files.remove_leftovers(tmp_path) == [] and (left / "replaced" / "old").is_file()
    path.mkdir()  # there is another now
    assert files.remove_leftovers(tmp_path) == [left.name]


@pytest.mark.skipif(os.name != "posix", reason="ctime is the time of the last change on POSIX")
def test_a_file_in_the_place_of_another_has_another_stamp(tmp_path):
    """An archive gives its files the same times: the model of before was answered with."""
    (tmp_path / "weights").write_text("1")
    os.utime(tmp_path / "weights", (0, 0))
    before, changed = files.stamp(tmp_path), (tmp_path / "weights").stat().st_ctime_ns
    assert files.stamp(tmp_path) == before
    while (tmp_path / "weights").stat().st_ctime_ns == changed:  # until the clock goes on
        (tmp_path / "weights").write_text("2")
        os.utime(tmp_path / "weights", (0, 0))
    assert files.stamp(tmp_path) != before
