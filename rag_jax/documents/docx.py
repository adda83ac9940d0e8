"""DOCX, a zip archive with the text as XML, read with the standard library.

python-docx reads the whole archive, also pictures, and does not limit what it unpacks to.
"""

import io
import posixpath
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple
from xml.etree import ElementTree

from rag_jax.documents.document import BASE, MOST_TEXT, RAISED, Document, Unreadable, Writer
from rag_jax.documents.symbols import symbol

LARGEST_PART = 8 * MOST_TEXT  # bytes of XML
_ENCRYPTED = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"  # an OLE file, which old .doc files are, too
_W = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
_STRICT = "{http://purl.oclc.org/ooxml/wordprocessingml/main}"
_M = "{http://schemas.openxmlformats.org/officeDocument/2006/math}"
_STRICT_M = "{http://purl.oclc.org/ooxml/officeDocument/math}"
_LEFT_OUT = {f"{space}{name}" for space in (_W, _STRICT) for name in ("del", "moveFrom")} | {
    "{http://schemas.openxmlformats.org/markup-compatibility/2006}Fallback"}
_HEADING = re.compile(r"(?:heading|title|subtitle) ?([1-9]?)", re.I)
_MARKS = {f"{_W}tab": "\t", f"{_W}ptab": "\t", f"{_W}br": "\n", f"{_W}cr": "\n",
          f"{_W}noBreakHyphen": "-"}
# What stands before and after a part of an equation, where it has text.
_IN_EQUATIONS = {f"{_M}den": ("/", ""), f"{_M}sup": ("^", ""), f"{_M}sub": ("_", ""),
                 f"{_M}d": ("(", ")")}
_TERMS = {f"{_M}{part}" for part in ("num", "den", "sup", "sub")}  # in brackets, if several
_ONE_TERM = re.compile(r"[-+\u2212]?[\w.,]*|\([^()]*\)")
_RAISED = "\0"  # before and after a raised text; XML has no such character
_POWERS = re.compile(f"(?<={BASE.pattern}){_RAISED}({RAISED.pattern}){_RAISED}")
_NOTES = {f"{_W}{kind}noteReference": kind for kind in ("foot", "end")}
_NOTE = re.compile("\1([^\1]*)\1")  # stands where a note belongs, and names it
_TITLE = "{http://purl.org/dc/elements/1.1/}title"


def read_docx(content: bytes) -> Document:
    """The text of the body: paragraphs, headings (by their styles), cells of tables, and notes,
    each after the paragraph that refers to it."""
    if content.startswith(_ENCRYPTED):
        raise Unreadable("it is encrypted, or an old .doc; save it as .docx without a password")
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            main = _related(archive, "", "officeDocument", "word/document.xml")
            styles = _styles(_part(archive, _related(archive, main, "styles", "word/styles.xml")))
            core = _part(archive, "docProps/core.xml")
            body = _part(archive, main)
            notes = {kind: _part(archive, _related(archive, main, f"{kind}notes",
                                                   f"word/{kind}notes.xml"))
                     for kind in _NOTES.values()}
    except Unreadable:
        raise
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, zlib.error, EOFError, OSError,
            ValueError, ElementTree.ParseError) as error:
        raise Unreadable(f"it is damaged, or no DOCX: {error}") from None
    if body is None:
        raise Unreadable(f"it is no DOCX: it has no {main}")
    named = {kind + _attribute(note, "id"): note for kind, part in notes.items() if part is not None
             for note in _plain(part).iter(f"{_W}{kind}note")}
    writer, unknown = Writer(), _replace_symbols(_plain(body), *named.values())
    for paragraph in body.iter(f"{_W}p"):
        _write(paragraph, styles, named, writer)
    title = "" if core is None else core.findtext(f".//{_TITLE}") or ""
    left = f"{len(unknown)} symbol{'s are' if len(unknown) > 1 else ' is'} left out"
    return writer.document(title, (f"{left}; the first is {unknown[0]}",) if unknown else ())


def _replace_symbols(*roots: ElementTree.Element) -> list[str]:
    """Makes texts of the symbols under elements; returns the names of those that are not known."""
    unknown = []
    for element in (one for root in roots for one in root.iter(f"{_W}sym")):
        font, number = _attribute(element, "font"), _attribute(element, "char")
        element.tag, element.text = f"{_W}t", symbol(font, number)
        if not element.text:
            unknown.append(f"{number!r:.20} of the font {font!r:.80}")
    return unknown


def _related(archive: zipfile.ZipFile, part: str, kind: str, usual: str) -> str:
    """The name of the part of a kind: the usual one if it exists, else the one to which `part`
    ("" = the archive itself) refers."""
    folder, name = posixpath.split(part)
    relations = None if usual in archive.namelist() else _part(
        archive, posixpath.join(folder, "_rels", f"{name}.rels"))
    for one in () if relations is None else relations.iter():
        if one.get("Type", "").endswith(f"/{kind}"):
            return posixpath.normpath(posixpath.join("/", folder, one.get("Target", "")))[1:]
    return usual


def _part(archive: zipfile.ZipFile, name: str) -> ElementTree.Element | None:
    """The XML of a file in the archive; None if there is no such file."""
    if name not in archive.namelist():
        return None
    with archive.open(name) as file:
        content = file.read(LARGEST_PART + 1)
    if len(content) > LARGEST_PART:
        raise Unreadable(f"its {name} unpacks to more than {LARGEST_PART} bytes, as zip bombs do")
    if any("<!DOCTYPE".encode(code) in content for code in ("utf-8", "utf-16-le", "utf-16-be")):
        raise Unreadable(f"its {name} has a DOCTYPE, which no DOCX has")
    return ElementTree.fromstring(content)


def _plain(root: ElementTree.Element) -> ElementTree.Element:
    """Replaces the namespaces of strict Open XML by the usual ones, and removes deleted or repeated
    text."""
    for element in root.iter():
        if isinstance(element.tag, str):
            element.tag = element.tag.replace(_STRICT, _W).replace(_STRICT_M, _M)
        for child in list(element):
            if child.tag in _LEFT_OUT:
                element.remove(child)
    return root


class _Style(NamedTuple):
    """A style: the level of headings in it, 0 = it is no heading; and whether it hides text."""

    level: int = 0
    hidden: bool = False


def _styles(part: ElementTree.Element | None) -> dict[str, _Style]:
    """The styles by their ids, with what they inherit from the styles that they are based on."""
    named = {_attribute(style, "styleId"): style
             for style in (() if part is None else _plain(part).iter(f"{_W}style"))}
    styles: dict[str, _Style] = {}
    for identity in named:
        chain: dict[str, None] = {}  # from a style down to the first that is done, or missing
        while identity in named and identity not in styles and identity not in chain:
            chain[identity] = None
            identity = _value(named[identity].find(f"{_W}basedOn"))
        style = styles.get(identity, _Style())
        for one in reversed(chain):
            style = styles[one] = _of_element(named[one], style)
    return styles


def _of_element(element: ElementTree.Element, base: _Style) -> _Style:
    """The style that an element defines, based on another one."""
    named = _HEADING.fullmatch(_value(element.find(f"{_W}name")))
    outline = _value(element.find(f".//{_W}outlineLvl"))
    level = base.level
    if named:
        level = int(named[1] or 1)
    elif outline:
        level = int(outline) + 1 if outline in list("012345678") else 0
    vanish = element.find(f"{_W}rPr/{_W}vanish")
    return _Style(level, base.hidden if vanish is None else _is_on(vanish))


def _write(paragraph: ElementTree.Element, styles: Mapping[str, _Style],
           notes: dict[str, ElementTree.Element], writer: Writer) -> None:
    """Writes a paragraph, and after it its notes, which are removed from `notes`."""
    ahead = [paragraph]  # a note may have notes, thousands of them one in another
    while ahead:
        paragraph = ahead.pop()
        style = styles.get(_value(paragraph.find(f"{_W}pPr/{_W}pStyle")), _Style())
        text = "".join(_texts(paragraph, styles, style.hidden))
        named, text = _NOTE.findall(text), _NOTE.sub("", text).replace(2 * _RAISED, "")
        text = _POWERS.sub(r"^\1", text).replace(_RAISED, "")
        if text.strip():
            if style.level:
                writer.heading(style.level, text)
            writer.text(text + "\n\n")
        inside = [one for name in named if name in notes
                  for one in notes.pop(name).iter(f"{_W}p")]
        ahead += reversed(inside)


def _texts(element: ElementTree.Element, styles: Mapping[str, _Style], hidden: bool
           ) -> Iterator[str]:
    """The texts that a paragraph shows, and the names of its notes; without those of paragraphs
    inside it, as in text boxes.

    hidden: the style of the paragraph hides its text.
    """
    for child in element:
        if child.tag == f"{_W}pPr" or child.tag == f"{_W}r" and _is_hidden(child, styles, hidden):
            continue
        if child.tag in (f"{_W}t", f"{_M}t"):
            yield child.text or ""
        elif child.tag in _MARKS:
            yield _MARKS[child.tag]
        elif child.tag in _NOTES:
            yield f"\1{_NOTES[child.tag]}{_attribute(child, 'id')}\1"
        elif child.tag != f"{_W}p":
            text = "".join(_texts(child, styles, hidden))
            before, after = _IN_EQUATIONS.get(child.tag, ("", ""))
            if child.tag in _TERMS and not _ONE_TERM.fullmatch(text):
                before, after = f"{before}(", ")"
            if _value(child.find(f"{_W}rPr/{_W}vertAlign")) == "superscript":
                before = after = _RAISED
            yield text and f"{before}{text}{after}"


def _is_hidden(run: ElementTree.Element, styles: Mapping[str, _Style], hidden: bool) -> bool:
    """Whether a run is hidden: by itself, or else by its style or that of its paragraph, but not by
    both, which show it again."""
    vanish = run.find(f"{_W}rPr/{_W}vanish")
    if vanish is not None:
        return _is_on(vanish)
    return styles.get(_value(run.find(f"{_W}rPr/{_W}rStyle")), _Style()).hidden != hidden


def _is_on(switch: ElementTree.Element) -> bool:
    return _value(switch) not in ("0", "false", "off")


def _attribute(element: ElementTree.Element, name: str) -> str:
    return element.get(f"{_W}{name}") or element.get(f"{_STRICT}{name}") or ""


def _value(element: ElementTree.Element | None) -> str:
    return "" if element is None else _attribute(element, "val")
