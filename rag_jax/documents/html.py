"""HTML by Lexbor, which reads it as browsers do."""

import codecs
import contextlib
import re
from typing import Any

from rag_jax.documents.document import Document, Writer
from rag_jax.documents.plain import decoded, meant, mended

HIDDEN = {"script", "style", "noscript", "template", "svg", "head", "iframe", "object", "select"}
INLINE = {"a", "abbr", "acronym", "b", "bdi", "bdo", "big", "cite", "code", "data", "del", "dfn",
          "em", "font", "i", "img", "ins", "kbd", "label", "mark", "q", "rp", "rt", "ruby", "s",
          "samp", "small", "span", "strike", "strong", "sub", "sup", "time", "tt", "u", "var",
          "wbr"}
LINES = {"br", "dd", "dt", "li", "td", "th", "tr"}  # begin a line, and no paragraph
_SPACE = re.compile(r"\s+")
_CHARSET = re.compile(rb"""<meta[^>]{0,200}?charset\s*=\s*["']?\s*([A-Za-z0-9_:.-]{1,40})""", re.I)
_COMMENT = re.compile(rb"<!--.*?-->", re.S)
_LEVEL = re.compile("h([1-6])")
_UNSEEN = re.compile(r"(?<![\w-])(?:display\s*:\s*none|visibility\s*:\s*hidden)", re.I)


def read_html(content: bytes) -> Document:
    """The text that a browser would show: blocks are paragraphs, headings begin sections."""
    from selectolax.lexbor import LexborHTMLParser

    text, remarks = _decoded(content)
    tree = LexborHTMLParser(text)
    title = tree.css_first("head > title")
    writer = Writer()
    if tree.body is not None:
        _write(tree.body, writer)
    return writer.document("" if title is None else title.text(), remarks)


def _decoded(content: bytes) -> tuple[str, tuple[str, ...]]:
    """The page in the encoding that it says, or else as any text."""
    said = _CHARSET.search(_COMMENT.sub(b"", content[:4096]))
    if said and not content.startswith((codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        encoding = meant(said[1].decode())
        with contextlib.suppress(LookupError, UnicodeError):
            return content.decode(encoding), ()
        with contextlib.suppress(LookupError, UnicodeError):
            if almost := mended(content, encoding):
                return almost
    return decoded(content)


def _write(body: Any, writer: Writer, headed: bool = True) -> None:
    """Writes the text under a node, in the page's order.

    headed: its headings begin sections.
    """
    node, done = body, False
    while True:
        tag = node.tag
        hidden = not done and _is_hidden(node)
        if tag == "-text":
            writer.text(_SPACE.sub(" ", node.text(deep=False)))
        elif not tag.startswith("-") and tag not in INLINE:
            writer.text("\n" if tag in LINES else "\n\n")
            if headed and not (done or hidden) and (level := _LEVEL.fullmatch(tag)):
                shown = Writer()
                _write(node, shown, headed=False)
                writer.heading(int(level[1]), shown.document().text)
        if not (done or hidden) and node.first_child is not None:
            node = node.first_child
        elif node.mem_id == body.mem_id:
            return
        else:
            done = node.next is None
            node = node.next or node.parent


def _is_hidden(node: Any) -> bool:
    """Whether the page itself, without sheets of styles, says that an element is not shown."""
    if node.tag.startswith("-"):
        return False
    attributes = node.attributes
    return (node.tag in HIDDEN or attributes.get("hidden", "until-found") != "until-found"
            or bool(_UNSEEN.search(attributes.get("style") or "")))
