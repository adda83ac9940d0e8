"""A trained run, opened again: to evaluate it, to ask it, to give it another memory."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from rag_jax import files, hosts, locks, overrides
from rag_jax.answering import Answerer
from rag_jax.config import Config, ConfigError
from rag_jax.data.question_files import Example, checked_questions
from rag_jax.data.tasks import load_examples
from rag_jax.retrieval.bm25 import Bm25Index, build_bm25
from rag_jax.retrieval.index import PassageIndex
from rag_jax.retrieval.publish import publishing
from rag_jax.training import on_device, pretrained, workdir
from rag_jax.training.answer_settings import make_answerer
from rag_jax.training.indexing import WORD_INDEXES, all_hosts, index_stores, job_of_file
from rag_jax.training.job import Job, fingerprint
from rag_jax.training.run import be_quiet, open_job
from rag_jax.types import Answer


@dataclasses.dataclass(frozen=True)
class Trained:
    """Parameters of a run with its data and memory; `index` is None for a closed-book run."""

    job: Job
    run: str
    params: Any
    index: PassageIndex | Bm25Index | None

    def answerer(self, **changes: Any) -> Answerer:
        """Decoding as the configuration sets it; `changes` replace arguments of `Answerer`."""
        return make_answerer(self.job, self.index, **changes)

    def answer(self, questions: str | Sequence[str]) -> list[Answer]:
        """Answers questions, each with its evidence; a string is one question.

        A single question is a batch of its own, always padded to the longest input: the second
        one, whatever its length, runs what was compiled for the first.

        Raises:
          DataError: a question is blank, or no string.
        """
        return list(self.answer_each(questions))

    def answer_each(self, questions: str | Sequence[str]) -> Iterator[Answer]:
        """`answer`, with the answers of each batch as soon as they are there."""
        questions = checked_questions(questions)
        if not questions:
            return
        batch_size = self.job.config.eval.batch_size if len(questions) > 1 else 1
        answerer = self.answerer(batch_size=batch_size,
                                 length_step=self.job.config.data.max_source_length)
        tokens = self.job.tokenize([Example(str(i), text, ())
                                    for i, text in enumerate(questions)])
        yield from answerer.decode_each(
            self.params, tokens, answerer.retrieve(self.params, tokens))


def open_trained(config: Config, path: pathlib.Path, run: str | None = None,
                 step: int | None = None, index: str | None = None) -> Trained:
    """Restores a run's parameters and opens its memory.

    Args:
      config: of the workdir, or of the run; what makes the run this one is set here either way,
        and of the workdir's `eval`, if it is not changed, the run's own takes the place.
      path: the workdir.
      run: one of config.runs; None = the first of them that began.
      step: checkpoint; None = the best by dev score.
      index: folder of an index, or name of one in the workdir; None = the one that trained.

    Raises:
      RetrievalError: the index was built by another document encoder, or is damaged.
      ConfigError, CheckpointError: nothing there to restore.
    """
    be_quiet()
    path = path.absolute()
    run = workdir.run_of(path, config, run)
    config, saved = overrides.for_run(config, run), workdir.read(path)
    if config.eval == saved.eval:
        config = dataclasses.replace(config, eval=workdir.eval_of(path, run))
    trained = saved.classes
    if config.classes != trained:
        raise ConfigError(f"config.eval.labels: {path} was trained with the classes "
                          f"{', '.join(trained) or '(none)'}; leave config.eval.labels and "
                          "config.model.head as they are")
    job = open_job(config, path)
    opened = _open_index(job, run, index) if config.retrieval.k else None
    params, meta = pretrained.load_params(job, run, step)
    if opened is not None and not job.model.lexical:
        opened.check_encoder(fingerprint(job.model, params["document_encoder"])
                             if config.train.document_encoder == "refresh"
                             else meta["encoder_fingerprint"])
        opened = on_device.open_index(config, job.prepared.format, job.mesh, opened)
    return Trained(job, run, params, opened)


def _open_index(job: Job, run: str, named: str | None) -> PassageIndex | Bm25Index:
    """The index that `open_trained` names, before the parameters are read, which takes longer."""
    folders, k = job.workdir / "indexes", job.config.eval.k or job.config.retrieval.k
    if job.model.lexical:
        folders = job.workdir / WORD_INDEXES
    elif job.config.train.document_encoder == "refresh":
        folders = job.workdir / run / "indexes"
    folder = folders / (named or next(iter(job.prepared.memories)))
    if named is not None and not folder.is_dir():
        folder = pathlib.Path(named)
        if not folder.is_dir():
            there = sorted(f.name for f in folders.glob("[!.]*") if f.is_dir())
            raise ConfigError(f"--index={named}: no such folder, and {folders} has "
                              f"{', '.join(there) or 'none'}")
    opened = Bm25Index.open(folder) if job.model.lexical else PassageIndex.open(
        folder, hosts=all_hosts())
    if k > opened.size:
        raise ConfigError(f"config.eval.k={k}: {folder} has {opened.size} passages; set "
                          f"config.eval.k={opened.size} or less")
    return opened


def index_passages(config: Config, path: pathlib.Path, passages: pathlib.Path, out: pathlib.Path,
                   queries: str | None = None, overwrite: bool = False, run: str | None = None
                   ) -> PassageIndex | Bm25Index:
    """Indexes the passages of a file for a run: by its document encoder, or their words for BM25.

    Args:
      config, path: of the workdir or of the run, as for `open_trained`, and the workdir.
      passages: whatever `read_corpus` reads, chunked as `config.data.chunk_words` says.
      out: the index folder to publish.
      queries: file of questions on which to measure recall; None = the dev questions.
      overwrite: replace another index at `out`.
      run: one of config.runs; None = the first of them that began.

    Raises:
      InUseError: another process builds at `out`, or writes into the workdir that `out` is in.
    """
    around = [folder for folder in out.absolute().parents if workdir.exists(folder)]
    with locks.exclusive(around[0]) if around else contextlib.nullcontext():
        return _index_passages(config, path, passages, out, queries, overwrite, run)


def _index_passages(config: Config, path: pathlib.Path, passages: pathlib.Path, out: pathlib.Path,
                    queries: str | None, overwrite: bool, run: str | None
                    ) -> PassageIndex | Bm25Index:
    be_quiet()
    path, out = path.absolute(), out.absolute()
    run = workdir.run_of(path, config, run)
    asked = load_examples(queries, data_dir=config.data.data_dir) if queries else None
    job = open_job(overrides.for_run(config, run), path)
    with contextlib.ExitStack() as claim:

        def stage() -> pathlib.Path:
            """Made anew each time, as the file may have changed; the embedding is what resumes."""
            if hosts.leads():
                claim.enter_context(publishing(out))
                files.discard_folder(files.begin_folder(out / "passages", "store"))
                claim.callback(files.discard_folder, files.begin_folder(out / "passages", "store"))
            return files.begin_folder(out / "passages", "store")

        staging = hosts.first(stage) / "store"
        job = job_of_file(job, out.name, str(passages), config.data.chunk_words, staging)
        if job.model.lexical:
            store = job.prepared.memories[out.name]
            return build_bm25(store, out, overwrite, all_hosts())
        params, _ = pretrained.restore_run(path / run, job.model, job.mesh)
        return index_stores(job, params, out.parent, overwrite, asked)[out.name]
