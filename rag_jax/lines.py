"""The one reader of text files by lines: UTF-8, packed or not; its errors name file and line."""

import bz2
import contextlib
import gzip
import os
import re
import zlib
from collections.abc import Callable, Iterator
from typing import BinaryIO

from rag_jax.errors import DataError

_OPENERS = {".gz": gzip.open, ".bz2": bz2.open}
_PACKED = {b"\x1f\x8b": "gzip, rename it to end in .gz", b"BZh": "bzip2, rename it to end in .bz2",
           b"PK\x03\x04": "a zip archive, unpack it", b"\xfd7zXZ": "xz, unpack it",
           b"\x28\xb5\x2f\xfd": "zstd, unpack it"}


def is_utf8(text: str) -> bool:
    """Whether a text can be written as UTF-8: it holds no half of a surrogate pair."""
    return not re.search("[\ud800-\udfff]", text)


def open_packed(path: str | os.PathLike) -> BinaryIO:
    """The bytes of a file, unpacked when its name ends in .gz or .bz2.

    Raises:
        FileNotFoundError: no such file.
        DataError: a folder, or a packed file whose name does not say so.
    """
    path = os.fspath(path)
    if os.path.isdir(path):
        raise DataError(f"{path}: a folder, where a file is expected: name a file in it")
    if not os.path.exists(path):
        raise FileNotFoundError(f"no file {path}: check the path")
    opener = _OPENERS.get(os.path.splitext(path)[1], open)
    file = opener(path, "rb")
    if opener is open:
        head = file.peek(8)[:8]
        for magic, what in _PACKED.items():
            if head.startswith(magic):
                file.close()
                raise DataError(f"{path}: the file is packed, by its first bytes: {what}")
    return file


@contextlib.contextmanager
def damage_named(where: Callable[[], str]) -> Iterator[None]:
    """Turns the errors of reading a damaged file into a DataError that names `where()`."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where()}: byte {error.start} is not UTF-8 ({error.reason}): convert the file to "
            "UTF-8, or fetch it again"
        ) from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{where()}: damaged file, by gzip or bzip2 ({error}): fetch it again, or "
                        "name it by what it is") from None
    except OSError as error:
        raise DataError(f"{where()}: damaged file ({error}): fetch or write it again") from None


def numbered_lines(path: str | os.PathLike) -> Iterator[tuple[str, int, str]]:
    r"""Yields ("FILE:LINE", line number from 1, text without line end) of the lines with content.

    A line ends with \n or \r\n, and nothing else does: U+2028 and U+0085 are text. A byte order
    mark is skipped.

    Raises:
        FileNotFoundError: no such file.
        DataError: bytes that are not UTF-8, a packed file that is damaged or not named so, or
            lines that end with \r alone; names file and line.
    """
    number = 1
    with open_packed(path) as file, damage_named(lambda: f"{os.fspath(path)}:{number}"):
        for raw in file:
            if number == 1 and b"\r" in raw.rstrip(b"\r\n") and not raw.endswith(b"\n"):
                raise DataError(f"{os.fspath(path)}: its lines end with a carriage return alone, "
                                r"which is not read as one: convert it, as by tr '\r' '\n'")
            text = raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
            if text.strip(" "):
                yield f"{os.fspath(path)}:{number}", number, text
            number += 1
