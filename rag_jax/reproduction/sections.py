"""The report's parts, and how they are written: Markdown with image files, and one HTML page."""

import base64
import dataclasses
import pathlib
from collections.abc import Iterator, Sequence

from rag_jax import files
from rag_jax.reproduction.estimates import Estimate
from rag_jax.visible import html_page, markdown

NOT_RUN = "not run"


@dataclasses.dataclass(frozen=True)
class Table:
    """Cells of text; every row is as long as the header."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclasses.dataclass(frozen=True)
class Plot:
    """A picture.

    Attributes:
      name: the name of its file, without suffix.
      caption: what it shows.
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


def shown(value: float | Estimate | None, missing: str = NOT_RUN) -> str:
    """A number as a cell of a table shows it; `missing` where there is none."""
    if value is None:
        return missing
    return str(value) if isinstance(value, Estimate) else f"{value:.1f}"


def beside(ours: float | Estimate | None, published: float | None, mark: str = "") -> str:
    """A cell: our number, with a remark on it, and the paper's."""
    return f"{shown(ours)}{mark * (ours is not None)} / {shown(published, '-')}"


PLOTS_MISSING = "(no picture: pip install 'rag_jax[plots]' and run the same command again)"


def write(folder: pathlib.Path, title: str, sections: Sequence[Section]) -> None:
    """Writes FOLDER/report.md with FOLDER/figures/*.png, and FOLDER/report.html."""
    plots = [part for s in sections for part in s.parts if isinstance(part, Plot) and part.png]
    if plots:
        (folder / "figures").mkdir(parents=True, exist_ok=True)
    for plot in plots:
        files.write_bytes(folder / "figures" / f"{plot.name}.png", plot.png)
    files.write_text(folder / "report.md", "\n".join(_markdown(title, sections)) + "\n")
    files.write_text(folder / "report.html", html_page(
        "report.html", title=title, sections=sections, missing=PLOTS_MISSING,
        base64=lambda png: base64.b64encode(png).decode()))


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
