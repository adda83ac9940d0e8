"""Batch order: a pure function of (seed, step), epochs without gaps."""

import numpy as np
import pytest

from rag_jax.data import order


def stream(size, batch_size, seed, steps):
    return np.concatenate([order.batch_indices(size, batch_size, seed, s) for s in range(steps)])


@pytest.mark.parametrize("size, batch_size", [(10, 5), (10, 3), (7, 7), (3, 8), (1, 4), (5, 1)])
def test_epochs_are_permutations_without_gaps(size, batch_size):
    """A dropped last batch or a repeated example would skew the epochs; a batch may exceed them."""
    drawn = stream(size, batch_size, 1, 4 * size)
    epochs = drawn.reshape(-1, size)
    assert (np.sort(epochs, axis=1) == np.arange(size)).all()


def test_a_batch_depends_on_seed_and_step_alone():
    """A resumed run asks for step 17 first; earlier calls and caches must not matter."""
    alone = order.batch_indices(100, 8, 5, 17)
    stream(30, 4, 9, 40)
    stream(100, 8, 5, 25)
    assert (order.batch_indices(100, 8, 5, 17) == alone).all()
    assert alone.shape == (8,) and alone.dtype == np.int64


def test_seeds_and_epochs_have_orders_of_their_own():
    first = stream(50, 10, 0, 10).reshape(2, 50)
    assert (first[0] != first[1]).any()
    assert (stream(50, 10, 1, 5) != first[0]).any()
    assert (first[0] != np.arange(50)).any()


def test_changing_a_batch_does_not_change_the_order():
    """A view of the cached permutation would let a caller shuffle every later epoch."""
    batch = order.batch_indices(6, 6, 2, 0)
    kept = batch.copy()
    batch[:] = 0
    assert (order.batch_indices(6, 6, 2, 0) == kept).all()


def test_the_order_is_the_same_on_every_machine_and_in_every_version():
    """Philox is specified; another generator would change published runs."""
    assert order.batch_indices(8, 8, 0, 0).tolist() == [1, 4, 6, 5, 7, 3, 2, 0]


def test_streams_of_different_purposes_differ():
    draws = [order.generator(*key).integers(1 << 30) for key in ((0, 1), (0, 2), (1, 1), (0, 1, 2))]
    assert len(set(draws)) == 4
    assert order.generator(0, 1).integers(1 << 30) == draws[0]
