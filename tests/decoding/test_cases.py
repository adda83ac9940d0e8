"""The cases of t5x's decoding tests, written anew for this search and this sampler.

Left out, as there is no such thing here: a prefix or a temperature of its own for every question
(both are settings of the whole batch, so uneven prefixes, initial indices and per-item temperatures
have no counterpart), temperature 0 (refused: num_beams=1 is greedy), prefixes that hold </s>
(refused), callbacks on logits or state (`constraints` has rules instead), a number of steps apart
from max_length, and the mapping of caches by name (a cache is a plain pytree).
"""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from rag_jax.decoding import sampling
from rag_jax.decoding.beam import (
    Recursion,
    TokenIds,
    beam_search,
    best_of_many,
    gather_beams,
)
from rag_jax.decoding.constraints import make_rule
from rag_jax.decoding.mixture import weights
from rag_jax.decoding.results import rank
from rag_jax.decoding.settings import Decoding

START, PAD, END, A, B, V = 0, 1, 2, 3, 4, 5
NO = -1e7
# Of two questions: the next token whatever came before.
ALWAYS = np.float32([[NO, NO, NO, 0, NO], [NO, NO, NO, NO, 0]])
LEANING = np.log(np.float32([[1e-9, 1e-9, 1e-9, 0.7, 0.3], [1e-9, 1e-9, 1e-9, 0.3, 0.7]]))
SKEWED = np.log(np.float32([[0.3, 1e-9, 1e-9, 0.1, 0.6]]))


def steps(tables):
    """A step that looks up [position, last token] -> logits: (step, R); carry: none."""
    def step(last, position, carry, running):
        logits = jnp.float32(tables)[:, position]  # -> [R, V, V] by the last token
        logits = jnp.take_along_axis(logits, last[..., None], axis=1)
        return jax.nn.log_softmax(logits, axis=-1)[:, None], carry  # -> [R, K=1, M, V]

    return step


def constant(logits, length):
    """Tables [R, T, V, V] of what does not depend on what came before."""
    return np.broadcast_to(logits[:, None, None], (len(logits), length, V, V))


def search(tables, **settings):
    settings = Decoding(max_length=tables.shape[1], **settings)
    rows = len(tables)
    found = tiny.jit(lambda: beam_search(Recursion(
        steps(tables), (), lambda carry, beams: carry, weights("token", jnp.zeros((rows, 1))),
        make_rule(settings, END), rows, 1), settings, TokenIds(START, END, PAD)))()
    return jax.device_get(found.hypotheses)


def sample(monkeypatch, logits, length, seed=0, **settings):
    """The sampler over `logits` in place of the decoder."""
    settings = Decoding(max_length=length, num_beams=1, sample=True, **settings)
    step = steps(constant(logits, length))
    monkeypatch.setattr(sampling, "step", lambda model, params, read, *given: step(*given))
    monkeypatch.setattr(sampling, "empty_past", lambda *_: ())
    rows = len(logits)
    read = SimpleNamespace(log_prior=jnp.zeros((rows, 1)), prior=jnp.ones((rows, 1)))
    model = SimpleNamespace(kind="token", start_id=START, end_id=END, pad_id=PAD)
    keys = jax.random.split(jax.random.key(seed), rows)

    def drawn(keys):
        state = sampling.advance(
            model, {}, read, settings, sampling.begin(model, read, settings, keys), length)
        return sampling.answers(model, read, settings, state).ranked

    return jax.device_get(tiny.jit(drawn)(keys))


def test_a_markov_chain_with_a_tie_has_both_of_its_best_paths():
    """Staying costs e^-1 in turn with changing: A A B B A and B B A A B are equally good."""
    tables = np.full((2, 6, V, V), NO)
    tables[:, 0, START, [A, B]] = 0
    for t in range(1, 5):
        stay = 1 if t % 2 else -1
        tables[:, t, [A, B], [A, B]] = stay
        tables[:, t, [A, B], [B, A]] = -stay
    tables[:, 5, :, END] = 0
    found = search(tables, num_beams=2)
    for row in range(2):
        assert found.tokens[row].tolist() == [[A, A, B, B, A, END], [B, B, A, A, B, END]]
        np.testing.assert_allclose(found.scores[row], np.log(0.5) - 4 * np.log1p(np.exp(-2)),
                                   rtol=1e-5)


@pytest.mark.parametrize("prefix", [None, (B,), (B, START)])
def test_a_forced_prefix_costs_nothing_and_none_is_none(prefix):
    found, forced = search(constant(LEANING, 4), num_beams=2, prefix=prefix), prefix or ()
    log_p = np.log([0.7, 0.3])
    for row, likely in enumerate((A, B)):
        other = A + B - likely
        rest = [likely] * (4 - len(forced))
        assert found.tokens[row, 0].tolist() == [*forced, *rest]
        # One of the remaining tokens differs; which one is a tie.
        assert sorted(found.tokens[row, 1, len(forced) :].tolist()) == sorted([*rest[1:], other])
        np.testing.assert_allclose(found.scores[row], [
            len(rest) * log_p[0], (len(rest) - 1) * log_p[0] + log_p[1]], rtol=1e-5)
        assert found.scores[row, 0] >= found.scores[row, 1]


@pytest.mark.parametrize("prefix", [None, (B,), (A, START)])
def test_what_has_all_the_probability_is_drawn(monkeypatch, prefix):
    found, forced = sample(monkeypatch, ALWAYS, 5, prefix=prefix), list(prefix or ())
    for row, token in enumerate((A, B)):
        assert found.tokens[row, 0].tolist() == [*forced, *[token] * (5 - len(forced))]
        assert not found.token_log_p[row, 0, len(forced) :].any() and not found.finished[row, 0]


def test_log_probabilities_under_top_k_1_are_the_models_own(monkeypatch):
    """The draw is certain and its reported probability is not 1; a prefix counts as well."""
    logits = np.log(np.float32([[1e-9, 1e-9, 1e-9, 0.6, 0.4]]))
    found = sample(monkeypatch, logits, 4, top_k=1, prefix=(A, A, B))
    assert found.tokens[0, 0].tolist() == [A, A, B, A]
    np.testing.assert_allclose(found.log_p[0, 0], np.log(0.6**3 * 0.4), rtol=1e-5)


def test_a_sample_ends_at_its_end_and_its_log_p_too(monkeypatch):
    logits = np.log(np.float32([[1e-9, 1e-9, 0.5, 0.5, 1e-9]] * 2))
    found, lengths = sample(monkeypatch, logits, 7, num_return_sequences=20), set()
    for tokens, log_p in zip(found.tokens.reshape(-1, 7).tolist(), found.log_p.reshape(-1),
                             strict=True):
        length = tokens.index(END) + 1 if END in tokens else 7
        assert tokens[length:] == [PAD] * (7 - length) and set(tokens[: length - 1]) <= {A}
        np.testing.assert_allclose(log_p, length * np.log(0.5), rtol=1e-5)
        lengths.add(length)
    assert len(lengths) > 3


@pytest.mark.parametrize("settings, certain", [
    ({"top_p": 0.55}, True), ({"top_p": 0.65}, False),
    # 0.6 of the model is 0.65 at temperature 0.8: temperature comes before top_p.
    ({"top_p": 0.63, "temperature": 0.8}, True), ({"top_p": 0.63}, False)])
def test_top_p_is_of_the_distribution_after_temperature(monkeypatch, settings, certain):
    found = sample(monkeypatch, SKEWED, 20, num_return_sequences=5, **settings)
    assert (len(np.unique(found.tokens)) == 1) == certain
    assert set(np.unique(found.tokens)) <= {START, B}


def test_logits_after_temperature_and_top_p():
    logits = sampling.truncate(
        jnp.float32([[-1.2, NO, -2.3, -0.51]]), Decoding(sample=True, temperature=1.4, top_p=0.7))
    np.testing.assert_allclose(logits[0, [0, 3]], [-1.2 / 1.4, -0.51 / 1.4], rtol=1e-6)
    assert (np.asarray(logits)[0, [1, 2]] < NO / 2).all()


def test_near_ties_among_large_logits_are_told_apart():
    large = np.float32([[1700.45, NO, NO, 1700.47, 1700.51], [3.2, NO, NO, 5.6, 4.8]])
    found = search(constant(large, 3), num_beams=1)
    assert found.tokens[:, 0].tolist() == [[B] * 3, [A] * 3]


def test_several_samples_of_a_question_are_its_own_and_independent(monkeypatch):
    logits = np.repeat(SKEWED, 2, axis=0)
    found = sample(monkeypatch, logits, 6, num_return_sequences=3)
    assert found.tokens.shape == (2, 3, 6)
    assert len({tuple(row) for row in found.tokens.reshape(-1, 6).tolist()}) == 6
    longer = sample(monkeypatch, logits, 6, num_return_sequences=4)
    np.testing.assert_array_equal(longer.tokens[:, :3], found.tokens)


@pytest.mark.parametrize("rows, count", [(1, 16), (8, 16), (9, 11), (32, 11)])
def test_the_best_of_many_in_two_stages(rows, count):
    scores = np.random.default_rng(rows).permutation(2047 * rows).reshape(rows, -1)
    best, places = best_of_many(jnp.float32(scores), count)
    order = np.argsort(-scores, axis=1)[:, :count]
    np.testing.assert_array_equal(places, order)
    np.testing.assert_array_equal(best, np.take_along_axis(scores, order, axis=1))


def test_hypotheses_are_picked_per_question():
    x = np.arange(24).reshape(2, 3, 4)
    picked = gather_beams({"x": jnp.array(x)}, jnp.array([[2, 2], [0, 1]]))
    np.testing.assert_array_equal(picked["x"], [x[0, [2, 2]], x[1, [0, 1]]])


def test_the_length_of_a_given_prefix_is_not_counted_in_ranks():
    """Answers of all documents would be ranked by other lengths than those of one beam."""
    settings = Decoding(max_length=4, num_beams=2, length_penalty=1.0, prefix=(A, A))
    tokens = jnp.array([[[A, A, END, PAD], [A, A, B, END]]])
    found = rank(jnp.float32([[-2.0, -3.0]]), tokens, settings, END)
    np.testing.assert_allclose(found, [[-2.0, -1.5]])


def test_a_length_penalty_is_computed_under_strict_promotion():
    """The length, an integer, was raised to its power: an error for all who forbid mixed types."""
    settings = Decoding(max_length=4, num_beams=2, length_penalty=1.0)
    with jax.numpy_dtype_promotion("strict"):
        found = rank(jnp.float32([[-3.0]]), jnp.array([[[A, A, END, PAD]]]), settings, END)
        answers = search(constant(LEANING, 4), num_beams=2, length_penalty=1.0)
    np.testing.assert_allclose(found, [[-1.0]])
    assert answers.tokens[:, 0].tolist() == [[A] * 4, [B] * 4]
