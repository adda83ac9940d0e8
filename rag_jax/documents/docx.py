"""DOCX by the standard library: a zip archive with the text as XML.

python-docx reads all of an archive, pictures too, with no bound to what it unpacks to.
"""

import io
import posixpath
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from xml.etree import ElementTree

from rag_jax.documents.document import MOST_TEXT, Document, Unreadable, Writer

LARGEST_PART = 8 * MOST_TEXT  # bytes of XML
_ENCRYPTED = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"  # an OLE file, as old .doc files are too
_W = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
_STRICT = "{http://purl.oclc.org/ooxml/wordprocessingml/main}"
_LEFT_OUT = {f"{space}{name}" for space in (_W, _STRICT) for name in ("del", "moveFrom")} | {
    "{http://schemas.openxmlformats.org/markup-compatibility/2006}Fallback"}
_HEADING = re.compile(r"(?:heading|title|subtitle) ?([1-9]?)", re.I)
_MARKS = {f"{_W}tab": "\t", f"{_W}br": "\n", f"{_W}cr": "\n", f"{_W}noBreakHyphen": "-"}
_TITLE = "{http://purl.org/dc/elements/1.1/}title"


def read_docx(content: bytes) -> Document:
    """The text of the body: paragraphs, headings by their styles, cells of tables."""
    if content.startswith(_ENCRYPTED):
        raise Unreadable("it is encrypted, or an old .doc; save it as .docx without a password")
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            main = _related(archive, "", "officeDocument", "word/document.xml")
            styles = _levels(_part(archive, _related(archive, main, "styles", "word/styles.xml")))
            core = _part(archive, "docProps/core.xml")
            body = _part(archive, main)
    except Unreadable:
        raise
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, zlib.error, EOFError, OSError,
            ValueError, ElementTree.ParseError) as error:
        raise Unreadable(f"it is damaged, or no DOCX: {error}") from None
    if body is None:
        raise Unreadable(f"it is no DOCX: it has no {main}")
    writer = Writer()
    for paragraph in _plain(body).iter(f"{_W}p"):
        _write(paragraph, styles, writer)
    title = "" if core is None else core.findtext(f".//{_TITLE}") or ""
    return writer.document(title)


def _related(archive: zipfile.ZipFile, part: str, kind: str, usual: str) -> str:
    """The name of a part of the kind: the usual one where it is there, or else what `part` ("" =
    the archive) says."""
    folder, name = posixpath.split(part)
    relations = None if usual in archive.namelist() else _part(
        archive, posixpath.join(folder, "_rels", f"{name}.rels"))
    for one in () if relations is None else relations.iter():
        if one.get("Type", "").endswith(f"/{kind}"):
            return posixpath.normpath(posixpath.join("/", folder, one.get("Target", "")))[1:]
    return usual


def _part(archive: zipfile.ZipFile, name: str) -> ElementTree.Element | None:
    """A file of XML in the archive; None where there is none."""
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
    """With the usual namespace where it is of strict Open XML, without what is deleted or twice."""
    for element in root.iter():
        if isinstance(element.tag, str):
            element.tag = element.tag.replace(_STRICT, _W)
        for child in list(element):
            if child.tag in _LEFT_OUT:
                element.remove(child)
    return root


def _levels(styles: ElementTree.Element | None) -> dict[str, int]:
    """Levels of headings, from 1, by the ids of their styles."""
    levels = {}
    for style in () if styles is None else _plain(styles).iter(f"{_W}style"):
        name, outline = style.find(f"{_W}name"), style.find(f".//{_W}outlineLvl")
        named = None if name is None else _HEADING.fullmatch(_value(name))
        identity = _attribute(style, "styleId")
        if named:
            levels[identity] = int(named[1] or 1)
        elif outline is not None and _value(outline) in list("012345678"):
            levels[identity] = int(_value(outline)) + 1
    return levels


def _write(paragraph: ElementTree.Element, styles: Mapping[str, int], writer: Writer) -> None:
    text = "".join(_texts(paragraph))
    if not text.strip():
        return
    style = paragraph.find(f"{_W}pPr/{_W}pStyle")
    level = 0 if style is None else styles.get(_value(style), 0)
    if level:
        writer.heading(level, text)
    writer.text(text + "\n\n")


def _texts(element: ElementTree.Element) -> Iterator[str]:
    """The texts that a paragraph shows, but for those of paragraphs in it, as text boxes have."""
    for child in element:
        if child.tag == f"{_W}r" and _hidden(child):
            continue
        if child.tag == f"{_W}t":
            yield child.text or ""
        elif child.tag in _MARKS:
            yield _MARKS[child.tag]
        elif child.tag != f"{_W}p":
            yield from _texts(child)


def _hidden(run: ElementTree.Element) -> bool:
    vanish = run.find(f"{_W}rPr/{_W}vanish")
    return vanish is not None and _value(vanish) not in ("0", "false", "off")


def _attribute(element: ElementTree.Element, name: str) -> str:
    return element.get(f"{_W}{name}") or element.get(f"{_STRICT}{name}") or ""


def _value(element: ElementTree.Element) -> str:
    return _attribute(element, "val")
