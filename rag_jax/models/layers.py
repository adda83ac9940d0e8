"""Transformer parts shared by BERT and BART: both are post-LayerNorm with biased projections.

Every parameter carries logical axis names; `rag_jax.parallel` maps them to mesh axes.
Matrix products run in `dtype`; softmax and LayerNorm statistics are float32.
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint

from rag_jax.marginal import MASKED
from rag_jax.models.fused_attention import fused_attention
from rag_jax.parallel import constrain

embedding_init = nn.initializers.normal(stddev=0.02)


def gelu(x: jax.Array) -> jax.Array:
    """x Phi(x) exactly, not the tanh approximation.

    By erf in float32, as torch does: XLA's CPU backend takes 2.4 times as long for erfc, by which
    jax.nn.gelu keeps the precision of narrower numbers.
    """
    if x.dtype != jnp.float32:
        return jax.nn.gelu(x, approximate=False)
    return 0.5 * x * (1 + jax.lax.erf(x * 0.5**0.5))


ACTIVATIONS: dict[str, Callable] = {"gelu": gelu, "relu": jax.nn.relu}


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
def matmul(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """x [R, D] @ kernel float32[D, F] in the dtype of x, summed in float32; the kernel's gradient
    is float32.

    Accelerators sum in float32 anyway. XLA's CPU backend runs products of bfloat16 matrices four
    times faster if their sums are float32 and both matrices lie in memory row by row.
    """
    return _product(x, kernel.astype(x.dtype)).astype(x.dtype)


def _matmul_forward(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, tuple]:
    return matmul(x, kernel), (x, kernel)


def _matmul_backward(kept: tuple[jax.Array, jax.Array], grad: jax.Array
                     ) -> tuple[jax.Array, jax.Array]:
    x, kernel = kept
    return (_product(grad, _transposed(kernel.astype(x.dtype))).astype(x.dtype),
            _product(_transposed(x), grad).astype(kernel.dtype))


matmul.defvjp(_matmul_forward, _matmul_backward)
_product = functools.partial(jnp.matmul, preferred_element_type=jnp.float32)


def _transposed(x: jax.Array) -> jax.Array:
    # A layout constraint would gather an array that is split over devices.
    if x.dtype == jnp.float32 or jax.typeof(x).sharding.mesh.size > 1:
        return x.T
    by_rows = Layout(major_to_minor=(0, 1))
    return jax.lax.platform_dependent(
        x, cpu=lambda x: with_layout_constraint(x.T, by_rows), default=jnp.transpose)


def look_up(table: jax.Array, ids: jax.Array) -> jax.Array:
    """Rows [R, L, D] of a token table [V, D], which is gathered over fsdp first, not its rows."""
    whole = constrain(table, "vocab", name="token table")
    return constrain(whole[ids], "batch", name="embedded tokens")


class Linear(nn.Module):
    """x @ kernel + bias over the last axis, with logical axis names on both.

    The product runs on a matrix of all rows: its transposes are then plain matrix products too,
    which XLA's CPU backend runs twice as fast as contractions over several axes.
    """

    features: int
    axes: tuple[str, str]
    dtype: Any = jnp.float32
    init_std: float = 0.02

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
        )
        rows = x.reshape(-1, x.shape[-1]).astype(self.dtype)
        y = matmul(rows, kernel) + bias.astype(self.dtype)[None]
        y = y.reshape(*x.shape[:-1], self.features)
        # States keep their width whole: "embed" is how parameters are stored.
        last = None if self.axes[1] == "embed" else self.axes[1]
        y = constrain(y, "batch", *(None,) * (y.ndim - 2), last, name="/".join(self.path))
        return checkpoint_name(y, "wide" if self.features > x.shape[-1] else "narrow")


class LayerNorm(nn.Module):
    """LayerNorm with float32 statistics and a result in `dtype`."""

    epsilon: float
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        normed = nn.LayerNorm(
            epsilon=self.epsilon,
            dtype=jnp.float32,
            use_fast_variance=False,
            scale_init=nn.with_logical_partitioning(nn.initializers.ones, ("norm",)),
            bias_init=nn.with_logical_partitioning(nn.initializers.zeros, ("norm",)),
            name="norm",
        )(x).astype(self.dtype)
        return constrain(normed, "batch", name="/".join(self.path))


class Attention(nn.Module):
    """Multi-head attention with biased projections; queries are scaled by C ** -0.5.

    `keys_values` and `attend` are separate so that decoding can keep keys and values in a cache.
    """

    heads: int
    width: int
    dropout: float = 0.0
    dtype: Any = jnp.float32
    init_std: float = 0.02
    fused: bool = True

    def setup(self) -> None:
        into_heads = (self.width, ("embed", "heads"), self.dtype, self.init_std)
        self.query = Linear(*into_heads)
        self.key = Linear(*into_heads)
        self.value = Linear(*into_heads)
        self.out = Linear(self.width, ("heads", "embed"), self.dtype, self.init_std)
        self.weight_dropout = nn.Dropout(self.dropout)

    def _split(self, x: jax.Array) -> jax.Array:
        heads = x.reshape(*x.shape[:-1], self.heads, self.width // self.heads)
        return heads.swapaxes(-2, -3)  # -> [R, H, S, C]

    def keys_values(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """[R, S, D] -> keys [R, H, C, S] and values [R, H, S, C]: one matrix per head, as products
        with them read it."""
        return self._split(self.key(x)).swapaxes(-1, -2), self._split(self.value(x))

    def attend(self, x: jax.Array, keys: jax.Array, values: jax.Array, mask: jax.Array | None,
               deterministic: bool) -> jax.Array:
        """Attends from x [R, T, D] over keys [R, H, C, S] and values [R, H, S, C].

        mask: bool, broadcastable to [R, H, T, S], True where attention is allowed; None = all.
        """
        queries_RHTC = self._split(self.query(x)) * (self.width // self.heads) ** -0.5
        context_RTD = None
        if self.fused and (deterministic or not self.dropout):  # kernels drop no weights
            context_RTD = fused_attention(queries_RHTC, keys, values, mask)
        if context_RTD is None:
            context_RTD = self._plain(queries_RHTC, keys, values, mask, deterministic)
        return self.out(checkpoint_name(context_RTD, "narrow"))

    def _plain(self, queries_RHTC: jax.Array, keys: jax.Array, values: jax.Array,
               mask: jax.Array | None, deterministic: bool) -> jax.Array:
        scores_RHTS = jnp.einsum("RHTC,RHCS->RHTS", queries_RHTC, keys,
                                 preferred_element_type=jnp.float32)
        if mask is not None:
            scores_RHTS = jnp.where(mask, scores_RHTS, MASKED)
        weights_RHTS = jax.nn.softmax(scores_RHTS, axis=-1).astype(self.dtype)
        weights_RHTS = self.weight_dropout(weights_RHTS, deterministic=deterministic)
        context_RTHC = jnp.einsum("RHTS,RHSC->RHTC", weights_RHTS, values).swapaxes(1, 2)
        rows, targets = context_RTHC.shape[:2]
        return context_RTHC.reshape(rows, targets, self.width)  # -> [R, T, D]

    def __call__(self, x: jax.Array, source: jax.Array, mask: jax.Array | None,
                 deterministic: bool) -> jax.Array:
        keys, values = self.keys_values(source)
        return self.attend(x, keys, values, mask, deterministic)


class FeedForward(nn.Module):
    """Linear, activation, linear."""

    hidden: int
    width: int
    activation: str = "gelu"
    dropout: float = 0.0
    dtype: Any = jnp.float32
    init_std: float = 0.02

    @nn.compact
    def __call__(self, x: jax.Array, deterministic: bool) -> jax.Array:
        x = Linear(self.hidden, ("embed", "mlp"), self.dtype, self.init_std, name="wi")(x)
        x = nn.Dropout(self.dropout)(ACTIVATIONS[self.activation](x), deterministic=deterministic)
        return Linear(self.width, ("mlp", "embed"), self.dtype, self.init_std, name="wo")(x)


# What a block keeps for the backward pass besides its input: names that products have above.
REMAT_POLICIES = {
    "full": None,
    "narrow": jax.checkpoint_policies.save_only_these_names("narrow"),
    "dots": jax.checkpoint_policies.save_only_these_names("narrow", "wide"),
}


class Stack(nn.Module):
    """`depth` copies of `block`, as a python loop or as one `nn.scan` over stacked parameters.

    `block()(x, *arguments, deterministic) -> x`; the arguments are the same for every layer.
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
                 rows: int | None = None) -> jax.Array:
        """The last layer's states; `rows` asks for those of the first so many positions only."""
        def applied(scanned: bool = False, **settings: Any) -> Callable:
            def apply(block: nn.Module, x: jax.Array, *arguments: Any) -> tuple[jax.Array, None]:
                return block(x, *arguments, deterministic=deterministic, **settings), None

            if self.remat == "none":
                return apply
            return nn.remat(apply, policy=REMAT_POLICIES[self.remat], prevent_cse=not scanned)

        def scan(length: int) -> Callable:
            return nn.scan(
                applied(scanned=True), variable_axes={"params": 0},
                split_rngs={"params": True, "dropout": True}, in_axes=nn.broadcast, length=length,
                metadata_params={nn.PARTITION_NAME: "layers"})

        def part(apply: Callable, of_stack: Callable) -> Callable:
            """`apply` with a part of the stacked parameters."""
            return nn.map_variables(apply, "params", functools.partial(jax.tree.map, of_stack))

        settings = {} if rows is None else {"rows": rows}  # the last layer computes no others
        if not self.scan:
            for layer in self.layer[:-1]:
                x, _ = applied()(layer, x, *arguments)
            return applied(**settings)(self.layer[-1], x, *arguments)[0]
        if rows is None or self.is_initializing():
            return scan(self.depth)(self.layers, x, *arguments)[0][:, :rows]
        x, _ = part(scan(self.depth - 1), lambda p: p[:-1])(self.layers, x, *arguments)
        return part(applied(**settings), lambda p: p[-1])(self.layers, x, *arguments)[0]


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
