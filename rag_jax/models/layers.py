"""The parts of Transformers besides attention: embeddings, activations, norms, dropout and
feed-forward.

Statistics of norms are float32.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from rag_jax.models.parameters import parameter
from rag_jax.models.products import Linear
from rag_jax.parallel import constrain, platform, random_bits

embedding_init = nn.initializers.normal(stddev=0.02)


@jax.custom_vjp
def gelu(x: jax.Array) -> jax.Array:
    """x Phi(x), not its tanh approximation, computed by erf in float32, as in torch.

    XLA's CPU backend takes 2.4 times as long for erfc. The backward pass keeps only x.
    """
    wide = x.astype(jnp.float32)
    return (wide * _normal_cdf(wide)).astype(x.dtype)


def _normal_cdf(x: jax.Array) -> jax.Array:
    return 0.5 * (1 + jax.lax.erf(x * 0.5**0.5))


def _gelu_forward(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return gelu(x), x


def _gelu_backward(x: jax.Array, grad: jax.Array) -> tuple[jax.Array]:
    wide = jax.lax.optimization_barrier(x).astype(jnp.float32)  # or XLA keeps the forward pass's
    density = jnp.exp(-0.5 * wide * wide) * (2 * math.pi) ** -0.5
    return ((grad * (_normal_cdf(wide) + wide * density)).astype(x.dtype),)


gelu.defvjp(_gelu_forward, _gelu_backward)
ACTIVATIONS: dict[str, Callable] = {"gelu": gelu, "gelu_new": jax.nn.gelu, "relu": jax.nn.relu,
                                    "silu": jax.nn.silu}


def sinusoids(key: jax.Array, shape: tuple[int, int], dtype: Any = jnp.float32) -> jax.Array:
    """Initialiser for position tables: sinusoids of the scale of the other embeddings (std 0.02).

    A shift of position is then a rotation from the first step on, so that a small model trained
    from scratch learns "the token before" in hundreds of steps instead of thousands.
    """
    del key
    positions, width = shape
    rates = jnp.exp(-jnp.log(10_000.0) * jnp.arange(0, width, 2) / width)
    angles = jnp.arange(positions)[:, None] * rates[None, :]
    table = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)[:, :width]
    return (0.02 * jnp.sqrt(2.0) * table).astype(dtype)


POSITION_INITS: dict[str, Callable] = {"normal": embedding_init, "sinusoidal": sinusoids}


def embedding_table(module: nn.Module, name: str, rows: int, width: int, rows_axis: str,
                    init: Callable = embedding_init) -> jax.Array:
    """A float32[rows, width] parameter of `module` with logical axes (rows_axis, "embed")."""
    return parameter(module, name, (rows, width), (rows_axis, "embed"), init)


def capped(logits: jax.Array, cap: float) -> jax.Array:
    """cap * tanh(logits / cap), which is between -cap and cap; for a cap of 0, the logits."""
    return cap * jnp.tanh(logits / cap) if cap else logits


def look_up(table: jax.Array, ids: jax.Array) -> jax.Array:
    """Rows [R, L, D] of a token table [V, D]; the table, not the rows, is gathered over fsdp."""
    whole = constrain(table, "vocab", name="token table")
    if table.dtype == jnp.bfloat16:
        # XLA's CPU backend looks up in float32, and would convert the whole table before a loop.
        whole, ids = jax.lax.optimization_barrier((whole, ids))
    return constrain(whole[ids], "batch", name="embedded tokens")


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def norm(x: jax.Array, scale: jax.Array, bias: jax.Array | None, epsilon: float) -> jax.Array:
    """float32 LayerNorm of x [..., D] with scale and bias [D]; for a bias of None, RMSNorm, which
    does not subtract the mean. The backward pass keeps x in its own dtype only."""
    return _scaled(_normed(x, epsilon, bias is not None)[0], scale, bias)


def _scaled(x: jax.Array, scale: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    leading = range(x.ndim - 1)
    x = x * jnp.expand_dims(scale, leading)
    return x if bias is None else x + jnp.expand_dims(bias, leading)


def _normed(x: jax.Array, epsilon: float, centred: bool) -> tuple[jax.Array, jax.Array]:
    """x scaled to mean square 1, after its mean is subtracted if `centred`, and the factor of the
    scaling; float32."""
    x = x.astype(jnp.float32)
    if centred:
        x = x - x.mean(axis=-1, keepdims=True)
    inverse = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + epsilon)
    return x * inverse, inverse


def _norm_forward(x: jax.Array, scale: jax.Array, bias: jax.Array | None, epsilon: float
                  ) -> tuple[jax.Array, tuple]:
    return norm(x, scale, bias, epsilon), (x, scale, bias)


def _norm_backward(epsilon: float, kept: tuple[jax.Array | None, ...], grad: jax.Array
                   ) -> tuple[jax.Array | None, ...]:
    x, scale, bias = jax.lax.optimization_barrier(kept)  # or XLA keeps more of the forward pass
    centred, shape = bias is not None, x.shape
    # XLA's CPU backend divides a reduction among cores by its first axis alone: all rows become
    # one axis. Heads may be split over devices, and stay an axis of their own.
    x, grad = (each.reshape(-1, *shape[min(2, len(shape) - 1):]) for each in (x, grad))
    rows = tuple(range(x.ndim - 1))
    normed, inverse = _normed(x, epsilon, centred)
    scaled = _scaled(grad, scale)
    along = jnp.mean(scaled * normed, axis=-1, keepdims=True)
    if centred:
        scaled = scaled - scaled.mean(axis=-1, keepdims=True)
    x_grad = (inverse * (scaled - normed * along)).astype(x.dtype).reshape(shape)
    # From 4,096 rows on, XLA's CPU backend takes two to six times as long where both gradients
    # share one `normed`.
    if platform(x) == "cpu" and inverse.size >= 4096:
        normed, _ = _normed(jax.lax.optimization_barrier(x), epsilon, centred)
    scale_grad = jnp.sum(grad * normed, axis=rows).astype(scale.dtype)
    bias_grad = jnp.sum(grad, axis=rows).astype(bias.dtype) if centred else None
    return x_grad, scale_grad, bias_grad


norm.defvjp(_norm_forward, _norm_backward)


class _NormParameters(nn.Module):
    """Scale and bias float32[D]."""

    @nn.compact
    def __call__(self, width: int) -> tuple[jax.Array, jax.Array]:
        return tuple(
            parameter(self, name, (width,), ("norm",), init)
            for name, init in (("scale", nn.initializers.ones), ("bias", nn.initializers.zeros)))


class LayerNorm(nn.Module):
    """LayerNorm with float32 statistics and a result in `dtype`."""

    epsilon: float
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale, bias = _NormParameters(name="norm")(x.shape[-1])
        normed = norm(x, scale, bias, self.epsilon).astype(self.dtype)
        return constrain(normed, "batch", name="/".join(self.path))


class RmsNorm(nn.Module):
    """x / (root mean square of x) * (offset + scale), computed in float32, returned in `dtype`."""

    epsilon: float
    dtype: Any = jnp.float32
    offset: float = 0.0
    axes: tuple[str | None, ...] = ()  # logical names of the result's dimensions after the batch

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = nn.initializers.constant(1 - self.offset)
        scale = parameter(self, "scale", x.shape[-1:], ("norm",), init) + self.offset
        normed = norm(x, scale, None, self.epsilon).astype(self.dtype)
        return constrain(normed, "batch", *self.axes, name="/".join(self.path))


class Dropout(nn.Module):
    """Elements become 0 with probability `rate`; the others are divided by 1 - rate.

    Differs from flax: each element takes 16 random bits instead of 32, which XLA's CPU backend
    draws in a third of the time. The rate is exact to 2 ** -17.
    """

    rate: float

    def __call__(self, x: jax.Array, deterministic: bool) -> jax.Array:
        return dropped(x, self.kept(x.shape, deterministic), self.rate)

    def kept(self, shape: tuple[int, ...], deterministic: bool) -> jax.Array | None:
        """bool array of this shape, False where elements become 0; None = nowhere."""
        if deterministic or not self.rate:
            return None
        pairs = random_bits(self.make_rng("dropout"), (*shape[:-1], -(-shape[-1] // 2)))
        least = round(self.rate * 2**16)
        halves = [(pairs & 0xFFFF) >= least, pairs >> 16 >= least]
        return jnp.concatenate(halves, axis=-1)[..., : shape[-1]]


def dropped(x: jax.Array, kept: jax.Array | None, rate: float) -> jax.Array:
    """x / (1 - rate) where `kept`, from `Dropout.kept`, is True, 0 elsewhere; x for None."""
    if kept is None:
        return x
    return jnp.where(kept, x / (1 - rate), 0) if rate < 1 else jnp.zeros_like(x)


class FeedForward(nn.Module):
    """wo(activation(wi(x))), or, if gated, wo(activation(gate(x)) * wi(x))."""

    hidden: int
    width: int
    activation: str = "gelu"
    dropout: float = 0.0
    dtype: Any = jnp.float32
    init_std: float = 0.02
    biased: bool = True
    gated: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, deterministic: bool) -> jax.Array:
        def linear(width: int, axes: tuple[str, str], name: str) -> Linear:
            return Linear(width, axes, self.dtype, self.init_std, self.biased, name=name)

        wide, activation = ("embed", "mlp"), ACTIVATIONS[self.activation]
        y = linear(self.hidden, wide, "wi")(x)
        y = activation(linear(self.hidden, wide, "gate")(x)) * y if self.gated else activation(y)
        y = Dropout(self.dropout)(y, deterministic=deterministic)
        return linear(self.width, ("mlp", "embed"), "wo")(y)
