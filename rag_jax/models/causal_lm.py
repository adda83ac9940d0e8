"""Decoder-only language models as generators: Llama, Qwen, Gemma and similar ones, in one module.

All have RMSNorm before or after each part, rotary positions, grouped-query attention and a gated
feed-forward, without biases. `VARIANTS` says what else each has, and `config.CausalConfig` has the
numbers. A source is a prompt without its last token (see `generator`). It is read once, and kept of
it are the values of every layer and the keys, rotated by their positions.

There are two kinds of layers. Global ones attend to all earlier tokens; local ones to the last
`window`, and they may have a rotation of their own. Lists and arrays with an entry for each kind
have the global one first. A window is not for several passages of a document (Fusion-in-Decoder),
which `rag_jax.config.rules` refuses: in `_continued`, the place in a source has to be the position.

In shapes, G is the number of heads of keys and values, and in those of `Part`, P that of places.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from rag_jax.config import CausalConfig
from rag_jax.marginal import MASKED
from rag_jax.models import vocabulary
from rag_jax.models.attention import KeysValues, Source
from rag_jax.models.layers import ACTIVATIONS, RmsNorm, capped, embedding_table, look_up
from rag_jax.models.products import Linear, product
from rag_jax.models.stack import Stack


class Variant(NamedTuple):
    """What a variant has besides what all of them have."""

    biases: bool = False  # of queries, keys and values
    head_norms: bool = False  # RMSNorm of queries and keys, head by head
    wide_norms: bool = False  # the same, of all heads together
    before: bool = True  # RMSNorm of what each part reads
    after: bool = False  # RMSNorm of what each part adds
    gemma: bool = False  # norms scale by 1 + w, embeddings by sqrt(width)


VARIANTS = {
    "llama": Variant(),
    "mistral": Variant(),
    "qwen2": Variant(biases=True),
    "qwen3": Variant(head_norms=True),
    "gemma2": Variant(gemma=True, after=True),
    "gemma3": Variant(gemma=True, after=True, head_norms=True),
    "olmo2": Variant(before=False, after=True, wide_norms=True),
}


def frequencies(config: CausalConfig, local: bool = False) -> tuple[np.ndarray, float]:
    """The rotary frequencies float32[C / 2], in radians per position, by which pairs of numbers
    are rotated, and the factor of queries and keys, which is 1 for all types but yarn.

    Sources: Su et al. 2021 (arXiv 2104.09864); yarn: Peng et al. 2023 (arXiv 2309.00071); llama3:
    the models of that name, as transformers computes it.
    """
    c, pairs = config, np.arange(config.head_size // 2)
    theta = c.rope_local_theta or c.rope_theta if local else c.rope_theta
    unscaled, factor = theta ** (-pairs / len(pairs)), 1.0
    if c.rope_type == "default" or local and c.rope_local_theta:
        return unscaled.astype(np.float32), factor
    scaled = unscaled / c.rope_factor
    if c.rope_type == "linear":
        kept = np.zeros(len(pairs))  # how much of each frequency stays unscaled
    elif c.rope_type == "llama3":
        turns = c.rope_positions * unscaled / (2 * np.pi)
        kept = np.clip((turns - c.rope_low) / (c.rope_high - c.rope_low), 0, 1)
    else:
        first, last = (len(pairs) * math.log(c.rope_positions / (turns * 2 * math.pi))
                       / math.log(theta) for turns in (c.rope_high, c.rope_low))
        first, last = max(math.floor(first), 0), min(math.ceil(last), c.head_size - 1)
        kept = 1 - np.clip((pairs - first) / (last - first or 0.001), 0, 1)
        factor = 0.1 * math.log(c.rope_factor) + 1 if c.rope_factor > 1 else 1.0
    return (kept * unscaled + (1 - kept) * scaled).astype(np.float32), factor


def turned(x: jax.Array, angles: jax.Array) -> jax.Array:
    """x [R, N, H, C] rotated by angles whose cosines and sines are float32[2, R, N, C / 2]."""
    cosine, sine = angles[:, :, :, None]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine],
                           axis=-1).astype(x.dtype)


class Part(NamedTuple):
    """Keys and values at P of the places that are attended to."""

    kept: KeysValues  # [R, G, C, P] and [R, G, P, C]
    mask: jax.Array  # bool[R or 1, 1, N or 1, P], True where attention is allowed


def grouped_attention(queries: jax.Array, parts: Sequence[Part], cap: float) -> jax.Array:
    """Context [R, N, H * C] of scaled queries [R, H, N, C] over all parts together.

    Each of the G heads of keys and values serves H / G successive heads of queries, whose rows are
    multiplied as one matrix. cap: of the scores, as for `layers.capped`.
    """
    rows, heads, count, size = queries.shape
    groups = parts[0].kept.keys.shape[1]
    by_group = queries.reshape(rows, groups, -1, size)
    scores = []
    for part in parts:
        scores_RGHNP = product(by_group, part.kept.keys).reshape(
            rows, groups, heads // groups, count, -1)
        scores.append(capped(scores_RGHNP, cap) + jnp.where(part.mask, 0.0, MASKED)[:, :, None])
    weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1).astype(queries.dtype)
    ends = np.cumsum([each.shape[-1] for each in scores])[:-1]
    context = sum(
        product(each.reshape(rows, groups, -1, each.shape[-1]), part.kept.values)
        for each, part in zip(jnp.split(weights, ends, axis=-1), parts, strict=True))
    context = context.astype(queries.dtype).reshape(rows, heads, count, size)
    return context.swapaxes(1, 2).reshape(rows, count, -1)


class Layer(nn.Module):
    """x = x + attention(norm(x)); x = x + feed_forward(norm(x)). `Variant` says where norms are."""

    config: CausalConfig

    def setup(self) -> None:
        c, has = self.config, VARIANTS[self.config.variant]
        dtype = jnp.dtype(c.dtype)

        def linear(width: int, axes: tuple[str, str], biased: bool = False) -> Linear:
            return Linear(width, axes, dtype, c.init_std, biased)

        norm = functools.partial(RmsNorm, c.layer_norm_eps, dtype, float(has.gemma))
        self.query = linear(c.heads * c.head_size, ("embed", "heads"), has.biases)
        self.key = linear(c.kv_heads * c.head_size, ("embed", "heads"), has.biases)
        self.value = linear(c.kv_heads * c.head_size, ("embed", "heads"), has.biases)
        self.out = linear(c.width, ("heads", "embed"))
        self.gate = linear(c.mlp_width, ("embed", "mlp"))
        self.wi = linear(c.mlp_width, ("embed", "mlp"))
        self.wo = linear(c.width, ("mlp", "embed"))
        if has.before:
            self.attention_norm, self.mlp_norm = norm(), norm()
        if has.head_norms or has.wide_norms:
            self.query_norm, self.key_norm = (norm(axes=(None, "heads")) for _ in range(2))
        if has.after:
            self.attended_norm, self.fed_norm = norm(), norm()

    def project(self, x: jax.Array, angles: jax.Array) -> tuple[jax.Array, KeysValues]:
        """Scaled queries [R, H, N, C], and keys and values, of x [R, N, D]; angles: as in
        `turned`."""
        c, has = self.config, VARIANTS[self.config.variant]
        x = self.attention_norm(x) if has.before else x
        queries, keys, values = self.query(x), self.key(x), self.value(x)
        if has.wide_norms:
            queries, keys = self.query_norm(queries), self.key_norm(keys)
        queries, keys, values = (each.reshape(*x.shape[:2], -1, c.head_size)
                                 for each in (queries, keys, values))
        if has.head_norms:
            queries, keys = self.query_norm(queries), self.key_norm(keys)
        queries, keys = turned(queries, angles), turned(keys, angles)
        queries = queries * (c.query_size or c.head_size) ** -0.5
        return queries.swapaxes(1, 2), KeysValues(
            keys.transpose(0, 2, 3, 1), values.swapaxes(1, 2))

    def finish(self, x: jax.Array, queries: jax.Array, parts: Sequence[Part]) -> jax.Array:
        """The layer's result for x [R, N, D], whose queries attend to `parts`."""
        c, has = self.config, VARIANTS[self.config.variant]
        context = grouped_attention(queries, parts, c.attention_cap)
        attended = self.out(checkpoint_name(context, "narrow"))
        x = x + (self.attended_norm(attended) if has.after else attended)
        mlp_input = self.mlp_norm(x) if has.before else x
        fed = self.wo(ACTIVATIONS[c.activation](self.gate(mlp_input)) * self.wi(mlp_input))
        return x + (self.fed_norm(fed) if has.after else fed)

    def __call__(self, x: jax.Array, angles: jax.Array, masks: jax.Array, kind: jax.Array | int,
                 *, deterministic: bool) -> jax.Array:
        """kind: the index of this layer's angles and masks; 0 = global, 1 = local."""
        del deterministic
        queries, own = self.project(x, angles[kind])
        return self.finish(x, queries, [Part(own, masks[kind])])


# Under jit, layers with equal shapes and configurations are traced once.
_project, _finish = nn.jit(Layer.project), nn.jit(Layer.finish)


class CausalLM(nn.Module):
    """A `generator.Generator` of the decoder-only kind, whose methods are described there."""

    config: CausalConfig

    def setup(self) -> None:
        c = self.config
        self.embedding = embedding_table(self, "embedding", c.vocab_size, c.width, "vocab")
        self.output = self.embedding if c.tied else embedding_table(
            self, "output", c.vocab_size, c.width, "vocab")
        self.decoder = Stack(
            functools.partial(Layer, c), c.decoder_layers, c.remat, c.scan_layers)
        gemma = VARIANTS[c.variant].gemma
        self.norm = RmsNorm(c.layer_norm_eps, jnp.dtype(c.dtype), float(gemma))

    def embed(self, ids: jax.Array) -> jax.Array:
        """The first layer's input dtype[R, N, D] of ids [R, N].

        Whatever the dtype of the table, Gemma's scale is rounded to `dtype`, as in transformers.
        """
        c = self.config
        x = look_up(self.embedding, ids).astype(c.dtype)
        return x * c.width**0.5 if VARIANTS[c.variant].gemma else x

    def angles(self, positions: jax.Array) -> list[jax.Array]:
        """For each kind of layer, what `turned` takes at positions int32[R, N]: float32[2, R, N,
        C / 2]."""
        result = []
        for local in (False, True)[: self.kinds]:
            rates, factor = frequencies(self.config, local)
            radians = positions[..., None].astype(jnp.float32) * rates[None, None]
            result.append(factor * jnp.stack([jnp.cos(radians), jnp.sin(radians)]))
        return result

    def masks(self, allowed: jax.Array, distance: jax.Array) -> list[jax.Array]:
        """For each kind of layer, a mask broadcastable to [R, 1, N, P]: `allowed`, and in local
        layers a `distance` of fewer positions than the window."""
        near = distance < self.config.window
        return [allowed, allowed & near][: self.kinds]

    @property
    def kinds(self) -> int:
        """The number of kinds of layers."""
        return 2 if self.config.window else 1

    def states(self, ids: jax.Array, mask: jax.Array, inputs: jax.Array,
               deterministic: bool = True) -> jax.Array:
        rows, passages, length = ids.shape
        targets = inputs.shape[1]
        places = jnp.tile(jnp.arange(length), passages)
        positions = jnp.concatenate([
            jnp.broadcast_to(places[None], (rows, passages * length)),
            _begin(mask)[:, None] + jnp.arange(targets)[None]], axis=1)  # -> [R, N]
        passage = np.repeat(np.arange(passages + 1), [length] * passages + [targets])
        earlier = np.tril(np.ones((len(passage),) * 2, bool))
        earlier &= (passage[:, None] == passage) | (passage[:, None] == passages)
        real = jnp.pad(mask.reshape(rows, -1), ((0, 0), (0, targets)), constant_values=True)
        masks = self.masks(earlier[None, None] & real[:, None, None],
                           (positions[:, :, None] - positions[:, None])[:, None])
        x = self.embed(jnp.concatenate([ids.reshape(rows, -1), inputs], axis=1))
        x = self.decoder(x, jnp.stack(self.angles(positions)), jnp.stack(masks),
                        each=np.array(self.config.local_layers, np.int32),
                        deterministic=deterministic)
        return self.norm(x[:, -targets:])

    def read(self, ids: jax.Array, mask: jax.Array, before: Source | None = None) -> Source:
        rows, passages, length = ids.shape
        positions, real = jnp.arange(length)[None], mask.reshape(-1, length)
        if before is not None:
            positions = before.begin[:, None] + positions  # -> [R * P, S]
            real = _followed(before.mask, real, before.begin, 1)
        back = positions[:, None, :, None] - jnp.arange(real.shape[1])[None, None, None]
        masks = self.masks((back >= 0) & real[:, None, None], back)
        angles, kept = self.angles(positions), []
        x = self.embed(ids.reshape(-1, length))
        for number, (layer, local) in enumerate(
                zip(self.decoder.loop(), self.config.local_layers, strict=True)):
            queries, own = _project(layer, x, angles[local])
            if before is not None:
                own = KeysValues(*(_followed(*pair, before.begin, axis) for *pair, axis in zip(
                    before.layers[number], own, (3, 2), strict=True)))
            x = _finish(layer, x, queries, [Part(own, masks[local])])
            kept.append(_side_by_side(own, passages))
        real = real.reshape(rows, passages, -1)
        return Source(tuple(kept), real.reshape(rows, -1), _begin(real))

    def step(self, source: Source, tokens: jax.Array, position: jax.Array,
             past: tuple[KeysValues, ...], own: jax.Array
             ) -> tuple[jax.Array, tuple[KeysValues, ...]]:
        rows, steps, count = tokens.shape
        places = position + jnp.repeat(jnp.arange(steps), count)
        back = places[:, None] - jnp.arange(own.shape[-1])[None] // count

        def remember(layer: int, now: KeysValues) -> KeysValues:
            return past[layer].with_tokens(now, position * count)

        return self._continued(source, tokens.reshape(rows, -1), places,
                               self.masks(own, back[None, None]), remember)

    def forced(self, source: Source, inputs: jax.Array) -> jax.Array:
        rows, answers, length = inputs.shape
        places, answer = np.tile(np.arange(length), answers), np.repeat(np.arange(answers), length)
        back = (places[:, None] - places)[None, None]
        same = (answer[:, None] == answer)[None, None]
        states, _ = self._continued(
            source, inputs.reshape(rows, -1), jnp.asarray(places),
            self.masks((back >= 0) & same, back), lambda layer, now: now)
        return states.reshape(rows * answers, length, -1)

    def _continued(self, source: Source, tokens: jax.Array, places: jax.Array,
                   own: list[jax.Array], remember: Callable[[int, KeysValues], KeysValues]
                   ) -> tuple[jax.Array, tuple[KeysValues, ...]]:
        """States of tokens int32[R, N] that continue a source, and each layer's keys and values.

        Args:
          places: int32[N], how many positions after the first target's each token is.
          own: for each kind of layer, the mask between the tokens and what `remember` returns.
          remember: (number of a layer, keys and values of the tokens) -> the same with those of
            earlier tokens.
        """
        positions = source.begin[:, None] + places[None]  # -> [R, N]
        seen = source.mask[:, None, None]
        back = positions[:, None, :, None] - jnp.arange(source.mask.shape[1])[None, None, None]
        masks, angles, kept = self.masks(seen, back), self.angles(positions), []
        x = self.embed(tokens)
        for number, (layer, local, read) in enumerate(zip(
                self.decoder.loop(), self.config.local_layers, source.layers, strict=True)):
            queries, now = _project(layer, x, angles[local])
            kept.append(remember(number, now))
            x = _finish(layer, x, queries, [Part(read, masks[local]), Part(kept[-1], own[local])])
        return self.norm(x), tuple(kept)

    def __call__(self, ids: jax.Array, mask: jax.Array, inputs: jax.Array,
                 deterministic: bool = True) -> jax.Array:
        states = self.states(ids[:, None], mask[:, None], inputs, deterministic)
        return vocabulary.logits(self.output, None, states, self.config.logit_cap)


def _begin(mask: jax.Array) -> jax.Array:
    """The first target's position int32[R], which follows the longest of the P passages whose
    tokens are where mask [R, P, S] is True."""
    return mask.sum(axis=-1, dtype=jnp.int32).max(axis=-1)


def _followed(before: jax.Array, now: jax.Array, begin: jax.Array, axis: int) -> jax.Array:
    """`before`, and `now` behind it from place `begin` int32[R] of each row on, so that places
    along the axis are positions."""
    longer = jnp.concatenate([before, jnp.zeros_like(now)], axis)
    return jax.vmap(functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=axis - 1))(
        longer, now, begin)


def _side_by_side(kept: KeysValues, passages: int) -> KeysValues:
    """Keys and values of [R * P, ...] as those of R documents of P passages each."""
    if passages == 1:
        return kept
    keys, values = (x.reshape(-1, passages, *x.shape[1:]) for x in kept)
    rows, _, groups, size, length = keys.shape
    return KeysValues(
        keys.transpose(0, 2, 3, 1, 4).reshape(rows, groups, size, passages * length),
        values.swapaxes(1, 2).reshape(rows, groups, passages * length, size))
