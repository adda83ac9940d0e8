"""BART (Lewis et al. 2019, arXiv 1910.13461), as in the released checkpoints.

LayerNorm follows each part of a layer and the embeddings; positions are learned and have an offset
of 2; the output layer is the table of the embeddings, plus a bias.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from rag_jax.config import BartConfig
from rag_jax.models import encoder_decoder, vocabulary
from rag_jax.models.bert import parts
from rag_jax.models.blocks import DecoderLayer, EncoderLayer
from rag_jax.models.layers import POSITION_INITS, Dropout, LayerNorm, embedding_table, look_up
from rag_jax.models.packing import Packing
from rag_jax.models.parameters import parameter
from rag_jax.models.products import Linear
from rag_jax.models.stack import Stack
from rag_jax.parallel import constrain

POSITION_OFFSET = 2  # row p + 2 of the table belongs to position p


class ClassificationHead(nn.Module):
    """Logits float32[..., Y] of Y classes from states [..., D], with a tanh layer of width D.

    Differs from Hugging Face: the dropout rate is the generator's; there it is
    `classifier_dropout`, which is 0 as released.
    """

    config: BartConfig
    classes: int

    @nn.compact
    def __call__(self, states: jax.Array, deterministic: bool = True) -> jax.Array:
        c, drop = self.config, Dropout(self.config.dropout)
        x = drop(states.astype(jnp.float32), deterministic=deterministic)
        x = jnp.tanh(Linear(c.width, ("embed", "mlp"), init_std=c.init_std, name="dense")(x))
        x = drop(x, deterministic=deterministic)
        return Linear(self.classes, ("mlp", "classes"), init_std=c.init_std, name="out")(x)


def _first(table: jax.Array, length: int) -> jax.Array:
    """Rows [length, D] of a position table for the positions from 0 on."""
    return table[POSITION_OFFSET : POSITION_OFFSET + length]


def _at(table: jax.Array, positions: jax.Array) -> jax.Array:
    """Rows [N, D] or [B, N, D] of a position table for positions int32[N] or int32[B, N]."""
    whole = constrain(table, "positions", name="position table")
    rows = whole[positions + POSITION_OFFSET]
    return rows if positions.ndim == 1 else constrain(rows, "batch", name="positions")


class Bart(encoder_decoder.EncoderDecoder):
    """Encoder and decoder, which share the table of token embeddings."""

    packs = True
    config: BartConfig

    def setup(self) -> None:
        c, dtype = self.config, jnp.dtype(self.config.dtype)
        self.embedding = embedding_table(self, "embedding", c.vocab_size, c.width, "vocab")
        self.logits_bias = parameter(
            self, "final_logits_bias", (c.vocab_size,), ("vocab",), nn.initializers.zeros)
        self.encoder_positions, self.decoder_positions = (
            embedding_table(self, name, c.max_positions + POSITION_OFFSET, c.width, "positions",
                            POSITION_INITS[c.position_init])
            for name in ("encoder_positions", "decoder_positions"))
        self.encoder_embedding_norm = LayerNorm(c.layer_norm_eps, dtype)
        self.decoder_embedding_norm = LayerNorm(c.layer_norm_eps, dtype)
        self.drop = Dropout(c.dropout)
        self.encoder = Stack(functools.partial(
            EncoderLayer, parts(c, c.heads, c.mlp_width, c.activation_dropout)),
            c.encoder_layers, c.remat, c.scan_layers)
        self.decoder = Stack(functools.partial(
            DecoderLayer, parts(c, *c.decoder_sizes, c.activation_dropout)),
            c.decoder_layers, c.remat, c.scan_layers)

    def embed(self, ids: jax.Array, positions: jax.Array, norm: nn.Module, deterministic: bool
               ) -> jax.Array:
        """The first layer's input [R, N, D] from ids [R, N] and the rows of their positions,
        [N, D] or [R, N, D]."""
        scale = self.config.width**0.5 if self.config.scale_embedding else 1.0
        positions = positions if positions.ndim == 3 else positions[None]
        rows = look_up(self.embedding, ids).astype(jnp.float32)  # bfloat16 would round the scale
        x = norm(rows * scale + positions)
        return self.drop(x, deterministic=deterministic)

    def encode(self, ids: jax.Array, mask: jax.Array, deterministic: bool = True,
               packing: Packing | None = None) -> jax.Array:
        if packing is None:
            places = _first(self.encoder_positions, ids.shape[1])
        else:
            places = _at(self.encoder_positions, packing.places % ids.shape[1])
            ids = packing.ids(ids)
        x = self.embed(ids, places, self.encoder_embedding_norm, deterministic)
        return self.encoder(x, mask[:, None, None, :], None, packing, deterministic=deterministic)

    def embed_targets(self, ids: jax.Array, positions: jax.Array | None = None,
                      deterministic: bool = True) -> jax.Array:
        if positions is None:
            places = _first(self.decoder_positions, ids.shape[1])
        else:
            places = _at(self.decoder_positions, positions)
        return self.embed(ids, places, self.decoder_embedding_norm, deterministic)

    def logits(self, states: jax.Array) -> jax.Array:
        return vocabulary.logits(self.embedding, self.logits_bias, states)
