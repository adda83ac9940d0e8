"""config.json of decoder-only models and of ModernBERT: what is not computed here is refused."""

import dataclasses
import pathlib

import pytest

from rag_jax.config import CausalConfig
from rag_jax.hub.config_json import SpecialIds, bert_config, causal_config, causal_json
from rag_jax.hub.stored import HubError

FILE = pathlib.Path("config.json")
SIZES = {"vocab_size": 38, "max_position_embeddings": 64, "hidden_size": 16,
         "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 10}
GEMMA = {"model_type": "gemma2", "num_key_value_heads": 2, "head_dim": 4,
         "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6, **SIZES}
LOCAL, GLOBAL = "sliding_attention", "full_attention"


def scaled(kind, **fields):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 100.0, "factor": 2.0, **fields}}


@pytest.mark.parametrize("changes,message", [
    ({"head_dim": 2**30}, "heads of width 1073741824"),
    ({"head_dim": 5}, "heads of width 5"),
    ({"num_key_value_heads": 3}, "num_key_value_heads = 3 does not divide"),
    ({"is_causal": False}, "is_causal = False is another architecture"),
    ({"layer_types": [LOCAL, GLOBAL]}, "4 in all"),
    ({"layer_types": [[]] * 4}, "layer_types"),
    ({"rope_parameters": {"rope_type": [], "rope_theta": 100.0}}, "rope_type"),
    (scaled("linear", factor=0), "factor above 0"),
    (scaled("yarn", beta_slow=0), "rope_parameters"),
    (scaled("yarn", rope_theta=1.0), "above 1"),
    (scaled("llama3", low_freq_factor=2.0, high_freq_factor=2.0), "the first the smaller"),
])
def test_numbers_that_no_decoder_only_model_has(changes, message):
    """Found by hand: a table of 2**30 angles, a division by zero, an unhashable type, and layers
    beyond the list that follow a rule nobody wrote."""
    causal_config(GEMMA, FILE)
    with pytest.raises(HubError, match=message):
        causal_config({**GEMMA, **changes}, FILE)


YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0,
        "original_max_position_embeddings": 16}
GEMMA3 = {**GEMMA, "model_type": "gemma3_text"}


def test_what_is_said_twice_of_rotary_positions_has_to_be_the_same():
    """transformers takes rope_scaling where there are both; rope_parameters was taken here."""
    said = {**GEMMA, "rope_parameters": YARN}
    assert causal_config({**said, "rope_scaling": YARN}, FILE) == causal_config(said, FILE)
    with pytest.raises(HubError, match="rope_scaling = .* and rope_parameters = .* differ"):
        causal_config({**said, "rope_scaling": {**YARN, "factor": 2.0}}, FILE)


@pytest.mark.parametrize("config,expected", [
    ({**GEMMA, "rope_parameters": YARN}, 9), ({**GEMMA, "rope_scaling": YARN}, 9),
    ({**GEMMA3, "rope_parameters": {GLOBAL: YARN}}, 16), ({**GEMMA3, "rope_scaling": YARN}, 16),
])
def test_the_length_before_scaling_goes_first_outside_of_its_section(config, expected):
    """As in transformers, where Gemma 3, which has two sections, does not read it."""
    assert causal_config(config, FILE).rope_positions == 16
    outside = {**config, "original_max_position_embeddings": 9}
    assert causal_config(outside, FILE).rope_positions == expected


@pytest.mark.parametrize("config", [
    {**GEMMA, "rope_parameters": {GLOBAL: YARN, LOCAL: {}}},
    {**GEMMA3, "rope_parameters": {GLOBAL: YARN, LOCAL: {"type": "linear"}}},
    {**GEMMA3, "rope_parameters": {GLOBAL: YARN, LOCAL: {"partial_rotary_factor": 0.5}}},
])
def test_sections_of_rotary_positions_that_are_not_known_here(config):
    with pytest.raises(HubError, match="not known here"):
        causal_config(config, FILE)


def test_only_qwen_reads_use_sliding_window():
    """transformers' Gemma does not: its local layers would see everything."""
    assert causal_config({**GEMMA, "use_sliding_window": False}, FILE).window == 4096


LLAMA = {**GEMMA, "model_type": "llama", "hidden_act": "silu"}
MISTRAL = {**LLAMA, "model_type": "mistral", "sliding_window": 7}


@pytest.mark.parametrize("config,names", [
    (LLAMA, ["final_logit_softcapping", "attn_logit_softcapping", "query_pre_attn_scalar",
             "rope_local_base_freq", "rope_local_theta", "sliding_window"]),
    ({**LLAMA, "hidden_activation": None}, ["hidden_activation"]),
    (MISTRAL, ["rope_local_base_freq", "sliding_window_pattern"]),
    (GEMMA, ["sliding_window_pattern", "rope_local_base_freq", "hidden_act"]),
    (GEMMA3, ["attn_logit_softcapping"]),
])
def test_what_another_family_alone_reads_says_nothing(config, names):
    """Or a model would be computed that transformers, which passes over these, does not know."""
    expected = causal_config(config, FILE)
    for name in names:
        value = "relu" if name.startswith("hidden") else 3
        assert causal_config({**config, name: value}, FILE) == expected, name


def test_an_activation_that_is_a_list_is_refused():
    """It ended in a TypeError."""
    with pytest.raises(HubError, match=r"hidden_act = \['silu'\]"):
        causal_config({**MISTRAL, "hidden_act": ["silu"]}, FILE)


def test_mistral_has_its_window_in_every_layer():
    """MistralForCausalLM does not read layer_types, and AutoModel makes another class of it."""
    assert causal_config({**MISTRAL, "layer_types": [LOCAL] * 4}, FILE).window == 7
    with pytest.raises(HubError, match="Ministral"):
        causal_config({**MISTRAL, "layer_types": [LOCAL, GLOBAL] * 2}, FILE)


OURS = {"vocab_size": 38, "max_positions": 64, "width": 16, "decoder_layers": 4, "heads": 4,
        "kv_heads": 2, "head_size": 4, "mlp_width": 10, "rope_theta": 100.0}


@pytest.mark.parametrize("variant,fields,other", [
    ("gemma2", {}, {"query_size": 4}), ("qwen2", {"query_size": 4}, {"query_size": 0}),
    ("gemma2", {"query_size": 5, "attention_cap": 2.0, "final_cap": 3.0, "window": 3}, {}),
    ("gemma3", {"query_size": 5, "window": 3, "global_every": 2}, {"rope_local_theta": 100.0}),
    ("gemma3", {"query_size": 5, "window": 3, "rope_type": "linear", "rope_factor": 2.0,
                "rope_local_theta": 10.0}, {}),
    ("mistral", {"window": 3}, {}), ("qwen3", {"window": 3, "global_every": 2}, {}),
    ("qwen3", {"window": 3, "rope_local_theta": 100.0}, {"rope_local_theta": 0.0}),
    ("llama", {"rope_type": "linear", "rope_factor": 2.0}, {}), ("olmo2", {"tied": False}, {}),
])
def test_an_export_is_imported_as_the_same_model(variant, fields, other):
    """`other`: fields that come back otherwise, and mean the same. A query_pre_attn_scalar of 0
    divided by zero, and Gemma 3's local layers had turned otherwise."""
    config = CausalConfig(variant=variant, **OURS, **fields)
    written = causal_json(config, SpecialIds())
    assert causal_config(written, FILE) == dataclasses.replace(config, **other)
    assert variant != "mistral" or "layer_types" not in written  # AutoModel's Ministral has them


@pytest.mark.parametrize("variant,name,fields", [
    ("llama", "query_size", {"query_size": 5}), ("llama", "window", {"window": 3}),
    ("olmo2", "window", {"window": 3}), ("mistral", "final_cap", {"final_cap": 2.0}),
    ("qwen2", "attention_cap", {"attention_cap": 2.0}),
    ("gemma3", "attention_cap", {"attention_cap": 2.0}),
    ("mistral", "global_every", {"window": 3, "global_every": 2}),
    ("gemma2", "rope_local_theta", {"window": 3, "rope_local_theta": 10.0}),
    ("qwen3", "rope_local_theta", {"window": 3, "rope_local_theta": 10.0}),
    ("gemma3", "rope_local_theta", {"window": 3, "rope_type": "linear", "rope_factor": 2.0}),
])
def test_what_no_class_of_transformers_computes_is_not_exported(variant, name, fields):
    """Without a word it was another model there, and here as soon as it was read again."""
    with pytest.raises(HubError, match=rf"config\.model\.generator: {name}="):
        causal_json(CausalConfig(variant=variant, **OURS, **fields), SpecialIds())


@pytest.mark.parametrize("changes,message", [
    ({"hidden_size": 2**30}, "heads of width 268435456"),
    ({"hidden_size": 12}, "heads of width 3"),
    ({"layer_types": 3}, "layer_types"),
    ({"rope_parameters": [1]}, "rope_parameters"),
    ({"rope_parameters": {GLOBAL: 1}}, "rope_parameters"),
    ({"sliding_window": 3}, "sliding_window = 3: .* local_attention"),
    ({"embedding_dropout": 0.1}, "embedding_dropout = 0.1 is another architecture"),
])
def test_numbers_that_no_modern_bert_has(changes, message):
    modern = {"model_type": "modernbert", **SIZES}
    bert_config(modern, FILE)
    with pytest.raises(HubError, match=message):
        bert_config({**modern, **changes}, FILE)
