"""Checkpoints of Hugging Face, by name or folder, to configurations and parameters."""

import dataclasses
import difflib
import functools
import os
import pathlib
from collections.abc import Callable, Collection, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from rag_jax import files, hosts, parallel
from rag_jax.config import T5Config
from rag_jax.data import tokenizer_file
from rag_jax.data.text import Tokenizer
from rag_jax.errors import DataError
from rag_jax.hub import atlas, causal, config_json, families, generator_inputs, names, sentence
from rag_jax.hub.config_json import Architecture
from rag_jax.hub.stored import HEADER_LIMIT, HubError, read_json
from rag_jax.hub.tensors import Tensors, open_tensors
from rag_jax.models.cross_encoder import CrossEncoder
from rag_jax.models.dpr import DprEncoder
from rag_jax.models.generator import MATRICES, build
from rag_jax.types import Params

TOKENIZER_FOLDERS = {"query_encoder": "question_encoder_tokenizer",
                     "generator": "generator_tokenizer"}
SMALL_FILES = ["config.json", "README.md", "generation_config.json", *tokenizer_file.FILES,
               *sentence.FILES, *(f"{folder}/*" for folder in TOKENIZER_FOLDERS.values())]
SAFE_FILES = ["model.safetensors", "model.safetensors.index.json", "model-*.safetensors"]
TORCH_FILES = ["pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-*.bin"]


@dataclasses.dataclass(frozen=True)
class Pretrained(Architecture):
    """A checkpoint in our terms.

    family: the class of transformers, such as "BartForConditionalGeneration".
    towers: those of the file, whichever of them were loaded.
    params: by tower, among "query_encoder", "document_encoder" and "generator" as in
      `RagModel.init` (unboxed; float32, but for generator.param_dtype), "bert": a plain BERT in the
      form of either encoder, and "reranker", a `CrossEncoder`.
    kind: "token" or "sequence" where a RAG checkpoint says so, "fid" where its authors' do.
    tokenizers: folders by tower ("query_encoder" and "generator" for RAG), where there are any.
    inputs: fields of config.data that say how the generator was trained to read, as
      `generator_inputs.inputs` returns them.
    origins: what the encoders were trained on, by tower, where a name or the model card says it.
    search: fields of config.eval that it gives, as `config_json.search` returns them.
    """

    family: str = ""
    towers: tuple[str, ...] = ()
    params: Params = dataclasses.field(default_factory=dict)
    kind: str | None = None
    tokenizers: Mapping[str, pathlib.Path] = dataclasses.field(default_factory=dict)
    inputs: Mapping[str, str] = dataclasses.field(default_factory=dict)
    origins: Mapping[str, str] = dataclasses.field(default_factory=dict)
    search: Mapping[str, int | float] = dataclasses.field(default_factory=dict)


def locate(source: str | os.PathLike) -> pathlib.Path:
    """The folder of a checkpoint: a folder as it is, or a name of the hub, downloaded once.

    Downloads show their progress and land in the cache of huggingface_hub (HF_HOME); weights are
    taken as safetensors, as pytorch_model.bin where there are none, and never in another form.
    HF_HUB_OFFLINE=1 uses the cache alone.

    Raises:
      HubError: it is neither, or cannot be downloaded.
    """
    if str(source) and files.can_exist(source) and pathlib.Path(source).is_dir():
        return pathlib.Path(source)
    import huggingface_hub
    from huggingface_hub import errors

    def fetch(patterns: list[str]) -> pathlib.Path:
        return pathlib.Path(huggingface_hub.snapshot_download(
            str(source), allow_patterns=patterns))

    try:
        folder = fetch(SMALL_FILES + SAFE_FILES)
        if not any(folder.glob("model*.safetensors")):
            folder = fetch(SMALL_FILES + TORCH_FILES)
        return folder
    except errors.HFValidationError:
        reason = "there is no such folder, and it is no name of the hub (OWNER/NAME)"
    except (errors.GatedRepoError, errors.RepositoryNotFoundError, errors.RevisionNotFoundError
            ) as error:
        reason = (f"there is no such folder, and the hub does not give it ({type(error).__name__})"
                  "; check the name, or log in with `hf auth login`")
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        reason = ("there is no such folder, it is not in the cache of huggingface_hub, and the hub "
                  "cannot be reached or is switched off; download it where there is a network and "
                  "pass its folder")
    except (OSError, errors.HfHubHTTPError) as error:
        reason = f"there is no such folder, and the download failed: {error}"
    path = pathlib.Path(source).absolute()
    beside = path.parent.glob("*/") if files.can_exist(path.parent) else ()
    near = difflib.get_close_matches(path.name, [p.name for p in beside])
    meant = f"; did you mean {' or '.join(str(path.with_name(name)) for name in near)}?"
    raise HubError(f"no workdir and no checkpoint {str(source)!r}: {reason}{meant * bool(near)}"
                   ) from None


def describe(source: str | os.PathLike) -> Pretrained:
    """What a checkpoint is, without its parameters (`params` is empty); reads headers only.

    Errors as in `load`.
    """
    return _open(locate(source))[0]


def weight_files(source: str | os.PathLike) -> dict[str, pathlib.Path]:
    """The files with the weights of a checkpoint, by their path in its folder. Of a cross-encoder,
    also its settings and its tokenizer, of which a configuration says nothing.

    Errors as in `load`.
    """
    folder = locate(source)
    _, tensors, places = _open(folder)
    found = tensors.files
    if families.RERANKER in places:
        found |= {file for name in ("config.json", *tokenizer_file.FILES, *sentence.FILES)
                  for file in folder.glob(name) if file.is_file()}
    return {file.relative_to(folder).as_posix(): file for file in sorted(found)}


def load(source: str | os.PathLike, *, towers: Collection[str] | None = None,
         mesh: jax.sharding.Mesh | None = None, retriever: Mapping[str, Any] | None = None,
         generator: Mapping[str, Any] | None = None) -> Pretrained:
    """Reads a checkpoint, tensor by tensor, straight onto its devices.

    In host memory there is one tensor at a time (one per stack with `scan_layers`).

    Args:
      source: folder or name, see `locate`.
      towers: read only these of its towers; None = all. The whole file is checked in any case.
      mesh: place parameters by the table of sharding rules; None = the first device.
      retriever: fields of BertConfig to set: how to compute (dtype, remat, scan_layers,
        dropout), not what.
      generator: the same of the generator's configuration.

    Raises:
      HubError: damaged, unknown or incomplete; the message names the file and the remedy.
      ConfigError: the processes of a job have different files of it.
    """
    checkpoint, tensors, places = _open(locate(source))
    if hosts.connected():
        hosts.check_same({f"{file.name} of {source}": files.quick_digest(file)
                          for file in tensors.files})
    for name, asked in (("retriever", retriever), ("generator", generator)):
        if config := getattr(checkpoint, name):
            checkpoint = dataclasses.replace(
                checkpoint, **{name: dataclasses.replace(config, **(asked or {}))})
    weights = plan(places, checkpoint)
    boxed = abstract(places, checkpoint)
    kinds = [*([checkpoint.retriever.model_type] if checkpoint.retriever else ()),
             *([checkpoint.generator.family] if checkpoint.generator else ())]
    names.check(tensors, weights, names.shapes(weights, flatten_dict(nn.meta.unbox(boxed))), kinds)
    wanted = [tower for tower in places if towers is None or tower in towers]
    if not wanted:
        raise HubError(f"{tensors.source}: holds {', '.join(places)}, not {', '.join(towers)}")
    weights = [weight for weight in weights if weight.path[0] in wanted]
    dtype = checkpoint.generator.param_dtype if checkpoint.generator else "float32"
    params = _place(tensors, weights, {tower: boxed[tower] for tower in wanted}, mesh, dtype)
    return dataclasses.replace(checkpoint, params=params)


def _open(folder: pathlib.Path) -> tuple[Pretrained, Tensors, dict[str, names.Place]]:
    file, generation_file = folder / "config.json", folder / "generation_config.json"
    if (folder / atlas.FILE).is_file() and not file.is_file():
        return _open_atlas(folder)
    config = read_json(file)
    generation = read_json(generation_file) if generation_file.is_file() else {}
    tensors = open_tensors(folder)
    family = families.detect(config, tensors, file)
    config["model_type"] = family.model_type  # of some checkpoints, the class alone says it
    if families.RERANKER in family.places:
        config_json.check_labels(config, file)
        vectors = sentence.Sentence(longest=sentence.longest_pair(folder))
    else:
        vectors = sentence.read(folder, config)
    parts = config_json.architecture(config, generation, file)
    if isinstance(parts.generator, T5Config) and not parts.generator.scale_output:
        tied = f"{family.places['generator'].head}lm_head.weight" not in tensors
        parts = dataclasses.replace(
            parts, generator=dataclasses.replace(parts.generator, tied=tied))
    if vectors.fields:
        if set(family.places) != {"bert"}:
            raise HubError(f"{folder / 'modules.json'}: sentence-transformers around a "
                           f"{family.architecture} is not known here; around a BERT it is")
        parts = dataclasses.replace(
            parts, retriever=dataclasses.replace(parts.retriever, **vectors.fields))
        tensors = Tensors({**tensors, **vectors.dense}, tensors.source)
    checkpoint = Pretrained(
        parts.retriever, parts.generator, parts.ids, vectors.longest, family=family.architecture,
        towers=tuple(family.places), kind=family.kind, tokenizers=_tokenizers(folder, family),
        inputs=generator_inputs.inputs(config, family, folder),
        origins=_origins(folder, family, config),
        search=config_json.search(config, generation, generation_file if generation else file)
        if parts.generator and family.model_type not in causal.USUAL else {})
    checkpoint = _with_its_own_end(checkpoint)
    depths = [getattr(tower, name, 0) for tower in (checkpoint.retriever, checkpoint.generator)
              for name in ("layers", "encoder_layers", "decoder_layers")]
    if max(depths) > len(tensors):  # before so many layers are listed, to say which are missing
        raise HubError(f"{file}: {max(depths)} layers, and {tensors.source.name} has "
                       f"{len(tensors)} tensors in all. Use the config.json that was saved with "
                       "these weights")
    return checkpoint, tensors, family.places


def _with_its_own_end(checkpoint: Pretrained) -> Pretrained:
    """A decoder-only model with the token that its configuration names as the only end, where that
    is not its tokenizer's: answers end with either."""
    generator, folder = checkpoint.generator, checkpoint.tokenizers.get("generator")
    if folder is None or generator.family != "causal" or generator.end_tokens:
        return checkpoint
    try:
        own = Tokenizer.load(folder).end
    except DataError:  # told where it is used, as another may be named
        return checkpoint
    ends = (checkpoint.ids.end,) * (checkpoint.ids.end != own)
    return dataclasses.replace(
        checkpoint, generator=dataclasses.replace(generator, end_tokens=ends))


def _open_atlas(folder: pathlib.Path) -> tuple[Pretrained, Tensors, dict[str, names.Place]]:
    tensors, family, parts = atlas.read(folder / atlas.FILE)
    checkpoint = Pretrained(
        parts.retriever, parts.generator, parts.ids, family=family.architecture,
        towers=tuple(family.places), tokenizers=_tokenizers(folder, family),
        kind=family.kind if parts.generator else None,
        inputs=generator_inputs.FID_INPUTS if parts.generator else {})
    return checkpoint, tensors, family.places


def _tokenizers(folder: pathlib.Path, family: families.Family) -> dict[str, pathlib.Path]:
    places = dict.fromkeys(family.places, folder)
    if family.model_type in ("rag", "atlas"):
        places = {tower: folder / sub for tower, sub in TOKENIZER_FOLDERS.items()}
    return {tower: place for tower, place in places.items()
            if any((place / name).is_file() for name in tokenizer_file.VOCABULARIES)}


def _origins(folder: pathlib.Path, family: families.Family, config: Mapping[str, Any]
             ) -> dict[str, str]:
    card = folder / "README.md"
    text = ""
    if card.is_file():
        with card.open("rb") as stream:
            text = stream.read(HEADER_LIMIT).decode("utf-8", "replace")
    sections = {"query_encoder": config["question_encoder"]} if family.model_type == "rag" else (
        dict.fromkeys(family.places, config) if family.model_type == "dpr" else {})
    origins = {tower: families.origin(str(section.get("_name_or_path")))
               or families.origin(text, tower) for tower, section in sections.items()}
    return {tower: origin for tower, origin in origins.items() if origin}


def _forms(tower: str, architecture: Architecture) -> tuple[nn.Module, Callable]:
    """The module of a tower, and the function of `names` that lists its weights."""
    if tower == "generator":
        form = names.GENERATOR_WEIGHTS[architecture.generator.family]
        return build(architecture.generator), form
    if tower == families.RERANKER:
        return CrossEncoder(architecture.retriever), names.reranker_weights
    return DprEncoder(architecture.retriever), names.bert_weights


def plan(places: Mapping[str, names.Place], architecture: Architecture) -> list[names.Weight]:
    """All weights of a checkpoint with these towers."""
    forms = {tower: _forms(tower, architecture) for tower in places}
    return [weight for tower, (module, weights) in forms.items()
            for weight in weights(tower, module.config, places[tower])]


def abstract(towers: Collection[str], architecture: Architecture) -> Params:
    """Shapes of the towers' parameters, boxed with their logical axis names; not to be changed."""
    return {tower: _abstract(_forms(tower, architecture)[0], tower == "generator")
            for tower in towers}


@functools.lru_cache(maxsize=256)  # few are asked for, and tracing takes long
def _abstract(module: nn.Module, decodes: bool) -> Params:
    ids, mask = np.zeros((1, 1), np.int32), np.ones((1, 1), bool)
    inputs = (ids, mask, ids) if decodes else (ids, mask)
    return jax.eval_shape(lambda: module.init(jax.random.key(0), *inputs)["params"])


def _place(tensors: Tensors, weights: list[names.Weight], boxed: Params,
           mesh: jax.sharding.Mesh | None, dtype: str) -> Params:
    """The parameters, each put on its devices as soon as it is read; a generator's matrices in
    `dtype`."""
    shapes = flatten_dict(nn.meta.unbox(boxed))
    shardings = flatten_dict(parallel.param_shardings(boxed, mesh)) if mesh else {}
    sources: dict[names.Path, list[names.Weight]] = {}
    for weight in weights:
        sources.setdefault(names.slot(weight.path, shapes)[0], []).append(weight)
    placed = {}
    for path, parts in sources.items():
        if path == parts[0].path:
            value = names.read(tensors, parts[0], shapes[path].shape)
        else:  # a scanned stack of layers
            value = np.empty(shapes[path].shape, np.float32)
            for part in parts:
                row = names.slot(part.path, shapes)[1]
                value[row] = names.read(tensors, part, value.shape[1:])
        if path[0] == "generator" and path[-1] in MATRICES:
            value = value.astype(jnp.dtype(dtype), copy=False)
        placed[path] = jax.device_put(np.ascontiguousarray(value), shardings.get(path))
    return unflatten_dict(placed)
