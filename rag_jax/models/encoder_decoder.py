"""What generators with an encoder and a decoder share: the methods of `generator.Generator`.

The encoder reads each passage alone. Kept of it are, for each layer of the decoder, the keys and
values of cross-attention.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from rag_jax.models.attention import KeysValues, Source
from rag_jax.models.packing import Packing


@nn.jit
def _grow(layer: nn.Module, x: jax.Array, source: KeysValues, source_mask: jax.Array,
          past: KeysValues, place: jax.Array, own: jax.Array, bias: jax.Array | None
          ) -> tuple[jax.Array, KeysValues]:
    """A layer's states of more tokens, and its past with these tokens from a place on; traced once
    for all."""
    past = past.with_tokens(layer.cached(x), place)
    attended = layer.attend(x, past, own, bias, True)
    return layer.after_self(x, attended, source, source_mask, True), past


@nn.jit
def _force(layer: nn.Module, x: jax.Array, source: KeysValues, source_mask: jax.Array,
           causal: jax.Array, bias: jax.Array | None) -> jax.Array:
    """A layer's states [R * A, T, D] of A answers to each of R sources; traced once for all."""
    attended = layer.attend(x, layer.cached(x), causal, bias, True)
    by_source = (len(source_mask), -1, x.shape[-1])  # [R, A * T, D]
    return layer.after_self(x.reshape(by_source), attended.reshape(by_source), source, source_mask,
                            True).reshape(x.shape)


class EncoderDecoder(nn.Module):
    """The base class of a family's module.

    The module sets up `decoder`, a `Stack` of `DecoderLayer`, and has these methods:

      encode(ids int32[R, S], mask bool[R, S], deterministic) -> dtype[R, S, D]; a module that
        `packs` also takes a `Packing` of them, and then returns dtype[B, N, D]
      embed_targets(ids int32[R, T], positions, deterministic) -> dtype[R, T, D], the decoder's
        input at positions int32[T] or int32[R, T], or, for None, at 0, 1, ...
      logits(states dtype[..., D]) -> float32[..., V]

    It may override `self_bias` and `finish`.
    """

    packs = False  # whether `states` can leave out padding

    def self_bias(self, queries: jax.Array, keys: jax.Array) -> jax.Array | None:
        """The bias float32[1, H, Q, S] of the decoder's self-attention from positions int32[Q] to
        positions int32[S]; None = 0."""
        return None

    def _causal(self, length: int) -> tuple[jax.Array, jax.Array | None]:
        """The mask bool[1, 1, T, T] and the bias of self-attention over T targets."""
        places = jnp.arange(length)
        return jnp.tril(jnp.ones((length, length), bool))[None, None], self.self_bias(
            places, places)

    def finish(self, x: jax.Array, deterministic: bool = True) -> jax.Array:
        """The output layer's input, from the result of the last layer."""
        return x

    def decode(self, encoded: jax.Array, mask: jax.Array, inputs: jax.Array,
               deterministic: bool = True, sources: Packing | None = None,
               targets: Packing | None = None) -> jax.Array:
        """Teacher-forced states dtype[R, T, D] from the encoder's states and inputs int32[R, T];
        of packed targets dtype[B, N, D]."""
        length, positions = inputs.shape[1], None
        if targets is not None:
            inputs, positions = targets.ids(inputs), targets.places % length
        x = self.embed_targets(inputs, positions, deterministic)
        if sources is not None:  # one row of targets may have several packed inputs
            sources = sources._replace(tokens=sources.tokens.reshape(mask.shape))
        x = self.decoder(x, encoded, mask[:, None, None, :], *self._causal(length), sources,
                         targets, deterministic=deterministic)
        return self.finish(x, deterministic)

    def _encode_documents(self, ids: jax.Array, mask: jax.Array, deterministic: bool
                          ) -> tuple[jax.Array, jax.Array]:
        """States dtype[R, P*S, D] and mask bool[R, P*S] of passages [R, P, S], each read alone."""
        passages = (-1, ids.shape[-1])
        states = self.encode(ids.reshape(passages), mask.reshape(passages), deterministic)
        return states.reshape(len(ids), -1, states.shape[-1]), mask.reshape(len(ids), -1)

    def states(self, ids: jax.Array, mask: jax.Array, inputs: jax.Array,
               deterministic: bool = True, places: jax.Array | None = None,
               target_places: jax.Array | None = None) -> jax.Array:
        targets = None if target_places is None else Packing.of(target_places, *inputs.shape)
        if places is None or not self.packs:
            encoded, mask = self._encode_documents(ids, mask, deterministic)
            return self.decode(encoded, mask, inputs, deterministic, None, targets)
        by_input = (ids.shape[0] * ids.shape[1], ids.shape[2])
        sources = Packing.of(places, *by_input)
        encoded = self.encode(
            ids.reshape(by_input), mask.reshape(by_input), deterministic, sources)
        return self.decode(
            encoded, mask.reshape(len(ids), -1), inputs, deterministic, sources, targets)

    def read(self, ids: jax.Array, mask: jax.Array) -> Source:
        encoded, mask = self._encode_documents(ids, mask, True)
        return Source(tuple(layer.cross_attention.keys_values(encoded)
                            for layer in self.decoder.loop()), mask)

    def step(self, source: Source, tokens: jax.Array, position: jax.Array,
             past: tuple[KeysValues, ...], own: jax.Array
             ) -> tuple[jax.Array, tuple[KeysValues, ...]]:
        rows, steps, count = tokens.shape
        positions = position + jnp.repeat(jnp.arange(steps), count)
        x = self.embed_targets(tokens.reshape(rows, -1), positions)  # -> [R, N * M, D]
        bias = self.self_bias(positions, jnp.arange(own.shape[-1]) // count)
        mask, layers = source.mask[:, None, None, :], []
        for layer, cross, old in zip(self.decoder.loop(), source.layers, past, strict=True):
            x, new = _grow(layer, x, cross, mask, old, position * count, own, bias)
            layers.append(new)
        return self.finish(x), tuple(layers)

    def forced(self, source: Source, inputs: jax.Array) -> jax.Array:
        rows, count, length = inputs.shape
        x = self.embed_targets(inputs.reshape(rows * count, length))  # -> [R*A, T, D]
        mask, (causal, bias) = source.mask[:, None, None, :], self._causal(length)
        for layer, cross in zip(self.decoder.loop(), source.layers, strict=True):
            x = _force(layer, x, cross, mask, causal, bias)
        return self.finish(x)

    def __call__(self, ids: jax.Array, mask: jax.Array, inputs: jax.Array,
                 deterministic: bool = True) -> jax.Array:
        encoded = self.encode(ids, mask, deterministic)
        return self.logits(self.decode(encoded, mask, inputs, deterministic))
