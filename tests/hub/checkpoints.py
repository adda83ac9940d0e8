"""Tiny checkpoints with Hugging Face's names, made without transformers."""

import json
import pathlib

import flax.linen as nn
import jax
import numpy as np
import safetensors.numpy

from rag_jax.config import BartConfig, BertConfig
from rag_jax.hub.config_json import Architecture, SpecialIds
from rag_jax.hub.load import abstract
from rag_jax.hub.save import save

BERT = BertConfig(vocab_size=11, max_positions=6, width=8, layers=2, heads=2, mlp_width=12)
BART = BartConfig(vocab_size=13, max_positions=6, width=8, encoder_layers=1, decoder_layers=2,
                  heads=2, mlp_width=12)
IDS = SpecialIds(start=2, end=2, pad=1, bos=0, forced_bos=0, forced_eos=None)
TOWERS = {"BertModel": ["bert"], "DPRQuestionEncoder": ["query_encoder"],
          "DPRContextEncoder": ["document_encoder"], "BartModel": ["generator"],
          "BartForConditionalGeneration": ["generator"], "RagModel": ["query_encoder", "generator"],
          "RagTokenForGeneration": ["query_encoder", "generator"],
          "RagSequenceForGeneration": ["query_encoder", "generator"]}


def params(family: str, bert: BertConfig = BERT, bart: BartConfig = BART) -> dict:
    """Random parameters of a family."""
    rng = np.random.default_rng(0)
    shapes = nn.meta.unbox(abstract(TOWERS[family], Architecture(bert, bart)))
    result = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), shapes)
    if family == "BartModel":
        generator = result["generator"]
        generator["final_logits_bias"] = np.zeros_like(generator["final_logits_bias"])
    return result


def written(folder: pathlib.Path, family: str, bert: BertConfig = BERT, bart: BartConfig = BART,
            **settings) -> tuple[pathlib.Path, dict]:
    """(folder/family, parameters) of a saved checkpoint."""
    tree = params(family, bert, bart)
    save(folder / family, family, tree, Architecture(bert, bart, IDS), **settings)
    return folder / family, tree


def edit_config(folder: pathlib.Path, **changes) -> None:
    """Sets fields of config.json; None removes one."""
    config = {**json.loads((folder / "config.json").read_text()), **changes}
    config = {k: v for k, v in config.items() if v is not None}
    (folder / "config.json").write_text(json.dumps(config))


def edit_weights(folder: pathlib.Path, edit) -> None:
    """Replaces model.safetensors by edit(its tensors)."""
    file = folder / "model.safetensors"
    safetensors.numpy.save_file(edit(safetensors.numpy.load_file(file)), file)


def assert_equal(a, b) -> None:
    """Both trees have the same structure and bits."""
    same = jax.tree.map(lambda x, y: np.asarray(x).tobytes() == np.asarray(y).tobytes(), a, b)
    assert jax.tree.all(same), same
