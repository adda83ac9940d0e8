"""Which passage gave which token: the document posterior per token, as in the paper's figure 2.

Rows are passages, columns the answer's tokens, values p(z | x, y_1..y_t) or, for RAG-Token,
p(z | x, y_t, y_<t).
"""

import contextlib
import importlib.util
import itertools
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from rag_jax import files
from rag_jax.errors import UserError
from rag_jax.visible import columns, filled, html_page, visible

SHADES = range(255, 231, -1)  # xterm's greys, white to black


def terminal(tokens: Sequence[str], passages: Sequence[str], posterior: Sequence[Sequence[float]],
             colour: bool = True) -> str:
    """Lines of text for a terminal, one a passage.

    Args:
      tokens: T texts of tokens.
      passages: K names.
      posterior: [T][K] probabilities.
      colour: shade the cells with xterm's greys; False = percentages alone.
    """
    shown = [*map(_visible, tokens)]
    passages = [*map(visible, passages)]
    widths = [max(4, columns(token) + 1) for token in shown]
    margin = max(map(columns, passages), default=0)
    lines = [" " * margin + " " + "".join(
        filled(token, width, right=True) for token, width in zip(shown, widths, strict=True))]
    for row, name in enumerate(passages):
        cells = []
        for values, width in zip(posterior, widths, strict=True):
            text = f"{100 * values[row]:.0f}".rjust(width)
            cells.append(_shaded(text, values[row]) if colour else text)
        lines.append(f"{filled(name, margin, right=True)} {''.join(cells)}")
    return "\n".join(lines)


def _visible(token: str) -> str:
    return visible(token.strip() or repr(token)[1:-1] or "_")


def _shaded(text: str, value: float) -> str:
    shade = SHADES[min(int(value * len(SHADES)), len(SHADES) - 1)]
    ink = 16 if value < 0.5 else 231
    return f"\x1b[48;5;{shade};38;5;{ink}m{text}\x1b[0m"


def page(title: str, tokens: Sequence[str], passages: Sequence[str],
         posterior: Sequence[Sequence[float]]) -> str:
    """A self-contained HTML page; arguments as of `terminal`."""
    return html_page("heatmap.html", title=visible(title), tokens=[*map(_visible, tokens)],
                     passages=[*map(visible, passages)], posterior=posterior)


def write(path: pathlib.Path, title: str, tokens: Sequence[str], passages: Sequence[str],
          posterior: Sequence[Sequence[float]]) -> None:
    """Writes .html, or .png by matplotlib (the [plots] extra); an earlier file is put aside.

    Raises:
      UserError: as `check`.
    """
    check(path)
    if path.suffix == ".html":
        files.write_text(path, page(title, tokens, passages, posterior), aside=True)
        return
    from matplotlib.figure import Figure

    with own_style(), files.replaced(path, "wb", aside=True) as file:
        figure = Figure(figsize=(2 + 0.6 * len(tokens), 1.5 + 0.4 * len(passages)),
                        layout="constrained")
        draw(figure.add_subplot(), title, tokens, passages, posterior)
        figure.savefig(file, format="png", dpi=150)


def names(named: str | None, several: bool) -> Iterator[str | None]:
    """The files of the heat maps of one question after the other: FILE, or FILE-1, FILE-2, ..."""
    if not several or named in (None, "terminal"):
        yield from itertools.repeat(named)
    path = pathlib.Path(named)
    for number in itertools.count(1):
        yield str(path.with_stem(f"{path.stem}-{number}"))


def check(path: pathlib.Path) -> None:
    """Raises a UserError where `write` could not write to `path`: its suffix, no matplotlib."""
    if path.suffix not in (".html", ".png"):
        raise UserError(f"--heatmap={path}: the file must end in .html or .png")
    files.check_place(path)
    if path.suffix == ".png" and importlib.util.find_spec("matplotlib") is None:
        raise UserError(f"--heatmap={path}: a .png needs matplotlib: pip install "
                        "'rag_jax[plots]', or write an .html file")


@contextlib.contextmanager
def own_style() -> Iterator[None]:
    """Draws as matplotlib does without a matplotlibrc, of which one may lie in the current folder
    and have TeX run."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        yield


def draw(axes: Any, title: str, tokens: Sequence[str], passages: Sequence[str],
         posterior: Sequence[Sequence[float]]) -> None:
    """Draws the map on axes of matplotlib; arguments as of `terminal`."""
    image = axes.imshow(list(zip(*posterior, strict=True)), cmap="Blues", vmin=0, vmax=1,
                        aspect="auto")
    axes.set_xticks(range(len(tokens)), [_visible(token) for token in tokens], rotation=45,
                    parse_math=False)  # $ is not the start of a formula
    axes.set_yticks(range(len(passages)), map(visible, passages), parse_math=False)
    axes.set_title(visible(title), parse_math=False)
    axes.figure.colorbar(image)
