"""BLEU and distinct n-grams of token lists.

BLEU is that of the scorer of MS-MARCO and COCO captions: precisions are clipped by the most that
any one reference has, the brevity penalty takes the reference whose length is closest (of two, the
shorter), and constants of 1e-15 and 1e-9 stand where others smooth. SacreBLEU, which others report,
is the library's.

Source: MSMARCO-Question-Answering, Evaluation/bleu (coco-caption).
"""

import functools
import itertools
import operator
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from rag_jax.metrics.references import check_tokens, checked_references

Tokens = Sequence[str]
TINY, SMALL = 1e-15, 1e-9


def ngrams(tokens: Tokens, n: int) -> Counter[tuple[str, ...]]:
    """The n-grams of one text, each with how often it occurs."""
    return Counter(zip(*(tokens[i:] for i in range(n)), strict=False))


def distinct_ngram_ratio(texts: Iterable[Tokens], n: int = 3) -> float:
    """Distinct over total n-grams of all texts together, from 0 to 1; 0 where there is no n-gram.

    The ratio falls as texts are added: compare sets of the same size. The paper does not say how
    it tokenizes. Source: the paper, table 5.

    Args:
        texts: tokens of each text.
        n: size of the n-grams; 3 in the paper.
    """
    counts = [ngrams(tokens, n) for tokens in texts]
    total = sum(each.total() for each in counts)
    return len(set().union(*counts)) / total if total else 0.0


def bleu_counts(prediction: Tokens, references: Sequence[Tokens], max_order: int) -> np.ndarray:
    """What BLEU needs to know of one prediction; of a corpus it is the sum over its predictions.

    Returns:
        int64[2 + 2 max_order]: the prediction's length, that of the closest reference, the number
        of n-grams that match for n = 1, ..., max_order, and the number of all n-grams likewise.

    Raises:
        ValueError: no references.
        TypeError: a string in the place of tokens, or of the references.
    """
    check_tokens(prediction, references)
    length, orders = len(prediction), range(1, max_order + 1)
    _, closest = min((abs(len(reference) - length), len(reference)) for reference in references)
    most = [functools.reduce(operator.or_, (ngrams(reference, n) for reference in references))
            for n in orders]
    matched = [(ngrams(prediction, n) & best).total() for n, best in zip(orders, most, strict=True)]
    return np.array([length, closest, *matched, *(max(0, length - n + 1) for n in orders)])


def bleu(counts: np.ndarray) -> np.ndarray:
    """[..., 2 + 2 max_order] from `bleu_counts`, or sums of them -> float64[..., max_order]:
    BLEU-1, ..., BLEU-max_order, from 0 to 1."""
    lengths, counts = np.split(np.asarray(counts, np.float64), [2], axis=-1)
    matched, total = np.split(counts, 2, axis=-1)
    ratio = (lengths[..., :1] + TINY) / (lengths[..., 1:] + SMALL)
    precision = (matched + TINY) / (total + SMALL)
    orders = np.arange(1, precision.shape[-1] + 1)
    return (np.cumprod(precision, axis=-1) ** (1 / orders)
            * np.exp(np.minimum(0.0, 1 - 1 / ratio)))


def sentence_bleu(prediction: Tokens, references: Sequence[Tokens], max_order: int = 1
                  ) -> list[float]:
    """[BLEU-1, ..., BLEU-max_order] of one prediction, from 0 to 1."""
    return bleu(bleu_counts(prediction, references, max_order)).tolist()


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
    pairs = zip(predictions, references, strict=True)
    return bleu(sum(bleu_counts(*pair, max_order) for pair in pairs)).tolist()


def corpus_sacre_bleu(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """BLEU-4 in percent as sacrebleu has it (`tok:13a|smooth:exp`); the paper's is `corpus_bleu`.

    Args:
        predictions: texts, not tokenized.
        references: the reference texts of each; they may be of different numbers.

    Raises:
        ValueError: no predictions, one without references, or different numbers.
        TypeError: the references of one are one string.
    """
    from sacrebleu.metrics.bleu import BLEU  # 0.2 s, for those who score texts alone

    if len(predictions) == 0:
        raise ValueError("no predictions: BLEU over none is undefined")
    if len(predictions) != len(references):
        raise ValueError(f"{len(predictions)} predictions but references of {len(references)}")
    # The first of each, the second of each, ...
    streams = list(itertools.zip_longest(*map(checked_references, references)))
    return BLEU().corpus_score(list(predictions), streams).score
