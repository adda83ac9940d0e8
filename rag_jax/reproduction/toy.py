"""The tables in minutes on two cores: the world of countries, the quickstart's models."""

import pathlib

from rag_jax import flags, overrides
from rag_jax.countries.statements import LABELS
from rag_jax.reproduction.cells import Cell

RUNS = ("rag_token", "rag_sequence", "frozen", "frozen_sequence", "closed_book")
# The paper's task -> ours of the same form.
TASKS = {"nq": "questions", "jeopardy": "clues", "msmarco": "sentences", "fever3": "claims"}
SETTINGS = {
    "questions": {},
    "sentences": {"data.max_target_length": 40},
    "clues": {"data.max_target_length": 48},
    "claims": {"data.max_question_length": 40, "eval.labels": LABELS},
}
# As a test of the commands: everything runs, and nothing is learnt.
REDUCED = {
    "data.fictional_countries": 30,
    "data.generator_vocab": 400,
    "data.retriever_vocab": 400,
    "model.retriever.width": 32,
    "model.retriever.mlp_width": 32,
    "model.generator.width": 32,
    "model.generator.mlp_width": 32,
    "retriever_warmup.steps": 4,
    "generator_warmup.steps": 4,
    "train.steps": 4,
    "train.eval_every": 4,
    "train.batch_size": 4,
    "eval.max_examples": 8,
}


class Toy:
    """Cells of the world of countries.

    The warm-up is that of the first seed's questions, for all cells: seeds are of fine-tuning.

    Args:
      root: the folder of everything.
      seeds: how many for the questions; the other tasks have one.
      reduced: the form that only tries the commands.
    """

    name = "toy"
    subject = "Denmark"  # held out
    leaders = True

    def __init__(self, root: pathlib.Path, seeds: int = 3, reduced: bool = False):
        self.root, self.seeds = root, seeds
        self.ks = (1, 2, 5) if reduced else (1, 2, 3, 5, 10, 20)
        changes = REDUCED if reduced else {}
        self._base = overrides.replace(overrides.load_file(str(flags.QUICKSTART)), {
            **changes, "runs": RUNS, "tensorboard": False, "data.world_seed": 0})
        self.about = (
            "questions, claims, sentences and clues on the countries of the world "
            f"({self._base.data.fictional_countries} fictional ones beside 195); tiny models from "
            "random weights; the seeds are of fine-tuning, from one warm-up and on the same data"
            + ("; REDUCED: a few steps that only try the commands" if reduced else ""))

    def cells(self, task: str, run: str) -> list[Cell]:
        """One cell for every seed; empty for a task or run that the toy world has not."""
        if task not in TASKS or run not in RUNS:
            return []
        seeds = range(self.seeds if task == "nq" else 1)
        return [self._cell(TASKS[task], run, seed) for seed in seeds]

    def _cell(self, world_task: str, run: str, seed: int) -> Cell:
        config = overrides.replace(self._base, {
            "seed": seed, "data.world_task": world_task, **SETTINGS[world_task]})
        if (world_task, seed) == ("questions", 0):
            return Cell(_folder("questions", 0), overrides.validate(config), run)
        warm = str(self.root / _folder("questions", 0))
        config = overrides.replace(config, {
            "model.retriever.pretrained": warm, "model.generator.pretrained": warm})
        return Cell(_folder(world_task, seed), overrides.validate(config), run,
                    first=self._cell("questions", run, 0))


def _folder(world_task: str, seed: int) -> str:
    return f"{world_task}-{seed}"
