"""RAG fine-tuning of one run: its stage, its batches, its guard against collapse."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from rag_jax import hosts
from rag_jax.config import ConfigError, EvalConfig, TrainConfig, overrides
from rag_jax.data.batches import RagBatcher
from rag_jax.evaluation import evaluate
from rag_jax.models import rag
from rag_jax.models.stack import unstack_layers
from rag_jax.scoring import headline
from rag_jax.searching import jit_embed, search
from rag_jax.steps import has_checkpoint
from rag_jax.training import document_encoder, on_device, step
from rag_jax.training.answer_settings import make_answerer
from rag_jax.training.collapse import CollapseGuard
from rag_jax.training.job import Index, Job, groups_of
from rag_jax.training.loop import BatchSource, Stage, run_stage
from rag_jax.training.pretrained import ENCODERS
from rag_jax.training.reranker import reranked
from rag_jax.training.sources import RagSource, finder
from rag_jax.training.stages import build_stage
from rag_jax.training.warm_up import WarmTowers

# Fields of config.eval that do not change the score of a checkpoint; the metric's name is compared.
SAME_SCORE = ("batch_size", "memory_mib", "prefix_mib", "prompt_lookup", "metrics", "kilt_pages")
# What config.eval means with None, where something is trained.
OPEN = {"num_beams": 1, "min_length": 0, "length_penalty": 0.0, "no_repeat_ngram_size": 0,
        "forced_bos": False, "forced_eos": False}


def fine_tune(job: Job, run: str, warm: WarmTowers, index: Index,
              profile: tuple[int, int] | None = None) -> None:
    """Fine-tunes one run; its checkpoints are in its folder, the best by dev score among them.

    Args:
      job: with the configuration of the run.
      run: the name and the folder of the run.
      warm: the towers to start from, which the run takes over; others are initialised.
      index: where passages are retrieved from.
      profile: (steps of this command before a trace begins, steps in it), for RUN/profile.
    """
    config, folder = job.config, job.workdir / run
    begun = hosts.exchange(has_checkpoint(folder))[0]
    if document_encoder.is_apart(job) and not (begun and document_encoder.is_saved(folder)):
        document_encoder.save(folder, warm.params((document_encoder.TOWER,)))
    if begun:
        warm.forget()
    source, complete, refresher = _rag_source(job, index)
    answerer = make_answerer(job, index if config.retrieval.k else None)
    dev = job.tokens("dev")
    if config.eval.max_examples:
        dev = job.tokenize(dev.examples[: config.eval.max_examples])

    def score(params: Any) -> Mapping[str, float]:
        if refresher is not None:
            refresher.refresh(params, 0)  # the next step embeds all passages again, as of that step
        return evaluate(answerer, unstack_layers(params), dev, how=config.eval).metrics

    def first() -> Any:
        towers = _towers(job)
        fresh = tuple(tower for tower in towers if tower not in rag.TOWERS)
        params = {**warm.params([tower for tower in towers if tower in rag.TOWERS]),
                  **step.fresh_params(job.model, fresh, config.seed, job.mesh)}
        warm.forget()
        return {tower: params[tower] for tower in towers}

    meta = {"encoder_fingerprint": index.manifest["encoder_fingerprint"]}
    run_stage(rag_stage(job, run, source, complete, initial=first, meta=meta, evaluate=score,
                        best_metric=(headline(config.eval.metrics),),
                        measured=measured(config.eval, answerer.k), profile=profile))
    if refresher is not None:
        index.reload()


def measured(how: EvalConfig, k: int) -> dict[str, str]:
    """The settings of config.eval by which dev scores are measured, where they are not the usual
    ones: a command that resumes may change them, and scores of others are not compared.

    k: passages that a question reads.
    """
    asked = dataclasses.replace(how, **{
        name: usual for name, usual in OPEN.items() if getattr(how, name) is None})
    names = set(overrides.differences(asked, EvalConfig(**OPEN))) - {*SAME_SCORE, "k"}
    return {"k": str(k), **{name: overrides.shown(getattr(asked, name)) for name in sorted(names)}}


def rag_stage(job: Job, run: str, source: BatchSource | None, complete: step.Completion | None,
              **settings: Any) -> Stage:
    """The stage that `fine_tune` runs; without a source, its step can only be compiled."""
    train = job.config.train
    learns = overrides.trains_query_encoder(job.config)
    known = {"query_encoder": train.query_encoder_rate if learns else None,
             "document_encoder": train.document_encoder_rate,
             "generator": train.generator_rate, rag.NULL: 1.0, rag.CLASSIFIER: 1.0,
             rag.FUSION: train.bm25_weight_rate}
    rates = {tower: known[tower] for tower in _towers(job)}
    if train.steps and all(rate is None for rate in rates.values()):
        raise ConfigError(f"config.train: nothing is left to train in run {run!r}, as none of "
                          f"{', '.join(rates)} has a rate")
    return build_stage(
        job, run, rates,
        step.rag_loss(job.model, train.label_smoothing, train.retriever_objective,
                      train.full_information > 0, train.in_batch_negatives),
        train.optimizer, source=source, complete=complete, guard=_collapse_guard(train, rates),
        apart=step.abstract_params(
            job.model, [t for t in job.model.towers if t not in rates], job.mesh),
        steps=train.steps, log_every=train.log_every, save_every=train.save_every,
        eval_every=train.eval_every, keep=train.keep, **settings)


def _towers(job: Job) -> list[str]:
    """The towers that the steps of a run read, in the order of the model's."""
    return [tower for tower in job.model.towers
            if tower != document_encoder.TOWER or not document_encoder.is_apart(job)]


def _collapse_guard(train: TrainConfig, rates: Mapping[str, float | None]) -> CollapseGuard | None:
    """The guard of a run; None = it is off, or no encoder trains that could collapse."""
    if train.collapse_guard == "off" or all(rates.get(tower) is None for tower in ENCODERS):
        return None
    return CollapseGuard(train.collapse_guard, train.collapse_window, train.collapse_threshold)


def _rag_source(job: Job, index: Index) -> tuple[
        BatchSource, step.Completion | None, on_device.Refresher | None]:
    """The batches of the training questions, how the step completes them, and the refresher."""
    config, questions = job.config, job.tokens("train")
    batch_size, k = config.train.batch_size, config.retrieval.k
    if k and config.retrieval.where == "device":
        return on_device.training(job.model, config, job.prepared, questions, index)
    index = reranked(job, index)
    model, lengths = job.model, config.data.length_step
    batcher = RagBatcher(questions, lengths, model.embedding_width, model.null_document != "none",
                         groups_of(model, job.mesh, config.train.optimizer.accumulate))
    find = finder(model, jit_embed(model), functools.partial(search, index, k=k), questions,
                  job.mesh, lengths)
    source = RagSource(batcher, index if k else None, find, batch_size, config.seed,
                       config.retrieval.staleness, job.mesh)
    return source, None, None
