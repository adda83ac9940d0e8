"""HTML, read with Lexbor, which parses it as browsers do."""

import codecs
import contextlib
import html
import re
from typing import Any

from rag_jax.documents.document import BASE, RAISED, Document, Writer
from rag_jax.documents.plain import decoded, decoded_with_damage, encoding_named

BOXES = {"audio", "canvas", "iframe", "object", "select", "svg", "video"}  # without their content
HIDDEN = BOXES | {"annotation", "annotation-xml", "datalist", "head", "noembed", "noframes",
                  "noscript", "rp", "script", "style", "template"}
# All other elements, unknown ones too, are parts of a line. Some of these are shown in a line, but
# as boxes, which divide a text.
BLOCKS = BOXES | {
    "address", "article", "aside", "blockquote", "body", "button", "caption", "center", "col",
    "colgroup", "details", "dialog", "dir", "div", "dl", "embed", "fieldset", "figcaption",
    "figure", "footer", "form", "frame", "frameset", "h1", "h2", "h3", "h4", "h5", "h6", "header",
    "hgroup", "hr", "html", "input", "legend", "listing", "main", "marquee", "menu", "meter", "nav",
    "ol", "optgroup", "option", "p", "plaintext", "pre", "progress", "search", "section", "summary",
    "table", "tbody", "textarea", "tfoot", "thead", "ul", "xmp"}
EMPTY = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "param",
         "source", "track", "wbr"}  # have no content, in HTML too
LINES = {"br", "dd", "dt", "li", "mtd", "mtr", "td", "th", "tr"}  # begin one, but no paragraph
# What stands before the parts of a part of an equation.
EQUATIONS = {"mfrac": ("", "/"), "mover": ("", "^"), "mroot": ("", "^(1/"), "msqrt": ("√",),
             "msub": ("", "_"), "msubsup": ("", "_", "^"), "msup": ("", "^"), "munder": ("", "_"),
             "munderover": ("", "_", "^")}
_ROWS = {"mpadded", "mrow", "mstyle"}  # of the terms of an equation
MOST_RAISED = 8  # nodes in a raised text that is taken for a number
# Python's names of the encodings that browsers know; they ignore the names of others.
_OF_PAGES = {
    "utf-8", "cp866", "koi8-r", "koi8-u", "mac-cyrillic", "mac-roman", "cp874",
    *(f"cp{number}" for number in range(1250, 1259)), "big5hkscs", "cp932", "cp949", "euc_jp",
    "gb18030", "iso2022_jp", *(f"iso8859-{part}" for part in (*range(2, 9), 10, *range(13, 17)))}
_SPACE = re.compile(r"\s+")
_CHARSET = re.compile(rb"""<meta[^>]{0,200}?charset\s*=\s*["']?\s*([A-Za-z0-9_:.-]{1,40})""", re.I)
_DECLARED = re.compile(rb"""<\?xml[^>]{0,200}?encoding\s*=\s*["']([A-Za-z0-9_:.-]{1,40})["']""")
_COMMENT = re.compile(rb"<!--.*?-->", re.S)
# In XML: a comment, an instruction, a CDATA section, a type with declarations, a tag. One that is
# not closed extends to the end of the page, so that its end is not searched for twice.
_MARKUP = re.compile(r"""<(?:!--.*?(?:-->|\Z)|\?.*?(?:\?>|\Z)|!\[CDATA\[(?P<text>.*?)(?:\]\]>|\Z)
                     |!DOCTYPE(?:[^\[<>"']|"[^"<>]*"|'[^'<>]*')*+\[(?P<declared>.*?)(?:\]\s*>|\Z)
                     |(?P<name>[A-Za-z][^\s/>]*)(?:[^"'>]++|"[^"]*+(?:"|\Z)|'[^']*+(?:'|\Z))*+(?:>|\Z))""",
                     re.S | re.X)
_LEVEL = re.compile("h([1-6])")
_NOTE = re.compile("[0-9]{1,3}")  # the mark of a footnote
# Links of headings to themselves, which are shown under the mouse.
_PERMALINKS = {"#", "\u00b6", "\u00a7", "\u200b", "\U0001f517"}
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
        encoding = _encoding_of(label[1].decode())
        with contextlib.suppress(LookupError, UnicodeError):
            return content.decode(encoding), ()
        with contextlib.suppress(LookupError, UnicodeError):
            if almost := decoded_with_damage(content, encoding):
                return almost
    return decoded(content)


def _encoding_of(label: str) -> str:
    """Python's name of the encoding that a page declares; "" = browsers ignore it."""
    with contextlib.suppress(LookupError):
        name = codecs.lookup(encoding_named(label)).name
        if name in _OF_PAGES:
            return name
    return ""


def _as_html(markup: re.Match[str]) -> str:
    """XML markup as HTML with the same meaning: in HTML, "<script/>" is not closed."""
    if markup["text"] is not None:
        return html.escape(markup["text"])
    if markup["name"] and markup[0].endswith("/>") and markup["name"].lower() not in EMPTY:
        return f"{markup[0][:-2]}></{markup['name']}>"
    return "" if markup[0].startswith("<?") or markup["declared"] is not None else markup[0]


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
        elif tag == "-text" and node.parent.tag not in EQUATIONS:
            writer.text(_SPACE.sub(" ", node.text(deep=False)))
        elif not hidden and node.parent.tag in EQUATIONS:
            writer.text(_joint(node)[done])
        elif tag == "math" and node.attributes.get("display") == "block":
            writer.text("\n\n")
        elif tag in LINES:
            writer.text("\n")
        elif tag in BLOCKS:
            writer.text("\n\n")
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


def _joint(node: Any) -> tuple[str, str]:
    """What is written before and after a part of a fraction, a power or a root: what joins it to
    the part before it, and brackets around several terms."""
    if node.tag.startswith("-") or node.first_child is None:
        return "", ""
    joints, earlier, place = EQUATIONS[node.parent.tag], node.prev, 0
    while earlier is not None and place < len(joints):
        place += not earlier.tag.startswith("-")
        earlier = earlier.prev
    joint, terms = joints[place] if place < len(joints) else "", _terms(node)
    while len(terms) == 1 and terms[0].tag in _ROWS:
        terms = _terms(terms[0])
    several = len(terms) > 1 or node.tag in EQUATIONS or any(t.tag in EQUATIONS for t in terms)
    before = f"{joint}(" if several else joint
    return before, ")" * before.count("(")


def _terms(row: Any) -> list[Any]:
    """The first two elements in a row of an equation; [] of what is no row."""
    terms: list[Any] = []
    inside = row.first_child if row.tag in _ROWS else None
    while inside is not None and len(terms) < 2:
        if not inside.tag.startswith("-"):
            terms.append(inside)
        inside = inside.next
    return terms


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
    parent = node.parent  # the link, as Pandoc writes it
    linked = any(one.tag == "a" for one in inside) or (
        parent.tag == "a" and "#" in (parent.attributes.get("href") or "")
        and node.prev is None and node.next is None)
    if linked and _NOTE.fullmatch(text):
        return "[", "]"
    return "^" if BASE.match(last) and RAISED.fullmatch(text) else "", ""


def _is_hidden(node: Any) -> bool:
    """Whether the page says, without its style sheets, that an element is not shown; of equations
    and permalinks, as the sheets of MediaWiki, KaTeX and writers of documentation say it."""
    if node.tag.startswith("-"):
        return False
    attributes = node.attributes
    classes = (attributes.get("class") or "").split()
    if "mwe-math-mathml-a11y" in classes:  # a picture of the equation is shown beside it
        return False
    return (node.tag in HIDDEN or node.tag == "dialog" and "open" not in attributes
            or "katex-html" in classes and node.prev is not None  # the equation again, in pieces
            or _is_permalink(node, classes)
            or attributes.get("hidden", "until-found") != "until-found"
            or bool(_UNSEEN.search(attributes.get("style") or "")))


def _is_permalink(node: Any, classes: list[str]) -> bool:
    """Whether an element is the link of a heading, term or caption to itself, beside its text."""
    inside, link = node.first_child, node.attributes.get("href") or ""
    if node.tag != "a" or "#" not in link or inside is None or inside.tag != "-text" or (
            inside.next is not None or inside.text(deep=False).strip() not in _PERMALINKS):
        return False
    return "headerlink" in classes or (
        link.startswith("#") and (node.prev is not None or node.next is not None)
        and (node.parent.tag == "dt" or bool(_LEVEL.fullmatch(node.parent.tag))))
