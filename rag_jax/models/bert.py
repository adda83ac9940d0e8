"""BERT (Devlin et al. 2019), as in the released checkpoints: LayerNorm after each part, exact GELU.

RoBERTa (Liu et al. 2019) and XLM-R (Conneau et al. 2019) are the same network, whose positions
begin at another number.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from rag_jax.config import BartConfig, BertConfig
from rag_jax.models.attention import Attention
from rag_jax.models.blocks import EncoderLayer, Parts
from rag_jax.models.layers import (
    POSITION_INITS,
    Dropout,
    FeedForward,
    LayerNorm,
    embedding_table,
    look_up,
)
from rag_jax.models.stack import Stack


def parts(config: BertConfig | BartConfig, heads: int, mlp_width: int,
          activation_dropout: float | None = None) -> Parts:
    """The parts of BERT's layers, and of BART's. A dropout rate of None means 0."""
    c, dtype = config, jnp.dtype(config.dtype)
    return Parts(functools.partial(Attention, heads, c.width, c.attention_dropout or 0.0,
                                   dtype, c.init_std, c.fused_attention),
                 functools.partial(FeedForward, mlp_width, c.width, c.activation,
                                   activation_dropout or 0.0, dtype, c.init_std),
                 functools.partial(LayerNorm, c.layer_norm_eps, dtype), c.dropout, before=False)


class Bert(nn.Module):
    """Token ids to hidden states dtype[R, L, D].

    __call__(ids int32[R, L], mask bool[R, L], token_types int32[R, L] | None, deterministic, rows):
      token_types: None = all 0.
      rows: only the states of the first `rows` positions are returned, dtype[R, rows, D], and the
        last layer computes no others; None = all.

    Positions are counted from `config.first_position` on, whatever the mask.
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
        layer = functools.partial(EncoderLayer, parts(c, c.heads, c.mlp_width))
        stack = Stack(layer, c.layers, c.remat, c.scan_layers, name="encoder")
        return stack(x, mask[:, None, None, :], deterministic=deterministic, rows=rows)
