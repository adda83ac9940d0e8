"""The null document's three scores, and what it does to the likelihood and to every decoder."""

import dataclasses
import functools

import jax
import naive
import numpy as np
import pytest
import tiny

from rag_jax.decoding import documents
from rag_jax.decoding.answer import decode
from rag_jax.decoding.settings import Decoding
from rag_jax.models import likelihood, rag, teacher_forcing

NULLS = ["embedding", "bias", "mlp"]
WIDTH = tiny.BERT.width


def model(null, kind="token", lexical=False):
    return dataclasses.replace(
        tiny.rag_model(kind, generator={"vocab_size": 5}), null_document=null, lexical=lexical)


def batch():
    """A batch whose last input is the question alone; the last row has one real passage."""
    made = tiny.rag_batch(passages=4, model=model("none"))
    return made._replace(doc_embeddings=made.doc_embeddings[:, :3], doc_mask=made.doc_mask[:, :3],
                         doc_ids=None)


BATCH = batch()


@functools.cache
def params(null, lexical=False):
    return tiny.rag_params(model(null, lexical=lexical))


def queries(params):
    zeros = np.zeros_like(BATCH.question_ids[0])
    return np.array([naive.bert(params["query_encoder"]["bert"], ids, mask, zeros, heads=2)[0]
                     for ids, mask in zip(BATCH.question_ids, BATCH.question_mask, strict=True)])


def null_score(null, tower, query):
    """float64[B] by the definitions of appendix F."""
    if null == "embedding":
        return query @ naive.f64(tower["embedding"])
    if null == "bias":
        return np.full(len(query), naive.f64(tower["bias"]))
    return naive.linear(np.tanh(naive.linear(query, tower["hidden"])), tower["score"])[:, 0]


@pytest.mark.parametrize("null", NULLS)
def test_the_prior_has_one_more_document_with_this_score(null):
    weights = params(null)
    found = tiny.jit(functools.partial(likelihood.log_prior, model(null)))(weights, BATCH)
    query = queries(weights)
    scores = np.einsum("be,bke->bk", query, naive.f64(BATCH.doc_embeddings))
    scores = np.where(BATCH.doc_mask, scores, -1e30)
    last = null_score(null, weights["null_document"], query)
    expected = naive.log_softmax(np.concatenate([scores, last[:, None]], axis=1))
    np.testing.assert_allclose(np.exp(found), np.exp(expected), rtol=1e-4, atol=1e-6)
    assert (np.exp(expected[:, -1]) > 1e-3).all() and (np.exp(expected[:, -1]) < 0.999).all()


def with_passage(weights):
    """The same batch for a model without a null document: a passage with its embedding."""
    extra = np.broadcast_to(np.asarray(weights["null_document"]["embedding"]), (3, 1, WIDTH))
    return BATCH._replace(
        doc_embeddings=np.concatenate([BATCH.doc_embeddings, extra], axis=1),
        doc_mask=np.pad(BATCH.doc_mask, ((0, 0), (0, 1)), constant_values=True))


def assert_same(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        if a.dtype.kind == "f":
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        else:
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("kind", ["token", "sequence"])
def test_a_learned_embedding_is_a_passage_of_that_embedding(kind):
    """Likelihood, prior and posterior; and log p without a document is that of the input alone."""
    weights = params("embedding")
    found = tiny.jit(functools.partial(likelihood.log_likelihood, model("embedding", kind)))(
        weights, BATCH)
    expected = tiny.jit(functools.partial(likelihood.log_likelihood, model("none", kind)))(
        weights, with_passage(weights))
    alone = tiny.jit(functools.partial(teacher_forcing.seq2seq_log_probs, model("none")))(
        weights["generator"], BATCH.source_ids[:, -1], BATCH.source_mask[:, -1], BATCH.target_ids)
    without = np.where(BATCH.target_mask, alone, 0).sum(axis=1)
    np.testing.assert_allclose(found.pop("log_p_null"), without, rtol=1e-5)
    assert_same(found, expected)
    assert np.abs(found["log_p"] - without).min() > 1e-3


def test_the_decoders_read_it_as_one_more_document():
    """What every way of decoding begins with, and one of them to its end."""
    weights = params("embedding")
    found, expected = (
        tiny.jit(functools.partial(documents.read, model(null)))(weights, rows)
        for null, rows in (("embedding", BATCH), ("none", with_passage(weights))))
    assert found.log_prior.shape == (3, 4)
    assert_same(found, expected)
    settings = Decoding(num_beams=2, max_length=3)
    found, expected = (
        tiny.jit(functools.partial(decode, model(null, "sequence"), settings))(weights, rows)
        for null, rows in (("embedding", BATCH), ("none", with_passage(weights))))
    assert_same(found, expected)


@pytest.mark.parametrize("null", NULLS)
def test_it_trains(null):
    """d log p(z | x) / d score = - p(null | x) of every other document z."""
    weights = params(null)

    def first(tower):
        prior = likelihood.log_prior(model(null), {**weights, rag.NULL: tower}, BATCH)
        return prior[:, 0].sum(), prior

    grads, prior = tiny.jit(jax.grad(first, has_aux=True))(weights[rag.NULL])
    p_null, query = np.exp(naive.f64(prior))[:, -1], queries(weights)
    if null == "bias":
        np.testing.assert_allclose(grads["bias"], -p_null.sum(), rtol=1e-4)
    elif null == "embedding":
        np.testing.assert_allclose(grads["embedding"], -p_null @ query, rtol=1e-3, atol=1e-5)
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
        assert np.asarray(leaf).any(), jax.tree_util.keystr(path)


def test_bm25_scores_are_the_logits_of_the_prior():
    """Raw, as in table 6, with and without a null document; no encoder is there to be read."""
    rng = np.random.default_rng(0)
    scores = rng.gamma(2, 3, (3, 3)).astype(np.float32)
    rows = BATCH._replace(doc_embeddings=None, doc_scores=scores)
    for null in ("none", "bias"):
        weights = params(null, lexical=True)
        assert set(weights) == {"generator", *(["null_document"] if null == "bias" else [])}
        logits = np.where(BATCH.doc_mask, naive.f64(scores), -1e30)
        if null == "bias":
            bias = np.full((3, 1), naive.f64(weights["null_document"]["bias"]))
            logits = np.concatenate([logits, bias], axis=1)
        found = likelihood.log_prior(model(null, lexical=True), weights, rows)
        np.testing.assert_allclose(np.exp(found), np.exp(naive.log_softmax(logits)), rtol=1e-5,
                                   atol=1e-7)


def test_words_alone_have_no_vectors_and_a_closed_book_no_scores():
    """Both were KeyErrors in the first step: of in-batch negatives, and without passages."""
    built = model("none", lexical=True)
    weights, rows = params("none", lexical=True), tiny.rag_batch(passages=3, model=model("none"))
    rows = rows._replace(doc_scores=np.zeros(rows.doc_mask.shape), doc_embeddings=None)
    one, other = (likelihood.log_likelihood(
        built, weights, rows, in_batch_negatives=negatives)["log_p"] for negatives in (False, True))
    np.testing.assert_array_equal(one, other)
    closed = likelihood.log_likelihood(built, weights, rows._replace(doc_scores=None))["log_p"]
    np.testing.assert_array_equal(closed, one)
