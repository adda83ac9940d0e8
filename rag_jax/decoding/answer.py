"""From a batch of questions with passages to answers, for both models of the paper (section 2.5).

RAG-Token: one beam search on p(y_t | x, y_<t) = sum_z p(z | x) p(y_t | x, z, y_<t).
RAG-Sequence, thorough: a beam search for each document, then every hypothesis is scored under
every document of its question, and sum_z p(z | x) p(y | x, z) decides.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rag_jax import marginal
from rag_jax.decoding.beam import Hypotheses, beam_search
from rag_jax.models import rag
from rag_jax.models.bart import Cache
from rag_jax.models.layers import MASKED
from rag_jax.types import Batch, Params


class Decoded(NamedTuple):
    """The best answer to each question of a batch."""

    tokens: jax.Array  # int32[B, T], padded after </s>
    log_p: jax.Array  # float32[B], log p(y | x)
    prior: jax.Array  # float32[B, K], p(z | x)
    posterior: jax.Array  # float32[B, K], p(z | x, y)


class _Encoded(NamedTuple):
    prior: jax.Array  # float32[B, K], log p(z | x)
    states: jax.Array  # [B*K, S, D]
    mask: jax.Array  # bool[B*K, S]


def _apply(model: rag.RagModel, params: Params, method: str, *arguments: Any) -> Any:
    return model.generator_module.apply({"params": params["generator"]}, *arguments, method=method)


def _encode(model: rag.RagModel, params: Params, batch: Batch) -> _Encoded:
    rows = batch.source_ids.shape[0] * batch.source_ids.shape[1]
    ids = batch.source_ids.reshape(rows, -1)  # -> [B*K, S]
    mask = batch.source_mask.reshape(rows, -1)
    return _Encoded(rag.log_prior(model, params, batch),
                    _apply(model, params, "encode", ids, mask), mask)


def _repeat_rows(cache: Cache, searches: int, beams: int) -> Cache:
    """Cache rows [R, ...] -> [R/searches hypotheses each]: [searches, M, rows of one, ...]."""

    def repeat(x: jax.Array) -> jax.Array:
        x = x.reshape(searches, 1, -1, *x.shape[1:])
        return jnp.repeat(x, beams, axis=1).reshape(-1, *x.shape[3:])

    return Cache(jax.tree.map(repeat, cache.layers), repeat(cache.source_mask), cache.position)


def _reorder_rows(cache: Cache, beams: jax.Array) -> Cache:
    """Moves the self-attention rows of each hypothesis; cross-attention is alike in all of them."""
    searches, count = beams.shape

    def move(x: jax.Array) -> jax.Array:
        split = x.reshape(searches, count, -1, *x.shape[1:])
        index = beams.reshape(searches, count, *[1] * (split.ndim - 2))
        return jnp.take_along_axis(split, index, axis=1).reshape(x.shape)

    layers = tuple(layer._replace(self_keys=move(layer.self_keys),
                                  self_values=move(layer.self_values)) for layer in cache.layers)
    return cache._replace(layers=layers)


def _search(model: rag.RagModel, params: Params, encoded: _Encoded, searches: int,
            log_prior: jax.Array | None, num_beams: int, max_length: int) -> Hypotheses:
    """Beam search with rows [searches, M, documents]; log_prior marginalises over documents."""
    cache = _apply(model, params, "start", encoded.states, encoded.mask, max_length)
    cache = _repeat_rows(cache, searches, num_beams)

    def step(last: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        documents = encoded.states.shape[0] // searches
        inputs = jnp.repeat(last.reshape(-1), documents)  # -> [R*M*K]
        logits, cache = _apply(model, params, "step", inputs, cache)
        log_p = jax.nn.log_softmax(logits, axis=-1)
        log_p = log_p.reshape(searches, num_beams, documents, -1)  # -> [R, M, K, V]
        if log_prior is None:
            return log_p[:, :, 0], cache
        return jax.nn.logsumexp(log_prior[:, None, :, None] + log_p, axis=2), cache

    return beam_search(
        step, cache, _reorder_rows, searches=searches, num_beams=num_beams,
        max_length=max_length, start_id=model.start_id, end_id=model.end_id, pad_id=model.pad_id)


def _score(model: rag.RagModel, params: Params, encoded: _Encoded, tokens: jax.Array,
           kind: str) -> tuple[jax.Array, jax.Array]:
    """log p(y | x) float32[B] and p(z | x, y) float32[B, K] of given answers int32[B, T]."""
    questions, passages = encoded.prior.shape
    targets = jnp.repeat(tokens, passages, axis=0)  # -> [B*K, T]
    states = _apply(model, params, "decode", encoded.states, encoded.mask,
                    rag.shift_right(targets, model.start_id))
    log_p = rag.score_targets(params["generator"], states, targets, model.generator.logit_chunk)
    log_p = log_p.reshape(questions, passages, -1)  # -> [B, K, T]
    ended = jnp.cumsum(tokens == model.end_id, axis=1) - (tokens == model.end_id)
    mask = ended == 0  # everything up to and with the first </s>
    if kind == "sequence":
        posterior = marginal.sequence_posterior(encoded.prior, log_p, mask)
    else:
        posterior = marginal.mean_token_posterior(encoded.prior, log_p, mask)
    return marginal.MARGINALS[kind](encoded.prior, log_p, mask), posterior


def decode(model: rag.RagModel, params: Params, batch: Batch, num_beams: int, max_length: int
           ) -> Decoded:
    """The best answer found to every question; a pure function, to be jitted by the caller.

    Args:
      model: RAG-Token or RAG-Sequence by `model.kind`; scanned layers must be unstacked.
      params: query encoder and generator.
      batch: questions with passages; the targets are not read.
      num_beams: beam width; 1 = greedy.
      max_length: longest answer in tokens, </s> included.
    """
    encoded = _encode(model, params, batch)
    questions, passages = encoded.prior.shape
    if model.kind == "token":
        found = _search(model, params, encoded, questions, encoded.prior, num_beams, max_length)
        tokens = found.tokens[:, 0]
    else:
        tokens = _thorough(model, params, encoded, num_beams, max_length)
    log_p, posterior = _score(model, params, encoded, tokens, model.kind)
    return Decoded(tokens, log_p, jnp.exp(encoded.prior), posterior)


def _thorough(model: rag.RagModel, params: Params, encoded: _Encoded, num_beams: int,
              max_length: int) -> jax.Array:
    """Thorough decoding (section 2.5): the hypothesis of highest sum_z p(z | x) p(y | x, z).

    As in the beam search, hypotheses that end come before those cut at `max_length`, whose
    probability is that of all their continuations together.
    """
    questions, passages = encoded.prior.shape
    found = _search(model, params, encoded, questions * passages, None, num_beams, max_length)
    candidates = found.tokens.reshape(questions, passages * num_beams, -1)  # -> [B, K*M, T]
    possible = found.log_probs.reshape(questions, -1) > MASKED / 2
    possible &= jnp.repeat(encoded.prior > MASKED / 2, num_beams, axis=1)  # no padding documents
    scores = jax.lax.map(
        lambda tokens: _score(model, params, encoded, tokens, "sequence")[0],
        candidates.transpose(1, 0, 2))  # -> [K*M, B]
    ends = possible & (candidates == model.end_id).any(axis=-1)
    possible = jnp.where(ends.any(axis=1, keepdims=True), ends, possible)
    best = jnp.where(possible, scores.T, -jnp.inf).argmax(axis=1)
    return candidates[jnp.arange(questions), best]
