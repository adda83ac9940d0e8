"""Classification against sums over documents in float64."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import tiny
from enumerated import BATCH, END, QUESTIONS, model, params, world

from rag_jax.decoding.answer import decode
from rag_jax.decoding.settings import Decoding
from rag_jax.models.likelihood import log_likelihood

KINDS = ["token", "sequence"]


def run(kind, labels, **settings):
    """The ranking of the labels for every question."""
    decoding = Decoding(labels=labels, max_length=8, **settings)
    found = jax.device_get(tiny.jit(functools.partial(decode, model(kind), decoding))(
        params(), BATCH))
    order = np.argsort(-found.ranked.log_p, axis=1)
    np.testing.assert_array_equal(order, np.broadcast_to(np.arange(len(labels)), order.shape))
    assert found.certified.all()
    assert found.ranked.finished.all(), "every class of one token was said to be cut"
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


NAMES = ((3, END), (0, 4, END), (5, END))
CLAIMS = tiny.class_batch(3, seed=2, questions=6)


@functools.cache
def head(kind):
    """(model, parameters, settings, answers) of a classifier."""
    built = tiny.rag_model(kind, classes=3)
    weights = tiny.rag_params(built, seed=1)
    weights["classifier"]["out"] = {"kernel": 4 * weights["classifier"]["out"]["kernel"],
                                    "bias": np.zeros(3, np.float32)}  # the claim decides
    settings = Decoding(labels=NAMES, max_length=4)
    return built, weights, settings, jax.device_get(tiny.jit(functools.partial(
        decode, built, settings))(weights, CLAIMS))


def test_without_any_passage_no_class_is_an_answer():
    """They were, certified, as likely as each other."""
    built, weights, settings, found = head("token")
    some = np.arange(len(CLAIMS.doc_mask)) > 0
    rows = CLAIMS._replace(doc_mask=CLAIMS.doc_mask & some[:, None])
    alone = jax.device_get(tiny.jit(functools.partial(decode, built, settings))(weights, rows))
    np.testing.assert_array_equal(alone.ranked.valid, found.ranked.valid & some[:, None])
    np.testing.assert_array_equal(alone.certified, found.certified & some)
    assert found.ranked.valid.all() and found.certified.all()


@pytest.mark.parametrize("kind", ["token", "fid"])
def test_a_head_ranks_its_classes_as_training_scores_them(kind):
    """Every class's log p, prior and posterior are `log_likelihood`'s with it as the target."""
    built, weights, _, found = head(kind)
    forced = tiny.jit(functools.partial(log_likelihood, built))
    log_p = np.zeros((len(CLAIMS.weight), 3))
    for number, name in enumerate(NAMES):
        target = np.full((len(CLAIMS.weight), 1), number, np.int32)
        expected = forced(weights, CLAIMS._replace(target_ids=target))
        log_p[:, number] = expected["log_p"]
        for question in range(len(log_p)):
            place = places(found.ranked, question, NAMES)[number]
            np.testing.assert_allclose(found.ranked.log_p[question, place],
                                       expected["log_p"][question], rtol=1e-5, atol=1e-7)
            steps = found.ranked.token_log_p[question, place]
            assert steps[0] == found.ranked.log_p[question, place] and not steps[1:].any()
            posterior = found.ranked.posterior[question, place]
            by_token = found.ranked.token_posterior[question, place]
            np.testing.assert_array_equal(
                by_token[:, : len(name)], np.repeat(posterior[:, None], len(name), axis=1))
            if kind != "fid":
                np.testing.assert_allclose(posterior, expected["posterior"][question], rtol=1e-5,
                                           atol=1e-7)
    np.testing.assert_array_equal(np.argsort(-found.ranked.log_p, axis=1),
                                  np.broadcast_to(np.arange(3), log_p.shape))
    np.testing.assert_allclose(np.exp(found.ranked.log_p).sum(axis=1), 1, rtol=1e-5)
    np.testing.assert_allclose(found.prior, expected["prior"], rtol=1e-6)
    assert found.certified.all() and found.best.finished.all()
    assert (np.argsort(-log_p, axis=1) != np.arange(3)[None]).any(), "the given order is no ranking"


def test_labels_are_certified_whatever_is_said_of_a_search():
    """A length penalty or a forced </s>, which rank no label, took the certificate away."""
    assert Decoding(labels=NAMES, length_penalty=1.0, forced_eos=True).certifies(model("token"))
    assert not Decoding(length_penalty=1.0).certifies(model("token"))


def test_no_label_is_certified_in_bfloat16():
    """Their order may be that of the rounding."""
    built, weights, settings, _ = head("token")
    rounded = dataclasses.replace(built, generator=dataclasses.replace(
        built.generator, dtype="bfloat16"))
    found = tiny.jit(functools.partial(decode, rounded, settings))(weights, CLAIMS)
    assert not found.certified.any()


def test_all_labels_come_back_however_many_answers_are_asked_for():
    """Three of them were refused, as more than num_beams, which classes have nothing to do with."""
    assert Decoding(labels=NAMES, max_length=4, num_return_sequences=3).num_beams == 1


def test_a_heads_labels_must_be_its_classes():
    built, weights, settings, _ = head("token")
    with pytest.raises(ValueError, match="the classifier has 3 classes"):
        decode(built, dataclasses.replace(settings, labels=NAMES[:2]), weights, CLAIMS)


@pytest.mark.parametrize("labels, settings, word", [
    (((),), {}, "at least one token"), (((1,), (1,)), {}, "equal"),
    (((7,),), {}, "vocab_size=5"), (((0,) * 9,), {}, "max_length=8"),
    (((1,),), {"sample": True}, "not drawn")])
def test_bad_labels_are_refused(labels, settings, word):
    with pytest.raises(ValueError, match=word):
        run("token", labels, **settings)
