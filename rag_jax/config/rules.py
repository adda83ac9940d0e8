"""What must hold of a configuration before anything runs: types, bounds, fields that agree."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rag_jax.config import RUNS, Config, ConfigError
from rag_jax.config.overrides import (
    accepts,
    by_ranks,
    for_run,
    lexical,
    replace,
    set_otherwise,
    type_name,
    value,
)
from rag_jax.errors import near_matches
from rag_jax.lines import is_utf8
from rag_jax.metrics.answers import normalize_answer

LARGEST = 3.4e38  # of float32


def validate(config: Config, resolved: bool = False, trains: bool = False) -> Config:
    """Returns `config`, or raises a ConfigError that lists everything that is wrong with it.

    resolved: the sizes of pretrained towers have been filled in, and are checked too.
    trains: its runs are to be fine-tuned; others only answer.
    """
    check_sections(config)
    problems = list(problems_of_values(config, "config.")) or list(itertools.chain(
        _texts(config), _runs(config, trains), _data(config), _towers(config, resolved),
        _stages(config, trains)))
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))  # several runs may share one
    return config


def check_sections(config: Config) -> None:
    """Raises a ConfigError where sections are none, before any field of them is looked at."""
    if problems := list(problems_of_sections(config, "config.")):
        raise ConfigError("\n".join(problems))


def changed(config: Config, changes: Mapping[str, Any] | None) -> Config:
    """The checked configuration of a run with some dotted fields replaced, but those that the run
    sets by itself."""
    config = validate(replace(config, changes), resolved=True)
    check_set_by_runs(config, changes or ())
    return config


def check_set_by_runs(config: Config, names: Iterable[str]) -> None:
    """Raises a ConfigError for the first of the fields `names` to which every run of the
    configuration gives another value."""
    for problem in set_otherwise(config, names):
        raise ConfigError(f"{problem}; leave the field out, or name another run")


def check_labels(config: Config) -> None:
    """Raises ConfigError for a blank label, and where exact match takes two labels for one answer:
    a wrong class would count as right. It is no part of `validate`: workdirs of an earlier version
    may have such, and who only asks scores nothing."""
    places: dict[str, int] = {}
    for place, label in enumerate(config.eval.labels):
        if not label.strip():
            raise ConfigError(f"config.eval.labels: {label!r} is no answer; name every class by a "
                              "text")
        first = places.setdefault(normalize_answer(label, config.eval.nfd), place)
        if first != place:
            other = config.eval.labels[first]
            raise ConfigError(
                f"config.eval.labels: {other!r} and {label!r} are one answer to exact match, by "
                "which they would be scored: name them so that more than case, articles and "
                "punctuation differs, in the data, too")


def check_prompt(config: Config) -> None:
    """Raises ConfigError for a prompt that no generator reads.

    It is no part of `validate`: workdirs of an earlier version may have such a prompt.
    """
    if config.data.prompt and not config.prompted:
        raise ConfigError(f"config.data.prompt={config.data.prompt!r}: none is read with config."
                          f"data.source_format={config.data.source_format}; set config.data."
                          "source_format=prompt, or leave the prompt out")


def problems_of_sections(config: Any, prefix: str = "") -> Iterator[str]:
    """Which sections of a dataclass are none."""
    for f in dataclasses.fields(config):
        if dataclasses.is_dataclass(f.type):
            section, where = getattr(config, f.name), f"{prefix}{f.name}"
            if isinstance(section, f.type):
                yield from problems_of_sections(section, f"{where}.")
            else:
                yield f"{where}: a {type(section).__name__}; expected {f.type.__name__}(...)"


def problems_of_values(config: Any, prefix: str = "") -> Iterator[str]:
    """What is wrong with each value of a dataclass, whose sections are sound, by itself: its type
    and its bounds, if any."""
    for f in dataclasses.fields(config):
        value, where = getattr(config, f.name), f"{prefix}{f.name}"
        if dataclasses.is_dataclass(f.type):
            yield from problems_of_values(value, f"{where}.")
        elif not accepts(f.type, value):
            yield f"{where}={value!r}: expected {type_name(f.type)}"
        elif value is not None:
            least, most = f.metadata.get("at_least"), f.metadata.get("at_most")
            if isinstance(value, float) and not abs(value) <= LARGEST:
                yield f"{where}={value!r}: must be a finite number of float32"
            elif least is not None and not value >= least:
                yield f"{where}={value!r}: must be at least {least}"
            elif most is not None and not value <= most:
                yield f"{where}={value!r}: must be at most {most}"
            elif isinstance(value, int) and abs(value) >= 2**32:
                yield f"{where}={value!r}: must be below 2**32"


def _texts(config: Config) -> Iterator[str]:
    """The texts that models read. Names of files may be other bytes than UTF-8."""
    for name in ("data.prompt", "model.retriever.query_prefix", "model.retriever.passage_prefix",
                 "eval.bad_words", "eval.prefix", "eval.labels"):
        given = value(config, name)
        for text in given if isinstance(given, tuple) else (given or "",):
            if not is_utf8(text):
                yield f"config.{name}={text!r:.60}: is not UTF-8: write it so"


def _runs(config: Config, trains: bool) -> Iterator[str]:
    for run in config.runs:
        if run in RUNS:
            own = for_run(config, run)
            learns = trains and own.train.steps > 0
            yield from _run(own, run)
            yield from _objective(own, run, learns)
            if learns:
                yield from _left_to_train(own, run)
                yield from _trained(own, run)
        else:
            yield f"config.runs: no run {run!r}; {near_matches(run, RUNS)}"
    if not config.runs or len(set(config.runs)) < len(config.runs):
        yield "config.runs: name at least one run, each once"


def _run(config: Config, run: str) -> Iterator[str]:
    """What is wrong with the configuration of one run."""
    train, null = config.train, config.model.null_document
    if config.retrieval.retriever == "bm25":
        if train.query_encoder_rate is not None:
            yield (f"config.retrieval.retriever=bm25: run {run!r} has no query encoder to train; "
                   "name the run bm25 or bm25_sequence, or, to train one of another name, set "
                   "config.train.query_encoder_rate=none")
        if config.retrieval.where == "device":
            yield ("config.retrieval.retriever=bm25: words are searched on the host; set "
                   "config.retrieval.where=host")
        if null in ("embedding", "mlp"):
            yield (f"config.model.null_document={null}: run {run!r} retrieves by BM25 and has no "
                   "query vector for it; set bias or none")
    if null != "none" and config.model.reranker.pretrained:
        yield (f"config.model.null_document={null}: its score is learned beside those of the "
               "retriever, and config.model.reranker gives passages others; set none, or leave the "
               "reranker out")
    if null != "none" and not config.retrieval.k:
        yield (f"config.model.null_document={null}: without passages (config.retrieval.k=0) there "
               "is nothing that it could be chosen over; set none")
    if train.bm25_weight_rate is not None and (
            config.retrieval.retriever != "hybrid" or config.retrieval.fusion != "convex"
            or config.retrieval.bm25_weight in (0, 1)):
        yield (f"config.train.bm25_weight_rate={train.bm25_weight_rate:g}: what is learned is w of "
               "config.retrieval.retriever=hybrid and fusion=convex, from a bm25_weight above 0 "
               "and below 1 on; set these, or none")
    if train.collapse_guard == "freeze" and not _others_train(config):
        yield ("config.train.collapse_guard=freeze: with config.train.generator_rate=none nothing "
               "would be left to train; set rollback or stop")


def _others_train(config: Config) -> bool:
    """Whether a run trains anything but its retriever."""
    return (config.train.generator_rate is not None or config.model.null_document != "none"
            or config.model.head == "classification")


def _left_to_train(config: Config, run: str) -> Iterator[str]:
    """What is wrong with a run that trains nothing; it would fail only after all other stages."""
    train = config.train
    if (_others_train(config) or train.document_encoder == "refresh"
            or train.bm25_weight_rate is not None):
        return
    named = f"config.train.generator_rate=none: nothing is left to train in run {run!r}"
    if train.query_encoder_rate is None:
        yield (f"{named}, whose config.train.query_encoder_rate is none too; set "
               "config.train.generator_rate, or name a run that trains its retriever")
    elif by_ranks(config):
        yield (f"{named}, for the ranks of config.retrieval.fusion={config.retrieval.fusion} have "
               "no gradient; set config.train.generator_rate, or fusion=convex")


def _trained(config: Config, run: str) -> Iterator[str]:
    """What is wrong with training a run, though it can answer."""
    if not config.retrieval.k and run != "closed_book":
        yield (f"config.retrieval.k=0: run {run!r} reads passages; set 1 or more, or name the run "
               "closed_book")
    if config.train.document_encoder == "refresh" and (
            config.retrieval.where != "device" or not config.retrieval.k):
        yield ("config.train.document_encoder=refresh: the passages are embedded again on the "
               "devices; set config.retrieval.where=device and config.retrieval.k above 0, or "
               "document_encoder=frozen")
    if not config.model.reranker.pretrained or not config.retrieval.k:
        return
    if (config.train.query_encoder_rate, config.train.bm25_weight_rate) != (None, None):
        yield (f"config.model.reranker: run {run!r} has its p(z|x) from the reranker, so the "
               "retriever has nothing to learn from; set config.train.query_encoder_rate=none, "
               "bm25_weight_rate=none and retriever_objective=marginal, or name the run frozen, or "
               "leave the reranker to evaluate and generate")
    if config.retrieval.where == "device":
        yield ("config.retrieval.where=device: the training step retrieves for itself, and "
               "config.model.reranker reads passages outside of it; set host")


def _objective(config: Config, run: str, learns: bool) -> Iterator[str]:
    """What is wrong with the objective of a run's retriever.

    learns: the run is to be fine-tuned; one that was may be asked in ways in which it could not.
    """
    train, fuses = config.train, RUNS[run].kind == "fid"
    objective = train.retriever_objective
    named = f"config.train.retriever_objective={objective}: run {run!r}"
    if objective == "marginal":
        if learns and run == "fid_joint":
            yield (f"{named} sums no documents out, so its likelihood says nothing of the "
                   "retriever; set adist, pdist, emdr2 or loop, or name the run fid")
        return
    if train.query_encoder_rate is None and train.document_encoder == "frozen":
        yield (f"{named} has no encoder that trains (config.train.query_encoder_rate=none); set "
               "marginal")
    elif learns and by_ranks(config):
        yield (f"{named} has no encoder that trains: the ranks of config.retrieval.fusion="
               f"{config.retrieval.fusion} have no gradient; set fusion=convex, or "
               "retriever_objective=marginal")
    if learns and config.retrieval.k + (config.model.null_document != "none") < 2:
        yield (f"{named} has one passage at most to tell from others (config.retrieval.k="
               f"{config.retrieval.k}); set config.retrieval.k to 2 or more")
    if objective == "adist" and not fuses:
        yield (f"{named} decodes with each passage alone, and so attends to no passage rather than "
               "another; name the run fid_joint, or set pdist, emdr2 or loop")
    elif objective == "adist" and config.model.generator.family == "causal":
        yield (f"{named} has a decoder-only generator, which has no cross-attention; set pdist, "
               "emdr2 or loop")


def _data(config: Config) -> Iterator[str]:
    named = [name for name in ("passages", "train", "dev", "test") if getattr(config.data, name)]
    missing = [name for name in ("passages", "train", "dev") if name not in named]
    if named and missing:
        yield (f"config.data.{named[0]} is set but config.data.{missing[0]} is empty: own data "
               "need passages, train and dev; the countries that are shipped need none of them")


def _towers(config: Config, resolved: bool) -> Iterator[str]:
    """What is wrong with the towers. The sizes of a pretrained tower are not known before they are
    `resolved`."""
    model, lengths = config.model, []
    encoders = {"query_encoder", "document_encoder"} & set(model.sources)
    known = resolved or "generator" not in model.sources
    yield from _layers(config, known)
    if model.generator.family == "causal":
        yield from _decoder_only(config, known)
    if config.eval.prefix_mib and known and (
            model.generator.family != "causal" or model.head == "classification"
            or config.data.source_format in ("question_first", "hugging_face")):
        yield (f"config.eval.prefix_mib={config.eval.prefix_mib}: what is kept of a passage must "
               "not depend on the question; it does not where a decoder-only generator, without a "
               "classification head, reads prompts that begin with the passage; set 0")
    if len(encoders) == 1 and not lexical(config):
        missing = ({"query_encoder", "document_encoder"} - encoders).pop()
        yield (f"config.model.{missing}.pretrained: the other encoder comes from "
               f"{model.sources[encoders.pop()]!r}; name this one too (a RAG checkpoint holds no "
               "document encoder: facebook/dpr-ctx_encoder-single-nq-base fits the released ones)")
    if (resolved or not encoders) and not lexical(config):
        lengths += [("question", model.retriever), ("passage", model.retriever)]
    if known:
        lengths += [("source", model.generator), ("target", model.generator)]
        lengths += [("question", model.generator)] * (model.head == "classification")
    for text, tower in lengths:
        length = getattr(config.data, f"max_{text}_length")
        if length > tower.max_positions:
            yield (f"config.data.max_{text}_length={length}: the model has "
                   f"{tower.max_positions} positions (max_positions); set {tower.max_positions} "
                   "or less")
    if model.head != "none" and len(config.eval.labels) < 2:
        yield (f"config.eval.labels: config.model.head={model.head} chooses among them; "
               "name the classes, two or more, as the data's answers do")


def _layers(config: Config, known: bool) -> Iterator[str]:
    """What is wrong with the layers of the towers; `known` says whether the generator's sizes are
    known."""
    retriever, generator = config.model.retriever, config.model.generator
    for name, heads in (("retriever", "heads"), ("generator", "heads"),
                        ("generator", "decoder_heads")):
        tower = getattr(config.model, name)
        count = getattr(tower, heads, 0)
        own_size = getattr(tower, "head_size", 0)  # of heads, whatever the width
        if count and tower.width % count and not (tower.pretrained or own_size):
            yield (f"config.model.{name}.{heads}={count}: must divide "
                   f"config.model.{name}.width={tower.width}")
    if retriever.model_type == "modernbert" and retriever.scan_layers:
        yield ("config.model.retriever.scan_layers: the layers of a ModernBERT are not alike; set "
               "false")
    if retriever.model_type == "modernbert" and not retriever.pretrained and (
            retriever.width % (2 * retriever.heads) == retriever.heads):
        yield (f"config.model.retriever.heads={retriever.heads}: heads of a ModernBERT must have "
               "an even size, as rotary positions turn pairs of numbers; this is "
               f"width={retriever.width} divided by it")
    if generator.param_dtype != "float32" and generator.dtype != generator.param_dtype:
        yield (f"config.model.generator.param_dtype={generator.param_dtype}: what is multiplied "
               f"in {generator.dtype} would be rounded; set config.model.generator.dtype="
               "bfloat16 too, or float32 here")
    if generator.family == "t5" and known and (
            generator.relative_distance <= generator.relative_buckets // 2):
        yield (f"config.model.generator.relative_distance={generator.relative_distance}: must be "
               "more than half of config.model.generator.relative_buckets="
               f"{generator.relative_buckets}")


def _decoder_only(config: Config, known: bool) -> Iterator[str]:
    """What is wrong with a decoder-only generator; `known` says whether its sizes are known."""
    tower, data = config.model.generator, config.data
    if known and tower.heads % tower.kv_heads:
        yield (f"config.model.generator.kv_heads={tower.kv_heads}: must divide "
               f"config.model.generator.heads={tower.heads}")
    if known and tower.head_size % 2:
        yield (f"config.model.generator.head_size={tower.head_size}: must be even, as rotary "
               "positions turn pairs of numbers")
    if known and not tower.finite_rotary_angles:
        named = ", ".join(f"config.model.generator.{name}={getattr(tower, name)}" for name in (
            "rope_theta", "rope_local_theta", "rope_factor", "rope_low", "rope_high"))
        yield (f"{named}: the bases of rotary positions (theta) must be above 1, the factor above "
               "0, and rope_low above 0 and below rope_high")
    continues = {"max_target_length": "answer"}
    if config.model.head == "classification":
        continues["max_question_length"] = "question"
    for name, what in continues.items():
        length = getattr(data, name)
        if known and data.max_source_length + length > tower.max_positions:
            yield (f"config.data.max_source_length={data.max_source_length} and {name}={length}: "
                   f"the {what} continues the prompt, and the model has {tower.max_positions} "
                   "positions for both (max_positions)")
    if tower.window and any(RUNS[run].kind == "fid" for run in config.runs if run in RUNS):
        yield ("config.runs: fid reads passages side by side, where a generator with local layers "
               f"(window={tower.window}) cannot tell which are near; name rag_token or another")


def _stages(config: Config, trains: bool) -> Iterator[str]:
    retrieval = config.retrieval
    for name in ("train", "generator_warmup", "retriever_warmup"):
        steps, optimizer = getattr(config, name).steps, getattr(config, name).optimizer
        if trains and steps and optimizer.learning_rate * optimizer.weight_decay >= 1:
            yield (f"config.{name}.optimizer.weight_decay={optimizer.weight_decay}: with "
                   f"learning_rate={optimizer.learning_rate} a step would take away all of the "
                   "parameters, or more; their product must be below 1")
    for name in ("train", "generator_warmup"):
        stage = getattr(config, name)
        if stage.batch_size % stage.optimizer.accumulate:
            yield (f"config.{name}.batch_size={stage.batch_size}: must be a multiple of "
                   f"optimizer.accumulate={stage.optimizer.accumulate}")
    if retrieval.where == "device" and retrieval.retriever == "hybrid":
        yield ("config.retrieval.where=device: words are searched on the host, so config.retrieval."
               "retriever=hybrid is too; set host")
    if trains and retrieval.where == "device" and retrieval.staleness:
        yield (f"config.retrieval.staleness={retrieval.staleness}: with "
               "config.retrieval.where=device the step retrieves for itself; set 0")
    if config.retriever_warmup.optimizer.accumulate > 1:
        yield ("config.retriever_warmup.optimizer.accumulate: the passages of a batch are each "
               "other's negatives, so a batch cannot be split; set 1")
