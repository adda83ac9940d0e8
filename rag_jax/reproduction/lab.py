"""Results of cells, each computed once and kept in a folder.

    WORKDIR/FOLDER/                     a workdir of rag_jax.train
    WORKDIR/FOLDER/RUN/measured/NAME/   made.json (`provenance`), metrics.json, predictions.jsonl;
                                        whole or not there
    WORKDIR/FOLDER/RUN/measured/explained.json, completed.json

A result of another configuration than the cell's counts as missing.
"""

import contextlib
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rag_jax import files
from rag_jax.data.records import json_lines
from rag_jax.errors import DataError
from rag_jax.evaluation import Evaluation, write_evaluation
from rag_jax.reproduction.cells import (
    Asked,
    Cell,
    Explained,
    Measured,
    Measurement,
    Scale,
)
from rag_jax.reproduction.provenance import made_by, stale

Made = Mapping[str, Any]


def folder_of(root: pathlib.Path, cell: Cell) -> pathlib.Path:
    """The folder of a cell's results."""
    return root / cell.folder / cell.run / "measured"


def keep(root: pathlib.Path, cell: Cell, what: Asked, result: Evaluation | Explained) -> None:
    """Writes a result, with the record of what made it."""
    folder, made = folder_of(root, cell), made_by(cell, root, what)
    if isinstance(what, Measurement):
        folder = folder / what.name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "metrics.json").unlink(missing_ok=True)  # of another configuration
        files.write_json(folder / "made.json", made)
        write_evaluation(folder, result)  # metrics.json last
    else:
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{what.name}.json"
        files.write_json(
            file, {**read_json(file, {}), what.key: {"made": made, **result._asdict()}})


def _kept(root: pathlib.Path, cell: Cell, what: Asked
          ) -> tuple[Made | None, Callable[[], Any]] | None:
    """(the record of what made a result, a function that reads it); None where there is none."""
    folder = folder_of(root, cell)
    if isinstance(what, Measurement):
        folder = folder / what.name
        if not (folder / "metrics.json").exists():
            return None
        return read_json(folder / "made.json"), lambda: _measured(folder, cell.config.seed)
    fields = read_json(folder / f"{what.name}.json", {}).get(what.key)
    return fields and (fields.get("made"), lambda: _explained(fields))


def _explained(fields: Mapping[str, Any]) -> Explained:
    """The explained answer with these fields; ValueError where they do not fit each other."""
    found = Explained(*(fields.get(name, []) for name in Explained._fields))
    rows = found.posterior or [found.passages] * len(found.tokens)  # none where no passage is read
    if not (len(found.tokens) == len(found.p) == len(rows)
            and len(found.passages) == len(found.texts)
            and all(len(row) == len(found.passages) for row in rows)
            and all(isinstance(p, float) for p in found.p)):
        raise ValueError(f"{found.answer!r:.60}: its tokens, passages and posterior do not fit")
    return found


def _measured(folder: pathlib.Path, seed: int) -> Measured:
    """The measurement in a folder; ValueError where a field that a report reads is no such one."""
    metrics = read_json(folder / "metrics.json")
    for name, number in metrics.items():
        if not isinstance(number, int | float):
            raise ValueError(f"{name} is {number!r:.60}, no number")
    predictions = []
    for _, record in json_lines(folder / "predictions.jsonl"):
        texts, right = record.texts("references"), record.fields["exact_match"]
        if not texts or not isinstance(right, bool):
            raise ValueError(f"{record.where}: references {texts}, exact_match {right!r:.60}")
        for name in ("id", "question", "answer"):
            record.text(name, blank=True)
        predictions.append(record.fields)
    if metrics["count"] != len(predictions):
        raise ValueError(f"{len(predictions)} predictions of {metrics['count']:.0f} questions")
    return Measured(metrics, predictions, seed)


@contextlib.contextmanager
def damaged_result_named(path: pathlib.Path) -> Iterator[None]:
    """Turns what a damaged result raises when it is read into a DataError that names it."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, FileNotFoundError) as error:
        raise DataError(f"{path}: damaged ({error!r}); restore it, or remove it: its experiment "
                        "makes it again") from None


def read_json(file: pathlib.Path, default: Any = None) -> Any:
    """The content of a file, or `default` where there is none."""
    return json.loads(file.read_text("utf-8")) if file.exists() else default


class Lab:
    """Reads results, and lists those that were asked for and are missing.

    Args:
      root: the folder of everything.
      scale: which cells there are.
      writes: whether experiments may write files of their own, such as sheets for judges.

    Attributes:
      used: the cells with results, and the records of what made these.
      missing: what was asked for and has to be computed.
      unavailable: what the data of a cell do not suffice for, and why.
      refused: results on disk that are not of the cell's configuration, and why.
    """

    def __init__(self, root: pathlib.Path, scale: Scale, writes: bool = True):
        self.root, self.scale, self.writes = root, scale, writes
        self.used: dict[tuple[str, str], tuple[Cell, list[Made]]] = {}
        self.missing: list[tuple[Cell, Asked]] = []
        self.unavailable: dict[str, str] = {}
        self.refused: dict[str, str] = {}

    def result(self, cell: Cell, what: Asked) -> Any:
        """The result (`Measured` or `Explained`); None if it is missing.

        Raises:
          DataError: it is damaged.
        """
        name = f"{cell.folder}/{cell.run}/{what.name}"
        suffix = "" if isinstance(what, Measurement) else ".json"
        with damaged_result_named(folder_of(self.root, cell) / f"{what.name}{suffix}"):
            if kept := _kept(self.root, cell, what):
                made, read = kept
                made["program"], made["date"]  # which the report's head shows
                if not (why := stale(made, cell, self.root, what)):
                    self.used.setdefault((cell.folder, cell.run), (cell, []))[1].append(made)
                    return read()
                self.refused[name] = why
        if why := cell.unavailable(what):
            self.unavailable[name] = why
        else:
            self.missing.append((cell, what))
        return None


def measured(lab: Lab, cells: Sequence[Cell], what: Measurement) -> list[Measured]:
    """The results of those cells (seeds) that have them."""
    results = (lab.result(cell, what) for cell in cells)
    return [result for result in results if result is not None]
