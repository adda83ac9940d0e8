"""T5's own parts; `tests/hub` compares whole models with transformers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from rag_jax.models.likelihood import log_likelihood
from rag_jax.models.stack import unstack_layers
from rag_jax.models.t5 import T5, bucket_starts, relative_bias

RNG = np.random.default_rng(0)
IDS = RNG.integers(3, 38, (3, 6)).astype(np.int32)
TARGETS = RNG.integers(3, 38, (3, 4)).astype(np.int32)
MASK = np.arange(6) < np.array([6, 4, 2])[:, None]


@pytest.fixture(scope="module")
def params():
    return tiny.perturbed(tiny.jit(T5(tiny.T5).init)(jax.random.key(0), IDS, MASK, TARGETS))


def logits(params, ids=IDS, mask=MASK, **changes):
    module = T5(dataclasses.replace(tiny.T5, **changes))
    return tiny.jit(module.apply)({"params": params["params"]}, ids, mask, TARGETS)


def test_distances_fall_into_the_buckets_of_transformers():
    """Guards against 16, 32 and 64 in the bucket below, as logarithms of floats may have it. The
    numbers are those of transformers 5.23."""
    np.testing.assert_array_equal(bucket_starts(16, 128), [
        *range(1, 9), 12, 16, 23, 32, 46, 64, 91])
    np.testing.assert_array_equal(bucket_starts(32, 128), [
        *range(1, 17), 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113])
    table = jnp.arange(32, dtype=jnp.float32)[:, None]
    keys = jnp.array([0, 99, 100, 101, 110, 300])
    both, behind = (relative_bias(table, jnp.array([100]), keys, 128, way)[0, 0, 0]
                    for way in (True, False))
    np.testing.assert_array_equal(both, [15, 1, 0, 17, 24, 31])
    np.testing.assert_array_equal(behind, [30, 1, 0, 0, 0, 0])


def test_what_is_padding_changes_nothing(params):
    """Guards against padded tokens that are read, or that shift the positions of others."""
    longer = np.pad(IDS, ((0, 0), (0, 3)), constant_values=5)
    others = np.where(MASK, IDS, (IDS + 7) % 38)
    expected = logits(params)
    np.testing.assert_allclose(logits(params, others), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(logits(params, longer, np.pad(MASK, ((0, 0), (0, 3)))), expected,
                               rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("remat", ["none", "dots"])
def test_scanned_layers_are_the_looped_ones(params, remat):
    """Guards against a bias that a scan does not hand on, or differentiates once."""
    def value(params, **changes):
        module = T5(dataclasses.replace(tiny.T5, decoder_layers=2, encoder_layers=2, **changes))
        return jnp.sin(module.apply({"params": params}, IDS, MASK, TARGETS)).sum()

    module = T5(dataclasses.replace(tiny.T5, encoder_layers=2, scan_layers=True, remat=remat))
    scanned = tiny.perturbed(tiny.jit(module.init)(jax.random.key(1), IDS, MASK, TARGETS))["params"]
    found = tiny.jit(jax.grad(lambda p: value(p, scan_layers=True, remat=remat)))(scanned)
    expected = tiny.jit(jax.grad(value))(unstack_layers(scanned))
    tiny.assert_trees_close(unstack_layers(found), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["token", "sequence", "fid"])
def test_the_order_of_passages_changes_nothing(kind):
    """Guards against passages that read each other, or, fused, that have places."""
    model = tiny.rag_model(kind, generator=tiny.T5)
    batch = tiny.rag_batch(model=model)
    batch = batch._replace(doc_mask=np.ones_like(batch.doc_mask))
    params = tiny.rag_params(model)
    turned = batch._replace(**{name: getattr(batch, name)[:, ::-1] for name in (
        "source_ids", "source_mask", "doc_embeddings")})
    found, expected = (tiny.jit(lambda p, b: log_likelihood(model, p, b)["log_p"])(params, b)
                       for b in (turned, batch))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
