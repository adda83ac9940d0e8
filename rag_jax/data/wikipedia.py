"""Articles of a Wikipedia dump, as published (XML) or as wikiextractor writes it (JSON)."""

import os
import pathlib
import re
import xml.parsers.expat
from collections.abc import Iterator

from rag_jax.data.records import json_lines
from rag_jax.data.wikitext import is_disambiguation, plain_text
from rag_jax.errors import DataError
from rag_jax.lines import damage_named, open_packed
from rag_jax.retrieval.protocol import Passage

_CHUNK = 1 << 16  # bytes
_FORMS = {"title": re.compile(r"[^\0]*\S[^\0]*"), "ns": re.compile(r"-?\d+"),
          "id": re.compile(r"\d+"), "text": re.compile(r"[^\0]*")}
_TEXTS = {("page", "title"): "title", ("page", "ns"): "ns", ("page", "id"): "id",
          ("revision", "text"): "text"}


def read_dump(path: str) -> Iterator[tuple[str, Passage]]:
    """Yields (place for errors, article) of a pages-articles dump, .xml, .xml.bz2 or .xml.gz.

    Articles are pages of namespace 0 that are no redirects and no disambiguation pages, with some
    prose left of their markup. One page lies in memory at a time.

    Raises:
        DataError: names file and line: not XML, cut short, damaged .bz2, or a page without title,
            namespace, id or text.
    """
    pages = _Pages(path)
    with open_packed(path) as file:
        while True:
            with damage_named(lambda: pages.where):
                data = file.read(_CHUNK)
            pages.feed(data)
            for where, page in pages.taken():
                article = _article(page)
                if article is not None:
                    yield where, article
            if not data:
                return


def _article(page: dict[str, str]) -> Passage | None:
    redirect = "redirect" in page or page["text"].lstrip()[:9].upper() == "#REDIRECT"
    if page["ns"] != "0" or redirect or is_disambiguation(page["title"], page["text"]):
        return None
    text = plain_text(page["text"])
    return Passage(page["id"], page["title"], text) if text else None


class _Pages:
    """The pages of an XML stream, collected by expat's callbacks."""

    def __init__(self, path: str):
        self._path = path
        self._parser = xml.parsers.expat.ParserCreate("utf-8")
        self._parser.buffer_text = True
        self._parser.StartElementHandler = self._start
        self._parser.EndElementHandler = self._end
        self._parser.CharacterDataHandler = self._characters
        self._open: list[str] = []
        self._page: dict[str, str] | None = None
        self._field: str | None = None
        self._done: list[tuple[str, dict[str, str]]] = []

    @property
    def where(self) -> str:
        return f"{self._path}:{self._parser.CurrentLineNumber}"

    def feed(self, data: bytes) -> None:
        """Takes in the next bytes; none = the end."""
        try:
            self._parser.Parse(data, not data)
        except xml.parsers.expat.ExpatError as error:
            raise DataError(f"{self._path}:{error.lineno}: not the XML of a Wikipedia dump "
                             f"({error}): fetch the file again") from None

    def taken(self) -> list[tuple[str, dict[str, str]]]:
        """The pages that have become whole since the last call."""
        done, self._done = self._done, []
        return done

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        if not self._open and name != "mediawiki":
            raise DataError(f"{self.where}: <{name}> where <mediawiki> was expected: a dump named "
                             "...-pages-articles.xml.bz2 is meant")
        parent = self._open[-1] if self._open else ""
        self._open.append(name)
        if name == "page":
            self._page = {}
        elif self._page is not None:
            self._field = _TEXTS.get((parent, name))
            if self._field is not None:
                self._page[self._field] = ""
            elif (parent, name) == ("page", "redirect"):
                self._page["redirect"] = attributes.get("title", "")

    def _characters(self, text: str) -> None:
        if self._field is not None:
            self._page[self._field] += text

    def _end(self, name: str) -> None:
        self._open.pop()
        self._field = None
        if name == "page":
            for field, form in _FORMS.items():
                if not form.fullmatch(self._page.get(field, "\0")):
                    raise DataError(
                        f"{self.where}: page {self._page.get('title', '')!r:.60}: <{field}> is "
                        f"{self._page.get(field, 'missing')!r:.60}: fetch the file again")
            self._done.append((self.where, self._page))
            self._page = None


def extracted_files(folder: str) -> list[str]:
    """wikiextractor's files AA/wiki_00, AA/wiki_01, ... in a folder, in order."""
    return sorted(str(path) for path in pathlib.Path(folder).rglob("wiki_*") if path.is_file())


def read_extracted(paths: list[str]) -> Iterator[tuple[str, Passage]]:
    """Yields (place for errors, article) of files that wikiextractor --json wrote: {"id", "title",
    "text"} a line. Articles without text (redirects) are passed; the title, which the text begins
    with, is taken off.

    Raises:
        DataError: names file, line and field.
    """
    for path in paths:
        for _, record in json_lines(os.fspath(path)):
            title, text = (record.text(key, blank=True) for key in ("title", "text"))
            text = " ".join(text.removeprefix(f"{title}\n").split())
            identity = record.name("id")
            if text:
                yield record.where, Passage(identity, title, text)
