"""The report's parts, and how they are written: Markdown with image files, and one HTML page."""

import base64
import dataclasses
import pathlib
from collections.abc import Iterator, Sequence

from rag_jax import files
from rag_jax.visible import html_page, html_text, markdown

NOT_RUN = "not run"


@dataclasses.dataclass(frozen=True)
class Table:
    """Cells of text; a row as long as the header."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclasses.dataclass(frozen=True)
class Plot:
    """A picture.

    Attributes:
      name: its file's, without suffix.
      caption: what is seen.
      png: None where matplotlib is not installed.
    """

    name: str
    caption: str
    png: bytes | None


Part = str | Table | Plot  # a string is a paragraph


@dataclasses.dataclass(frozen=True)
class Section:
    """One experiment: its parts in order."""

    title: str
    parts: Sequence[Part]


PLOTS_MISSING = "(no picture: pip install 'rag_jax[plots]' and run the same command again)"
STYLE = ("body{font:15px sans-serif;max-width:70em;margin:2em auto;padding:0 1em}"
         "table{border-collapse:collapse;margin:1em 0}td,th{border:1px solid #bbb;"
         "padding:3px 8px;text-align:left}img{max-width:100%}")


def write(folder: pathlib.Path, title: str, sections: Sequence[Section]) -> None:
    """Writes FOLDER/report.md with FOLDER/figures/*.png, and FOLDER/report.html."""
    plots = [part for s in sections for part in s.parts if isinstance(part, Plot) and part.png]
    if plots:
        (folder / "figures").mkdir(parents=True, exist_ok=True)
    for plot in plots:
        files.write_bytes(folder / "figures" / f"{plot.name}.png", plot.png)
    files.write_text(folder / "report.md", "\n".join(_markdown(title, sections)) + "\n")
    files.write_text(folder / "report.html", html_page(title, STYLE, *_html(sections)))


def _markdown(title: str, sections: Sequence[Section]) -> Iterator[str]:
    yield f"# {title}"
    for section in sections:
        yield f"\n## {section.title}"
        for part in section.parts:
            yield ""
            if isinstance(part, Table):
                rows = [part.header, ["---"] * len(part.header), *part.rows]
                yield from ("| " + " | ".join(markdown(" ".join(cell.split())) for cell in row)
                            + " |" for row in rows)
            elif isinstance(part, Plot):
                caption = markdown(part.caption)
                shown = f"![{caption}](figures/{part.name}.png)" if part.png else PLOTS_MISSING
                yield f"{shown}\n\n{caption}"
            else:
                yield "\n".join(map(markdown, part.split("\n")))


def _html(sections: Sequence[Section]) -> Iterator[str]:
    for section in sections:
        yield f"<h2>{html_text(section.title)}</h2>"
        for part in section.parts:
            if isinstance(part, Table):
                yield "<table>" + _row("th", part.header)
                yield from (_row("td", row) for row in part.rows)
                yield "</table>"
            elif isinstance(part, Plot):
                caption = html_text(part.caption)
                data = base64.b64encode(part.png or b"").decode()
                shown = (f'<img alt="{caption}" src="data:image/png;base64,{data}">' if part.png
                         else html_text(PLOTS_MISSING))
                yield f"<p>{shown}</p><p>{caption}</p>"
            else:
                yield f"<p>{html_text(part)}</p>"


def _row(tag: str, cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{html_text(cell)}</{tag}>" for cell in cells) + "</tr>"
