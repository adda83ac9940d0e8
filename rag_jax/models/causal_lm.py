"""Decoder-only language models as generators: Llama, Qwen, Gemma and their kin, by one module.

All have RMSNorm before or after each part, rotary positions, attention with fewer heads of keys and
values than of queries, and a gated feed-forward, without biases; VARIANTS is what each has beside
that, and `config.CausalConfig` has the numbers. A source is a prompt without its last token (see
`generator`): it is read once, and what is kept of it are the keys, turned to their positions, and
the values of every layer.

Two kinds of layers: global ones see all that came before, local ones the last `window` tokens, and
may have rotary positions of their own. What they share stands side by side, global first.
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
    """What a variant has beside what all have."""

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
    """By what angle float32[C / 2] each pair of numbers turns from one position to the next, and
    the factor of queries and keys (1, but of yarn).

    Sources: Su et al. 2021 (arXiv 2104.09864); yarn: Peng et al. 2023 (arXiv 2309.00071); llama3:
    the models of that name, as transformers computes it.
    """
    c, pairs = config, np.arange(config.head_size // 2)
    theta = c.rope_local_theta or c.rope_theta if local else c.rope_theta
    turning, factor = theta ** (-pairs / len(pairs)), 1.0
    if c.rope_type == "default" or local and c.rope_local_theta:
        return turning.astype(np.float32), factor
    scaled = turning / c.rope_factor
    if c.rope_type == "linear":
        kept = np.zeros(len(pairs))
    elif c.rope_type == "llama3":
        turns = c.rope_positions * turning / (2 * np.pi)
        kept = np.clip((turns - c.rope_low) / (c.rope_high - c.rope_low), 0, 1)
    else:
        first, last = (len(pairs) * math.log(c.rope_positions / (turns * 2 * math.pi))
                       / math.log(theta) for turns in (c.rope_high, c.rope_low))
        first, last = max(math.floor(first), 0), min(math.ceil(last), c.head_size - 1)
        kept = 1 - np.clip((pairs - first) / max(last - first, 0.001), 0, 1)
        factor = 0.1 * math.log(c.rope_factor) + 1 if c.rope_factor > 1 else 1.0
    return (kept * turning + (1 - kept) * scaled).astype(np.float32), factor


def turned(x: jax.Array, angles: jax.Array) -> jax.Array:
    """x [R, N, H, C] turned by `angles` float32[2, R, N, C / 2], their cosines and sines."""
    cosine, sine = angles[:, :, :, None]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine],
                           axis=-1).astype(x.dtype)


class Part(NamedTuple):
    """Some of what is attended to: P places."""

    kept: KeysValues  # [R, G, C, P] and [R, G, P, C]
    mask: jax.Array  # bool[R or 1, 1, N or 1, P], True where attention is allowed


def grouped_attention(queries: jax.Array, parts: Sequence[Part], cap: float) -> jax.Array:
    """Context [R, N, H * C] of scaled queries [R, H, N, C] over all parts together.

    Each of the G heads of keys and values serves H / G heads of queries, which stand one after the
    other, and whose rows are one matrix.
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
    """x = x + attention(norm(x)); x = x + feed_forward(norm(x)). Norms by `Variant`."""

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
        """Scaled queries [R, H, N, C], and keys and values, of x [R, N, D] at its positions."""
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
        between = self.mlp_norm(x) if has.before else x
        fed = self.wo(ACTIVATIONS[c.activation](self.gate(between)) * self.wi(between))
        return x + (self.fed_norm(fed) if has.after else fed)

    def __call__(self, x: jax.Array, angles: jax.Array, masks: jax.Array, kind: jax.Array | int,
                 *, deterministic: bool) -> jax.Array:
        """kind: which of the angles and masks are this layer's; 0 = global, 1 = local."""
        del deterministic
        queries, own = self.project(x, angles[kind])
        return self.finish(x, queries, [Part(own, masks[kind])])


# All layers are traced as one, but for those that the configuration makes others.
_project, _finish = nn.jit(Layer.project), nn.jit(Layer.finish)


class CausalLM(nn.Module):
    """`generator.Generator` of the decoder-only kind."""

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
        """The first layer's input dtype[R, N, D] of ids [R, N]; Gemma's scale is rounded to the
        dtype, as in transformers, whichever dtype the table is kept in."""
        c = self.config
        x = look_up(self.embedding, ids).astype(c.dtype)
        return x * c.width**0.5 if VARIANTS[c.variant].gemma else x

    def angles(self, positions: jax.Array) -> list[jax.Array]:
        """float32[2, R, N, C / 2] for `turned` at positions int32[R, N], for each kind of layer."""
        found = []
        for local in (False, True)[: self.kinds]:
            turning, factor = frequencies(self.config, local)
            turns = positions[..., None].astype(jnp.float32) * turning[None, None]
            found.append(factor * jnp.stack([jnp.cos(turns), jnp.sin(turns)]))
        return found

    def masks(self, allowed: jax.Array, distance: jax.Array) -> list[jax.Array]:
        """What each kind of layer may see of what is allowed, `distance` tokens back: both can be
        broadcast to [R, 1, N, P]."""
        near = distance < self.config.window
        return [allowed, allowed & near][: self.kinds]

    @property
    def kinds(self) -> int:
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
        count = tokens.shape[1]
        places = jnp.arange(own.shape[-1]) // count  # of the past
        masks = self.masks(own, position - places[None, None, None])

        def remember(layer: int, now: KeysValues) -> KeysValues:
            return past[layer].with_tokens(now, position)

        return self._about(source, tokens, jnp.broadcast_to(position, (count,)), masks, remember)

    def forced(self, source: Source, inputs: jax.Array) -> jax.Array:
        rows, answers, length = inputs.shape
        places, answer = np.tile(np.arange(length), answers), np.repeat(np.arange(answers), length)
        back = (places[:, None] - places)[None, None]
        same = (answer[:, None] == answer)[None, None]
        states, _ = self._about(source, inputs.reshape(rows, -1), jnp.asarray(places),
                                self.masks((back >= 0) & same, back), lambda layer, now: now)
        return states.reshape(rows * answers, length, -1)

    def _about(self, source: Source, tokens: jax.Array, places: jax.Array, own: list[jax.Array],
               remember: Callable[[int, KeysValues], KeysValues]
               ) -> tuple[jax.Array, tuple[KeysValues, ...]]:
        """States of tokens int32[R, N], and what each layer keeps of them.

        Args:
          source: what they continue.
          places: int32[N], how many tokens after the source's end.
          own: masks of what they see of one another and of `remember`.
          remember: (number of a layer, keys and values of the tokens) -> these with earlier ones.
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
    """The first target's position int32[R] after passages with tokens where mask [R, P, S] says:
    after the longest."""
    return mask.sum(axis=-1, dtype=jnp.int32).max(axis=-1)


def _followed(before: jax.Array, now: jax.Array, begin: jax.Array, axis: int) -> jax.Array:
    """`before` with room for `now`, and in each row that from place `begin` int32[R] on: a place
    along the axis is then a position."""
    room = jnp.concatenate([before, jnp.zeros_like(now)], axis)
    return jax.vmap(functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=axis - 1))(
        room, now, begin)


def _side_by_side(kept: KeysValues, passages: int) -> KeysValues:
    """Keys and values of [R * P, ...] as those of R documents of P passages each."""
    if passages == 1:
        return kept
    keys, values = (x.reshape(-1, passages, *x.shape[1:]) for x in kept)
    rows, _, groups, size, length = keys.shape
    return KeysValues(
        keys.transpose(0, 2, 3, 1, 4).reshape(rows, groups, size, passages * length),
        values.swapaxes(1, 2).reshape(rows, groups, passages * length, size))
