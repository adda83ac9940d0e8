"""The classes of transformers that are known, and where each tower is in their files.

`families.toml` lists them.
"""

import pathlib
import re
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from rag_jax import package_data
from rag_jax.config import BertConfig, CausalConfig, GeneratorConfig, T5Config
from rag_jax.hub import causal
from rag_jax.hub.names import Place
from rag_jax.hub.stored import HubError

RERANKER = "reranker"  # the tower of a cross-encoder
# By config.model_type, the class of a bare encoder.
BARE = {"bert": "BertModel", "roberta": "RobertaModel", "xlm-roberta": "XLMRobertaModel",
        "modernbert": "ModernBertModel"}


class Family(NamedTuple):
    """A model class of transformers: where each tower is in its files."""

    architecture: str
    model_type: str
    places: dict[str, Place]
    kind: str | None = None  # "token", "sequence" or "fid"; None = its class does not say


DATA = package_data.table(__package__, "families.toml")
FAMILIES = {name: Family(name, of["model_type"],
                         {tower: Place(*place) for tower, place in of["places"].items()},
                         of.get("kind"))
            for name, of in DATA["classes"].items()}


def detect(config: Mapping[str, Any], names: Iterable[str], file: pathlib.Path) -> Family:
    """The family of a checkpoint by `architectures`, else by `model_type` and tensor names. Its
    places are those of the towers in this checkpoint.

    Raises:
      HubError: a model that we do not have.
    """
    names, model_type = list(names), config.get("model_type")
    classes = config.get("architectures")
    if classes:
        first = classes[0] if isinstance(classes, list) else classes
        family = FAMILIES.get(first) if isinstance(first, str) else None
    elif model_type == "rag":
        family = FAMILIES["RagModel"]  # the tensors of token and sequence are the same
    else:
        known = [f for f in FAMILIES.values() if f.model_type == model_type]
        holds = (f for f in known if all(
            _anchored(tower, place.body, names) for tower, place in f.places.items()))
        family = next(holds, known[0] if known else None)
    if family is None or model_type not in (None, family.model_type):
        raise HubError(
            f"{file}: architectures {reprlib.repr(classes)} of model_type "
            f"{reprlib.repr(model_type)} are not known here; "
            f"known: {', '.join(FAMILIES)}")
    is_rag = family.model_type == "rag"
    places = {tower: _find(tower, is_rag, names) or place
              for tower, place in family.places.items()}
    if is_rag and (place := _find("document_encoder", is_rag, names)):
        places["document_encoder"] = place  # saved by a RAG that was trained end to end
    return family._replace(places=places)


def _anchored(tower: str, body: str, names: list[str]) -> bool:
    parts = ("decoder.", "layers.") if tower == "generator" else ("embeddings.",)
    return any(name.startswith(tuple(body + part for part in parts)) for name in names)


def _find(tower: str, is_rag: bool, names: list[str]) -> Place | None:
    """The tower's place in this checkpoint: one model is saved with or without the prefix of the
    class around it, depending on who saved it."""
    part = {"query_encoder": "question_encoder.", "document_encoder": "ctx_encoder.",
            "generator": "generator."}.get(tower, "")
    if tower == "generator":
        inner = [Place("", "model."), Place("", "")]
    else:
        inner = [Place(part, f"{part}bert_model."), Place("", "bert_model."), Place("", "bert."),
                 Place("", "roberta."), Place("", "model."), Place("", "")]
    roots = [f"rag.{part}", part] if is_rag else [""]
    possible = (Place(root + place.head, root + place.body) for root in roots for place in inner)
    return next((place for place in possible if _anchored(tower, place.body, names)), None)


def encoder_family(config: BertConfig, tower: str) -> str:
    """The class that an encoder is written as: DPR's, or its own where DPR's computes less.

    tower: "query_encoder", "document_encoder", "reranker", or "bert" for an encoder of either side.
    """
    dpr = {"query_encoder": "DPRQuestionEncoder", "document_encoder": "DPRContextEncoder"}
    bare = BARE[config.model_type]
    if tower == RERANKER:
        return bare.replace("Model", "ForSequenceClassification")
    return bare if config.beyond_dpr or bare != "BertModel" else dpr.get(tower, bare)


def class_of(generator: GeneratorConfig) -> str:
    """The class of transformers that a generator is written as."""
    if isinstance(generator, CausalConfig):
        return next(name for name, family in FAMILIES.items()
                    if family.model_type == causal.MODEL_TYPES[generator.variant])
    return "T5ForConditionalGeneration" if isinstance(generator, T5Config) else (
        "BartForConditionalGeneration")


def origin(text: str, tower: str | None = None) -> str | None:
    """The data that a released DPR encoder is named after ("single-nq", "multiset"), where a text
    names the data of one such encoder (with `tower`, of this tower) and of no other."""
    kind = {"query_encoder": "question", "document_encoder": "ctx"}.get(tower, "question|ctx")
    origins = set(re.findall(rf"dpr-(?:{kind})_encoder-([a-z0-9-]{{1,40}})-base", text))
    return origins.pop() if len(origins) == 1 else None
