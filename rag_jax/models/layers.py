"""Transformer parts shared by BERT and BART: both are post-LayerNorm with biased projections.

Every parameter carries logical axis names; `rag_jax.parallel` maps them to mesh axes.
Matrix products run in `dtype`; softmax and LayerNorm statistics are float32.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint

from rag_jax.marginal import MASKED
from rag_jax.models.fused_attention import fused_attention
from rag_jax.models.packing import Packing
from rag_jax.parallel import constrain, platform, random_bits

ATTENDED = "intermediates"  # collection of what `attended` gives, where a caller makes it mutable
embedding_init = nn.initializers.normal(stddev=0.02)


@jax.custom_vjp
def gelu(x: jax.Array) -> jax.Array:
    """x Phi(x) exactly, not the tanh approximation; by erf in float32, as torch does.

    XLA's CPU backend takes 2.4 times as long for erfc. The backward pass needs x alone.
    """
    wide = x.astype(jnp.float32)
    return (wide * _normal_cdf(wide)).astype(x.dtype)


def _normal_cdf(x: jax.Array) -> jax.Array:
    return 0.5 * (1 + jax.lax.erf(x * 0.5**0.5))


def _gelu_forward(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return gelu(x), x


def _gelu_backward(x: jax.Array, grad: jax.Array) -> tuple[jax.Array]:
    wide = jax.lax.optimization_barrier(x).astype(jnp.float32)  # keeps nothing of the forward pass
    density = jnp.exp(-0.5 * wide * wide) * (2 * math.pi) ** -0.5
    return ((grad * (_normal_cdf(wide) + wide * density)).astype(x.dtype),)


gelu.defvjp(_gelu_forward, _gelu_backward)
ACTIVATIONS: dict[str, Callable] = {"gelu": gelu, "gelu_new": jax.nn.gelu, "relu": jax.nn.relu,
                                    "silu": jax.nn.silu}


def sinusoids(key: jax.Array, shape: tuple[int, int], dtype: Any = jnp.float32) -> jax.Array:
    """Initialiser for position tables: sinusoids of the scale of the other embeddings (std 0.02).

    A shift of position is then a rotation from the first step on, which lets a small model that
    is trained from scratch learn "the token before" in hundreds of steps instead of thousands.
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
    return module.param(
        name, nn.with_logical_partitioning(init, (rows_axis, "embed")), (rows, width), jnp.float32
    )


@jax.custom_vjp
def linear(x: jax.Array, kernel: jax.Array, bias: jax.Array | None) -> jax.Array:
    """x [R, D] @ kernel float32[D, F] + bias float32[F], or None, in the dtype of x, summed in
    float32; the gradients of kernel and bias are float32.

    Accelerators sum in float32 anyway. XLA's CPU backend runs products of bfloat16 matrices four
    times faster if their sums are float32 and both matrices lie in memory row by row.
    """
    y = product(x, kernel.astype(x.dtype))
    return (y if bias is None else y + bias[None]).astype(x.dtype)


def _linear_forward(x: jax.Array, kernel: jax.Array, bias: jax.Array | None
                    ) -> tuple[jax.Array, tuple]:
    return linear(x, kernel, bias), (x, kernel, bias)


def _linear_backward(kept: tuple[jax.Array | None, ...], grad: jax.Array) -> tuple:
    x, kernel, bias = kept
    return (product(grad, transposed(kernel.astype(x.dtype))).astype(x.dtype),
            product(transposed(x), grad).astype(kernel.dtype),
            None if bias is None else jnp.sum(grad, axis=0, dtype=jnp.float32))


linear.defvjp(_linear_forward, _linear_backward)


def by_rows(multiply: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """multiply(x) float32[..., N, F] of x [..., N, D], whose rows are multiplied one like another.

    XLA's CPU backend takes two to three times as long for one row in bfloat16 as for two: there,
    it multiplies another one of zeros.
    """
    if x.shape[-2] > 1 or x.dtype != jnp.bfloat16 or platform(x) != "cpu":
        return multiply(x)
    return multiply(jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, 1), (0, 0)]))[..., :1, :]


def product(x: jax.Array, y: jax.Array) -> jax.Array:
    """float32[..., N, F] = x [..., N, D] @ y [..., D, F], summed in float32."""
    return by_rows(
        lambda rows: jnp.matmul(rows, y, preferred_element_type=jnp.float32), x)


def transposed(x: jax.Array) -> jax.Array:
    """The last two axes swapped, on a CPU in memory too."""
    # A layout constraint would gather an array that is split over devices.
    if x.dtype == jnp.float32 or jax.typeof(x).sharding.mesh.size > 1:
        return x.mT
    by_rows = Layout(major_to_minor=tuple(range(x.ndim)))
    return jax.lax.platform_dependent(
        x, cpu=lambda x: with_layout_constraint(x.mT, by_rows), default=lambda x: x.mT)


def capped(logits: jax.Array, cap: float) -> jax.Array:
    """cap * tanh(logits / cap), which is between -cap and cap; 0 = as they are."""
    return cap * jnp.tanh(logits / cap) if cap else logits


def look_up(table: jax.Array, ids: jax.Array) -> jax.Array:
    """Rows [R, L, D] of a token table [V, D], which is gathered over fsdp first, not its rows."""
    whole = constrain(table, "vocab", name="token table")
    if table.dtype == jnp.bfloat16:
        # XLA's CPU backend looks up in float32, and would convert all of the table before a loop.
        whole, ids = jax.lax.optimization_barrier((whole, ids))
    return constrain(whole[ids], "batch", name="embedded tokens")


class Linear(nn.Module):
    """x @ kernel, + bias where it is `biased`, over the last axis, with logical axis names on both.

    The product runs on a matrix of all rows: its transposes are then plain matrix products too,
    which XLA's CPU backend runs twice as fast as contractions over several axes.
    """

    features: int
    axes: tuple[str, str]
    dtype: Any = jnp.float32
    init_std: float = 0.02
    biased: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.param(
            "kernel", nn.with_logical_partitioning(
                nn.initializers.normal(self.init_std), self.axes),
            (x.shape[-1], self.features), jnp.float32,
        )
        bias = self.param(
            "bias", nn.with_logical_partitioning(nn.initializers.zeros, self.axes[1:]),
            (self.features,), jnp.float32,
        ) if self.biased else None
        rows = x.reshape(-1, x.shape[-1]).astype(self.dtype)
        y = linear(rows, kernel, bias).reshape(*x.shape[:-1], self.features)
        # States keep their width whole: "embed" is how parameters are stored.
        last = None if self.axes[1] == "embed" else self.axes[1]
        y = constrain(y, "batch", *(None,) * (y.ndim - 2), last, name="/".join(self.path))
        return checkpoint_name(y, "wide" if self.features > x.shape[-1] else "narrow")


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array, epsilon: float) -> jax.Array:
    """LayerNorm of [..., D] in float32; the backward pass keeps x in its own dtype alone."""
    rows = range(x.ndim - 1)
    return _normed(x, epsilon)[0] * jnp.expand_dims(scale, rows) + jnp.expand_dims(bias, rows)


def _normed(x: jax.Array, epsilon: float) -> tuple[jax.Array, jax.Array]:
    """x with mean 0 and variance 1, and by what it was divided, inverted; float32."""
    centred = x.astype(jnp.float32)
    centred = centred - centred.mean(axis=-1, keepdims=True)
    inverse = jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + epsilon)
    return centred * inverse, inverse


def _norm_forward(x: jax.Array, scale: jax.Array, bias: jax.Array, epsilon: float
                  ) -> tuple[jax.Array, tuple]:
    return layer_norm(x, scale, bias, epsilon), (x, scale)


def _norm_backward(epsilon: float, kept: tuple[jax.Array, jax.Array], grad: jax.Array
                   ) -> tuple[jax.Array, ...]:
    x, scale = jax.lax.optimization_barrier(kept)  # keeps nothing else of the forward pass
    normed, inverse = _normed(x, epsilon)
    rows = tuple(range(x.ndim - 1))
    scaled = grad * jnp.expand_dims(scale, rows)
    along = jnp.mean(scaled * normed, axis=-1, keepdims=True)
    x_grad = inverse * (scaled - scaled.mean(axis=-1, keepdims=True) - normed * along)
    return x_grad.astype(x.dtype), jnp.sum(grad * normed, axis=rows), jnp.sum(grad, axis=rows)


layer_norm.defvjp(_norm_forward, _norm_backward)


class _NormParameters(nn.Module):
    """float32[D] scale and bias."""

    @nn.compact
    def __call__(self, width: int) -> tuple[jax.Array, jax.Array]:
        return tuple(
            self.param(name, nn.with_logical_partitioning(init, ("norm",)), (width,), jnp.float32)
            for name, init in (("scale", nn.initializers.ones), ("bias", nn.initializers.zeros)))


class LayerNorm(nn.Module):
    """LayerNorm with float32 statistics and a result in `dtype`."""

    epsilon: float
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale, bias = _NormParameters(name="norm")(x.shape[-1])
        normed = layer_norm(x, scale, bias, self.epsilon).astype(self.dtype)
        return constrain(normed, "batch", name="/".join(self.path))


class RmsNorm(nn.Module):
    """x / root mean square of x, times (offset + scale): float32 inside, a result in `dtype`."""

    epsilon: float
    dtype: Any = jnp.float32
    offset: float = 0.0
    axes: tuple[str | None, ...] = ()  # logical names of the result's dimensions after the batch

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = nn.with_logical_partitioning(
            nn.initializers.constant(1 - self.offset), ("norm",))
        scale = self.param("scale", init, x.shape[-1:], jnp.float32) + self.offset
        wide = x.astype(jnp.float32)
        inverse = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.epsilon)
        normed = wide * inverse * jnp.expand_dims(scale, range(x.ndim - 1))
        return constrain(
            normed.astype(self.dtype), "batch", *self.axes, name="/".join(self.path))


class Dropout(nn.Module):
    """Zeros with probability `rate`, the others divided by 1 - rate.

    Differs from flax's: 16 random bits for each element instead of 32, which XLA's CPU backend
    draws in a third of the time; the rate is exact to 2 ** -17.
    """

    rate: float

    def __call__(self, x: jax.Array, deterministic: bool) -> jax.Array:
        kept = self.kept(x.shape, deterministic)
        return x if kept is None else _dropped(x, kept, self.rate)

    def kept(self, shape: tuple[int, ...], deterministic: bool) -> jax.Array | None:
        """bool[shape], False for what is zeroed; None = nothing is."""
        if deterministic or not self.rate:
            return None
        pairs = random_bits(self.make_rng("dropout"), (*shape[:-1], -(-shape[-1] // 2)))
        halves = jnp.concatenate([pairs & 0xFFFF, pairs >> 16], axis=-1)[..., : shape[-1]]
        return halves >= round(self.rate * 2**16)


def _dropped(x: jax.Array, kept: jax.Array | None, rate: float) -> jax.Array:
    if kept is None:
        return x
    return jnp.where(kept, x / (1 - rate), 0) if rate < 1 else jnp.zeros_like(x)


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
    context_RHTC = product(_dropped(weights_RHTS, kept, rate), values).astype(values.dtype)
    return context_RHTC, (queries, keys, values, mask, kept, weights_RHTS, bias)


def _attention_backward(rate: float, residuals: tuple, grad: jax.Array) -> tuple:
    queries, keys, values, mask, kept, weights_RHTS, bias = residuals
    dtype = values.dtype
    # Weights of what is masked are 0, and so are gradients there, but in rows where all is masked.
    seen = grad if mask is None else jnp.where(mask.any(axis=-1, keepdims=True), grad, 0)
    weights_grad = _dropped(product(seen, transposed(values)), kept, rate)
    scores_grad = weights_RHTS * (
        weights_grad - jnp.sum(weights_RHTS * weights_grad, axis=-1, keepdims=True))
    bias_grad = None
    if bias is not None:
        alike = [axis for axis in range(4) if bias.shape[axis] < scores_grad.shape[axis]]
        bias_grad = scores_grad.sum(axis=alike, keepdims=True, dtype=bias.dtype)
    scores_grad = scores_grad.astype(dtype)
    # Transposed like this, the products never need [R, H, T, S] transposed in memory.
    values_grad = product(transposed(grad), _dropped(weights_RHTS, kept, rate)).astype(dtype)
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
               packing: Packing | None = None) -> jax.Array:
        """Attends from x [R, T, D] over keys [R, H, C, S] and values [R, H, S, C].

        Args:
          mask: bool, broadcastable to [R, H, T, S], True where attention is allowed; None = all.
          bias: float32, likewise, added to the scores; None = 0.
          packing: x is packed, [B, N, D], and so is the result.
        """
        queries_RHTC = self._split(self.query(x), packing)
        if self.scaled:
            queries_RHTC = queries_RHTC * self.scale
        if bias is None and self.is_mutable_collection(ATTENDED):
            self.sow(ATTENDED, "attended", attended(queries_RHTC, keys, values, mask))
        context_RTD = None
        # Kernels drop no weights, and take no bias.
        if self.fused and bias is None and (deterministic or not self.dropout):
            context_RTD = fused_attention(queries_RHTC, keys, values, mask)
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
        keys, values = self.keys_values(source, packing)
        return self.attend(x, keys, values, mask, deterministic, bias, packing)


class FeedForward(nn.Module):
    """Linear, activation, linear; where it is gated, the activation is that of a product of its
    own, which multiplies the first one."""

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


# What a block keeps for the backward pass besides its input: names that products have above.
REMAT_POLICIES = {
    "full": None,
    "narrow": jax.checkpoint_policies.save_only_these_names("narrow"),
    "dots": jax.checkpoint_policies.save_only_these_names("narrow", "wide"),
}


class Stack(nn.Module):
    """`depth` copies of `block`, as a python loop or as one `nn.scan` over stacked parameters.

    `block()(x, *arguments, deterministic) -> x`; the arguments are the same for every layer, but
    for the last one where there is `each`.
    Parameters are named `layer_0 ...` in the loop, and `layers` with a leading layer axis
    (logical name "layers") in the scan; `unstack_layers` turns the second form into the first.
    """

    block: Callable[[], nn.Module]
    depth: int
    remat: str = "none"
    scan: bool = False

    def setup(self) -> None:
        if self.scan:
            self.layers = self.block()
        else:
            self.layer = [self.block() for _ in range(self.depth)]

    def loop(self) -> list[nn.Module]:
        """The layers one by one; only the looped form has them."""
        if self.scan:
            raise ValueError("a scanned stack has no single layers: decode with scan_layers=False "
                             "and unstack_layers(params)")
        return self.layer

    def __call__(self, x: jax.Array, *arguments: Any, deterministic: bool,
                 rows: int | None = None, each: Any = None) -> jax.Array:
        """The last layer's states; `rows` asks for those of the first so many positions only.
        each: an array with a row for every layer, which gets it."""
        def applied(scanned: bool = False, **settings: Any) -> Callable:
            def apply(block: nn.Module, x: jax.Array, *arguments: Any) -> tuple[jax.Array, None]:
                return block(x, *arguments, deterministic=deterministic, **settings), None

            if self.remat == "none":
                return apply
            return nn.remat(apply, policy=REMAT_POLICIES[self.remat], prevent_cse=not scanned)

        def scan(length: int) -> Callable:
            axes = (nn.broadcast,) * len(arguments) + (0,) * (each is not None)
            return nn.scan(
                applied(scanned=True), variable_axes={"params": 0, ATTENDED: 0},
                split_rngs={"params": True, "dropout": True}, in_axes=axes, length=length,
                metadata_params={nn.PARTITION_NAME: "layers"})

        def part(apply: Callable, of_stack: Callable) -> Callable:
            """`apply` with a part of the stacked parameters."""
            return nn.map_variables(apply, "params", functools.partial(jax.tree.map, of_stack))

        def own(number: int | slice) -> tuple[Any, ...]:
            return arguments if each is None else (*arguments, each[number])

        settings = {} if rows is None else {"rows": rows}  # the last layer computes no others
        if not self.scan:
            for number, layer in enumerate(self.layer[:-1]):
                x, _ = applied()(layer, x, *own(number))
            return applied(**settings)(self.layer[-1], x, *own(-1))[0]
        if rows is None or self.is_initializing():
            return scan(self.depth)(self.layers, x, *own(slice(None)))[0][:, :rows]
        x, _ = part(scan(self.depth - 1), lambda p: p[:-1])(
            self.layers, x, *own(slice(-1)))
        return part(applied(**settings), lambda p: p[-1])(self.layers, x, *own(-1))[0]


def unstack_layers(params: dict) -> dict:
    """Parameters of a scanned stack in the form of the looped one (`layers` -> `layer_0` ...).

    Decoding runs the looped form: its cache is then one small pytree per layer, updated in place.
    Trees without scanned stacks come back unchanged.
    """
    result = {}
    for name, value in params.items():
        if name == "layers":
            depth = jax.tree.leaves(value)[0].shape[0]
            for index in range(depth):
                result[f"layer_{index}"] = jax.tree.map(lambda x, index=index: x[index], value)
        else:
            result[name] = unstack_layers(value) if isinstance(value, dict) else value
    return result
