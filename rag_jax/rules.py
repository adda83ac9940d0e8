"""What must hold of a configuration before anything runs: types, bounds, fields that agree."""

import dataclasses
import typing
from typing import Any

from rag_jax.config import RUNS, Config, ConfigError
from rag_jax.errors import near_matches
from rag_jax.overrides import _accepts, _hints, for_run, lexical, type_name


def _problems(config: Any, path: str = "config") -> typing.Iterator[str]:
    hints = _hints(type(config))
    for f in dataclasses.fields(config):
        value, where = getattr(config, f.name), f"{path}.{f.name}"
        if dataclasses.is_dataclass(hints[f.name]):
            if isinstance(value, hints[f.name]):
                yield from _problems(value, where)
            else:
                yield (f"{where}: a {type(value).__name__}; expected "
                       f"{hints[f.name].__name__}(...)")
        elif not _accepts(hints[f.name], value):
            yield f"{where}={value!r}: expected {type_name(hints[f.name])}"
        elif value is not None:
            least, most = f.metadata["at_least"], f.metadata["at_most"]
            if least is not None and not value >= least:
                yield f"{where}={value!r}: must be at least {least}"
            elif most is not None and not value <= most:
                yield f"{where}={value!r}: must be at most {most}"


def _conflicts(config: Config, resolved: bool) -> typing.Iterator[str]:
    data, model = config.data, config.model
    for run in config.runs:
        if run not in RUNS:
            yield f"config.runs: no run {run!r}; {near_matches(run, RUNS)}"
        else:
            yield from _run_conflicts(for_run(config, run), run)
    if not config.runs or len(set(config.runs)) < len(config.runs):
        yield "config.runs: name at least one run, each once"
    named = [name for name in ("passages", "train", "dev", "test") if getattr(data, name)]
    missing = [name for name in ("passages", "train", "dev") if name not in named]
    if named and missing:
        yield (f"config.data.{named[0]} is set but config.data.{missing[0]} is empty: own data "
               "need passages, train and dev; the countries that are shipped need none of them")
    for name, tower in (("retriever", model.retriever), ("generator", model.generator)):
        if tower.width % tower.heads and not tower.pretrained:
            yield (f"config.model.{name}.heads={tower.heads}: must divide "
                   f"config.model.{name}.width={tower.width}")
    decoder_heads = model.generator.decoder_heads
    if decoder_heads and model.generator.width % decoder_heads and not model.generator.pretrained:
        yield (f"config.model.generator.decoder_heads={decoder_heads}: must divide "
               f"config.model.generator.width={model.generator.width}")
    encoders = {"query_encoder", "document_encoder"} & set(model.sources)
    if len(encoders) == 1 and not lexical(config):
        missing = ({"query_encoder", "document_encoder"} - encoders).pop()
        yield (f"config.model.{missing}.pretrained: the other encoder comes from "
               f"{model.sources[encoders.pop()]!r}; name this one too (a RAG checkpoint holds no "
               "document encoder: facebook/dpr-ctx_encoder-single-nq-base fits the released ones)")
    read_by = []
    if resolved or not encoders:
        read_by += [(model.retriever, ("max_question_length", "max_passage_length"))]
    if resolved or "generator" not in model.sources:
        classified = ("max_question_length",) * (model.head == "classification")
        read_by += [(model.generator, ("max_source_length", "max_target_length", *classified))]
    for tower, names in read_by:
        for name in names:
            if getattr(data, name) > tower.max_positions:
                yield (f"config.data.{name}={getattr(data, name)}: the model has "
                       f"{tower.max_positions} positions (max_positions)")
    if model.head != "none" and len(config.eval.labels) < 2:
        yield (f"config.eval.labels: config.model.head={model.head} chooses among them; name the "
               "classes, two or more, as the data's answers do")
    for name in ("train", "generator_warmup"):
        stage = getattr(config, name)
        if stage.batch_size % stage.optimizer.accumulate:
            yield (f"config.{name}.batch_size={stage.batch_size}: must be a multiple of "
                   f"optimizer.accumulate={stage.optimizer.accumulate}")
    if config.retrieval.where == "device" and config.retrieval.staleness:
        yield (f"config.retrieval.staleness={config.retrieval.staleness}: with "
               "config.retrieval.where=device the step retrieves for itself; set 0")
    if config.train.document_encoder == "refresh" and (
            config.retrieval.where != "device" or not config.retrieval.k):
        yield ("config.train.document_encoder=refresh: the passages are embedded again on the "
               "devices; set config.retrieval.where=device and config.retrieval.k above 0")
    if config.retriever_warmup.optimizer.accumulate > 1:
        yield ("config.retriever_warmup.optimizer.accumulate: the passages of a batch are each "
               "other's negatives, so a batch cannot be split; set 1")


def _run_conflicts(config: Config, run: str) -> typing.Iterator[str]:
    """What is wrong with the configuration of one run."""
    train, null = config.train, config.model.null_document
    if config.retrieval.retriever == "bm25":
        if train.query_encoder_rate is not None:
            yield (f"config.retrieval.retriever=bm25: run {run!r} has no query encoder to train; "
                   "name the run bm25 or bm25_sequence, or set config.train.query_encoder_rate="
                   "none")
        if config.retrieval.where == "device":
            yield ("config.retrieval.retriever=bm25: words are searched on the host; set "
                   "config.retrieval.where=host")
        if null in ("embedding", "mlp"):
            yield (f"config.model.null_document={null}: run {run!r} retrieves by BM25 and has no "
                   "query vector for it; set bias or none")
    if null != "none" and not config.retrieval.k:
        yield (f"config.model.null_document={null}: without passages (config.retrieval.k=0) there "
               "is nothing that it could be chosen over; set none")
    if train.collapse_guard == "freeze" and train.generator_rate is None:
        yield ("config.train.collapse_guard=freeze: with config.train.generator_rate=none nothing "
               "would be left to train; set stop")


def validate(config: Config, resolved: bool = False) -> Config:
    """Returns `config`, or raises a ConfigError that lists everything that is wrong with it.

    resolved: the sizes of pretrained towers have been filled in, and are checked too.
    """
    problems = list(_problems(config)) or list(_conflicts(config, resolved))
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))  # several runs may share one
    return config
