"""How a checkpoint's generator reads a passage and a question: fields of config.data, from its
config.json and back."""

import pathlib
from collections.abc import Mapping
from typing import Any, get_args, get_type_hints

from rag_jax.config import DataConfig
from rag_jax.data import tokenizer_file
from rag_jax.hub import causal
from rag_jax.hub.families import Family

# Fields of config.data that say how a generator's input is written: for Hugging Face's RAG, for
# Fusion-in-Decoder on T5, whose own tasks are like it, and what "auto" means for other generators.
RELEASED_INPUTS = {"source_format": "hugging_face", "question_text": "uncased_roundtrip"}
FID_INPUTS = {"source_format": "question_first", "question_text": "raw"}
OUR_INPUTS = {"source_format": "question_kept", "question_text": "raw"}
OWN = "rag_jax"  # the section of config.json that only this package reads


def inputs(config: Mapping[str, Any], family: Family, folder: pathlib.Path) -> dict[str, str]:
    """Fields of config.data that say how the generator of a checkpoint was trained to read.

    A checkpoint that this package wrote says it. For others it follows from the family, and for
    decoder-only models from whether the tokenizer in `folder` has a chat template. Empty where
    nothing is known.
    """
    if "generator" not in family.places:
        return {}
    own, hints = config.get(OWN), get_type_hints(DataConfig)
    stated = {name: own[name] for name in OUR_INPUTS
              if isinstance(own, dict) and own.get(name) in get_args(hints[name])}
    if stated and isinstance(own.get("prompt"), str):
        stated["prompt"] = own["prompt"]
    return {**_usual_inputs(family, folder), **stated}


def _usual_inputs(family: Family, folder: pathlib.Path) -> dict[str, str]:
    if family.model_type == "rag":
        return RELEASED_INPUTS
    if family.model_type in ("t5", "mt5"):
        return FID_INPUTS
    if family.model_type in causal.USUAL:
        chats = "chat_template" in tokenizer_file.settings(folder)
        return {**OUR_INPUTS, "source_format": "chat" if chats else "prompt"}
    return {}


def inputs_json(data: DataConfig, family: Family, folder: pathlib.Path) -> dict[str, Any]:
    """The section of config.json that `inputs` reads; empty where `inputs` needs none.

    Args:
      data: config.data of the generator's training.
      family: the class that it is written as.
      folder: its tokenizer's.
    """
    used = read_as(data)
    if "generator" not in family.places or used == {**OUR_INPUTS, **_usual_inputs(family, folder)}:
        return {}
    return {OWN: used}


def read_as(data: DataConfig) -> dict[str, str]:
    """What `inputs` returns for a generator that was trained with this configuration."""
    used = {name: usual if getattr(data, name) == "auto" else getattr(data, name)
            for name, usual in OUR_INPUTS.items()}
    return {**used, "prompt": data.prompt} if data.prompt else used
