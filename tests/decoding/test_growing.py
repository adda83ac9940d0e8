"""Answers that are watched while they grow are those of decoding at once, token by token."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import tiny
from enumerated import BATCH, END, LONGEST, QUESTIONS, model, params

from rag_jax.decoding.answer import begin, decode, go_on, grows
from rag_jax.decoding.results import explain
from rag_jax.decoding.settings import Decoding

WAYS = [("token", {}), ("sequence", {}), ("fid", {}), ("token", {"bad_words": ((3,),)}),
        ("token", {"min_length": 3}), ("token", {"sample": True, "num_return_sequences": 3}),
        ("sequence", {"sample": True, "temperature": 0.5, "num_return_sequences": 2}),
        ("token", {"prompt_lookup": 2}), ("token", {"prompt_lookup": 2, "sample": True})]


@pytest.mark.parametrize("kind, how", WAYS, ids=range(len(WAYS)))
@pytest.mark.parametrize("step", [1, 2])
def test_what_grows_becomes_what_is_decoded_at_once_and_nothing_is_taken_back(kind, how, step):
    """A token that was shown and then changed, or a state that lost something on its way."""
    settings = Decoding(max_length=LONGEST, **how)
    drawn = (jax.random.key(3) if settings.sample else None, None)
    assert grows(model(kind), settings, BATCH)
    start, further, whole = (tiny.jit(functools.partial(each, model(kind), settings))
                             for each in (begin, go_on, decode))
    expected = jax.device_get(whole(params(), BATCH, *drawn))
    lengths = set()
    found, growing = jax.device_get(start(params(), BATCH, *drawn, np.int32(0)))
    for until in range(step, LONGEST + step, step):
        found, growing = jax.device_get(further(params(), growing, np.int32(until)))
        shown = found.ranked.tokens
        np.testing.assert_array_equal(shown[..., :until], expected.ranked.tokens[..., :until])
        np.testing.assert_array_equal(found.ranked.token_log_p[..., :until],
                                      expected.ranked.token_log_p[..., :until])
        np.testing.assert_array_equal(found.ranked.finished, (shown[..., :until] == END).any(-1))
        lengths.add(until)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert len(lengths) > 1 and QUESTIONS > 1


@pytest.mark.parametrize("how", [{"min_length": 3}, {"min_length": 3, "sample": True}])
def test_what_has_not_grown_yet_is_no_end_where_padding_is_the_end_token(how):
    """As of Llama 3, whose streams were said to have ended after one token."""
    padded, settings = dataclasses.replace(model("token"), pad_id=END), Decoding(
        max_length=LONGEST, **how)
    drawn = (jax.random.key(3) if settings.sample else None, None)
    found, _ = jax.device_get(tiny.jit(functools.partial(begin, padded, settings))(
        params(), BATCH, *drawn, np.int32(1)))
    other, _ = jax.device_get(tiny.jit(functools.partial(begin, model("token"), settings))(
        params(), BATCH, *drawn, np.int32(1)))
    assert not found.ranked.finished.any() and (found.ranked.tokens[..., 1:] == END).all()
    np.testing.assert_array_equal(found.ranked.log_p, other.ranked.log_p)
    np.testing.assert_array_equal(found.ranked.posterior, other.ranked.posterior)


@pytest.mark.parametrize("kind", ["token", "sequence", "fid"])
def test_what_has_no_token_yet_is_no_nan(kind):
    """Nor is its posterior, the mean of its tokens' posteriors."""
    documents = 1 if kind == "fid" else 2
    found = explain(kind, np.log(np.full((1, documents), 1 / documents, np.float32)),
                    np.zeros((1, 1, 3), np.int32), np.zeros((1, 1, 3), bool),
                    np.zeros((1, 1, 3, documents), np.float32), np.ones((1, 1), bool), END)
    assert not any(np.isnan(leaf).any() for leaf in found)


def test_what_changes_its_mind_does_not_grow():
    """The first words of a hypothesis were shown as those of the answer."""
    for kind, how in (("token", {"num_beams": 2}), ("sequence", {"strategy": "thorough"}),
                      ("sequence", {"strategy": "fast"}), ("token", {"labels": ((3,), (4,))})):
        assert not grows(model(kind), Decoding(max_length=LONGEST, **how), BATCH)
    assert not grows(model("token"), Decoding(max_length=LONGEST, memory_mib=1), jax.tree.map(
        lambda leaf: np.resize(leaf, (4096, *leaf.shape[1:])), BATCH)), "one group after the other"
