"""Confidence intervals by resampling questions."""

from collections.abc import Sequence

import numpy as np


def interval(values: Sequence[float], level: float = 0.95, samples: int = 1000, seed: int = 0
             ) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean.

    Args:
        values: float[Q], the score of each question.
        level: probability that the interval shall hold, between 0 and 1.
        samples: resampled sets of questions, each as large as the set.
        seed: of the resampling: the same values give the same interval.

    Returns:
        Lower and upper bound, in the unit of the values.

    Raises:
        ValueError: no values, or a level that is none.

    Source: Efron 1979.
    """
    values = np.asarray(values, np.float64)
    if values.ndim != 1 or not len(values):
        raise ValueError(f"values has shape {list(values.shape)}: expected float[Q], Q above 0")
    if not 0 < level < 1:
        raise ValueError(f"level={level}: must be between 0 and 1, as 0.95")
    rng = np.random.default_rng(seed)
    means = [values[rng.integers(len(values), size=len(values))].mean() for _ in range(samples)]
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def paired_difference(ours: Sequence[float], theirs: Sequence[float], level: float = 0.95,
                      samples: int = 1000, seed: int = 0) -> tuple[float, float, float]:
    """Mean of ours - theirs on the same questions, and its percentile bootstrap interval.

    Every resampled set holds the same questions for both, so what makes a question hard for both
    cancels. Arguments as those of `interval`.

    Returns:
        (difference, lower bound, upper bound); the systems differ at this level where the
        interval does not hold 0.

    Raises:
        ValueError: different numbers of questions; see `interval`.
    """
    if len(ours) != len(theirs):
        raise ValueError(f"{len(ours)} scores but {len(theirs)}: expected the same questions")
    difference = np.asarray(ours, np.float64) - np.asarray(theirs, np.float64)
    return float(difference.mean()), *interval(difference, level, samples, seed)
