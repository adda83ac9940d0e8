"""BERT (Devlin et al. 2019), as in the released checkpoints: post-LayerNorm, exact GELU.

RoBERTa (Liu et al. 2019) and XLM-R (Conneau et al. 2019) compute the same, but count positions
from another number.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from rag_jax.config import BartConfig, BertConfig
from rag_jax.models.attention import Attention
from rag_jax.models.layers import (
    POSITION_INITS,
    Dropout,
    FeedForward,
    LayerNorm,
    embedding_table,
    look_up,
)
from rag_jax.models.packing import Packing
from rag_jax.models.stack import Stack
from rag_jax.parallel import constrain


class EncoderLayer(nn.Module):
    """x = LN(x + attention(x)); x = LN(x + feed_forward(x)), of the first `rows` positions: BERT's,
    and BART's encoder's."""

    config: BertConfig | BartConfig
    activation_dropout: float = 0.0

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array, packing: Packing | None = None, *,
                 deterministic: bool, rows: int | None = None) -> jax.Array:
        c, dtype = self.config, jnp.dtype(self.config.dtype)
        drop = Dropout(c.dropout)
        asked = x if rows is None else constrain(x[:, :rows], "batch", name="asked positions")
        attended = Attention(
            c.heads, c.width, c.attention_dropout, dtype, c.init_std, c.fused_attention,
            name="attention",
        )(asked, x, mask, deterministic, packing=packing)
        x = LayerNorm(c.layer_norm_eps, dtype, name="attention_norm")(
            asked + drop(attended, deterministic=deterministic)
        )
        fed = FeedForward(
            c.mlp_width, c.width, c.activation, self.activation_dropout, dtype, c.init_std,
            name="mlp",
        )(x, deterministic)
        return LayerNorm(c.layer_norm_eps, dtype, name="mlp_norm")(
            x + drop(fed, deterministic=deterministic)
        )


class Bert(nn.Module):
    """Token ids to hidden states.

    __call__(ids int32[R, L], mask bool[R, L], token_types int32[R, L] | None, deterministic, rows)
    returns dtype[R, L, D]. Positions follow each other from `config.first_position` on, whatever
    the mask; None = all token types 0.
    `rows` asks for the states of the first so many positions only, dtype[R, rows, D]: the last
    layer then computes no others.
    """

    config: BertConfig

    @nn.compact
    def __call__(self, ids: jax.Array, mask: jax.Array, token_types: jax.Array | None = None,
                 deterministic: bool = True, rows: int | None = None) -> jax.Array:
        c, dtype = self.config, jnp.dtype(self.config.dtype)
        words = embedding_table(self, "token_embedding", c.vocab_size, c.width, "vocab")
        places = embedding_table(
            self, "position_embedding", c.first_position + c.max_positions, c.width, "positions",
            POSITION_INITS[c.position_init],
        )
        types = embedding_table(self, "type_embedding", c.type_vocab_size, c.width, "token_types")
        type_rows = types[0] if token_types is None else types[token_types]
        places = places[None, c.first_position :][:, : ids.shape[1]]
        x = look_up(words, ids) + places + jnp.broadcast_to(type_rows, (*ids.shape, c.width))
        x = LayerNorm(c.layer_norm_eps, dtype, name="embedding_norm")(x)
        x = Dropout(c.dropout)(x, deterministic=deterministic)
        stack = Stack(
            functools.partial(EncoderLayer, c), c.layers, c.remat, c.scan_layers, name="encoder"
        )
        return stack(x, mask[:, None, None, :], deterministic=deterministic, rows=rows)
