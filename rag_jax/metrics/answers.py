"""Exact match and token F1 of short answers, as SQuAD v1.1's official evaluation computes them."""

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Sequence

from rag_jax.metrics.references import checked_references

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


def exact_match(prediction: str, references: Sequence[str], nfd: bool = False) -> bool:
    """Whether the prediction equals one of the references after normalisation.

    Two texts that normalise to nothing ("the", "!!!") match, although their `f1` is 0, as in
    SQuAD. Differs from SQuAD: a blank prediction does not match them. `nfd` is that of
    `normalize_answer`.

    Raises:
        ValueError: no references.
        TypeError: `references` is one string.
    """
    normalized, given = normalize_answer(prediction, nfd), bool(prediction.strip())
    return any(normalized == normalize_answer(text, nfd) and given == bool(text.strip())
               for text in checked_references(references))


def f1(prediction: str, references: Sequence[str], nfd: bool = False) -> float:
    """Best token F1 over the references, from 0 to 1.

    F1 is the harmonic mean of precision and recall of the bag of normalised tokens; without a
    common token it is 0, also where both sides normalise to nothing (SQuAD v1.1; v2.0 says 1).
    `nfd` is that of `normalize_answer`.

    Raises:
        ValueError: no references.
        TypeError: `references` is one string.
    """
    tokens = normalize_answer(prediction, nfd).split()
    return max(_token_f1(tokens, normalize_answer(text, nfd).split())
               for text in checked_references(references))


def _token_f1(prediction: list[str], reference: list[str]) -> float:
    common = (Counter(prediction) & Counter(reference)).total()
    if common == 0:
        return 0.0
    precision, recall = common / len(prediction), common / len(reference)
    return 2 * precision * recall / (precision + recall)
