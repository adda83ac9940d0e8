"""What of a test set is already in the training set, and the scores on either part."""

from collections.abc import Iterable, Sequence

import numpy as np

from rag_jax.metrics.answers import normalize_answer
from rag_jax.metrics.references import refuse_string


def overlaps(tested: Sequence[Sequence[str]], trained: Iterable[Sequence[str]],
             nfd: bool = False) -> np.ndarray:
    """Which questions have a text that is one of the training questions'; bool[Q].

    Texts are compared as exact match does. Source: Lewis et al. 2021, "Question and answer
    test-train overlap in open-domain question answering datasets". Differs from it: their overlap
    of questions is judged by people and holds paraphrases too.

    Args:
        tested: the accepted answers of each test question, or the question alone.
        trained: the same of each training question.
        nfd: that of `exact_match`.

    Raises:
        TypeError: the texts of a question are one string.
    """
    known = set().union(*(_normalized(texts, nfd) for texts in trained))
    return np.array([not known.isdisjoint(_normalized(texts, nfd)) for texts in tested], bool)


def _normalized(texts: Sequence[str], nfd: bool) -> set[str]:
    """The texts of one question as they are compared."""
    refuse_string(texts, "the texts of a question are", "a list")
    return {normalize_answer(text, nfd) for text in texts}


def slices(correct: Sequence[bool], within: np.ndarray, name: str) -> dict[str, float]:
    """Percent correct of the questions within an overlap and of the others, with their counts.

    Args:
        correct: bool[Q].
        within: bool[Q], from `overlaps`.
        name: begins the keys: NAME, NAME_count, no_NAME, no_NAME_count.

    Returns:
        Those of the four that are defined: no score over no questions.
    """
    correct, scores = np.asarray(correct, bool), {}
    for key, part in ((name, correct[within]), (f"no_{name}", correct[~within])):
        if part.size:
            scores[key] = 100.0 * float(part.mean())
        scores[f"{key}_count"] = part.size
    return scores
