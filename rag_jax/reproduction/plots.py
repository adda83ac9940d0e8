"""Plots as PNG bytes by matplotlib (the [plots] extra); None where it is not installed."""

import functools
import io
import pickle
from collections.abc import Callable, Mapping, Sequence

from rag_jax import heatmap

Curves = Mapping[str, Mapping[int, float]]  # name -> passages per question, or steps -> percent


def _figure(width: float, height: float):
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _png(figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=120)
    return file.getvalue()


def _once(draw: Callable[..., bytes]) -> Callable[..., bytes | None]:
    """`draw` where matplotlib is installed, with a cache: a report is written after every model
    that is measured, and most of its pictures are as before."""
    drawn: dict[bytes, bytes] = {}

    @functools.wraps(draw)
    def cached(*data) -> bytes | None:
        key = pickle.dumps(data)
        if key not in drawn:
            try:
                with heatmap.own_style():
                    drawn[key] = draw(*data)
            except ModuleNotFoundError:
                return None
        return drawn[key]

    return cached


@_once
def curves(panels: Mapping[str, Curves], along: str = "passages per question") -> bytes:
    """Panels beside each other, each with its own axes: percent by what `along` names."""
    figure = _figure(4.5 * len(panels), 3.5)
    for place, (title, lines) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(1, len(panels), place)
        for name, points in lines.items():
            axes.plot(list(points), list(points.values()), marker="o", markersize=3, label=name)
        axes.set_title(title)
        axes.set_xlabel(along)
        axes.set_ylabel("percent")
        if lines:
            axes.legend(fontsize=8)
        else:
            axes.text(0.5, 0.5, "not run", ha="center", transform=axes.transAxes)
    return _png(figure)


@_once
def heat_maps(maps: Mapping[str, tuple[Sequence[str], Sequence[str], Sequence[Sequence[float]]]]
              ) -> bytes:
    """Maps below each other: title -> (tokens, passages, p(passage | token) [T][K])."""
    longest = max(len(tokens) for tokens, _, _ in maps.values())
    figure = _figure(3 + 0.5 * longest, 2.6 * len(maps))
    for place, (title, cells) in enumerate(maps.items(), 1):
        heatmap.draw(figure.add_subplot(len(maps), 1, place), title, *cells)
    return _png(figure)
