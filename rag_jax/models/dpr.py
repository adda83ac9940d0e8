"""Encoders, which make one vector of each text from BERT's states.

DPR's towers (Karpukhin et al. 2020, arXiv 2004.04906) take the state of [CLS] and may project it.
Most sentence encoders (Reimers & Gurevych 2019, arXiv 1908.10084) take the mean of all states, and
some scale vectors to length 1.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from rag_jax.config import BertConfig
from rag_jax.models.bert import Bert
from rag_jax.models.modern_bert import ModernBert
from rag_jax.models.products import Linear


class DprEncoder(nn.Module):
    """Query or document encoder: float32[R, E] from ids int32[R, L] and mask bool[R, L].

    `config.pooling`, `projection` and `normalize` say how; E is the width D where `projection` is
    0. The query and the document encoder are two instances with parameters of their own. As in the
    released DPR checkpoints, there is no pooler (dense + tanh).
    """

    config: BertConfig

    @nn.compact
    def __call__(self, ids: jax.Array, mask: jax.Array, token_types: jax.Array | None = None,
                 deterministic: bool = True) -> jax.Array:
        c = self.config
        rows = None if c.pooling == "mean" else 1  # of [CLS] alone
        body = ModernBert if c.model_type == "modernbert" else Bert
        states = body(c, name="bert")(ids, mask, token_types, deterministic, rows=rows)
        vectors = states[:, 0] if rows else _mean(states, mask)
        if c.projection:
            vectors = Linear(c.projection, ("embed", "retrieval"), jnp.dtype(c.dtype), c.init_std,
                             name="projection")(vectors)
            vectors = jnp.tanh(vectors) if c.projection_tanh else vectors
        vectors = vectors.astype(jnp.float32)
        if not c.normalize:
            return vectors
        squares = jnp.sum(vectors * vectors, axis=-1, keepdims=True)
        return vectors * jax.lax.rsqrt(jnp.maximum(squares, 1e-24))  # as torch's F.normalize


def _mean(states: jax.Array, mask: jax.Array) -> jax.Array:
    """The mean float32[R, D] of the states [R, L, D] where mask [R, L] is True."""
    counts = jnp.maximum(mask.sum(axis=1, keepdims=True), 1)
    return jnp.where(mask[..., None], states, 0).sum(axis=1, dtype=jnp.float32) / counts
