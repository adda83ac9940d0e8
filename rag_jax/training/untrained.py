"""Models that no run has trained: each tower has the parameters of its source.

`config.model.sources` names the sources. A model of `rag_jax.ingest` may have no generator, or no
encoders where its passages are found by their words.
"""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from rag_jax import parallel
from rag_jax.config import Config, ConfigError, overrides
from rag_jax.config.rules import check_prompt
from rag_jax.data.prepared import Prepared, generator_format
from rag_jax.data.text import Tokenizer
from rag_jax.data.tokenizer_training import train_bart_tokenizer
from rag_jax.models.stack import unstack_layers
from rag_jax.training import pretrained
from rag_jax.training.job import Index, Job
from rag_jax.training.opened import Rag, check_vectors
from rag_jax.training.run_index import placed


def towers(config: Config) -> list[str]:
    """The towers that the configuration names and its run reads."""
    unread = pretrained.ENCODERS if overrides.lexical(config) else ()
    return [tower for tower in config.model.sources if tower not in unread]


def check_parts(config: Config) -> None:
    """Raises ConfigError for parts of a model that only training makes."""
    head = config.model.head if config.head_classes else "none"
    for name, given in (("null_document", config.model.null_document), ("head", head)):
        if given != "none":
            raise ConfigError(f"config.model.{name}={given}: it is learned, and nothing has been "
                              "trained here; leave the field out")


def untrained_job(config: Config, named: Config, path: pathlib.Path) -> Job:
    """The job of an untrained model: without passages and without questions.

    A tower that is not named gets a tokenizer of bytes, which is never used.

    Args:
      config: with the architecture of the towers.
      named: the same with their sources.
      path: the workdir, or the folder that errors name in its place.

    Raises:
      ConfigError: a source has no tokenizer, or a prompt would not be read.
    """
    check_prompt(config)
    tokenizers, known = [], towers(named)
    for tower, section in (("query_encoder", "retriever"), ("generator", "generator")):
        folder = getattr(config.data, f"{section}_tokenizer") or (
            pretrained.tokenizer_folder(named, tower) if tower in known else None)
        rows = getattr(config.model, section).vocab_size
        tokenizers.append(
            Tokenizer.load(folder, rows) if folder else train_bart_tokenizer((), 300))
    format = generator_format(config, tokenizers[1])
    prepared = Prepared(tokenizers[0], format.tokenizer, format, {}, {})
    return Job(config, path, prepared, parallel.make_mesh(config.mesh))


def open_untrained(job: Job, named: Config, names: Sequence[str], index: Index,
                   said: Mapping[str, Any]) -> Rag:
    """Loads towers from their sources and opens them with an index.

    Args:
      job, named: as for `untrained_job`.
      names: of the towers.
      index: what is read, on the host; its tokens are those of the generator, if there is one.
      said: as of `Rag`.

    Raises:
      RetrievalError: another document encoder has built the index.
    """
    params = pretrained.load(dataclasses.replace(job, config=named), names, answers=True)
    rag = Rag(job, job.config.runs[0], unstack_layers(params), index, said)
    if "document_encoder" in names:
        check_vectors(rag)
    return dataclasses.replace(rag, index=placed(job, index))
