"""BERT against a float64 re-implementation, and what must not influence what."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import naive
import numpy as np
import pytest
import tiny

from rag_jax.aot.costs import flops
from rag_jax.config import BERT_PRESETS
from rag_jax.models.bert import Bert
from rag_jax.models.modern_bert import ModernBert
from rag_jax.models.stack import unstack_layers

ROWS, LENGTH = 3, 7
RNG = np.random.default_rng(0)
IDS = RNG.integers(0, tiny.BERT.vocab_size, (ROWS, LENGTH)).astype(np.int32)
MASK = np.arange(LENGTH) < np.array([[7], [4], [1]])
TYPES = RNG.integers(0, 2, (ROWS, LENGTH)).astype(np.int32)


def bert(**changes):
    return Bert(dataclasses.replace(tiny.BERT, layers=2, **changes))


@pytest.fixture(scope="module")
def params():
    return tiny.perturbed(tiny.jit(bert().init)(jax.random.key(0), IDS, MASK)["params"])


@functools.partial(tiny.jit, static_argnames="module")
def forward(params, ids, mask, types=None, module=None):
    return (module or bert()).apply({"params": params}, ids, mask, types)


def reference(params, **arguments):
    return np.stack([naive.bert(params, IDS[r], MASK[r], TYPES[r], heads=2, **arguments)
                     for r in range(ROWS)])


def test_states_match_float64(params):
    """Post-LayerNorm, exact GELU, query scaling, token types, padding mask."""
    found = forward(params, IDS, MASK, TYPES)
    np.testing.assert_allclose(found, reference(params), rtol=1e-4, atol=2e-5)
    tanh_gelu = 1e-4  # the approximate GELU is off by up to 5e-4 per layer
    assert np.abs(found - reference(params)).max() < tanh_gelu


def test_epsilon_is_1e_12(params):
    """With embeddings of std 1e-4 the usual 1e-5 or 1e-6 would swallow the signal."""
    tables = ("token_embedding", "position_embedding", "type_embedding")
    small = {k: v * 1e-4 if k in tables else v for k, v in params.items()}
    np.testing.assert_allclose(forward(small, IDS, MASK, TYPES), reference(small),
                               rtol=1e-3, atol=1e-4)
    assert np.abs(reference(small) - reference(small, eps=1e-5)).max() > 0.1
    assert {preset.layer_norm_eps for preset in BERT_PRESETS.values()} == {1e-12}


def test_relu_is_a_choice(params):
    found = forward(params, IDS, MASK, TYPES, module=bert(activation="relu"))
    np.testing.assert_allclose(found, reference(params, activation="relu"), rtol=1e-4, atol=2e-5)


def test_no_token_types_means_type_zero(params):
    plain = forward(params, IDS, MASK)
    np.testing.assert_array_equal(plain, forward(params, IDS, MASK, np.zeros_like(TYPES)))
    assert np.abs(plain - forward(params, IDS, MASK, np.ones_like(TYPES))).max() > 0.1


@pytest.mark.parametrize("settings", [{}, {"remat": "full"}, {"scan_layers": True}])
def test_asking_for_the_first_rows_changes_nothing_in_them(params, settings):
    """[CLS] alone: the last layer must still attend to every position."""
    module = bert(**settings)
    if settings.get("scan_layers"):
        params = tiny.jit(module.init)(jax.random.key(0), IDS, MASK)["params"]
    whole = module.apply({"params": params}, IDS, MASK, TYPES)
    first = module.apply({"params": params}, IDS, MASK, TYPES, rows=2)
    assert first.shape == (ROWS, 2, tiny.BERT.width)
    np.testing.assert_allclose(first, whole[:, :2], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("remat", ["none", "full"])
def test_a_scanned_stack_leaves_out_the_positions_that_nobody_asks_for(params, remat):
    """As many operations as the loop's, forward and backward, and the gradients of all layers."""
    def traced(**settings):
        module = bert(remat=remat, **settings)
        if settings["scan_layers"]:
            tree = {**params, "encoder": {"layers": jax.tree.map(
                lambda *leaves: np.stack(leaves), *naive.layers(params["encoder"]))}}
        else:
            tree = params
        value = lambda tree: jnp.sin(module.apply(  # noqa: E731
            {"params": tree}, IDS, MASK, TYPES, rows=1)).sum()
        program = jax.jit(jax.grad(value))
        return flops(program.trace(tree).jaxpr.jaxpr), unstack_layers(program(tree))

    (scanned, grads), (looped, expected) = traced(scan_layers=True), traced(scan_layers=False)
    assert scanned == looped
    tiny.assert_trees_close(grads, expected, rtol=1e-4, atol=1e-5)


def test_padding_tokens_and_padding_length_change_nothing(params):
    expected = forward(params, IDS, MASK, TYPES)
    junk = np.where(MASK, IDS, (IDS + 5) % tiny.BERT.vocab_size)
    found = forward(params, junk, MASK, TYPES)
    np.testing.assert_array_equal(np.asarray(found)[MASK], np.asarray(expected)[MASK])
    shorter = forward(params, IDS[1:2, :4], MASK[1:2, :4], TYPES[1:2, :4])
    np.testing.assert_allclose(shorter, expected[1:2, :4], rtol=1e-5, atol=1e-5)


def test_rows_are_independent_by_gradient(params):
    """Row 0 uses tokens 0-9, the other rows 10-29: row 0 has no gradient at theirs."""
    ids = np.where(np.arange(ROWS)[:, None] == 0, IDS % 10, 10 + IDS % 20)

    def first_row(table):
        states = bert().apply({"params": {**params, "token_embedding": table}}, ids,
                              np.ones_like(MASK))
        return (states[0] * jnp.arange(16.0)[None]).sum()

    grad = np.asarray(tiny.jit(jax.grad(first_row))(params["token_embedding"]))
    assert grad[np.unique(ids[0])].any(axis=1).all()
    assert not grad[10:].any()


def test_remat_and_scan_change_neither_values_nor_gradients(params):
    def gradient(module, params):
        def value(params):
            states = module.apply({"params": params}, IDS, MASK, TYPES)
            return (jnp.sin(states) * MASK[..., None]).sum()

        return tiny.jit(jax.value_and_grad(value))(params)

    value, grads = gradient(bert(), params)
    stacked = {**params, "encoder": {"layers": jax.tree.map(
        lambda *leaves: np.stack(leaves), *naive.layers(params["encoder"]))}}
    tiny.assert_trees_close(unstack_layers(stacked), params, rtol=0, atol=0)
    for changes, tree in (({"remat": "dots"}, params), ({"remat": "narrow"}, params),
                          ({"remat": "full", "scan_layers": True}, stacked)):
        other_value, other_grads = gradient(bert(**changes), tree)
        np.testing.assert_allclose(other_value, value, rtol=1e-5)
        tiny.assert_trees_close(unstack_layers(other_grads), grads, rtol=1e-4, atol=1e-5)


def test_every_policy_computes_again_what_it_says(params):
    """Operations of the gradient: dots keeps all but scores, narrow what is as wide as a state."""
    def operations(remat):
        value = lambda params: bert(remat=remat).apply({"params": params}, IDS, MASK).sum()  # noqa: E731
        return flops(jax.jit(jax.grad(value)).trace(params).jaxpr.jaxpr)

    none, dots, narrow, full = map(operations, ("none", "dots", "narrow", "full"))
    config, tokens = bert().config, IDS.size
    scores = 2 * tokens * LENGTH * config.width * config.layers
    square = 2 * tokens * config.width**2 * config.layers
    wide = 2 * tokens * config.width * config.mlp_width * config.layers
    assert dots - none == scores
    assert narrow - dots == wide
    assert full - narrow == 4 * square + scores + wide


def test_scan_initialises_every_layer_differently():
    params = nn.meta.unbox(
        tiny.jit(bert(scan_layers=True).init)(jax.random.key(0), IDS, MASK)["params"])
    kernel = params["encoder"]["layers"]["mlp"]["wi"]["kernel"]
    assert kernel.shape[0] == 2 and np.abs(kernel[0] - kernel[1]).max() > 0.01


def test_bfloat16_stays_close_to_float32(params):
    found = forward(params, IDS, MASK, TYPES, module=bert(dtype="bfloat16"))
    assert found.dtype == jnp.bfloat16
    error = np.abs(np.float32(found) - forward(params, IDS, MASK, TYPES))[MASK]
    assert 1e-4 < error.max() < 0.15 and error.mean() < 0.02


@pytest.mark.parametrize("scan, draws", [(False, "threefry2x32"), (True, "unsafe_rbg")])
def test_dropout_needs_a_key_and_follows_it(params, scan, draws):
    module = bert(dropout=0.3, attention_dropout=0.3, scan_layers=scan)
    if scan:
        params = {**params, "encoder": {"layers": jax.tree.map(
            lambda *leaves: np.stack(leaves), *naive.layers(params["encoder"]))}}

    @tiny.jit
    def run(key):
        return module.apply({"params": params}, IDS, MASK, deterministic=False, rows=2,
                            rngs={"dropout": key})

    one = run(jax.random.key(1, impl=draws))
    np.testing.assert_array_equal(one, run(jax.random.key(1, impl=draws)))
    assert np.abs(one - run(jax.random.key(2, impl=draws))).max() > 0.1
    np.testing.assert_array_equal(
        forward(params, IDS, MASK, module=module),
        forward(params, IDS, MASK, module=bert(scan_layers=scan)))


def test_dropout_of_attention_is_also_that_of_its_output_in_modern_bert():
    """As there: weights alone would train an encoder of half the noise that its folder asks for."""
    config = dataclasses.replace(
        tiny.BERT, model_type="modernbert", attention_dropout=0.5, global_every=1)
    module = ModernBert(config)
    params = tiny.perturbed(tiny.jit(module.init)(jax.random.key(0), IDS, MASK)["params"])
    params["encoder"]["layer_0"]["wo"]["kernel"] *= 0  # the layer is its attention alone
    _, found = tiny.jit(lambda params, key: module.apply(
        {"params": params}, IDS, MASK, deterministic=False, rngs={"dropout": key},
        capture_intermediates=True))(params, jax.random.key(1))
    found = found["intermediates"]
    before, after = (found[name]["__call__"][0] for name in ("embedding_norm", "encoder"))
    assert 0.3 < np.mean(np.asarray(after == before)[MASK]) < 0.7
