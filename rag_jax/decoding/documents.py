"""The documents of a batch as the decoder reads them: encoded once, whatever is decoded.

Each document's cross-attention keys and values are computed once and are shared by all hypotheses
about it: the M hypotheses (or the T tokens of A given answers) stand side by side on the query axis
of the attention, so that nothing is copied for each of them. Their own past is read in the same
way: all M*T of its places lie side by side, and a mask says which of them are a hypothesis's own,
so that a beam search moves no keys and values either.

Rows are documents, question-major: R = B*K. Fusion-in-Decoder has K = 1 everywhere below: all
passages of a question are one document, with the places of all of them.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from rag_jax import parallel
from rag_jax.decoding.memory import documents_at_once
from rag_jax.models import rag
from rag_jax.models.bart import POSITION_OFFSET, Bart, tied_logits
from rag_jax.types import Batch, Params


class KeysValues(NamedTuple):
    keys: jax.Array  # dtype[R, H, C, S]
    values: jax.Array  # dtype[R, H, S, C]


class Past(NamedTuple):
    """The tokens so far of M hypotheses about every document; a search has R/searches of these."""

    layers: tuple[KeysValues, ...]  # of self-attention, over places [T, M] as one axis
    lineage: jax.Array  # int32[searches, M, T], the place m at step t where a hypothesis stood


class Documents(NamedTuple):
    prior: jax.Array  # float32[B, number of passages], p(z | x) of the retriever
    log_prior: jax.Array  # float32[B, K], log p of the documents: of the passages, or 0 of one
    layers: tuple[KeysValues, ...]  # of cross-attention, one per decoder layer
    mask: jax.Array  # bool[R, S]


def read(model: rag.RagModel, params: Params, batch: Batch) -> Documents:
    """Encodes every document with its question."""
    def encode(given: tuple[jax.Array, jax.Array]) -> tuple[tuple[KeysValues, ...], jax.Array]:
        def layers(bart: Bart) -> tuple[tuple[KeysValues, ...], jax.Array]:
            encoded, mask = rag.encode_documents(bart, *given)
            return tuple(KeysValues(*layer.cross_attention.keys_values(encoded))
                         for layer in bart.decoder.loop()), mask

        return _apply(model, params, layers)

    log_prior = rag.log_prior(model, params, batch)
    given = rag.as_documents(model, batch)
    count = len(given[0])
    at_once = documents_at_once(model, *given[0].shape)
    if at_once == count or parallel.row_parts(batch.source_ids) > 1:
        read = encode(given)
    else:
        read = jax.lax.platform_dependent(
            given, cpu=functools.partial(_in_groups, encode, count // at_once), default=encode)
    return Documents(jnp.exp(log_prior), rag.document_prior(model, log_prior), *read)


def _in_groups(function: Callable[[Any], Any], count: int, rows: Any) -> Any:
    """function(rows), one of `count` groups of rows after the other."""
    groups = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), rows)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), jax.lax.map(function, groups))


def empty_past(documents: Documents, searches: int, hypotheses: int, length: int) -> Past:
    """Room for M hypotheses of `length` tokens in each search."""
    rows, heads, size, _ = documents.layers[0].keys.shape
    keys = jnp.zeros((rows, heads, size, length * hypotheses), documents.layers[0].keys.dtype)
    own = jnp.broadcast_to(jnp.arange(hypotheses)[None, :, None], (searches, hypotheses, length))
    return Past(tuple(KeysValues(keys, keys.swapaxes(2, 3)) for _ in documents.layers), own)


def step(model: rag.RagModel, params: Params, documents: Documents, tokens: jax.Array,
         position: jax.Array, past: Past) -> tuple[jax.Array, Past]:
    """One token of every hypothesis about every document.

    Args:
      tokens: int32[searches, M], the decoder's inputs; a search reads R/searches = K documents.
      position: int32[], their place.
      past: keys and values of the positions before.

    Returns:
      log p(next token | x, z, tokens so far) float32[searches, K, M, V], and `past` with this
      position.
    """
    searches, count = tokens.shape
    passages = documents.mask.shape[0] // searches
    places = jnp.arange(past.lineage.shape[2])
    lineage = jnp.where((places == position)[None, None], jnp.arange(count)[None, :, None],
                        past.lineage)
    own = lineage[..., None] == jnp.arange(count)[None, None, None]  # -> [searches, M, T, M]
    own &= (places <= position)[None, None, :, None]
    own = own.reshape(searches, 1, count, -1)
    own, tokens = (jnp.repeat(x, passages, axis=0) for x in (own, tokens))  # -> [R, ...]

    def run(bart: Bart) -> tuple[jax.Array, tuple[KeysValues, ...]]:
        place = jax.lax.dynamic_slice_in_dim(
            bart.decoder_positions, position + POSITION_OFFSET, 1)
        x = bart.embed(tokens, place, bart.decoder_embedding_norm, True)  # -> [R, M, D]
        mask, layers = documents.mask[:, None, None, :], []
        for layer, cross, old in zip(bart.decoder.loop(), documents.layers, past.layers,
                                     strict=True):
            now = layer.self_attention.keys_values(x)
            new = KeysValues(*(
                jax.lax.dynamic_update_slice_in_dim(room, latest, position * count, axis)
                for room, latest, axis in zip(old, now, (3, 2), strict=True)))
            attended = layer.self_attention.attend(x, *new, own, True)
            x = layer.after_self(x, attended, *cross, mask, True)
            layers.append(new)
        return x, tuple(layers)

    states_RMD, layers = _apply(model, params, run)
    log_p_RMV = log_probs(model, params, states_RMD)
    log_p = log_p_RMV.reshape(searches, passages, *log_p_RMV.shape[1:])  # -> [searches, K, M, V]
    return log_p, Past(layers, lineage)


def log_probs(model: rag.RagModel, params: Params, states: jax.Array) -> jax.Array:
    """log p of every token float32[..., V] from decoder states dtype[..., D]."""
    generator = params["generator"]
    return jax.nn.log_softmax(
        tied_logits(generator["embedding"], generator["final_logits_bias"], states), axis=-1)


def states(model: rag.RagModel, params: Params, documents: Documents, inputs: jax.Array
           ) -> jax.Array:
    """Teacher-forced decoder states of A answers about every document.

    Args:
      inputs: int32[R, A, T], answers shifted right.

    Returns:
      dtype[R*A, T, D].
    """
    rows, count, length = inputs.shape

    def run(bart: Bart) -> jax.Array:
        places = bart.decoder_positions[POSITION_OFFSET : POSITION_OFFSET + length]
        flat = inputs.reshape(rows * count, length)
        x = bart.embed(flat, places, bart.decoder_embedding_norm, True)  # -> [R*A, T, D]
        together = (rows, count * length, x.shape[-1])
        causal = jnp.tril(jnp.ones((length, length), bool))[None, None]
        mask = documents.mask[:, None, None, :]
        for layer, cross in zip(bart.decoder.loop(), documents.layers, strict=True):
            attended = layer.self_attention(x, x, causal, True)
            y = layer.after_self(x.reshape(together), attended.reshape(together), *cross, mask,
                                  True)
            x = y.reshape(x.shape)
        return x

    return _apply(model, params, run)


def target_log_probs(model: rag.RagModel, params: Params, documents: Documents,
                     targets: jax.Array) -> jax.Array:
    """log p(y_t | x, z, y_<t) float32[R, A, T] of A answers int32[R, A, T] about every document."""
    rows, count, length = targets.shape
    flat = targets.reshape(rows * count, length)
    inputs = rag.shift_right(flat, model.start_id).reshape(targets.shape)
    states_RTD = states(model, params, documents, inputs)
    log_p_RT, _ = rag.score_targets(
        params["generator"], states_RTD, flat, model.generator.logit_chunk)
    return log_p_RT.reshape(targets.shape)  # -> [R, A, T]


def _apply(model: rag.RagModel, params: Params, function):
    return nn.apply(function, model.generator_module)({"params": params["generator"]})
