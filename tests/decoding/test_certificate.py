"""Certificates and best-first search against enumeration."""

import jax
import numpy as np
import pytest
import tiny
from enumerated import (
    BATCH,
    ENDED,
    LONGEST,
    PAD,
    QUESTIONS,
    answers,
    model,
    params,
    run,
    with_end_bias,
    world,
)

from rag_jax.decoding.certificate import exact
from rag_jax.decoding.settings import Decoding

WAYS = [("token", "thorough"), ("sequence", "thorough"), ("sequence", "marginal")]
SEEDS = (7, 8, 9)


def best(question, kind, seed, allowed=ENDED):
    return max(allowed, key=lambda y: world(seed).log_p(question, y, kind))


def find(kind, seed=7, batch=BATCH, weights=None, budget=1000, **settings):
    weights = params(seed) if weights is None else weights
    start = run(weights, batch, kind, 1) if not settings else None
    settings = Decoding(**{"max_length": LONGEST, "num_beams": 1, **settings})
    return exact(model(kind), settings, weights, batch, budget, 4, start, jit=tiny.jit)


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("kind, strategy", WAYS)
def test_a_certified_answer_is_the_argmax(kind, strategy, width):
    """And an uncertified one may not be; the bound covers whatever was not returned."""
    certified, wrong = 0, 0
    for seed in SEEDS:
        found = run(params(seed), BATCH, kind, width, strategy=strategy)
        for question, y in enumerate(answers(found)):
            right = y == best(question, kind, seed)
            assert right or not found.certified[question]
            certified += found.certified[question]
            wrong += not right
    assert certified > 3 and (wrong or width > 1)


@pytest.mark.parametrize("kind", ["token", "sequence"])
def test_exact_search_finds_and_proves_the_argmax_from_a_greedy_guess(kind):
    changed = 0
    for seed in SEEDS:
        found = find(kind, seed)
        assert found.certified.all()
        guess = answers(run(params(seed), BATCH, kind, 1))
        for question in range(QUESTIONS):
            y = best(question, kind, seed)
            row = found.ranked.tokens[question, 0].tolist()
            assert row == [*y, *[PAD] * (LONGEST - len(y))]
            np.testing.assert_allclose(found.ranked.log_p[question, 0],
                                       world(seed).log_p(question, y, kind), rtol=1e-5)
            changed += guess[question] != y
    assert changed, "greedy was always right"


@pytest.mark.parametrize("kind", ["sequence"])
def test_exact_search_keeps_to_the_rules(kind):
    found = find(kind, min_length=3, bad_words=((0,),), prefix=(4,))
    allowed = [y for y in ENDED if len(y) >= 3 and 0 not in y and y[0] == 4]
    assert found.certified.all()
    for question in range(QUESTIONS):
        y = best(question, kind, 7, allowed)
        assert found.ranked.tokens[question, 0].tolist()[: len(y)] == list(y)


def test_a_spent_budget_certifies_nothing_more_and_keeps_the_guess():
    guess = run(params(), BATCH, "token", 1)
    assert not guess.certified.all()
    found = find("token", budget=0)
    np.testing.assert_array_equal(found.ranked.tokens[:, 0], guess.tokens)
    np.testing.assert_array_equal(found.certified, guess.certified)
    assert not found.expanded.any()
    partly = find("token", budget=2)
    assert (partly.expanded <= 2).all() and partly.expanded.any()
    for question in np.flatnonzero(partly.certified):
        y = best(question, "token", 7)
        assert partly.ranked.tokens[question, 0].tolist()[: len(y)] == list(y)


def test_a_certified_start_is_not_searched_again():
    start = run(params(), BATCH, "token", 85)
    found = exact(model("token"), Decoding(max_length=LONGEST), params(), BATCH, start=start)
    assert found.certified.all() and not found.expanded.any()
    np.testing.assert_array_equal(found.ranked.tokens[:, 0], start.tokens)


def test_where_nothing_likely_ends_the_search_still_finds_the_best_that_does():
    """The greedy guess is cut at the limit: there is no incumbent to prune with."""
    weights = with_end_bias(params(), -8.0)
    guess = run(weights, BATCH, "token", 1)
    assert not guess.finished.all()
    found = find("token", weights=weights)
    assert found.certified.all() and found.ranked.finished.all()
    full = run(weights, BATCH, "token", 85)
    np.testing.assert_array_equal(found.ranked.tokens[:, 0], full.tokens)


def test_questions_without_documents_are_left_alone():
    batch = BATCH._replace(doc_mask=BATCH.doc_mask & (np.arange(QUESTIONS) != 1)[:, None])
    found = find("sequence", batch=batch)
    assert found.certified.tolist() == [q != 1 for q in range(QUESTIONS)]
    assert not any(np.isnan(leaf).any() for leaf in jax.tree.leaves(found))


@pytest.mark.parametrize("settings", [
    {"length_penalty": 1.0, "num_beams": 2}, {"forced_eos": True}, {"sample": True}])
def test_settings_under_which_probability_does_not_decide_are_refused(settings):
    with pytest.raises(ValueError, match="length_penalty=0"):
        find("token", **settings)
