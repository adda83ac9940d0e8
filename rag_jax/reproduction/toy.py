"""The tables in minutes on two cores: the world of countries, the quickstart's models.

`toy.toml` has the fields of their configurations.
"""

import pathlib

from rag_jax import package_data, paper
from rag_jax.config import config_files, overrides, rules
from rag_jax.reproduction.cells import Cell, Question, exported
from rag_jax.retrieval.bm25 import bm25_missing

DATA = package_data.table(__package__, "toy.toml")
# The paper's task -> ours of the same form.
TASKS = {"nq": "questions", "jeopardy": "clues", "msmarco": "sentences", "fever3": "claims"}
SYSTEMS = ("closed_book", "rag_token", "rag_sequence")
RUNS = (*SYSTEMS, *(run for run in paper.TABLE6 if run not in SYSTEMS))
# Inputs that are no questions: a tiny retriever of questions finds nothing for them.
OTHER_INPUTS = ("claims", "clues")
OBJECTIVES: dict[str, list[str]] = DATA["objectives"]  # by run
STARTS = tuple(DATA["starts"])
BACKWARD = 2  # the cost of a backward pass, in forward passes over the passages
BEGINNINGS = tuple(Question(**beginning) for beginning in DATA["beginnings"])
REDUCED_CELLS = (("nq", "rag_token"), ("nq", "closed_book"), ("jeopardy", "rag_token"),
                 ("jeopardy", "closed_book"), ("fever3", "rag_token"))
REDUCED_OBJECTIVES = {"frozen": ("marginal",), "fid_joint": ("adist",)}


class Toy:
    """Cells of the world of countries.

    The warm-up is that of the first seed's questions, for all cells (claims and clues warm up a
    retriever of their own): seeds are of fine-tuning.

    Args:
      root: the folder of everything.
      seeds: how many for table 1's systems; the other tasks and the ablations have one.
      reduced: the form that only tries the commands.
    """

    name = "toy"
    subject = "Denmark"  # held out

    def __init__(self, root: pathlib.Path, seeds: int = 3, reduced: bool = False):
        self.root, self.seeds = root, seeds
        self.ks = (1, 2) if reduced else (1, 2, 3, 5, 10, 20)
        self.beginnings = (Question("Peru", "This", "Lima", "too short"),) if reduced else (
            BEGINNINGS)
        self.starts = STARTS[:1] if reduced else STARTS
        self._last = DATA["reduced"] if reduced else {}
        self._objectives = REDUCED_OBJECTIVES if reduced else OBJECTIVES
        lexical = bm25_missing() is None and not reduced  # BM25 is an extra
        self._runs = tuple(run for run in RUNS if lexical or not run.startswith("bm25"))
        # The ablations are on the questions alone: they would double the time.
        self._cells = REDUCED_CELLS if reduced else (
            *((task, run) for task in TASKS for run in SYSTEMS), *(("nq", r) for r in self._runs))
        self._base = overrides.replace(config_files.load_file(str(config_files.QUICKSTART)), {
            **DATA["shorter"], **self._last, "runs": SYSTEMS, "tensorboard": False,
            "data.world_seed": 0})
        self.about = (
            "questions, claims, sentences and clues on the countries of the world "
            f"({self._base.data.fictional_countries} fictional ones beside 195); tiny models from "
            "random weights; the seeds are of fine-tuning, from one warm-up and on the same data, "
            "and in learned_retrieval of the retriever's warm-up too; "
            f"{' and '.join(w for w in TASKS.values() if w in OTHER_INPUTS)} have a retriever of "
            "their own; trained on " + "; ".join(f"{task}: {reading}" for task, reading in
                                                 self._reading().items())
            + ("; REDUCED: a few models and steps that only try the commands" if reduced else ""))

    def cells(self, task: str, run: str) -> list[Cell]:
        """One cell for every seed; empty for a task or run that is not at this scale."""
        start = task.removeprefix("start_")
        if start != task:
            return [self._start(int(start), run, seed) for seed in range(self.seeds)
                    if run in ("frozen", "rag_token") and int(start) in self.starts]
        objective = task.removeprefix("objective_")
        if objective != task:
            return [self._objective(objective, run, seed) for seed in range(self.seeds)
                    if objective in self._objectives.get(run, ())]
        if (task, run) not in self._cells:
            return []
        count = self.seeds if task == "nq" and run in SYSTEMS else 1
        return [self._cell(TASKS[task], run, seed) for seed in range(count)]

    def _start(self, steps: int, run: str, seed: int) -> Cell:
        """A run from a retriever warmed up for so many steps; the seed is of both. The generator
        has one warm-up for all."""
        config = overrides.replace(self._base, {
            **DATA["learned"], **DATA["from_starts"], "seed": seed, "runs": ("frozen", "rag_token"),
            "retriever_warmup.steps": steps, **self._last})
        folder, first = f"start-{steps}-{seed}", None
        if (steps, seed) != (self.starts[0], 0):
            first = self._start(self.starts[0], "frozen", 0)
            config = overrides.replace(
                config, {"model.generator.pretrained": str(self.root / first.folder)})
        return Cell(folder, rules.validate(config), run, first=first)

    def _objective(self, objective: str, run: str, seed: int) -> Cell:
        """A run whose retriever learns from `objective`, from one warm-up, with as much compute as
        the others: Fusion-in-Decoder does fewer steps where it reads the passages once more, or,
        for `loop`, K times more."""
        changes = {**DATA["learned"], **DATA["learning"], "seed": seed,
                   "train.retriever_objective": objective, **self._last}
        config = overrides.replace(self._base, changes)
        if run == "fid_joint":
            again = config.retrieval.k if objective == "loop" else 1
            steps = config.train.steps * (1 + BACKWARD) // (1 + BACKWARD + again)
            config = overrides.replace(config, {"train.steps": steps, "train.eval_every": steps})
        together = objective == "marginal"
        runs = ("frozen", "rag_token", "fid") if together else (run,)
        folder = "-".join(["objective", objective, *[run] * (not together), str(seed)])
        reader = self._cell("questions", "frozen", 0)
        first, weights = reader, exported(reader.folder, reader.run)
        config = overrides.replace(config, {
            "runs": runs, "model.generator.pretrained": str(self.root / weights)})
        if (objective, seed) != ("marginal", 0):
            first = self._objective("marginal", "frozen", 0)
            config = overrides.replace(config, {
                "model.retriever.pretrained": str(self.root / first.folder)})
        return Cell(folder, rules.validate(config), run, first, reader)

    def _reading(self) -> dict[str, str]:
        """How the RAG models of each task read, as their configurations say."""
        return {TASKS[task]: self._cell(TASKS[task], run, 0).reading
                for task, run in self._cells if run == "rag_token"}

    def _cell(self, world_task: str, run: str, seed: int) -> Cell:
        changed = overrides.replace(self._base, {
            "seed": seed, "data.world_task": world_task, **DATA["settings"][world_task],
            **self._last})
        if (world_task, seed) == ("questions", 0):
            changed = overrides.replace(changed, {"runs": self._runs})
            return Cell(_folder("questions", 0), rules.validate(changed), run)
        warm = str(self.root / _folder("questions", 0))
        changed = overrides.replace(changed, {"model.generator.pretrained": warm})
        if world_task not in OTHER_INPUTS:
            changed = overrides.replace(changed, {"model.retriever.pretrained": warm})
        return Cell(_folder(world_task, seed), rules.validate(changed), run,
                    first=self._cell("questions", run, 0))


def _folder(world_task: str, seed: int) -> str:
    return f"{world_task}-{seed}"
