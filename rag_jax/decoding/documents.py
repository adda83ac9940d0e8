"""The documents of a batch as the decoder reads them: encoded once, whatever is decoded.

Each document's cross-attention keys and values are computed once and are shared by all hypotheses
about it: the M hypotheses (or the T tokens of N given answers) stand side by side on the query axis
of the attention, so that nothing is copied for each of them.

Rows are documents, question-major: R = B*K.
"""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from rag_jax.models import rag
from rag_jax.models.bart import POSITION_OFFSET, Bart, tied_logits
from rag_jax.types import Batch, Params


class KeysValues(NamedTuple):
    keys: jax.Array  # dtype[R, S, H, C] of documents, dtype[R, M, T, H, C] of hypotheses
    values: jax.Array


class Documents(NamedTuple):
    log_prior: jax.Array  # float32[B, K], log p(z | x)
    layers: tuple[KeysValues, ...]  # of cross-attention, one per decoder layer
    mask: jax.Array  # bool[R, S]


def read(model: rag.RagModel, params: Params, batch: Batch) -> Documents:
    """Encodes every document with its question."""
    rows = batch.source_ids.shape[0] * batch.source_ids.shape[1]
    ids = batch.source_ids.reshape(rows, -1)  # -> [R, S]
    mask = batch.source_mask.reshape(rows, -1)

    def layers(bart: Bart) -> tuple[KeysValues, ...]:
        encoded = bart.encode(ids, mask)
        return tuple(KeysValues(*layer.cross_attention.keys_values(encoded))
                     for layer in bart.decoder.loop())

    return Documents(rag.log_prior(model, params, batch), _apply(model, params, layers), mask)


def empty_past(model: rag.RagModel, documents: Documents, hypotheses: int, length: int
               ) -> tuple[KeysValues, ...]:
    """Room for the self-attention of M hypotheses of `length` tokens about every document."""
    rows, _, heads, size = documents.layers[0].keys.shape
    room = jnp.zeros((rows, hypotheses, length, heads, size), documents.layers[0].keys.dtype)
    return tuple(KeysValues(room, room) for _ in documents.layers)


def step(model: rag.RagModel, params: Params, documents: Documents, tokens: jax.Array,
         position: jax.Array, past: tuple[KeysValues, ...]
         ) -> tuple[jax.Array, tuple[KeysValues, ...]]:
    """One token of every hypothesis about every document.

    Args:
      tokens: int32[R, M], the decoder's inputs.
      position: int32[], their place.
      past: of the positions before.

    Returns:
      log p(next token | x, z, tokens so far) float32[R, M, V], and `past` with this position.
    """

    def run(bart: Bart) -> tuple[jax.Array, tuple[KeysValues, ...]]:
        place = jax.lax.dynamic_slice_in_dim(
            bart.decoder_positions, position + POSITION_OFFSET, 1)
        x = bart.embed(tokens, place, bart.decoder_embedding_norm, True)  # -> [R, M, D]
        mask, layers = documents.mask[:, None, None, :], []
        filled = (jnp.arange(past[0].keys.shape[2]) <= position)[None, None, None, :]
        for layer, cross, old in zip(bart.decoder.loop(), documents.layers, past, strict=True):
            now = layer.self_attention.keys_values(x)
            new = KeysValues(*(jax.lax.dynamic_update_slice_in_dim(o, n[:, :, None], position, 2)
                               for o, n in zip(old, now, strict=True)))
            keys, values = (leaf.reshape(-1, *leaf.shape[2:]) for leaf in new)  # -> [R*M, T, H, C]
            attended = layer.self_attention.attend(
                x.reshape(-1, 1, x.shape[-1]), keys, values, filled, True)
            x = layer.after_self(x, attended.reshape(x.shape), *cross, mask, True)
            layers.append(new)
        return x, tuple(layers)

    hidden, past = _apply(model, params, run)
    return log_probs(model, params, hidden), past


def log_probs(model: rag.RagModel, params: Params, states: jax.Array) -> jax.Array:
    """log p of every token float32[..., V] from decoder states dtype[..., D]."""
    generator = params["generator"]
    logits = tied_logits(generator["embedding"], generator["final_logits_bias"], states)
    return jax.nn.log_softmax(logits, axis=-1)


def states(model: rag.RagModel, params: Params, documents: Documents, inputs: jax.Array
           ) -> jax.Array:
    """Teacher-forced decoder states of N answers about every document.

    Args:
      inputs: int32[R, N, T], answers shifted right.

    Returns:
      dtype[R*N, T, D].
    """
    rows, count, length = inputs.shape

    def run(bart: Bart) -> jax.Array:
        places = bart.decoder_positions[POSITION_OFFSET : POSITION_OFFSET + length]
        flat = inputs.reshape(rows * count, length)
        x = bart.embed(flat, places, bart.decoder_embedding_norm, True)  # -> [R*N, T, D]
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
    """log p(y_t | x, z, y_<t) float32[R, N, T] of N answers int32[R, N, T] about every document."""
    rows, count, length = targets.shape
    flat = targets.reshape(rows * count, length)
    inputs = rag.shift_right(flat, model.start_id).reshape(targets.shape)
    hidden = states(model, params, documents, inputs)
    log_p = rag.score_targets(params["generator"], hidden, flat, model.generator.logit_chunk)
    return log_p.reshape(targets.shape)


def _apply(model: rag.RagModel, params: Params, function):
    return nn.apply(function, model.generator_module)({"params": params["generator"]})
