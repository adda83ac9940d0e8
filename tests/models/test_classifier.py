"""The classification head, with the documents summed out, against numpy float64."""

import functools

import jax
import naive
import numpy as np
import pytest
import tiny

from rag_jax.models.likelihood import log_likelihood
from rag_jax.training.step import rag_loss

KINDS = ["token", "sequence", "fid"]
CLASSES, SMOOTHING = 3, 0.1


def model(kind):
    return tiny.rag_model(kind, classes=CLASSES)


BATCH = tiny.class_batch(CLASSES, seed=6)
QUESTIONS, DOCS = BATCH.doc_mask.shape


@pytest.fixture(scope="module")
def params():
    return tiny.rag_params(model("token"))


@functools.partial(tiny.jit, static_argnames=("kind", "smoothing"))
def likelihood(params, batch, kind, smoothing=0.0):
    return log_likelihood(model(kind), params, batch, smoothing)


@functools.partial(tiny.jit, static_argnames="kind")
def loss_and_gradient(params, batch, kind):
    return jax.value_and_grad(
        lambda p: rag_loss(model(kind), SMOOTHING)(p, batch, None)[0])(params)


def naive_joint(params, prior, kind, smoothing=0.0):
    """p(z | x) p(c | x, z) [B, K, C] of the real documents; of Fusion-in-Decoder, [B, 1, C]."""
    joint = np.zeros((QUESTIONS, 1 if kind == "fid" else DOCS, CLASSES))
    for b in range(QUESTIONS):
        question = BATCH.decoder_ids[b][BATCH.decoder_mask[b]]
        real = np.flatnonzero(BATCH.doc_mask[b])
        for place, rows in [(0, real)] if kind == "fid" else [(k, [k]) for k in real]:
            read = naive.fused(params["generator"], BATCH.source_ids[b][rows],
                               BATCH.source_mask[b][rows], heads=2)
            log_p = naive.classify(
                params["generator"], params["classifier"], *read, question, tiny.END, heads=2)
            log_p = (1 - smoothing) * log_p + smoothing * log_p.mean()
            joint[b, place] = np.exp(log_p) * (1 if kind == "fid" else prior[b, place])
    return joint


@pytest.mark.parametrize("kind", KINDS)
def test_classes_have_the_naive_probabilities_which_sum_to_one(params, kind):
    """Also p(z | x, c); RAG-Token and RAG-Sequence are one model, as the target is one token."""
    total = np.zeros(QUESTIONS)
    for number in range(CLASSES):
        batch = BATCH._replace(target_ids=np.full((QUESTIONS, 1), number, np.int32))
        found = likelihood(params, batch, kind)
        prior = np.float64(found["prior"])
        joint = naive_joint(params, prior, kind)[:, :, number]
        np.testing.assert_allclose(np.exp(found["log_p"]), joint.sum(axis=1), rtol=1e-5)
        posterior = prior if kind == "fid" else joint / joint.sum(axis=1, keepdims=True)
        np.testing.assert_allclose(found["posterior"], posterior, rtol=1e-4, atol=1e-6)
        total += np.exp(np.float64(found["log_p"]))
    np.testing.assert_allclose(total, 1, rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_the_sum_of_minus_log_p_of_the_right_class(params, kind):
    loss, _ = loss_and_gradient(params, BATCH, kind)
    prior = np.float64(likelihood(params, BATCH, kind)["prior"])
    joint = naive_joint(params, prior, kind, SMOOTHING).sum(axis=1)
    right = joint[np.arange(QUESTIONS), BATCH.target_ids[:, 0]]
    np.testing.assert_allclose(loss, -np.log(right).sum(), rtol=1e-5)


def test_one_document_has_its_own_probabilities(params):
    alone = BATCH._replace(**{name: getattr(BATCH, name)[:, :1] for name in (
        "source_ids", "source_mask", "doc_embeddings", "doc_mask", "doc_ids")})
    found = [likelihood(params, alone, kind) for kind in KINDS]
    prior = np.eye(1, DOCS)[[0] * QUESTIONS]
    expected = naive_joint(params, prior, "token").sum(axis=1)
    for each in found:
        np.testing.assert_allclose(
            np.exp(each["log_p"]), expected[np.arange(QUESTIONS), BATCH.target_ids[:, 0]],
            rtol=1e-5)
        np.testing.assert_allclose(each["posterior"], 1, rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_missing_documents_and_padding_change_neither_loss_nor_gradient(params, kind):
    """Padding of the decoder's question among it."""
    missing = ~BATCH.doc_mask[..., None]
    junk = BATCH._replace(
        source_ids=np.where(BATCH.source_mask & ~missing, BATCH.source_ids,
                            (BATCH.source_ids + 11) % 38),
        doc_embeddings=np.where(missing, np.float32(9), BATCH.doc_embeddings),
        decoder_ids=np.where(BATCH.decoder_mask, BATCH.decoder_ids, 7))
    assert (junk.decoder_ids != BATCH.decoder_ids).any()
    loss, grads = loss_and_gradient(params, BATCH, kind)
    junk_loss, junk_grads = loss_and_gradient(params, junk, kind)
    np.testing.assert_allclose(junk_loss, loss, rtol=1e-6)
    tiny.assert_trees_close(junk_grads, grads, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_reaches_every_tower_that_the_loss_depends_on(params, kind):
    _, grads = loss_and_gradient(params, BATCH, kind)
    reached = {"generator", "classifier"} | ({"query_encoder"} if kind != "fid" else set())
    for tower, tree in grads.items():
        assert tiny.is_zero(tree) == (tower not in reached), tower
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads["classifier"]):
        assert np.asarray(leaf).any(), jax.tree_util.keystr(path)
    embedding = grads["generator"].pop("final_logits_bias")
    assert not np.asarray(embedding).any(), "no token is predicted"


def test_dropout_falls_on_the_states_and_on_the_hidden_layer(params):
    """Seen through an output layer that is the identity."""
    head = tiny.rag_model("token", classes=16, generator={"dropout": 0.5}).classifier_module
    identity = {"dense": params["classifier"]["dense"],
                "out": {"kernel": np.eye(16, dtype=np.float32), "bias": np.zeros(16, np.float32)}}
    state = np.random.default_rng(0).normal(size=(4, 16)).astype(np.float32)
    still = np.asarray(head.apply({"params": identity}, state))
    np.testing.assert_allclose(
        still, np.tanh(naive.linear(state, identity["dense"])), rtol=1e-4, atol=1e-6)
    drawn = np.asarray(head.apply(
        {"params": identity}, state, False, rngs={"dropout": jax.random.key(0)}))
    kept = drawn != 0
    assert 0.2 < kept.mean() < 0.8, "of the hidden layer"
    assert (np.abs(drawn / 2 - still) > 1e-3)[kept].mean() > 0.5, "of the states"


def test_a_classifier_is_a_tower_of_its_own():
    plain = tiny.rag_model("token")
    assert model("token").towers == (*plain.towers, "classifier")
    shapes = jax.eval_shape(lambda: plain.init(jax.random.key(0)))
    assert set(shapes) == set(plain.towers)
