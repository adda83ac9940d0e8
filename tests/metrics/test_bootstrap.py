"""Bootstrap intervals: those of known distributions, and the gain of pairing."""

import numpy as np
import pytest

from rag_jax.metrics import bootstrap


def test_the_interval_is_that_of_the_mean():
    """Against the normal approximation, which is close at this size; of the sample, not its
    members, whose spread is sqrt(Q) times as wide."""
    values = np.random.default_rng(1).normal(3.0, 2.0, 2000)
    half = 1.96 * values.std() / np.sqrt(len(values))
    low, high = bootstrap.interval(values)
    assert low == pytest.approx(values.mean() - half, abs=0.15 * half)
    assert high == pytest.approx(values.mean() + half, abs=0.15 * half)
    narrow = bootstrap.interval(values, level=0.5)
    assert low < narrow[0] < narrow[1] < high


def test_small_sets_follow_the_binomial_distribution():
    """Mean of 10 answers with 5 right, resampled: a binomial(10, 0.5) over 10, in percent."""
    low, high = bootstrap.interval([100, 0] * 5, level=0.9, samples=4000)
    assert (low, high) == (20, 80)  # P(X <= 2) = 5.5 %, P(X <= 1) = 1.1 %


def test_the_same_seed_gives_the_same_interval():
    uneven = np.arange(50) ** 2.0  # of a few 0 and 100, two seeds may give the same by chance
    assert bootstrap.interval(uneven) == bootstrap.interval(uneven, seed=0)
    assert bootstrap.interval(uneven, seed=0) != bootstrap.interval(uneven, seed=1)
    assert bootstrap.interval([100.0]) == (100.0, 100.0)


def test_pairing_cancels_what_is_hard_for_both():
    rng = np.random.default_rng(0)
    hardness = rng.normal(0, 30, 200)
    ours, theirs = hardness + rng.normal(2, 1, 200), hardness + rng.normal(0, 1, 200)
    low, high = bootstrap.interval(ours - theirs)
    assert 0 < low < (ours - theirs).mean() < high < 3
    apart = bootstrap.resampled(lambda a, b: ours[a].mean() - theirs[b].mean(), (200, 200))
    assert apart[0] < 0 < apart[1], "drawn apart they are two axes"


def test_misuse_is_an_error():
    with pytest.raises(ValueError, match=r"float\[Q\]"):
        bootstrap.interval([])
    with pytest.raises(ValueError, match="level=95"):
        bootstrap.interval([1.0], level=95)


def test_two_axes_widen_the_interval():
    """Drawing questions alone would hide that another seed gives another model."""
    scores = np.random.default_rng(3).random((3, 400)) + np.array([[0.0], [1.0], [2.0]])
    both = bootstrap.resampled(lambda s, q: scores[s][:, q].mean(), scores.shape)
    questions = bootstrap.resampled(lambda q: scores[:, q].mean(), scores.shape[1:])
    assert both[1] - both[0] > 4 * (questions[1] - questions[0])
