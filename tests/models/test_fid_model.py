"""Fusion-in-Decoder against encoder states concatenated by hand, in numpy float64."""

import functools

import jax
import naive
import numpy as np
import pytest
import tiny

from rag_jax.models.likelihood import log_likelihood
from rag_jax.training.step import rag_loss

MODEL = tiny.rag_model("fid")
BATCH = tiny.rag_batch(seed=4, model=MODEL)
QUESTIONS = len(BATCH.weight)
SMOOTHING = 0.1


@pytest.fixture(scope="module")
def params():
    return tiny.rag_params(MODEL)


@functools.partial(tiny.jit, static_argnames=("kind", "smoothing"))
def likelihood(params, batch, kind="fid", smoothing=0.0):
    return log_likelihood(tiny.rag_model(kind), params, batch, smoothing)


@tiny.jit
def loss_and_gradient(params, batch):
    return jax.value_and_grad(lambda p: rag_loss(MODEL, SMOOTHING)(p, batch, None)[0])(params)


def naive_log_p(generator, smoothing):
    """log p(y | x) [B] of the real passages' states side by side."""
    found = []
    for b in range(QUESTIONS):
        real = BATCH.doc_mask[b]
        encoded, mask = naive.fused(
            generator, BATCH.source_ids[b][real], BATCH.source_mask[b][real], heads=2)
        length = int(BATCH.target_mask[b].sum())
        targets = BATCH.target_ids[b][:length]
        states = naive.bart_decode(generator, encoded, mask, [tiny.END, *targets[:-1]], heads=2)
        log_p = naive.log_softmax(naive.bart_output(generator, states))
        picked = log_p[np.arange(length), targets]
        found.append(((1 - smoothing) * picked + smoothing * log_p.mean(axis=1)).sum())
    return np.array(found)


@pytest.mark.parametrize("smoothing", [0.0, SMOOTHING])
def test_likelihood_is_that_of_the_concatenated_states(params, smoothing):
    found = likelihood(params, BATCH, smoothing=smoothing)
    expected = naive_log_p(params["generator"], smoothing)
    np.testing.assert_allclose(found["objective"], expected, rtol=1e-5)
    np.testing.assert_allclose(found["log_p"], naive_log_p(params["generator"], 0.0), rtol=1e-5)
    assert np.abs(found["log_p"] - likelihood(params, BATCH, "token")["log_p"])[0] > 1e-2


def test_prior_and_posterior_are_the_retrievers(params):
    with jax.disable_jit():  # two programs may round one operation in different ways
        found, retrieved = likelihood(params, BATCH), likelihood(params, BATCH, "token")
    np.testing.assert_array_equal(found["prior"], retrieved["prior"])
    np.testing.assert_array_equal(found["posterior"], found["prior"])


@pytest.mark.parametrize("kind", ["token", "sequence"])
def test_one_passage_is_rag_with_one_passage(params, kind):
    alone = BATCH._replace(source_ids=BATCH.source_ids[:, :1], source_mask=BATCH.source_mask[:, :1],
                           doc_embeddings=BATCH.doc_embeddings[:, :1],
                           doc_mask=BATCH.doc_mask[:, :1], doc_ids=BATCH.doc_ids[:, :1])
    found, expected = likelihood(params, alone), likelihood(params, alone, kind)
    np.testing.assert_allclose(found["log_p"], expected["log_p"], rtol=1e-5)
    # The others of a question masked: the same question.
    masked = BATCH._replace(doc_mask=np.arange(3)[None] == np.zeros((QUESTIONS, 1), int))
    np.testing.assert_allclose(likelihood(params, masked)["log_p"], expected["log_p"], rtol=1e-5)


def test_order_of_passages_is_irrelevant(params):
    parts = ("source_ids", "source_mask", "doc_embeddings", "doc_mask", "doc_ids")
    moved = BATCH._replace(**{name: getattr(BATCH, name)[:, [2, 0, 1]] for name in parts})
    np.testing.assert_allclose(likelihood(params, moved)["log_p"],
                               likelihood(params, BATCH)["log_p"], rtol=1e-5)


def test_missing_passages_and_padding_change_neither_loss_nor_gradient(params):
    missing = ~BATCH.doc_mask[..., None]
    junk = BATCH._replace(
        source_ids=np.where(BATCH.source_mask & ~missing, BATCH.source_ids,
                            (BATCH.source_ids + 11) % 38),
        source_mask=BATCH.source_mask | missing)
    assert (junk.source_ids != BATCH.source_ids).any()
    loss, grads = loss_and_gradient(params, BATCH)
    junk_loss, junk_grads = loss_and_gradient(params, junk)
    np.testing.assert_allclose(junk_loss, loss, rtol=1e-6)
    tiny.assert_trees_close(junk_grads, grads, rtol=1e-5, atol=1e-6)


def test_the_gradient_is_that_of_the_naive_likelihood_and_the_generators_alone(params):
    """By central differences in float64 along random directions."""
    _, grads = loss_and_gradient(params, BATCH)
    assert tiny.is_zero(grads["query_encoder"]) and tiny.is_zero(grads["document_encoder"])
    rng, generator = np.random.default_rng(0), jax.tree.map(np.float64, params["generator"])
    for _ in range(3):
        along = jax.tree.map(lambda x: rng.normal(size=x.shape), generator)
        ahead, behind = (
            naive_log_p(jax.tree.map(lambda x, d, s=s: x + s * d, generator, along), SMOOTHING)
            for s in (1e-5, -1e-5))
        slope = sum(np.sum(np.float64(g) * d) for g, d in zip(
            jax.tree.leaves(grads["generator"]), jax.tree.leaves(along), strict=True))
        np.testing.assert_allclose(slope, -(ahead - behind).sum() / 2e-5, rtol=1e-4)


def test_a_filler_row_without_any_passage_has_no_influence(params):
    filler = BATCH._replace(weight=np.float32([1, 1, 0]))
    empty = filler._replace(doc_mask=BATCH.doc_mask & (np.arange(3) < 2)[:, None])
    loss, grads = loss_and_gradient(params, filler)
    np.testing.assert_allclose(loss, -naive_log_p(params["generator"], SMOOTHING)[:2].sum(),
                               rtol=1e-5)
    empty_loss, empty_grads = loss_and_gradient(params, empty)
    np.testing.assert_allclose(empty_loss, loss, rtol=1e-6)
    tiny.assert_trees_close(empty_grads, grads, rtol=1e-5, atol=1e-6)
