"""The files of a folder, each with its content as it is when it is opened."""

import dataclasses
import hashlib
import os
import pathlib
import stat
from collections.abc import Iterator

from rag_jax.documents.document import Unreadable
from rag_jax.documents.read import LARGEST_FILE, READERS, reader_of


@dataclasses.dataclass(frozen=True)
class Found:
    """A file, or what is none, in a folder.

    Attributes:
      name: its path in the folder, with / between the names.
      path: where it is.
      reason: why it is not read; "" = it is.
    """

    name: str
    path: pathlib.Path
    reason: str = ""


def files_of(source: pathlib.Path) -> Iterator[Found]:
    """All files of a folder and of those in it, by their names; or the one file that it is.

    What is hidden (its name begins with a dot) is passed over, links are not followed.
    """
    if not source.is_dir():
        yield _looked_at(source.name, source)
        return
    closed: list[OSError] = []
    for parent, folders, names in os.walk(source, onerror=closed.append):
        here = pathlib.Path(parent)
        links = [name for name in folders if (here / name).is_symlink()]
        folders[:] = [name for name in folders if name[0] != "."]
        for name in [*names, *links]:
            if name[0] != ".":
                path = here / name
                yield _looked_at(path.relative_to(source).as_posix(), path)
    for error in closed:
        path = pathlib.Path(error.filename)
        name = os.fsencode(path.relative_to(source).as_posix()).decode("utf-8", "backslashreplace")
        yield Found(name, path, f"its files cannot be listed: {error.strerror}")


def _looked_at(name: str, path: pathlib.Path) -> Found:
    shown = os.fsencode(name).decode("utf-8", "backslashreplace")
    if shown != name:
        return Found(shown, path, "its name is not UTF-8; rename it")
    if path.is_symlink():
        return Found(name, path, "it is a link, which may lead anywhere; put the file in its place")
    try:
        status = path.stat()
    except OSError as error:
        return Found(name, path, f"it cannot be read: {error.strerror}")
    if not stat.S_ISREG(status.st_mode):
        return Found(name, path, "it is no file: a pipe, a socket or a device")
    if reader_of(name) is None:
        return Found(name, path, f"files of this kind are not read; those of {', '.join(READERS)} "
                                 "are")
    if status.st_size > LARGEST_FILE:
        return Found(name, path, f"it has more than {LARGEST_FILE} bytes; divide it")
    return Found(name, path)


def content_of(found: Found) -> tuple[bytes, str]:
    """The content of a file, and its sha256.

    Raises:
      Unreadable: it is not to be read, has gone, become something else, or may not be read.
    """
    if found.reason:
        raise Unreadable(found.reason)
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        with open(os.open(found.path, flags | getattr(os, "O_BINARY", 0)), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise Unreadable("it is no file any more")
            content = file.read(LARGEST_FILE + 1)
    except OSError as error:
        raise Unreadable(f"it cannot be read: {error.strerror}") from None
    if len(content) > LARGEST_FILE:
        raise Unreadable(f"it has more than {LARGEST_FILE} bytes; divide it")
    return content, hashlib.sha256(content).hexdigest()
