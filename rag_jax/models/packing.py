"""Packing: the tokens of many inputs or targets side by side in one row, without padding between.

Linear layers, norms and dropout treat tokens one by one, so they run on packed rows. Only attention
needs padded inputs; it is at most a fifth of an encoder layer's work.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from rag_jax.parallel import constrain


class Packing(NamedTuple):
    """Where the N tokens of each of B packed rows are in R padded inputs of S tokens.

    Each packed row holds R / B successive inputs.
    """

    # int32[B, N], the place of each token among the R / B * S of its row's inputs; R / B * S where
    # there is no token.
    places: jax.Array
    tokens: jax.Array  # int32[R, S], the index in its packed row of N tokens; N for padding

    @classmethod
    def of(cls, places: jax.Array, inputs: int, length: int) -> "Packing":
        """From ascending places int32[B, N] in R = `inputs` inputs of S = `length` tokens."""
        count, at = places.shape[1], jnp.arange(inputs * length // len(places))
        tokens = jax.vmap(lambda row: jnp.searchsorted(row, at))(places).astype(jnp.int32)
        there = jnp.take_along_axis(places, tokens, axis=1, mode="clip") == at[None]
        return cls(places, jnp.where(there, tokens, count).reshape(inputs, length))

    @property
    def lengths(self) -> jax.Array:
        """The number of tokens of each input, int32[R]."""
        return (self.tokens < self.places.shape[1]).sum(axis=1, dtype=jnp.int32)

    @property
    def _tokens(self) -> jax.Array:
        return self.tokens.reshape(len(self.places), -1)

    def ids(self, ids: jax.Array) -> jax.Array:
        """Token ids [R, S] as [B, N]; an arbitrary id where there is no token."""
        return jnp.take_along_axis(ids.reshape(self._tokens.shape), self.places, 1, mode="clip")

    def pack(self, x: jax.Array) -> jax.Array:
        """[R, S, D] -> [B, N, D]; 0 where there is no token."""
        return _take(x.reshape(*self._tokens.shape, x.shape[-1]), self.places, self._tokens)

    def padded(self, values: jax.Array) -> jax.Array:
        """[B, N] -> [R, S], for one number per token; 0 where there is padding."""
        return jnp.take_along_axis(
            values, self._tokens, axis=1, mode="fill", fill_value=0).reshape(self.tokens.shape)

    def pad(self, x: jax.Array) -> jax.Array:
        """[B, N, D] -> [R, S, D]; 0 where there is padding."""
        return _take(x, self._tokens, self.places).reshape(*self.tokens.shape, x.shape[-1])


@jax.custom_vjp
def _take(x: jax.Array, at: jax.Array, back: jax.Array) -> jax.Array:
    """Rows `at` int32[B, M] of x [B, L, D], and 0 where `at` is L or more.

    `back` int32[B, L] is the inverse of `at`: with it the gradient is a gather, too, which is
    faster than a scatter on every platform.
    """
    taken = jnp.take_along_axis(x, at[..., None], axis=1, mode="fill", fill_value=0)
    return constrain(taken, "batch", None, "heads", name="packed tokens")


_take.defvjp(lambda x, at, back: (_take(x, at, back), (at, back)),
             lambda kept, grad: (_take(grad, kept[1], kept[0]), None, None))
