"""HTML, read with Lexbor, which parses it as browsers do."""

import codecs
import contextlib
import html
import re
from typing import Any

from rag_jax.documents.document import BASE, RAISED, Document, Writer
from rag_jax.documents.plain import decoded, decoded_with_damage, encoding_named

HIDDEN = {"script", "style", "noscript", "template", "svg", "head", "iframe", "object", "select",
          "video", "audio", "canvas", "datalist", "noembed", "noframes", "rp"}
INLINE = {"a", "abbr", "acronym", "b", "bdi", "bdo", "big", "cite", "code", "data", "del", "dfn",
          "em", "font", "i", "img", "ins", "kbd", "label", "mark", "q", "rp", "rt", "ruby", "s",
          "samp", "small", "span", "strike", "strong", "sub", "sup", "time", "tt", "u", "var",
          "wbr"}
EMPTY = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "param",
         "source", "track", "wbr"}  # have no content, in HTML too
LINES = {"br", "dd", "dt", "li", "td", "th", "tr"}  # begin a line, but no paragraph
MOST_RAISED = 8  # nodes in a raised text that is taken for a number
_SPACE = re.compile(r"\s+")
_CHARSET = re.compile(rb"""<meta[^>]{0,200}?charset\s*=\s*["']?\s*([A-Za-z0-9_:.-]{1,40})""", re.I)
_DECLARED = re.compile(rb"""<\?xml[^>]{0,200}?encoding\s*=\s*["']([A-Za-z0-9_:.-]{1,40})["']""")
_COMMENT = re.compile(rb"<!--.*?-->", re.S)
# In XML: a comment, an instruction, a CDATA section, a tag. One that is not closed extends to the
# end of the page, so that its end is not searched for twice.
_MARKUP = re.compile(r"""<(?:!--.*?(?:-->|\Z)|\?.*?(?:\?>|\Z)|!\[CDATA\[(?P<text>.*?)(?:\]\]>|\Z)
                     |(?P<name>[A-Za-z][^\s/>]*)(?:[^"'>]++|"[^"]*+(?:"|\Z)|'[^']*+(?:'|\Z))*+(?:>|\Z))""",
                     re.S | re.X)
_LEVEL = re.compile("h([1-6])")
_NOTE = re.compile("[0-9]{1,3}")  # the mark of a footnote
_UNSEEN = re.compile(r"(?<![\w-])(?:display\s*:\s*none|visibility\s*:\s*hidden)", re.I)


def read_html(content: bytes, xml: bool = False) -> Document:
    """The text that a browser would show: blocks are paragraphs, headings begin sections.

    xml: the page is XHTML. One that begins with an XML declaration always is.
    """
    from selectolax.lexbor import LexborHTMLParser

    text, remarks = _decoded(content, xml)
    if xml or text.startswith("<?xml"):
        text = _MARKUP.sub(_as_html, text)
    tree = LexborHTMLParser(text)
    title = tree.css_first("head > title")
    writer = Writer()
    if tree.body is not None:
        _write(tree.body, writer)
    return writer.document("" if title is None else title.text(), remarks)


def _decoded(content: bytes, xml: bool) -> tuple[str, tuple[str, ...]]:
    """The text of the page, in the encoding that it declares, else decoded as a plain text, and
    remarks."""
    meta, declared = _CHARSET.search(_COMMENT.sub(b"", content[:4096])), _DECLARED.match(content)
    label = declared or meta if xml else meta or declared
    marked = content.startswith((codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    if label and not marked:
        encoding = encoding_named(label[1].decode())
        with contextlib.suppress(LookupError, UnicodeError):
            return content.decode(encoding), ()
        with contextlib.suppress(LookupError, UnicodeError):
            if almost := decoded_with_damage(content, encoding):
                return almost
    return decoded(content)


def _as_html(markup: re.Match[str]) -> str:
    """XML markup as HTML with the same meaning: in HTML, "<script/>" is not closed."""
    if markup["text"] is not None:
        return html.escape(markup["text"])
    if markup["name"] and markup[0].endswith("/>") and markup["name"].lower() not in EMPTY:
        return f"{markup[0][:-2]}></{markup['name']}>"
    return "" if markup[0].startswith("<?") else markup[0]


def _write(body: Any, writer: Writer, headed: bool = True) -> None:
    """Writes the text under a node, in the order of the page.

    headed: headings begin sections.
    """
    node, done = body, False
    while True:
        tag = node.tag
        hidden = not done and _is_hidden(node)
        if tag == "sup" and not hidden:
            writer.text(_around(node, writer.last)[done])
        elif tag == "-text":
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


def _around(node: Any, last: str) -> tuple[str, str]:
    """What is written before and after a raised text, which else were a part of the number or word
    before it: "^", or brackets where it is the link to a footnote.

    last: the character before it.
    """
    inside, ahead = [], [node.first_child]
    while ahead and len(inside) < MOST_RAISED:  # all of it is long where it is never closed
        if (one := ahead.pop()) is not None:
            inside.append(one)
            ahead += [one.next, one.first_child]
    text = "".join(one.text(deep=False) for one in inside if one.tag == "-text")
    if any(ahead):
        return "", ""
    if any(one.tag == "a" for one in inside) and _NOTE.fullmatch(text):
        return "[", "]"
    return "^" if BASE.match(last) and RAISED.fullmatch(text) else "", ""


def _is_hidden(node: Any) -> bool:
    """Whether the page says, without its style sheets, that an element is not shown."""
    if node.tag.startswith("-"):
        return False
    attributes = node.attributes
    return (node.tag in HIDDEN or node.tag == "dialog" and "open" not in attributes
            or attributes.get("hidden", "until-found") != "until-found"
            or bool(_UNSEEN.search(attributes.get("style") or "")))
