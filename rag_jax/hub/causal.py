"""config.json of decoder-only models, read and written.

Rotary positions and windows have several forms there, and one set of fields here.
"""

import pathlib
import reprlib
from collections.abc import Mapping
from typing import Any

from rag_jax.config import CausalConfig
from rag_jax.hub.names import TABLE
from rag_jax.hub.stored import HubError

Json = Mapping[str, Any]

# By model_type: the values of what a config.json leaves out; they differ between the classes.
USUAL: dict[str, dict[str, Any]] = TABLE["usual"]
VARIANTS = {name: name.removesuffix("_text") for name in USUAL}
MODEL_TYPES = {variant: name for name, variant in VARIANTS.items()}

# Where null says that there is none; elsewhere it is the same as leaving the field out.
NULLABLE = ("attn_logit_softcapping", "final_logit_softcapping", "sliding_window")
LARGEST_HEAD = 4096
OURS = ("variant", "window", "global_every")  # with rope_*: what `written` says by their fields
SOME: dict[str, list[str]] = TABLE["some"]  # by field: the model types that read it, if not all do

# By type of scaling: for each of our fields its name there, and its value where it is left out.
ROPE: dict[str, dict[str, dict[str, Any]]] = TABLE["rope"]


def flat(config: Json, file: pathlib.Path) -> dict[str, Any]:
    """A config.json with every field that names.toml knows, rope_* and global_every among them.

    Raises:
      HubError: a way of scaling, or an order of layers, that is not known here.
    """
    kind = config["model_type"]
    fields = {**USUAL[kind], **{
        name: value for name, value in config.items()
        if (value is not None or name in NULLABLE) and kind in SOME.get(name, USUAL)}}
    if config.get("quantization_config"):
        raise HubError(f"{file}: quantization_config: weights are not read in this form; take the "
                       "checkpoint in bfloat16, float16 or float32")
    heads, width = fields.get("num_attention_heads"), fields.get("hidden_size")
    fields["num_key_value_heads"] = fields.get("num_key_value_heads") or heads
    if not fields.get("head_dim") and type(width) is type(heads) is int and heads > 0:
        fields["head_dim"] = width // heads
    activation = fields.get("hidden_activation", fields.get("hidden_act"))
    fields["hidden_act"] = "gelu_new" if activation == "gelu_pytorch_tanh" else activation
    fields["variant"] = VARIANTS[kind]
    return {**fields, **_rope(fields, file), **_windows(fields, file)}


def _rope(fields: Json, file: pathlib.Path) -> dict[str, Any]:
    rope, local, nested = _sections(fields, file)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if str(kind) not in ROPE or (
            local.get("rope_type", local.get("type", "default")) != "default"):
        raise HubError(f"{file}: rope_type = {reprlib.repr(kind)} is not known here; allowed: "
                       f"{', '.join(ROPE)}, and default in local layers")
    usual = {"rope_type", "type", "rope_theta",  # and what transformers writes and does not read
             "original_max_position_embeddings"}
    known = usual | {theirs["name"] for theirs in ROPE[kind].values()}
    if unknown := {name for names, section in ((known, rope), (usual, local))
                   for name, value in section.items() if value is not None and name not in names}:
        raise HubError(f"{file}: {', '.join(sorted(unknown))} of rope_type {kind} are not known "
                       f"here; known: {', '.join(sorted(known))}")
    result = {"rope_type": kind, "rope_theta": rope.get("rope_theta", fields["rope_theta"])}
    if theta := local.get("rope_theta") or fields.get("rope_local_base_freq"):
        result["rope_local_theta"] = theta
    for ours, theirs in ROPE[kind].items():
        result[ours] = rope.get(theirs["name"], theirs.get("usual"))
        if ours == "rope_positions":  # which stands outside, too, and goes first there
            outside = None if nested else fields.get(theirs["name"])
            result[ours] = outside or result[ours] or fields.get("max_position_embeddings")
        if result[ours] is None:
            raise HubError(f"{file}: rope_type {kind} lacks {theirs['name']}")
    return result


def _sections(fields: Json, file: pathlib.Path) -> tuple[dict[str, Any], dict[str, Any], bool]:
    """(the section on rotary positions of global layers, that of local layers, whether the model
    can have both, as only Gemma 3 can)."""
    nested = fields["variant"] == "gemma3"
    older, newer = fields.get("rope_scaling") or {}, fields.get("rope_parameters") or {}
    if older and newer and older != newer:
        raise HubError(f"{file}: rope_scaling = {reprlib.repr(older)} and rope_parameters = "
                       f"{reprlib.repr(newer)} differ; leave one of them out")
    rope, local = older or newer, {}
    if nested and newer and isinstance(newer, dict):
        rope, local = newer.get("full_attention") or {}, newer.get("sliding_attention") or {}
    if not (isinstance(rope, dict) and isinstance(local, dict)):
        raise HubError(f"{file}: rope_parameters = {reprlib.repr(rope)} should be an object")
    return rope, local, nested


def _windows(fields: Json, file: pathlib.Path) -> dict[str, Any]:
    types, window = fields.get("layer_types"), fields.get("sliding_window")
    qwen = fields["variant"].startswith("qwen")
    if not window or qwen and not fields.get("use_sliding_window"):
        return {"window": 0, "global_every": 0}
    every = fields.get("sliding_window_pattern", 0)
    if types is not None:
        every = _period(types, fields.get("num_hidden_layers"), file)
        if every and fields["variant"] == "mistral":
            raise HubError(f"{file}: layer_types = {reprlib.repr(types)} and sliding_window = "
                           f"{window}: transformers' Mistral has this window in every layer, and "
                           "its AutoModel takes Ministral for this, which is not known here")
    elif qwen:
        raise HubError(f"{file}: use_sliding_window without layer_types is not known here")
    return {"window": 0 if every == 1 else window, "global_every": 0 if every == 1 else every}


def _period(types: Any, layers: Any, file: pathlib.Path) -> int:
    """`global_every` of layer_types; 1 = there are no local layers."""
    kinds = {"sliding_attention": True, "full_attention": False}
    local = [kinds.get(str(kind)) for kind in types] if isinstance(types, list) else [None]
    every = local.index(False) + 1 if False in local else 0
    fits = [not (every and (i + 1) % every == 0) for i in range(len(local))]
    if None in local or len(local) != layers or local != fits:
        raise HubError(f"{file}: layer_types = {reprlib.repr(types)}: known here are local layers "
                       "(sliding_attention) of which every so-manieth is global "
                       f"(full_attention), {layers} in all (num_hidden_layers)")
    return every


def check_head(size: int, file: pathlib.Path) -> None:
    """Raises HubError for an odd width of attention heads, as rotary positions turn pairs of
    numbers, and for a larger one than any model has: a table of their rotations is made before the
    weights are looked at."""
    if size % 2 or not 2 <= size <= LARGEST_HEAD:
        raise HubError(f"{file}: attention heads of width {size} (head_dim, or hidden_size / "
                       "num_attention_heads) are not known here; known are even ones from 2 to "
                       f"{LARGEST_HEAD}")


def check(config: CausalConfig, file: pathlib.Path) -> None:
    """Raises HubError for sizes that do not fit one another, and scales that divide by zero."""
    c = config
    check_head(c.head_size, file)
    if c.heads % c.kv_heads:
        raise HubError(f"{file}: num_key_value_heads = {c.kv_heads} does not divide "
                       f"num_attention_heads = {c.heads}")
    if not c.finite_rotary_angles:
        raise HubError(f"{file}: rope_parameters (or rope_theta and rope_scaling): the bases of "
                       "rotary positions should be above 1, factor above 0, and of low_freq_factor "
                       "and high_freq_factor (or beta_slow and beta_fast) the first the smaller, "
                       "above 0")


def written(config: CausalConfig, fields: Json) -> dict[str, Any]:
    """A config.json of `fields`, those of names.toml, that `flat` reads; in the form that
    transformers read before version 5 too."""
    c, gemma, kind = config, config.variant.startswith("gemma"), MODEL_TYPES[config.variant]
    activation = {"gelu_new": "gelu_pytorch_tanh"}.get(c.activation, c.activation)
    scaling = {theirs["name"]: getattr(c, ours) for ours, theirs in ROPE[c.rope_type].items()}
    result = {name: value for name, value in fields.items()
              if name not in OURS and not name.startswith("rope_")}
    result |= {"model_type": kind, "hidden_act": activation, "hidden_activation": activation,
               "query_pre_attn_scalar": c.query_size or c.head_size,
               "attn_logit_softcapping": c.attention_cap or None,
               "final_logit_softcapping": c.final_cap or None,
               "rope_theta": c.rope_theta,
               "rope_local_base_freq": c.rope_local_theta or c.rope_theta,
               "rope_scaling": {"rope_type": c.rope_type, **scaling} if scaling else None,
               "sliding_window": c.window or (1 if gemma else None),
               "use_sliding_window": bool(c.window)}
    if gemma or c.window and c.variant != "mistral":  # AutoModel would make a Ministral of it
        kinds = ("full_attention", "sliding_attention")
        result["layer_types"] = [kinds[local] for local in c.local_layers]
    return {name: value for name, value in result.items() if kind in SOME.get(name, USUAL)}


def check_written(config: CausalConfig, again: CausalConfig) -> None:
    """Raises HubError where what was written of a configuration is read `again` as another model:
    the class of its variant lacks one of the fields."""
    asked, read = _computed(config), _computed(again)
    if other := next((name for name in asked if asked[name] != read[name]), None):
        raise HubError(f"config.model.generator: {other}={getattr(config, other)}: transformers' "
                       f"{MODEL_TYPES[config.variant]} has none that computes this")


def _computed(config: CausalConfig) -> dict[str, Any]:
    """What a model computes, by the field to name in messages. Configurations that compute the same
    have the same."""
    c, local = config, any(config.local_layers)
    rope = (c.rope_theta, c.rope_type, *(getattr(c, ours) for ours in ROPE[c.rope_type]))
    near = (c.rope_local_theta, "default") if c.rope_local_theta else rope
    return {**{ours: getattr(c, ours) for ours in TABLE["causal"]["fields"]},
            "query_size": c.query_size or c.head_size, "attention_cap": c.attention_cap,
            "final_cap": c.final_cap, "window": c.window if local else 0,
            "global_every": c.local_layers, "rope_factor": rope,
            "rope_local_theta": near if local else None}
