"""ROUGE-L against subsequences that are all tried, and the reference implementation."""

from itertools import combinations

import numpy as np
import pytest

from rag_jax.metrics.rouge import longest_common_subsequence, rouge_l
from tests.metrics.goldens import golden, tokenized


def f_beta(precision, recall):
    return (1 + 1.2**2) * precision * recall / (recall + 1.2**2 * precision)


def subsequences(tokens):
    return {tuple(tokens[i] for i in places) for size in range(len(tokens) + 1)
            for places in combinations(range(len(tokens)), size)}


def test_the_longest_common_subsequence_of_random_lists():
    rng = np.random.default_rng(0)
    for _ in range(100):
        one, other = (list(rng.choice(list("abc"), rng.integers(0, 8))) for _ in range(2))
        expected = max(map(len, subsequences(one) & subsequences(other)))
        assert longest_common_subsequence(one, other) == expected


def test_recall_weighs_more_than_precision():
    assert rouge_l("a b".split(), ["a b c d".split()]) == pytest.approx(f_beta(1, 1 / 2))
    assert rouge_l("a b c d".split(), ["a b".split()]) == pytest.approx(f_beta(1 / 2, 1))
    assert f_beta(1, 1 / 2) < f_beta(1 / 2, 1)


def test_precision_and_recall_may_be_of_different_references():
    # precision 2/3 of the long one, recall 1 of the short one: neither reference has both
    references = ["a b c d e".split(), ["x"]]
    for texts in (references, references[::-1]):
        assert rouge_l("a b x".split(), texts) == pytest.approx(f_beta(2 / 3, 1))


def test_texts_without_tokens():
    assert rouge_l([], [["a"]]) == rouge_l(["a"], [[]]) == 0.0
    assert rouge_l([], [[]]) == 1.0
    with pytest.raises(ValueError, match="no references"):
        rouge_l(["a"], [])


@pytest.mark.parametrize("tokens", ["coco_ptb", "coco_whitespace_lower"])
def test_values_of_the_reference_implementation(tokens):
    for case in golden("generation"):
        prediction, references = tokenized(case, tokens)
        score = rouge_l(prediction.split(), [text.split() for text in references])
        assert score == pytest.approx(case[tokens]["rouge_l_beta1.2"], rel=1e-14), case
