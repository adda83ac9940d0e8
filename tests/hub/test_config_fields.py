"""Every field that transformers' configurations have is read, refused, or known to change nothing:
a new one of a new version is not passed over."""

import pytest
import transformers

from rag_jax.hub.config_json import IDS
from rag_jax.hub.families import BARE, FAMILIES
from rag_jax.hub.names import TABLE

# By model: what else is looked at (hub/config_json.py, hub/causal.py), and what says nothing of
# what is computed here: heads for other tasks, drawing and dropping in training, ways to compute.
ELSEWHERE = {
    "bert": {"pad_token_id"},
    "modernbert": {"layer_types", "rope_parameters"},
    "bart": {*IDS.values()},
    "t5": {*IDS.values(), "feed_forward_proj", "tie_word_embeddings"},
    "causal": {*IDS.values(), "layer_types", "rope_parameters", "sliding_window",
               "use_sliding_window", "hidden_activation", "_sliding_window_pattern"},
}
NOTHING = {
    "bert": {"bos_token_id", "eos_token_id", "tie_word_embeddings"},
    "modernbert": {
        "initializer_cutoff_factor", "pad_token_id", "eos_token_id", "bos_token_id",
        "cls_token_id", "sep_token_id", "decoder_bias", "classifier_pooling", "classifier_bias",
        "classifier_activation", "deterministic_flash_attn", "sparse_prediction",
        "sparse_pred_ignore_index", "tie_word_embeddings"},
    "bart": {"encoder_layerdrop", "decoder_layerdrop", "is_decoder"},
    "t5": {"initializer_factor"},
    # The last: from which layer on windows begin, which layer_types says too.
    "causal": {"pretraining_tp", "max_window_layers"},
}
# Fields that a configuration has, and its model does not read: of Gemma 3 (modeling_gemma3.py).
UNREAD = {"attn_logit_softcapping"}
EVERYWHERE = {"use_cache", "classifier_dropout", *transformers.PretrainedConfig().to_dict()}
MODELS = {**dict.fromkeys([*BARE, "dpr"], "bert"), "modernbert": "modernbert", "bart": "bart",
          "mt5": "t5", "t5": "t5"}


@pytest.mark.parametrize("model_type", sorted(
    {family.model_type for family in FAMILIES.values()} - {"rag"}))
def test_every_field_is_known(model_type):
    """`rag` has those of its parts."""
    model = MODELS.get(model_type, "causal")
    table = TABLE[model]
    known = {*table["fields"].values(), *table["optional"].values(), *table["fixed"],
             *ELSEWHERE[model], *NOTHING[model], *EVERYWHERE}
    fields = set(transformers.AutoConfig.for_model(model_type).to_dict())
    passed_over = {name for name, readers in TABLE["some"].items() if model_type not in readers}
    assert not fields - known
    assert model != "causal" or fields & passed_over <= UNREAD
