"""Folders of sentence-transformers, read and written: how vectors are made of BERT's states, and
prompts.

modules.json lists what a text goes through: Transformer, Pooling and, where there are any, Dense
and Normalize. The scale and how titles are joined have no place there: they are in a section of
config.json that only this package reads.
"""

import json
import pathlib
import reprlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from rag_jax import files
from rag_jax.config import BertConfig
from rag_jax.data.text import Tokenizer
from rag_jax.data.tokenizer_file import VOCABULARIES
from rag_jax.hub.config_json import checked_value
from rag_jax.hub.generator_inputs import OWN
from rag_jax.hub.stored import HubError, Stored, read_json, read_json_value
from rag_jax.hub.tensors import open_tensors

DENSE = "encode_proj."  # DPR's projection has this name; Dense's, linear., becomes it
FILES = ["modules.json", "sentence_bert_config.json", "config_sentence_transformers.json",
         "*_Pooling/config.json", "*_Dense/*"]
KINDS = ("Transformer", "Pooling", "Dense", "Normalize")
# What the class of Contriever's authors (github.com/facebookresearch/contriever) computes.
CONTRIEVER = {"pooling": "mean", "normalize": False, "titles": "joined"}
# Sections of sentence_bert_config.json that change the model or its tokenizer.
LIBRARY_ARGUMENTS = ("config_args", "config_kwargs", "tokenizer_args", "tokenizer_kwargs",
                     "processor_args", "processor_kwargs", "processing_kwargs")
MODES = {"cls_token": "cls", "mean_tokens": "mean", "cls": "cls", "mean": "mean"}


class Sentence(NamedTuple):
    """What a folder says of its vectors.

    fields: of BertConfig; empty where it is no folder of sentence-transformers.
    longest: tokens that a text may have; 0 = as many as there are positions.
    dense: where the tensors of a Dense module are, by the names of DPR's projection.
    """

    fields: Mapping[str, Any] = {}
    longest: int = 0
    dense: Mapping[str, Stored] = {}


def read(folder: pathlib.Path, config: Mapping[str, Any]) -> Sentence:
    """What a checkpoint folder says of its vectors, and how they are compared.

    Args:
      folder: of any checkpoint.
      config: the content of its config.json.

    Raises:
      HubError: a module, or a setting of one, that is not computed here.
    """
    file = folder / "modules.json"
    if not file.is_file():
        return Sentence(CONTRIEVER if config.get("architectures") == ["Contriever"] else {})
    paths = _modules(file)
    fields = {"titles": "joined", "normalize": "Normalize" in paths}
    fields["pooling"], prompted = _pooling(folder / paths["Pooling"] / "config.json")
    fields |= _settings(folder)
    if not prompted and (fields["query_prefix"] or fields["passage_prefix"]):
        raise HubError(f"{folder / paths['Pooling'] / 'config.json'}: include_prompt = false is "
                       "not known here: the mean is that of all tokens")
    dense = {}
    if "Dense" in paths:
        projection, dense = _dense(folder / paths["Dense"])
        fields |= projection
    own = config.get(OWN)
    for name in ("scale", "titles"):
        if isinstance(own, dict) and name in own:
            fields[name] = checked_value(own, name, name, BertConfig, folder / "config.json")
    return Sentence(fields, _longest(folder), dense)


def longest_pair(folder: pathlib.Path) -> int:
    """Tokens that a pair of texts may have, as the folder of a cross-encoder says; 0 = as many as
    there are positions. Its last activation is not computed, as its logits are what is used.

    Raises:
      HubError: a module behind the transformer, or a prompt.
    """
    file, settings = folder / "modules.json", folder / "config_sentence_transformers.json"
    if file.is_file() and (kinds := [_kind(module) for module in _listed(file)]) != ["Transformer"]:
        raise HubError(f"{file}: its logits go through {', '.join(kinds)}; known here is "
                       "Transformer alone")
    prompts = read_json(settings).get("prompts") if settings.is_file() else None
    if prompts:
        raise HubError(f"{settings}: prompts = {reprlib.repr(prompts)}; a cross-encoder reads its "
                       "pair alone here")
    return _longest(folder, "sequence-classification")


def _kind(module: Mapping[str, str]) -> str:
    return module["type"].rpartition(".")[2][:80]


def _listed(file: pathlib.Path) -> list[dict[str, str]]:
    """The content of modules.json."""
    listed = read_json_value(file)
    if not isinstance(listed, list) or not all(
            isinstance(module, dict) and isinstance(module.get("type"), str)
            and isinstance(module.get("path"), str) for module in listed):
        raise HubError(f"{file}: no list of modules: download it again")
    return listed


def _modules(file: pathlib.Path) -> dict[str, str]:
    """The folder of each module by its kind."""
    listed = _listed(file)
    paths = {_kind(module): module["path"] for module in listed}
    if [kind for kind in KINDS if kind in paths] != list(paths) or len(paths) < len(listed) or (
            not {"Transformer", "Pooling"} <= set(paths)):
        names = ", ".join(map(_kind, listed))
        raise HubError(f"{file}: its vectors go through {names}; known here are Transformer, "
                       "Pooling and, where there are any, Dense and Normalize, in this order")
    plain = {kind: path for kind, path in paths.items() if kind in ("Pooling", "Dense")}
    if paths["Transformer"] or any(
            path in ("", "..") or pathlib.PurePath(path).name != path
            or not files.can_exist(file.with_name(path)) for path in plain.values()):
        raise HubError(f"{file}: paths {', '.join(map(repr, paths.values()))}: the transformer's "
                       "has to be the folder itself, the others' plain names in it")
    return paths


def _pooling(file: pathlib.Path) -> tuple[str, bool]:
    """(pooling, whether prompts are part of it)."""
    config = read_json(file)
    modes = [key.removeprefix("pooling_mode_") for key, value in config.items()
             if key.startswith("pooling_mode_") and value]
    if "pooling_mode" in config:
        mode = config["pooling_mode"]
        modes = list(map(str, mode)) if isinstance(mode, list) else [str(mode)]
    if len(modes) != 1 or modes[0] not in MODES:
        raise HubError(f"{file}: its pooling is {', '.join(modes) or 'not said'}, which is not "
                       "supported: cls and mean are")
    pooling = MODES[modes[0]]
    return pooling, pooling == "cls" or config.get("include_prompt") is not False


def _settings(folder: pathlib.Path) -> dict[str, Any]:
    """The prompts, and normalize where the product is the cosine.

    encode_document takes the prompt `passage` or `corpus` of a model that has none for `document`;
    sentence-transformers gives every model that it opens a prompt for `document`, empty by default.
    """
    file = folder / "config_sentence_transformers.json"
    content = read_json(file) if file.is_file() else {}
    product, prompts = content.get("similarity_fn_name"), content.get("prompts") or {}
    if product not in (None, "dot", "dot_product", "cosine"):
        raise HubError(f"{file}: similarity_fn_name = {reprlib.repr(product)}; known here: dot, "
                       "cosine")
    if not isinstance(prompts, dict) or not all(
            isinstance(text, str | None) for text in prompts.values()):
        raise HubError(f"{file}: prompts = {reprlib.repr(prompts)} should be texts by name")
    if content.get("truncate_dim") is not None:
        raise HubError(f"{file}: truncate_dim = {reprlib.repr(content['truncate_dim'])} is not "
                       "known here; with null, all numbers of the vectors are used")
    fields = {"query_prefix": prompts.get("query") or "",
              "passage_prefix": prompts.get("document") or ""}
    return fields | ({"normalize": True} if product == "cosine" else {})


def _dense(folder: pathlib.Path) -> tuple[dict[str, Any], dict[str, Stored]]:
    """The projection's fields, and its tensors."""
    file = folder / "config.json"
    config = read_json(file)
    activation = str(config.get("activation_function", "Tanh")).rpartition(".")[2]
    name = next((name for name in ("module_input_name", "module_output_name")
                 if config.get(name, "sentence_embedding") != "sentence_embedding"), None)
    if activation not in ("Identity", "Tanh") or name:
        name = name or "activation_function"
        raise HubError(f"{file}: {name} = {reprlib.repr(config[name])} is not known here; Identity "
                       "and Tanh of the sentence_embedding are")
    if config.get("use_residual"):
        raise HubError(f"{file}: use_residual = {reprlib.repr(config['use_residual'])} is not "
                       "known here; only false is")
    fields = {"projection": checked_value(config, "projection", "out_features", BertConfig, file),
              "projection_tanh": activation == "Tanh"}
    tensors = open_tensors(folder)
    return fields, {name.replace("linear.", DENSE, 1): tensors[name] for name in tensors}


def _longest(folder: pathlib.Path, task: str = "feature-extraction") -> int:
    """sentence_bert_config.json's max_seq_length, or in its place the tokenizer's.

    task: what the transformer has to be for.

    Raises:
      HubError: it asks for lower case, and the tokenizer does not see to that.
    """
    file = folder / "sentence_bert_config.json"
    config = read_json(file) if file.is_file() else {}
    if config.get("transformer_task", task) != task:
        raise HubError(f"{file}: transformer_task = {config['transformer_task']!r} is not known "
                       f"here; only {task!r} is")
    for name in LIBRARY_ARGUMENTS:
        if config.get(name):
            raise HubError(f"{file}: {name} = {reprlib.repr(config[name])} is not known here; "
                           "write them into the folder's config.json or tokenizer_config.json")
    if config.get("do_lower_case") and any((folder / name).is_file() for name in VOCABULARIES):
        upper, lower = Tokenizer.load(folder).encode(["The Two", "the two"])
        if upper != lower:
            raise HubError(f"{file}: do_lower_case = true, and the tokenizer beside it keeps "
                           "capital letters; set it to false, or take a lower-casing tokenizer")
    longest, file = config.get("max_seq_length"), folder / "tokenizer_config.json"
    if longest is None and file.is_file():
        longest = read_json(file).get("model_max_length")
    return longest if type(longest) is int and 0 < longest < 10**6 else 0  # 10**30 = not known


def own_json(config: BertConfig) -> dict[str, Any]:
    """The section of config.json for what the files of sentence-transformers cannot say."""
    own: dict[str, Any] = {}
    usual = BertConfig(normalize=config.normalize).logit_scale
    if config.logit_scale != usual:
        own["scale"] = config.logit_scale
    if config.titles != "joined":
        own["titles"] = "separate"
    return {OWN: own} if own else {}


def write(folder: pathlib.Path, config: BertConfig, longest: int, dense_bias: bool) -> None:
    """Writes all of a folder of sentence-transformers but model, tokenizer and Dense's tensors."""
    pooled = "mean_tokens" if config.pooling == "mean" else "cls_token"
    modules: list[tuple[str, str, dict[str, Any] | None]] = [
        ("", "Transformer", None), ("1_Pooling", "Pooling", {
            "word_embedding_dimension": config.width, **{
                f"pooling_mode_{mode}": mode == pooled
                for mode in ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens")}})]
    if config.projection:
        activation = "activation.Tanh" if config.projection_tanh else "linear.Identity"
        modules.append(("2_Dense", "Dense", {
            "in_features": config.width, "out_features": config.projection, "bias": dense_bias,
            "activation_function": f"torch.nn.modules.{activation}"}))
    if config.normalize:
        modules.append((f"{len(modules)}_Normalize", "Normalize", None))
    settings = {
        "prompts": {"query": config.query_prefix or "", "document": config.passage_prefix or ""},
        "default_prompt_name": None,
        "similarity_fn_name": "cosine" if config.normalize else "dot"}
    contents = {"modules.json": [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind, _) in enumerate(modules)],
        "config_sentence_transformers.json": settings,
        "sentence_bert_config.json": {"max_seq_length": longest or config.max_positions,
                                      "do_lower_case": False},
        **{f"{path}/config.json": content for path, _, content in modules if content}}
    for name, content in contents.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", "utf-8")
