"""T5 (Raffel et al. 2020, arXiv 1910.10683), v1.0 and v1.1, mT5 and Flan-T5.

RMSNorm comes before each part, there are no biases, and scores are not scaled. Positions enter
attention alone, as a bias by their distance in buckets, which all layers of the encoder share, and
all of the decoder.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from rag_jax.config import T5Config
from rag_jax.models import encoder_decoder, vocabulary
from rag_jax.models.attention import Attention
from rag_jax.models.blocks import DecoderLayer, EncoderLayer, Parts
from rag_jax.models.layers import Dropout, FeedForward, RmsNorm, embedding_table, look_up
from rag_jax.models.packing import Packing
from rag_jax.models.parameters import parameter
from rag_jax.models.stack import Stack


@functools.cache
def bucket_starts(buckets: int, distance: int) -> np.ndarray:
    """The least distance of every bucket after the first, int32[buckets - 1].

    Half of the buckets have one distance each; the others grow by a constant factor up to
    `distance`. Everything is in integers: with logarithms, rounding decides where distance 16 is.
    """
    single = buckets // 2
    parts = buckets - single
    starts = list(range(1, single + 1))
    for part in range(1, parts):
        starts.append(next(d for d in range(single, distance + 1) if (
            d**parts * single**part >= distance**part * single**parts)))
    return np.array(starts, np.int32)


def relative_bias(table: jax.Array, queries: jax.Array, keys: jax.Array, distance: int,
                  both_ways: bool) -> jax.Array:
    """The bias float32[1, H, Q, S] of attention from positions int32[Q] to positions int32[S].

    Args:
      table: float32[buckets, H].
      distance: where the last bucket begins.
      both_ways: half of the buckets are for keys after the query. Otherwise such keys, which are
        masked, count as distance 0.
    """
    behind_QS = queries[:, None] - keys[None]
    buckets = len(table) // 2 if both_ways else len(table)
    far_QS = jnp.abs(behind_QS) if both_ways else jnp.maximum(behind_QS, 0)
    bucket_QS = (far_QS[..., None] >= bucket_starts(buckets, distance)[None, None]).sum(axis=-1)
    if both_ways:
        bucket_QS += jnp.where(behind_QS < 0, buckets, 0)
    return table[bucket_QS].transpose(2, 0, 1)[None]


def _parts(config: T5Config) -> Parts:
    """The parts of the layers of encoder and decoder."""
    c, dtype = config, jnp.dtype(config.dtype)
    return Parts(functools.partial(Attention, c.heads, c.width, c.attention_dropout, dtype,
                                   c.init_std, c.fused_attention, c.head_size, biased=False,
                                   scaled=False),
                 functools.partial(FeedForward, c.mlp_width, c.width, c.activation,
                                   c.activation_dropout, dtype, c.init_std, biased=False,
                                   gated=c.gated),
                 functools.partial(RmsNorm, c.layer_norm_eps, dtype), c.dropout, before=True)


class T5(encoder_decoder.EncoderDecoder):
    """Encoder and decoder, which share the table of token embeddings; the output layer's table is
    the same, or its own."""

    packs = True
    config: T5Config

    def setup(self) -> None:
        c, parts = self.config, _parts(self.config)
        self.embedding = embedding_table(self, "embedding", c.vocab_size, c.width, "vocab")
        self.output = self.embedding if c.tied else embedding_table(
            self, "output", c.vocab_size, c.width, "vocab")
        self.encoder_bias, self.decoder_bias = (
            parameter(self, name, (c.relative_buckets, c.heads), ("positions", "heads"),
                      nn.initializers.normal(c.init_std))
            for name in ("encoder_bias", "decoder_bias"))
        self.encoder = Stack(
            functools.partial(EncoderLayer, parts), c.encoder_layers, c.remat, c.scan_layers)
        self.decoder = Stack(
            functools.partial(DecoderLayer, parts), c.decoder_layers, c.remat, c.scan_layers)
        self.encoder_norm, self.decoder_norm = parts.norm(), parts.norm()
        self.drop = Dropout(c.dropout)

    def encode(self, ids: jax.Array, mask: jax.Array, deterministic: bool = True,
               packing: Packing | None = None) -> jax.Array:
        places = jnp.arange(ids.shape[1])
        bias = relative_bias(
            self.encoder_bias, places, places, self.config.relative_distance, both_ways=True)
        ids = ids if packing is None else packing.ids(ids)
        x = self.encoder(self.embed_targets(ids, None, deterministic), mask[:, None, None, :],
                         bias, packing, deterministic=deterministic)
        return self.drop(self.encoder_norm(x), deterministic=deterministic)

    def embed_targets(self, ids: jax.Array, positions: jax.Array | None = None,
                      deterministic: bool = True) -> jax.Array:
        del positions
        x = look_up(self.embedding, ids).astype(self.config.dtype)
        return self.drop(x, deterministic=deterministic)

    def self_bias(self, queries: jax.Array, keys: jax.Array) -> jax.Array:
        return relative_bias(
            self.decoder_bias, queries, keys, self.config.relative_distance, both_ways=False)

    def finish(self, x: jax.Array, deterministic: bool = True) -> jax.Array:
        x = self.drop(self.decoder_norm(x), deterministic=deterministic)
        return x * self.config.width**-0.5 if self.config.scale_output else x

    def logits(self, states: jax.Array) -> jax.Array:
        return vocabulary.logits(self.output, None, states)
