"""What experiments are made of: trained models (cells), requests to them, and the results."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from rag_jax.config import Config, overrides
from rag_jax.data.corpora import read_corpus
from rag_jax.data.question_sources import load_examples
from rag_jax.errors import UserError


class File(NamedTuple):
    """A file that an experiment needs and the configuration does not name.

    Attributes:
      path: where it has to lie.
      about: what has to be in it, for the person who gets it.
    """

    path: str
    about: str


class Measurement(NamedTuple):
    """Asks a cell for its answers to many questions, and for their scores.

    Attributes:
      split: the questions: a split of the cell's data, or another source "task:NAME:SPLIT".
      index: its name, where it is not the one that trained.
      k: passages per question; 0 = as configured.
      shuffled: every question reads the passages of another one.
    """

    split: str = "test"
    index: str = ""
    k: int = 0
    shuffled: bool = False

    @property
    def name(self) -> str:
        """The folder with the results."""
        return "-".join([
            self.split.replace(":", "_"), *[f"index_{self.index}"] * bool(self.index),
            *[f"k_{self.k}"] * bool(self.k), *["shuffled"] * self.shuffled])


class Measured(NamedTuple):
    """A measurement's results: metrics of the whole split, a record for every question, and the
    seed of what was measured."""

    metrics: dict[str, float]
    predictions: list[dict[str, Any]]
    seed: int = 0


class Question(NamedTuple):
    """Asks a cell for its answer to one question, token by token.

    Attributes:
      subject: the input.
      beginning: the given beginning of the answer, which ends with a title's first words.
      title: the report says whether the answer has it.
      about: a remark on the title, for the report.
    """

    subject: str
    beginning: str = ""
    title: str = ""
    about: str = ""

    @property
    def name(self) -> str:
        """The name of the file with the results of this kind."""
        return "completed" if self.beginning else "explained"

    @property
    def key(self) -> str:
        """The name of the result in that file."""
        return f"{self.subject}: {self.beginning}" if self.beginning else self.subject


class Explained(NamedTuple):
    """An answer token by token. Its T tokens are those after the given beginning; K passages were
    read."""

    answer: str
    tokens: list[str]
    p: list[float]  # [T], p(token | the tokens before, input)
    passages: list[str]  # ids
    texts: list[str]  # of the passages
    posterior: list[list[float]]  # [T][K], p(passage | token)


Asked = Measurement | Question


@dataclasses.dataclass(frozen=True)
class Cell:
    """One trained model of a table.

    Attributes:
      folder: its workdir, below that of the reproduction; cells of one folder share data, warm-up
        and index.
      config: the configuration of its workdir.
      run: one of config.runs.
      first: a cell with the same passages, warmed up before. This one shares its passage stores, or
        all its data if config.data is the same; and its indexes, unless it has its own retriever.
      start: a cell whose trained weights this one starts from, in the folder that `exported` names.
      recipe: how to train it by hand.
      questions: further questions, by split.
      indexes: the passages of further indexes, by name; the index that trains has those of
        config.data.passages.
    """

    folder: str
    config: Config
    run: str
    first: "Cell | None" = None
    start: "Cell | None" = None
    recipe: str = ""
    questions: Mapping[str, File] = dataclasses.field(default_factory=dict)
    indexes: Mapping[str, File] = dataclasses.field(default_factory=dict)

    @property
    def own_retriever(self) -> bool:
        """Whether it trains its document encoder itself: the configuration names no source."""
        return "document_encoder" not in self.config.model.sources

    @property
    def running(self) -> Config:
        """The configuration as this run has it."""
        return overrides.for_run(self.config, self.run)

    @property
    def reading(self) -> str:
        """For the report: how many passages it reads, and what retrieves them."""
        config = self.running
        k = config.retrieval.k
        if not k:
            return "no passages"
        by = "a trained query encoder"
        if config.retrieval.retriever == "bm25":
            by = "BM25"
        elif not overrides.trains_query_encoder(config):
            by = "a frozen query encoder"
        answering = config.eval.k or k
        return f"{k} passage{'s' * (k > 1)}{f' (answering: {answering})' * (answering != k)}, {by}"

    def public(self, what: Measurement) -> Measurement:
        """The measurement on dev, where the data have no test set with public answers."""
        data = self.config.data
        hidden = what.split == "test" and data.passages and not data.test
        return what._replace(split="dev") if hidden else what

    def files(self, what: Asked | None) -> dict[str, File]:
        """The files that an answer needs and the configuration does not name, by split or index."""
        if not isinstance(what, Measurement):
            return {}
        needed = {what.split: self.questions.get(what.split),
                  what.index: self.indexes.get(what.index)}
        return {name: file for name, file in needed.items()
                if file is not None and file.path != self.config.data.passages}

    def unavailable(self, what: Asked) -> str:
        """Why the cell's data do not suffice for a result; empty = they do."""
        data = self.config.data
        if not data.passages or not isinstance(what, Measurement):
            return ""  # the world has whatever the experiments ask for
        if what.index and what.index not in self.indexes:
            return f"config.data.passages makes one index; there is none called {what.index}"
        named = [split for split in ("train", "dev", "test") if getattr(data, split)]
        named += self.questions
        if what.split not in named and not what.split.startswith("task:"):
            return f"config.data names no questions {what.split}, only {', '.join(named)}"
        missing = [f"no file {path}: {about}" for path, about in self.files(what).values()
                   if not os.path.isfile(path)]
        if not missing:
            try:  # now, and not when everything is trained
                if what.split in self.questions:
                    load_examples(self.questions[what.split].path)
                if what.index:
                    next(read_corpus(self.indexes[what.index].path))
            except UserError as error:
                return str(error)
        return "; ".join(missing)


def exported(folder: str, run: str) -> str:
    """The folder, below the root, of a run's trained weights in Hugging Face's form."""
    return f"{folder}/exported_{run}"


class Scale(Protocol):
    """Which cells stand for the cells of the paper's tables."""

    name: str
    about: str  # the data and the models, in a sentence
    ks: tuple[int, ...]  # passages per question along figure 3's axis
    subject: str  # of figure 2's example
    starts: tuple[int, ...]  # steps of warm-up of the retrievers that learn from answers
    beginnings: tuple[Question, ...]  # for section 4.2's partial decoding

    def cells(self, task: str, run: str) -> list[Cell]:
        """One cell for every seed; empty where this scale has none.

        Args:
          task: nq, tqa, tqa_wiki (the models of tqa), wq, ct, jeopardy, msmarco,
            fever3 or fever2.
          run: one of config.RUNS.
        """
