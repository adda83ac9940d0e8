"""What an experiment is made of: trained models (cells), and what is measured on them."""

import dataclasses
from typing import Any, NamedTuple, Protocol

from rag_jax.config import Config


@dataclasses.dataclass(frozen=True)
class Cell:
    """One trained model of a table.

    Attributes:
      folder: its workdir, below that of the reproduction; cells of one folder share data, warm-up
        and index.
      config: of the workdir.
      run: one of config.runs.
      first: a cell with the same passages, warmed up before, whose memories this one shares, and
        whose indexes too, unless this one has a retriever of its own.
      start: a cell whose trained weights this one starts from, as `exported(start)` has them.
      recipe: how to train it by hand.
    """

    folder: str
    config: Config
    run: str
    first: "Cell | None" = None
    start: "Cell | None" = None
    recipe: str = ""

    @property
    def own_retriever(self) -> bool:
        """It trains its document encoder itself: no source is named for it."""
        return "document_encoder" not in self.config.model.sources


def exported(folder: str, run: str) -> str:
    """Where a run's trained weights lie in Hugging Face's form, below the root."""
    return f"{folder}/exported_{run}"


class Measurement(NamedTuple):
    """What is asked of a cell.

    Attributes:
      split: the questions.
      memory: name of another memory than the one that trained.
      k: passages per question; 0 = as configured.
      shuffled: every question reads the passages of another one.
    """

    split: str = "test"
    memory: str = ""
    k: int = 0
    shuffled: bool = False

    @property
    def name(self) -> str:
        """Of the folder with the results."""
        return "-".join([self.split, *[f"index_{self.memory}"] * bool(self.memory),
                         *[f"k_{self.k}"] * bool(self.k), *["shuffled"] * self.shuffled])


class Measured(NamedTuple):
    """A measurement's results: metrics of the whole split, and a record for every question."""

    metrics: dict[str, float]
    predictions: list[dict[str, Any]]


class Explained(NamedTuple):
    """An answer with p(passage | token): [T][K]."""

    question: str
    answer: str
    tokens: list[str]
    passages: list[str]
    texts: list[str]
    posterior: list[list[float]]


class Scale(Protocol):
    """Which cells stand for the cells of the paper's tables."""

    name: str
    about: str  # the data and the models, in a sentence
    ks: tuple[int, ...]  # passages per question along figure 3's axis
    subject: str  # of figure 2's example

    def cells(self, task: str, run: str) -> list[Cell]:
        """One cell for every seed; empty where this scale has none.

        Args:
          task: nq, tqa, wq, ct, jeopardy, msmarco, fever3 or fever2.
          run: one of config.RUNS.
        """
