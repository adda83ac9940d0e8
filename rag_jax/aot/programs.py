"""The jitted programs of a configuration, with abstract arguments: shapes and shardings, no data.

They are made by the functions that training and answering call, for the longest inputs.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from rag_jax import parallel
from rag_jax.answering import Draws, jit_decode, jit_log_likelihood, keys_of
from rag_jax.config import Config, ConfigError
from rag_jax.config.overrides import lexical, replace
from rag_jax.data.batches import assemble, input_shape
from rag_jax.data.prepared import Prepared, generator_format
from rag_jax.models.generator import in_dtype
from rag_jax.models.stack import REMAT_POLICIES
from rag_jax.retrieval.device import abstract_tables, jit_search
from rag_jax.retrieval.device_search import DeviceTables
from rag_jax.searching import embed_program
from rag_jax.training import on_device, step
from rag_jax.training.answer_settings import (
    answering_model,
    decoding_settings,
    passages_read,
)
from rag_jax.training.fine_tuning import rag_stage
from rag_jax.training.indexing import embed_rows, rounded
from rag_jax.training.job import Job, groups_of
from rag_jax.types import Batch, Params, QuestionBatch

POLICY = ", remat="  # between a program's name and the policy of rematerialisation
KINDS = ("train", "evaluate", "decode", "embed", "search")


class Program(NamedTuple):
    """A jitted function and its arguments, which are ShapeDtypeStructs with shardings.

    Attributes:
      unrounded: parameters that stay on the devices beside the copies, in another dtype or
        sharding, which are arguments.
    """

    name: str
    jitted: Any
    arguments: tuple
    unrounded: Sequence[jax.ShapeDtypeStruct] = ()


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """A substitute for a tokenizer: its number of tokens, and BART's special tokens."""

    vocab_size: int
    start: int = 0
    pad: int = 1
    end: int = 2
    own_end: int = 2


def vocabulary(config: Config, tower: str) -> Vocabulary:
    """The vocabulary of a tower, "retriever" or "generator".

    Raises:
      ConfigError: the configuration does not say the size, which is that of an existing tokenizer.
    """
    size = getattr(config.model, tower).vocab_size
    if not size:
        sources = {"retriever": "query_encoder", "generator": "generator"}
        if (getattr(config.data, f"{tower}_tokenizer")
                or config.model.sources.get(sources[tower])):
            raise ConfigError(f"config.model.{tower}.vocab_size=0: the tokenizer's size, which is "
                              "not read here; set it to that size")
        size = getattr(config.data, f"{tower}_vocab")  # of the tokenizer that will be trained
    return Vocabulary(size)


def job_of(config: Config, mesh: Mesh) -> Job:
    """A job without data, of which programs are made."""
    retriever, generator = (vocabulary(config, tower) for tower in ("retriever", "generator"))
    # Without a tokenizer the words of a prompt have no ids. The lengths of inputs do not depend on
    # the format.
    plain = replace(config, {"data.source_format": "question_kept"}) if (
        config.model.generator.family == "causal") else config
    prepared = Prepared(retriever, generator, generator_format(plain, generator), {}, {})
    return Job(config, pathlib.Path(), prepared, mesh)


def undivided(config: Config, mesh: Mesh) -> list[str]:
    """Descriptions of the parameters that this mesh cannot split, from `parallel.undivided`."""
    return parallel.undivided(job_of(config, mesh).model.shapes(), mesh)


def programs(config: Config, mesh: Mesh, hosts: int = 1, passages: int = 0,
             kinds: Sequence[str] = KINDS, source_tokens: int = 0,
             policies: Sequence[str] = ()) -> Iterator[Program]:
    """The programs of `kinds`; those of training and answering for each of config.runs.

    Args:
      config: names the architectures; pretrained weights are not read.
      mesh: its devices need not exist.
      hosts: how many hosts these devices belong to.
      passages: the number of passages in an index on the devices; 0 = config.retrieval.capacity,
        if the configuration has the index there.
      kinds: of KINDS.
      source_tokens: the mean number of tokens of the generator inputs of a training batch, of
        which at least one has the greatest length; they are packed as by `RagBatcher`. 0 = all
        inputs have the greatest length, which is the most that training can meet.
      policies: policies of rematerialisation, with each of which training is compiled; the
        program's name ends with the policy. () = the configuration's.

    Raises:
      ConfigError: something cannot be compiled, or an argument has no effect.
    """
    check_names("--remat", policies, ("none", *reversed(REMAT_POLICIES)))
    changes = {POLICY + policy: {"model.retriever.remat": policy, "model.generator.remat": policy}
               for policy in policies} or {"": {}}
    job, tables = job_of(config, mesh), None
    on_devices = config.retrieval.where == "device"
    passages = passages or (config.retrieval.capacity if on_devices else 0)
    _check(job, passages, kinds, source_tokens)
    if passages:
        tables = abstract_tables(passages, job.model.embedding_width, mesh,
                                 *on_device.layout(config, job.prepared.format))
    if "search" in kinds and tables is not None and not lexical(config):
        yield _search(job, tables)
    if "embed" in kinds and not lexical(config):
        yield _embed(job, hosts)
    for run in config.runs:
        run_job = job.of_run(run)
        if "train" in kinds:
            for suffix, changed in changes.items():
                changed_job = dataclasses.replace(run_job, config=replace(run_job.config, changed))
                program = _train(changed_job, run, tables, source_tokens)
                yield program._replace(name=program.name + suffix)
        if {"evaluate", "decode"} & set(kinds):
            yield from _answering(run_job, run, kinds)


def check_names(flag: str, names: Sequence[str], known: Sequence[str]) -> None:
    """Raises ConfigError where a flag lists a name that is not known."""
    if unknown := set(names) - set(known):
        raise ConfigError(f"{flag}={','.join(names)}: no "
                          f"{', '.join(sorted(name or '(empty)' for name in unknown))}; there are "
                          f"{', '.join(known)}")


def _check(job: Job, passages: int, kinds: Sequence[str], source_tokens: int) -> None:
    """Raises ConfigError where a value is missing or would have no effect."""
    config, asked = job.config, set(kinds) if set(kinds) != set(KINDS) else set()
    jobs = [job.of_run(run) for run in config.runs]
    for kind in sorted({"embed", "search"} & asked) if lexical(config) else ():
        raise ConfigError(f"--programs={kind}: a run that retrieves by words embeds no passages; "
                          f"leave {kind} out")
    if not passages and "train" in kinds and any(map(_searches, jobs)):
        raise ConfigError("config.retrieval.where=device: how many passages? give --passages")
    if not passages and "search" in asked:
        raise ConfigError("--programs=search: of how many passages? give --passages")
    texts = [name for name in ("bad_words", "prefix", "labels") if getattr(config.eval, name)]
    if texts and "decode" in kinds:
        others = ",".join(kind for kind in kinds if kind != "decode")
        needed = texts[-1] == "labels" and config.model.head != "none"
        raise ConfigError(
            f"config.eval.{texts[-1]}: without a tokenizer bad_words, prefix and labels have no "
            "token ids, with which decoding could be compiled; "
            f"{'' if needed else 'leave them out here, or '}set --programs={others or 'train'}")
    if source_tokens and not job.model.packs:
        raise ConfigError(f"--source_tokens: inputs of the family {config.model.generator.family} "
                          "are not packed; leave it out")
    packed = [one for one in jobs if source_tokens and not _searches(one)
              and _train_batch(one, source_tokens).source_places is not None]
    if source_tokens and not packed:
        raise ConfigError(
            f"--source_tokens={source_tokens}: no inputs are packed where the step searches for "
            "itself (config.retrieval.where=device), nor with config.data.length_buckets="
            f"{config.data.length_step} above a quarter of config.data.max_source_length="
            f"{config.data.max_source_length}, nor where this would save nothing; leave it out")


def _searches(job: Job) -> bool:
    """Whether the training step of a run searches an index on the devices."""
    return bool(job.config.retrieval.k) and job.config.retrieval.where == "device"


def _train(job: Job, run: str, tables: DeviceTables | None, source_tokens: int) -> Program:
    """A training step of `fine_tuning.fine_tune`, as accelerators take it: one process on CPUs
    searches an index on the devices by a program of its own."""
    config, mesh = job.config, job.mesh
    size, k = config.train.batch_size, config.retrieval.k
    number = jax.ShapeDtypeStruct((), np.int32, sharding=parallel.replicated(mesh))
    complete, given = None, _train_batch(job, source_tokens)
    if _searches(job):
        settings, _ = on_device.layout(config, job.prepared.format)
        refresh = config.train.document_encoder == "refresh"
        pad_id = job.prepared.retriever_tokenizer.pad if refresh else None
        complete = on_device.completion(job.model, job.prepared.format, k, mesh, settings, pad_id)
        given = (_questions(job, size), tables, number)
    stage = rag_stage(job, run, None, complete, meta={})
    return Program(f"train {run}", stage.train_step, (stage.abstract_state, given, number))


def _answering(job: Job, run: str, kinds: Sequence[str]) -> Iterator[Program]:
    """The programs that answer as `config.eval` describes: likelihoods and decoding."""
    config, model, draws = job.config, answering_model(job), ()
    generator, size = model.generator, parallel.filled_up(config.eval.batch_size, job.mesh)
    params = step.abstract_params(model, model.towers, job.mesh)
    kept = _converted(params["generator"], lambda tower: in_dtype(tower, generator.param_dtype))
    params["generator"] = _converted(kept, lambda tower: in_dtype(tower, generator.dtype))
    unrounded = _left(kept, params["generator"])
    batch = _batch(job, size, passages_read(config, None) if config.retrieval.k else 0)
    if "evaluate" in kinds:
        yield Program(f"evaluate {run}", jit_log_likelihood(model), (params, batch), unrounded)
    if "decode" in kinds:
        decoding = decoding_settings(config, job.prepared.generator_tokenizer)
        if decoding.sample:
            draws = jax.eval_shape(lambda: Draws(keys_of(0, np.arange(size)),
                                                 np.ones(size, np.float32)))
        yield Program(f"decode {run}", jit_decode(model, decoding), (params, batch, *draws),
                      unrounded)


def _converted(params: Params, convert: Callable[[Params], Params]) -> Params:
    """Abstract parameters with the dtypes that `convert` gives them."""
    return jax.tree.map(
        lambda x, new: jax.ShapeDtypeStruct(x.shape, new.dtype, sharding=x.sharding),
        params, jax.eval_shape(convert, params))


def _left(kept: Params, given: Params) -> list[jax.ShapeDtypeStruct]:
    """The parameters of which a program gets a copy, with another dtype or sharding."""
    pairs = zip(jax.tree.leaves(kept), jax.tree.leaves(given), strict=True)
    return [x for x, new in pairs if (x.dtype, x.sharding) != (new.dtype, new.sharding)]


def _embed(job: Job, hosts: int) -> Program:
    """Embedding passages for an index; each host has passages of its own and all parameters."""
    config, mesh = job.config, job.mesh
    kept = step.abstract_params(job.model, ("document_encoder",), mesh)["document_encoder"]
    params = _converted(kept, lambda tower: rounded(tower, job.model.retriever.dtype))
    if hosts > 1:
        whole = parallel.replicated(mesh)
        params = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), params)
    size = parallel.filled_up(embed_rows(config, mesh) * hosts, mesh)
    return Program("embed passages", embed_program(job.model.encoder_module),
                   (params, *_tokens(job, size, config.data.max_passage_length)),
                   _left(kept, params))


def _search(job: Job, tables: DeviceTables) -> Program:
    """Searching an index on the devices for a training batch of queries."""
    config, mesh = job.config, job.mesh
    settings, _ = on_device.layout(config, job.prepared.format)
    queries = jax.ShapeDtypeStruct((config.train.batch_size, job.model.embedding_width),
                                   jnp.float32, sharding=parallel.replicated(mesh))
    return Program("search", jit_search(mesh, config.retrieval.k, settings), (tables, queries))


def _tokens(job: Job, *shape: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Abstract ids int32 and mask bool of this shape, split over the devices as a batch is."""
    return _rows(job, jnp.int32, *shape), _rows(job, bool, *shape)


def _rows(job: Job, dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    """An abstract array of a batch; ConfigError if the mesh cannot split its rows."""
    parallel.check_splits(shape[0], job.mesh)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=parallel.batch_sharding(job.mesh))


def _batch(job: Job, size: int, k: int, source_tokens: int = 0) -> Batch:
    """An abstract batch as RagBatcher makes it; without retrieval (k=0), of one empty passage."""
    data, model, passages = job.config.data, job.model, k or 1
    inputs, longest, tokens = passages + (model.null_document != "none"), data.max_source_length, 0
    groups = groups_of(model, job.mesh, job.config.train.optimizer.accumulate)
    together = inputs * max(1, size // groups.count) if groups is not None else inputs
    if source_tokens and groups is not None:
        tokens = max(longest, together * source_tokens)
    length, packed = input_shape(longest, tokens, together, data.length_step, longest)
    embeddings = _rows(job, jnp.float32, size, passages, model.embedding_width)
    scored = model.lexical or model.fusion or model.reranked
    return assemble(
        _questions(job, size), *_tokens(job, size, inputs, length),
        source_places=_rows(job, jnp.int32, groups.count, packed) if packed else None,
        doc_mask=_rows(job, bool, size, passages),
        doc_embeddings=None if model.lexical or model.reranked else embeddings,
        doc_ids=_rows(job, jnp.int32, size, k) if k else None,
        doc_scores=_rows(job, jnp.float32, size, k) if scored else None)


def _train_batch(job: Job, source_tokens: int) -> Batch:
    """`_batch` with the sizes of training."""
    config = job.config
    return _batch(job, config.train.batch_size, config.retrieval.k, source_tokens)


def _questions(job: Job, size: int) -> QuestionBatch:
    """An abstract batch of questions as QuestionTokens makes it, of the greatest length."""
    data, classes = job.config.data, job.config.classes
    question = _tokens(job, size, data.max_question_length)
    return QuestionBatch(
        *question, *_tokens(job, size, data.max_source_length // 2),
        *_tokens(job, size, 1 if classes else data.max_target_length),
        _rows(job, jnp.float32, size), *(question if job.config.head_classes else ()))
