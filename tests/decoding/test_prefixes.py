"""What is kept of passages between questions: which, how many, and for how long."""

import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from rag_jax.config import CausalConfig
from rag_jax.decoding import prefixes

MODEL = tiny.rag_model(generator=CausalConfig(decoder_layers=2, kv_heads=1, head_size=4))
TOKEN_BYTES = 2 * 2 * 4 * 4  # keys and values of 2 layers, 4 float32 each


def some_params():
    return {"generator": {"embedding": jnp.ones(3), "norm": {"scale": np.ones(3)}}}


@pytest.fixture
def read(monkeypatch):
    """Rows of tokens whose keys and values are the tokens; and the rows that a program has read."""
    runs = []

    def program(params, ids, mask):
        runs.append(ids[mask].tolist())
        keys = np.broadcast_to(np.where(mask[0, 0], ids[0, 0], np.nan), (2, 1, 4, ids.shape[2]))
        return keys.astype(np.float32), keys.swapaxes(2, 3).astype(np.float32)

    monkeypatch.setattr(prefixes, "_program", lambda config: program)
    monkeypatch.setattr(prefixes, "MIB", 100 * TOKEN_BYTES)
    kept = prefixes.KeptPrefixes()

    def read(*rows, params, mib=1, padded=None, model=MODEL):
        runs.clear()
        padded = padded or [-(-len(row) // 8) * 8 for row in rows]
        keys, values = kept.reader(model, params, params, mib)(rows, padded)
        np.testing.assert_array_equal(keys.swapaxes(3, 4), values)
        assert keys.shape == (len(rows), 2, 1, 4, max(padded))
        for row, found in zip(rows, keys, strict=True):
            np.testing.assert_array_equal(found[1, 0, 2], row + [0] * (max(padded) - len(row)))
        return list(runs)

    return read


def test_a_passage_is_known_by_its_tokens_and_read_once(read):
    """By its number it would be that of another index; beside itself it would be read twice."""
    params = some_params()
    assert read([5, 6], [7], [5, 6], params=params) == [[5, 6], [7]]
    assert read([7], [5], [5, 6, 7], params=params) == [[5], [5, 6, 7]]
    assert read([], [7], params=params) == [[]]
    assert read([7], params=params, padded=[16]) == [[7]], "padded otherwise, it is rounded so"


def test_those_met_last_are_kept_as_far_as_there_is_room(read):
    """Without an end memory would fill up; the oldest, met again, is not the first to go."""
    params, rows = some_params(), [[n] * 40 for n in range(3)]
    assert read(rows[0], params=params) == [rows[0]]
    assert read(rows[1], params=params) == [rows[1]]
    assert read(rows[0], params=params) == []
    assert read(rows[2], params=params) == [rows[2]], "room for two"
    assert read(rows[0], params=params) == [] and read(rows[1], params=params) == [rows[1]]
    assert read(rows[0], params=params, mib=0) == [], "what is there is used"
    assert read(rows[0], params=params) == [rows[0]], "and then dropped"
    long = [9] * 101
    assert read(long, params=params) == read(long, params=params) == [long]


def test_what_other_parameters_have_kept_is_dropped(read):
    """Keys of other weights, or of another dtype, would answer as a model that never was."""
    params = some_params()
    read([1], params=params)
    assert read([1], params={**params, "query_encoder": {}}) == []
    params["generator"]["norm"]["scale"] = np.ones(3)
    assert read([1], params=params) == [[1]]
    other = tiny.rag_model(generator=CausalConfig(decoder_layers=2, kv_heads=1, head_size=4,
                                                  dtype="bfloat16"))
    assert read([1], params=params, model=other) == [[1]]
