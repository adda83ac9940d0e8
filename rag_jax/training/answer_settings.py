"""The settings of decoding and retrieval that a configuration asks for."""

import dataclasses
from typing import Any

from rag_jax.answering import Answerer, Settings
from rag_jax.config import Config, ConfigError
from rag_jax.data.text import Tokenizer, label_tokens
from rag_jax.decoding.prefixes import KeptPrefixes
from rag_jax.decoding.settings import Decoding
from rag_jax.models.rag import RagModel
from rag_jax.training.job import Index, Job
from rag_jax.training.reranker import reranked


def passages_read(config: Config, index: Index | None) -> int:
    """How many passages a question reads: config.eval.k, or where that is 0, config.retrieval.k, or
    all of an index that has fewer."""
    k = config.retrieval.k
    return config.eval.k or (k if index is None else min(k, index.size))


def answering_model(job: Job) -> RagModel:
    """The architecture of a job's model as it answers: with looped layers, of which all are kept.
    """
    looped = {"scan_layers": False, "remat": "none"}
    return dataclasses.replace(
        job.model,
        generator=dataclasses.replace(job.model.generator, **looped),
        retriever=dataclasses.replace(job.model.retriever, **looped))


def make_answerer(job: Job, index: Index | None, prefixes: KeptPrefixes | None = None,
                  **changes: Any) -> Answerer:
    """The answerer with the settings of `config.eval` and `config.retrieval`.

    prefixes: as for `Answerer`.
    **changes: fields of `answering.Settings` to set otherwise.
    """
    config = job.config
    settings = Settings(
        k=passages_read(config, index),
        batch_size=config.eval.batch_size,
        length_step=config.data.length_step,
        decoding=decoding_settings(config, job.prepared.generator_tokenizer),
        seed=config.seed,
        labels=config.eval.labels,
        node_budget=config.eval.exact_nodes,
        prefix_mib=config.eval.prefix_mib,
    )
    return Answerer(answering_model(job), job.mesh, reranked(job, index),
                    dataclasses.replace(settings, **changes), prefixes)


def decoding_settings(config: Config, tokenizer: Tokenizer) -> Decoding:
    """`config.eval` with its texts as token ids, each as it is written inside an answer."""
    values = dataclasses.asdict(config.eval)
    same = {f.name: values[f.name] for f in dataclasses.fields(Decoding)
            if values.get(f.name) is not None}

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode_answers([text])[0])

    def inside(text: str) -> tuple[int, ...]:
        """The text as a later word, where an answer's first word has no space before it (chats)."""
        return tuple(tokenizer.encode([text if tokenizer.begins_words else f" {text}"])[0])

    def within(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode_within(text))

    try:
        if config.eval.forced_bos and tokenizer.start is None:
            raise ValueError("forced_bos: this tokenizer has no <s>; set false")
        if blank := [text for text in config.eval.bad_words if not within(text)]:
            raise ValueError(f"bad_words: {blank[0]!r} has no tokens; leave it out")
        labels = tuple((*ids(label), tokenizer.end) for label in config.eval.labels)
        equal = [text for text, row in zip(config.eval.labels, labels, strict=True)
                 if labels.count(row) > 1]
        if equal:
            raise ValueError(f"labels: {', '.join(map(repr, equal))} are equal as tokens; name "
                             "every class once")
        if config.model.head == "label_token":
            labels = tuple((token,) for token in label_tokens(tokenizer, config.classes))
        longest = max(map(len, labels)) if config.classes else config.data.max_target_length
        return Decoding(**{
            **same,
            "max_length": longest,
            "bad_words": tuple(dict.fromkeys(
                form(text) for text in config.eval.bad_words for form in (ids, inside, within))),
            "prefix": ids(config.eval.prefix) if config.eval.prefix else None,
            "labels": labels,
            "forced_bos": tokenizer.start if config.eval.forced_bos else None,
            "forced_eos": bool(config.eval.forced_eos),
        })
    except ValueError as error:
        told = str(error).replace("max_length=", "config.data.max_target_length=")
        raise ConfigError(f"config.eval: {told}") from None
