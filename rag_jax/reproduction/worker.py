"""Trains and measures cells, and goes on where it was interrupted."""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np

from rag_jax import files, locks
from rag_jax.answering import Answerer
from rag_jax.config import ConfigError
from rag_jax.conversion import convert
from rag_jax.data.question_files import Example
from rag_jax.data.tasks import load_examples
from rag_jax.evaluation import evaluate, write_evaluation
from rag_jax.reproduction.cells import (
    Beginning,
    Cell,
    Completed,
    Explained,
    Measurement,
    exported,
)
from rag_jax.reproduction.lab import folder_of, key_of
from rag_jax.reproduction.provenance import digest, made_by
from rag_jax.training import pretrained
from rag_jax.training.answer_settings import make_answerer
from rag_jax.training.indexing import index_of_file, indexes_of
from rag_jax.training.job import Index, Job
from rag_jax.training.report import someone_elses
from rag_jax.training.run import Warm, warm_up

CHUNK_WORDS = 100  # of a further memory, as the paper splits articles


def _holding(method: Callable) -> Callable:
    """Keeps other processes from writing into the folders that a cell's work may write into."""
    @functools.wraps(method)
    def held(self: "Worker", cell: Cell, *arguments: Any) -> None:
        folders = [c.folder for c in (cell, cell.first, cell.start) if c is not None]
        with contextlib.ExitStack() as stack:
            for folder in dict.fromkeys(folders):
                stack.enter_context(locks.exclusive(self.root / folder))
            method(self, cell, *arguments)
    return held


class Worker:
    """Works results out, one workdir and one model in memory at a time.

    Args:
      root: the folder of everything.
    """

    def __init__(self, root: pathlib.Path):
        self.root = root
        self._warm: tuple[Any, Warm] | None = None  # of what was used last: folder, runs
        self._params: tuple[tuple[str, str], Any] | None = None

    @_holding
    def measure(self, cell: Cell, what: Measurement) -> None:
        """Works a measurement out, for `Lab.measure`.

        Raises:
          ConfigError: the data do not have it.
          InUseError: another process writes into a folder of it.
        """
        job = self._job(cell)
        splits = job.prepared.splits
        if what.split.startswith("task:"):
            examples = load_examples(what.split, data_dir=job.config.data.data_dir)
        elif what.split in cell.questions:
            examples = load_examples(cell.questions[what.split].path)
        elif what.split in splits:
            examples = splits[what.split]
        else:
            raise ConfigError(f"{cell.folder}: no questions {what.split!r} in its data, which have "
                              f"{', '.join(splits)}")
        params, answerer = self._trained(cell), self._answerer(cell, what)
        print(f"== {cell.folder}/{cell.run}: {what.name}", flush=True)
        questions = job.tokenize(examples[: job.config.eval.max_examples or len(examples)])
        retrieved = answerer.retrieve(params, questions)
        if what.shuffled:
            retrieved = retrieved[someone_elses(len(questions), cell.config.seed)]
        found = evaluate(answerer, params, questions, retrieved, likelihood=False,
                         how=cell.config.eval, train=splits["train"])
        folder = folder_of(self.root, cell) / what.name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "metrics.json").unlink(missing_ok=True)  # of another configuration
        files.write_text(folder / "made.json", json.dumps(made_by(cell, self.root, what), indent=1))
        write_evaluation(folder, found)

    @_holding
    def explain(self, cell: Cell, question: str) -> None:
        """Answers a question with the share of each passage in each token; for `Lab.explain`."""
        file = folder_of(self.root, cell) / "explained.json"
        answerer, params = self._answerer(cell, Measurement()), self._trained(cell)
        tokens = self._job(cell).tokenize([Example("0", question, ())])
        answer, = answerer.decode(params, tokens, answerer.retrieve(params, tokens))
        self._keep(file, cell, question, Explained(
            question, answer.text, answer.tokens, answer.passage_ids,
            [passage.text for passage in answer.passages], answer.token_posterior))

    @_holding
    def complete(self, cell: Cell, beginning: Beginning) -> None:
        """Lets the generator go on from the beginning of an answer; for `Lab.complete`."""
        params, job = self._trained(cell), self._job(cell)
        how = dataclasses.replace(job.config.eval, prefix=beginning.text)
        asked = dataclasses.replace(job, config=dataclasses.replace(job.config, eval=how))
        answerer = make_answerer(
            asked, self._memory(cell, Measurement()) if job.config.retrieval.k else None)
        tokens = job.tokenize([Example("0", beginning.subject, ())])
        answer, = answerer.decode(params, tokens, answerer.retrieve(params, tokens))
        given = answerer.decoding.prefix_length
        self._keep(folder_of(self.root, cell) / "completed.json", cell, key_of(beginning),
                   Completed(answer.text, answer.tokens[given:],
                             np.exp(answer.token_log_probs[given:]).tolist()))

    def _keep(self, file: pathlib.Path, cell: Cell, key: str, found: Explained | Completed) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        known = json.loads(file.read_text("utf-8")) if file.exists() else {}
        files.write_text(file, json.dumps(
            {**known, key: {"made": made_by(cell, self.root), **found._asdict()}}, indent=1))

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
        """Links what a folder is to share into another one that has none."""
        if not (self.root / first.folder / "indexes").exists():
            self._warmed(first)
        data = "data" if cell.config.data == first.config.data else "data/memories"
        for name in (data, *["indexes"] * (not cell.own_retriever)):
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

    def _job(self, cell: Cell) -> Job:
        """The folder's job as this run decodes."""
        job = self._warmed(cell).job
        config = dataclasses.replace(job.config, eval=cell.config.eval)
        return dataclasses.replace(job, config=config).of_run(cell.run)

    def _trained(self, cell: Cell) -> Any:
        """Parameters of a cell, which is trained first where it is not."""
        key = cell.folder, cell.run
        if self._params is None or self._params[0] != key:
            self._params = None  # two models at a time would double the memory
            self._warmed(cell).fine_tune(cell.run)
            self._params = key, pretrained.load_params(self._job(cell), cell.run)[0]
        return self._params[1]

    def _answerer(self, cell: Cell, what: Measurement) -> Answerer:
        job = self._job(cell)
        index = self._memory(cell, what) if job.config.retrieval.k else None
        changes = {"k": what.k} if what.k else {}
        return make_answerer(job, index, **changes)

    def _memory(self, cell: Cell, what: Measurement) -> Index:
        job, warm = self._job(cell), self._warmed(cell)
        file = cell.files(what).get(what.memory)
        if file is not None:
            words = job.config.data.chunk_words or CHUNK_WORDS
            name = f"{what.memory}-{digest(file.path)[:16]}"
            return index_of_file(job, cell.run, warm.params, name, file.path, words)
        found = indexes_of(job, cell.run, warm.indexes)
        own = not what.memory or what.memory in cell.memories
        return found[next(iter(found)) if own else what.memory]
