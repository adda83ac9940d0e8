"""Exact match and token F1 of short answers, as SQuAD v1.1's official evaluation computes them."""

import re
import string
from collections import Counter
from collections.abc import Iterable, Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """Lower-cases, removes `string.punctuation` and the articles a, an, the, collapses spaces.

    Unicode stays as it is: curly quotes and long dashes are kept, and a composed "é" differs from
    a decomposed one, as in SQuAD, DPR and the paper (ORQA and DrQA decompose first).
    """
    bare = text.lower().translate(_NO_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())


def exact_match(prediction: str, references: Sequence[str]) -> bool:
    """Whether the prediction equals one of the references after normalisation.

    Two texts that normalise to nothing ("the", "!!!") match, although their `f1` is 0.

    Raises:
        ValueError: no references.
        TypeError: `references` is one string.
    """
    normalized = normalize_answer(prediction)
    return any(normalized == normalize_answer(text) for text in _checked(references))


def f1(prediction: str, references: Sequence[str]) -> float:
    """Best token F1 over the references, from 0 to 1.

    F1 is the harmonic mean of precision and recall of the bag of normalised tokens; without a
    common token it is 0, also where both sides normalise to nothing (SQuAD v1.1; v2.0 says 1).

    Raises:
        ValueError: no references.
        TypeError: `references` is one string.
    """
    tokens = normalize_answer(prediction).split()
    return max(_token_f1(tokens, normalize_answer(text).split()) for text in _checked(references))


def summarise(
    predictions: Iterable[str], references: Iterable[Sequence[str]]
) -> dict[str, float | int]:
    """Means of exact match and F1 over questions.

    Args:
        predictions: one answer per question.
        references: the accepted answers per question, in the same order.

    Returns:
        "em" and "f1" in percent, and "count", the number of questions.

    Raises:
        ValueError: no questions, a different number of predictions and references, or a question
            without references.
    """
    predictions, references = list(predictions), list(references)
    if len(predictions) != len(references):
        raise ValueError(
            f"{len(predictions)} predictions but references of {len(references)} questions: "
            "expected one list of references per prediction"
        )
    if not predictions:
        raise ValueError("no predictions: the mean over no questions is undefined")
    pairs = list(zip(predictions, references, strict=True))
    return {
        "em": 100.0 * sum(exact_match(*pair) for pair in pairs) / len(pairs),
        "f1": 100.0 * sum(f1(*pair) for pair in pairs) / len(pairs),
        "count": len(pairs),
    }


def _token_f1(prediction: list[str], reference: list[str]) -> float:
    common = (Counter(prediction) & Counter(reference)).total()
    if common == 0:
        return 0.0
    precision, recall = common / len(prediction), common / len(reference)
    return 2 * precision * recall / (precision + recall)


def _checked(references: Sequence[str]) -> Sequence[str]:
    if isinstance(references, str):
        raise TypeError(f"references is the string {references!r}: expected a list of strings")
    if len(references) == 0:
        raise ValueError("no references: expected at least one accepted answer per question")
    return references
