"""Exact match and token F1 of short answers, as SQuAD v1.1's official evaluation computes them."""

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str, nfd: bool = False) -> str:
    """Lower-cases, removes `string.punctuation` and the articles a, an, the, collapses spaces.

    Unicode stays as it is: curly quotes and long dashes are kept, and a composed "é" differs from
    a decomposed one, as in SQuAD, DPR and KILT. With `nfd` the text is canonically decomposed
    first, as in ORQA and DrQA, and the two are equal.
    """
    if nfd:
        text = unicodedata.normalize("NFD", text)
    bare = text.lower().translate(_NO_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())


def compared(text: str, nfd: bool = False) -> str:
    """What exact match compares: `normalize_answer`; of a text such as "The" or "!!!", of which
    that leaves nothing, the text in lower case. Empty for a blank text alone."""
    bare = text.strip().lower()
    return normalize_answer(text, nfd) or (unicodedata.normalize("NFD", bare) if nfd else bare)


def exact_match(prediction: str, references: Sequence[str], nfd: bool = False) -> bool:
    """Whether the prediction equals one of the references after normalisation.

    Nothing matches a blank prediction. Differs from SQuAD, where all texts that normalise to
    nothing ("", "the", "!!!") match each other: here each matches itself. `nfd` is that of
    `normalize_answer`.

    Raises:
        ValueError: no references.
        TypeError: `references` is one string.
    """
    references, given = _checked(references), compared(prediction, nfd)
    return bool(given) and any(given == compared(text, nfd) for text in references)


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
