"""JSON files that carry their own digest, and checks of files before they are opened.

The folder may come from somebody else: a link, a pipe or a huge file in it is refused.
"""

import hashlib
import json
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rag_jax import files
from rag_jax.retrieval.protocol import RetrievalError

JSON_BYTES = 64 * 2**20  # more than the tables of the largest index have
REMEDY = "copy it again from where it is whole, or make it again"
# Of a file or folder of ours: not of hidden ones, which operating systems write.
FILE_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.=-]*"


def regular_file(folder: Path, name: str) -> Path:
    """The path of a regular file in a folder.

    The folder may be reached through a symbolic link, the file in it may not.

    Raises:
        RetrievalError: the name leads out of the folder, or is not that of a regular file.
    """
    parts = name.split("/")
    if not all(re.fullmatch(FILE_NAME, part) for part in parts):
        raise RetrievalError(
            f"{folder}: its table names the file {name!r}; allowed are names inside the folder, of "
            "letters, digits, _ . = and -.")
    path = folder
    for number, part in enumerate(parts):
        path = path / part
        try:
            mode = os.lstat(path).st_mode
        except FileNotFoundError:
            raise RetrievalError(f"{folder}: {name} is missing; {REMEDY}.") from None
        if not (stat.S_ISREG(mode) if number == len(parts) - 1 else stat.S_ISDIR(mode)):
            raise RetrievalError(
                f"{folder}: {path.relative_to(folder)} is a link or no regular file; only files "
                "that lie in the folder itself are read.")
    return path


def refuse_links(folder: Path) -> None:
    """Checks that a folder, if it exists, holds nothing but regular files and folders.

    Raises:
        RetrievalError: something in it is neither a regular file nor a folder.
        OSError: a folder in it cannot be read.
    """
    def refuse(error: OSError) -> None:  # by default os.walk skips a folder that it cannot read
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            raise error

    for parent, folders, names in os.walk(folder, onerror=refuse):
        for name in (*folders, *names):
            mode = os.lstat(os.path.join(parent, name)).st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise RetrievalError(f"{parent}: {name} is a link or no regular file; only files "
                                     "that lie in the folder itself are read.")


def read_json_bytes(folder: Path, name: str, most: int = JSON_BYTES) -> bytes:
    """The content of a JSON file in a folder, at most `most` bytes: a hostile one may have 40 GB.

    Raises:
        RetrievalError: it is no regular file, or too large.
    """
    path = regular_file(folder, name)
    if path.stat().st_size > most:
        raise RetrievalError(f"{path}: {path.stat().st_size} bytes, at most {most} are "
                             f"read; {REMEDY}.")
    return path.read_bytes()


def read_object(folder: Path, name: str, most: int = JSON_BYTES) -> dict[str, Any]:
    """The JSON object in a file of a folder, of at most `most` bytes.

    Raises:
        RetrievalError: as `read_json_bytes`, or it is not a JSON object.
    """
    text = read_json_bytes(folder, name, most)
    try:
        content = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise RetrievalError(f"{folder}: {name} is damaged ({error!r}); {REMEDY}.") from None
    if not isinstance(content, dict):
        raise RetrievalError(f"{folder}: {name} is damaged (not an object); {REMEDY}.")
    return content


def write_sealed(path: Path, content: Mapping[str, Any]) -> None:
    """Replaces a file by a JSON object with its own digest as the last field."""
    files.write_json(path, {**content, "sha256": digest_of(content)})


def read_sealed(path: Path, needs_digest: bool = False, most: int = JSON_BYTES
                ) -> dict[str, Any]:
    """The content that `write_sealed` was given. A file written by hand may have no digest.

    Args:
        path: the file.
        needs_digest: refuse a file without a digest.
        most: bytes that are read at most.

    Raises:
        RetrievalError: it is damaged or was changed, or lacks the digest that it needs.
    """
    content = read_object(path.parent, path.name, most)
    if "sha256" not in content:
        if needs_digest:
            raise RetrievalError(f"{path}: its own sha256 is missing; {REMEDY}.")
        return content
    if content.pop("sha256") != digest_of(content):
        advice = "" if needs_digest else (
            " If it was changed on purpose, remove that line, and the comma before it.")
        raise RetrievalError(f"{path}: differs from the sha256 in its last line, so it is damaged; "
                             f"{REMEDY}.{advice}")
    return content


def digest_of(content: Mapping[str, Any]) -> str:
    """sha256 of an object as JSON with sorted keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def is_count(value: Any, least: int = 0) -> bool:
    """Whether a value from a JSON file is an integer that can be a size or a number of rows."""
    return type(value) is int and least <= value < 2**62
