"""Trains and measures cells when their results are asked for, each one once in a folder.

    WORKDIR/FOLDER/                     a workdir of rag_jax.train
    WORKDIR/FOLDER/RUN/measured/NAME/   metrics.json, predictions.jsonl; whole or not there

What is on disk is not done again, and what was interrupted goes on.
"""

import dataclasses
import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from rag_jax import files, overrides
from rag_jax.answering import Answerer
from rag_jax.conversion import convert
from rag_jax.data.question_files import Example
from rag_jax.evaluation import evaluate, write_evaluation
from rag_jax.reproduction.cells import Cell, Explained, Measured, Measurement, Scale, exported
from rag_jax.training import stages
from rag_jax.training.memories import memories_of
from rag_jax.training.report import someone_elses
from rag_jax.training.run import Warm, warm_up


class Lab:
    """Results of cells.

    Args:
      root: the folder of everything.
      scale: where cells come from.
      work: train and measure what is missing; False = only what is there already.
    """

    def __init__(self, root: pathlib.Path, scale: Scale, work: bool):
        self.root, self.scale, self.work = root, scale, work
        self.missing: dict[tuple[str, str], Cell] = {}  # asked for and not there
        self.used: dict[tuple[str, str], Cell] = {}
        self._warm: tuple[Any, Warm] | None = None  # of what was used last: folder, runs
        self._params: tuple[tuple[str, str], Any] | None = None

    def measure(self, cell: Cell, what: Measurement) -> Measured | None:
        """The results of a measurement.

        None where they are not there and no work is done, and where the data have no such split:
        MS-MARCO's test answers are hidden, the paper's leaders are not published.
        """
        folder = self._folder(cell) / what.name
        done = (folder / "metrics.json").exists()  # written last
        if not self._note(cell, done):
            return None
        if not done:
            if what.split not in self._job(cell).prepared.splits:
                return None
            self._measure(cell, what, folder)
        lines = (folder / "predictions.jsonl").read_text("utf-8").splitlines()
        return Measured(json.loads((folder / "metrics.json").read_text("utf-8")),
                        [json.loads(line) for line in lines])

    def explain(self, cell: Cell, question: str) -> Explained | None:
        """An answer with the share of each passage in each of its tokens."""
        file = self._folder(cell) / "explained.json"
        known = json.loads(file.read_text("utf-8")) if file.exists() else {}
        if not self._note(cell, question in known):
            return None
        if question in known:
            return Explained(**known[question])
        answerer, params = self._answerer(cell, Measurement()), self._trained(cell)
        tokens = self._job(cell).tokenize([Example("0", question, ("",))])
        answer, = answerer.decode(params, tokens, answerer.retrieve(params, tokens))
        pieces = self._job(cell).prepared.generator_tokenizer.piece
        store = answerer.index.passages
        found = Explained(question, answer.text, [pieces(i) for i in answer.token_ids],
                          answer.passage_ids,
                          [store[store.row_of(i)].text for i in answer.passage_ids],
                          answer.token_posterior)
        file.parent.mkdir(parents=True, exist_ok=True)
        files.write_text(file, json.dumps({**known, question: found._asdict()}, indent=1))
        return found

    def _folder(self, cell: Cell) -> pathlib.Path:
        return self.root / cell.folder / cell.run / "measured"

    def _note(self, cell: Cell, done: bool) -> bool:
        """Notes a cell down; whether its result is there or can be worked out."""
        (self.used if done or self.work else self.missing)[cell.folder, cell.run] = cell
        return done or self.work

    def _warmed(self, cell: Cell) -> Warm:
        key = cell.folder, cell.config.runs  # BM25's runs need no warm retriever
        if self._warm is None or self._warm[0] != key:
            if cell.first is not None:
                self._share(cell.first, cell)
            if cell.start is not None:
                self._export(cell.start)
            self._params = self._warm = None
            self._warm = key, warm_up(cell.config, self.root / cell.folder)
        return self._warm[1]

    def _share(self, first: Cell, cell: Cell) -> None:
        """Links the memories and indexes of a folder into another one that has none."""
        if not (self.root / first.folder / "indexes").exists():
            self._warmed(first)
        for name in ("data/memories", "indexes"):
            link = self.root / cell.folder / name
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.exists():
                target = os.path.relpath(self.root / first.folder / name, link.parent)
                link.symlink_to(target, target_is_directory=True)

    def _export(self, cell: Cell) -> None:
        target = self.root / exported(cell.folder, cell.run)
        if not target.exists():
            self._trained(cell)
            convert(str(self.root / cell.folder), str(target), cell.run)

    def _job(self, cell: Cell) -> stages.Job:
        """The folder's job as this run decodes."""
        job = self._warmed(cell).job
        config = dataclasses.replace(job.config, eval=cell.config.eval)
        return dataclasses.replace(job, config=overrides.for_run(config, cell.run))

    def _trained(self, cell: Cell) -> Any:
        """Parameters of a cell, which is trained first where it is not."""
        key = cell.folder, cell.run
        if self._params is None or self._params[0] != key:
            self._params = None  # two models at a time would double the memory
            self._warmed(cell).fine_tune(cell.run)
            self._params = key, stages.load_params(self._job(cell), cell.run)[0]
        return self._params[1]

    def _answerer(self, cell: Cell, what: Measurement) -> Answerer:
        job, index = self._job(cell), None
        if job.config.retrieval.k:
            found = memories_of(job, cell.run, self._warmed(cell).indexes)
            index = found[what.memory or next(iter(found))]
        changes = {"k": what.k} if what.k else {}
        return stages.make_answerer(job, index, job.config.model.kind, **changes)

    def _measure(self, cell: Cell, what: Measurement, folder: pathlib.Path) -> None:
        params, answerer = self._trained(cell), self._answerer(cell, what)
        print(f"== {cell.folder}/{cell.run}: {what.name}", flush=True)
        job = self._job(cell)
        examples = job.prepared.splits[what.split]
        questions = job.tokenize(examples[: job.config.eval.max_examples or len(examples)])
        retrieved = answerer.retrieve(params, questions)
        if what.shuffled:
            retrieved = retrieved[someone_elses(len(questions), cell.config.seed)]
        found = evaluate(answerer, params, questions, retrieved, likelihood=False,
                         families=cell.config.eval.metrics)
        write_evaluation(folder, questions, found)


def measured(lab: Lab, cells: Sequence[Cell], what: Measurement) -> list[Measured]:
    """The results of those cells (seeds) that have them."""
    found = (lab.measure(cell, what) for cell in cells)
    return [result for result in found if result is not None]
