"""Multi-head attention, and what is kept of the tokens that are attended to.

Softmax is float32; the products run in `dtype`.
"""

import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from rag_jax.marginal import MASKED
from rag_jax.models.fused_attention import fused_attention
from rag_jax.models.layers import Dropout, dropped
from rag_jax.models.packing import Packing
from rag_jax.models.products import Linear, product, transposed

ATTENDED = "intermediates"  # collection of what `attended` gives, where a caller makes it mutable


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def attention(queries: jax.Array, keys: jax.Array, values: jax.Array, mask: jax.Array | None,
              kept: jax.Array | None, rate: float, bias: jax.Array | None = None) -> jax.Array:
    """softmax(queries [R, H, T, C] @ keys [R, H, C, S]) @ values [R, H, S, C].

    mask, bias: as in `Attention.attend`. kept: bool[R, H, T, S], False for weights that dropout at
    `rate` zeroes; None = no dropout. The backward pass keeps the weights in the dtype of values.
    """
    return _attention_forward(queries, keys, values, mask, kept, rate, bias)[0]


def _attention_forward(queries: jax.Array, keys: jax.Array, values: jax.Array,
                       mask: jax.Array | None, kept: jax.Array | None, rate: float,
                       bias: jax.Array | None) -> tuple[jax.Array, tuple]:
    scores_RHTS = product(queries, keys)
    if bias is not None:
        scores_RHTS += bias
    if mask is not None:  # a sum equals MASKED too, and XLA's CPU backend fuses it
        scores_RHTS += jnp.where(mask, 0.0, MASKED)
    weights_RHTS = jax.nn.softmax(scores_RHTS, axis=-1).astype(values.dtype)
    context_RHTC = product(dropped(weights_RHTS, kept, rate), values).astype(values.dtype)
    return context_RHTC, (queries, keys, values, mask, kept, weights_RHTS, bias)


def _attention_backward(rate: float, residuals: tuple, grad: jax.Array) -> tuple:
    queries, keys, values, mask, kept, weights_RHTS, bias = residuals
    dtype = values.dtype
    # Weights of what is masked are 0, and so are gradients there, but in rows where all is masked.
    seen = grad if mask is None else jnp.where(mask.any(axis=-1, keepdims=True), grad, 0)
    weights_grad = dropped(product(seen, transposed(values)), kept, rate)
    scores_grad = weights_RHTS * (
        weights_grad - jnp.sum(weights_RHTS * weights_grad, axis=-1, keepdims=True))
    bias_grad = None
    if bias is not None:
        alike = [axis for axis in range(4) if bias.shape[axis] < scores_grad.shape[axis]]
        bias_grad = scores_grad.sum(axis=alike, keepdims=True, dtype=bias.dtype)
    scores_grad = scores_grad.astype(dtype)
    # Transposed like this, the products never need [R, H, T, S] transposed in memory.
    values_grad = product(transposed(grad), dropped(weights_RHTS, kept, rate)).astype(dtype)
    return (product(scores_grad, transposed(keys)).astype(dtype),
            product(transposed(queries), scores_grad).astype(dtype),
            transposed(values_grad), None, None, bias_grad)


attention.defvjp(_attention_forward, _attention_backward)


def attended(queries: jax.Array, keys: jax.Array, values: jax.Array, mask: jax.Array | None
             ) -> jax.Array:
    """How much of its output an attention takes from each source token, float32[R, T, S]: weight
    times norm of the value, averaged over heads. It has no gradient. Arguments as of `attention`.
    """
    queries, keys, values = jax.lax.stop_gradient((queries, keys, values))
    scores_RHTS = product(queries, keys)
    if mask is not None:
        scores_RHTS += jnp.where(mask, 0.0, MASKED)
    norms_RHS = jnp.linalg.norm(values.astype(jnp.float32), axis=-1)
    return jnp.mean(jax.nn.softmax(scores_RHTS, axis=-1) * norms_RHS[:, :, None], axis=1)


class KeysValues(NamedTuple):
    """What attention reads: one matrix per head, as products with them read it."""

    keys: jax.Array  # dtype[R, H, C, S]
    values: jax.Array  # dtype[R, H, S, C]

    def with_tokens(self, now: "KeysValues", position: jax.Array) -> "KeysValues":
        """With those of one position's M tokens in their place, the M at position * M."""
        count = now.values.shape[2]
        return KeysValues(*(
            jax.lax.dynamic_update_slice_in_dim(room, latest, position * count, axis)
            for room, latest, axis in zip(self, now, (3, 2), strict=True)))


class Source(NamedTuple):
    """What a generator keeps of the sources that it has read."""

    layers: tuple[KeysValues, ...]  # of every layer of the decoder
    mask: jax.Array  # bool[R, S], where there are tokens
    begin: jax.Array | None = None  # int32[R], the first target's position; None = 0


class Attention(nn.Module):
    """Multi-head attention. C is `head_size`, or the width divided by the heads; queries are scaled
    by C ** -0.5, or, where they are not, their kernels are initialised so.

    `keys_values` and `attend` are separate so that decoding can keep keys and values in a cache.
    """

    heads: int
    width: int
    dropout: float = 0.0
    dtype: Any = jnp.float32
    init_std: float = 0.02
    fused: bool = True
    head_size: int = 0
    biased: bool = True
    scaled: bool = True

    def setup(self) -> None:
        self.size = self.head_size or self.width // self.heads
        self.scale = self.size**-0.5

        def into_heads(scale: float = 1.0) -> Linear:
            return Linear(self.heads * self.size, ("embed", "heads"), self.dtype,
                          self.init_std * scale, self.biased)

        self.query = into_heads(1.0 if self.scaled else self.scale)
        self.key, self.value = into_heads(), into_heads()
        self.out = Linear(
            self.width, ("heads", "embed"), self.dtype, self.init_std, self.biased)
        self.weight_dropout = Dropout(self.dropout)

    def _split(self, x: jax.Array, packing: Packing | None = None) -> jax.Array:
        if packing is not None:
            x = packing.pad(x)
        heads = x.reshape(*x.shape[:-1], self.heads, self.size)
        return heads.swapaxes(-2, -3)  # -> [R, H, S, C]

    def keys_values(self, x: jax.Array, packing: Packing | None = None) -> KeysValues:
        """Those of [R, S, D], or of packed [B, N, D]."""
        return KeysValues(self._split(self.key(x), packing).swapaxes(-1, -2),
                          self._split(self.value(x), packing))

    def attend(self, x: jax.Array, keys: jax.Array, values: jax.Array, mask: jax.Array | None,
               deterministic: bool, bias: jax.Array | None = None,
               packing: Packing | None = None, lengths: jax.Array | None = None) -> jax.Array:
        """Attends from x [R, T, D] over keys [R, H, C, S] and values [R, H, S, C].

        Args:
          mask: bool, broadcastable to [R, H, T, S], True where attention is allowed; None = all.
          bias: float32, likewise, added to the scores; None = 0.
          packing: x is packed, [B, N, D], and so is the result.
          lengths: as for `fused_attention`.
        """
        queries_RHTC = self._split(self.query(x), packing)
        if self.scaled:
            queries_RHTC = queries_RHTC * self.scale
        if bias is None and self.is_mutable_collection(ATTENDED):
            self.sow(ATTENDED, "attended", attended(queries_RHTC, keys, values, mask))
        context_RTD = None
        # Kernels drop no weights, and take no bias.
        if self.fused and bias is None and (deterministic or not self.dropout):
            context_RTD = fused_attention(queries_RHTC, keys, values, mask, lengths)
        if context_RTD is None:
            context_RTD = self._plain(queries_RHTC, keys, values, mask, deterministic, bias)
        if packing is not None:
            context_RTD = packing.pack(context_RTD)
        return self.out(checkpoint_name(context_RTD, "narrow"))

    def _plain(self, queries_RHTC: jax.Array, keys: jax.Array, values: jax.Array,
               mask: jax.Array | None, deterministic: bool, bias: jax.Array | None
               ) -> jax.Array:
        kept = self.weight_dropout.kept(
            (*queries_RHTC.shape[:-1], keys.shape[-1]), deterministic)
        context_RTHC = attention(
            queries_RHTC, keys, values, mask, kept, self.dropout, bias).swapaxes(1, 2)
        return context_RTHC.reshape(*context_RTHC.shape[:2], -1)  # -> [R, T, H * C]

    def __call__(self, x: jax.Array, source: jax.Array, mask: jax.Array | None,
                 deterministic: bool, bias: jax.Array | None = None,
                 packing: Packing | None = None) -> jax.Array:
        """`attend` of x to the `keys_values` of `source`, which are packed alike."""
        lengths = None if packing is None else packing.lengths
        keys, values = self.keys_values(source, packing)
        return self.attend(x, keys, values, mask, deterministic, bias, packing, lengths)
