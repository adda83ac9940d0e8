"""Batch order as a pure function of (seed, step): resuming needs one integer."""

import functools

import numpy as np


def generator(seed: int, *purpose: int) -> np.random.Generator:
    """A random stream for one purpose; the same arguments give the same stream on any machine."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, *purpose])))


@functools.lru_cache(maxsize=4)
def _permutation(size: int, seed: int, epoch: int) -> np.ndarray:
    return generator(seed, 1, epoch).permutation(size)


def batch_indices(size: int, batch_size: int, seed: int, step: int) -> np.ndarray:
    """Which examples make up the batch of `step`, int64[batch_size].

    Epoch e is a permutation of 0..size-1 drawn from (seed, e); batches run through the epochs
    without a gap, so that every example is seen equally often.
    """
    positions = np.arange(step * batch_size, (step + 1) * batch_size)
    epochs = positions // size
    parts = [_permutation(size, seed, int(e))[positions[epochs == e] % size]
             for e in np.unique(epochs)]
    return np.concatenate(parts)
