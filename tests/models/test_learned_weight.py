"""The weight of words as a parameter: its likelihood and gradient in float64, and where it goes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import naive
import numpy as np
import pytest
import tiny

from rag_jax import parallel
from rag_jax.config import MeshConfig, OptimizerConfig
from rag_jax.fusion import Fusion
from rag_jax.models import rag
from rag_jax.models.likelihood import log_likelihood, log_prior, token_log_probs
from rag_jax.training import optim, step

BATCH = tiny.rag_batch(passages=4)._replace(
    doc_scores=np.random.default_rng(1).gamma(2, 3, (3, 4)).astype(np.float32))


def model(kind="token", weight=0.3):
    return dataclasses.replace(tiny.rag_model(kind), fusion=Fusion("convex", weight, learned=True))


@functools.cache
def params():
    return tiny.rag_params(model())


@functools.cache
def dense_scores():
    """float64[B, K]: inner products of the query vectors with the passages'."""
    encoder = params()["query_encoder"]
    queries = np.array([
        naive.bert(encoder["bert"], ids, mask, np.zeros_like(ids), heads=2)[0]
        for ids, mask in zip(BATCH.question_ids, BATCH.question_mask, strict=True)])
    return np.einsum("be,bke->bk", queries, naive.f64(BATCH.doc_embeddings))


def likelihood(kind, logit, token_log_p):
    """log p(y | x) float64[B], every passage and token by itself."""
    weight = 1 / (1 + np.exp(-logit))
    scores = (1 - weight) * dense_scores() + weight * naive.f64(BATCH.doc_scores)
    total = []
    for b, row in enumerate(scores):
        docs = np.flatnonzero(BATCH.doc_mask[b])
        prior = np.exp(naive.log_softmax(row[docs]))
        p = np.exp(naive.f64(token_log_p[b, docs]))[:, BATCH.target_mask[b]]
        total.append(np.log(prior @ p.prod(axis=1)) if kind == "sequence"
                     else np.log(prior @ p).sum())
    return np.array(total)


def test_it_begins_at_the_configured_weight():
    first = tiny.jit(model(weight=0.3).init, static_argnums=1)(jax.random.key(0), (rag.FUSION,))
    np.testing.assert_allclose(rag.word_weight(model(), jax.tree.map(
        lambda box: box.value, first, is_leaf=lambda x: hasattr(x, "value"))), 0.3, rtol=1e-6)
    fixed = dataclasses.replace(model(), fusion=Fusion("convex", 0.3))
    assert rag.FUSION not in fixed.towers and rag.word_weight(fixed, {}) == 0.3


@pytest.mark.parametrize("fusion", [Fusion("reciprocal_rank"), Fusion("convex", 0.3)])
def test_what_is_missing_takes_no_rank(fusion):
    """The zeros of a missing passage ranked above passages with negative scores."""
    fused = dataclasses.replace(tiny.rag_model(), fusion=fusion)
    batch = BATCH._replace(doc_scores=BATCH.doc_scores - 30)

    def prior(batch):
        return jax.jit(functools.partial(log_prior, fused))(params(), batch)

    missing = batch.doc_mask & (np.arange(4) < 2)
    narrow = batch._replace(**{name: getattr(batch, name)[:, :2] for name in (
        "doc_mask", "doc_embeddings", "doc_scores", "source_ids", "source_mask", "doc_ids")})
    zeros = batch._replace(doc_mask=missing, doc_scores=np.where(missing, batch.doc_scores, 0))
    np.testing.assert_allclose(prior(zeros)[:, :2], prior(narrow), rtol=1e-6)


@pytest.mark.parametrize("kind", ["token", "sequence"])
def test_loss_and_gradient_are_those_of_the_likelihood_in_float64(kind):
    """The gradient by central differences of every passage's and token's probability."""
    weights = params()

    @tiny.jit
    def measured(logit):
        def value(logit):
            given = {**weights, rag.FUSION: {"logit": logit}}
            out = log_likelihood(model(kind), given, BATCH)
            return out["objective"].sum(), out["log_p"]
        return (jax.grad(value, has_aux=True)(logit),
                token_log_probs(model(kind), weights, BATCH)[0])

    for logit in (-2.0, 0.4):
        (gradient, log_p), token_log_p = measured(jnp.float32(logit))
        oracle = functools.partial(likelihood, kind, token_log_p=token_log_p)
        np.testing.assert_allclose(log_p, oracle(logit), rtol=1e-4)
        eps = 1e-5
        expected = (oracle(logit + eps).sum() - oracle(logit - eps).sum()) / (2 * eps)
        assert abs(expected) > 0.01
        np.testing.assert_allclose(gradient, expected, rtol=2e-4)


@functools.cache
def trainer():
    """The step of a fusion alone, and its first state."""
    mesh = parallel.make_mesh(MeshConfig(), jax.devices()[:1])
    config = OptimizerConfig(learning_rate=0.1, warmup_steps=0, schedule="constant",
                             update_ratios=False)
    optimizer = optim.make_optimizer(config, 20, {rag.FUSION: 1.0})
    make, _, shardings = step.init_state(model(), model().towers, optimizer, 0, mesh)
    return make, step.make_train_step(step.rag_loss(model()), optimizer, shardings), mesh


@pytest.mark.parametrize("informative", ["words", "dense"])
def test_it_moves_to_the_part_that_finds_what_explains_the_answer(informative):
    """Weight decay, which would draw it to 0.5, leaves it alone."""
    make, train_step, mesh = trainer()
    state, rng = make(), np.random.default_rng(0)
    rows = tiny.rag_batch(seed=4, questions=8, passages=4)
    log_p, _ = tiny.jit(functools.partial(token_log_probs, model()))(state.params, rows)
    best = np.where(rows.doc_mask, np.where(rows.target_mask[:, None], log_p, 0).sum(-1),
                    -np.inf).argmax(axis=1)
    told = np.where(np.arange(4) == best[:, None], 4.0, 0.0)
    noise = rng.normal(0, 2, told.shape)
    queries = tiny.jit(functools.partial(rag.embed_queries, model()))(
        state.params["query_encoder"], rows.question_ids, rows.question_mask)
    unit = np.asarray(queries) / np.square(queries).sum(axis=1, keepdims=True)
    words, dense = (told, noise) if informative == "words" else (noise, told)
    rows = rows._replace(doc_scores=words.astype(np.float32), doc_embeddings=np.float32(
        dense[..., None] * unit[:, None]))
    seen, decayed = [], optim.decays(state.params[rag.FUSION])
    for number in range(20):
        state, metrics = train_step(state, parallel.put_batch(rows, mesh), np.int32(number))
        seen.append(float(metrics["hybrid_weight"]))
    np.testing.assert_allclose(seen[0], 0.3, rtol=1e-5)
    assert seen[-1] > 0.5 if informative == "words" else seen[-1] < 0.15, seen
    assert float(metrics["grad_norm/fusion"]) > 0 and decayed == {"logit": False}
