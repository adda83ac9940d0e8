"""Checkpoints of T5's kin in the forms that their authors saved."""

import dataclasses
import re

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from checkpoints import assert_equal, edit_config, edit_weights
from test_goldens import golden

from rag_jax.hub.config_json import Architecture, SpecialIds
from rag_jax.hub.generator_inputs import FID_INPUTS
from rag_jax.hub.load import describe, load
from rag_jax.hub.save import save
from rag_jax.hub.stored import HubError


@pytest.fixture
def folder(tmp_path):
    """A T5 v1.1, whose output layer is its own."""
    golden("t5/gated", tmp_path)
    return tmp_path


def wrapped(tensors):
    """The names that FiD's authors save."""
    def name(old):
        new = re.sub(r"^encoder\.", "encoder.encoder.", old)
        return re.sub(r"^(encoder\.encoder\.block\.\d+)", r"\1.module", new)

    return {name(old): value for old, value in tensors.items()}


def test_fusion_in_decoder_as_its_authors_save_it(folder):
    """Guards against a wrapped layer that is not found, and a reader that answers as RAG-Token."""
    expected = load(folder)
    edit_weights(folder, wrapped)
    edit_config(folder, architectures=["FiDT5"])
    found = load(folder)
    assert_equal(found.params, expected.params)
    assert (found.generator, found.kind, found.inputs) == (
        expected.generator, "fid", FID_INPUTS)
    edit_weights(folder, lambda tensors: {
        k: v for k, v in tensors.items() if "block.0.module.layer.1.DenseReluDense.wo" not in k})
    with pytest.raises(HubError, match=r"1 missing tensors: encoder.block.0.layer.1.DenseReluDens"):
        load(folder)


@pytest.mark.parametrize("changes, scaled", [
    ({"scale_decoder_outputs": None, "tie_word_embeddings": False}, False),
    ({"model_type": "mt5", "architectures": ["MT5ForConditionalGeneration"],
      "scale_decoder_outputs": None, "feed_forward_proj": None, "dense_act_fn": None}, False),
    ({"scale_decoder_outputs": False, "tie_word_embeddings": True}, False),
])
def test_an_output_layer_of_its_own_by_whatever_version_wrote_it(folder, changes, scaled):
    """Guards against Flan-T5 whose states are scaled, or whose own output layer is refused:
    transformers 4 says it as tie_word_embeddings, 5 otherwise, mT5 not at all."""
    expected = load(folder)
    edit_config(folder, **changes)
    found = load(folder)
    assert found.generator == expected.generator
    assert found.generator.scale_output == scaled and not found.generator.tied
    save(folder / "out", found.family, found.params, found)
    again = load(folder / "out")
    assert (again.family, again.generator, again.ids) == (found.family, found.generator, found.ids)


def test_a_scaled_output_layer_is_the_token_table(folder):
    edit_config(folder, scale_decoder_outputs=None, tie_word_embeddings=True)
    with pytest.raises(HubError, match=r"shared.weight and lm_head.weight differ"):
        load(folder)


def test_a_scaled_output_layer_of_its_own_is_not_exported(folder, tmp_path):
    """The folder was written, and refused when it was read: transformers 4 would tie the two."""
    found = load(folder)
    scaled = dataclasses.replace(found.generator, scale_output=True)
    with pytest.raises(HubError, match="tied=False, scale_output=True: there is no such t5"):
        save(tmp_path / "out", found.family, found.params, Architecture(None, scaled, found.ids))


def test_special_tokens_that_nobody_names_are_t5s(folder):
    """Guards against BART's: with </s> first, every answer would be another."""
    edit_config(folder, decoder_start_token_id=None, pad_token_id=None, eos_token_id=None)
    found = describe(folder)
    assert found.ids == SpecialIds(0, 1, 0, None) and found.generator.start_token == 0
    save(folder / "out", "T5ForConditionalGeneration", load(folder).params,
         Architecture(None, found.generator))
    assert describe(folder / "out").ids == found.ids


@pytest.mark.parametrize("changes, message", [
    ({"feed_forward_proj": "gated-silu"}, "feed_forward_proj = 'gated-silu' is not known here"),
    ({"feed_forward_proj": ["relu"]}, r"feed_forward_proj = \['relu'\] is not known here"),
    ({"dense_act_fn": "relu"}, "dense_act_fn = 'relu', and feed_forward_proj = 'gated-gelu' says"),
    ({"is_gated_act": False}, "is_gated_act = False, and feed_forward_proj"),
    ({"is_decoder": True}, "is_decoder = True is another architecture"),
    ({"is_causal": False}, "is_causal = False is another architecture"),
    ({"d_kv": None}, "lacks d_kv"),
    ({"num_layers": 2, "num_decoder_layers": 1}, "8 missing tensors|9 missing tensors"),
    ({"relative_attention_num_buckets": 9}, r"is \(8, 2\), the config asks for \(9, 2\)"),
    ({"relative_attention_num_buckets": 2**31 - 1}, "out of its bounds: at least 4, at most 256"),
    ({"relative_attention_num_buckets": 64, "relative_attention_max_distance": 32}, "half of"),
])
def test_what_is_another_architecture_is_refused_by_field(folder, changes, message):
    edit_config(folder, **changes)
    with pytest.raises(HubError, match=message):
        load(folder)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_shards_of_every_dtype(folder, dtype):
    found = load(folder)
    save(folder / "out", found.family, found.params, found, shard_bytes=2000)
    for shard in (folder / "out").glob("model-*.safetensors"):
        tensors = safetensors.numpy.load_file(shard)
        safetensors.numpy.save_file({k: v.astype(dtype) for k, v in tensors.items()}, shard)
    assert len(list((folder / "out").glob("model-*.safetensors"))) > 1
    again = load(folder / "out")
    assert again.generator == dataclasses.replace(found.generator)
    rounded = found.params["generator"]["output"].astype(dtype).astype(np.float32)
    np.testing.assert_array_equal(again.params["generator"]["output"], rounded)
