"""How a checkpoint's generator reads a passage and a question: fields of config.data, from its
config.json and back."""

import pathlib
from collections.abc import Mapping
from typing import Any, get_args, get_type_hints

from rag_jax.config import DataConfig
from rag_jax.data import tokenizer_file
from rag_jax.hub import causal
from rag_jax.hub.families import Family

# Fields of config.data that say how a generator's input is written: of Hugging Face's own RAG, of
# Fusion-in-Decoder on T5, whose own tasks are like it, and what auto means of other generators.
RELEASED_INPUTS = {"source_format": "hugging_face", "question_text": "uncased_roundtrip"}
FID_INPUTS = {"source_format": "question_first", "question_text": "raw"}
OUR_INPUTS = {"source_format": "question_kept", "question_text": "raw"}
OWN = "rag_jax"  # the section of config.json for what only this package reads


def inputs(config: Mapping[str, Any], family: Family, folder: pathlib.Path) -> dict[str, str]:
    """Fields of config.data that say how the generator of a checkpoint was trained to read.

    Those that we wrote say it; others are known by their family, of decoder-only models by the
    tokenizer in `folder`, which may know chats. Empty where nothing is known.
    """
    if "generator" not in family.places:
        return {}
    own, hints = config.get(OWN), get_type_hints(DataConfig)
    said = {name: own[name] for name in OUR_INPUTS
            if isinstance(own, dict) and own.get(name) in get_args(hints[name])}
    if said and isinstance(own.get("prompt"), str):
        said["prompt"] = own["prompt"]
    return {**_usual_inputs(family, folder), **said}


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
    """The section of config.json that `inputs` reads; none where it says the same without.

    Args:
      data: of the configuration that the generator was trained with.
      family: what it is written as.
      folder: of its tokenizer.
    """
    used = read_as(data)
    if "generator" not in family.places or used == {**OUR_INPUTS, **_usual_inputs(family, folder)}:
        return {}
    return {OWN: used}


def read_as(data: DataConfig) -> dict[str, str]:
    """What `inputs` is of a generator that is trained with a configuration."""
    used = {name: usual if getattr(data, name) == "auto" else getattr(data, name)
            for name, usual in OUR_INPUTS.items()}
    return {**used, "prompt": data.prompt} if data.prompt else used
