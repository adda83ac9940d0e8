"""Decoding and marginals with T5 and a decoder-only generator, against enumeration of every answer:
what decodes sees no more of them than log p(y_t | x, z, y_<t)."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import tiny
from enumerated import (
    ANSWERS,
    BATCH,
    END,
    ENDED,
    EVERYTHING,
    LONGEST,
    QUESTIONS,
    VOCAB,
    cut,
    ranked,
    world_of,
)

from rag_jax.config import CausalConfig
from rag_jax.decoding.answer import decode
from rag_jax.decoding.certificate import exact
from rag_jax.decoding.settings import Decoding
from rag_jax.models.likelihood import log_likelihood

GENERATORS = {"t5": dataclasses.replace(tiny.T5, vocab_size=VOCAB), "causal": CausalConfig(
    variant="gemma3", vocab_size=VOCAB, max_positions=16, width=12, decoder_layers=2, heads=4,
    kv_heads=2, head_size=4, mlp_width=10, init_std=0.3, window=4, global_every=2,
    final_cap=4.0, attention_cap=3.0, rope_theta=100.0, rope_local_theta=10.0)}
LABELS = ((0, END), (3, 4, END), (3, 1))


def model(family, kind):
    return tiny.rag_model(kind, generator=GENERATORS[family])


@functools.cache
def params(family):
    return tiny.rag_params(model(family, "token"), seed=3)


@functools.cache
def world(family):
    return world_of(model(family, "token"), params(family))


def run(family, kind, key=None, **settings):
    decoding = Decoding(**{"max_length": LONGEST, **settings})
    return jax.device_get(tiny.jit(functools.partial(decode, model(family, kind), decoding))(
        params(family), BATCH, key))


@pytest.mark.parametrize("family, kind, strategy", [
    ("causal", "token", "marginal"), ("causal", "sequence", "thorough"),
    ("t5", "sequence", "marginal")])
def test_all_answers_are_ranked_by_their_probability(family, kind, strategy):
    """Decoded by one pass for each source and a cache; enumerated by a full forward for each
    answer: a token too many or too few between prompt and answer shows at once."""
    found = run(family, kind, num_beams=EVERYTHING, num_return_sequences=EVERYTHING,
                strategy=strategy)
    for question in range(QUESTIONS):
        log_p = {y: world(family).log_p(question, y, kind) for y in ANSWERS}
        np.testing.assert_allclose(np.exp(list(log_p.values())).sum(), 1, rtol=1e-5)
        listed = ranked(found, question)
        assert set(listed) == set(ANSWERS)
        np.testing.assert_allclose(found.ranked.log_p[question, : len(listed)],
                                   [log_p[y] for y in listed], rtol=1e-4, atol=1e-5)
        p = np.exp(world(family).prior[question]
                   + world(family).said(question, listed[0]).sum(axis=0))
        if kind == "sequence":
            np.testing.assert_allclose(found.ranked.posterior[question, 0], p / p.sum(), rtol=1e-4)


@pytest.mark.parametrize("family", GENERATORS)
def test_samples_labels_and_fast_answers_have_their_probabilities(family):
    """Three more searches over the same caches: one that forks them, one that forces whole
    answers, one that leaves out passages whose beams did not find an answer."""
    drawn = run(family, "token", jax.random.key(0), sample=True, num_return_sequences=4)
    ways = {"token": drawn, "sequence": run(
        family, "sequence", num_beams=EVERYTHING, num_return_sequences=4, strategy="fast")}
    classes = run(family, "token", labels=LABELS)
    for question in range(QUESTIONS):
        for kind, found in ways.items():
            rows = [cut(row) for row in found.ranked.tokens[question]]
            np.testing.assert_allclose(
                found.ranked.log_p[question],
                [world(family).log_p(question, y, kind) for y in rows], rtol=1e-4, atol=1e-5)
        p = np.exp([world(family).log_p(question, y, "token") for y in LABELS])
        np.testing.assert_allclose(np.exp(classes.ranked.log_p[question]),
                                   np.sort(p / p.sum())[::-1], rtol=1e-4)


def test_the_exact_search_finds_and_proves_the_best_answer():
    """Best first: prefixes of all lengths are continued from caches that stand side by side."""
    family, kind = "causal", "sequence"
    greedy = run(family, kind, num_beams=1)
    found = exact(model(family, kind), Decoding(num_beams=1, max_length=LONGEST), params(family),
                  BATCH, 1000, 4, greedy, jit=tiny.jit)
    assert found.certified.all()
    for question in range(QUESTIONS):
        best = max(ENDED, key=lambda y, q=question: world(family).log_p(q, y, kind))
        assert cut(found.ranked.tokens[question, 0]) == best
        np.testing.assert_allclose(found.ranked.log_p[question, 0],
                                   world(family).log_p(question, best, kind), rtol=1e-5)


def test_order_and_padding_change_nothing():
    """One program for log p and its gradient, with passages in the other order and more padding
    behind them; `test_parallel` has it on eight devices."""
    token = model("causal", "token")
    batch = tiny.rag_batch(questions=4, model=token)
    batch = batch._replace(doc_mask=np.ones_like(batch.doc_mask))

    def run(params, batch):
        loss = log_likelihood(token, params, batch)["log_p"]
        return loss.sum(), loss

    program = tiny.jit(jax.value_and_grad(run, has_aux=True))
    expected = jax.device_get(program(params("causal"), batch))
    other = batch._replace(**{name: getattr(batch, name)[:, ::-1] for name in (
        "source_ids", "source_mask", "doc_embeddings")})
    other = other._replace(**{name: np.pad(getattr(other, name), ((0, 0), (0, 0), (0, 3)))
                              for name in ("source_ids", "source_mask")})
    tiny.assert_trees_close(
        jax.device_get(program(params("causal"), other)), expected, rtol=1e-4, atol=1e-5)
