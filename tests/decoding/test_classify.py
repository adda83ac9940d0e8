"""Classification against sums over documents in float64."""

import functools

import jax
import numpy as np
import pytest
import tiny
from enumerated import BATCH, END, QUESTIONS, model, params, world

from rag_jax.decoding.classify import classify

KINDS = ["token", "sequence"]


def run(kind, labels, batch=BATCH, **settings):
    found = tiny.jit(functools.partial(classify, model(kind), labels=labels, **settings))(
        params(), batch)
    return jax.device_get(found)


@pytest.mark.parametrize("kind", KINDS)
def test_one_token_labels_are_the_normalised_first_token(kind):
    """No </s> is counted; both models are the same then."""
    found = run(kind, ((3,), (0,), (4,)))
    for question in range(QUESTIONS):
        p = np.exp(world().mixed(question, kind)(()))[[3, 0, 4]]
        np.testing.assert_allclose(np.exp(found.log_p[question]), p, rtol=1e-5)
        np.testing.assert_allclose(found.p[question], p / p.sum(), rtol=1e-5)
        joint = np.exp(world().prior[question] + world().table[()][question, :, 0])
        np.testing.assert_allclose(found.posterior[question, 1], joint / joint.sum(), rtol=1e-4,
                                   atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_label_strings_count_their_own_tokens_and_no_padding(kind):
    labels = ((0, END), (3, 4, END), (3, 1))
    found = run(kind, labels)
    for question in range(QUESTIONS):
        log_p = np.array([world().log_p(question, y, kind) for y in labels])
        np.testing.assert_allclose(found.log_p[question], log_p, rtol=1e-5)
        np.testing.assert_allclose(found.p[question], np.exp(log_p) / np.exp(log_p).sum(),
                                   rtol=1e-5)
    assert len(set(found.p.argmax(axis=1))) > 1, "one class for all proves little"


def test_the_budget_changes_nothing(monkeypatch):
    from rag_jax.decoding import scoring
    labels = ((0, END), (3, 4, END), (3, 1))
    expected = run("sequence", labels)
    monkeypatch.setattr(scoring, "candidates_at_once", lambda *a: 2)
    for a, b in zip(run("sequence", labels), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("labels, word", [
    ((), "at least one label"), (((),), "at least one token"), (((1,), (1,)), "equal"),
    (((7,),), "vocab_size=5"), (((0,) * 9,), "8 positions")])
def test_bad_labels_are_refused(labels, word):
    with pytest.raises(ValueError, match=word):
        classify(model("token"), {}, BATCH, labels)
