"""Products and activations in the model's dtype against float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from rag_jax.models.layers import gelu, matmul


@pytest.mark.parametrize("dtype,tolerance", [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_a_product_and_its_gradients_are_those_of_float64(dtype, tolerance):
    """Sizes all differ: a transposed operand cannot pass."""
    rng = np.random.default_rng(0)
    x, kernel, weight = (jnp.asarray(rng.normal(size=size), dtype).astype(jnp.float32)
                         for size in ((6, 40), (40, 9), (6, 9)))

    def value(x, kernel):
        y = matmul(x.astype(dtype), kernel)
        assert y.dtype == dtype
        return (y * weight.astype(dtype)).astype(jnp.float32).sum()

    found = tiny.jit(jax.value_and_grad(value, argnums=(0, 1)))(x, kernel)
    x, kernel, weight = (np.asarray(a, np.float64) for a in (x, kernel, weight))
    expected = ((x @ kernel) * weight).sum(), (weight @ kernel.T, x.T @ weight)
    assert found[1][1].dtype == jnp.float32, "the kernel's gradient is not rounded"
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * np.abs(b).max())


@pytest.mark.parametrize("dtype,relative,absolute", [("float32", 0.0, 1e-6),
                                                     ("bfloat16", 6e-2, 1e-7)])
def test_gelu_is_that_of_float64(dtype, relative, absolute):
    """The tanh approximation is 4.7e-4 off at 2.7; bfloat16 keeps its precision below 0."""
    x = jnp.linspace(-5, 5, 201).astype(dtype)
    exact = np.asarray(x, float).tolist()
    found = gelu(x)
    assert found.dtype == dtype
    np.testing.assert_allclose(
        np.asarray(found, float), [0.5 * v * math.erfc(-v / math.sqrt(2)) for v in exact],
        rtol=relative, atol=absolute)
    slope = [0.5 * math.erfc(-v / math.sqrt(2))
             + v * math.exp(-v * v / 2) / math.sqrt(2 * math.pi) for v in exact]
    np.testing.assert_allclose(np.asarray(jax.vmap(jax.grad(gelu))(x), float), slope,
                               rtol=relative, atol=max(absolute, relative))
