"""Classification against sums over documents in float64."""

import functools

import jax
import numpy as np
import pytest
import tiny
from enumerated import BATCH, END, QUESTIONS, model, params, world

from rag_jax.decoding.answer import decode_by
from rag_jax.decoding.settings import Decoding

KINDS = ["token", "sequence"]


def run(kind, labels, **settings):
    """The ranking of the labels for every question."""
    decoding = Decoding(labels=labels, max_length=8, **settings)
    found = jax.device_get(tiny.jit(functools.partial(decode_by, model(kind), decoding))(
        params(), BATCH))
    order = np.argsort(-found.ranked.log_p, axis=1)
    np.testing.assert_array_equal(order, np.broadcast_to(np.arange(len(labels)), order.shape))
    assert found.certified.all()
    return found.ranked


def places(ranked, question, labels):
    """Where each label stands in the ranking of a question."""
    rows = [tuple(row) for row in ranked.tokens[question].tolist()]
    longest = max(map(len, labels))
    pad = model("token").pad_id
    return [rows.index((*label, *[pad] * (longest - len(label)))) for label in labels]


@pytest.mark.parametrize("kind", KINDS)
def test_one_token_labels_are_the_normalised_first_token(kind):
    """No </s> is counted; both models are the same then."""
    labels = ((3,), (0,), (4,))
    found = run(kind, labels)
    for question in range(QUESTIONS):
        at = places(found, question, labels)
        p = np.exp(world().mixed(question, kind)(()))[[3, 0, 4]]
        np.testing.assert_allclose(np.exp(found.token_log_p[question, at, 0]), p, rtol=1e-5)
        np.testing.assert_allclose(np.exp(found.log_p[question, at]), p / p.sum(), rtol=1e-5)
        joint = np.exp(world().prior[question] + world().table[()][question, :, 0])
        np.testing.assert_allclose(found.posterior[question, at[1]], joint / joint.sum(),
                                   rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_label_strings_count_their_own_tokens_and_no_padding(kind):
    labels, best = ((0, END), (3, 4, END), (3, 1)), set()
    found = run(kind, labels)
    for question in range(QUESTIONS):
        at = places(found, question, labels)
        log_p = np.array([world().log_p(question, y, kind) for y in labels])
        np.testing.assert_allclose(found.token_log_p[question, at].sum(axis=-1), log_p, rtol=1e-5)
        np.testing.assert_allclose(np.exp(found.log_p[question, at]),
                                   np.exp(log_p) / np.exp(log_p).sum(), rtol=1e-5)
        best.add(at.index(0))
    assert len(best) > 1, "one class for all proves little"


def test_the_budget_changes_nothing(monkeypatch):
    from rag_jax.decoding import scoring
    labels = ((0, END), (3, 4, END), (3, 1))
    expected = run("sequence", labels)
    monkeypatch.setattr(scoring, "candidates_at_once", lambda *a: 2)
    for a, b in zip(run("sequence", labels), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("labels, settings, word", [
    (((),), {}, "at least one token"), (((1,), (1,)), {}, "equal"),
    (((7,),), {}, "vocab_size=5"), (((0,) * 9,), {}, "max_length=8"),
    (((1,),), {"sample": True}, "not drawn")])
def test_bad_labels_are_refused(labels, settings, word):
    with pytest.raises(ValueError, match=word):
        run("token", labels, **settings)
