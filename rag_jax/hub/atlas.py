"""Atlas's checkpoints: model.pth.tar, the state of a training run of its authors' code.

Source: Izacard et al. 2022 (arXiv 2208.03299); github.com/facebookresearch/atlas, src/model_io.py.
The file has no config.json: the sizes of both models are those of their tensors.
"""

import dataclasses
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from rag_jax.hub import config_json
from rag_jax.hub.config_json import Architecture
from rag_jax.hub.families import Family
from rag_jax.hub.names import Place
from rag_jax.hub.pickled import read_torch
from rag_jax.hub.stored import HubError
from rag_jax.hub.tensors import Tensors

FILE = "model.pth.tar"
READER = "reader."
# Encoders by what their names begin with: one for both sides, or one for each after the query
# encoder alone was trained.
RETRIEVERS = {"bert": "retriever.contriever.", "query_encoder": "retriever.query_contriever.",
              "document_encoder": "retriever.passage_contriever."}
HEAD_WIDTH = 64  # of every released BERT; no tensor says it
TEMPERATURE = 0.01  # of p(z|x), by the default of its options


def read(file: pathlib.Path) -> tuple[Tensors, Family, Architecture]:
    """Where the reader, a T5, and the retriever, one or two BERTs, are in a checkpoint, and what
    they compute. Either may be missing.

    Raises:
      HubError: the file is no such checkpoint, or asks for anything but tensors and options.
    """
    tensors = Tensors({re.sub(r"^(reader|retriever)\.module\.", r"\1.", name): stored
                       for name, stored in read_torch(file, part="model").items()}, file)
    places = {tower: Place(body, body) for tower, body in RETRIEVERS.items()
              if any(name.startswith(body) for name in tensors)}
    parts = Architecture()
    if places:
        parts = Architecture(_contriever(tensors, next(iter(places.values())).body))
    if any(name.startswith(READER) for name in tensors):
        places["generator"] = Place(READER, READER)
        reader = config_json.architecture(_t5(tensors), {}, file)
        parts = dataclasses.replace(reader, retriever=parts.retriever)
    if not places:
        raise HubError(f"{file}: neither reader.* nor retriever.contriever.* is in it; an Atlas "
                       "checkpoint has one of them at least")
    return tensors, Family("Atlas", "atlas", places, "fid"), parts


def _contriever(tensors: Tensors, body: str) -> Any:
    """A BertConfig; vectors are the mean of the last states, compared by their inner products."""
    vocab, width = _shape(tensors, f"{body}embeddings.word_embeddings.weight")
    bert = config_json.bert_config({
        "vocab_size": vocab, "hidden_size": width,
        "max_position_embeddings": _shape(
            tensors, f"{body}embeddings.position_embeddings.weight")[0],
        "num_hidden_layers": _depth(tensors, f"{body}encoder.layer."),
        "num_attention_heads": max(1, width // HEAD_WIDTH),
        "intermediate_size": _shape(
            tensors, f"{body}encoder.layer.0.intermediate.dense.weight")[0],
        "hidden_act": "gelu"}, tensors.source)
    return dataclasses.replace(bert, pooling="mean", normalize=False, titles="joined",
                               scale=1 / (TEMPERATURE * width**0.5))


def _t5(tensors: Tensors) -> Mapping[str, Any]:
    """The config.json of a T5 with these tensors: v1.1's is gated and has an output layer of its
    own."""
    first = f"{READER}encoder.block.0.layer"
    gated = f"{first}.1.DenseReluDense.wi_0.weight" in tensors
    vocab, width = _shape(tensors, f"{READER}shared.weight")
    buckets, heads = _shape(tensors, f"{first}.0.SelfAttention.relative_attention_bias.weight")
    return {"model_type": "t5", "vocab_size": vocab, "d_model": width, "num_heads": heads,
            "d_kv": _shape(tensors, f"{first}.0.SelfAttention.q.weight")[0] // max(1, heads),
            "d_ff": _shape(tensors, f"{first}.1.DenseReluDense.wo.weight")[1],
            "num_layers": _depth(tensors, f"{READER}encoder.block."),
            "num_decoder_layers": _depth(tensors, f"{READER}decoder.block."),
            "relative_attention_num_buckets": buckets, "tie_word_embeddings": not gated,
            "feed_forward_proj": "gated-gelu" if gated else "relu"}


def _shape(tensors: Tensors, name: str) -> tuple[int, int]:
    if name not in tensors or len(tensors[name].shape) != 2:
        raise HubError(f"{tensors.source}: lacks the matrix {name}, by which its sizes are known: "
                       "download it again")
    return tensors[name].shape


def _depth(tensors: Tensors, body: str) -> int:
    return len({name[len(body):].split(".")[0] for name in tensors if name.startswith(body)})
