"""The documents of a batch as the decoder reads them: encoded once for all that is decoded.

What the generator keeps of a document is computed once and shared by all hypotheses. A hypothesis's
own past is selected by a mask, and never moved in memory (see `models.generator`).

Rows are the R = B*K documents, the K of a question one after another. In Fusion-in-Decoder, K is 1
here: all passages of a question are one document, which has the places of all of them.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from rag_jax import parallel
from rag_jax.decoding.memory import documents_at_once
from rag_jax.models import likelihood, rag, teacher_forcing, vocabulary
from rag_jax.models.attention import KeysValues, Source
from rag_jax.models.generator import Generator
from rag_jax.types import Batch, Params


class Past(NamedTuple):
    """The past of M hypotheses of each search, for each of its R/searches documents."""

    layers: tuple[KeysValues, ...]  # of self-attention, for places [T, M] as one axis
    lineage: jax.Array  # int32[searches, M, T], where among the M the token of step t is kept


class Documents(NamedTuple):
    """A batch of questions whose documents are encoded."""

    prior: jax.Array  # float32[B, passages], p(z | x) of the retriever
    log_prior: jax.Array  # float32[B, K], log p of the documents (`likelihood.document_prior`)
    source: Source
    ids: jax.Array  # int32[B, N], the tokens of all inputs, and padding, one after another

    @property
    def mask(self) -> jax.Array:
        """bool[R, S], True where the documents have tokens."""
        return self.source.mask


def read(model: rag.RagModel, params: Params, batch: Batch) -> Documents:
    """Encodes every document with its question."""
    def encode(inputs: tuple[Any, ...]) -> Source:
        return _apply(model, params, lambda generator: generator.read(*inputs))

    log_prior = likelihood.log_prior(model, params, batch)
    inputs = likelihood.as_documents(model, batch)
    if batch.prefixes is not None:
        inputs += (_before(model, batch),)
    count = len(inputs[0])
    at_once = documents_at_once(model, *inputs[0].shape)
    if at_once == count or parallel.row_parts(batch.source_ids) > 1:
        source = encode(inputs)
    else:
        source = jax.lax.platform_dependent(
            inputs, cpu=functools.partial(_in_groups, encode, count // at_once), default=encode)
    return Documents(jnp.exp(log_prior), likelihood.document_prior(model, log_prior), source,
                     _tokens(batch))


def _tokens(batch: Batch) -> jax.Array:
    """`Documents.ids` of a batch."""
    ids = batch.source_ids if batch.prefixes is None else jnp.concatenate(
        [batch.prefixes.ids, batch.source_ids], axis=-1)
    return ids.reshape(len(ids), -1)


def _before(model: rag.RagModel, batch: Batch) -> Source:
    """What was kept of the passages, as `Generator.read` takes it."""
    keys, values, lengths_BK, _ = batch.prefixes
    if model.fuses:  # missing passages are masked as a whole
        lengths_BK = jnp.where(batch.doc_mask, lengths_BK, 0)
    layers = tuple(KeysValues(*(x[:, :, number].reshape(-1, *x.shape[3:]) for x in (keys, values)))
                   for number in range(keys.shape[2]))
    begin = lengths_BK.reshape(-1)
    return Source(layers, jnp.arange(keys.shape[-1])[None] < begin[:, None], begin)


def _in_groups(function: Callable[[Any], Any], count: int, rows: Any) -> Any:
    """function(rows), computed for `count` groups of rows one after another."""
    groups = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), rows)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), jax.lax.map(function, groups))


def empty_past(documents: Documents, searches: int, hypotheses: int, length: int) -> Past:
    """A past for M hypotheses of at most `length` tokens in each search, without tokens."""
    def empty(layer: KeysValues) -> KeysValues:
        rows, heads, size, _ = layer.keys.shape
        keys = jnp.zeros((rows, heads, size, length * hypotheses), layer.keys.dtype)
        return KeysValues(keys, keys.swapaxes(2, 3))

    own = jnp.broadcast_to(jnp.arange(hypotheses)[None, :, None], (searches, hypotheses, length))
    return Past(tuple(map(empty, documents.source.layers)), own)


def step(model: rag.RagModel, params: Params, documents: Documents, tokens: jax.Array,
         position: jax.Array, past: Past) -> tuple[jax.Array, Past]:
    """Log-probabilities of the tokens after N successive ones of every hypothesis, given each
    document.

    Args:
      tokens: int32[searches, N, M], the decoder's inputs; a search reads R/searches = K documents.
      position: int32[], that of the first of these inputs.
      past: of the positions before.

    Returns:
      log p(next token | x, z, tokens so far) float32[searches, K, N, M, V], and `past` with these
      positions.
    """
    searches, steps, count = tokens.shape
    passages = documents.mask.shape[0] // searches
    beams = jnp.arange(count)
    ahead = jnp.arange(past.lineage.shape[2]) - position
    lineage = jnp.where(((ahead >= 0) & (ahead < steps))[None, None], beams[None, :, None],
                        past.lineage)
    own = lineage[..., None] == beams[None, None, None]  # -> [searches, M, T, M]
    seen = ahead[None] <= jnp.arange(steps)[:, None]  # -> [N, T]
    own = own[:, None] & seen[None, :, None, :, None]  # -> [searches, N, M, T, M]
    own = own.reshape(searches, 1, steps * count, -1)
    own, tokens = (jnp.repeat(x, passages, axis=0) for x in (own, tokens))  # -> [R, ...]

    states, layers = _apply(model, params, lambda generator: generator.step(
        documents.source, tokens, position, past.layers, own))
    log_p = log_probs(model, params, states)  # [R, N * M, V]
    return log_p.reshape(searches, passages, steps, count, -1), Past(layers, lineage)


def log_probs(model: rag.RagModel, params: Params, states: jax.Array) -> jax.Array:
    """log p of every token, float32[..., V], from decoder states dtype[..., D]."""
    logits = vocabulary.logits(
        *vocabulary.head(params["generator"]), states, model.generator.logit_cap)
    logits = vocabulary.with_one_end(logits, model.generator.end_tokens)
    return jax.nn.log_softmax(logits, axis=-1)


def states(model: rag.RagModel, params: Params, documents: Documents, inputs: jax.Array
           ) -> jax.Array:
    """Teacher-forced decoder states of A answers for every document.

    Args:
      inputs: int32[R, A, T], answers shifted right.

    Returns:
      dtype[R*A, T, D].
    """
    return _apply(model, params, lambda generator: generator.forced(documents.source, inputs))


def target_log_probs(model: rag.RagModel, params: Params, documents: Documents,
                     targets: jax.Array) -> jax.Array:
    """log p(y_t | x, z, y_<t) float32[R, A, T] of A answers int32[R, A, T] for every document."""
    rows, count, length = targets.shape
    flat = targets.reshape(rows * count, length)
    inputs = teacher_forcing.shift_right(flat, model.start_id).reshape(targets.shape)
    states_RTD = states(model, params, documents, inputs)
    log_p_RT, _ = teacher_forcing.score_targets(
        params["generator"], states_RTD, flat, model.generator)
    return log_p_RT.reshape(targets.shape)  # -> [R, A, T]


def _apply(model: rag.RagModel, params: Params, function: Callable[[Generator], Any]) -> Any:
    """function(generator), with these parameters."""
    return nn.apply(function, model.generator_module)({"params": params["generator"]})
