"""The stages of a training run, each a resumable function of the configuration.

    workdir/
      config.json
      data/               tokenizers, passage stores, questions            (prepare)
      retriever/          DPR warm-up: query and document encoder         (warm_up_retriever)
      generator/          BART denoising                                  (warm_up_generator)
      indexes/MEMORY/     embedded passages and ScaNN                      (indexing.index_stores)
      indexes_bm25/MEMORY/  words, where a run retrieves by BM25           (indexing.index_words)
      RUN/                RAG fine-tuning, one folder for each of config.runs   (fine_tune)

A stage that has reached its last step is not run again.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rag_jax import parallel
from rag_jax.answering import jit_embed, search
from rag_jax.config import Config, ConfigError, OptimizerConfig, WarmupConfig
from rag_jax.data.batches import RagBatcher
from rag_jax.data.warmup_batches import DenoisingBatcher, RetrieverBatcher
from rag_jax.evaluation import evaluate
from rag_jax.models import rag
from rag_jax.models.layers import unstack_layers
from rag_jax.retrieval.retriever import Retriever
from rag_jax.training import on_device, pretrained, step
from rag_jax.training.answer_settings import make_answerer
from rag_jax.training.collapse import CollapseGuard
from rag_jax.training.job import Index, Job
from rag_jax.training.loop import BatchSource, PureSource, Stage, run_stage
from rag_jax.training.optim import make_optimizer
from rag_jax.training.pretrained import load_params
from rag_jax.training.sources import RagSource, ask_by_vector, ask_by_words

RETRIEVER = pretrained.ENCODERS


def _stage(job: Job, name: str, towers: Sequence[str], rates: Mapping[str, float],
           loss: step.LossFunction, optimizer: OptimizerConfig, steps: int, source: BatchSource,
           initial: Callable[[], Any] | None = None, complete: step.Completion | None = None,
           guard: CollapseGuard | None = None, **settings: Any) -> Stage:
    """Puts a stage together: optimiser, sharded first state, jitted steps."""
    model, trained = job.model, tuple(rates)
    transform = make_optimizer(optimizer, steps, dict(rates))
    make, abstract, shardings = step.init_state(
        model, tuple(towers), trained, transform, job.config.seed, job.mesh)

    def first_state() -> step.TrainState:
        if initial is None:
            return make()
        params = jax.tree.map(jnp.copy, initial())  # the step donates its state
        first = {tower: params[tower] for tower in trained}
        opt_state = jax.jit(transform.init, out_shardings=shardings.opt_state)(first)
        return step.TrainState(params, opt_state)

    dropout = job.config.seed if step.uses_dropout(model) else None

    def make_step(held: tuple[str, ...] = ()) -> Callable:
        show = None if guard is None else lambda batch: {"doc_ids": batch.doc_ids}
        return step.make_train_step(loss, transform, trained, optimizer.accumulate, dropout,
                                    shardings, job.mesh, complete, held, show)

    if guard is not None:
        settings["frozen_step"] = make_step(tuple(t for t in RETRIEVER if t in trained))
    return Stage(name=name, directory=job.workdir / name, steps=steps, make_state=first_state,
                 abstract_state=abstract, train_step=make_step(), source=source, guard=guard,
                 tensorboard=job.config.tensorboard, **settings)


def _warmup_settings(config: WarmupConfig) -> dict[str, Any]:
    return {"log_every": config.log_every, "save_every": config.save_every, "meta": {}}


def warm_up_retriever(job: Job) -> Any:
    """DPR training of both encoders on the training questions; returns their parameters."""
    config = job.config.retriever_warmup
    given = None
    if "query_encoder" in job.config.model.sources:
        given = functools.partial(pretrained.load, job, RETRIEVER)
        if pretrained.is_retriever(job.config):
            return given()
    store = next(iter(job.prepared.memories.values()))
    batcher = RetrieverBatcher(job.tokens("train"), store, job.config.data.max_passage_length,
                               job.prepared.retriever_tokenizer.pad, config.hard_negatives)
    if config.steps and not len(batcher.rows):
        raise ConfigError(
            "config.retriever_warmup.steps: no training question names a positive passage "
            '("positive_ids"); add them, name pretrained encoders, or steps=0')

    def batch(number: int) -> Any:
        made = batcher.batch(number, config.batch_size, job.config.seed)
        return parallel.put_batch(made, job.mesh)

    stage = _stage(job, "retriever", RETRIEVER, dict.fromkeys(RETRIEVER, 1.0),
                   step.retriever_loss(job.model), config.optimizer, config.steps,
                   PureSource(batch), initial=given, **_warmup_settings(config))
    return run_stage(stage).params


def warm_up_generator(job: Job) -> Any:
    """BART denoising on the warm-up texts; returns the generator's parameters."""
    config, data = job.config.generator_warmup, job.config.data
    if "generator" in job.config.model.sources:
        return pretrained.load(job, ("generator",))
    batcher = DenoisingBatcher(
        job.prepared.warmup_texts, job.prepared.generator_tokenizer, data.max_source_length,
        data.length_buckets, config.mask_ratio, config.span_length, config.permute_sentences)

    def batch(number: int) -> Any:
        made = batcher.batch(number, config.batch_size, job.config.seed)
        return parallel.put_batch(made, job.mesh)

    stage = _stage(job, "generator", ("generator",), {"generator": 1.0},
                   step.seq2seq_loss(job.model), config.optimizer, config.steps,
                   PureSource(batch), **_warmup_settings(config))
    return run_stage(stage).params


def fine_tune(job: Job, run: str, warm: Any, index: Index) -> Any:
    """Fine-tuning of one run; returns the parameters of its best checkpoint by dev score.

    Args:
      job: of the workdir, or of this run.
      run: its name and folder.
      warm: parameters to start from, of all towers but the null document and the classifier.
      index: the memory.
    """
    job = job.of_run(run)
    config, towers = job.config, job.model.towers
    source, complete, refresher = _rag_source(job, index)
    answerer = make_answerer(job, index if config.retrieval.k else None)
    dev = job.tokens("dev")
    if config.eval.max_examples:
        dev = job.tokenize(dev.examples[: config.eval.max_examples])

    def score(params: Any) -> Mapping[str, float]:
        if refresher is not None:
            refresher.refresh(params, 0)  # before the next step, all are again, as of that step
        return evaluate(answerer, unstack_layers(params), dev,
                        how=config.eval).metrics

    def first() -> Any:
        fresh = tuple(tower for tower in towers if tower not in warm)
        params = {**warm, **step.fresh_params(job.model, fresh, config.seed, job.mesh)}
        return {tower: params[tower] for tower in towers}

    meta = {"encoder_fingerprint": index.manifest["encoder_fingerprint"]}
    run_stage(rag_stage(job, run, source, complete, initial=first, meta=meta, evaluate=score))
    if refresher is not None:
        index.reload()
    return load_params(job, run)[0]


def rag_stage(job: Job, run: str, source: BatchSource | None, complete: step.Completion | None,
              **settings: Any) -> Stage:
    """The stage that `fine_tune` runs; without a source its step can be compiled, not run."""
    train, towers = job.config.train, job.model.towers
    rates = {"query_encoder": train.query_encoder_rate, "generator": train.generator_rate}
    if train.document_encoder == "refresh":
        rates["document_encoder"] = train.document_encoder_rate
    rates |= {tower: 1.0 for tower in (rag.NULL, rag.CLASSIFIER) if tower in towers}
    rates = {tower: rate for tower, rate in rates.items() if rate is not None}
    if not rates:
        raise ConfigError("config.train: query_encoder_rate and generator_rate are both none: "
                          "nothing is left to train")
    return _stage(
        job, run, towers, rates, step.rag_loss(job.model, train.label_smoothing),
        train.optimizer, train.steps, source, complete=complete,
        guard=_collapse_guard(job.config), log_every=train.log_every, save_every=train.save_every,
        eval_every=train.eval_every, keep=train.keep, **settings)


def _collapse_guard(config: Config) -> CollapseGuard | None:
    """None where it is off, or where no query encoder trains that could collapse."""
    train = config.train
    if train.collapse_guard == "off" or train.query_encoder_rate is None or not config.retrieval.k:
        return None
    return CollapseGuard(train.collapse_guard, train.collapse_window, train.collapse_threshold)


def _rag_source(job: Job, index: Index) -> tuple[
        BatchSource, step.Completion | None, on_device.Refresher | None]:
    """Batches of the training questions; how the step completes them; what refreshes the index."""
    config, questions = job.config, job.tokens("train")
    batch_size, k = config.train.batch_size, config.retrieval.k
    if k and config.retrieval.where == "device":
        return on_device.training(job.model, config, job.prepared, questions, index)
    model = job.model
    batcher = RagBatcher(questions, config.data.length_buckets, model.embedding_width,
                         model.null_document != "none")
    ask = ask_by_words(questions) if model.lexical else ask_by_vector(
        jit_embed(model), questions, job.mesh)
    retriever = Retriever(index, ask, functools.partial(search, index, k=k)) if k else None
    source = RagSource(batcher, retriever, batch_size, config.seed, config.retrieval.staleness,
                       job.mesh)
    return source, None, None
