"""ModernBERT (Warner et al. 2024, arXiv 2412.13663): BERT with rotary positions, local and global
attention, norms before each part, gated feed-forward, and no biases."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from rag_jax.config import BertConfig
from rag_jax.models.attention import attention
from rag_jax.models.causal_lm import turned
from rag_jax.models.layers import ACTIVATIONS, Dropout, embedding_table, look_up, norm
from rag_jax.models.parameters import parameter
from rag_jax.models.products import Linear
from rag_jax.models.stack import Stack


class ScaleNorm(nn.Module):
    """LayerNorm without a bias."""

    config: BertConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = parameter(self, "scale", x.shape[-1:], ("norm",), nn.initializers.ones)
        normed = norm(x, scale, jnp.zeros_like(scale), self.config.layer_norm_eps)
        return normed.astype(self.config.dtype)


class ModernBertLayer(nn.Module):
    """x = x + attention(norm(x)); x = x + feed_forward(norm(x)).

    Layer 0 has no norm before its attention. rows: only the first `rows` positions are computed.
    """

    config: BertConfig
    number: int

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array, *, deterministic: bool,
                 rows: int | None = None) -> jax.Array:
        c, dtype = self.config, jnp.dtype(self.config.dtype)
        places, size = np.arange(x.shape[1]), c.width // c.heads
        theta = c.rope_theta
        if self.number % c.global_every:
            theta = c.rope_local_theta
            near = np.abs(places[:, None] - places) <= c.local_attention // 2
            mask = mask & near[None, None, :rows]

        def linear(name: str, width: int, axes: tuple[str, str]) -> Linear:
            return Linear(width, axes, dtype, c.init_std, False, name=name)

        normed = ScaleNorm(c, name="attention_norm")(x) if self.number else x
        qkv = linear("qkv", 3 * c.width, ("embed", "heads"))(normed)
        queries, keys, values = (qkv.reshape(*x.shape[:2], 3, c.heads, size)[:, :, i]
                                 for i in range(3))
        angles = places[:, None] * theta ** (-np.arange(0, size, 2) / size)
        turns = jnp.asarray(np.stack([np.cos(angles), np.sin(angles)])[:, None], jnp.float32)
        queries, keys = turned(queries, turns)[:, :rows] * size**-0.5, turned(keys, turns)
        drop = Dropout(c.attention_dropout)
        shape = (len(x), c.heads, queries.shape[1], x.shape[1])
        context = attention(queries.swapaxes(1, 2), keys.transpose(0, 2, 3, 1),
                            values.swapaxes(1, 2), mask, drop.kept(shape, deterministic),
                            c.attention_dropout)
        context = context.swapaxes(1, 2).reshape(len(x), -1, c.width)
        attended = linear("out", c.width, ("heads", "embed"))(context)
        x = x[:, :rows] + Dropout(c.attention_dropout)(attended, deterministic)
        wide = linear("wi", 2 * c.mlp_width, ("embed", "mlp"))(ScaleNorm(c, name="mlp_norm")(x))
        fed, gate = jnp.split(wide, 2, axis=-1)
        fed = Dropout(c.dropout)(ACTIVATIONS[c.activation](fed) * gate, deterministic)
        return x + linear("wo", c.width, ("mlp", "embed"))(fed)


class ModernBert(nn.Module):
    """Token ids to hidden states, as in `bert.Bert`; token types are ignored."""

    config: BertConfig

    @nn.compact
    def __call__(self, ids: jax.Array, mask: jax.Array, token_types: jax.Array | None = None,
                 deterministic: bool = True, rows: int | None = None) -> jax.Array:
        del token_types
        c = self.config
        words = embedding_table(self, "token_embedding", c.vocab_size, c.width, "vocab")
        x = ScaleNorm(c, name="embedding_norm")(look_up(words, ids))
        layer = functools.partial(ModernBertLayer, c)
        x = Stack(layer, c.layers, c.remat, numbered=True, name="encoder")(
            x, mask[:, None, None, :], deterministic=deterministic, rows=rows)
        return ScaleNorm(c, name="final_norm")(x)
