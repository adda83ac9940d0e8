"""A whole training run: every stage in order, then the report.

    workdir/
      config.json
      weights.json          what towers of a source and the reranker began from  (weights)
      data/                 tokenizers, passage stores, questions              (prepare)
      retriever/            DPR warm-up: query and document encoder            (warm_up)
      generator/            BART denoising                                     (warm_up)
      indexes/NAME/         embedded passages and ScaNN                        (indexing)
      indexes_bm25/NAME/    words, where a run retrieves by BM25               (indexing)
      RUN/                  RAG fine-tuning, a folder for each of config.runs  (fine_tuning)
      RUN/document_encoder/ where it is frozen, and no step reads it   (document_encoder)

A stage that has reached its last step is not run again.
"""

import contextlib
import dataclasses
import functools
import logging
import pathlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from rag_jax import answering, files, hosts, locks, parallel, scoring
from rag_jax.config import Config, ConfigError, overrides, rules
from rag_jax.countries.world import build_world
from rag_jax.data.inputs import is_prepared
from rag_jax.data.prepare import prepare
from rag_jax.data.prepared import Prepared, open_prepared
from rag_jax.documents import workdir as documents
from rag_jax.hub import families
from rag_jax.retrieval.bm25 import bm25_missing
from rag_jax.retrieval.index import PassageIndex
from rag_jax.retrieval.protocol import RetrievalError
from rag_jax.retrieval.scann import scann_missing
from rag_jax.steps import made_of_data, steps_taken, warn_of_unfinished
from rag_jax.training import indexing, pretrained, weights, workdir
from rag_jax.training.answer_settings import decoding_settings
from rag_jax.training.checkpoint import Checkpointer
from rag_jax.training.clock import Clock
from rag_jax.training.fine_tuning import fine_tune
from rag_jax.training.job import Job
from rag_jax.training.preemption import stopped_at_once
from rag_jax.training.report import evaluate_runs, write_report
from rag_jax.training.warm_up import WarmTowers, warm_up_generator, warm_up_retriever


@functools.cache
def be_quiet() -> None:
    """Hides what libraries log below errors. It acts once in a process, so that users can set the
    levels of the loggers afterwards."""
    for name in ("absl", "orbax", "bm25s"):
        logging.getLogger(name).setLevel(logging.ERROR)


def open_job(config: Config, path: pathlib.Path, check: bool = False) -> Job:
    """The workdir's data and the mesh; nothing is trained.

    Args:
      config: of the workdir.
      path: the workdir.
      check: prepare missing data, and compare the data with their sources, as `prepare` does;
        otherwise nothing is written.

    Raises:
      InUseError: data are to be checked, and another process holds the workdir.
      ConfigError: data are missing, and `check` is False.
    """
    if check:
        with locks.exclusive(path):
            prepared = _prepare(config, path)
    elif hosts.exchange(is_prepared(path))[0]:
        prepared = open_prepared(config, path)
    else:
        raise ConfigError(
            f"{path} has no passages and no questions to open. If rag_jax.convert wrote it, it "
            "holds checkpoints alone: name it as config.model.rag.pretrained, "
            "config.model.retriever.pretrained or config.model.generator.pretrained. If its "
            "training has not come so far, give the command again by which it began (python -m "
            f"rag_jax.train --workdir={path}, with its --config and fields)")
    decoding_settings(config, prepared.generator_tokenizer)  # complains before training
    return Job(config, path, prepared, parallel.make_mesh(config.mesh))


def _prepare(config: Config, path: pathlib.Path) -> Prepared:
    has_own = is_prepared(path) and bool(made_of_data(path))  # before that, data are made again
    folders = functools.partial(pretrained.tokenizer_folder, config, required=not has_own)
    return hosts.first(lambda: prepare(config, path, folders, build_world) if hosts.leads()
                       else open_prepared(config, path))


def _remove_leftovers(path: pathlib.Path) -> None:
    """Removes what killed processes left unfinished in all folders that commands write into."""
    for pattern in ("", "*", "*/*", "*/*/*"):  # WORKDIR/RUN/evaluation/SPLIT is the deepest
        for folder in path.glob(pattern) if pattern else (path,):
            files.remove_leftovers(folder)


@contextlib.contextmanager
def _made_again(folder: pathlib.Path) -> Iterator[None]:
    """Adds to errors about a folder that training has made how to have it made again."""
    try:
        yield
    except RetrievalError as error:
        if not str(error).startswith(str(folder)):
            raise
        raise RetrievalError(f"{error} Or remove {folder} and give the same command again, which "
                             "makes the same from the same files.") from None


@dataclasses.dataclass(frozen=True)
class Warm:
    """A workdir before fine-tuning: data, towers after their warm-up, indexes of embeddings."""

    job: Job
    towers: WarmTowers
    indexes: dict[str, PassageIndex]
    clock: Clock

    def fine_tune(self, run: str, profile: tuple[int, int] | None = None) -> None:
        """Fine-tunes one run; one that is done is left as it is."""
        with self.clock.time(run):
            job = self.job.of_run(run)
            if hosts.leads():
                workdir.begin_run(job.workdir, run, job.config.eval)
            indexes = indexing.index_words(job) if job.model.lexical else self.indexes
            index = indexing.with_words(job, indexes[job.trains_with])
            fine_tune(job, run, self.towers, index, profile)


def warm_up(config: Config, path: pathlib.Path) -> Warm:
    """Runs or resumes the stages before fine-tuning that the runs of `config` need.

    The caller holds the lock of the workdir (`locks.exclusive`) while it uses the result.

    Raises: as `train`.
    """
    be_quiet()
    asked, config = config, pretrained.resolve(config)
    for line in pretrained.notes(asked, config):
        hosts.say(line)
    pretrained.warn_of_unfinished_sources(config)
    retrievers = {overrides.for_run(config, run).retrieval.retriever for run in config.runs}
    if retrievers - {"dpr"} and (missing := bm25_missing()):
        raise ConfigError(f"config.retrieval.retriever: BM25 needs {missing}")
    if config.retrieval.index == "scann" and retrievers - {"bm25"} and (missing := scann_missing()):
        raise ConfigError(f"config.retrieval.index=scann: {missing}")
    check_batches(config, path)
    check_processes(config, retrievers)
    path = workdir.start(config, path)
    clock = Clock(path)
    with clock.time("data"):
        if hosts.leads():
            _remove_leftovers(path)
        with _made_again(path / "data"):
            job = open_job(config, path, check=True)
        check_k(job)
        check_scores(job)
        if config.model.reranker.pretrained and any(
                overrides.for_run(config, run).retrieval.k for run in config.runs):
            weights.check(config, path, (families.RERANKER,))
        hosts.say(f"{path}: {len(job.prepared.splits['train'])} training questions, "
                  f"{len(job.prepared.stores[job.trains_with])} passages")
    warm: dict[str, Any] = {}
    if retrievers - {"bm25"}:  # which has nothing to learn
        with clock.time("retriever warm-up"):
            warm |= warm_up_retriever(job)
    with clock.time("generator warm-up"):
        warm |= warm_up_generator(job)
    with clock.time("index"):
        indexes = {}
        if retrievers - {"bm25"}:
            with _made_again(path / "indexes"):
                indexes = indexing.index_stores(job, warm, path / "indexes")
        words = indexing.index_words(job) if "bm25" in retrievers else {}
    for name, index in [*indexes.items(), *words.items()]:
        hosts.say(f"index {name}: {indexing.describe(index)}")
    return Warm(job, WarmTowers(job, warm), indexes, clock)


def check_batches(config: Config, path: pathlib.Path) -> None:
    """Raises ConfigError where the batches of a stage cannot be split over the devices, or say
    nothing, before the first stage runs. A stage that is done may have run on other devices."""
    stages = [(run, "train") for run in config.runs]
    if "generator" not in config.model.sources:
        stages.append(("generator", "generator_warmup"))
    if not overrides.lexical(config) and not pretrained.is_retriever(config):
        stages.append(("retriever", "retriever_warmup"))
    mesh = parallel.make_mesh(config.mesh)
    taken = hosts.exchange([steps_taken(path / folder) for folder, _ in stages])[0]
    for (_, section), done in zip(stages, taken, strict=True):
        stage = getattr(config, section)
        parts = parallel.shards(mesh, "batch") * stage.optimizer.accumulate
        if done < stage.steps and stage.batch_size % parts:
            raise ConfigError(f"config.{section}.batch_size={stage.batch_size}: must be a multiple "
                              f"of {parts} (config.mesh's data x fsdp x optimizer.accumulate)")
        alone = section == "retriever_warmup" and stage.batch_size == 1 and (
            stage.pairs != "gold" or not stage.hard_negatives)
        if alone and stage.steps and not done:
            raise ConfigError("config.retriever_warmup.batch_size=1: the passages of a batch are "
                              "each other's negatives, and one alone has none to be told from; set "
                              "2 or more")


def check_processes(config: Config, retrievers: Collection[str]) -> None:
    """Raises ConfigError for what several processes cannot do, before the first stage runs."""
    answering.check_processes(config.eval.exact_nodes, config.eval.prefix_mib)
    count, parts = hosts.count(), config.retrieval.scann_parts
    if "hybrid" in retrievers and config.retrieval.index == "scann" and parts >= count > 1:
        raise ConfigError(f"config.retrieval.scann_parts={parts}: each of {count} processes would "
                          "hold a share of the parts, and retriever=hybrid needs all; set fewer "
                          "parts than processes, or start one process")


def check_k(job: Job) -> None:
    """Raises ConfigError where a run would ask for more passages than there are."""
    for run in job.config.runs:
        config = overrides.for_run(job.config, run)
        if not config.retrieval.k:
            continue
        for name, k in (("retrieval.k", config.retrieval.k), ("eval.k", config.eval.k)):
            for store_name, store in job.prepared.stores.items():
                if k > len(store):
                    raise ConfigError(
                        f"config.{name}={k}: {store_name} has {len(store)} passages; set at most "
                        "so many, in the same workdir, which has trained nothing with it yet")


def check_scores(job: Job) -> None:
    """Raises ConfigError where the questions of the report, or those of dev by which runs are still
    to be trained, cannot be scored as config.eval says; a run that is done has its own."""
    how, splits = job.config.eval, job.prepared.splits
    if how.metrics == ("qa",):  # which any question can be; no split is read here
        return
    runs = [overrides.for_run(job.config, run) for run in job.config.runs]
    taken = hosts.exchange([steps_taken(job.workdir / run) for run in job.config.runs])[0]
    to_train = [run for run, done in zip(runs, taken, strict=True) if done < run.train.steps]
    reported = "test" if "test" in splits else "dev"
    asked = [(reported, splits[reported])]
    if to_train:
        asked.append(("dev", splits["dev"][: how.max_examples or None]))
    for split, examples in asked:
        try:
            scoring.check(examples, how, any(run.retrieval.k for run in to_train))
        except ConfigError as error:
            raise ConfigError(f"{split} questions: {error}") from None


def train(config: Config, path: pathlib.Path, profile: tuple[int, int] | None = None
          ) -> dict[str, Any]:
    """Runs or resumes everything that `config` asks for and returns the report.

    The report covers all trained runs of the workdir, those of earlier commands too. Fields that
    none of config.runs uses, as each sets its own value, are printed.

    Args:
      config: what to train.
      path: the workdir.
      profile: (start, steps): in each run, the steps of this command to let pass before a trace of
        jax.profiler begins in WORKDIR/RUN/profile, and the steps in it.

    Raises:
      Preempted: a signal came; the same call goes on.
      InUseError: another process writes into the workdir.
      ConfigError, TrainingError, CheckpointError, RetrievalError: each says what to do.
    """
    rules.validate(config, trains=True)
    for line in overrides.set_otherwise(config, overrides.not_default(config)):
        hosts.say(f"{line}; the value of the configuration is for other runs")
    hosts.check_same(overrides.texts(config))
    parallel.make_mesh(config.mesh)  # all complain before anything is written
    workdir.check_place(path)
    if documents.exists(path):
        raise ConfigError(f"--workdir={path}: is a workdir of rag_jax.ingest; name another, "
                          "or train it with rag_jax.ingest --train")
    with stopped_at_once(), locks.exclusive(path):
        runs = dict.fromkeys((*_trained(path, config.runs), *config.runs))
        warm = warm_up(dataclasses.replace(config, runs=tuple(runs)), path)
        for run in config.runs:
            warm.fine_tune(run, profile)
        with warm.clock.time("report", anew=True):
            results = evaluate_runs(warm.job, warm.indexes, warm.towers)
        return write_report(warm.job, results, warm.clock.secs)


def _trained(path: pathlib.Path, asked: Sequence[str]) -> list[str]:
    """The runs of a workdir that have taken their last step, as process 0 sees it. Says which have
    begun and have not, and are not asked for."""
    def begun() -> tuple[tuple[str, ...], int]:
        config = workdir.read(path) if workdir.exists(path) else None
        return (config.runs, config.train.steps) if config else ((), 0)

    (runs, steps), trained = hosts.exchange(hosts.lead(begun))[0], []
    for run in runs:  # all processes open it, or none
        with Checkpointer(path / run, read_only=True) as checkpointer:
            latest = checkpointer.latest_step()
        trained += [run] * (latest is not None and latest >= steps)
        if latest is not None and run not in asked:
            warn_of_unfinished(
                path / run, steps, ", and is left out of the report", taken=latest)
    return trained
