"""Small tables as text."""

from collections.abc import Sequence
from typing import Any

from rag_jax.visible import columns, filled


def print_table(rows: Sequence[Sequence[Any]], headers: Sequence[str]) -> str:
    """Lays out a small table as text, to be printed by the caller.

    Args:
      rows: cells; None is blank, floats get two decimals, those below a hundredth two digits,
        anything else its str().
      headers: one per column.

    Returns:
      Lines without a trailing newline; columns that hold only numbers are right-aligned.

    Raises:
      ValueError: when a row has another number of cells than there are headers.
    """
    for row in rows:
        if len(row) != len(headers):
            raise ValueError(f"Row {list(row)} has {len(row)} cells for {len(headers)} headers.")
    texts = [[" ".join(str(header).split()) for header in headers]]
    texts += [[_cell(cell) for cell in row] for row in rows]
    widths = [max(map(columns, column)) for column in zip(*texts, strict=True)]
    numeric = [
        bool(rows) and all(cell is None or _is_number(cell) for cell in cells)
        for _, *cells in zip(headers, *rows, strict=True)
    ]
    lines = [
        "  ".join(
            filled(text, width, right)
            for text, width, right in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in texts
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def _cell(cell: Any) -> str:
    if cell is None:
        return ""
    if _is_number(cell) and not hasattr(cell, "__index__"):
        number = float(cell)
        return f"{number:.2f}" if number == 0 or abs(number) >= 0.01 else f"{number:.2g}"
    return " ".join(str(cell).split())


def _is_number(cell: Any) -> bool:
    return hasattr(cell, "__float__") and not isinstance(cell, bool)
