"""Trains cells and computes their results, and continues where it was interrupted."""

import contextlib
import dataclasses
import functools
import os
import pathlib

import numpy as np

from rag_jax import api, locks
from rag_jax.config import ConfigError, overrides
from rag_jax.conversion import convert
from rag_jax.data.question_sources import load_examples
from rag_jax.evaluation import Evaluation
from rag_jax.files import quick_digest
from rag_jax.reproduction.cells import Asked, Cell, Explained, Measurement, Question, exported
from rag_jax.reproduction.lab import keep
from rag_jax.training import pretrained, workdir
from rag_jax.training.indexing import index_of_file, indexes_of
from rag_jax.training.report import someone_elses
from rag_jax.training.run import Warm, warm_up

CHUNK_WORDS = 100  # of a further index, as the paper splits articles


class Worker:
    """Computes results, with one workdir and one model open at a time.

    Args:
      root: the folder of everything.
    """

    def __init__(self, root: pathlib.Path):
        self.root = root
        self._warmed: tuple[object, Warm] | None = None  # its key, and the last one
        self._opened: tuple[object, api.Rag] | None = None

    def work_out(self, cell: Cell, what: Asked) -> None:
        """Computes a result and keeps it for `Lab`; a cell that is not trained is trained first.

        Raises:
          ConfigError: the cell's data have no such questions.
          InUseError: another process writes into a folder that this may write into.
        """
        folders = [one.folder for one in (cell, cell.first, cell.start) if one is not None]
        with contextlib.ExitStack() as stack:
            for folder in dict.fromkeys(folders):
                stack.enter_context(locks.exclusive(self.root / folder))
            work = self._measure if isinstance(what, Measurement) else self._explain
            keep(self.root, cell, what, work(cell, what))

    def _measure(self, cell: Cell, what: Measurement) -> Evaluation:
        rag = self._rag(cell, what)
        splits, data_dir = rag.job.prepared.splits, rag.config.data.data_dir
        if what.split.startswith("task:"):
            examples = load_examples(what.split, data_dir=data_dir)
        elif what.split in cell.questions:
            examples = load_examples(cell.questions[what.split].path)
        elif what.split in splits:
            examples = splits[what.split]
        else:
            raise ConfigError(f"{cell.folder}: no questions {what.split!r} in its data, which have "
                              f"{', '.join(splits)}")
        print(f"== {cell.folder}/{cell.run}: {what.name}", flush=True)
        examples = examples[: rag.config.eval.max_examples or len(examples)]
        if what.shuffled and len(examples) < 2:
            raise ConfigError(f"{cell.folder}: {what.split} has one question, and no other whose "
                              "passages it could read")
        order = someone_elses(len(examples), cell.config.seed) if what.shuffled else None
        return rag.evaluate(examples, order=order, likelihood=False,
                            **({"k": what.k} if what.k else {}))

    def _explain(self, cell: Cell, what: Question) -> Explained:
        """Answers a question; the tokens of a given beginning are left out."""
        rag, how = self._rag(cell), {"prefix": what.beginning}
        given = rag.answerer(how).decoding.prefix_length
        answer, = rag.ask(what.subject, **how)
        return Explained(
            answer.text, answer.tokens[given:], np.exp(answer.token_log_probs[given:]).tolist(),
            answer.passage_ids, [passage.text for passage in answer.passages],
            answer.token_posterior[given:])

    def _rag(self, cell: Cell, what: Measurement | None = None) -> api.Rag:
        """The cell's model with the index of a measurement; None = the index that trained."""
        rag = self._trained(cell)
        if not rag.config.retrieval.k:
            return rag
        warm, file = self._warm(cell), cell.files(what).get(what.index) if what else None
        if file is not None:
            words = rag.config.data.chunk_words or CHUNK_WORDS
            name = f"{what.index}-{quick_digest(file.path)[:16]}"
            return dataclasses.replace(rag, index=index_of_file(
                rag.job, cell.run, functools.partial(warm.towers.params, pretrained.ENCODERS),
                name, file.path, words))
        indexes = indexes_of(rag.job, cell.run, warm.indexes)
        own = what is None or not what.index or what.index in cell.indexes
        return dataclasses.replace(
            rag, index=indexes[rag.job.trains_with if own else what.index])

    def _trained(self, cell: Cell) -> api.Rag:
        """The cell's model, trained first where it is not, without an index."""
        key, warm = (cell.folder, cell.run), self._warm(cell)
        if self._opened is None or self._opened[0] != key:
            self._opened = None  # two models at a time would double the RAM
            warm.fine_tune(cell.run)
            job = warm.job.of_run(cell.run, cell.config.eval)
            params, _ = pretrained.load_params(job, cell.run)
            self._opened = key, api.Rag(job, cell.run, params, None)
        return self._opened[1]

    def _warm(self, cell: Cell) -> Warm:
        """The cell's workdir before fine-tuning."""
        key = cell.folder, cell.config.runs  # BM25's runs need no retriever
        if self._warmed is None or self._warmed[0] != key:
            if cell.first is not None:
                self._share(cell.first, cell)
            if cell.start is not None:
                self._export(cell.start, cell)
            self._opened = self._warmed = None
            self._move_along(cell)
            self._warmed = key, warm_up(cell.config, self.root / cell.folder)
        return self._warmed[1]

    def _share(self, first: Cell, cell: Cell) -> None:
        """Links the data and indexes that a cell shares with `first` into its workdir."""
        data = "data" if cell.config.data == first.config.data else "data/memories"
        names = [data, *["indexes"] * (not cell.own_retriever)]
        links = {self.root / cell.folder / name: self.root / first.folder / name for name in names}
        if not all(link.exists() for link in links):
            self._warm(first)  # makes what it lacks; an error if it has another configuration
        for link, target in links.items():
            link.parent.mkdir(parents=True, exist_ok=True)
            if not os.path.lexists(link):
                link.symlink_to(os.path.relpath(target, link.parent), target_is_directory=True)

    def _export(self, start: Cell, cell: Cell) -> None:
        """Writes the weights that a cell starts from."""
        target = self.root / exported(start.folder, start.run)
        if not target.exists():
            self._trained(start)
            convert(str(self.root / start.folder), str(target), start.run)
        elif not workdir.exists(self.root / cell.folder) and workdir.exists(
                self.root / start.folder):
            self._warm(start)  # an error if it has another configuration

    def _move_along(self, cell: Cell) -> None:
        """Names the folders below `root` anew in a workdir's configuration, if all of it was moved:
        those that have the same place in another folder."""
        path = self.root / cell.folder
        if not workdir.exists(path):
            return
        earlier, moved = workdir.read(path), {}
        for name in overrides.differences(earlier, cell.config):
            then, now = overrides.value(earlier, name), overrides.value(cell.config, name)
            place = str(now).removeprefix(str(self.root))
            if place.startswith("/") and place != now and str(then).endswith(place):
                moved[name] = now
        if moved:
            workdir.write(overrides.replace(earlier, moved), path / "config.json")
