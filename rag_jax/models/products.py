"""Matrix products in the forms that XLA's backends run fast, and the linear layer.

They multiply in the dtype of their inputs and sum in float32.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint

from rag_jax.models.parameters import parameter
from rag_jax.parallel import constrain, platform


@jax.custom_vjp
def linear(x: jax.Array, kernel: jax.Array, bias: jax.Array | None) -> jax.Array:
    """x [R, D] @ kernel float32[D, F] + bias float32[F], or None, in the dtype of x.

    The product and the gradients of kernel and bias are summed in float32. Accelerators sum in
    float32 anyway. XLA's CPU backend multiplies bfloat16 matrices four times faster if the
    sums are float32 and both matrices are row-major. On GPUs the bias gets the dtype of x, so that
    the product can add it before it rounds; where devices share the sums of a product, each rounds
    its part.
    """
    if platform(x) == "gpu":
        y = rounded_product(x, kernel.astype(x.dtype))
        return y if bias is None else y + bias.astype(x.dtype)[None]
    y = product(x, kernel.astype(x.dtype))
    return (y if bias is None else y + bias[None]).astype(x.dtype)


def _linear_forward(x: jax.Array, kernel: jax.Array, bias: jax.Array | None
                    ) -> tuple[jax.Array, tuple]:
    return linear(x, kernel, bias), (x, kernel, bias)


def _linear_backward(kept: tuple[jax.Array | None, ...], grad: jax.Array) -> tuple:
    x, kernel, bias = anew(kept)
    return (rounded_product(grad, transposed(kernel.astype(x.dtype))),
            product(transposed(x), grad).astype(kernel.dtype),
            None if bias is None else jnp.sum(grad, axis=0, dtype=jnp.float32).astype(bias.dtype))


linear.defvjp(_linear_forward, _linear_backward)


def by_rows(multiply: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """multiply(x) float32[..., N, F] of x [..., N, D], for a product that treats all rows alike.

    XLA's CPU backend takes two to three times as long for one row in bfloat16 as for two, so a
    single row gets a second one of zeros there.
    """
    if x.shape[-2] > 1 or x.dtype != jnp.bfloat16 or platform(x) != "cpu":
        return multiply(x)
    return multiply(jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, 1), (0, 0)]))[..., :1, :]


def product(x: jax.Array, y: jax.Array) -> jax.Array:
    """float32[..., N, F] = x [..., N, D] @ y [..., D, F], summed in float32."""
    return by_rows(
        lambda rows: jnp.matmul(rows, y, preferred_element_type=jnp.float32), x)


def rounded_product(x: jax.Array, y: jax.Array) -> jax.Array:
    """`product` rounded to the dtype of x; on GPUs the matrix product itself rounds, so that its
    float32 sums are not written to memory and read back."""
    if platform(x) == "gpu":
        return jnp.matmul(x, y)
    return product(x, y).astype(x.dtype)


def transposed(x: jax.Array) -> jax.Array:
    """x with its last two axes swapped; on a CPU, bfloat16 is also moved in memory."""
    # A layout constraint would gather an array that is split over devices.
    if x.dtype == jnp.float32 or jax.typeof(x).sharding.mesh.size > 1:
        return x.mT
    row_major = Layout(major_to_minor=tuple(range(x.ndim)))
    return jax.lax.platform_dependent(
        x, cpu=lambda x: with_layout_constraint(x.mT, row_major), default=lambda x: x.mT)


def anew(kept: tuple) -> tuple:
    """What the forward pass has kept, so that the backward pass converts it anew: XLA's CPU backend
    would keep what was converted, too, all kernels in bfloat16 and attention weights in float32."""
    converts = kept[0].dtype != jnp.float32 and platform(kept[0]) == "cpu"
    return jax.lax.optimization_barrier(kept) if converts else kept


class Linear(nn.Module):
    """x @ kernel, plus a bias if `biased`, over the last axis of x; `axes` names the kernel's axes.

    The product runs on a matrix of all rows, so that those of its gradient are plain matrix
    products too: XLA's CPU backend runs these twice as fast as contractions over several axes.
    """

    features: int
    axes: tuple[str, str]
    dtype: Any = jnp.float32
    init_std: float = 0.02
    biased: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = parameter(self, "kernel", (x.shape[-1], self.features), self.axes,
                           nn.initializers.normal(self.init_std))
        bias = parameter(self, "bias", (self.features,), self.axes[1:],
                         nn.initializers.zeros) if self.biased else None
        rows = x.reshape(-1, x.shape[-1]).astype(self.dtype)
        y = linear(rows, kernel, bias).reshape(*x.shape[:-1], self.features)
        # "embed" splits stored parameters only; the width of states is not split.
        last = None if self.axes[1] == "embed" else self.axes[1]
        y = constrain(y, "batch", *(None,) * (y.ndim - 2), last, name="/".join(self.path))
        return checkpoint_name(y, "wide" if self.features > x.shape[-1] else "narrow")
