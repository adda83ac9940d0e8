"""Decoding and marginals with a decoder-only generator, against enumeration of every answer."""

import functools

import jax
import numpy as np
import pytest
import tiny
from enumerated import ANSWERS, BATCH, EVERYTHING, LONGEST, QUESTIONS, VOCAB, ranked, world_of

from rag_jax import parallel
from rag_jax.config import CausalConfig, MeshConfig
from rag_jax.decoding.answer import decode
from rag_jax.decoding.settings import Decoding
from rag_jax.models import rag

GENERATOR = CausalConfig(
    variant="gemma3", vocab_size=VOCAB, max_positions=16, width=12, decoder_layers=2, heads=4,
    kv_heads=2, head_size=4, mlp_width=10, init_std=0.3, window=4, global_every=2,
    final_cap=4.0, attention_cap=3.0, rope_theta=100.0, rope_local_theta=10.0)


def model(kind):
    return tiny.rag_model(kind, generator=GENERATOR)


@functools.cache
def params():
    return tiny.rag_params(model("token"), seed=3)


@functools.cache
def world():
    return world_of(model("token"), params())


@pytest.mark.parametrize("kind,strategy", [("token", "marginal"), ("sequence", "thorough")])
def test_all_answers_are_ranked_by_their_probability(kind, strategy):
    """Decoded by one pass for each prompt and a cache; enumerated by a full forward for each
    answer: a token too many or too few between prompt and answer shows at once."""
    settings = Decoding(num_beams=EVERYTHING, num_return_sequences=EVERYTHING, max_length=LONGEST,
                        strategy=strategy)
    found = jax.device_get(tiny.jit(functools.partial(decode, model(kind), settings))(
        params(), BATCH))
    for question in range(QUESTIONS):
        log_p = {y: world().log_p(question, y, kind) for y in ANSWERS}
        np.testing.assert_allclose(np.exp(list(log_p.values())).sum(), 1, rtol=1e-5)
        listed = ranked(found, question)
        assert set(listed) == set(ANSWERS)
        np.testing.assert_allclose(found.ranked.log_p[question, : len(listed)],
                                   [log_p[y] for y in listed], rtol=1e-4, atol=1e-5)
        p = np.exp(world().prior[question] + world().said(question, listed[0]).sum(axis=0))
        if kind == "sequence":
            np.testing.assert_allclose(found.ranked.posterior[question, 0], p / p.sum(), rtol=1e-4)


def test_order_padding_and_devices_change_nothing():
    """One program for log p and its gradient: on one device, and on eight with passages in the
    other order and more padding behind them."""
    token, batch = model("token"), tiny.rag_batch(questions=4, model=model("token"))
    batch = batch._replace(doc_mask=np.ones_like(batch.doc_mask))

    def run(params, batch):
        loss = rag.log_likelihood(token, params, batch)["log_p"]
        return loss.sum(), loss

    program = tiny.jit(jax.value_and_grad(run, has_aux=True))
    expected = jax.device_get(program(params(), batch))
    other = batch._replace(**{name: getattr(batch, name)[:, ::-1] for name in (
        "source_ids", "source_mask", "doc_embeddings")})
    other = other._replace(**{name: np.pad(getattr(other, name), ((0, 0), (0, 0), (0, 3)))
                              for name in ("source_ids", "source_mask")})
    mesh = parallel.make_mesh(MeshConfig(2, 2, 2))
    shardings = parallel.param_shardings(
        jax.eval_shape(token.init, jax.random.key(0)), mesh)
    found = jax.device_get(program(
        jax.device_put(params(), shardings), parallel.put_batch(other, mesh)))
    tiny.assert_trees_close(found, expected, rtol=1e-4, atol=1e-5)
