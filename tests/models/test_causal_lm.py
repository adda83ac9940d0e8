"""Decoder-only generators: what is cached is what a full forward pass computes.

The oracle of the forward pass itself is transformers: tests/hub/test_goldens.py.
"""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from rag_jax.config import CausalConfig
from rag_jax.models.attention import KeysValues
from rag_jax.models.causal_lm import CausalLM, frequencies
from rag_jax.models.generator import in_dtype

SIZE = {"vocab_size": 38, "max_positions": 64, "width": 12, "decoder_layers": 3, "heads": 4,
        "kv_heads": 2, "head_size": 4, "mlp_width": 10, "init_std": 0.3, "rope_theta": 100.0}
CONFIGS = {
    "qwen2": CausalConfig(variant="qwen2", **SIZE),
    "gemma2": CausalConfig(variant="gemma2", window=3, global_every=2, attention_cap=2.0,
                           final_cap=3.0, rope_local_theta=10.0, **SIZE),
    "qwen3": CausalConfig(variant="qwen3", window=2, tied=False, rope_type="yarn", rope_factor=4.0,
                          rope_high=32.0, rope_positions=16, **SIZE),
}
ROWS, SOURCE, ANSWERS, LENGTH = 2, 6, 2, 4
RNG = np.random.default_rng(0)
IDS = RNG.integers(0, 38, (ROWS, SOURCE)).astype(np.int32)
MASK = np.arange(SOURCE) < np.array([[SOURCE], [3]])
INPUTS = RNG.integers(0, 38, (ROWS, ANSWERS, LENGTH)).astype(np.int32)


@functools.cache
def params(name):
    module = CausalLM(CONFIGS[name])
    first = tiny.jit(module.init)(jax.random.key(0), IDS, MASK, INPUTS[:, 0])["params"]
    return tiny.perturbed(first)


@functools.cache
def run(name):
    """states(ids, mask, inputs [R, T]) and, about what was read, those of each answer."""
    module = CausalLM(CONFIGS[name])

    @tiny.jit
    def states(params, ids, mask, inputs):
        return module.apply({"params": params}, ids[:, None], mask[:, None], inputs,
                            method="states")

    def about(generator, ids, mask, inputs):
        source = generator.read(ids[:, None], mask[:, None])
        forced = generator.forced(source, inputs).reshape(*inputs.shape, -1)
        size = inputs.shape[1] * inputs.shape[2]
        past = tuple(KeysValues(*(jnp.zeros((len(ids), *shape)) for shape in (
            (2, 4, size), (2, size, 4)))) for _ in source.layers)
        place, steps = np.arange(size), []
        for t in range(inputs.shape[2]):
            own = np.stack([(place % inputs.shape[1] == m) & (place // inputs.shape[1] <= t)
                            for m in range(inputs.shape[1])])
            own = np.broadcast_to(own[None, None], (len(ids), 1, *own.shape))
            found, past = generator.step(source, inputs[:, None, :, t], jnp.int32(t), past, own)
            steps.append(found)
        return forced, jnp.stack(steps, axis=2)

    cached = tiny.jit(lambda params, *given: nn.apply(about, module)({"params": params}, *given))
    return states, cached


@pytest.mark.parametrize("name", CONFIGS)
def test_cached_decoding_is_the_full_forward_pass(name):
    """A mask, a position or a window that is right in one of the three ways alone."""
    states, cached = run(name)
    full = np.stack([states(params(name), IDS, MASK, INPUTS[:, a]) for a in range(ANSWERS)], 1)
    assert full.std() > 0.1
    for found in cached(params(name), IDS, MASK, INPUTS):
        np.testing.assert_allclose(found, full, atol=2e-5)


@pytest.mark.parametrize("name,passages", [("gemma2", 1), ("qwen2", 2)])
def test_what_is_read_in_two_parts_is_what_is_read_at_once(name, passages):
    """A part at the wrong positions, behind padding that it may see, or in another row's place."""
    module, ids = CausalLM(CONFIGS[name]), np.stack([IDS, IDS[::-1]], axis=1)[:, :passages]
    first, whole = (np.array(each)[:, :passages]
                    for each in ([[3, 1], [0, 4]], [[6, 4], [3, 6]]))

    def placed(begin, end):
        """The tokens from `begin` to `end` of each passage, as padded rows."""
        place = np.arange(SOURCE) + begin[..., None]
        rows = np.take_along_axis(ids, np.minimum(place, SOURCE - 1), axis=2)
        return rows, place < end[..., None]

    @tiny.jit
    def forced(params, *parts):
        def run(generator):
            source = None
            for ids, mask in parts[:-1]:
                alone = generator.read(ids.reshape(-1, 1, SOURCE), mask.reshape(-1, 1, SOURCE))
                source = alone._replace(begin=mask.sum(axis=-1).reshape(-1))
            return generator.forced(generator.read(*parts[-1], source), INPUTS)
        return nn.apply(run, module)({"params": params})

    at_once = forced(params(name), placed(0 * whole, whole))
    assert np.asarray(at_once).std() > 0.1
    np.testing.assert_allclose(
        forced(params(name), placed(0 * whole, first), placed(first, whole)), at_once, atol=2e-5)


@pytest.mark.parametrize("name", ["gemma2"])
def test_padding_and_neighbours_change_nothing(name):
    """Tokens behind a prompt's end, or in another row, that leak into what continues it."""
    states, cached = run(name)
    other = np.where(MASK, IDS, (IDS + 5) % 38)
    other[0] = other[0][::-1]
    for function, inputs in ((states, INPUTS[:, 0]), (cached, INPUTS)):
        here, there = (np.asarray(jax.tree.leaves(function(params(name), ids, MASK, inputs))[-1])
                       for ids in (IDS, other))
        np.testing.assert_array_equal(here[1], there[1])
        assert np.abs(here[0] - there[0]).max() > 1e-2


@pytest.mark.parametrize("name", ["gemma2"])
def test_a_scan_over_the_layers_is_the_loop(name):
    """Local and global layers change places: every layer would get the mask of another."""
    config = dataclasses.replace(CONFIGS[name], scan_layers=True, remat="dots")
    looped = params(name)
    layers = [looped["decoder"][f"layer_{i}"] for i in range(3)]
    scanned = {**looped, "decoder": {"layers": jax.tree.map(lambda *x: jnp.stack(x), *layers)}}

    def loss(module, params):
        return jnp.sin(module.apply({"params": params}, IDS, MASK, INPUTS[:, 0])).sum()

    value, gradient = tiny.jit(jax.value_and_grad(functools.partial(loss, CausalLM(config))))(
        scanned)
    expected, layer = tiny.jit(jax.value_and_grad(functools.partial(
        loss, CausalLM(CONFIGS[name]))))(looped)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    tiny.assert_trees_close(jax.tree.map(lambda x: x[1], gradient["decoder"]["layers"]),
                            layer["decoder"]["layer_1"], rtol=1e-3, atol=1e-5)


def test_gemma_scales_embeddings_as_transformers_does():
    """Trained from a float32 table and asked from one in bfloat16, it was two models."""
    module = CausalLM(dataclasses.replace(CONFIGS["gemma2"], dtype="bfloat16"))
    kept = in_dtype(params("gemma2"), "bfloat16")
    expected = np.asarray(kept["embedding"])[IDS] * np.asarray(12**0.5, jnp.bfloat16)
    for tree in (params("gemma2"), kept):
        found = tiny.jit(functools.partial(module.apply, method="embed"))({"params": tree}, IDS)
        np.testing.assert_array_equal(found, expected)


def test_scaled_rotary_positions_keep_what_turns_fast():
    """llama3 and yarn scale long wavelengths alone: scaled wholly, a model would be lost."""
    plain, _ = frequencies(CONFIGS["qwen2"])
    for kind, high in (("llama3", 4.0), ("yarn", 32.0)):
        config = dataclasses.replace(CONFIGS["qwen2"], head_size=64, rope_theta=1e4,
                                     rope_type=kind, rope_factor=8.0, rope_high=high)
        turning, factor = frequencies(config)
        ratio = turning / frequencies(dataclasses.replace(config, rope_type="default"))[0]
        np.testing.assert_allclose(ratio[[0, -1]], [1, 1 / 8], rtol=1e-6)
        assert (np.diff(ratio) <= 1e-6).all()
        np.testing.assert_allclose(factor, {"llama3": 1, "yarn": 1 + 0.1 * np.log(8)}[kind])
    assert plain[0] == 1
    # Where fewer positions were trained than the slowest of them turn, the band is upside down.
    config = dataclasses.replace(CONFIGS["qwen2"], head_size=64, rope_theta=1e4, rope_type="yarn",
                                 rope_factor=4.0, rope_positions=4)
    ratio = frequencies(config)[0] / frequencies(
        dataclasses.replace(config, rope_type="default"))[0]
    np.testing.assert_allclose(ratio, 1, rtol=1e-6)  # as in transformers
