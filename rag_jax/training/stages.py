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
from collections.abc import Callable, Mapping
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


def _stage(job: Job, name: str, rates: Mapping[str, float | None], loss: step.LossFunction,
           optimizer: OptimizerConfig, initial: Callable[[], Any] | None = None,
           complete: step.Completion | None = None, **settings: Any) -> Stage:
    """Puts a stage together: optimiser, sharded first state, jitted steps.

    Args:
      job: with the configuration of the stage's run.
      name: the stage's name, and its folder in the workdir.
      rates: the learning rate of every tower that the loss reads, relative to the schedule; None
        where the tower is frozen.
      loss: what is minimised.
      optimizer: settings of AdamW.
      initial: makes the parameters to start from; None = drawn with the configuration's seed.
      complete: as for `step.make_train_step`.
      settings: further fields of `Stage`.
    """
    model, guard = job.model, settings.get("guard")
    adamw = make_optimizer(optimizer, settings["steps"], rates)
    make, abstract, shardings = step.init_state(
        model, tuple(rates), adamw, job.config.seed, job.mesh)

    def first_state() -> step.TrainState:
        if initial is None:
            return make()
        params = jax.tree.map(jnp.copy, initial())  # the step donates its state
        first = {tower: params[tower] for tower in adamw.towers}
        opt_state = jax.jit(adamw.init, out_shardings=shardings.opt_state)(first)
        return step.TrainState(params, opt_state)

    dropout = job.config.seed if step.uses_dropout(model) else None
    show = None if guard is None else lambda batch: {"doc_ids": batch.doc_ids}

    def make_step(frozen: tuple[str, ...] = ()) -> Callable:
        return step.make_train_step(
            loss, adamw, shardings, optimizer.accumulate, dropout, complete, frozen, show)

    if guard is not None:
        settings["frozen_step"] = make_step(tuple(t for t in RETRIEVER if t in adamw.towers))
    return Stage(name=name, directory=job.workdir / name, make_state=first_state,
                 abstract_state=abstract, train_step=make_step(),
                 tensorboard=job.config.tensorboard, **settings)


def _warmup_settings(config: WarmupConfig) -> dict[str, Any]:
    return {"steps": config.steps, "log_every": config.log_every,
            "save_every": config.save_every, "meta": {}}


def warm_up_retriever(job: Job) -> Any:
    """DPR training of both encoders on the training questions; returns their parameters."""
    config = job.config.retriever_warmup
    given = None
    if "query_encoder" in job.config.model.sources:
        given = functools.partial(pretrained.load, job, RETRIEVER)
        if pretrained.is_retriever(job.config):
            return given()
    store = job.prepared.memories[job.trains_with]
    batcher = RetrieverBatcher(job.tokens("train"), store, job.config.data.max_passage_length,
                               job.prepared.retriever_tokenizer.pad, config.hard_negatives)
    if config.steps and not len(batcher.rows):
        raise ConfigError(
            "config.retriever_warmup.steps: no training question names a positive passage "
            '("positive_ids"); add them, name pretrained encoders, or steps=0')

    def batch(number: int) -> Any:
        made = batcher.batch(number, config.batch_size, job.config.seed)
        return parallel.put_batch(made, job.mesh)

    stage = _stage(job, "retriever", dict.fromkeys(RETRIEVER, 1.0),
                   step.retriever_loss(job.model), config.optimizer, initial=given,
                   source=PureSource(batch), **_warmup_settings(config))
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

    stage = _stage(job, "generator", {"generator": 1.0}, step.seq2seq_loss(job.model),
                   config.optimizer, source=PureSource(batch), **_warmup_settings(config))
    return run_stage(stage).params


def fine_tune(job: Job, run: str, warm: Any, index: Index,
              profile: tuple[int, int] | None = None) -> Any:
    """Fine-tuning of one run; returns the parameters of its best checkpoint by dev score.

    Args:
      job: of the workdir, or of this run.
      run: its name and folder.
      warm: parameters to start from, of all towers but the null document and the classifier.
      index: where passages are retrieved from.
      profile: (steps of this command before a trace begins, steps in it), for RUN/profile.
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
    run_stage(rag_stage(job, run, source, complete, initial=first, meta=meta, evaluate=score,
                        profile=profile))
    if refresher is not None:
        index.reload()
    return load_params(job, run)[0]


def rag_stage(job: Job, run: str, source: BatchSource | None, complete: step.Completion | None,
              **settings: Any) -> Stage:
    """The stage that `fine_tune` runs; without a source its step can be compiled, not run."""
    train = job.config.train
    known = {"query_encoder": train.query_encoder_rate, "document_encoder": None,
             "generator": train.generator_rate, rag.NULL: 1.0, rag.CLASSIFIER: 1.0}
    if train.document_encoder == "refresh":
        known["document_encoder"] = train.document_encoder_rate
    rates = {tower: known[tower] for tower in job.model.towers}
    if not any(rate is not None for rate in rates.values()):
        raise ConfigError("config.train: query_encoder_rate and generator_rate are both none: "
                          "nothing is left to train")
    return _stage(
        job, run, rates, step.rag_loss(job.model, train.label_smoothing), train.optimizer,
        source=source, complete=complete, guard=_collapse_guard(job.config), steps=train.steps,
        log_every=train.log_every, save_every=train.save_every, eval_every=train.eval_every,
        keep=train.keep, **settings)


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
