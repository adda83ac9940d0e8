"""The passages and questions that the data of a workdir are made from, read or invented."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from rag_jax.data.question_files import Example
from rag_jax.retrieval.protocol import Passage


@dataclasses.dataclass(frozen=True)
class Source:
    """Passages and questions on them.

    Attributes:
      passages: passages of each store by its name; the first store trains.
      splits: questions by split: train, dev, test and whatever else there is.
      warmup_texts: texts for the tokenizers and the generator's warm-up; None = the passages of
        the first store.
    """

    passages: dict[str, Iterable[Passage]]
    splits: dict[str, list[Example]]
    warmup_texts: Sequence[str] | None = None


# (fictional countries, seed, task, cards) -> the world that stands in for files of one's own
World = Callable[[int, int, str, str], Source]
