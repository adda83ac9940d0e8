"""Products in the model's dtype against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from rag_jax.models.layers import matmul


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
