"""BART against a float64 re-implementation, causality, independence of rows."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import naive
import numpy as np
import pytest
import tiny

from rag_jax.config import BART_PRESETS
from rag_jax.models.bart import Bart
from rag_jax.models.generator import in_dtype
from rag_jax.models.stack import unstack_layers

ROWS, SOURCE, TARGET = 3, 6, 5
RNG = np.random.default_rng(0)
IDS = RNG.integers(0, 38, (ROWS, SOURCE)).astype(np.int32)
MASK = np.arange(SOURCE) < np.array([[6], [3], [1]])
DECODER_IDS = RNG.permutation(38)[: ROWS * TARGET].reshape(ROWS, TARGET).astype(np.int32)


def bart(**changes):
    return Bart(dataclasses.replace(tiny.BART, decoder_layers=2, **changes))


@pytest.fixture(scope="module")
def params():
    variables = tiny.jit(bart().init)(jax.random.key(0), IDS, MASK, DECODER_IDS)
    return tiny.perturbed(variables["params"])


@functools.partial(tiny.jit, static_argnames="module")
def forward(params, ids, mask, decoder_ids, module=None):
    return (module or bart()).apply({"params": params}, ids, mask, decoder_ids)


def reference(params, **arguments):
    return np.stack([naive.bart_logits(params, IDS[r], MASK[r], DECODER_IDS[r], 2, **arguments)
                     for r in range(ROWS)])


def test_logits_match_float64(params):
    """Position offset 2, embedding LayerNorm, post-LayerNorm, exact GELU, tied output and bias."""
    found = forward(params, IDS, MASK, DECODER_IDS)
    assert found.shape == (ROWS, TARGET, 38) and found.dtype == jnp.float32
    np.testing.assert_allclose(found, reference(params), rtol=1e-4, atol=1e-4)


def test_epsilon_is_1e_5(params):
    tables = ("embedding", "encoder_positions", "decoder_positions")
    small = {k: v * 3e-3 if k in tables else v for k, v in params.items()}
    expected = reference(small)
    np.testing.assert_allclose(forward(small, IDS, MASK, DECODER_IDS), expected,
                               rtol=1e-4, atol=1e-5)
    assert np.abs(expected - reference(small, eps=1e-12)).max() > 1e-3
    assert {preset.layer_norm_eps for preset in BART_PRESETS.values()} == {1e-5}


def test_relu_and_scaled_embeddings_are_choices(params):
    found = forward(params, IDS, MASK, DECODER_IDS,
                    module=bart(activation="relu", scale_embedding=True))
    expected = reference(params, activation="relu", scale=4.0)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_the_scale_of_embeddings_is_that_of_a_float32_table():
    """From a table in bfloat16 its scale was rounded, sqrt(12) by a part in 745."""
    module = bart(width=12, scale_embedding=True, dtype="bfloat16")
    first = tiny.jit(module.init)(jax.random.key(0), IDS, MASK, DECODER_IDS)["params"]
    kept = in_dtype(tiny.perturbed(first), "bfloat16")
    whole = {**kept, "embedding": kept["embedding"].astype(jnp.float32)}
    encode = tiny.jit(functools.partial(module.apply, method="encode"))
    np.testing.assert_array_equal(*(encode({"params": each}, IDS, MASK) for each in (kept, whole)))


def test_source_padding_changes_nothing(params):
    expected = forward(params, IDS, MASK, DECODER_IDS)
    junk = np.where(MASK, IDS, (IDS + 7) % 38)
    np.testing.assert_array_equal(forward(params, junk, MASK, DECODER_IDS), expected)
    np.testing.assert_allclose(
        forward(params, IDS[1:2, :3], MASK[1:2, :3], DECODER_IDS[1:2]), expected[1:2],
        rtol=1e-5, atol=1e-5)


def decoder_states(params, encoded, embedding):
    return bart().apply({"params": {**params, "embedding": embedding}}, encoded, MASK,
                        DECODER_IDS, method="decode")


def test_decoder_is_causal_and_its_rows_independent_by_gradient(params):
    """All decoder tokens differ, so that a table row's gradient is a position's gradient."""
    encoded = jnp.float32(np.random.default_rng(1).normal(size=(ROWS, SOURCE, 16)))
    direction = jnp.arange(16.0)[None, None]

    @tiny.jit
    def jacobian(embedding):
        def picked(table):
            return (decoder_states(params, encoded, table) * direction).sum(axis=-1)  # -> [R, T]

        return jax.jacrev(picked)(embedding)

    by_position = np.asarray(jacobian(params["embedding"]))[:, :, DECODER_IDS].any(axis=-1)
    for row, t in np.ndindex(ROWS, TARGET):
        expected = np.zeros((ROWS, TARGET), bool)
        expected[row, : t + 1] = True
        np.testing.assert_array_equal(by_position[row, t], expected, err_msg=f"row {row}, t {t}")


def test_rows_see_only_their_own_real_source_by_gradient(params):
    """A document's decoder has no gradient at other documents' states, nor at padding."""
    encoded = jnp.float32(np.random.default_rng(1).normal(size=(ROWS, SOURCE, 16)))

    @tiny.jit
    def jacobian(encoded):
        def picked(encoded):
            states = decoder_states(params, encoded, params["embedding"])
            return (states * jnp.arange(16.0)[None, None]).sum(axis=(1, 2))  # -> [R]

        return jax.jacrev(picked)(encoded)

    seen = np.asarray(jacobian(encoded)).any(axis=-1)  # -> [R, R, S]
    expected = np.eye(ROWS, dtype=bool)[:, :, None] & MASK[None]
    np.testing.assert_array_equal(seen, expected)


def test_encoder_rows_are_independent_by_gradient(params):
    ids = np.where(np.arange(ROWS)[:, None] == 0, IDS % 10, 10 + IDS % 20)

    def first_row(table):
        states = bart().apply({"params": {**params, "embedding": table}}, ids,
                              np.ones_like(MASK), method="encode")
        return (states[0] * jnp.arange(16.0)[None]).sum()

    grad = np.asarray(tiny.jit(jax.grad(first_row))(params["embedding"]))
    assert grad[np.unique(ids[0])].any(axis=1).all() and not grad[10:].any()


def test_remat_and_scan_change_neither_values_nor_gradients(params):
    def gradient(module, params):
        def value(params):
            return jnp.sin(module.apply({"params": params}, IDS, MASK, DECODER_IDS)).sum()

        return tiny.jit(jax.value_and_grad(value))(params)

    value, grads = gradient(bart(), params)
    stacked = {**params, **{side: {"layers": jax.tree.map(
        lambda *leaves: np.stack(leaves), *naive.layers(params[side]))}
        for side in ("encoder", "decoder")}}
    tiny.assert_trees_close(unstack_layers(stacked), params, rtol=0, atol=0)
    other_value, other_grads = gradient(bart(remat="full", scan_layers=True), stacked)
    np.testing.assert_allclose(other_value, value, rtol=1e-5)
    tiny.assert_trees_close(unstack_layers(other_grads), grads, rtol=1e-4, atol=1e-5)


def equations(jaxpr):
    """All equations of a jaxpr and of the jaxprs inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


def test_bfloat16_matmuls_with_float32_softmax_and_norms(params):
    """Close to float32; every product runs in bfloat16, every exp and rsqrt in float32."""
    module = bart(dtype="bfloat16")
    found = forward(params, IDS, MASK, DECODER_IDS, module=module)
    assert found.dtype == jnp.float32
    exact = forward(params, IDS, MASK, DECODER_IDS)
    error = np.abs(found - exact)
    assert 1e-4 < error.max() and error.mean() < 0.02 * np.abs(exact).mean()
    jaxpr = jax.make_jaxpr(module.apply)({"params": params}, IDS, MASK, DECODER_IDS).jaxpr
    types = {}
    for equation in (e for e in equations(jaxpr) if e.invars):
        types.setdefault(equation.primitive.name, set()).add(str(equation.invars[0].aval.dtype))
    assert types["dot_general"] == {"bfloat16"}
    for statistics in ("exp", "rsqrt", "reduce_max"):
        assert types[statistics] == {"float32"}, statistics
