"""The files of a folder, and their contents."""

import dataclasses
import hashlib
import os
import pathlib
import stat
from collections.abc import Collection, Iterator

from rag_jax.data import inputs
from rag_jax.documents.document import Unreadable, UnreadableNow
from rag_jax.documents.read import LARGEST_FILE, UNKNOWN_KIND, reader_of
from rag_jax.documents.workdir import INDEX, RECORD
from rag_jax.retrieval.verification import DIGESTS
from rag_jax.retrieval.versions import POINTER


@dataclasses.dataclass(frozen=True)
class FolderEntry:
    """A file in a folder, or something else with a name there.

    Attributes:
      name: its path in the folder, with / between the names.
      path: its path.
      problem: why it is not read; None = it is read.
    """

    name: str
    path: pathlib.Path
    problem: Unreadable | None = None


def files_of(source: pathlib.Path) -> Iterator[FolderEntry]:
    """All files of a folder and of the folders in it; or `source` itself, if it is a file.

    Hidden ones, whose names begin with a dot, are skipped. Links are not followed. A workdir of
    this package, or an index, is one entry: its passages may be those of documents that are gone.
    """
    if not source.is_dir():
        yield _looked_at(source.name, source)
        return
    unlisted: list[OSError] = []
    for parent, folders, names in os.walk(source, onerror=unlisted.append):
        directory = pathlib.Path(parent)
        if directory != source and _is_made(directory, names):
            folders.clear()
            yield FolderEntry(_shown(directory.relative_to(source).as_posix()), directory,
                              Unreadable("it is a workdir or an index of rag_jax"))
            continue
        links = [name for name in folders if os.path.islink(directory / name)]
        folders[:] = [name for name in folders if name[0] != "."]
        for name in [*names, *links]:
            if name[0] != ".":
                path = directory / name
                yield _looked_at(path.relative_to(source).as_posix(), path)
    for error in unlisted:
        path = pathlib.Path(error.filename)
        yield FolderEntry(_shown(path.relative_to(source).as_posix()), path,
                          _unread(error, "its files cannot be listed"))


def _is_made(folder: pathlib.Path, names: Collection[str]) -> bool:
    """Whether a folder with files of these names is a workdir of this package, or an index."""
    data = [f"data/{name}" for name in (inputs.RECORD, DIGESTS)]  # of training, of rag_jax.convert
    return POINTER in names or any(
        name in names and any(os.path.exists(folder / other) for other in others)
        for name, others in {RECORD: [INDEX], "config.json": data}.items())


def _shown(name: str) -> str:
    """The name of a file as a text; one that is not UTF-8 begins with "./", as no other does."""
    shown = os.fsencode(name).decode("utf-8", "backslashreplace")
    return name if shown == name else f"./{shown}"


def _looked_at(name: str, path: pathlib.Path) -> FolderEntry:
    if (shown := _shown(name)) != name:
        return FolderEntry(shown, path, Unreadable("its name is not UTF-8; rename it"))
    try:
        status = path.lstat()
    except OSError as error:
        return FolderEntry(name, path, _unread(error))
    if stat.S_ISLNK(status.st_mode):
        return FolderEntry(name, path, Unreadable(
            "it is a link, which may lead anywhere; put the file in its place"))
    if not stat.S_ISREG(status.st_mode):
        return FolderEntry(name, path, Unreadable("it is no file: a pipe, a socket or a device"))
    if reader_of(name) is None:
        return FolderEntry(name, path, Unreadable(UNKNOWN_KIND))
    if status.st_size > LARGEST_FILE:
        return FolderEntry(name, path, _too_large())
    return FolderEntry(name, path)


def _unread(error: OSError, what: str = "it cannot be read") -> Unreadable:
    gone = isinstance(error, FileNotFoundError)
    return (Unreadable if gone else UnreadableNow)(f"{what}: {error.strerror}")


def _too_large() -> Unreadable:
    return Unreadable(f"it has more than {LARGEST_FILE} bytes; divide it")


def content_of(entry: FolderEntry) -> tuple[bytes, str]:
    """The content of a file, and its sha256.

    Raises:
      UnreadableNow: it is there and cannot be opened.
      Unreadable: it has another problem, or is gone, or is no regular file by now.
    """
    if entry.problem:
        raise entry.problem
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        with open(os.open(entry.path, flags | getattr(os, "O_BINARY", 0)), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise Unreadable("it is no file any more")
            content = file.read(LARGEST_FILE + 1)
    except OSError as error:
        raise _unread(error) from None
    if len(content) > LARGEST_FILE:
        raise _too_large()
    return content, hashlib.sha256(content).hexdigest()
