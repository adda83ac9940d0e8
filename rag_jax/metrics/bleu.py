"""BLEU of token lists, as the scorer of MS-MARCO and COCO captions computes it.

Precisions are clipped by the most that any one reference has, the brevity penalty takes the
reference whose length is closest (of two, the shorter), and constants of 1e-15 and 1e-9 stand
where others smooth. Source: MSMARCO-Question-Answering, Evaluation/bleu (coco-caption).
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

Tokens = Sequence[str]
TINY, SMALL = 1e-15, 1e-9


class BleuCounts(NamedTuple):
    """What BLEU needs to know of one or of all predictions; order n is at place n - 1."""

    length: int
    reference_length: int
    matched: list[int]
    total: list[int]


def ngrams(tokens: Tokens, n: int) -> Counter[tuple[str, ...]]:
    return Counter(zip(*(tokens[i:] for i in range(n)), strict=False))


def count(prediction: Tokens, references: Sequence[Tokens], max_order: int) -> BleuCounts:
    """Counts of one prediction.

    Raises:
        ValueError: no references.
    """
    if len(references) == 0:
        raise ValueError("no references: expected at least one per prediction")
    length = len(prediction)
    matched = []
    for n in range(1, max_order + 1):
        most: Counter = Counter()
        for reference in references:
            most |= ngrams(reference, n)
        matched.append((ngrams(prediction, n) & most).total())
    _, closest = min((abs(len(reference) - length), len(reference)) for reference in references)
    total = [max(0, length - n + 1) for n in range(1, max_order + 1)]
    return BleuCounts(length, closest, matched, total)


def add(counts: Sequence[BleuCounts]) -> BleuCounts:
    """Sums over predictions."""
    lengths, reference_lengths, matched, total = zip(*counts, strict=True)
    return BleuCounts(sum(lengths), sum(reference_lengths), np.sum(matched, 0).tolist(),
                      np.sum(total, 0).tolist())


def sentence_bleu(prediction: Tokens, references: Sequence[Tokens], max_order: int = 1
                  ) -> list[float]:
    """[BLEU-1, ..., BLEU-max_order] of one prediction, from 0 to 1."""
    return _bleu(count(prediction, references, max_order))


def corpus_bleu(predictions: Sequence[Tokens], references: Sequence[Sequence[Tokens]],
                max_order: int = 1) -> list[float]:
    """[BLEU-1, ..., BLEU-max_order], from 0 to 1, of counts summed over all predictions.

    Args:
        predictions: tokens of each.
        references: for each prediction the tokens of its references.

    Raises:
        ValueError: no predictions, or not as many as lists of references.
    """
    if len(predictions) == 0:
        raise ValueError("no predictions: BLEU over none is undefined")
    return _bleu(add([count(prediction, texts, max_order)
                      for prediction, texts in zip(predictions, references, strict=True)]))


def _bleu(counts: BleuCounts) -> list[float]:
    ratio = (counts.length + TINY) / (counts.reference_length + SMALL)
    brevity = math.exp(1 - 1 / ratio) if ratio < 1 else 1.0
    scores, product = [], 1.0
    for n, (matched, total) in enumerate(zip(counts.matched, counts.total, strict=True), start=1):
        product *= (matched + TINY) / (total + SMALL)
        scores.append(product ** (1 / n) * brevity)
    return scores
