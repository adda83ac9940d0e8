"""Guesses against a plain search for them, and answers with guesses against answers without."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from rag_jax.config import CausalConfig
from rag_jax.decoding import documents, prompt_lookup
from rag_jax.decoding.answer import decode
from rag_jax.decoding.settings import Decoding

LONGEST = 8
BATCH = tiny.rag_batch()
GENERATORS = {
    "bart": tiny.BART,
    "t5": tiny.T5,
    "causal": CausalConfig(
        variant="gemma2", vocab_size=38, max_positions=64, width=12, decoder_layers=3, heads=4,
        kv_heads=2, head_size=4, mlp_width=10, init_std=0.3, window=3, global_every=2),
}


def plain_guesses(ids, inputs, position, count):
    """The tokens after the longest match of at most 3 of the last inputs, as a person would look
    them up: in what was read, then in the inputs, whose end is repeated."""
    found, most = None, 0
    for text, repeats in ((ids, False), (inputs[: position + 1], True)):
        for place in range(len(text) - 1):
            alike = 0
            while (alike < 3 and alike <= min(place, position)
                   and text[place - alike] == inputs[position - alike]):
                alike += 1
            if alike > most:
                found, most = (text, place, repeats), alike
    if found is None:
        return None
    text, place, repeats = found
    following = list(text[place + 1 :])
    return (following * count if repeats else following)[:count]


@pytest.mark.parametrize("seed", range(3))
def test_guesses_follow_the_longest_match(seed):
    rng = np.random.default_rng(seed)
    count = 4
    look_up = jax.jit(functools.partial(prompt_lookup.guesses, count=count))
    some = 0
    for _ in range(100):
        ids = rng.integers(0, 5, (2, 9)).astype(np.int32)
        inputs = rng.integers(0, 5, (2, 3, 7)).astype(np.int32)
        position = int(rng.integers(7))
        found = look_up(ids, inputs, np.int32(position))
        for search, hypothesis in np.ndindex(2, 3):
            expected = plain_guesses(ids[search], inputs[search, hypothesis], position, count)
            if expected is not None:
                some += 1
                assert found[search, hypothesis, : len(expected)].tolist() == expected
    assert some > 300


def answers(model, batch, key=None, **how):
    settings = Decoding(max_length=LONGEST, **how)
    found = tiny.jit(functools.partial(decode, model, settings))(
        tiny.rag_params(model), batch, key)
    jax.effects_barrier()
    return jax.device_get(found)


def assert_same(found, expected):
    np.testing.assert_array_equal(found.ranked.tokens, expected.ranked.tokens)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("kind", ["token", "sequence", "fid"])
@pytest.mark.parametrize("name", GENERATORS)
def test_answers_are_the_same_with_guesses(name, kind):
    """Guards against the keys, values or positions of a wrong guess in what follows it."""
    model = tiny.rag_model(kind, generator=GENERATORS[name])
    model = dataclasses.replace(model, start_id=0)  # as T5's; no guess has been made before it
    for how in ({"min_length": LONGEST}, {"no_repeat_ngram_size": 2}):
        assert_same(answers(model, BATCH, prompt_lookup=3, **how), answers(model, BATCH, **how))


@pytest.mark.parametrize("count", [1, 4, LONGEST + 3])
def test_samples_are_the_same_with_guesses(count):
    """Several samples of a question go on in different ways, and end at different times."""
    how = {"sample": True, "num_return_sequences": 3, "temperature": 0.6}
    model, key = tiny.rag_model(), jax.random.key(4)
    assert_same(answers(model, BATCH, key, prompt_lookup=count, **how),
                answers(model, BATCH, key, **how))


@pytest.mark.parametrize("kind, how", [
    ("token", {"num_beams": 3}), ("sequence", {"strategy": "thorough"}),
    ("token", {"labels": ((3, tiny.END), (4, 5, tiny.END))})], ids=str)
def test_other_ways_guess_nothing(kind, how):
    """Beams that change places are in no order in which a guess could be checked."""
    model = tiny.rag_model(kind)
    assert Decoding(max_length=LONGEST, prompt_lookup=3, **how).guesses(model) == 0
    assert_same(answers(model, BATCH, prompt_lookup=3, **how), answers(model, BATCH, **how))


def quoting(monkeypatch):
    """A batch of one question, and the steps of a model that goes on with the successor of every
    token: 10 after <s>, 30 after 14, </s> after 20."""
    calls, step = tiny.counted(monkeypatch, documents, "step"), documents.step

    def successors(model, params, found, tokens, position, past):
        _, past = step(model, params, found, tokens, position, past)
        next_one = jnp.where(tokens == tiny.END, 10, jnp.where(tokens == 14, 30, tokens + 1))
        next_one = jnp.where(tokens == 20, tiny.END, next_one)
        log_p = jax.nn.log_softmax(9.0 * jax.nn.one_hot(next_one, 38), axis=-1)
        passages = found.mask.shape[0] // len(tokens)
        return jnp.repeat(log_p[:, None], passages, axis=1), past

    monkeypatch.setattr(documents, "step", successors)
    batch = jax.tree.map(lambda leaf: leaf[:1], BATCH)
    ids = np.full((1, 3, 6), 3, np.int32)
    ids[0, 1] = [8, 9, 10, 11, 12, 13]
    ids[0, 2] = [30, 31, 32, 33, 34, 35]
    return batch._replace(source_ids=ids, source_mask=np.ones((1, 3, 6), bool)), calls


def test_a_quotation_takes_fewer_steps(monkeypatch):
    """And none is left out whose guesses were wrong."""
    batch, calls = quoting(monkeypatch)
    model = tiny.rag_model()
    # Inputs that are computed together, with wrong guesses in brackets: <s> | 10 11 12 | 13 (30 31)
    # | 14 | 30 31, and with more guesses <s> | 10 11 12 13 (30) | 14 | 30 31.
    for count, steps in ((0, 8), (2, 5), (4, 4)):
        found = answers(model, batch, prompt_lookup=count)
        assert found.best.tokens.tolist() == [[10, 11, 12, 13, 14, 30, 31, 32]]
        assert len(calls) == steps, count
        calls.clear()


def test_an_answer_that_has_ended_keeps_no_other_from_its_guesses(monkeypatch):
    """What follows the end of one is not used, and is guessed by nobody."""
    batch, calls = quoting(monkeypatch)
    model, step = tiny.rag_model(), documents.step

    def ending(model, params, found, tokens, position, past):
        """The second question's answer ends at once."""
        log_p, past = step(model, params, found, tokens, position, past)
        at_once = jnp.where(jnp.arange(38) == tiny.END, -0.1, -9.0)
        second = (jnp.arange(len(log_p)) == 1)[:, None, None, None, None]
        return jnp.where(second, at_once[None, None, None, None], log_p), past

    monkeypatch.setattr(documents, "step", ending)
    two = jax.tree.map(lambda leaf: np.concatenate([leaf, leaf]), batch)
    found = answers(model, two, prompt_lookup=4)
    assert found.best.tokens[0].tolist() == [10, 11, 12, 13, 14, 30, 31, 32]
    assert found.best.tokens[1, 0] == tiny.END and len(calls) == 4
