"""Products and activations in the model's dtype against float64."""

import math
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from rag_jax import parallel
from rag_jax.config import MeshConfig
from rag_jax.models import products
from rag_jax.models.attention import attention
from rag_jax.models.layers import Dropout, RmsNorm, gelu, look_up, norm
from rag_jax.models.products import by_rows, linear
from rag_jax.models.stack import Stack


def temporary(function, *arguments):
    """Bytes that a jitted function needs besides its arguments and results, by the compiler."""
    mesh = parallel.make_mesh(MeshConfig(1, 1), jax.devices()[:1])
    jitted = jax.jit(function, compiler_options=parallel.of_least_memory(mesh))
    return jitted.lower(*arguments).compile().memory_analysis().temp_size_in_bytes


def test_kernels_in_bfloat16_are_not_kept_for_the_backward_pass():
    """XLA took the forward pass's conversions there: 0.6 GB of them lay beside the activations."""
    kernels = [jax.ShapeDtypeStruct((256, 256), jnp.float32)] * 12
    x = jax.ShapeDtypeStruct((8, 256), jnp.bfloat16)

    def value(x, kernels):
        for kernel in kernels:
            x = jnp.tanh(linear(x, kernel, None))
        return x.astype(jnp.float32).sum()

    assert temporary(jax.grad(value), x, kernels) < 4 * 256 * 256 * 2


def test_attention_weights_are_kept_in_the_dtype_of_the_values():
    """XLA kept their float32 form beside it, of which the backward pass needs a layer at a time."""
    kernels = [jax.ShapeDtypeStruct((256, 256), jnp.float32)] * 8
    x = jax.ShapeDtypeStruct((128, 256), jnp.bfloat16)

    def value(kernels, x):
        for kernel in kernels:
            heads = linear(x, kernel, None).reshape(2, 64, 4, 64).swapaxes(1, 2)
            y = attention(heads, heads.mT, heads, None, None, 0.0)
            x = x + y.swapaxes(1, 2).reshape(x.shape)
        return x.astype(jnp.float32).sum()

    def step(kernels, x):
        grads = jax.grad(value)(kernels, x)
        size = sum(jnp.sum(grad * grad) for grad in grads)
        return [kernel - size * grad for kernel, grad in zip(kernels, grads, strict=True)]

    weights = len(kernels) * 2 * 4 * 64 * 64
    assert temporary(step, kernels, x) < 6 * weights  # 5 bytes each, and 7 with that form


@pytest.mark.parametrize("dtype,tolerance", [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_a_product_and_its_gradients_are_those_of_float64(dtype, tolerance):
    """Sizes all differ: a transposed operand cannot pass."""
    rng = np.random.default_rng(0)
    x, kernel, weight, bias = (
        jnp.asarray(rng.normal(size=size), dtype).astype(jnp.float32)
        for size in ((6, 40), (40, 9), (6, 9), (9,)))

    def value(x, kernel, bias):
        y = linear(x.astype(dtype), kernel, bias)
        assert y.dtype == dtype
        return (y * weight.astype(dtype)).astype(jnp.float32).sum()

    found = tiny.jit(jax.value_and_grad(value, argnums=(0, 1, 2)))(x, kernel, bias)
    x, kernel, weight, bias = (np.asarray(a, np.float64) for a in (x, kernel, weight, bias))
    expected = ((x @ kernel + bias) * weight).sum(), (
        weight @ kernel.T, x.T @ weight, weight.sum(axis=0))
    assert {found[1][1].dtype, found[1][2].dtype} == {jnp.dtype("float32")}, "they are not rounded"
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * np.abs(b).max())


@pytest.mark.parametrize("biased", [True, False])
def test_a_gpu_rounds_a_product_as_it_writes_it(monkeypatch, biased):
    """Sums in float32 would be written to memory and read again; a kernel's gradient is one."""
    rng = np.random.default_rng(3)
    x, kernel, bias, grad = (
        jnp.asarray(rng.normal(size=size), dtype) for size, dtype in (
            ((6, 40), "bfloat16"), ((40, 9), "float32"), ((9,), "float32"), ((6, 9), "bfloat16")))
    bias = bias if biased else None

    def both(x, kernel, bias, grad):  # of custom_vjp functions jax keeps what it has traced
        return linear.fun(x, kernel, bias), products._linear_backward((x, kernel, bias), grad)

    expected = both(x, kernel, bias, grad)
    monkeypatch.setattr(products, "platform", lambda x: "gpu")
    found = both(x, kernel, bias, grad)
    assert [a.dtype for a in jax.tree.leaves(found)] == [a.dtype for a in jax.tree.leaves(expected)]
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(*(np.float32(a) for a in (one, other)), rtol=0.02, atol=0.05)
    dots = re.findall(r"(\w+)\[[\d,]+\] = dot_general", str(jax.make_jaxpr(both)(
        x, kernel, bias, grad)))
    assert dots == ["bf16", "bf16", "f32"]


def test_a_product_without_a_bias_is_that_with_zeros():
    """Most models of today have no biases: their backward pass has nothing to sum up."""
    rng = np.random.default_rng(2)
    x, kernel, zeros = (jnp.float32(rng.normal(size=(3, 4))), jnp.float32(rng.normal(size=(4, 5))),
                        jnp.zeros(5))
    gradients = [jax.grad(lambda x, kernel, bias=bias: jnp.sin(linear(x, kernel, bias)).sum(),
                          (0, 1))(x, kernel) for bias in (None, zeros)]
    tiny.assert_trees_close(*gradients, rtol=0)


@pytest.mark.parametrize("dtype,computed", [("bfloat16", 2), ("float32", 1)])
def test_one_row_in_bfloat16_is_computed_as_two(dtype, computed):
    """XLA's CPU backend is slow for one such row; it is also rounded as among others then."""
    rng, rows = np.random.default_rng(4), []
    x, y = (jnp.asarray(rng.normal(size=size), dtype) for size in ((3, 1, 8), (8, 5)))

    def multiply(x):
        rows.append(x.shape[-2])
        return x.astype(jnp.float32) @ y.astype(jnp.float32)

    found = tiny.jit(lambda x: by_rows(multiply, x))(x)
    assert rows == [computed]
    np.testing.assert_allclose(found, np.float64(x) @ np.float64(y), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm_is_the_formula(offset):
    """Gemma's scale is 1 + w: read as w, a trained norm would be almost nothing."""
    rng = np.random.default_rng(3)
    x, w = np.float32(rng.normal(size=(2, 5, 8))), np.float32(rng.normal(size=8))
    rms_norm = RmsNorm(0.1, offset=offset)
    expected = x / np.sqrt((np.float64(x) ** 2).mean(axis=-1, keepdims=True) + 0.1) * (w + offset)
    np.testing.assert_allclose(rms_norm.apply({"params": {"scale": w}}, x), expected, rtol=1e-5)
    first = nn.meta.unbox(rms_norm.init(jax.random.key(0), x)["params"])["scale"]
    np.testing.assert_array_equal(first + offset, 1.0)


class Times(nn.Module):
    """Multiplies with a parameter, which is 1, and with what its layer alone is given."""

    @nn.compact
    def __call__(self, x, own, *, deterministic, rows=None):
        return x[:, :rows] * own * self.param("one", nn.with_logical_partitioning(
            nn.initializers.ones, ("norm",)), (1,))[0]


@pytest.mark.parametrize("rows", [None, 1])
def test_every_layer_of_a_stack_gets_its_own_row(rows):
    """Scanned and asked for its first rows alone, the last layer is computed apart."""
    x, each = np.arange(6.0).reshape(1, 3, 2), np.float32([2, 3, 5])
    for scan in (False, True):
        stack = Stack(Times, 3, scan=scan)
        params = stack.init(jax.random.key(0), x, deterministic=True, each=each)
        found = stack.apply(nn.meta.unbox(params), x, deterministic=True, each=each, rows=rows)
        np.testing.assert_array_equal(found, 30 * x[:, :rows])


def compare_with_plain(ours, plain, arrays, dtype, tolerance):
    """Values and gradients of ours(*arrays) in `dtype` and of plain(*arrays) in float32."""
    def run(function, dtype):
        def value(*arrays):
            return jnp.sin(function(*(a.astype(dtype) for a in arrays)).astype(jnp.float32)).sum()

        return tiny.jit(jax.value_and_grad(value, tuple(range(len(arrays)))))(*arrays)

    arrays = [a.astype(dtype).astype(jnp.float32) for a in arrays]
    found, expected = run(ours, dtype), run(plain, jnp.float32)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * np.abs(b).max())


@pytest.mark.parametrize("dtype,tolerance", [("float32", 2e-5), ("bfloat16", 4e-2)])
@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("shape", [  # many rows go another way on CPUs; one is of heads
    (20, 24), (2, 2050, 24), (2, 3, 4, 24), (2, 1025, 2, 24)])
def test_norms_and_their_gradients_are_those_of_the_formula(shape, centred, dtype, tolerance):
    """Their backward pass is written by hand: a mean forgotten there would still train, badly."""
    rng = np.random.default_rng(1)
    x, scale, bias = (jnp.float32(rng.normal(size=size)) for size in (shape, (24,), (24,)))
    rows = range(len(shape) - 1)

    def plain(x, scale, bias=None):
        if bias is not None:
            x = x - x.mean(axis=-1, keepdims=True)
        x = x / jnp.sqrt((x**2).mean(axis=-1, keepdims=True) + 0.1) * jnp.expand_dims(scale, rows)
        return x if bias is None else x + jnp.expand_dims(bias, rows)

    compare_with_plain(lambda x, scale, bias=None: norm(x, scale, bias, 0.1), plain,
                       (3 * x + 1, scale, bias)[:2 + centred], dtype, tolerance)


@pytest.mark.parametrize("dtype,tolerance", [("float32", 2e-5), ("bfloat16", 4e-2)])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("rate", [0.0, 0.25])
@pytest.mark.parametrize("biased", [False, True])
def test_attention_and_its_gradients_are_those_of_the_formula(dtype, tolerance, masked, rate,
                                                              biased):
    """Its backward pass is written by hand: with dropout of the weights, a row of which all is
    masked, whose scores get no gradient, and a bias that rows share."""
    rng = np.random.default_rng(2)
    rows, heads, targets, sources, width = 3, 2, 5, 7, 4
    queries, keys, values = (jnp.float32(rng.normal(size=(rows, heads, *size))) for size in (
        (targets, width), (width, sources), (sources, width)))
    mask = rng.random((rows, 1, targets, sources)) < 0.7
    mask[1] = False
    mask = jnp.asarray(mask) if masked else None
    kept = jnp.asarray(rng.random((rows, heads, targets, sources)) >= rate) if rate else None

    arrays = [queries, keys, values]
    if biased:
        arrays.append(jnp.float32(rng.normal(size=(1, heads, targets, sources))))

    def plain(queries, keys, values, bias=None):
        scores = jnp.einsum("RHTC,RHCS->RHTS", queries, keys)
        scores = scores if bias is None else scores + bias
        scores = scores if mask is None else jnp.where(mask, scores, -1e30)
        weights = jax.nn.softmax(scores, axis=-1)
        weights = weights if kept is None else jnp.where(kept, weights / (1 - rate), 0)
        return jnp.einsum("RHTS,RHSC->RHTC", weights, values)

    compare_with_plain(lambda q, k, v, *bias: attention(q, k, v, mask, kept, rate, *bias), plain,
                       arrays, dtype, tolerance)


@pytest.mark.parametrize("rate", [0.1, 0.5, 1.0])
def test_dropout_zeroes_at_its_rate_and_keeps_the_mean(rate):
    """Each half of a random word decides about one element: a wrong half would repeat, or lean."""
    x = jnp.ones((400, 251))
    drop = Dropout(rate)

    def applied(key, deterministic=False):
        return np.asarray(drop.apply({}, x, deterministic, rngs={"dropout": jax.random.key(key)}))

    y = applied(0)
    zero = y == 0
    assert abs(zero.mean() - rate) < 0.005
    np.testing.assert_allclose(y[~zero], 1 / (1 - rate) if rate < 1 else 0, rtol=1e-6)
    if rate < 1:
        together = (zero[:, :125] & zero[:, 126:]).mean()  # the halves of a word
        assert abs(together - rate**2) < 0.01
        assert (zero != (applied(1) == 0)).any()
    np.testing.assert_array_equal(applied(0, deterministic=True), x)


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


def test_a_table_in_bfloat16_is_not_converted_before_a_loop():
    """XLA's CPU backend kept all of it in float32 beside it, twice its size, in every search."""
    table = jax.ShapeDtypeStruct((4096, 16), jnp.bfloat16)

    def walk(table, ids):
        return jax.lax.fori_loop(0, 9, lambda _, ids: jnp.int32(
            jnp.abs(look_up(table, ids).sum(axis=-1)) * 99) % 4096, ids)

    compiled = tiny.jit(walk).lower(table, jax.ShapeDtypeStruct((1, 1), jnp.int32)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4096 * 16
