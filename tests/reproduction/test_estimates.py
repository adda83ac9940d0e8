"""Metrics over seeds and questions against direct computation and a normal approximation."""

import numpy as np
import pytest

from rag_jax.data.question_files import Example
from rag_jax.errors import DataError
from rag_jax.metrics.bleu import distinct_ngram_ratio
from rag_jax.reproduction import estimates
from rag_jax.reproduction.cells import Measured
from rag_jax.reproduction.estimates import (
    distinct_trigrams,
    estimate,
    metric_of,
    share,
    share_of,
)
from rag_jax.scoring import score


def results(*rights):
    """One `Measured` for every row of bools, of seeds 0, 1, ..."""
    return [Measured({}, [{"id": str(i), "exact_match": bool(right)}
                          for i, right in enumerate(row)], seed)
            for seed, row in enumerate(rights)]


def test_the_value_is_the_mean_over_seeds_and_questions():
    found = estimate(results([1, 1, 0, 0], [1, 0, 0, 0]), "em")
    assert found.value == pytest.approx(37.5) and (found.seeds, found.questions) == (2, 4)
    assert estimate([], "em") is None


def test_the_interval_of_one_seed_is_that_of_a_share():
    right = np.random.default_rng(1).random(400) < 0.7
    found = estimate(results(right), "em")
    error = 1.96 * 100 * np.sqrt(right.mean() * (1 - right.mean()) / 400)
    assert found.low == pytest.approx(found.value - error, abs=0.9)
    assert found.high == pytest.approx(found.value + error, abs=0.9)


def test_seeds_that_differ_widen_the_interval():
    """An interval over questions alone would hide that another seed gives another model."""
    right = np.arange(400) % 2 == 0
    same = estimate(results(right, right, right), "em")
    other = estimate(results(right, np.ones(400), np.zeros(400)), "em")
    assert other.value == pytest.approx(same.value)
    assert other.high - other.low > 4 * (same.high - same.low)


def test_a_difference_is_paired():
    """Systems that differ on one question alone differ for certain, however hard the others."""
    right = np.random.default_rng(2).random(300) < 0.5
    better = right | (np.arange(300) % 10 == 0)
    gain = estimate(results(better), "em", minus=results(right))
    assert gain.value == pytest.approx(100 * (better.mean() - right.mean()))
    assert 0 < gain.low < gain.value < gain.high < 10
    nothing = estimate(results(right), "em", minus=results(right))
    assert (nothing.value, nothing.low, nothing.high) == (0, 0, 0)


def test_a_difference_is_of_the_seeds_that_both_have():
    """A seed was compared with another one, which differs in its data or warm-up."""
    ours, theirs = results([1, 0], [1, 1], [0, 0]), results([0, 0], [1, 1], [0, 0])
    gain = estimate(ours[:2], "em", minus=theirs[1:])
    assert (gain.value, gain.seeds) == (0, 1)
    assert estimate(ours, "em", minus=theirs[::-1]).value == pytest.approx(100 / 6)
    assert estimate(ours[:1], "em", minus=theirs[1:]) is None
    assert estimate(ours, "em", minus=[]) is None


def test_seeds_of_other_questions_are_refused():
    one, other = results([1, 0]), results([1, 0, 1])
    with pytest.raises(ValueError, match="different questions"):
        estimate([*one, *other], "em")
    for minus in (other, [Measured({}, one[0].predictions[::-1])]):
        with pytest.raises(DataError, match="different questions"):
            estimate(one, "em", minus=minus)


def test_distinct_trigrams():
    assert distinct_trigrams(["a b c d", "a b c"]).value == pytest.approx(100 * 2 / 3)
    assert distinct_trigrams(["a b", "c"]).value == 0
    rng = np.random.default_rng(3)
    texts = [" ".join(rng.choice(list("abcdef"), rng.integers(2, 9))) for _ in range(40)]
    found = distinct_trigrams(texts)
    assert found.value == pytest.approx(100 * distinct_ngram_ratio(map(str.split, texts)))
    ratios = np.array([100 * distinct_ngram_ratio(map(str.split, texts[:i] + texts[i + 1:]))
                       for i in range(40)])
    error = 1.96 * np.sqrt(39 / 40 * ((ratios - ratios.mean()) ** 2).sum())
    assert (found.low, found.high) == pytest.approx((found.value - error, found.value + error))


def test_the_interval_of_a_share_is_that_of_its_questions():
    """answer_recall@K is known as a share alone; its interval must not be narrower for that."""
    right = np.random.default_rng(4).random(300) < 0.6
    whole, part = estimate(results(right), "em"), share([100 * right.mean()], 300)
    assert part.value == pytest.approx(whole.value)
    assert (part.low, part.high) == pytest.approx((whole.low, whole.high), abs=1.0)
    one, three = (share([100 * right.mean()] * n, 300) for n in (1, 3))
    assert three.high - three.low == pytest.approx(one.high - one.low, abs=1.0)
    assert share([20, 80, 50], 300).high - share([50] * 3, 300).high > 10
    assert share([], 5) is None and share([100], 5).high == 100


def test_of_seeds_with_other_counts_the_smallest_gives_the_interval():
    """The first seed's did: another order of the seeds was another interval."""
    seeds = [Measured({"a": 50.0, "count": count}, []) for count in (400, 4)]
    assert share_of(seeds, "a") == share_of(seeds[::-1], "a") == share([50.0, 50.0], 4)


def test_metrics_of_sums_are_those_of_an_evaluation():
    """The table must not differ from what rag_jax.evaluate prints for the same answers."""
    texts = ["The capital of Peru is Lima.", "lima", "Quito it is", ""]
    references = [("Lima is the capital of Peru.",), ("Lima.", "It is Lima."),
                  ("Quito is the capital, which everybody knows.",), ("x y",)]  # longer: brevity
    records = [{"id": str(i), "answer": text, "references": list(answers), "exact_match": False}
               for i, (text, answers) in enumerate(zip(texts, references, strict=True))]
    examples = [Example(str(i), "q", answers) for i, answers in enumerate(references)]
    whole = score(texts, examples, ("ms_marco", "jeopardy"))
    for column, name in (("msmarco.rouge_l", "rouge_l"), ("msmarco.bleu1", "bleu_1"),
                         ("jeopardy.bleu1", "sentence_bleu_1"), ("jeopardy.qbleu1", "q_bleu_1")):
        found = estimate([Measured({}, records)], metric_of(column))
        assert found.value == pytest.approx(whole[name], abs=1e-5) and found.value > 0
        assert found.low <= found.value <= found.high


def test_what_was_scored_is_not_scored_again(monkeypatch):
    """A report that follows each model of the paper's scale took minutes for answers of others."""
    def measured(answer):
        return [Measured({}, [{"id": "0", "answer": answer, "references": ["Lima is big."]}])]

    first = estimate(measured("Lima is old."), "rouge_l")
    monkeypatch.setattr(estimates, "rouge_l", lambda *tokens: 0.0)
    assert estimate(measured("Lima is old."), "rouge_l") == first and first.value > 0
    assert estimate(measured("Lima is old!"), "rouge_l").value == 0, "another answer"
