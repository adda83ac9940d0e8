"""Documents of every kind, made from sections of sentences, and a folder of many of them."""

import csv
import io
import json
import pathlib
import random
import textwrap
import zipfile
from collections.abc import Callable, Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

W = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
STYLES = f"""<w:styles xmlns:w="{W}"><w:style w:type="paragraph" w:styleId="Berschrift1">
<w:name w:val="heading 1"/></w:style><w:style w:type="paragraph" w:styleId="H2">
<w:name w:val="heading 2"/></w:style></w:styles>"""
WORDS = ("amber basin cedar delta ember fjord grove heron inlet jetty kelp lagoon marsh north "
         "oasis pines quarry river shore tundra upland valley water yonder zephyr").split()


class Section(NamedTuple):
    """A heading of level 1 or 2, and paragraphs of sentences; in a PDF, a page."""

    level: int
    heading: str
    paragraphs: list[list[str]]


def pdf(pages: Sequence[str], title: str = "", encrypted: bool = False) -> bytes:
    """A PDF by its specification, each page's lines as they are."""
    objects = ["<< /Type /Catalog /Pages 2 0 R >>",
               f"<< /Type /Pages /Count {len(pages)} /Kids "
               f"[{' '.join(f'{4 + 2 * i} 0 R' for i in range(len(pages)))}] >>",
               "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"]
    for number, page in enumerate(pages):
        lines = "".join(f"({line}) Tj T*\n" for line in page.replace("\\", "\\\\").replace(
            "(", "\\(").replace(")", "\\)").split("\n"))
        drawn = f"BT /F1 9 Tf 11 TL 40 800 Td\n{lines}ET"
        objects += [f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 595 842] /Contents "
                    f"{5 + 2 * number} 0 R /Resources << /Font << /F1 3 0 R >> >> >>",
                    f"<< /Length {len(drawn)} >>\nstream\n{drawn}\nendstream"]
    objects.append(f"<< /Title ({title}) >>")
    more = f" /Info {len(objects)} 0 R"
    if encrypted:
        objects.append(f"<< /Filter /Standard /V 1 /R 2 /O <{'ab' * 32}> /U <{'cd' * 32}> /P -4 >>")
        more += f" /Encrypt {len(objects)} 0 R /ID [<00> <00>]"
    content, places = b"%PDF-1.4\n", []
    for number, one in enumerate(objects, 1):
        places.append(len(content))
        content += f"{number} 0 obj\n{one}\nendobj\n".encode("latin-1")
    table = "".join(f"{place:010d} 00000 n \n" for place in places)
    return content + (f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}trailer\n"
                      f"<< /Size {len(objects) + 1} /Root 1 0 R{more} >>\nstartxref\n"
                      f"{len(content)}\n%%EOF\n").encode()


def zipped(parts: dict[str, str | bytes]) -> bytes:
    with io.BytesIO() as file:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, part in parts.items():
                archive.writestr(name, part)
        return file.getvalue()


def paragraph(text: str, style: str = "") -> str:
    """One of DOCX, its text divided into runs as Word divides it."""
    named = f'<w:pPr><w:pStyle w:val="{style}"/></w:pPr>' if style else ""
    half = len(text) // 2
    return f"<w:p>{named}" + "".join(
        f'<w:r><w:t xml:space="preserve">{escape(part)}</w:t></w:r>'
        for part in (text[:half], text[half:])) + "</w:p>"


def docx(body: str, title: str = "", **parts: str | bytes) -> bytes:
    core = (f'<c:coreProperties xmlns:c="urn:c" xmlns:dc="http://purl.org/dc/elements/1.1/">'
            f"<dc:title>{escape(title)}</dc:title></c:coreProperties>")
    return zipped({
        "[Content_Types].xml": "<Types/>", "word/styles.xml": STYLES, "docProps/core.xml": core,
        "word/document.xml": f'<w:document xmlns:w="{W}"><w:body>{body}</w:body></w:document>',
        **parts})


def of_pdf(sections: Sequence[Section]) -> bytes:
    """A page for each section, its last paragraph of the page going on on the next page."""
    pages, carried = [], ""
    for section in sections:
        text = [carried] * bool(carried) + [" ".join(p) for p in section.paragraphs]
        lines = [line for one in text for line in (*textwrap.wrap(one, 90), "")]
        carried = lines.pop(-2) if len(lines) > 4 else ""
        pages.append("\n".join(lines[:-1]))
    return pdf([*pages, carried] if carried else pages)


def of_docx(sections: Sequence[Section]) -> bytes:
    return docx("".join(paragraph(s.heading, ("", "Berschrift1", "H2")[s.level])
                        + "".join(paragraph(" ".join(p)) for p in s.paragraphs) for s in sections))


def of_html(sections: Sequence[Section]) -> bytes:
    body = "".join(f"<h{s.level}>{escape(s.heading)}</h{s.level}>" + "".join(
        f"<p>{escape(' '.join(p))}</p>\n" for p in s.paragraphs) for s in sections)
    return f"<!doctype html><meta charset=utf-8><body><nav>menu</nav>{body}".encode()


def of_markdown(sections: Sequence[Section]) -> bytes:
    return "".join(f"{'#' * s.level} {s.heading}\n\n" + "".join(
        "\n".join(p) + "\n\n" for p in s.paragraphs) for s in sections).encode()


MAKERS: dict[str, Callable[[Sequence[Section]], bytes]] = {
    "pdf": of_pdf, "docx": of_docx, "html": of_html, "md": of_markdown}


def sentence(rng: random.Random, words: int = 12) -> str:
    return " ".join(rng.choices(WORDS, k=words)).capitalize() + "."


def sections(rng: random.Random, count: int = 6) -> list[Section]:
    """Of a few paragraphs of a few sentences each."""
    return [Section(1 + bool(n % 3), f"Chapter {n} {rng.choice(WORDS)}", [
        [sentence(rng) for _ in range(rng.randint(2, 5))] for _ in range(rng.randint(2, 4))])
        for n in range(count)]


def table(rng: random.Random, rows: int, between: str) -> bytes:
    file = io.StringIO()
    writer = csv.writer(file, delimiter=between)
    writer.writerow(["name", "place", "note"])
    for _ in range(rows):
        writer.writerow([rng.choice(WORDS), rng.choice(WORDS), sentence(rng)])
    return file.getvalue().encode()


def folder(path: pathlib.Path, count: int, seed: int = 0) -> None:
    """So many mixed files: PDF, DOCX, HTML, Markdown, text and tables."""
    rng = random.Random(seed)
    for number in range(count):
        kind = ("pdf", "docx", "html", "md", "txt", "csv", "tsv", "jsonl")[number % 8]
        file = path / f"part {number % 7}" / f"file_{number:04d}.{kind}"
        file.parent.mkdir(parents=True, exist_ok=True)
        if kind in MAKERS:
            content = MAKERS[kind](sections(rng))
        elif kind == "txt":
            content = "\n\n".join(sentence(rng) for _ in range(60)).encode()
        elif kind == "jsonl":
            content = b"".join(json.dumps({"name": rng.choice(WORDS), "note": sentence(rng)}
                                          ).encode() + b"\n" for _ in range(40))
        else:
            content = table(rng, 40, {"csv": ",", "tsv": "\t"}[kind])
        file.write_bytes(content)


class Planted(NamedTuple):
    """A sentence that stands once in a file, and where."""

    file: str
    sentence: str
    page: int  # 0 = the file has no pages
    heading: str


def planted(path: pathlib.Path, count: int, seed: int = 0) -> list[Planted]:
    """Plants `count` sentences in files of each kind in MAKERS, 25 a file, anywhere in it."""
    rng, found = random.Random(seed), []
    kinds = list(MAKERS)
    while len(found) < count:
        kind, number = kinds[len(found) // 25 % len(kinds)], len(found)
        name, parts = f"planted_{number:04d}.{kind}", sections(rng, 10)
        marks = [f"Secret {number + n:06d} of {kind} files is {rng.randrange(10**6)}."
                 for n in range(25)]
        for mark in marks:
            place = rng.choice(rng.choice(parts).paragraphs)
            place.insert(rng.randint(0, len(place)), mark)
        (path / name).write_bytes(MAKERS[kind](parts))
        found += [Planted(name, mark, *_place(kind, parts, mark)) for mark in marks]
    return found[:count]


def _place(kind: str, parts: list[Section], mark: str) -> tuple[int, str]:
    """Page, of a PDF as it was drawn, and path of headings of a sentence."""
    if kind == "pdf":
        pages = of_pdf(parts).decode("latin-1").split("BT /F1")[1:]
        texts = [" ".join(line[1:-7] for line in page.split("\n") if line.endswith(") Tj T*"))
                 for page in pages]
        return next(number for number, text in enumerate(texts, 1) if mark[:21] in text), ""
    above = ""
    for section in parts:
        above = section.heading if section.level == 1 else above
        if any(mark in one for one in section.paragraphs):
            path = [above] * (section.level == 2 and bool(above)) + [section.heading]
            return 0, " > ".join(path)
    raise AssertionError(mark)
