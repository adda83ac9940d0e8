"""Results of cells, each one worked out once and kept in a folder.

    WORKDIR/FOLDER/                     a workdir of rag_jax.train
    WORKDIR/FOLDER/RUN/measured/NAME/   made.json (`provenance`), metrics.json, predictions.jsonl;
                                        whole or not there
    WORKDIR/FOLDER/RUN/measured/explained.json, completed.json

What another configuration than the cell's has made counts as not there.
"""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from rag_jax.data.records import json_lines
from rag_jax.reproduction.cells import (
    Beginning,
    Cell,
    Completed,
    Explained,
    Measured,
    Measurement,
    Scale,
)
from rag_jax.reproduction.provenance import stale


def folder_of(root: pathlib.Path, cell: Cell) -> pathlib.Path:
    """Where a cell's results are."""
    return root / cell.folder / cell.run / "measured"


def key_of(beginning: Beginning) -> str:
    """Its name in a file of completions."""
    return f"{beginning.subject}: {beginning.text}"


class Lab:
    """Reads results, and notes down what was asked for and is not there.

    Args:
      root: the folder of everything.
      scale: where cells come from.

    Attributes:
      used: the cells of which there are results, with the records of what made them.
      missing: what is not there: measurements, questions to explain, beginnings to complete.
      unavailable: measurements that cannot be made of a cell's data, and why.
      refused: results that are there, but not of the cell's configuration, and why.
    """

    def __init__(self, root: pathlib.Path, scale: Scale):
        self.root, self.scale = root, scale
        self.used: dict[tuple[str, str], tuple[Cell, list[Mapping[str, Any]]]] = {}
        self.missing: list[tuple[Cell, Measurement | str | Beginning]] = []
        self.unavailable: dict[str, str] = {}
        self.refused: dict[str, str] = {}

    def measure(self, cell: Cell, what: Measurement) -> Measured | None:
        """The results of a measurement; None where there are none."""
        folder = folder_of(self.root, cell) / what.name
        made = folder / "made.json"
        there = (folder / "metrics.json").exists()  # written last
        if not there or not self._accepted(
                cell, what, what.name, _json(made) if made.exists() else None):
            self._lacks(cell, what)
            return None
        predictions = [record.fields for _, record in json_lines(folder / "predictions.jsonl")]
        return Measured(_json(folder / "metrics.json"), predictions)

    def explain(self, cell: Cell, question: str) -> Explained | None:
        """An answer with the share of each passage in each of its tokens; None if not there."""
        known = self._kept(cell, "explained", question)
        if known is None:
            self.missing.append((cell, question))
        return known and Explained(**known)

    def complete(self, cell: Cell, beginning: Beginning) -> Completed | None:
        """The answer that the generator makes of a beginning; None if not there."""
        known = self._kept(cell, "completed", key_of(beginning))
        if known is None:
            self.missing.append((cell, beginning))
        return known and Completed(**known)

    def _kept(self, cell: Cell, name: str, key: str) -> dict[str, Any] | None:
        """One of the results of a file of several."""
        file = folder_of(self.root, cell) / f"{name}.json"
        known = _json(file) if file.exists() else {}
        if key not in known or not self._accepted(
                cell, Measurement(), name, known[key].pop("made", None)):
            return None
        return known[key]

    def _lacks(self, cell: Cell, what: Measurement) -> None:
        """Notes down a measurement that is not there."""
        if reason := cell.unavailable(what):
            self.unavailable[f"{cell.folder}/{cell.run}/{what.name}"] = reason
        else:
            self.missing.append((cell, what))

    def _accepted(self, cell: Cell, what: Measurement, name: str,
                  made: Mapping[str, Any] | None) -> bool:
        """Whether a result is the cell's; notes down which it is."""
        why = stale(made, cell, self.root, what)
        if why:
            self.refused[f"{cell.folder}/{cell.run}/{name}"] = why
            return False
        self.used.setdefault((cell.folder, cell.run), (cell, []))[1].append(made)
        return True


def _json(file: pathlib.Path) -> Any:
    return json.loads(file.read_text("utf-8"))


def measured(lab: Lab, cells: Sequence[Cell], what: Measurement) -> list[Measured]:
    """The results of those cells (seeds) that have them."""
    found = (lab.measure(cell, what) for cell in cells)
    return [result for result in found if result is not None]
