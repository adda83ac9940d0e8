"""Multi-head attention, and the keys and values that a decoder keeps of the tokens before.

The softmax is computed in float32, the matrix products in `dtype`.
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
from rag_jax.models.products import Linear, anew, product, transposed

ATTENDED = "intermediates"  # the collection that receives `attended`, where it is mutable


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def attention(queries: jax.Array, keys: jax.Array, values: jax.Array, mask: jax.Array | None,
              kept: jax.Array | None, rate: float, bias: jax.Array | None = None) -> jax.Array:
    """dtype[R, H, T, C] = softmax(queries [R, H, T, C] @ keys [R, H, C, S]) @ values [R, H, S, C].

    The backward pass keeps the weights in the dtype of the values.

    Args:
      mask, bias: as in `Attention.attend`.
      kept: bool[R, H, T, S], False for weights that dropout at `rate` zeroes; None = no dropout.
    """
    return _attention_forward(queries, keys, values, mask, kept, rate, bias)[0]


def _attention_forward(queries: jax.Array, keys: jax.Array, values: jax.Array,
                       mask: jax.Array | None, kept: jax.Array | None, rate: float,
                       bias: jax.Array | None) -> tuple[jax.Array, tuple]:
    scores_RHTS = product(queries, keys)
    if bias is not None:
        scores_RHTS += bias
    if mask is not None:  # a score + MASKED is MASKED in float32, and XLA's CPU backend fuses sums
        scores_RHTS += jnp.where(mask, 0.0, MASKED)
    weights_RHTS = jax.nn.softmax(scores_RHTS, axis=-1).astype(values.dtype)
    context_RHTC = product(dropped(weights_RHTS, kept, rate), values).astype(values.dtype)
    return context_RHTC, (queries, keys, values, mask, kept, weights_RHTS, bias)


def _attention_backward(rate: float, residuals: tuple, grad: jax.Array) -> tuple:
    queries, keys, values, mask, kept, weights_RHTS, bias = anew(residuals)
    dtype = values.dtype
    # A masked score has weight 0 and therefore gradient 0, except where a row is masked as a whole
    # and its weights are uniform: such rows get their gradient 0 here.
    allowed_grad = grad if mask is None else jnp.where(mask.any(axis=-1, keepdims=True), grad, 0)
    weights_grad = dropped(product(allowed_grad, transposed(values)), kept, rate)
    scores_grad = weights_RHTS * (
        weights_grad - jnp.sum(weights_RHTS * weights_grad, axis=-1, keepdims=True))
    bias_grad = None
    if bias is not None:
        broadcast = [axis for axis in range(4) if bias.shape[axis] < scores_grad.shape[axis]]
        bias_grad = scores_grad.sum(axis=broadcast, keepdims=True, dtype=bias.dtype)
    scores_grad = scores_grad.astype(dtype)
    # These forms of the products never transpose [R, H, T, S] in memory.
    values_grad = product(transposed(grad), dropped(weights_RHTS, kept, rate)).astype(dtype)
    return (product(scores_grad, transposed(keys)).astype(dtype),
            product(transposed(queries), scores_grad).astype(dtype),
            transposed(values_grad), None, None, bias_grad)


attention.defvjp(_attention_forward, _attention_backward)


def attended(queries: jax.Array, keys: jax.Array, values: jax.Array, mask: jax.Array | None
             ) -> jax.Array:
    """How much each source token contributes to the output of an attention, float32[R, T, S].

    This is the attention weight times the norm of the value, averaged over heads; it has no
    gradient. The arguments are those of `attention`.
    """
    queries, keys, values = jax.lax.stop_gradient((queries, keys, values))
    scores_RHTS = product(queries, keys)
    if mask is not None:
        scores_RHTS += jnp.where(mask, 0.0, MASKED)
    norms_RHS = jnp.linalg.norm(values.astype(jnp.float32), axis=-1)
    return jnp.mean(jax.nn.softmax(scores_RHTS, axis=-1) * norms_RHS[:, :, None], axis=1)


class KeysValues(NamedTuple):
    """Keys and values, one matrix per head, laid out as the products of attention read them."""

    keys: jax.Array  # dtype[R, H, C, S]
    values: jax.Array  # dtype[R, H, S, C]

    def with_tokens(self, now: "KeysValues", place: jax.Array) -> "KeysValues":
        """These, with the tokens `now` written from a place int32[] on."""
        return KeysValues(*(
            jax.lax.dynamic_update_slice_in_dim(cache, new, place, axis)
            for cache, new, axis in zip(self, now, (3, 2), strict=True)))


class Source(NamedTuple):
    """What a generator keeps of the sources that it has read."""

    layers: tuple[KeysValues, ...]  # one for every layer of the decoder
    mask: jax.Array  # bool[R, S], True where there are tokens
    begin: jax.Array | None = None  # int32[R], the first target's position; None = 0


class Attention(nn.Module):
    """Multi-head attention.

    A head has the width C = `head_size`, or `width` divided by `heads` where that is 0. `scaled`
    queries are multiplied by C ** -0.5; otherwise their kernel is initialised smaller by this
    factor, as in T5. `fused`: a kernel of `fused_attention` is used where there is one.

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
        """Keys and values of x [R, S, D], or of packed x [B, N, D]."""
        return KeysValues(self._split(self.key(x), packing).swapaxes(-1, -2),
                          self._split(self.value(x), packing))

    def attend(self, x: jax.Array, keys: jax.Array, values: jax.Array, mask: jax.Array | None,
               deterministic: bool, bias: jax.Array | None = None,
               packing: Packing | None = None, lengths: jax.Array | None = None) -> jax.Array:
        """Attends from x [R, T, D] over keys [R, H, C, S] and values [R, H, S, C].

        Args:
          mask: bool, broadcastable to [R, H, T, S], True where attention is allowed; None = all.
          bias: float32, broadcastable to [R, H, T, S], added to the scores; None = 0.
          packing: how x is packed, which is then [B, N, D], as the result is; None = not packed.
          lengths: as for `fused_attention`.

        Returns:
          dtype[R, T, D].
        """
        queries_RHTC = self._split(self.query(x), packing)
        if self.scaled:
            queries_RHTC = queries_RHTC * self.scale
        if bias is None and self.is_mutable_collection(ATTENDED):
            self.sow(ATTENDED, "attended", attended(queries_RHTC, keys, values, mask))
        context_RTD = None
        # The kernels have no dropout and no bias.
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
        """Attends from x to `source`; `packing` is that of both, of inputs whose tokens attend to
        all of their own: the mask then says nothing that their lengths do not."""
        lengths = None if packing is None else packing.lengths
        keys, values = self.keys_values(source, packing)
        return self.attend(x, keys, values, mask, deterministic, bias, packing, lengths)
