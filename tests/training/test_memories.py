"""With which questions the recall of a run's indexes is measured."""

import types

import numpy as np
import pytest

from rag_jax.config import Config
from rag_jax.training import memories


@pytest.mark.parametrize("questions", [5, 256, 1000])
def test_recall_is_measured_with_a_seeded_sample_of_many_questions(
        monkeypatch, capsys, tmp_path, questions):
    """Exact search reads the whole index for them, which may be 65 GB."""
    prepared = types.SimpleNamespace(splits={"dev": list(range(questions))}, memories={"now": None})
    job = types.SimpleNamespace(config=Config(), prepared=prepared, tokenize=np.array)
    answerer = types.SimpleNamespace(embed_questions=lambda params, asked: asked)
    monkeypatch.setattr(memories, "make_answerer", lambda *given: answerer)
    monkeypatch.setattr(memories, "unstack_layers", lambda params: params)
    monkeypatch.setattr(memories, "index_memory", lambda job, params, store, out, sample, _: sample)
    once, again = (memories.index_memories(job, {}, tmp_path)["now"] for _ in range(2))
    np.testing.assert_array_equal(once, again)
    assert len(once) == min(questions, 256) == len(set(once)) and set(once) <= set(range(questions))
    said = capsys.readouterr().out
    if questions > 256:
        assert "with 256 of the 1000 dev questions, drawn by config.seed=0" in said
        assert max(once) > 500, "not the first ones"
    else:
        assert not said and once.tolist() == list(range(questions))
