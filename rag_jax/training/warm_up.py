"""The stages before fine-tuning: DPR training of the retriever, denoising of the generator."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from rag_jax import parallel
from rag_jax.config import Config, ConfigError, WarmupConfig
from rag_jax.data.warmup_batches import DenoisingBatcher, PairBatcher, RetrieverBatcher
from rag_jax.training import pretrained, step, weights
from rag_jax.training.job import Job, groups_of
from rag_jax.training.loop import PureSource, run_stage
from rag_jax.training.pretrained import ENCODERS
from rag_jax.training.stages import build_stage
from rag_jax.types import Params

_STAGES = {"retriever": ENCODERS, "generator": ("generator",)}  # folders, and the towers in them


class WarmTowers:
    """The towers of a workdir as they are before fine-tuning; they are read where they are not in
    memory, so that a run need not hold what it began from. All processes call each method alike.
    """

    def __init__(self, job: Job, held: Params):
        self._job, self._held = job, held

    def params(self, towers: Sequence[str]) -> Params:
        """The parameters of towers, by name."""
        missing = [tower for tower in towers if tower not in self._held]
        given = [tower for tower in missing if _is_given(self._job.config, tower)]
        self._held |= _load(self._job, given) if given else {}
        for folder, stored in _STAGES.items():
            if (set(missing) - set(given)) & set(stored):
                self._held |= pretrained.restore_towers(
                    self._job.workdir / folder, stored, self._job.model, self._job.mesh)[0]
        return {tower: self._held[tower] for tower in towers}

    def forget(self) -> None:
        """Holds nothing in memory any more."""
        self._held = {}


def _is_given(config: Config, tower: str) -> bool:
    """Whether a tower is as its source has it, so that no stage trains it before fine-tuning."""
    return tower in config.model.sources and (
        tower not in ENCODERS or pretrained.is_retriever(config))


def warm_up_retriever(job: Job) -> Any:
    """DPR training of both encoders on questions or passages; returns their parameters."""
    config = job.config.retriever_warmup
    if _is_given(job.config, "query_encoder"):
        return _load(job, ENCODERS)
    given = None
    if "query_encoder" in job.config.model.sources:
        given = functools.partial(_load, job, ENCODERS)
    store = job.prepared.stores[job.trains_with]
    data = job.config.data
    tokenizer, lengths = job.prepared.retriever_tokenizer, (data.max_passage_length,
                                                            data.length_step)
    if config.pairs != "gold":
        if config.steps and len(store) < 2:
            raise ConfigError(
                f"config.retriever_warmup.pairs={config.pairs}: {job.trains_with} has one passage, "
                "and two are needed to tell them apart; add passages, or set steps=0")
        batcher = PairBatcher(store, tokenizer, config.pairs, data.max_question_length, *lengths,
                              job.model.retriever)
    else:
        batcher = RetrieverBatcher(job.tokens("train"), store, *lengths, tokenizer.pad,
                                   config.hard_negatives)
        if config.steps and not len(batcher.rows):
            raise ConfigError(
                "config.retriever_warmup.steps: no training question names a positive passage "
                '("positive_ids"); add them, name pretrained encoders, set '
                "config.retriever_warmup.pairs=words, cloze or crops, which need none, or steps=0")
    return _train(job, "retriever", ENCODERS, step.retriever_loss(job.model), config, batcher,
                  given)


def warm_up_generator(job: Job) -> Any:
    """BART denoising on the warm-up texts; returns the generator's parameters."""
    config, data = job.config.generator_warmup, job.config.data
    if _is_given(job.config, "generator"):
        return _load(job, ("generator",))
    batcher = DenoisingBatcher(
        job.prepared.warmup_texts, job.prepared.generator_tokenizer, data.max_source_length,
        data.length_step, config.mask_ratio, config.span_length, config.permute_sentences,
        groups_of(job.model, job.mesh, config.optimizer.accumulate))
    return _train(job, "generator", ("generator",), step.seq2seq_loss(job.model), config, batcher)


def _load(job: Job, towers: Sequence[str]) -> dict[str, Any]:
    """The parameters of towers from their sources, which must not have changed."""
    weights.check(job.config, job.workdir, towers)
    return pretrained.load(job, towers)


def _train(job: Job, name: str, towers: Sequence[str], loss: step.LossFunction,
           config: WarmupConfig, batcher: DenoisingBatcher | PairBatcher | RetrieverBatcher,
           initial: Callable[[], Any] | None = None) -> Any:
    """Trains towers at one rate on batches without retrieval; returns their parameters."""
    def batch(number: int) -> Any:
        made = batcher.batch(number, config.batch_size, job.config.seed)
        return parallel.put_batch(made, job.mesh)

    stage = build_stage(job, name, dict.fromkeys(towers, 1.0), loss, config.optimizer, initial,
                        source=PureSource(batch), meta={}, steps=config.steps,
                        log_every=config.log_every, save_every=config.save_every)
    return run_stage(stage).params
