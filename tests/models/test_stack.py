"""A stack of layers costs as much to trace as one of them, where nothing is drawn at random."""

import dataclasses

import flax.errors
import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
import tiny

from rag_jax.answering import jit_decode, jit_log_likelihood
from rag_jax.config import CausalConfig
from rag_jax.decoding.settings import Decoding
from rag_jax.models.products import Linear

DEPTH = {"bart": (tiny.BART, ("encoder_layers", "decoder_layers")),
         "t5": (tiny.T5, ("encoder_layers", "decoder_layers")),
         "causal": (CausalConfig(vocab_size=38, max_positions=64, width=16, heads=2, kv_heads=1,
                                head_size=8, mlp_width=24, window=3, global_every=2),
                   ("decoder_layers",))}


@pytest.mark.parametrize("family", DEPTH)
def test_all_layers_are_traced_as_one(family):
    """A model of 24 layers took seconds to trace, for each padded length, at every start."""
    def products(program, depth):
        config, names = DEPTH[family]
        model = tiny.rag_model("sequence", {"layers": depth}, dataclasses.replace(
            config, **dict.fromkeys(names, depth)))
        params = nn.unbox(jax.eval_shape(lambda: model.init(jax.random.key(0))))
        batch = tiny.rag_batch(model=model)
        return program(model).lower(params, batch).as_text().count("stablehlo.dot_general")

    decoding = Decoding(max_length=3, num_beams=2, strategy="thorough")
    for program in (jit_log_likelihood, lambda model: jit_decode(model, decoding)):
        few, many = (products(program, depth) for depth in (2, 7))
        # Keys and values of what is read are those of each layer of a decoder.
        assert many - few <= 5 * 2 * (family != "causal"), (few, many)


def test_a_parameter_of_another_shape_is_named():
    linear = Linear(3, ("embed", "mlp"))
    params = nn.unbox(linear.init(jax.random.key(0), jnp.ones((1, 2)))["params"])
    with pytest.raises(flax.errors.ScopeParamShapeError, match="kernel"):
        linear.apply({"params": {**params, "kernel": jnp.ones((5, 3))}}, jnp.ones((1, 2)))
    with pytest.raises(flax.errors.ScopeParamNotFoundError, match="bias"):
        linear.apply({"params": {"kernel": params["kernel"]}}, jnp.ones((1, 2)))
