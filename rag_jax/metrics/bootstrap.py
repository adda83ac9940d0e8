"""Confidence intervals by resampling: the percentile bootstrap (Efron 1979).

Not scipy.stats.bootstrap: it draws along one axis, where a report draws seeds and questions, and
it refuses a single question.
"""

from collections.abc import Callable, Sequence

import numpy as np

SAMPLES = 1000


def resampled(value: Callable[..., float], sizes: Sequence[int], level: float = 0.95,
              samples: int = SAMPLES, seed: int = 0) -> tuple[float, float]:
    """Percentile bootstrap interval of a statistic of what was drawn along every axis.

    Args:
        value: takes an index array int[size], with repetitions, for every axis. Data that share
            an axis are paired: they are drawn together.
        sizes: how long the axes are; questions, or seeds and questions.
        level: probability that the interval is to cover, between 0 and 1.
        samples: how many sets are drawn.
        seed: the same data and seed give the same interval.

    Returns:
        Lower and upper bound, in the unit of the statistic.

    Raises:
        ValueError: a level that is not between 0 and 1.
    """
    if not 0 < level < 1:
        raise ValueError(f"level={level}: must be between 0 and 1, as 0.95")
    rng = np.random.default_rng(seed)
    drawn = [value(*(rng.integers(size, size=size) for size in sizes)) for _ in range(samples)]
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def interval(values: Sequence[float], level: float = 0.95, samples: int = SAMPLES, seed: int = 0
             ) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean over questions.

    Two systems on the same questions are compared by the interval of their differences, question
    by question: what makes a question hard for both cancels, and they differ at this level where
    the interval does not hold 0.

    Args:
        values: float[Q], the score (or difference) of each question; the others as `resampled`.

    Raises:
        ValueError: no values, or a level that is not between 0 and 1.
    """
    values = np.asarray(values, np.float64)
    if values.ndim != 1 or not len(values):
        raise ValueError(f"values has shape {list(values.shape)}: expected float[Q], Q above 0")
    return resampled(lambda rows: values[rows].mean(), values.shape, level, samples, seed)
