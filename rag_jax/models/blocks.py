"""The layers of encoders and decoders, made of the parts that each family of models has."""

from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax

from rag_jax.models.attention import KeysValues
from rag_jax.models.layers import Dropout
from rag_jax.models.packing import Packing
from rag_jax.parallel import constrain


class Parts(NamedTuple):
    """What the layers of a family are made of.

    Attributes:
      attention, mlp, norm: functions that make one module each.
      dropout: the rate at which results of attention and feed-forward are dropped.
      before: norms come first, x + part(norm(x)), as in T5; otherwise last, norm(x + part(x)), as
        in BERT and BART.
    """

    attention: Callable[..., nn.Module]
    mlp: Callable[..., nn.Module]
    norm: Callable[..., nn.Module]
    dropout: float
    before: bool

    def read(self, norm: nn.Module, x: jax.Array) -> jax.Array:
        """The input of a part."""
        return norm(x) if self.before else x

    def added(self, norm: nn.Module, x: jax.Array, result: jax.Array) -> jax.Array:
        """The residual connection after a part, from its result."""
        return x + result if self.before else norm(x + result)


class EncoderLayer(nn.Module):
    """Self-attention and feed-forward, of the first `rows` positions only; None = of all."""

    parts: Parts

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array, bias: jax.Array | None = None,
                 packing: Packing | None = None, *, deterministic: bool, rows: int | None = None
                 ) -> jax.Array:
        parts, drop = self.parts, Dropout(self.parts.dropout)
        norm = parts.norm(name="attention_norm")
        source = queries = parts.read(norm, x)
        if rows is not None:
            queries = constrain(source[:, :rows], "batch", name="asked positions")
            x = x[:, :rows] if parts.before else queries
        attended = parts.attention(name="attention")(
            queries, source, mask, deterministic, bias, packing)
        x = parts.added(norm, x, drop(attended, deterministic=deterministic))
        norm = parts.norm(name="mlp_norm")
        fed = parts.mlp(name="mlp")(parts.read(norm, x), deterministic)
        return parts.added(norm, x, drop(fed, deterministic=deterministic))


class DecoderLayer(nn.Module):
    """Causal self-attention, cross-attention and feed-forward."""

    parts: Parts

    def setup(self) -> None:
        parts = self.parts
        self.self_attention, self.cross_attention = parts.attention(), parts.attention()
        self.self_norm, self.cross_norm, self.mlp_norm = (parts.norm() for _ in range(3))
        self.mlp, self.drop = parts.mlp(), Dropout(parts.dropout)

    def cached(self, x: jax.Array, packing: Packing | None = None) -> KeysValues:
        """Keys and values of self-attention for x [R, T, D], or packed [B, N, D]."""
        return self.self_attention.keys_values(self.parts.read(self.self_norm, x), packing)

    def attend(self, x: jax.Array, past: KeysValues, mask: jax.Array, bias: jax.Array | None,
               deterministic: bool, packing: Packing | None = None) -> jax.Array:
        """The result of self-attention from x [R, T, D], or packed [B, N, D], over `past`."""
        return self.self_attention.attend(
            self.parts.read(self.self_norm, x), *past, mask, deterministic, bias, packing)

    def after_self(self, x: jax.Array, attended: jax.Array, source: KeysValues,
                   source_mask: jax.Array, deterministic: bool, packing: Packing | None = None
                   ) -> jax.Array:
        """What follows self-attention, from x and its result `attended` [R, T, D], or packed."""
        x = self.parts.added(self.self_norm, x, self.drop(attended, deterministic=deterministic))
        crossed = self.cross_attention.attend(
            self.parts.read(self.cross_norm, x), *source, source_mask, deterministic,
            packing=packing)
        x = self.parts.added(self.cross_norm, x, self.drop(crossed, deterministic=deterministic))
        fed = self.mlp(self.parts.read(self.mlp_norm, x), deterministic)
        return self.parts.added(self.mlp_norm, x, self.drop(fed, deterministic=deterministic))

    def __call__(self, x: jax.Array, encoded: jax.Array, source_mask: jax.Array, causal: jax.Array,
                 bias: jax.Array | None, sources: Packing | None = None,
                 targets: Packing | None = None, *, deterministic: bool) -> jax.Array:
        attended = self.attend(x, self.cached(x, targets), causal, bias, deterministic, targets)
        source = self.cross_attention.keys_values(encoded, sources)
        return self.after_self(x, attended, source, source_mask, deterministic, targets)
