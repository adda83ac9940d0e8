"""Text from data as it may be shown: nothing in it controls the terminal, sheet or page."""

import contextlib
import html
import os
import pathlib
import re
import shlex
import sys
import textwrap
import unicodedata
from typing import Any

# Control characters, with those of the upper half of Latin-1; line and paragraph separators;
# marks, embeddings, overrides and isolates of writing direction; invisible letters and tags; and
# halves of surrogate pairs. The joiners U+200C and U+200D stay: Persian and emoji need them.
_HIDDEN = re.compile(
    "[\x00-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff"
    "\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]")
_FORMULA = re.compile(r"\s*[=+\-@＝＋－＠\t\r\n]")


def visible(text: str) -> str:
    r"""`text` on one line, with every control or direction character as an escape such as \x1b."""
    return _HIDDEN.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


def visible_lines(text: str) -> str:
    """`visible` of every line of a text; the line ends stay."""
    return "\n".join(map(visible, text.split("\n")))


def is_terminal(stream: Any) -> bool:
    """Whether a bar can be drawn on a stream again and again. A program may have put a stream of
    its own in the place of stderr, without isatty, or None; a terminal without lines shows none."""
    try:
        if not stream.isatty():
            return False
    except (AttributeError, ValueError):  # ValueError: it is closed
        return False
    with contextlib.suppress(AttributeError, OSError, ValueError):
        return os.get_terminal_size(stream.fileno()).lines > 0
    return True


def shown_path(path: pathlib.Path) -> str:
    """A path as it is written in the current folder."""
    here = pathlib.Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def command(module: str, *words: str) -> str:
    """`python -m MODULE WORDS` for a shell in the current folder, by the Python that runs now."""
    python = shown_path(pathlib.Path(sys.executable)) if sys.executable else "python"
    return shlex.join([python, "-m", module, *words])


def shortened(text: str, most: int) -> str:
    """The beginning of a text, on one line of at most `most` letters. It ends with a whole word,
    unless that leaves much of the line empty, as in languages without spaces."""
    text = " ".join(text.split())
    words = textwrap.shorten(text, most, placeholder=" ...")
    return words if words == text or len(words) > 0.8 * most else f"{text[:most - 4]} ..."


def columns(text: str) -> int:
    """How many columns of a terminal a text takes: two for each letter that East Asian fonts draw
    wide, none for a mark on the letter before it and for what is not seen."""
    return sum((unicodedata.east_asian_width(letter) in "WF") + 1 for letter in text
               if unicodedata.category(letter) not in ("Mn", "Me", "Cf"))


def filled(text: str, width: int, right: bool = False) -> str:
    """A text with as many spaces as give it this many columns: behind it, or (right) before it."""
    spaces = " " * (width - columns(text))
    return spaces + text if right else text + spaces


def csv_cell(text: str) -> str:
    """`visible`, with ' before a text that a spreadsheet would take for a formula."""
    return visible(f"'{text}" if _FORMULA.match(text) else text)


def html_page(template: str, **values: Any) -> str:
    """A self-contained HTML page from one of templates/, in which strings are escaped and become
    `visible_lines`."""
    import jinja2  # only where there is a page to write

    pages = jinja2.Environment(
        loader=jinja2.PackageLoader("rag_jax"), autoescape=True, trim_blocks=True,
        finalize=lambda value: visible_lines(value) if type(value) is str else value)
    return pages.get_template(template).render(values)


def markdown(text: str) -> str:
    """`visible`, escaped so that it holds no HTML, link, picture or end of a table's cell."""
    return html.escape(visible(text), quote=False).replace("](", "]\\(").replace("|", "\\|")
