"""BLEU against counts done by hand, exact fractions, and the reference implementation."""

import math
from fractions import Fraction

import numpy as np
import pytest

from rag_jax.metrics.bleu import corpus_bleu, sentence_bleu
from tests.metrics.goldens import golden, tokenized


def close(value):
    return pytest.approx(value, rel=1e-8)


def test_counts_are_clipped_by_the_best_reference():
    # "the" three times, at most two in one reference; "cat" once: 3 of 4
    references = ["the cat is the".split(), "the the".split()]
    assert sentence_bleu("the the the cat".split(), references) == [close(3 / 4)]


def test_brevity_takes_the_closest_length_and_of_two_the_shorter():
    tokens = "a b c".split()
    assert sentence_bleu(tokens, ["a b c x x x".split()]) == [close(math.exp(1 - 6 / 3))]
    both = ["a b".split(), "a b c d".split()]  # both one away: 2 is taken, no penalty
    assert sentence_bleu(tokens, both) == [close(1.0)]


def test_a_corpus_is_summed_before_it_is_divided():
    predictions, references = ["a b c".split(), ["x"]], [["a b c".split()], [["y"]]]
    assert corpus_bleu(predictions, references) == [close(3 / 4)]
    mean = np.mean([sentence_bleu(*pair)[0] for pair in zip(predictions, references, strict=True)])
    assert mean == close(1 / 2)


def test_orders_are_geometric_means():
    # unigrams 4/5, bigrams 3/4, trigrams 2/3, four-grams 1/2
    scores = sentence_bleu("a b c d e".split(), ["a b c d f".split()], 4)
    products = [Fraction(4, 5), Fraction(3, 5), Fraction(2, 5), Fraction(1, 5)]
    assert scores == [close(float(p) ** (1 / n)) for n, p in enumerate(products, start=1)]


def test_random_texts_agree_with_plain_counting():
    rng = np.random.default_rng(0)
    for _ in range(200):
        prediction, *references = (
            list(rng.choice(list("abcd"), rng.integers(1, 12))) for _ in range(3))
        matched = 0
        for token in set(prediction):
            matched += min(prediction.count(token), max(r.count(token) for r in references))
        closest = min(references, key=lambda r: (abs(len(r) - len(prediction)), len(r)))
        brevity = min(1.0, math.exp(1 - len(closest) / len(prediction)))
        expected = brevity * matched / len(prediction)
        assert sentence_bleu(prediction, references) == [pytest.approx(expected, abs=1e-8)]


def test_empty_texts_score_next_to_nothing_and_misuse_is_an_error():
    assert sentence_bleu([], [["a"]]) == [0.0]
    assert sentence_bleu(["a"], [[]]) == [pytest.approx(0.0, abs=1e-12)]
    with pytest.raises(ValueError, match="no references"):
        sentence_bleu(["a"], [])
    with pytest.raises(ValueError, match="no predictions"):
        corpus_bleu([], [])
    with pytest.raises(ValueError):
        corpus_bleu([["a"]], [])


@pytest.mark.parametrize("tokens", ["coco_ptb", "coco_whitespace_lower"])
def test_values_of_the_reference_implementation(tokens):
    for case in golden("generation"):
        prediction, references = tokenized(case, tokens)
        scores = sentence_bleu(prediction.split(), [text.split() for text in references], 4)
        expected = [case[tokens][f"bleu{n}"] for n in (1, 2, 3, 4)]
        assert scores == pytest.approx(expected, rel=1e-14, abs=1e-300), case
