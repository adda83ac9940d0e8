"""config.json and generation_config.json of transformers to our configurations, and back.

`names.toml` has the names of their fields.
"""

import dataclasses
import functools
import math
import pathlib
import reprlib
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar, get_args, get_type_hints

from rag_jax.config import (
    BartConfig,
    BertConfig,
    CausalConfig,
    EvalConfig,
    GeneratorConfig,
    T5Config,
)
from rag_jax.hub import causal
from rag_jax.hub.families import BARE
from rag_jax.hub.names import TABLE
from rag_jax.hub.stored import HubError

Tower = TypeVar("Tower", BertConfig, BartConfig, CausalConfig, T5Config)
MOST_ENDS = 64  # tokens that end an answer
LARGEST = 2**31 - 1  # number in a config.json; no table has more rows
ONE_LABEL = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}  # of a reranker


@dataclasses.dataclass(frozen=True)
class SpecialIds:
    """BART's special tokens; the defaults are the released models'.

    start: the decoder's first input. A forced id is the only one that generation may choose at
    the first (bos) or last (eos) position; None = free.
    """

    start: int = 2
    end: int = 2
    pad: int = 1
    bos: int | None = 0
    forced_bos: int | None = None
    forced_eos: int | None = None


@dataclasses.dataclass(frozen=True)
class Architecture:
    """What the towers of a checkpoint compute; None where it has no such tower.

    retriever: the encoders' configuration;  generator: the generator's, and ids, its special
      tokens.
    longest: tokens that a text of a sentence encoder may have; 0 = as many as there are positions.
    """

    retriever: BertConfig | None = None
    generator: GeneratorConfig | None = None
    ids: SpecialIds | None = None
    longest: int = 0


# In the order of the checks: the start token may be taken from eos_token_id or pad_token_id, which
# are checked before it, so that a wrong id is reported under its own name.
IDS = {"end": "eos_token_id", "pad": "pad_token_id", "start": "decoder_start_token_id",
       "bos": "bos_token_id", "forced_bos": "forced_bos_token_id",
       "forced_eos": "forced_eos_token_id"}
# Settings of the search with the same name and meaning in config.eval.
SEARCH = ("num_beams", "length_penalty", "no_repeat_ngram_size", "min_length")


def checked_value(config: Mapping[str, Any], ours: str, theirs: str, cls: type,
                  file: pathlib.Path) -> Any:
    """config[theirs] as the field `ours` of one of our configurations.

    Raises:
      HubError: it is of another type, or out of the field's bounds.
    """
    value, hint = config.get(theirs), get_type_hints(cls)[ours]
    if isinstance(hint, types.UnionType):  # or None
        hint = get_args(hint)[0]
    if allowed := get_args(hint):  # a Literal
        if value not in allowed:
            raise HubError(f"{file}: {theirs} = {reprlib.repr(value)} is not known here; allowed: "
                           f"{', '.join(allowed)}")
        return value
    number = type(value) in (int, float) and abs(value) <= LARGEST and math.isfinite(value)
    if not (isinstance(value, bool) if hint is bool else number) or (
            hint is int and value != int(value)):
        raise HubError(f"{file}: {theirs} = {reprlib.repr(value)} should be of type "
                       f"{hint.__name__}")
    bounds = next(field.metadata for field in dataclasses.fields(cls) if field.name == ours)
    least, most = bounds["at_least"], bounds["at_most"]
    if (least is not None and value < least) or (most is not None and value > most):
        allowed = [f"{word} {bound}" for word, bound in (("at least", least), ("at most", most))
                   if bound is not None]
        raise HubError(f"{file}: {theirs} = {value} is out of its bounds: {', '.join(allowed)}")
    return hint(value)


def _read(model: str, cls: type[Tower], config: Mapping[str, Any], file: pathlib.Path) -> Tower:
    """The configuration of a model that a config.json describes, by its section of `names.TABLE`.

    Raises:
      HubError: a field that is missing, of another type, or asks for what our model lacks.
    """
    table = TABLE[model]
    absent = [theirs for theirs in table["fields"].values() if config.get(theirs) is None]
    if absent:
        raise HubError(f"{file}: lacks {', '.join(absent)}; take the complete config.json of this "
                       "checkpoint")
    for name, value in table["fixed"].items():
        if config.get(name, value) not in (value, None):
            raise HubError(f"{file}: {name} = {reprlib.repr(config[name])} is another "
                           f"architecture; only {value!r} is known here")
    return cls(**{ours: checked_value(config, ours, theirs, cls, file)
                  for ours, theirs in {**table["fields"], **table["optional"]}.items()
                  if config.get(theirs) is not None})


def bert_config(config: Mapping[str, Any], file: pathlib.Path) -> BertConfig:
    """Our configuration of an encoder's config.json; raises as `_read`."""
    if config.get("model_type") == "modernbert":
        result = _read("modernbert", BertConfig, _modern_bert_flat(config, file), file)
        causal.check_head(result.width // result.heads, file)
        return _checked(dataclasses.replace(result, model_type="modernbert"), file)
    result = _read("bert", BertConfig, config, file)
    if (model_type := config.get("model_type")) in ("roberta", "xlm-roberta"):
        if config.get("pad_token_id", 1) != 1:
            raise HubError(f"{file}: pad_token_id = {reprlib.repr(config['pad_token_id'])} is "
                           "another architecture; only 1, from which positions count, is known")
        result = dataclasses.replace(result, model_type=model_type)  # sets first_position
        result = dataclasses.replace(
            result, max_positions=result.max_positions - result.first_position)
    return _checked(result, file)


def bart_config(config: Mapping[str, Any], file: pathlib.Path) -> BartConfig:
    """Our configuration of a BART config.json; raises as `_read`."""
    result = _read("bart", BartConfig, config, file)
    return _checked(dataclasses.replace(  # one form for each architecture
        result, decoder_heads=result.decoder_heads * (result.decoder_heads != result.heads),
        decoder_mlp_width=result.decoder_mlp_width * (
            result.decoder_mlp_width != result.mlp_width)), file)


def causal_config(config: Mapping[str, Any], file: pathlib.Path) -> CausalConfig:
    """Our configuration of a decoder-only config.json; raises as `_read`, `causal.flat`."""
    result = _read("causal", CausalConfig, causal.flat(config, file), file)
    causal.check(result, file)
    return result


def _modern_bert_flat(config: Mapping[str, Any], file: pathlib.Path) -> dict[str, Any]:
    """A ModernBERT's config.json with the kinds of its layers, and their rotary positions, as
    single numbers, in the names of its first release.

    Raises:
      HubError: layers in another order, or positions of another kind.
    """
    flat = {"norm_eps": 1e-5, "global_attn_every_n_layers": 3, **config}
    if config.get("sliding_window") is not None:  # there it sets local_attention
        raise HubError(f"{file}: sliding_window = {reprlib.repr(config['sliding_window'])}: say "
                       "twice as much as local_attention in its place")
    ropes = config.get("rope_parameters") or {}
    if not isinstance(ropes, dict) or not all(
            isinstance(rope, dict | None) for rope in ropes.values()):
        raise HubError(f"{file}: rope_parameters = {reprlib.repr(ropes)} should be objects by kind "
                       "of layer")
    if kinds := config.get("layer_types"):
        kinds = kinds if isinstance(kinds, list) else [kinds]
        later = [i for i, kind in enumerate(kinds) if i and kind == "full_attention"]
        every = flat["global_attn_every_n_layers"] = later[0] if later else len(kinds)
        if kinds != ["sliding_attention" if i % every else "full_attention"
                     for i in range(len(kinds))] or len(kinds) != config.get("num_hidden_layers"):
            raise HubError(f"{file}: layer_types = {reprlib.repr(kinds)} is another architecture; "
                           "only a global layer every so many, the first included, is known here")
    for kind, name in (("full_attention", "global_rope_theta"),
                       ("sliding_attention", "local_rope_theta")):
        rope = ropes.get(kind) or {}
        if rope.get("rope_type", "default") != "default" or config.get("rope_scaling"):
            raise HubError(f"{file}: rope_parameters = {reprlib.repr(rope)}: only the rope_type "
                           "default is known here")
        if "rope_theta" in rope:
            flat[name] = rope["rope_theta"]
    return flat


def check_labels(config: Mapping[str, Any], file: pathlib.Path) -> None:
    """Raises HubError where a classifier's config.json has not one label, a logit."""
    listed = config.get("id2label")
    count = config.get("num_labels", len(listed) if isinstance(listed, dict) else 2)  # as there
    if count != 1:
        raise HubError(f"{file}: a classifier of {reprlib.repr(count)} labels (id2label); a "
                       "reranker has one, the logit of its passage")


# By feed_forward_proj: the activation, and whether it is gated.
_FEED_FORWARDS = {"relu": ("relu", False), "gated-gelu": ("gelu_new", True)}


def t5_config(config: Mapping[str, Any], file: pathlib.Path) -> T5Config:
    """Our configuration of a T5 or mT5 config.json; raises as `_read`. Whether the output layer is
    the token table, the weights say."""
    older = config.get("model_type") == "t5"
    form = config.get("feed_forward_proj") or ("relu" if older else "gated-gelu")
    if not isinstance(form, str) or form not in _FEED_FORWARDS:
        raise HubError(f"{file}: feed_forward_proj = {reprlib.repr(form)} is not known here; "
                       f"allowed: {', '.join(_FEED_FORWARDS)}")
    implied = dict(zip(("dense_act_fn", "is_gated_act"), _FEED_FORWARDS[form], strict=True))
    for name, value in implied.items():  # where they are given, transformers goes by them
        if config.get(name, value) not in (value, None):
            raise HubError(f"{file}: {name} = {reprlib.repr(config[name])}, and feed_forward_proj "
                           f"= {form!r} says {value!r}")
    scaled = config.get("scale_decoder_outputs", config.get("tie_word_embeddings") is not False)
    result = _read("t5", T5Config, {
        **config, **implied,
        "num_decoder_layers": config.get("num_decoder_layers") or config.get("num_layers"),
        "scale_decoder_outputs": older and scaled}, file)
    if result.relative_distance <= result.relative_buckets // 2:
        raise HubError(f"{file}: relative_attention_max_distance = {result.relative_distance} "
                       "should be more than half of relative_attention_num_buckets = "
                       f"{result.relative_buckets}")
    return dataclasses.replace(result, attention_dropout=result.dropout,
                               activation_dropout=result.dropout, tied=result.scale_output)


def t5_json(model_type: str, config: T5Config, ids: SpecialIds) -> dict[str, Any]:
    """The config.json of a T5 ("t5") or mT5 ("mt5").

    Raises:
      HubError: a form of the feed-forward, or an output, that these do not have.
    """
    forms = {value: form for form, value in _FEED_FORWARDS.items()}
    form = forms.get((config.activation, config.gated))
    if form is None or config.scale_output and (model_type == "mt5" or not config.tied):
        raise HubError(f"config.model.generator: activation={config.activation}, "
                       f"gated={config.gated}, tied={config.tied}, "
                       f"scale_output={config.scale_output}: there is no such {model_type} in "
                       "transformers")
    return {"model_type": model_type, "is_encoder_decoder": True, "feed_forward_proj": form,
            "tie_word_embeddings": config.scale_output, **_written("t5", config),
            **generation_json(config, ids)}


def architecture(config: Mapping[str, Any], generation: Mapping[str, Any], file: pathlib.Path
                 ) -> Architecture:
    """The configurations of all towers of a config.json; a generator has a start token of its own
    where that is not </s>.

    Args:
      config: its content, with the model_type of one of FAMILIES.
      generation: that of generation_config.json, or {}.
      file: to name in messages.

    Raises:
      HubError: as `bert_config`, `special_ids`; a part of RAG that is no DPR, BERT or BART.
    """
    model_type = config["model_type"]
    encoder = config if model_type in ("dpr", *BARE) else None
    given = config if model_type in GENERATORS else None
    if model_type == "rag":
        encoder = _part(config, "question_encoder", ("dpr", "bert"), file)
        given = _part(config, "generator", ("bart",), file)
    retriever = bert_config(encoder, file) if encoder else None
    if not given:
        return Architecture(retriever)
    generator = GENERATORS[given.get("model_type", "bart")].read(given, file)
    ids = special_ids(given, generation, file)
    if ids.start != ids.end:
        generator = dataclasses.replace(generator, start_token=ids.start)
    generator = dataclasses.replace(generator, end_tokens=_end_tokens(given, generation, file))
    return Architecture(retriever, generator, ids)


def _end_tokens(config: Mapping[str, Any], generation: Mapping[str, Any], file: pathlib.Path
                ) -> tuple[int, ...]:
    """The tokens that end an answer, where there are several."""
    theirs = IDS["end"]
    listed = _merged(config, generation).get(theirs)
    if not isinstance(listed, list) or len(listed) < 2:
        return ()
    if len(listed) > MOST_ENDS:
        raise HubError(f"{file}: {theirs} has {len(listed)} tokens; at most {MOST_ENDS} are read")
    for value in listed:
        _check_token(value, theirs, config, generation, file)
    return tuple(dict.fromkeys(listed))


def _merged(config: Mapping[str, Any], generation: Mapping[str, Any]) -> dict[str, Any]:
    """config.json with the values of generation_config.json, which go first."""
    return {**config, **{name: value for name, value in generation.items() if value is not None}}


def _check_token(value: Any, theirs: str, config: Mapping[str, Any],
                 generation: Mapping[str, Any], file: pathlib.Path) -> None:
    if not (type(value) is int and 0 <= value < config["vocab_size"]):
        if generation.get(theirs) is not None:
            file = file.with_name("generation_config.json")
        raise HubError(f"{file}: {theirs} = {reprlib.repr(value)} is no token of the "
                       f"{config['vocab_size']} that vocab_size says")


def _part(config: Mapping[str, Any], name: str, known: tuple[str, ...], file: pathlib.Path
          ) -> dict[str, Any]:
    value = config.get(name)
    if not isinstance(value, dict) or value.get("model_type", known[0]) not in known:
        kind = value.get("model_type") if isinstance(value, dict) else value
        raise HubError(f"{file}: {name} is {kind!r}; expected a section of model_type "
                       f"{' or '.join(known)}")
    return value


def _checked(config: Tower, file: pathlib.Path) -> Tower:
    decoder = config.decoder_sizes[:1] if isinstance(config, BartConfig) else ()
    for heads in (config.heads, *decoder):
        if config.width % heads:
            raise HubError(f"{file}: {heads} attention heads do not divide the width "
                           f"{config.width}")
    return config


def special_ids(config: Mapping[str, Any], generation: Mapping[str, Any], file: pathlib.Path
                ) -> SpecialIds:
    """Those of a generator's config.json and its generation_config.json (or {}), which goes first;
    as in transformers, nothing is forced that the latter, if it says anything, does not say.

    Raises:
      HubError: an id that is no row of the token table.
    """
    merged = _merged(config, generation)
    if generation:
        merged |= {name: generation.get(name)
                   for name in (IDS["forced_bos"], IDS["forced_eos"])}
    if config.get("model_type") in causal.USUAL:  # a prompt's template begins and ends it
        end = merged.get("eos_token_id")
        merged |= {"decoder_start_token_id": end, "forced_bos_token_id": None}
        merged["pad_token_id"] = end if merged.get("pad_token_id") is None else merged[
            "pad_token_id"]
    if config.get("model_type") in ("t5", "mt5"):
        merged = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None, **{
            name: value for name, value in merged.items() if value is not None}}
        merged.setdefault("decoder_start_token_id", merged["pad_token_id"])
    values = {}
    for ours, theirs in IDS.items():
        value = merged.get(theirs, getattr(SpecialIds, ours))
        value = value[0] if isinstance(value, list) and value else value
        if value is None and ours in ("start", "end", "pad"):
            value = getattr(SpecialIds, ours)
        if value is not None:
            _check_token(value, theirs, config, generation, file)
        values[ours] = value
    return SpecialIds(**values)


def search(config: Mapping[str, Any], generation: Mapping[str, Any], file: pathlib.Path
           ) -> dict[str, int | float]:
    """The settings of the search for answers that a BART or RAG checkpoint gives, as fields of
    config.eval: those of SEARCH, and max_length, which here does not count the start token.

    As in transformers, they are in generation_config.json alone if there is one, and otherwise in
    config.json, for RAG also in its generator section.

    Raises:
      HubError: a value of another type, or out of its bounds.
    """
    section = config.get("generator")
    parts = [generation] if generation else [section if isinstance(section, dict) else {}, config]
    given = {k: v for part in parts for k, v in part.items() if v is not None}
    fields = {name: checked_value(given, name, name, EvalConfig, file)
              for name in SEARCH if name in given}
    if "max_length" in given and (
            longest := checked_value(given, "min_length", "max_length", EvalConfig, file) - 1) > 1:
        fields["max_length"] = longest  # one of 1 has room for </s> alone
    return fields


def bert_json(config: BertConfig, model_type: str) -> dict[str, Any]:
    """The config.json of a DPR tower ("dpr"), or of the bare encoder."""
    first = config.first_position
    if model_type == "modernbert":
        return {"model_type": model_type, **_written("modernbert", config)}
    fields = _written("bert", dataclasses.replace(
        config, max_positions=first + config.max_positions))
    if model_type != "dpr":
        fields.pop("projection_dim")
    return {"model_type": model_type, "pad_token_id": 1 if first else 0, **fields}


def bart_json(config: BartConfig, ids: SpecialIds) -> dict[str, Any]:
    """The config.json of a BART."""
    heads, mlp_width = config.decoder_sizes
    whole = dataclasses.replace(config, decoder_heads=heads, decoder_mlp_width=mlp_width)
    return {"model_type": "bart", "is_encoder_decoder": True, "tie_word_embeddings": True,
            **_written("bart", whole), **generation_json(config, ids)}


def causal_json(config: CausalConfig, ids: SpecialIds) -> dict[str, Any]:
    """The config.json of a decoder-only model.

    Raises:
      HubError: a field that the class of its variant does not read.
    """
    result = causal.written(config, _written("causal", config))
    causal.check_written(config, causal_config(result, pathlib.Path("config.model.generator")))
    return {**result, **{name: value for name, value in generation_json(config, ids).items()
                         if name in (IDS["end"], IDS["pad"], IDS["bos"])}}


class Converter(NamedTuple):
    """Reads a generator's config.json as our configuration, and writes it."""

    read: Callable[[Mapping[str, Any], pathlib.Path], GeneratorConfig]
    write: Callable[[Any, SpecialIds], dict[str, Any]]


GENERATORS = {"bart": Converter(bart_config, bart_json),  # by model_type
              **{name: Converter(t5_config, functools.partial(t5_json, name))
                 for name in ("t5", "mt5")},
              **dict.fromkeys(causal.USUAL, Converter(causal_config, causal_json))}


def _written(model: str, config: Any) -> dict[str, Any]:
    """The inverse of `_read`."""
    table = TABLE[model]
    return {theirs: value for ours, theirs in {**table["fields"], **table["optional"]}.items()
            if (value := getattr(config, ours)) is not None}


def generation_json(config: GeneratorConfig, ids: SpecialIds) -> dict[str, Any]:
    """A generator's special tokens as fields of config.json and generation_config.json."""
    ends = {IDS["end"]: list(config.end_tokens)} if config.end_tokens else {}
    return {theirs: getattr(ids, ours) for ours, theirs in IDS.items()} | ends
