"""Results of cells, each one worked out once and kept in a folder.

    WORKDIR/FOLDER/                     a workdir of rag_jax.train
    WORKDIR/FOLDER/RUN/measured/NAME/   metrics.json, predictions.jsonl; whole or not there
    WORKDIR/FOLDER/RUN/measured/explained.json
"""

import json
import pathlib
from collections.abc import Sequence

from rag_jax.reproduction.cells import Cell, Explained, Measured, Measurement, Scale


def folder_of(root: pathlib.Path, cell: Cell) -> pathlib.Path:
    """Where a cell's results are."""
    return root / cell.folder / cell.run / "measured"


class Lab:
    """Reads results, and notes down what was asked for and is not there.

    Args:
      root: the folder of everything.
      scale: where cells come from.
    """

    def __init__(self, root: pathlib.Path, scale: Scale):
        self.root, self.scale = root, scale
        self.used: dict[tuple[str, str], Cell] = {}
        self.missing: list[tuple[Cell, Measurement | str]] = []  # or a question to explain

    def measure(self, cell: Cell, what: Measurement) -> Measured | None:
        """The results of a measurement; None where there are none."""
        folder = folder_of(self.root, cell) / what.name
        if not (folder / "metrics.json").exists():  # written last
            self.missing.append((cell, what))
            return None
        self.used[cell.folder, cell.run] = cell
        lines = (folder / "predictions.jsonl").read_text("utf-8").splitlines()
        return Measured(json.loads((folder / "metrics.json").read_text("utf-8")),
                        [json.loads(line) for line in lines])

    def explain(self, cell: Cell, question: str) -> Explained | None:
        """An answer with the share of each passage in each of its tokens; None if not there."""
        file = folder_of(self.root, cell) / "explained.json"
        known = json.loads(file.read_text("utf-8")) if file.exists() else {}
        if question not in known:
            self.missing.append((cell, question))
            return None
        self.used[cell.folder, cell.run] = cell
        return Explained(**known[question])


def measured(lab: Lab, cells: Sequence[Cell], what: Measurement) -> list[Measured]:
    """The results of those cells (seeds) that have them."""
    found = (lab.measure(cell, what) for cell in cells)
    return [result for result in found if result is not None]
