"""The Python API: train a model, open it again, ask it, score it, give it another index.

    rag = rag_jax.load("runs/quickstart", run="rag_sequence")
    answer, = rag.ask(["Who is the President of Peru?"], num_beams=4)
    answer.text, answer.log_prob, answer.passages[0].title, answer.passages[0].posterior

What a run is decides its configuration: that is settled here, and nowhere else.
"""

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rag_jax import (
    config_files,
    conversion,
    evaluation,
    files,
    hosts,
    locks,
    overrides,
    parallel,
    rules,
)
from rag_jax.answering import Answerer, search
from rag_jax.config import Config, ConfigError
from rag_jax.data.batches import PASSAGE_TABLE
from rag_jax.data.prepared import Prepared, generator_format
from rag_jax.data.question_files import Example, checked_questions
from rag_jax.data.tasks import load_examples
from rag_jax.data.text import Tokenizer, encoder_input, pad_rows
from rag_jax.evaluation import Evaluation
from rag_jax.models.layers import unstack_layers
from rag_jax.retrieval.bm25 import Bm25Index, build_bm25
from rag_jax.retrieval.index import PassageIndex
from rag_jax.retrieval.protocol import Passage
from rag_jax.retrieval.publish import publishing
from rag_jax.training import indexing, on_device, pretrained
from rag_jax.training import run as training
from rag_jax.training import workdir as workdirs
from rag_jax.training.answer_settings import make_answerer
from rag_jax.training.job import Index, Job, fingerprint
from rag_jax.types import Answer, Evidence

Path = str | os.PathLike[str]


@dataclasses.dataclass
class Rag:
    """A model that answers questions from the passages of its index; `load` opens one.

    Attributes:
      job: its configuration, its data (tokenizers, questions) and the devices.
      run: its name among the workdir's runs.
      params: of all its towers, with looped layers.
      index: the passages that it reads; None for a closed-book run.
    """

    job: Job
    run: str
    params: Any
    index: Index | None

    def __repr__(self) -> str:
        return f"Rag({str(self.job.workdir)!r}, run={self.run!r})"

    @property
    def config(self) -> Config:
        """The configuration of the run, as it was opened."""
        return self.job.config

    def ask(self, questions: str | Sequence[str], **how: Any) -> list[Answer]:
        """Answers questions, each with the passages that its answer came from.

        A single question is a batch of its own, always padded to the longest input: the second
        one, whatever its length, runs what was compiled for the first.

        Args:
          questions: as they are asked; a string is one question.
          **how: fields of `config.eval` to set otherwise: num_beams=4, strategy="marginal", ...

        Raises:
          DataError: a question is blank, or no string.
          ConfigError: no such field, a value that it cannot have, or one that rules out another.
        """
        return list(self.ask_each(questions, **how))

    def ask_each(self, questions: str | Sequence[str], **how: Any) -> Iterator[Answer]:
        """`ask`, which gives the answers of each batch as soon as they are there."""
        questions = checked_questions(questions)
        if not questions:
            return
        answerer = self.answerer(
            how, length_step=self.config.data.max_source_length,
            **({"batch_size": 1} if len(questions) == 1 else {}))
        tokens = self._tokenize(questions)
        yield from answerer.decode_each(
            self.params, tokens, answerer.retrieve(self.params, tokens))

    def retrieve(self, questions: str | Sequence[str], k: int | None = None
                 ) -> list[list[Evidence]]:
        """The best passages for each question, best first, with p(z | x) over those k.

        Args:
          questions: as they are asked; a string is one question.
          k: how many; None = as many as the run reads.

        Raises:
          ConfigError: the run reads no passages, or the index has fewer than k.
        """
        if self.index is None:
            raise ConfigError(f"run {self.run!r} reads no passages: there is nothing to retrieve")
        answerer = self.answerer({} if k is None else {"k": k})
        tokens = self._tokenize(checked_questions(questions))
        if not len(tokens):
            return []
        queries = answerer.queries(self.params, tokens)
        rows = search(self.index, queries, answerer.k)
        scores = self.index.scores(queries, rows) if answerer.model.lexical else np.einsum(
            "BE,BKE->BK", queries, self.index.embeddings(rows))
        p_BK = np.exp(scores - scores.max(axis=1, keepdims=True))
        p_BK /= p_BK.sum(axis=1, keepdims=True)
        return [[Evidence(*self.index.passages[int(row)], float(p))
                 for row, p in zip(*pair, strict=True)] for pair in zip(rows, p_BK, strict=True)]

    def log_likelihood(self, questions: str | Sequence[str], answers: str | Sequence[str]
                       ) -> float | np.ndarray:
        """log p(answer | question) in nats, marginalised over the passages retrieved.

        Args:
          questions, answers: a text each, or as many of one as of the other.

        Returns:
          A float for texts, float32[Q] for lists.
        """
        asked, given = checked_questions(questions), checked_questions(answers)
        if len(asked) != len(given):
            raise ConfigError(f"{len(asked)} questions and {len(given)} answers: give as many of "
                              "one as of the other")
        tokens, answerer = self._tokenize(asked, given), self.answerer()
        if not asked:
            return np.zeros(0, np.float32)
        values = answerer.log_likelihoods(
            self.params, tokens, answerer.retrieve(self.params, tokens))["log_p"]
        return float(values[0]) if isinstance(questions, str) else values

    def embed_queries(self, questions: str | Sequence[str]) -> np.ndarray:
        """The query encoder's vectors float32[Q, E], whose inner products search the index."""
        self._encoder("query_encoder")
        tokens = self._tokenize(checked_questions(questions))
        return self.answerer().embed_questions(self.params, tokens)

    def embed_passages(self, passages: Sequence[Passage | str]) -> np.ndarray:
        """The document encoder's vectors float32[N, E] of passages, or of texts without a title."""
        encoder, data = self._encoder("document_encoder"), self.config.data
        given = [Passage("", "", p) if isinstance(p, str) else p for p in passages]
        tokenizer = self.job.prepared.retriever_tokenizer
        rows = encoder_input(tokenizer, [p.title for p in given], [p.text for p in given],
                             data.max_passage_length)
        return self.answerer().embed(
            encoder, *pad_rows(rows, data.max_passage_length, tokenizer.pad))

    def swap(self, index: Path) -> None:
        """Reads the passages of another index from now on; nothing is trained or compiled again.

        Args:
          index: folder of an index, or name of one in the workdir.

        Raises:
          RetrievalError: it was built by another document encoder, or is damaged.
          ConfigError: no such folder, too few passages, or a run that reads none.
        """
        if self.index is None:
            raise ConfigError(f"run {self.run!r} reads no passages: it has no index to swap")
        opened = _open_index(self.job, self.run, str(index))
        if not self.job.model.lexical:
            opened.check_encoder(self.index.manifest["encoder_fingerprint"])
        self.index = _placed(self.job, opened)

    def questions(self, source: str | Sequence[Example] | None = None) -> Sequence[Example]:
        """Questions with their answers.

        Args:
          source: a split of the workdir; a file, or another source of `config.data`; the examples
            themselves; None = the split test, or dev where there is none.
        """
        splits = self.job.prepared.splits
        if source is None:
            source = "test" if "test" in splits else "dev"
        if not isinstance(source, str):
            return source
        if source in splits:
            return splits[source]
        return load_examples(source, data_dir=self.config.data.data_dir, hidden=True)

    def evaluate(self, questions: str | Sequence[Example] | None = None, **how: Any) -> Evaluation:
        """Answers questions and scores the answers by `config.eval.metrics`.

        Args:
          questions: as for `questions`.
          **how: fields of `config.eval` to set otherwise.
        """
        answerer = self.answerer(how)
        return evaluation.evaluate(
            answerer, self.params, self.job.tokenize(self.questions(questions)),
            how=self._changed(how).eval, train=self.job.prepared.splits.get("train", ()))

    def choose_k(self, ks: Sequence[int]) -> dict[str, float]:
        """The number of passages that answers the dev questions best, as `evaluation.choose_k`."""
        return evaluation.choose_k(lambda k: self.answerer(k=k), self.params,
                                   self.job.tokens("dev"), ks, self.config.eval)

    def answerer(self, how: Mapping[str, Any] | None = None, **changes: Any) -> Answerer:
        """What answers batches of tokenized questions.

        Args:
          how: fields of `config.eval` to set otherwise.
          **changes: arguments of `Answerer` to set otherwise.
        """
        job = dataclasses.replace(self.job, config=self._changed(how or {}))
        if how and "k" in how and self.index is not None:
            _check_k(job.config, self.index)
        return make_answerer(job, self.index, **changes)

    def _changed(self, how: Mapping[str, Any]) -> Config:
        changed = _with(self.config, {f"eval.{name}": value for name, value in how.items()})
        return _check_classes(changed, self.config.classes, self.job.workdir)

    def _tokenize(self, questions: Sequence[str], answers: Sequence[str] | None = None) -> Any:
        given = [()] * len(questions) if answers is None else [(answer,) for answer in answers]
        return self.job.tokenize([Example(str(i), *pair) for i, pair in enumerate(
            zip(questions, given, strict=True))])

    def _encoder(self, tower: str) -> Any:
        if tower not in self.params:
            raise ConfigError(f"run {self.run!r} has no {tower.replace('_', ' ')}: it has "
                              f"{', '.join(self.params)}")
        return self.params[tower]


def load(source: Path, run: str | None = None, *, step: int | None = None,
         index: Path | None = None, config: Config | Mapping[str, Any] | None = None) -> Rag:
    """Opens a trained model with its index.

    Args:
      source: a workdir; or a RAG checkpoint of Hugging Face, by folder or name.
      run: one of the workdir's runs; None = the first of them that began.
      step: checkpoint; None = the best by dev score.
      index: folder of an index, or name of one in the workdir; None = the one that trained. A
        checkpoint of Hugging Face holds none: name a folder that was built for its encoders.
      config: fields to set otherwise, {"retrieval.where": "device", ...}; or a whole configuration
        of the workdir or of the run.

    Raises:
      RetrievalError: the index was built by another document encoder, or is damaged.
      ConfigError, CheckpointError, HubError: nothing there to open, or fields that do not fit.
    """
    training.be_quiet()
    path = pathlib.Path(source).absolute()
    local = workdirs.exists(path) or path.is_dir() and not (path / "config.json").is_file()
    if not local:
        return _open_checkpoint(str(source), run, step, index, config)
    if not isinstance(config, Config):
        config = _with(workdirs.read_run(path, run), config or {})
    run = workdirs.run_of(path, config, run)
    config = _check_classes(overrides.for_run(config, run), workdirs.read(path).classes, path)
    job = training.open_job(config, path)
    opened = _open_index(job, run, None if index is None else str(index)) if (
        config.retrieval.k) else None
    params, meta = pretrained.load_params(job, run, step)
    if opened is not None and not job.model.lexical:
        opened.check_encoder(fingerprint(job.model, params["document_encoder"])
                             if config.train.document_encoder == "refresh"
                             else meta["encoder_fingerprint"])
    return Rag(job, run, params, _placed(job, opened))


def _open_checkpoint(source: str, run: str | None, step: int | None, index: Path | None,
                     config: Config | Mapping[str, Any] | None) -> Rag:
    """A RAG checkpoint of Hugging Face: tokenizers, query encoder and generator as they are."""
    found = pretrained.described(source)
    if not {"query_encoder", "generator"} <= set(found.towers):
        raise ConfigError(f"{source}: a {found.family} with {', '.join(found.towers)}; name a RAG "
                          "checkpoint, which has a query encoder and a generator, or a workdir")
    if run is not None or step is not None:
        raise ConfigError(f"run, step: for workdirs, which {source} is not")
    if index is None:
        raise ConfigError(f"{source} has no passages: name index=, the folder of an index that was "
                          "built for its encoders (rag_jax.build_index, or training with "
                          f"config.model.rag.pretrained={source} and config.train.steps=0)")
    if not isinstance(config, Config):
        config = _with(conversion.config_of(found), config or {})
    named = overrides.replace(config, {"model.rag.pretrained": source})
    tokenizers = [Tokenizer.load(pretrained.tokenizer_folder(named, tower))
                  for tower in ("query_encoder", "generator")]
    prepared = Prepared(*tokenizers, generator_format(config, tokenizers[1]), {}, {})
    job = Job(config, pathlib.Path(source), prepared, parallel.make_mesh(config.mesh))
    opened = _open_index(job, config.runs[0], str(index))
    _check_tokens(opened, prepared)
    params = pretrained.load(dataclasses.replace(job, config=named),
                             ("query_encoder", "generator"))
    return Rag(job, config.runs[0], unstack_layers(params), _placed(job, opened))


def _with(config: Config, changes: Mapping[str, Any]) -> Config:
    return rules.validate(overrides.replace(config, dict(changes)), resolved=True)


def _check_classes(config: Config, trained: tuple[str, ...], path: pathlib.Path) -> Config:
    """Raises ConfigError for other classes than a model was trained with."""
    if config.classes != trained:
        raise ConfigError(f"config.eval.labels: {path} was trained with the classes "
                          f"{', '.join(trained) or '(none)'}; leave config.eval.labels and "
                          "config.model.head as they are")
    return config


def _open_index(job: Job, run: str, named: str | None) -> Index:
    """The index that `load` names, before the parameters are read, which takes longer."""
    folders = job.workdir / "indexes"
    if job.model.lexical:
        folders = job.workdir / indexing.WORD_INDEXES
    elif job.config.train.document_encoder == "refresh":
        folders = job.workdir / run / "indexes"
    folder = folders / (named or job.trains_with)
    if named is not None and not folder.is_dir():
        folder = pathlib.Path(named)
        if not folder.is_dir():
            there = sorted(f.name for f in folders.glob("[!.]*") if f.is_dir())
            raise ConfigError(f"--index={named}: no such folder, and {folders} has "
                              f"{', '.join(there) or 'none'}")
    opened = Bm25Index.open(folder) if job.model.lexical else PassageIndex.open(
        folder, hosts=indexing.all_hosts())
    _check_k(job.config, opened, folder)
    return opened


def _check_k(config: Config, index: Index,
             folder: pathlib.Path | str = "the index") -> None:
    k = config.eval.k or config.retrieval.k
    if k > index.size:
        raise ConfigError(f"config.eval.k={k}: {folder} has {index.size} passages; set "
                          f"config.eval.k={index.size} or less")


def _check_tokens(index: PassageIndex, prepared: Prepared) -> None:
    """Raises ConfigError where an index holds the tokens of another generator's tokenizer."""
    passage, kept = index.passages[0], index.passages.tokens(PASSAGE_TABLE).rows(0)
    if list(kept) != prepared.format.passages([passage.title], [passage.text])[0]:
        raise ConfigError(f"{index.path}: its passages are not in the tokens of this generator; "
                          "build an index for it")


def _placed(job: Job, index: Index | None
            ) -> Index | None:
    """The index where `config.retrieval.where` wants it."""
    if index is None or job.model.lexical:
        return index
    return on_device.open_index(job.config, job.prepared.format, job.mesh, index)


def train(config: Config | str, workdir: Path,
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
    if isinstance(config, str):
        config = config_files.load_file(config)
    return training.train(config, pathlib.Path(workdir), profile)


def build_index(passages: Path, out: Path, workdir: Path, *, run: str | None = None,
                queries: str | None = None, overwrite: bool = False,
                config: Config | Mapping[str, Any] | None = None) -> Index:
    """Indexes the passages of a file for a run: by its document encoder, or their words for BM25.

    A build that was interrupted goes on where it was.

    Args:
      passages: whatever `config.data.passages` can name, split as `config.data.chunk_words` says.
      out: the index folder to publish.
      workdir: of the run.
      run: one of the workdir's runs; None = the first of them that began.
      queries: file of questions on which to measure recall; None = the dev questions.
      overwrite: replace another index at `out`.
      config: as for `load`.

    Raises:
      InUseError: another process builds at `out`, or writes into the workdir that `out` is in.
    """
    training.be_quiet()
    path, target = pathlib.Path(workdir).absolute(), pathlib.Path(out).absolute()
    if not isinstance(config, Config):
        config = _with(workdirs.read_run(path, run), config or {})
    around = [folder for folder in target.parents if workdirs.exists(folder)]
    with locks.exclusive(around[0]) if around else contextlib.nullcontext():
        return _build(config, path, str(passages), target, queries, overwrite,
                      workdirs.run_of(path, config, run))


def _build(config: Config, path: pathlib.Path, passages: str, out: pathlib.Path,
           queries: str | None, overwrite: bool, run: str) -> Index:
    asked = load_examples(queries, data_dir=config.data.data_dir) if queries else None
    job = training.open_job(overrides.for_run(config, run), path)
    with contextlib.ExitStack() as claim:

        def stage() -> pathlib.Path:
            """Made anew each time, as the file may have changed; the embedding is what resumes."""
            if hosts.leads():
                claim.enter_context(publishing(out))
                files.discard_folder(files.begin_folder(out / "passages", "store"))
                claim.callback(files.discard_folder, files.begin_folder(out / "passages", "store"))
            return files.begin_folder(out / "passages", "store")

        staging = hosts.first(stage) / "store"
        job = indexing.job_of_file(job, out.name, passages, config.data.chunk_words, staging)
        if job.model.lexical:
            store = job.prepared.memories[out.name]
            return build_bm25(store, out, overwrite, indexing.all_hosts())
        params, _ = pretrained.restore_run(path / run, job.model, job.mesh)
        return indexing.index_stores(job, params, out.parent, overwrite, asked)[out.name]
