"""What the report measures with which index, parameters and questions."""

import types

import numpy as np
import pytest

from rag_jax.training import report
from rag_jax.training.report import someone_elses


def test_every_cell_of_the_hot_swap_has_its_own_index_and_questions(monkeypatch):
    """With one index for all four cells the table would look as if nothing had been swapped."""
    reporter = types.SimpleNamespace(
        params=lambda run: f"parameters of {run}", answerer=lambda run, index: (run, index),
        job=types.SimpleNamespace(tokens=lambda split: split,
                                  config=types.SimpleNamespace(eval="how")))
    monkeypatch.setattr(report, "evaluate", lambda answerer, params, questions, **_: (
        types.SimpleNamespace(metrics={"em": (*answerer, params, questions)})))
    assert report._hot_swap(reporter, "rag_token") == {
        f"index{index}_leaders{year}": ("rag_token", index, "parameters of rag_token",
                                        f"leaders_{year}")
        for index in ("2016", "2018") for year in ("2016", "2018")}


@pytest.mark.parametrize("count", [2, 3, 40])
def test_every_question_reads_another_ones_passages_and_all_are_read(count):
    """A question that kept its own would make reading look less needed than it is."""
    for seed in range(5):
        other = someone_elses(count, seed)
        assert sorted(other) == list(range(count))
        assert not (other == np.arange(count)).any()
        assert (other == someone_elses(count, seed)).all()
