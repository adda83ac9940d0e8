"""Our parameters as a folder that `from_pretrained` of transformers opens."""

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import numpy as np
from flax.traverse_util import flatten_dict

from rag_jax import files
from rag_jax.config import CausalConfig, GeneratorConfig, T5Config
from rag_jax.data.text import Tokenizer
from rag_jax.data.tokenizer_file import SPECIALS, TYPES
from rag_jax.hub import config_json, families, names, sentence
from rag_jax.hub.config_json import Architecture, SpecialIds
from rag_jax.hub.families import FAMILIES
from rag_jax.hub.load import TOKENIZER_FOLDERS, abstract, plan
from rag_jax.hub.stored import HubError
from rag_jax.hub.tensors import write_safetensors
from rag_jax.types import Params

WRITTEN = [name for name in FAMILIES
           if not name.endswith(("ForMaskedLM", "ForPreTraining", "FiDT5", "Contriever"))]


def save(directory: str | os.PathLike, family: str, params: Params, architecture: Architecture, *,
         tokenizers: Mapping[str, Tokenizer] | None = None,
         fields: Mapping[str, Any] | None = None, card: str = "",
         shard_bytes: int = 5_000_000_000) -> None:
    """Writes config.json, model.safetensors and tokenizer files; transformers' `from_pretrained`
    then reports no missing and no unexpected key.

    The folder appears under its name when it is complete. A plain BERT gets the pooler that
    transformers expects, with the identity as its matrix: pooler_output is tanh([CLS]). One whose
    configuration says how texts become vectors is a folder of sentence-transformers, too.

    Args:
      directory: a new or empty folder.
      family: one of `WRITTEN`, a class of transformers.
      params: {"query_encoder", "document_encoder", "generator", "bert", "reranker"}, those that
        the family has; for BertModel any one encoder; looped or scanned.
      architecture: the configurations of the family's towers; where it has no ids, the generator's
        tokenizer gives them, and without one they are facebook/bart's.
      tokenizers: by tower, as in `Pretrained`; none = no tokenizer files.
      fields: more fields of config.json, such as {"n_docs": 5} of RAG.
      card: the text of README.md, as of `card.model_card`; empty = no such file.
      shard_bytes: larger weights are split into files of so many bytes.

    Raises:
      HubError: the folder exists, the family is unknown, or the parameters do not fit it.
    """
    target, tokenizers = pathlib.Path(directory), dict(tokenizers or {})
    _check_arguments(target, family, params, architecture)
    if not architecture.ids:
        ids = ids_of(tokenizers.get("generator"), architecture.generator)
        architecture = dataclasses.replace(architecture, ids=ids)
    with files.new_folder(target) as folder:
        _write_weights(folder, family, params, architecture, shard_bytes)
        config = {"architectures": [family], "dtype": "float32",
                  **_config(family, architecture), **(fields or {})}
        if family == "ModernBertModel":  # the class's defaults fit one vocabulary
            config |= _ids_json(tokenizers.get("bert"))
        _write_json(folder / "config.json", config)
        if set(FAMILIES[family].places) == {"generator"} and family != "BartModel":
            _write_json(folder / "generation_config.json", {
                name: config[name] for name in config_json.IDS.values() if name in config})
        if card:
            (folder / "README.md").write_text(card, "utf-8")
        for tower in FAMILIES[family].places:
            place = TOKENIZER_FOLDERS[tower] if FAMILIES[family].model_type == "rag" else "."
            part = architecture.generator if tower == "generator" else architecture.retriever
            if tower in tokenizers:
                pairs = tower == families.RERANKER and tokenizers[tower].has_types
                save_tokenizer(folder / place, tokenizers[tower], part.max_positions,
                               part.second_type if pairs else 0,
                               prompts=isinstance(part, CausalConfig))
        if _is_sentence_encoder(family, architecture):
            dense = flatten_dict(nn.meta.unbox(params["bert"])).get(("projection", "bias"))
            sentence.write(folder, architecture.retriever, architecture.longest,
                           bool(np.any(dense)))


def _is_sentence_encoder(family: str, architecture: Architecture) -> bool:
    """Whether its folder has a modules.json, which says how vectors are made of states. With the
    pooling "auto" that is not known yet."""
    return "bert" in FAMILIES[family].places and architecture.retriever.pooling != "auto"


def _check_arguments(target: pathlib.Path, family: str, params: Params,
                     architecture: Architecture) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise HubError(f"{target} exists and is not empty: choose a new folder, or remove it")
    if family not in WRITTEN:
        raise HubError(f"family {family!r} cannot be written; choose one of {', '.join(WRITTEN)}")
    towers = FAMILIES[family].places
    if absent := [tower for tower in towers if tower not in params]:
        raise HubError(f"{family} needs params[{absent[0]!r}]; there are {', '.join(params)}")
    needed = ["retriever"] * (set(towers) != {"generator"}) + ["generator"] * (
        "generator" in towers)
    if absent := [name for name in needed if getattr(architecture, name) is None]:
        raise HubError(f"{family} needs the configuration of its {' and '.join(absent)}")
    retriever = architecture.retriever
    if "bert" in towers and retriever.projection and retriever.pooling == "auto":
        raise HubError(f"{family} has no projection (here {retriever.projection}): "
                       "save it as DPRQuestionEncoder or DPRContextEncoder")
    fits = [families.encoder_family(retriever, tower) for tower in towers if tower != "generator"]
    if "bert" not in towers and fits and fits[0] in families.BARE.values():
        raise HubError(f"{family} is DPR's encoder, and this one is a {retriever.model_type} with "
                       f"{', '.join(retriever.beyond_dpr) or '[CLS] alone'}: save it as {fits[0]}")
    if {"bert", families.RERANKER} & set(towers) and family != fits[0]:
        raise HubError(f"{family}: this encoder is a {fits[0]}")
    if family == "BartModel" and np.asarray(params["generator"]["final_logits_bias"]).any():
        raise HubError("BartModel has no final_logits_bias, and this one is not zero: save it as "
                       "BartForConditionalGeneration")


def ids_of(tokenizer: Tokenizer | None, generator: GeneratorConfig | None) -> SpecialIds:
    """The special tokens of a generator with this tokenizer; without one, those of facebook/bart
    or T5. A BART forces </s>, as the released ones do."""
    if isinstance(generator, T5Config):
        ids = SpecialIds(0, 1, 0, None) if tokenizer is None else SpecialIds(
            tokenizer.end, tokenizer.end, tokenizer.pad, None)
    else:
        ids = SpecialIds(forced_eos=2) if tokenizer is None else SpecialIds(
            tokenizer.end, tokenizer.end, tokenizer.pad, tokenizer.start, None, tokenizer.end)
    if generator and generator.start_token >= 0:
        ids = dataclasses.replace(ids, start=generator.start_token)
    return ids


def _ids_json(tokenizer: Tokenizer | None) -> dict[str, int | None]:
    """The special tokens in an encoder's config.json."""
    start, end, pad = (tokenizer.start, tokenizer.end, tokenizer.pad) if tokenizer else (None,) * 3
    return {"bos_token_id": start, "cls_token_id": start, "eos_token_id": end,
            "sep_token_id": end, "pad_token_id": pad}


def _config(family: str, architecture: Architecture) -> dict[str, Any]:
    retriever, generator = architecture.retriever, architecture.generator
    model_type = FAMILIES[family].model_type
    if model_type in config_json.GENERATORS:
        return config_json.GENERATORS[model_type].write(generator, architecture.ids)
    if model_type in ("dpr", *families.BARE):
        own = sentence.own_json(retriever) if _is_sentence_encoder(family, architecture) else {}
        own |= config_json.ONE_LABEL if families.RERANKER in FAMILIES[family].places else {}
        return {**config_json.bert_json(retriever, model_type), **own}
    return {
        "model_type": "rag", "is_encoder_decoder": True,
        "question_encoder": config_json.bert_json(retriever, "dpr"),
        "generator": config_json.bart_json(generator, architecture.ids),
        "retrieval_vector_size": retriever.projection or retriever.width,
    }


def _write_weights(folder: pathlib.Path, family: str, params: Params, architecture: Architecture,
                   shard_bytes: int) -> None:
    places = FAMILIES[family].places
    tree = flatten_dict(nn.meta.unbox({tower: params[tower] for tower in places}))
    weights = plan(places, architecture)
    asked = flatten_dict(nn.meta.unbox(abstract(places, architecture)))
    expected, actual = names.shapes(weights, asked), names.shapes(weights, tree)
    by_name, shapes = {}, {}
    for weight in weights:
        if actual[weight.path] != expected[weight.path]:
            raise HubError(
                f"parameter {'/'.join(weight.path)} is {actual[weight.path]}, the configuration "
                f"asks for {expected[weight.path]}")
        if family == "BartModel" and weight.optional:
            continue
        by_name[weight.names[0]] = weight
        shapes[weight.names[0]] = names.their_shape(actual[weight.path], weight.form)
    if "bert" in places and family != "ModernBertModel":  # which has no pooler
        width = architecture.retriever.width
        shapes |= {"pooler.dense.weight": (width, width), "pooler.dense.bias": (width,)}

    def read(name: str) -> np.ndarray:
        if name.startswith("pooler."):
            return np.eye(*shapes[name]) if name.endswith("weight") else np.zeros(shapes[name])
        path, row = names.slot(by_name[name].path, tree)
        value = tree[path] if row is None else tree[path][row]
        return names.to_theirs(np.asarray(value, np.float32), by_name[name].form)

    dense = {name: shapes.pop(name) for name in list(shapes)
             if name.startswith(sentence.DENSE) and "bert" in places}
    write_safetensors(folder, dict(sorted(shapes.items())), read, shard_bytes)
    if dense:  # a bias of zeros is left out: the Dense that was read may have had none
        shown = {name.replace(sentence.DENSE, "linear."): name for name in dense
                 if name.endswith(".weight") or read(name).any()}
        (folder / "2_Dense").mkdir()
        write_safetensors(folder / "2_Dense", {name: dense[old] for name, old in shown.items()},
                          lambda name: read(shown[name]))


def save_tokenizer(directory: pathlib.Path, tokenizer: Tokenizer, max_length: int,
                   second_type: int = 0, prompts: bool = False) -> None:
    """Writes a tokenizer for AutoTokenizer: it then adds the special tokens of BERT or BART, unless
    its texts are `prompts`, which an answer continues.

    Ids of plain text are those of `tokenizer`. Pairs become [CLS] a [SEP] b [SEP] or <s> a
    </s></s> b </s>; a has token type 0, b `second_type`, which in DPR is 0.
    """
    import tokenizers
    from tokenizers import processors

    tokenizer.save(directory)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": max_length,
                "clean_up_tokenization_spaces": False}
    if second_type:  # else transformers gives the model none
        settings["model_input_names"] = ["input_ids", TYPES, "attention_mask"]
    file = directory / "tokenizer.json"
    backend = tokenizers.Tokenizer.from_file(str(file))
    end, pad, mask = map(
        backend.id_to_token, (tokenizer.end, tokenizer.pad, tokenizer.mask))
    start = None if tokenizer.start is None else backend.id_to_token(tokenizer.start)
    plain = backend.encode("a", add_special_tokens=False).ids
    if backend.encode("a").ids == plain and not prompts:  # no post-processor, or an empty one
        begin = f"{start}:0 " if start else ""
        between = f"{end}:0 {end}:0" if end == "</s>" else f"{end}:0"
        backend.post_processor = processors.TemplateProcessing(
            single=f"{begin}$A:0 {end}:0", pair=(
                f"{begin}$A:0 {between} $B:{second_type} {end}:{second_type}"),
            special_tokens=[(start or end, tokenizer.start if start else tokenizer.end),
                            (end, tokenizer.end)])
        backend.save(str(file))
    unknown = next((t for t in ("<unk>", "[UNK]") if backend.token_to_id(t) is not None), None)
    special = {"cls_token": start, "sep_token": end, "pad_token": pad, "mask_token": mask}
    if start is None:
        special = {"pad_token": pad}
    if unknown:
        special["unk_token"] = unknown
    if end == "</s>":
        special.update({"bos_token": start} if start else {}, eos_token=end)
    own = {name: tokenizer.config[name] for name in SPECIALS if name in tokenizer.config}
    # Decoder-only tokenizers name no separator and no mask; one that names its end keeps its names.
    special = own if prompts and "eos_token" in own else {**special, **own}
    _write_json(directory / "special_tokens_map.json", special)
    _write_json(directory / "tokenizer_config.json", {**tokenizer.config, **special, **settings})


def _write_json(file: pathlib.Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", "utf-8")
