"""The generator's input made on the device against the one made on the host, id by id."""

import types

import jax
import numpy as np
import pytest

from rag_jax.data.compose import compose
from rag_jax.data.padding import pad_rows
from rag_jax.data.text import GeneratorFormat
from rag_jax.data.tokenizer_training import train_bart_tokenizer

TOKENIZER = train_bart_tokenizer(["Lima is the capital of Peru."] * 3, 300)


@pytest.mark.parametrize("like_hugging_face, question_first, start", [
    (False, False, 0), (True, False, 0), (False, True, None)])
@pytest.mark.parametrize("max_length", [4, 7, 12, 30])
def test_every_id_and_mask_equals_join(like_hugging_face, question_first, start, max_length):
    """Passages and questions of every length around the room there is, none at all among them."""
    special = types.SimpleNamespace(start=start, end=TOKENIZER.end, pad=TOKENIZER.pad)
    format = GeneratorFormat(special, max_length, like_hugging_face=like_hugging_face,
                             question_first=question_first)
    rng = np.random.default_rng(max_length)
    longest = max_length + 3
    suffixes = [rng.integers(5, 300, n).tolist() for n in range(longest + 1)]
    passages = [[rng.integers(5, 300, n).tolist() for n in rng.integers(0, max_length + 4, 5)]
                + [[], rng.integers(5, 300, max_length + 9).tolist()] for _ in suffixes]
    room = max_length - 2 + (start is None)
    expected = [format.join(p, q) for q, ps in zip(suffixes, passages, strict=True) for p in ps]
    ids, mask = pad_rows(expected, max_length, TOKENIZER.pad)
    table = pad_rows([p[:room] for ps in passages for p in ps], room, TOKENIZER.pad)[0]
    lengths = np.array([[min(len(p), room) for p in ps] for ps in passages], np.int32)
    run = jax.jit(lambda *arrays: compose(format, *arrays))
    found_ids, found_mask = run(table.reshape(*lengths.shape, room), lengths,
                                *pad_rows(suffixes, longest, TOKENIZER.pad))
    np.testing.assert_array_equal(found_ids, ids.reshape(*lengths.shape, max_length))
    np.testing.assert_array_equal(found_mask, mask.reshape(*lengths.shape, max_length))
    assert found_ids.dtype == np.int32 and found_mask.dtype == bool
