"""The tables at the paper's size: the configurations of configs/, a workdir for each task."""

import pathlib
import shlex
from collections.abc import Iterable, Mapping

from rag_jax import package_data, paper
from rag_jax.config import config_files, overrides, rules
from rag_jax.config.overrides import value
from rag_jax.data.task_sources import DATA_DIR, data_folder
from rag_jax.reproduction.cells import Asked, Cell, File, Question, exported

FIRST = "nq"  # its passages and indexes serve all tasks
HOT_SWAP = "hot_swap"  # folder of --data_dir with the files that only the hot-swap needs
TEXTS = package_data.table(__package__, "hot_swap.toml")


class Full:
    """Cells of configs/paper.py, with one seed.

    Args:
      root: the folder of everything.
      data_dir: config.data.data_dir of all cells; empty = the default of `task:` sources.
    """

    name = "paper"
    about = ("the paper's tasks, Wikipedia's 21,015,324 passages, BERT-base and BART-large; the "
             "paper publishes no learning rate, batch size or number of steps (configs/paper.py)")
    ks = (1, 5, 10, 15, 20, 30, 40, 50)
    subject = "Hemingway"
    starts = ()
    beginnings = tuple(
        Question(subject, text, title, "the paper's")
        for (subject, text, _), title in zip(
            paper.PARTIAL_DECODING, ("The Sun Also Rises", "A Farewell to Arms"), strict=True))

    def __init__(self, root: pathlib.Path, data_dir: str = ""):
        self.root, self.data_dir = root, data_dir
        self.swap = data_folder(data_dir) / HOT_SWAP

    def cells(self, task: str, run: str) -> list[Cell]:
        """The cell, or none where there is no configuration of it."""
        if task == "tqa_wiki":
            return self.cells("tqa", run)
        cell = next((name for name in paper.CELLS if name.endswith(f"/{task}/{run}")), None)
        if cell is None:
            return []
        file = f"{config_files.CONFIGS / 'paper.py'}:{cell}"
        shipped = config_files.load_file(file)
        config = overrides.replace(shipped, {"data.data_dir": self.data_dir})
        first = start = None
        folder = task
        if task != FIRST:
            first, = self.cells(FIRST, "rag_token")
        if task in paper.FROM_NQ:
            folder = f"{task}_{run}"
            start, = self.cells(FIRST, run)
            tower = "rag" if config.model.rag.pretrained else "generator"
            config = overrides.replace(config, {
                f"model.{tower}.pretrained": str(self.root / exported(FIRST, run))})
        further = self._further(config.data.passages) if task == FIRST else {}
        flags = "".join(
            f" \\\n        --config.{name}={shlex.quote(overrides.shown(value(config, name)))}"
            for name in overrides.differences(shipped, config))
        recipe = self._here(config_files.about(file)).replace(f".py:{cell} ", f".py:{cell}{flags} ")
        return [Cell(folder, rules.validate(config), run, first, start, recipe, **further)]

    def _here(self, recipe: str) -> str:
        """A shipped text about runs/paper, with the folder of everything in its place. What users
        name is put in later: it may contain runs/paper too."""
        root = self.root
        if root.is_relative_to(pathlib.Path.cwd()):
            root = root.relative_to(pathlib.Path.cwd())
        return recipe.replace("runs/paper", shlex.quote(str(root)))

    def _further(self, passages: str) -> dict[str, dict[str, File]]:
        """Questions and passages of the hot-swap, whose index of 2018 is the one that trains."""
        def file(name: str, about: str) -> File:
            default = "" if self.data_dir else f"; --data_dir is not given, so it is {DATA_DIR}"
            return File(str(self.swap / name), f"{about}{default}")

        return {
            "questions": {f"leaders_{year}": file(f"leaders_{year}.jsonl",
                                                  TEXTS["leaders"].format(year=year))
                          for year in (2016, 2018)},
            "indexes": {"2016": file("enwiki-20161220-pages-articles.xml.bz2", TEXTS["dump"]),
                        "2018": File(passages, "")}}

    def recipe(self, missing: Iterable[tuple[Cell, Asked]],
               unavailable: Mapping[str, str]) -> str:
        """For the terminal: what to run for the missing results.

        Args:
          missing: those that can be computed.
          unavailable: those that cannot, and why.
        """
        missing, parts = list(missing), []
        cells = {(cell.folder, cell.run): cell for cell, _ in missing}.values()
        if cells:
            parts = [f"{len(cells)} models are not measured. First, once: the passages "
                     "(tpu_scripts/natural_questions.sh downloads them) to runs/dpr. --execute "
                     "trains and measures all of the following on this machine; by hand:\n",
                     *(f"{cell.recipe}\n" for cell in cells)]
        if unavailable:
            parts += ["Cannot be measured on these data:",
                      *(f"    {name}: {why}" for name, why in unavailable.items())]
        if unavailable or any(cell.files(what) for cell, what in missing):
            parts.append(self._here(TEXTS["by_hand"]).replace(
                "{folder}", shlex.quote(str(self.swap))))
        return "\n".join(parts) or "Everything has been measured."
