"""Kernels of attention compute what plain products and softmax do, in values and gradients.

Neither runs on a CPU: the TPU's is interpreted, and XLA takes cuDNN's place.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas
from jax.sharding import NamedSharding, PartitionSpec

from rag_jax import parallel
from rag_jax.config import MeshConfig
from rag_jax.models import attention, fused_attention
from rag_jax.models.packing import Packing

R, T, S, H, C = 8, 128, 128, 4, 64
MASKS = {"keys": np.arange(S) < np.array([128, 20, 1, 7, 0, 127, 16, 5])[:, None],
         "causal": np.tril(np.ones((T, T), bool))}


@pytest.fixture
def platform(monkeypatch):
    """Sets what the arrays are on, as far as attention sees; `kernels` are those called so far."""
    def choose(name):
        monkeypatch.setattr(parallel, "platform", lambda x: name)

    def noted(name, function, **settings):
        def call(*arguments, implementation=None, **others):
            lengths = " of lengths" * ("query_seq_lengths" in others)
            choose.kernels.append((implementation or name) + lengths)
            return function(*arguments, **others, **settings)
        return call

    choose.kernels = []
    monkeypatch.setattr(jax.nn, "dot_product_attention", noted(
        "", jax.nn.dot_product_attention, implementation="xla"))
    monkeypatch.setattr(pallas, "pallas_call", noted("pallas", pallas.pallas_call, interpret=True))
    return choose


def run(mask, mesh=None, **settings):
    """Value and gradients of an Attention with random states."""
    rng = np.random.default_rng(0)
    x, source = (jnp.asarray(rng.normal(size=(R, n, H * C)), jnp.bfloat16)
                 for n in (T, mask.shape[-1]))
    module = attention.Attention(H, H * C, dtype=jnp.bfloat16, init_std=0.1, **settings)
    mask = mask[:, None, None] if mask.shape[0] == R else mask[None, None]
    params = nn.meta.unbox(
        module.clone(fused=False).init(jax.random.key(0), x, source, mask, True))

    def value(params, x, source):
        out = module.apply(params, x, source, jnp.asarray(mask), False,
                           rngs={"dropout": jax.random.key(1)})
        return (jnp.sin(jnp.arange(out.size, dtype=jnp.float32).reshape(out.shape))
                * out.astype(jnp.float32)).sum()

    gradient = jax.value_and_grad(value, argnums=(0, 1, 2))
    if mesh is not None:
        split = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
        x, source = jax.device_put((x, source), split)
    value, grads = jax.jit(gradient)(params, x, source)
    del grads[0]["params"]["key"]["bias"]  # 0 but for rounding
    return value, grads


def assert_close(found, expected):
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        one, other = (np.asarray(x, np.float32) for x in (one, other))
        assert np.linalg.norm(one - other) <= 0.02 * np.linalg.norm(other)


@pytest.mark.parametrize("name, mask", [("tpu", "keys"), ("gpu", "keys"), ("gpu", "causal")])
def test_kernels_compute_what_plain_attention_does(platform, name, mask):
    """A row without any key is uniform over all, and gives no gradient to scores; heads apart."""
    expected = run(MASKS[mask])
    platform(name)
    assert not platform.kernels
    found = run(MASKS[mask])
    assert set(platform.kernels) == {{"tpu": "pallas", "gpu": "cudnn"}[name]}
    assert_close(found, expected)
    platform.kernels.clear()
    run(MASKS[mask], fused=False)
    assert not platform.kernels


def test_packed_inputs_tell_the_kernel_their_lengths(platform):
    """Not in cross-attention, where targets are packed and sources are others."""
    mask = np.arange(T) < np.array([128, 3, 1, 40, 9, 127, 64, 17])[:, None]
    packing = Packing.of(jnp.flatnonzero(jnp.asarray(mask))[None].astype(jnp.int32), R, T)
    assert packing.lengths.tolist() == mask.sum(axis=1).tolist()
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, mask.sum(), H * C)), jnp.bfloat16)
    module = attention.Attention(H, H * C, dtype=jnp.bfloat16, init_std=0.1)
    given = jnp.asarray(mask)[:, None, None]
    params = nn.meta.unbox(module.init(jax.random.key(0), x, x, given, True, None, packing))

    def value(params, x):
        out = module.apply(params, x, x, given, True, None, packing).astype(jnp.float32)
        return (jnp.sin(jnp.arange(out.size, dtype=jnp.float32).reshape(out.shape)) * out).sum()

    def found():
        value_, grads = jax.value_and_grad(value, argnums=(0, 1))(params, x)
        del grads[0]["params"]["key"]["bias"]
        return value_, grads

    expected = found()
    platform("gpu")
    assert_close(found(), expected)
    assert set(platform.kernels) == {"cudnn of lengths"}
    platform.kernels.clear()
    keys = module.apply(params, x, packing, method="keys_values")
    module.apply(params, x, *keys, given, True, None, packing, method="attend")
    assert set(platform.kernels) == {"cudnn"}


def test_a_kernel_over_several_devices_has_the_rows_and_heads_of_each(platform):
    """Rows over data and fsdp, heads over model; nothing is gathered, so nothing is mixed up."""
    platform("tpu")
    alone = run(MASKS["keys"])
    mesh = parallel.make_mesh(MeshConfig(2, 2, 2))
    assert_close(run(MASKS["keys"], mesh), alone)
    assert "pallas" in platform.kernels


def test_plain_attention_where_no_kernel_does_it(platform):
    """Kernels drop no weights, round to bfloat16, and have limits of shape."""
    platform("tpu")
    run(MASKS["keys"], dropout=0.5)
    run(MASKS["causal"])
    assert not platform.kernels
    shapes = {"queries": (R, H, T, C), "keys": (R, H, C, S), "values": (R, H, S, C)}

    def context(dtype=jnp.bfloat16, **changes):
        arrays = [jnp.zeros(changes.get(name, shape), dtype) for name, shape in shapes.items()]
        return fused_attention.fused_attention(*arrays, jnp.ones((R, 1, 1, S), bool))

    assert context().shape == (R, T, H * C)
    assert context(jnp.float32) is None
    assert context(queries=(R, H, 1, C)) is None
    platform("gpu")
    assert context(jnp.float32) is None and context(queries=(R, H, 1, C)) is None
    assert context().shape == (R, T, H * C)
    assert context(queries=(R, H, T - 8, C)) is None, "plain products take less time"
