"""What trains the retriever in place of the marginal likelihood, from token ids to gradients,
against numpy float64."""

import functools

import jax
import jax.numpy as jnp
import naive
import numpy as np
import pytest
import tiny

from rag_jax.config import CausalConfig
from rag_jax.models import rag
from rag_jax.models.likelihood import attention_shares, log_likelihood
from rag_jax.models.stack import unstack_layers
from rag_jax.training import step

SMOOTHING = 0.1
BATCH = tiny.rag_batch(seed=4)  # the last question has one passage
QUESTIONS, DOCS = BATCH.doc_mask.shape
OBJECTIVES = {"token": ("emdr2", "pdist", "loop"), "sequence": ("loop",),
              "fid": ("emdr2", "pdist", "adist", "loop")}
WEIGHTS = {"marginal": 1.0, "emdr2": 0.7, "pdist": 1.3, "adist": 2.1, "loop": 1.9}


@pytest.fixture(scope="module")
def params():
    return tiny.rag_params(tiny.rag_model())


@functools.partial(tiny.jit, static_argnames="kind")
def everything(params, batch, kind):
    """The result of every objective, the gradient of their weighted sum, and of the likelihood."""
    def total(params, names):
        out = {name: log_likelihood(tiny.rag_model(kind), params, batch, SMOOTHING,
                                        retriever_objective=name) for name in names}
        return sum(WEIGHTS[name] * out[name]["objective"].sum() for name in names), out

    gradient = jax.grad(total, has_aux=True)
    grads, out = gradient(params, OBJECTIVES[kind])
    return out, grads, gradient(params, ("marginal",))[0]


def log_probs(generator, b, docs, watched=None):
    """log p(y_t | x, these passages, y_<t) [T] of question b."""
    length = int(BATCH.target_mask[b].sum())
    targets = BATCH.target_ids[b][:length]
    read = naive.fused(generator, BATCH.source_ids[b][docs], BATCH.source_mask[b][docs], heads=2)
    states = naive.bart_decode(generator, *read, [tiny.END, *targets[:-1]], heads=2,
                               watched=watched)
    return naive.log_softmax(naive.bart_output(generator, states))[np.arange(length), targets]


def attended(generator, b, docs):
    """Weight times norm of the value, summed over layers, heads and tokens: [docs], as shares."""
    watched, sums = [], np.zeros(len(docs))
    log_probs(generator, b, docs, watched)
    encoded, mask = naive.fused(
        generator, BATCH.source_ids[b][docs], BATCH.source_mask[b][docs], heads=2)
    for x, p in watched:
        q, k, v = (naive.linear(y, p[name]) for y, name in (
            (x, "query"), (encoded, "key"), (encoded, "value")))
        for part in np.split(np.arange(q.shape[1]), 2):
            scores = np.where(mask, q[:, part] @ k[:, part].T / np.sqrt(len(part)), -np.inf)
            weights = np.exp(naive.log_softmax(scores)) * np.linalg.norm(v[:, part], axis=1)
            sums += weights.sum(axis=0).reshape(len(docs), -1).sum(axis=1)
    return sums / sums.sum()


def log_priors(encoder):
    """log p(z | x) of the real passages, a list of [docs]."""
    found = []
    for b in range(QUESTIONS):
        zeros = np.zeros_like(BATCH.question_ids[b])
        query = naive.bert(encoder["bert"], BATCH.question_ids[b], BATCH.question_mask[b], zeros,
                           heads=2)[0]
        found.append(naive.log_softmax(
            naive.f64(BATCH.doc_embeddings[b][BATCH.doc_mask[b]]) @ query))
    return found


def evidence_of(params, kind, objective, priors):
    """A list of [docs]; a passage alone, which nothing can be told from, has 0."""
    generator, found = params["generator"], []
    for b, log_prior in enumerate(priors):
        docs = list(np.flatnonzero(BATCH.doc_mask[b]))
        if objective == "adist":
            found.append(np.log(attended(generator, b, docs)))
            continue
        if objective != "loop":
            found.append(np.array([log_probs(generator, b, [z]).sum() for z in docs]))
            continue
        without = []
        for z in docs:
            others = [k for k in docs if k != z]
            if not others:
                without.append(0.0)
            elif kind == "fid":
                without.append(log_probs(generator, b, others).sum())
            else:
                log_p = np.array([log_probs(generator, b, [k]) for k in others])
                prior = naive.log_softmax(log_prior[[docs.index(k) for k in others]])
                without.append(
                    np.logaddexp.reduce(prior[:, None] + log_p).sum() if kind == "token"
                    else np.logaddexp.reduce(prior + log_p.sum(axis=1)))
        found.append(-np.array(without))
    return found


def learnt(objective, evidence, priors):
    """[B], by the definitions."""
    values = []
    for given, log_prior in zip(evidence, priors, strict=True):
        log_target = naive.log_softmax(given)
        values.append(np.logaddexp.reduce(log_prior + given) if objective == "emdr2"
                      else (np.exp(log_target) * (log_prior - log_target)).sum())
    return np.array(values)


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_objectives_and_gradients_match_float64_from_end_to_end(params, kind):
    """The retriever's gradient is that of the objective with what the generator says constant; the
    generator's is that of its own likelihood alone, so neither trains to please the other."""
    out, grads, own = everything(params, BATCH, kind)
    priors, evidence, names = log_priors(params["query_encoder"]), {}, OBJECTIVES[kind]
    for name in names:
        evidence[name] = evidence_of(params, kind, name, priors)
        np.testing.assert_allclose(out[name]["retriever_objective"],
                                   learnt(name, evidence[name], priors), rtol=2e-4, atol=2e-5)
    whole = sum(WEIGHTS[name] for name in names)
    tiny.assert_trees_close(grads["generator"], jax.tree.map(lambda g: whole * g, own["generator"]),
                            rtol=1e-4, atol=1e-5)
    assert tiny.is_zero(grads["document_encoder"])
    rng = np.random.default_rng(0)
    encoder = jax.tree.map(np.float64, params["query_encoder"])
    for _ in range(3):
        along = jax.tree.map(lambda x: rng.normal(size=x.shape), encoder)
        ahead, behind = (sum(
            WEIGHTS[name] * learnt(name, evidence[name], log_priors(jax.tree.map(
                lambda x, d, s=s: x + s * d, encoder, along))).sum() for name in names)
            for s in (1e-5, -1e-5))
        slope = sum(np.sum(np.float64(g) * d) for g, d in zip(
            jax.tree.leaves(grads["query_encoder"]), jax.tree.leaves(along), strict=True))
        np.testing.assert_allclose(slope, (ahead - behind) / 2e-5, rtol=2e-3, atol=1e-4)
    if kind == "fid":
        for name in names:
            np.testing.assert_allclose(np.sum(out[name]["posterior"], axis=1), 1, rtol=1e-6)
            assert not np.asarray(out[name]["posterior"])[~BATCH.doc_mask].any()


@pytest.mark.parametrize("kind, objective", [("token", "pdist"), ("fid", "adist")])
def test_a_document_encoder_that_trains_learns_from_the_objective(params, kind, objective):
    """In micro-batches as at once; the scores are then of embeddings made in the step."""
    rng = np.random.default_rng(0)
    batch = BATCH._replace(
        passage_ids=rng.integers(0, 30, (QUESTIONS, DOCS, 5)).astype(np.int32),
        passage_mask=tiny.ragged_mask(rng, QUESTIONS, DOCS, 5),
        passage_age=np.zeros((QUESTIONS, DOCS), np.float32))
    batch = jax.tree.map(lambda x: np.concatenate([x, x[::-1]]), batch)
    batch = batch._replace(weight=np.float32([1, 1, 1, 1, 0, 1]))
    loss = step.rag_loss(tiny.rag_model(kind), SMOOTHING, objective)
    whole, parts = (tiny.jit(functools.partial(
        step.accumulated_gradients, loss, frozen={}, key=None, pieces=pieces))(params, batch=batch)
        for pieces in (1, 3))
    assert all(not tiny.is_zero(whole[0][tower]) for tower in rag.TOWERS)
    tiny.assert_trees_close(parts, whole, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(whole[1]["retriever_loss"] >= 0, True)


def test_classes_are_learnt_from_too(params):
    """Fusion-in-Decoder reads a claim with each passage alone as RAG does, and attends for it."""
    batch = tiny.class_batch(3, seed=6)
    classes = {kind: tiny.rag_model(kind, classes=3) for kind in ("token", "fid")}
    weights = tiny.rag_params(classes["fid"])

    @tiny.jit
    def found(weights):
        def learnt(kind, name):
            return log_likelihood(classes[kind], weights, batch, retriever_objective=name)
        return ([learnt(kind, "pdist")["retriever_objective"] for kind in classes],
                learnt("fid", "adist")["posterior"])

    (alone, fused), shares = found(weights)
    np.testing.assert_allclose(fused, alone, rtol=1e-4, atol=1e-6)
    assert (np.asarray(alone)[:-1] < 0).all()
    np.testing.assert_allclose(jnp.sum(shares, axis=1), 1, rtol=1e-6)


def test_scanned_layers_attend_as_looped_ones_do():
    """A scan that drops what is collected in it would leave nothing to learn from."""
    scanned, looped = (tiny.rag_model("fid", generator={
        "decoder_layers": 2, "scan_layers": scan, "remat": "dots" if scan else "none"})
        for scan in (True, False))
    weights = tiny.rag_params(scanned)
    found, expected = tiny.jit(lambda weights: (
        attention_shares(scanned, weights, BATCH),
        attention_shares(looped, unstack_layers(weights), BATCH)))(weights)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert not np.asarray(found)[~BATCH.doc_mask].any()


CAUSAL = CausalConfig(vocab_size=38, max_positions=64, width=16, decoder_layers=1, heads=2,
                      kv_heads=1, head_size=8, mlp_width=32, init_std=0.3, logit_chunk=3)


@pytest.mark.parametrize("generator, objectives", [(tiny.T5, ("pdist", "adist", "loop")),
                                                   (CAUSAL, ("pdist", "loop"))])
def test_every_family_of_generators_weights_passages_wherever_they_stand(generator, objectives):
    """A family whose attention is not collected, or takes places of passages, would teach those."""
    model = tiny.rag_model("fid", generator=generator)
    batch, weights = tiny.rag_batch(seed=2, model=model), tiny.rag_params(model)
    batch = batch._replace(doc_mask=np.ones_like(batch.doc_mask))
    turned = batch._replace(**{name: getattr(batch, name)[:, ::-1] for name in (
        "source_ids", "source_mask", "doc_embeddings")})
    run = tiny.jit(lambda weights, batch: [log_likelihood(
        model, weights, batch, retriever_objective=name)["posterior"] for name in objectives])
    for found, expected in zip(run(weights, turned), run(weights, batch), strict=True):
        np.testing.assert_allclose(found[:, ::-1], expected, rtol=1e-4, atol=1e-6)
        assert np.ptp(np.asarray(expected), axis=1).min() > 1e-3
