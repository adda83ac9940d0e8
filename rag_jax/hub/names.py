"""Our parameters and their Hugging Face names (names.toml), and the strict match of both.

A `Weight` is one parameter of the looped form (`layer_0`, `layer_1`, ...). Linear kernels are
transposed: ours are [in, out], torch's are [out, in].
"""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from rag_jax import package_data
from rag_jax.config import BartConfig, BertConfig, CausalConfig, T5Config
from rag_jax.errors import first_of
from rag_jax.hub.stored import HubError
from rag_jax.hub.tensors import Tensors
from rag_jax.models.causal_lm import VARIANTS

# By model: fields and parameters, ours and theirs; the file explains its sections.
TABLE: dict[str, dict[str, Any]] = package_data.table(__package__, "names.toml")
HARMLESS: dict[str, list[str]] = TABLE["harmless"]  # patterns of tensors that are passed over
Path = tuple[str, ...]
Form = Literal["same", "transposed", "row"]


class Place(NamedTuple):
    """Where a tower's tensors are in a file: what all names of its model begin with (`body`), and
    those of the head around it (`head`: BERT's encode_proj, BART's final_logits_bias, lm_head)."""

    head: str
    body: str


class Weight(NamedTuple):
    """A parameter and its names: the first is written, all are read and must then be equal."""

    path: Path
    names: tuple[str, ...]
    form: Form = "same"
    optional: bool = False  # zeros where the file lacks it


def to_ours(value: np.ndarray, form: Form) -> np.ndarray:
    """A tensor of the file as float32 in our form."""
    value = value.astype(np.float32, copy=False)
    return {"same": value, "transposed": value.T, "row": value.reshape(-1)}[form]


def to_theirs(value: np.ndarray, form: Form) -> np.ndarray:
    """The inverse of `to_ours`."""
    return {"same": value, "transposed": value.T, "row": value.reshape(1, -1)}[form]


def their_shape(shape: tuple[int, ...], form: Form) -> tuple[int, ...]:
    """The shape in a file of a parameter that has this shape here."""
    return {"same": shape, "transposed": shape[::-1], "row": (1, *shape)}[form]


# By section of the table, the weights of an entry: (end of our path, ends of their names, form).
PARTS: dict[str, list[tuple[Path, tuple[str, ...], Form]]] = {
    "tensors": [((), ("",), "same")],
    "linears": [(("kernel",), (".weight",), "transposed"), (("bias",), (".bias",), "same")],
    "matrices": [(("kernel",), (".weight",), "transposed")],
    "biases": [(("bias",), (".bias",), "same")],
    "scales": [(("scale",), (".weight",), "same")],
    "norms": [(("norm", "scale"), (".weight", ".gamma"), "same"),
              (("norm", "bias"), (".bias", ".beta"), "same")]}


def bert_weights(tower: str, config: BertConfig, place: Place) -> list[Weight]:
    """The weights of a DPR tower or a plain BERT."""
    model = "modernbert" if config.model_type == "modernbert" else "bert"
    absent = (tower, "bert", "encoder", "layer_0", "attention_norm", "scale")  # from ModernBERT
    weights = [weight for weight in _listed_weights(
        model, (tower, "bert"), {"encoder": config.layers}, place.body) if weight.path != absent]
    if config.projection:
        kernel, bias = _parts("linears", (tower, "projection"), f"{place.head}encode_proj")
        weights += [kernel, bias._replace(optional=tower == "bert")]  # Dense modules may lack it
    return weights


def reranker_weights(tower: str, config: BertConfig, place: Place) -> list[Weight]:
    """The weights of a cross-encoder: a BERT, and the two layers that make a logit of [CLS]."""
    bert = config.model_type == "bert"
    layers = {"dense": f"{place.body}pooler.dense" if bert else f"{place.head}classifier.dense",
              "out": f"{place.head}classifier" if bert else f"{place.head}classifier.out_proj"}
    return bert_weights(tower, config, place) + [
        weight for ours, theirs in layers.items()
        for weight in _parts("linears", (tower, ours), theirs)]


def bart_weights(tower: str, config: BartConfig, place: Place) -> list[Weight]:
    """The weights of BART; one table is the embedding of both sides and the output layer."""
    depths = {"encoder": config.encoder_layers, "decoder": config.decoder_layers}
    return [
        *_tables(tower, place, True, BOTH_SIDES),
        Weight((tower, "final_logits_bias"), (f"{place.head}final_logits_bias",), "row", True),
        *_listed_weights("bart", (tower,), depths, place.body)]


def causal_weights(tower: str, config: CausalConfig, place: Place) -> list[Weight]:
    """The weights of a decoder-only model."""
    has = VARIANTS[config.variant]
    norms = {(True, False): "before", (True, True): "around", (False, True): "after"}
    models = ("causal", *["causal_biases"] * has.biases,
              *["causal_head_norms"] * (has.head_norms or has.wide_norms),
              f"causal_norms_{norms[has.before, has.after]}")
    return _tables(tower, place, config.tied, ("embed_tokens",)) + [
        weight for model in models for weight in _listed_weights(
            model, (tower,), {"decoder": config.decoder_layers}, place.body)]


def t5_weights(tower: str, config: T5Config, place: Place) -> list[Weight]:
    """The weights of T5, and by their other names those of Fusion-in-Decoder's authors, who wrap
    the encoder and each of its layers."""
    weights = _tables(tower, place, config.tied, BOTH_SIDES)
    depths = {"encoder": config.encoder_layers, "decoder": config.decoder_layers}
    for model in ("t5", "t5_gated" if config.gated else "t5_plain"):
        weights += _listed_weights(model, (tower,), depths, place.body)

    def wrapped(name: str) -> str:
        name = name.replace("encoder.", "encoder.encoder.", 1)
        return re.sub(r"(\.block\.\d+)", r"\1.module", name)

    return [weight._replace(names=weight.names + tuple(
        wrapped(name) for name in weight.names if name.startswith(f"{place.body}encoder.")))
        for weight in weights]


GENERATOR_WEIGHTS = {"bart": bart_weights, "t5": t5_weights, "causal": causal_weights}  # by family


BOTH_SIDES = ("shared", "encoder.embed_tokens", "decoder.embed_tokens")  # one token table


def _tables(tower: str, place: Place, tied: bool, names: Sequence[str]) -> list[Weight]:
    """The token table by all its names, and the output layer's, which is the same if it is tied."""
    first, last = [f"{place.body}{name}.weight" for name in names], f"{place.head}lm_head.weight"
    if tied:
        return [Weight((tower, "embedding"), (*first, last))]
    return [Weight((tower, "embedding"), tuple(first)), Weight((tower, "output"), (last,))]


def _listed_weights(model: str, top: Path, depths: Mapping[str, int], body: str) -> list[Weight]:
    """The weights that names.toml lists for a model, with so many layers on each side."""
    weights = []
    for kind in PARTS:
        for ours, theirs in TABLE[model].get(kind, {}).items():
            side = ours.split("/")[0]
            for i in range(depths[side]) if "{i}" in ours else (None,):
                path = (*top, *ours.format(i=i).split("/"))
                weights += _parts(kind, path, body + theirs.format(i=i))
    return weights


def _parts(kind: str, path: Path, name: str) -> list[Weight]:
    return [Weight((*path, *end), tuple(f"{name}{their_end}" for their_end in their_ends), form)
            for end, their_ends, form in PARTS[kind]]


def slot(path: Path, tree: Mapping[Path, Any]) -> tuple[Path, int | None]:
    """(path in `tree`, row) of a parameter of the looped form: its path and None, or that of a
    scanned stack of layers and a row of it (`layer_3` -> `layers`, row 3)."""
    for i, part in enumerate(path):
        number = re.fullmatch(r"layer_(\d+)", part)
        if number and path not in tree:
            return (*path[:i], "layers", *path[i + 1 :]), int(number.group(1))
    return path, None


def shapes(weights: Iterable[Weight], tree: Mapping[Path, Any]) -> dict[Path, tuple[int, ...]]:
    """Shape of every weight's parameter, given arrays (or their shapes) looped or scanned.

    Raises:
      HubError: the tree lacks a weight's parameter, or has one that belongs to no weight.
    """
    result, used = {}, {}
    for weight in weights:
        path, row = slot(weight.path, tree)
        if path not in tree:
            raise HubError(f"the parameters lack {'/'.join(weight.path)}")
        result[weight.path] = tuple(tree[path].shape[0 if row is None else 1 :])
        used[path] = used.get(path, 0) + 1
        if row is not None and row >= tree[path].shape[0]:
            raise HubError(f"the parameters have {tree[path].shape[0]} layers at {'/'.join(path)},"
                           " the configuration asks for more")
    surplus = ["/".join(path) for path in tree if path not in used
               or "layers" in path and used[path] != tree[path].shape[0]]
    if surplus:
        raise HubError(f"parameters that the configuration does not ask for: {surplus[:10]}")
    return result


def check(tensors: Tensors, weights: Iterable[Weight], shapes: Mapping[Path, tuple[int, ...]],
          kinds: Iterable[str]) -> None:
    """Every tensor belongs to one parameter (or is known as harmless) and every one is there.

    Args:
      tensors: the checkpoint's.
      weights: those of all its towers.
      shapes: by path, the shapes of the parameters that the configuration asks for.
      kinds: its models, keys of HARMLESS.

    Raises:
      HubError: naming missing, surplus and misshapen tensors with near matches.
    """
    missing, misshapen, known, needed = [], [], set(), 0
    harmless = re.compile("|".join(part for kind in kinds for part in HARMLESS[kind]))
    for weight in weights:
        present = [name for name in weight.names if name in tensors]
        known.update(present)
        needed += tensors[present[0]].size if present else 0
        if not present and not weight.optional:
            missing.append(weight.names[0])
        expected = their_shape(shapes[weight.path], weight.form)
        misshapen += [f"{name} is {tensors[name].shape}, the config asks for {expected}"
                      for name in present if tensors[name].shape != expected]
    surplus = sorted(n for n in tensors if n not in known and not harmless.fullmatch(n))
    faults = [
        _listed("missing tensors", missing, surplus),
        _listed("tensors of another shape", misshapen),
        _listed("tensors that no parameter takes", surplus, missing),
    ]
    if any(faults):
        raise HubError(f"{tensors.source} does not fit its configuration: "
                       + "; ".join(filter(None, faults))
                       + ". Use the config.json that was saved with these weights, or download "
                       "both again")
    if needed > tensors.file_bytes:
        raise HubError(f"{tensors.source}: {needed} bytes of parameters in files of "
                       f"{tensors.file_bytes}: several take the same bytes, which is not read; "
                       "save the model with each of them by itself")


def _listed(title: str, names: list[str], others: Sequence[str] = ()) -> str:
    """The first ten names, each with the most similar of the others."""
    shown = [name[:200] + _near(name, others) for name in names[:10]] + names[10:]
    return f"{len(names)} {title}: {first_of(shown, 10)}" if names else ""


def _near(name: str, others: Sequence[str]) -> str:
    near = difflib.get_close_matches(name[:200], others[:1000], n=1, cutoff=0.8)
    return f" (near: {near[0]})" if near else ""


def read(tensors: Tensors, weight: Weight, shape: tuple[int, ...]) -> np.ndarray:
    """A parameter as float32[shape].

    Raises:
      HubError: tied copies that differ, or a value that is NaN or infinite.
    """
    present = [name for name in weight.names if name in tensors]
    if not present:
        return np.zeros(shape, np.float32)
    value = tensors.read(present[0])
    for name in present[1:]:
        copy = tensors.read(name)
        pair = (copy, value) if copy.dtype == value.dtype else (
            copy.astype(np.float32), value.astype(np.float32))
        if pair[0].tobytes() != pair[1].tobytes():
            raise HubError(
                f"{tensors.source}: {present[0]} and {name} differ, but they are one parameter "
                "here (tied embeddings); an untied model cannot be used")
    value = to_ours(value, weight.form)
    # A sum in float64 cannot overflow, and needs no array of its own.
    if not np.isfinite(value.sum(dtype=np.float64)):
        raise HubError(
            f"{tensors.source}: {present[0]} ({'/'.join(weight.path)} here) holds NaN or infinite "
            "values, with which no score means anything; get a sound copy, or export it again")
    return value
