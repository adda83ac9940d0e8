"""Articles of a Wikipedia dump, as published (XML) or as wikiextractor writes it (JSON)."""

import functools
import re
from collections.abc import Iterator
from xml.etree import ElementTree

from rag_jax.data.records import json_lines
from rag_jax.data.wikitext import is_disambiguation, plain_text
from rag_jax.errors import DataError
from rag_jax.lines import damage_named, open_packed
from rag_jax.retrieval.protocol import Passage

_LONGEST_PIECE = 1 << 16  # bytes, of a line
# Elements of a page, and patterns that must match their text.
_FIELDS = {"title": ("{*}title", r"\S"), "ns": ("{*}ns", r"\A-?\d+\Z"), "id": ("{*}id", r"\A\d+\Z"),
           "text": ("{*}revision/{*}text", "")}


def read_dump(path: str) -> Iterator[tuple[str, Passage]]:
    """Yields (place for errors, article) of a pages-articles dump, .xml, .xml.bz2 or .xml.gz.

    Articles are pages of namespace 0 that are no redirects and no disambiguation pages, with some
    prose left of their markup. One page lies in memory at a time.

    Raises:
        DataError: names file and line: not XML, cut short, damaged .bz2, or a page without title,
            namespace, id or text.
    """
    root = None
    for where, event, element in _events(path):
        name = element.tag.rpartition("}")[2]
        if root is None:
            root = element
            if name != "mediawiki":
                raise DataError(f"{where}: <{name}> where <mediawiki> was expected: a dump named "
                                "...-pages-articles.xml.bz2 is meant")
        if event == "end" and name == "page":
            article = _article(where, element)
            root.clear()
            if article is not None:
                yield where, article


def _events(path: str) -> Iterator[tuple[str, str, ElementTree.Element]]:
    """Yields (place for errors, "start" or "end", element) as they come."""
    parser, line = ElementTree.XMLPullParser(("start", "end")), 1
    with open_packed(path) as file, damage_named(lambda: f"{path}:{line}"):
        try:
            for piece in iter(functools.partial(file.readline, _LONGEST_PIECE), b""):
                parser.feed(piece)
                for event, element in parser.read_events():
                    yield f"{path}:{line}", event, element
                line += piece.endswith(b"\n")
            parser.close()
        except ElementTree.ParseError as error:
            raise DataError(f"{path}:{error.position[0]}: not the XML of a Wikipedia dump "
                            f"({error}): fetch the file again") from None


def _article(where: str, page: ElementTree.Element) -> Passage | None:
    texts = {field: page.findtext(place) for field, (place, _) in _FIELDS.items()}
    for field, (_, form) in _FIELDS.items():
        if texts[field] is None or not re.search(form, texts[field]):
            value = "missing" if texts[field] is None else texts[field]
            raise DataError(f"{where}: page {texts['title'] or ''!r:.60}: <{field}> is "
                            f"{value!r:.60}: fetch the file again")
    title, text = texts["title"], texts["text"]
    redirect = page.find("{*}redirect") is not None or text.lstrip()[:9].upper() == "#REDIRECT"
    if texts["ns"] != "0" or redirect or is_disambiguation(title, text):
        return None
    prose = plain_text(text)
    return Passage(texts["id"], title, prose) if prose else None


def read_extracted(paths: list[str]) -> Iterator[tuple[str, Passage]]:
    """Yields (place for errors, article) of files that wikiextractor --json wrote: {"id", "title",
    "text"} a line. Articles without text (redirects) are skipped; the title, which the text begins
    with, is removed.

    Raises:
        DataError: names file, line and field.
    """
    for path in paths:
        for _, record in json_lines(path):
            title, text = (record.text(key, blank=True) for key in ("title", "text"))
            text = " ".join(text.removeprefix(f"{title}\n").split())
            identity = record.name("id")
            if text:
                yield record.where, Passage(identity, title, text)
