"""Whose passages a question reads when they are shuffled."""

import numpy as np
import pytest

from rag_jax.training.report import someone_elses


@pytest.mark.parametrize("count", [2, 3, 40])
def test_every_question_reads_another_ones_passages_and_all_are_read(count):
    """A question that kept its own would make reading look less needed than it is."""
    for seed in range(5):
        other = someone_elses(count, seed)
        assert sorted(other) == list(range(count))
        assert not (other == np.arange(count)).any()
        assert (other == someone_elses(count, seed)).all()
