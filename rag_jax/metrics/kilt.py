"""KILT's provenance scores: were the gold pages retrieved, and the answers given from them.

A question has evidence sets, each a set of pages that support an answer together. What is
retrieved is a list of pages, best first, in which a page counts once, however many of its
passages were found. Source: KILT (Petroni et al. 2021), eval_retrieval.py and eval_downstream.py.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from rag_jax.metrics.answers import exact_match, f1

EvidenceSets = Iterable[Collection[str]]


class Supported(NamedTuple):
    """Scores of one answer that count only where R-precision is 1; each from 0 to 1."""

    accuracy: float  # the answer is one of the references, letter for letter
    em: float
    f1: float


def r_precision(pages: Sequence[str], evidence_sets: EvidenceSets) -> float:
    """Share of an evidence set of R pages that is among the first R pages, best of the sets.

    0 where there is no evidence set.
    """
    pages = list(dict.fromkeys(pages))
    return max((len(gold & set(pages[: len(gold)])) / len(gold)
                for gold in _sets(evidence_sets)), default=0.0)


def page_recall(pages: Sequence[str], evidence_sets: EvidenceSets, k: int) -> float:
    """Share of the evidence sets that are complete within rank k; 0 where there is none.

    An evidence set holds one place in the ranking, that of its last page; every other page holds
    one of its own.
    """
    gold_sets = _sets(evidence_sets)
    missing = [set(gold) for gold in gold_sets]
    ranking: list[int | None] = []  # the number of an evidence set, or None for another page
    for page in dict.fromkeys(pages):
        holders = [i for i, left in enumerate(missing) if page in left]
        for i in holders:
            if i in ranking:
                ranking.remove(i)
            missing[i].remove(page)
            ranking.append(i)
        if not holders:
            ranking.append(None)
    complete = sum(i is not None and not missing[i] for i in ranking[:k])
    return complete / len(gold_sets) if gold_sets else 0.0


def supported(prediction: str, references: Sequence[str], r_precision: float, nfd: bool = False
              ) -> Supported:
    """KILT-accuracy, KILT-EM and KILT-F1 of one answer; an empty answer scores 0.

    `nfd` is config.eval.nfd, which KILT has not; expressions are compared as texts.
    """
    prediction = prediction.strip()
    if r_precision < 1 or not prediction:
        return Supported(0.0, 0.0, 0.0)
    return Supported(float(prediction in {text.strip() for text in references}),
                     float(exact_match(prediction, references, nfd=nfd)),
                     f1(prediction, references, nfd=nfd))


def _sets(evidence_sets: EvidenceSets) -> list[frozenset[str]]:
    """Different sets that are not empty, in their order."""
    return [gold for gold in dict.fromkeys(map(frozenset, evidence_sets)) if gold]
