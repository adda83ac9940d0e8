"""The tokens of many inputs, or targets, side by side in one row, without the padding between them.

Products, norms and dropout compute tokens one by one, so they run on packed rows; attention alone,
a fifth of an encoder layer's work at most, reads padded inputs.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from rag_jax.parallel import constrain


class Packing(NamedTuple):
    """Which of N tokens in B packed rows stand where in R padded inputs of S tokens.

    The inputs of a packed row are R / B that follow one another.
    """

    places: jax.Array  # int32[B, N], among the R / B * S of its inputs; R / B * S for none
    tokens: jax.Array  # int32[R, S], among the N of its packed row; N for padding

    @classmethod
    def of(cls, places: jax.Array, inputs: int, length: int) -> "Packing":
        """From places int32[B, N], which ascend, of so many inputs of S tokens."""
        count, at = places.shape[1], jnp.arange(inputs * length // len(places))
        tokens = jax.vmap(lambda row: jnp.searchsorted(row, at))(places).astype(jnp.int32)
        there = jnp.take_along_axis(places, tokens, axis=1, mode="clip") == at[None]
        return cls(places, jnp.where(there, tokens, count).reshape(inputs, length))

    @property
    def lengths(self) -> jax.Array:
        """int32[R], how many tokens each input has."""
        return (self.tokens < self.places.shape[1]).sum(axis=1, dtype=jnp.int32)

    @property
    def _tokens(self) -> jax.Array:
        return self.tokens.reshape(len(self.places), -1)

    def ids(self, ids: jax.Array) -> jax.Array:
        """Token ids [R, S] as [B, N]; some id where there is no token."""
        return jnp.take_along_axis(ids.reshape(self._tokens.shape), self.places, 1, mode="clip")

    def pack(self, x: jax.Array) -> jax.Array:
        """[R, S, D] of heads side by side -> [B, N, D]; 0 where there is no token."""
        return _take(x.reshape(*self._tokens.shape, x.shape[-1]), self.places, self._tokens)

    def padded(self, values: jax.Array) -> jax.Array:
        """[B, N], one number a token, -> [R, S]; 0 where there is padding."""
        return jnp.take_along_axis(
            values, self._tokens, axis=1, mode="fill", fill_value=0).reshape(self.tokens.shape)

    def pad(self, x: jax.Array) -> jax.Array:
        """[B, N, D] -> [R, S, D]; 0 where there is padding."""
        return _take(x, self._tokens, self.places).reshape(*self.tokens.shape, x.shape[-1])


@jax.custom_vjp
def _take(x: jax.Array, at: jax.Array, back: jax.Array) -> jax.Array:
    """Rows `at` int32[B, M] of x [B, L, D], 0 beyond L. `back` int32[B, L] inverts `at`, so that
    the gradient looks up too: to add up by number is slower everywhere."""
    taken = jnp.take_along_axis(x, at[..., None], axis=1, mode="fill", fill_value=0)
    return constrain(taken, "batch", None, "heads", name="packed tokens")


_take.defvjp(lambda x, at, back: (_take(x, at, back), (at, back)),
             lambda kept, grad: (_take(grad, kept[1], kept[0]), None, None))
