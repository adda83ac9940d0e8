"""Which function reads which kind of file, by the end of its name."""

import functools
import importlib.metadata
import os
import pathlib
from collections.abc import Callable

from rag_jax.documents.document import Document, Unreadable
from rag_jax.documents.docx import read_docx
from rag_jax.documents.html import read_html
from rag_jax.documents.pdf import read_pdf
from rag_jax.documents.plain import read_csv, read_jsonl, read_markdown, read_text, read_tsv

LARGEST_FILE = 2**28  # bytes
READERS: dict[str, Callable[[bytes], Document]] = {
    ".txt": read_text, ".text": read_text, ".md": read_markdown, ".markdown": read_markdown,
    ".html": read_html, ".htm": read_html, ".xhtml": functools.partial(read_html, xml=True),
    ".pdf": read_pdf, ".docx": read_docx, ".csv": read_csv, ".tsv": read_tsv, ".jsonl": read_jsonl}
UNKNOWN_KIND = f"files of this kind are not read; those of {', '.join(READERS)} are"
LIBRARIES = ("pypdfium2", "selectolax", "markdown-it-py", "chardetng_py")
_FORMAT = 9  # raised when the text or passages of a file change


def reader_of(name: str) -> Callable[[bytes], Document] | None:
    """The function that reads files of this name; None = there is none."""
    return READERS.get(os.path.splitext(name)[1].lower())


def versions() -> dict[str, str]:
    """The versions on which the text of a document depends; that of a missing library is ""."""
    def version(library: str) -> str:
        try:
            return importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            return ""

    return {"documents": str(_FORMAT), **{name: version(name) for name in LIBRARIES}}


def read_content(name: str, content: bytes) -> Document:
    """The document in a file's content, in this process.

    Raises:
      Unreadable: its text cannot be read.
    """
    reader = reader_of(name)
    if reader is None:
        raise Unreadable(UNKNOWN_KIND)
    try:
        document = reader(content)
    except ImportError as error:
        raise Unreadable(f"{error.name} is not installed: pip install 'rag_jax[documents]'"
                         ) from None
    except RecursionError:
        raise Unreadable("it is nested too deep") from None
    if not document.text.strip():
        raise Unreadable("it is empty")
    return document


def read(path: str | os.PathLike) -> Document:
    """The document in a file: the text, in whose characters citations count, pages and headings.

    It is read in this process; for a hostile file, `readers.Readers` limits time and memory.

    Raises:
      Unreadable: its text cannot be read.
    """
    path = pathlib.Path(path)
    try:
        return read_content(path.name, path.read_bytes())
    except Unreadable as error:
        raise Unreadable(f"{path}: {error}") from None
