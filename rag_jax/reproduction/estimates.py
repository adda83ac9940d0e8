"""Metrics over seeds and questions, with intervals.

A metric is a function of sums over questions. The terms of every question are computed once, and a
bootstrap sample only sums others of them.
"""

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from rag_jax.errors import DataError
from rag_jax.metrics.bleu import bleu, bleu_counts, distinct_ngram_ratio, ngrams
from rag_jax.metrics.bootstrap import SAMPLES, resampled
from rag_jax.metrics.q_bleu import bleu_1, q_bleu_1
from rag_jax.metrics.rouge import rouge_l
from rag_jax.metrics.tokens import spacy_tokens
from rag_jax.reproduction.cells import Measured
from rag_jax.scoring import without_spaces

Record = dict[str, Any]  # of one question: a line of predictions.jsonl


class Metric(NamedTuple):
    """A metric in percent.

    Attributes:
      terms: record -> its terms of the sums, float[C].
      value: float64[..., C], sums -> float64[...].
    """

    terms: Callable[[Record], Sequence[float]]
    value: Callable[[np.ndarray], np.ndarray]


class Estimate(NamedTuple):
    """Mean over seeds, percent, the bounds of a 95 % interval, and how many seeds and questions."""

    value: float
    low: float
    high: float
    seeds: int
    questions: int

    def __str__(self) -> str:
        return f"{self.value:.1f} [{self.low:.1f}, {self.high:.1f}]"


def _percent(sums: np.ndarray) -> np.ndarray:
    return 100 * sums[..., 0] / sums[..., 1]


def _of_texts(terms: Callable[[str, Sequence[str]], Sequence[float]],
              value: Callable[[np.ndarray], np.ndarray] = _percent) -> Metric:
    """A metric of an answer and its references. Terms are cached: a report is written after every
    model that is measured, and most answers are as before."""
    cached = functools.lru_cache(1 << 20)(terms)
    return Metric(lambda record: cached(record["answer"], tuple(record["references"])), value)


def _tokens(answer: str, references: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    return spacy_tokens(answer), [spacy_tokens(text) for text in references]


_right = Metric(lambda record: (record["exact_match"], 1), _percent)
METRICS = {
    "em": _right,
    "accuracy": _right,
    "rouge_l": _of_texts(lambda *texts: (rouge_l(*_tokens(*texts)), 1)),
    "bleu1": _of_texts(lambda *texts: bleu_counts(*without_spaces(*_tokens(*texts)), 1),
                       lambda sums: 100 * bleu(sums)[..., 0]),
    "sentence_bleu1": _of_texts(lambda *texts: (bleu_1(*texts), 1)),
    "qbleu1": _of_texts(lambda *texts: (q_bleu_1(*texts), 1)),
}


def metric_of(column: str) -> str:
    """The metric of a column TASK.METRIC; of Jeopardy questions, BLEU-1 is the sentences' mean."""
    return "sentence_bleu1" if column == "jeopardy.bleu1" else column.split(".")[1]


def distinct_trigrams(texts: Sequence[str]) -> Estimate:
    """Distinct over all tri-grams, percent, of at least two texts.

    The interval is normal, by the jackknife: a bootstrap sample holds texts twice, which lowers
    the ratio, so that its interval would not even hold the value.
    """
    tokens = [spacy_tokens(text) for text in texts]
    grams = [ngrams(each, 3) for each in tokens]
    users = Counter(gram for each in grams for gram in each)  # in how many texts each is
    total = sum(each.total() for each in grams)
    without = np.array([  # the ratio of all texts but one
        100 * (len(users) - sum(users[gram] == 1 for gram in each))
        / max(total - each.total(), 1) for each in grams])
    count, value = len(texts), 100 * distinct_ngram_ratio(tokens)
    error = 1.96 * np.sqrt((count - 1) / count * ((without - without.mean()) ** 2).sum())
    return Estimate(value, max(value - error, 0.0), min(value + error, 100.0), 1, count)


def share(percents: Sequence[float], count: int) -> Estimate | None:
    """A share of `count` questions of which only the value of each seed is known.

    A bootstrap sample of questions that are right or wrong is a binomial draw. The questions are
    the same for all seeds, so all seeds share its deviation. No seeds give None.
    """
    if not percents:
        return None
    rng, value = np.random.default_rng(0), float(np.mean(percents))
    deviations = 100 * rng.binomial(count, value / 100, SAMPLES) / count - value
    seeds = rng.choice(np.asarray(percents, np.float64), (SAMPLES, len(percents))).mean(axis=1)
    low, high = np.clip(np.quantile(seeds + deviations, [0.025, 0.975]), 0, 100)
    return Estimate(value, float(low), float(high), len(percents), count)


def share_of(results: Sequence[Measured], name: str, count: str = "count") -> Estimate | None:
    """A metric that is a share of `count` questions, over the seeds that have it. Where the count
    differs between seeds, the smallest one gives the interval: rather too wide than too narrow."""
    known = [result.metrics for result in results if name in result.metrics]
    return share([m[name] for m in known], min(int(m[count]) for m in known)) if known else None


def estimate(results: Sequence[Measured], metric: str, minus: Sequence[Measured] | None = None
             ) -> Estimate | None:
    """A metric, or its difference between two systems on the same questions, of the seeds that both
    have.

    The interval is that of a percentile bootstrap over seeds and over questions: a sample draws
    seeds, and questions that are the same for all of them (and for both systems).

    Args:
      results: what each seed answered to the same questions; no seeds give None.
      metric: one of METRICS.
      minus: another system, whose metric is subtracted.

    Raises:
      DataError: the seeds, or the two systems, answered different questions.
    """
    if minus is not None:
        results, minus = paired(results, minus)
    if not results:
        return None
    asked = [[record["id"] for record in one.predictions] for one in (*results, *(minus or ()))]
    if any(ids != asked[0] for ids in asked):
        raise DataError("the models of one row answered different questions; measure all of them "
                        "in an empty --workdir")
    ours = _terms(results, metric)
    theirs = _terms(minus, metric) if minus else None
    seeds, questions, _ = ours.shape

    def value(drawn: np.ndarray, asked: np.ndarray) -> float:
        def of(terms: np.ndarray) -> float:
            return float(METRICS[metric].value(terms[drawn][:, asked].sum(axis=1)).mean())
        return of(ours) - (of(theirs) if theirs is not None else 0.0)

    everything = value(np.arange(seeds), np.arange(questions))
    return Estimate(everything, *resampled(value, (seeds, questions)), seeds, questions)


def paired(ours: Sequence[Measured], theirs: Sequence[Measured]
           ) -> tuple[list[Measured], list[Measured]]:
    """The results of two systems for the seeds that both have, in the order of `ours`; other seeds
    differ in more than the system."""
    by_seed = {one.seed: one for one in theirs}
    both = [(one, by_seed[one.seed]) for one in ours if one.seed in by_seed]
    return [one for one, _ in both], [other for _, other in both]


def _terms(results: Sequence[Measured], metric: str) -> np.ndarray:
    """float64[S, Q, C]."""
    return np.array([[METRICS[metric].terms(record) for record in result.predictions]
                     for result in results], np.float64)
