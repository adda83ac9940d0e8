"""The tables at the paper's size: the configurations of configs/, a workdir for each task."""

import ast
import pathlib
from collections.abc import Iterable
from typing import Any

from rag_jax import flags, overrides
from rag_jax.reproduction.cells import Cell, exported

CONFIGS = flags.ROOT / "configs"
TABLES = (1, 2, 6)  # table 6 takes RAG's rows from the other two
FIRST = "nq"  # its passages and indexes serve all tasks
FROM_FIRST = ("wq", "ct")  # start from its trained models


class Full:
    """Cells of configs/tableN_TASK_RUN.py, with one seed.

    Args:
      root: the folder of everything.
      data_dir: config.data.data_dir of all cells.
    """

    name = "paper"
    about = ("the paper's tasks, Wikipedia's 21,015,324 passages, BERT-base and BART-large; the "
             "paper publishes no learning rate, batch size or number of steps (configs/recipe.py)")
    ks = (1, 5, 10, 15, 20, 30, 40, 50)
    subject = "Hemingway"

    def __init__(self, root: pathlib.Path, data_dir: str = ""):
        self.root, self.data_dir = root, data_dir

    def cells(self, task: str, run: str) -> list[Cell]:
        """The cell, or none where there is no configuration of it."""
        if task == "tqa_wiki":
            return self.cells("tqa", run)
        files = [CONFIGS / f"table{number}_{task}_{run}.py" for number in TABLES]
        file = next((file for file in files if file.exists()), None)
        if file is None:
            return []
        config = overrides.replace(overrides.load_file(str(file)), {"data.data_dir": self.data_dir})
        first = start = None
        folder = task
        if task != FIRST:
            first, = self.cells(FIRST, "rag_token")
        if task in FROM_FIRST:
            folder = f"{task}_{run}"
            start, = self.cells(FIRST, run)
            tower = "rag" if config.model.rag.pretrained else "generator"
            config = overrides.replace(config, {
                f"model.{tower}.pretrained": str(self.root / exported(FIRST, run))})
        return [Cell(folder, overrides.validate(config), run, first, start, _docstring(file))]


def _docstring(file: pathlib.Path) -> str:
    return ast.get_docstring(ast.parse(file.read_text("utf-8"))) or ""


def recipe(missing: Iterable[tuple[Cell, Any]]) -> str:
    """What is to be run for cells of which results are missing, for the terminal."""
    cells = {(cell.folder, cell.run): cell for cell, _ in missing}.values()
    if not cells:
        return "Everything has been measured."
    head = (f"{len(cells)} models are not measured. First, once: the passages "
            "(tpu_scripts/natural_questions.sh downloads them) to runs/dpr. --execute trains and "
            "measures all of the following on this machine; by hand:\n")
    return "\n".join([head, *(cell.recipe for cell in cells)])
