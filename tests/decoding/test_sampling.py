"""Samples against the enumerated distribution."""

import collections
import functools

import enumerated
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from enumerated import ANSWERS, BATCH, END, PAD, QUESTIONS, VOCAB, cut, params, run, world
from scipy import stats

from rag_jax.decoding import results
from rag_jax.decoding.answer import begin
from rag_jax.decoding.sampling import truncate
from rag_jax.decoding.settings import Decoding
from rag_jax.marginal import MASKED

KINDS = ["token", "sequence"]
DRAWS = 2000
ASKED = [0, 3, QUESTIONS - 1]  # of the last question one passage alone is real


def samples(kind, count=DRAWS, batch=BATCH, key=0, **settings):
    key = jax.random.key(key) if isinstance(key, int) else key
    return run(params(), batch, kind, 1, key, sample=True, num_return_sequences=count, **settings)


def drawn(kind, **settings):
    """(question, its place among the samples) of each of ASKED, and the samples."""
    found = samples(kind, batch=jax.tree.map(lambda leaf: leaf[ASKED], BATCH), **settings)
    return [(question, row) for row, question in enumerate(ASKED)], found


def assert_frequencies(found, row, expected):
    """Chi-square of the drawn answers against {answer: probability}; rare ones are pooled."""
    counts = collections.Counter(cut(row) for row in found.ranked.tokens[row])
    assert set(counts) <= {y for y, p in expected.items() if p > 0}, "drawn but impossible"
    often = [y for y, p in expected.items() if p * DRAWS >= 5]
    observed = [counts[y] for y in often]
    wanted = [expected[y] * DRAWS for y in often]
    observed.append(DRAWS - sum(observed))
    wanted.append(DRAWS - sum(wanted))
    if wanted[-1] < 5:
        observed, wanted = observed[:-1], wanted[:-1]
        wanted = np.array(wanted) * sum(observed) / sum(wanted)
    if len(wanted) > 1:
        assert stats.chisquare(observed, wanted).pvalue > 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_frequencies_are_the_model_s(kind):
    asked, found = drawn(kind)
    for question, row in asked:
        exact = {y: np.exp(world().log_p(question, y, kind)) for y in ANSWERS}
        assert_frequencies(found, row, exact)
        for place in range(20):
            y = cut(found.ranked.tokens[row, place])
            np.testing.assert_allclose(found.ranked.log_p[row, place],
                                       world().log_p(question, y, kind), rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_temperature_top_k_and_top_p_shape_each_next_token(kind):
    """Against the same three steps in float64, at every prefix."""
    asked, found = drawn(kind, temperature=0.7, top_k=4, top_p=0.8)

    def shaped(log_p):
        p = np.exp(log_p / 0.7)
        p[p < np.sort(p)[-4]] = 0
        p /= p.sum()
        order = np.argsort(-p)
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= 0.8]] = 0
        return p / p.sum()

    for question, row in asked:
        of = world().mixed(question, kind)
        each = {y: np.prod([shaped(of(y[:t]))[y[t]] for t in range(len(y))]) for y in ANSWERS}
        np.testing.assert_allclose(sum(each.values()), 1, rtol=1e-6)
        assert_frequencies(found, row, each)


def test_truncation_leaves_the_distribution_alone_by_default():
    log_p = jax.nn.log_softmax(jnp.array([[2.0, 1.0, 0.5, -3.0]]))
    np.testing.assert_array_equal(truncate(log_p, Decoding(sample=True)), log_p)
    for settings, kept in (({"top_k": 1}, 1), ({"top_k": 9}, 4), ({"top_p": 1e-6}, 1),
                           ({"top_p": 0.7}, 2), ({"top_k": 3, "top_p": 0.999}, 3)):
        logits = truncate(log_p, Decoding(sample=True, **settings))
        assert (np.asarray(logits) > -1e20).sum() == kept, settings


@pytest.mark.parametrize("kept", [{}, {"top_k": 1}, {"top_p": 0.5}])
@pytest.mark.parametrize("temperature", [1e-8, 1e-31, 1e-40])
def test_tiny_temperatures_leave_the_most_probable_token_alone(temperature, kept):
    """Logits that overflow, or fall below those of what the rules forbid, drew token 0."""
    log_p = jnp.array([[MASKED, -6.0, -4.0, -3.6, MASKED]])
    p = jax.nn.softmax(truncate(log_p, Decoding(sample=True, temperature=temperature, **kept)))
    np.testing.assert_allclose(p, [[0, 0, 0, 1, 0]], atol=1e-7)


def test_what_the_rules_forbid_is_never_drawn_at_any_temperature():
    logits = truncate(jnp.array([[MASKED, -1.0, -2.0]]), Decoding(sample=True, temperature=1e32))
    np.testing.assert_allclose(jax.nn.softmax(logits), [[0, 0.5, 0.5]])


def test_samples_follow_the_key_and_not_the_place_in_the_batch():
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(3), jnp.arange(QUESTIONS))
    found = samples("sequence", 8, key=keys)
    order = np.array([2, 5, 0, 3, 4, 1])
    moved = samples("sequence", 8, jax.tree.map(lambda leaf: leaf[order], BATCH), key=keys[order])
    np.testing.assert_array_equal(moved.ranked.tokens, found.ranked.tokens[order])
    other = samples("sequence", 8, key=keys[order])
    assert (other.ranked.tokens != found.ranked.tokens).any()


def test_rules_hold_for_samples():
    found = samples("token", 50, min_length=2, bad_words=((3,),), prefix=(4,))
    for row in found.ranked.tokens.reshape(-1, 3):
        y = cut(row)
        assert y[0] == 4 and 3 not in y
    assert found.ranked.valid.all() and not found.certified.any()


@pytest.mark.parametrize("prefix", [(), (3,)])
def test_samples_for_which_the_rules_leave_no_token_are_no_answers(prefix):
    """Whatever is drawn there is forbidden; in a beam such a question has no answer, too."""
    no_next = tuple((*prefix, token) for token in range(VOCAB) if token != END)
    found = samples("token", 3, min_length=3, bad_words=no_next, prefix=prefix)
    assert not found.ranked.valid.any()


@pytest.mark.parametrize("kind", KINDS)
def test_questions_without_a_passage_keep_no_other_waiting(kind):
    """For whatever they drew would seldom end; nor is any of it an answer's text."""
    settings, ending = Decoding(sample=True, max_length=3), enumerated.with_end_bias(params(), 99)
    batch = BATCH._replace(doc_mask=BATCH.doc_mask & (np.arange(QUESTIONS) < 2)[:, None])
    decoded, growing = tiny.jit(functools.partial(begin, enumerated.model(kind), settings))(
        ending, batch, jax.random.key(0), None, settings.max_length)
    assert growing.state.position == 1
    assert decoded.ranked.valid[:, 0].tolist() == [True, True, *[False] * (QUESTIONS - 2)]
    assert (decoded.ranked.tokens[2:] == PAD).all()


@pytest.mark.parametrize("kind", KINDS)
def test_scores_that_are_not_finite_are_faults_where_no_token_is_left_too(kind):
    """The rules were blamed instead."""
    broken, rules = enumerated.with_end_bias(params(), np.nan), tuple(
        (token,) for token in range(VOCAB) if token != END)
    found = run(broken, BATCH, kind, 1, jax.random.key(0), sample=True, min_length=2,
                bad_words=rules)
    told = results.faults(found)
    assert len(told) == QUESTIONS and all("not finite" in str(one) for one in told.values())


def test_a_sample_that_has_ended_needs_no_next_token():
    found = samples("token", 50, bad_words=tuple((END, token) for token in range(VOCAB)))
    assert (found.ranked.tokens[..., 0] == END).any() and found.ranked.valid.all()


def test_keys_of_either_kind_draw_the_same():
    found = [samples("token", 2, key=key) for key in (jax.random.key(3), jax.random.PRNGKey(3))]
    np.testing.assert_array_equal(*(each.ranked.tokens for each in found))
