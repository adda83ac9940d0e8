"""The Python API: train a model, open it again, ask it, score it, give it another index.

    rag = rag_jax.load("runs/quickstart", run="rag_sequence")
    answer, = rag.ask(["Who is the President of Peru?"], num_beams=4)
    answer.text, answer.log_prob, answer.passages[0].title, answer.passages[0].posterior

The configuration of a run that is opened is decided here, and nowhere else.
"""

import contextlib
import dataclasses
import operator
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rag_jax import conversion, files, hosts, locks, process
from rag_jax.config import (
    Config,
    ConfigError,
    EvalConfig,
    TrainConfig,
    config_files,
    overrides,
    rules,
)
from rag_jax.data.corpora import Passages
from rag_jax.data.question_sources import load_examples
from rag_jax.documents import workdir as documents
from rag_jax.models.rag import TOWERS
from rag_jax.retrieval.manifest import check_encoder
from rag_jax.retrieval.publish import staged, staging
from rag_jax.training import changes, document_encoder, indexing, pretrained
from rag_jax.training import run as training
from rag_jax.training import workdir as workdirs
from rag_jax.training.ingested import open_ingested
from rag_jax.training.job import Index, Job, fingerprint
from rag_jax.training.opened import Path, Questions, Rag, check_recall_questions
from rag_jax.training.run_index import open_index, placed
from rag_jax.training.untrained import check_parts, open_untrained, untrained_job


def load(source: Path | None = None, run: str | None = None, *, step: int | None = None,
         index: Path | None = None, config: Config | Mapping[str, Any] | None = None) -> Rag:
    """Opens a trained model with its index.

    Args:
      source: a workdir, of `train` or of `ingest`; a RAG checkpoint of Hugging Face, by folder or
        name; or None: the towers that `config` names (model.generator.pretrained,
        model.retriever.pretrained), as they are.
      run: one of the workdir's runs; None = the first of them that began. Of towers that `config`
        names, how they answer: rag_token (None), rag_sequence, fid.
      step: checkpoint; None = the best by dev score.
      index: folder of an index, or name of one in the workdir; None = the one that trained. A
        checkpoint of Hugging Face holds none, nor do towers: name a folder that was built by the
        same document encoder for the same generator.
      config: fields to replace, {"retrieval.where": "device", ...}; or a whole configuration, of
        the workdir or of the run.

    Raises:
      RetrievalError: the index was built by another document encoder, or is damaged.
      ConfigError, CheckpointError, HubError: nothing there to open, or fields that do not fit.
    """
    training.be_quiet()
    process.take_library_products()
    step = None if step is None else _whole(step)
    if source is None:
        return _open_towers(run, step, index, config)
    path = workdirs.named("source", source).absolute()
    if (answering := documents.answering(path)) != path:
        if index is None and _checked(
                config, lambda: workdirs.read_run(answering, run)).retrieval.k:
            index = path / documents.INDEX
        return load(answering, run, step=step, index=index, config=config)
    if documents.exists(path):
        if step is not None:
            raise ConfigError(f"step={step}: {source} has documents, and nothing was trained there")
        return open_ingested(path, run, index, config)
    local = workdirs.exists(path) or path.is_dir() and not (path / "config.json").is_file()
    if not local:
        return _open_checkpoint(str(source), run, step, index, config)
    run, config = _run_config(path, run, config)
    if index is not None and not config.retrieval.k:
        raise ConfigError(f"index {str(index)!r}: run {run!r} reads no passages; leave it out")
    if not config.retrieval.k and config.eval.k not in (0, workdirs.eval_of(path, run).k):
        raise ConfigError(f"config.eval.k={config.eval.k}: run {run!r} reads no passages; leave it "
                          "out, or set 0")
    job = training.open_job(config, path)
    opened = open_index(job, run, None if index is None else str(index)) if (
        config.retrieval.k) else None
    params, meta = pretrained.load_params(job, run, step)
    if opened is not None and not job.model.lexical:
        check_encoder(opened.path, opened.manifest,
                      fingerprint(job.model, params["document_encoder"])
                      if config.train.document_encoder == "refresh"
                      else meta["encoder_fingerprint"])
    return Rag(job, run, params, placed(job, opened),
               document_encoder=document_encoder.reader(job, run))


def _whole(step: int) -> int:
    try:  # an integer of numpy becomes one of Python
        return operator.index(step)
    except TypeError:
        raise ConfigError(f"step={step!r}: must be the number of a checkpoint, or None for the "
                          "best") from None


def _run_config(path: pathlib.Path, run: str | None, config: Config | Mapping[str, Any] | None,
                indexes: bool = False) -> tuple[str, Config]:
    """(name of a workdir's run, its configuration with fields replaced).

    indexes: it is opened to build an index.

    Raises:
      ConfigError: the workdir has no such run, or was trained with another value of a field.
    """
    config = _checked(config, lambda: workdirs.read_run(path, run))
    run = workdirs.run_of(path, config, run)
    config, record = overrides.for_run(config, run), workdirs.read(path)
    changes.check_opened(config, overrides.for_run(record, run), path, indexes)
    return run, changes.check_classes(config, record.classes, path)


def _checked(config: Config | Mapping[str, Any] | None, base: Callable[[], Config]) -> Config:
    """A whole configuration, or that of `base` with fields replaced, which is read only then.

    Raises:
      ConfigError: a value of it is not allowed.
    """
    if isinstance(config, Config):
        return rules.validate(config, resolved=True)
    return rules.changed(base(), config)


def _open_checkpoint(source: str, run: str | None, step: int | None, index: Path | None,
                     config: Config | Mapping[str, Any] | None) -> Rag:
    """Opens a RAG checkpoint of Hugging Face: its tokenizers, query encoder and generator."""
    checkpoint = pretrained.described(source)
    if not {"query_encoder", "generator"} <= set(checkpoint.towers):
        raise ConfigError(f"{source}: a {checkpoint.family} with {', '.join(checkpoint.towers)}; "
                          "name a RAG checkpoint, which has a query encoder and a generator, or a "
                          "workdir")
    if run is not None or step is not None:
        raise ConfigError(f"run, step: for workdirs, which {source} is not")
    if index is None:
        raise ConfigError(f"{source} has no passages: name index=, the folder of an index that was "
                          "built for its encoders (rag_jax.build_index, or training with "
                          f"config.model.rag.pretrained={source} and config.train.steps=0)")
    own = dataclasses.replace(conversion.config_of(checkpoint), eval=EvalConfig())
    config = _checked(config, lambda: own)
    check_parts(config)
    changes.check_checkpoint(config, own, source)
    _check_retrieves(config)
    defaults = pretrained.generation_defaults(config, source)
    config = pretrained.with_generation_defaults(config, defaults)
    named = overrides.replace(config, {"model.rag.pretrained": source})
    job = untrained_job(config, named, pathlib.Path(source))
    return open_untrained(job, named, ("query_encoder", "generator"),
                          open_index(job, config.runs[0], str(index)), defaults)


def _open_towers(run: str | None, step: int | None, index: Path | None,
                 config: Config | Mapping[str, Any] | None) -> Rag:
    """Opens the towers that a configuration names, with an index of their document encoder."""
    config = _config_of_towers(run, config)
    if step is not None:
        raise ConfigError(f"step={step}: for workdirs; without one the towers are as they are")
    if index is None or not (files.can_exist(str(index)) and pathlib.Path(str(index)).is_dir()):
        raise ConfigError(f"index={index}: without a workdir, name the folder of an index that was "
                          "built for these towers (rag_jax.build_index)")
    defaults = pretrained.generation_defaults(config, config.model.sources["generator"])
    config = pretrained.resolve(config)
    job = untrained_job(config, config, pathlib.Path(index).absolute())
    return open_untrained(
        job, config, TOWERS, open_index(job, config.runs[0], str(index)), defaults)


def _config_of_towers(run: str | None, config: Config | Mapping[str, Any] | None,
                      indexes: bool = False) -> Config:
    """The configuration of a run without a workdir, before the towers' architectures are read.

    indexes: as for `_run_config`.

    Raises:
      ConfigError: a tower without a source, or a run that needs training or reads no passages.
    """
    if not isinstance(config, Config):
        config = overrides.replace(Config(), config)
    rules.check_sections(config)
    usual = Config() if config.train.steps else Config(train=TrainConfig(steps=0))
    changes.check_untrained(config, usual, "without a workdir, the default is", indexes)
    asked = {"train.steps": 0, **({"runs": (run,)} if run else {})}
    config = rules.validate(overrides.replace(config, asked))
    config = overrides.for_run(config, config.runs[0])
    missing = [tower for tower in TOWERS if tower not in config.model.sources]
    if missing:
        raise ConfigError(f"without a workdir, name the source of the "
                          f"{' and the '.join(missing)}: config.model.generator.pretrained and "
                          "config.model.retriever.pretrained")
    _check_retrieves(config)
    check_parts(config)
    return config


def _check_retrieves(config: Config) -> None:
    """Raises ConfigError where no passages are read that an encoder finds."""
    for name in ("retriever", "k"):
        if (value := getattr(config.retrieval, name)) in ("bm25", 0):
            raise ConfigError(f"run {config.runs[0]!r}: without a workdir, passages are read that "
                              f"an encoder finds, and config.retrieval.{name} is {value}; leave "
                              "the field out, or name another run")


def train(config: Config | Path, workdir: Path,
          profile: tuple[int, int] | None = None) -> dict[str, Any]:
    """Trains everything that a configuration asks for, or goes on where it was interrupted.

    Args:
      config: a configuration, or the name of a config file, "configs/quickstart.py".
      workdir: the folder of everything that is made.
      profile: (start, steps) for a trace of jax.profiler in WORKDIR/RUN/profile of each run: the
        steps of this call before it begins, and the steps in it.

    Returns:
      What report.json says: scores of every run, seconds and bytes, seed and versions.

    Raises:
      Preempted: a signal came, and what was trained is saved; the same call goes on.
      InUseError: another process writes into the workdir.
      ConfigError, TrainingError, CheckpointError, RetrievalError: each says what to do.
    """
    process.keep_memory()  # for the whole process, as in a command: training is most of its work
    process.take_library_products()
    if isinstance(config, str | os.PathLike):
        config = config_files.load_file(os.fspath(config))
    if not isinstance(config, Config):
        raise ConfigError(f"config: {config!r:.60} is neither a Config nor the name of a config "
                          "file, such as 'configs/quickstart.py'")
    return training.train(config, workdirs.named("workdir", workdir), profile)


def build_index(passages: Path, out: Path, workdir: Path | None = None, *, run: str | None = None,
                queries: Path | None = None, overwrite: bool = False,
                config: Config | Mapping[str, Any] | None = None) -> Index:
    """Indexes the passages of a file for a run: by its document encoder, or their words for BM25.

    A build that was interrupted goes on where it was.

    Args:
      passages: whatever `config.data.passages` can name, split as `config.data.chunk_words` says.
      out: the index folder to publish.
      workdir: of the run; None = an index for `load` without one, by the encoder, and with the
        tokens of the generator, that `config` names.
      run: one of the workdir's runs; None = the first of them that began.
      queries: file of questions on which to measure recall; None = the dev questions, or the
        passages' own vectors with noise where there is no workdir.
      overwrite: replace another index at `out`.
      config: as for `load`.

    Raises:
      InUseError: another process builds at `out`, or writes into the workdir that `out` is in.
      ConfigError: a field that does not fit; or an encoder that is no retriever, without a workdir
        in which it is trained to be one.
    """
    training.be_quiet()
    process.take_library_products()
    target = workdirs.named("out", out).absolute()
    with workdirs.writing(target):
        if workdir is None:
            config, trained = _config_of_towers(run, config, indexes=True), None
            pretrained.check_retriever(config)
            config = pretrained.resolve(config)
            for line in pretrained.length_notes(config):
                hosts.say(line)
            job = untrained_job(config, config, target)
        else:
            path = documents.answering(workdirs.named("workdir", workdir).absolute())
            if documents.exists(path):
                raise ConfigError(
                    f"--workdir={workdir}: a workdir of rag_jax.ingest, where nothing is trained "
                    "and the index is that of its documents; leave it out, and name encoder and "
                    "generator by --config.model")
            run, config = _run_config(path, run, config, indexes=True)
            if not config.retrieval.k:
                raise ConfigError(f"run {run!r} reads no passages, so that nothing would read the "
                                  "index; name another run")
            trained = path / run
            job = training.open_job(config, path)
        return _build(job, trained, str(passages), target, queries, overwrite)


def update_index(index: Path, workdir: Path | None = None, *,
                 add: Path | Passages = (), delete: str | Iterable[str] = (),
                 run: str | None = None, queries: Questions | None = None,
                 compact: bool | None = None,
                 config: Config | Mapping[str, Any] | None = None) -> Index:
    """Adds passages to an index and deletes others from it; see `Rag.edit`.

    Args:
      index: folder of an index, or name of one in the workdir.
      workdir, run, config: as for `load`.
      add, delete, queries, compact: as for `Rag.edit`.
    """
    rag = load(workdir, run, index=index, config=config)
    rag.edit(add, delete, queries=queries, compact=compact)
    return rag.index


def _build(job: Job, trained: pathlib.Path | None, passages: str, out: pathlib.Path,
           queries: Path | None, overwrite: bool) -> Index:
    """trained: the folder of the run whose encoders embed; None = the encoders of job.config."""
    check_recall_questions(job, queries)
    asked = None if queries is None else load_examples(
        queries, data_dir=job.config.data.data_dir)
    with contextlib.ExitStack() as claim:
        # The store is made again each time, as the file may have changed; embedding is resumed.
        hosts.lead(lambda: claim.enter_context(staging(out, "store")))
        locks.check_shared(out)
        folder = staged(out, "store") / "store"
        job = indexing.job_of_file(job, out.name, passages, job.config.data.chunk_words, folder)
        if job.model.lexical:
            store = job.prepared.stores[out.name]
            return indexing.index_store_words(job, store, out, overwrite)
        params = (pretrained.load(job, pretrained.ENCODERS) if trained is None
                  else pretrained.restore_run(trained, job.model, job.mesh)[0])
        return indexing.index_stores(
            job, params, out.parent, (out.name,) if overwrite else (), asked)[out.name]
