"""`Rag`, an open model: it answers, retrieves, scores, evaluates, and edits or swaps its index."""

import dataclasses
import operator
import os
import pathlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, overload

import jax
import numpy as np

from rag_jax import evaluation, scoring
from rag_jax.answering import Answerer
from rag_jax.config import Config, ConfigError
from rag_jax.config.rules import changed, check_labels
from rag_jax.data.batches import PASSAGE_TABLE
from rag_jax.data.corpora import Passages, checked_passages, read_corpus
from rag_jax.data.padding import pad_rows
from rag_jax.data.prepare import chunked
from rag_jax.data.question_files import Example, checked_texts, collect, example_of
from rag_jax.data.question_sources import load_examples
from rag_jax.data.questions import QuestionTokens
from rag_jax.data.records import Record
from rag_jax.data.text import encoder_input
from rag_jax.decoding.prefixes import KeptPrefixes
from rag_jax.errors import DataError
from rag_jax.evaluation import Evaluation
from rag_jax.models.rag import FUSION
from rag_jax.retrieval.bm25 import Bm25Index
from rag_jax.retrieval.build import RecallSettings
from rag_jax.retrieval.device import DeviceIndex
from rag_jax.retrieval.hybrid import HybridIndex
from rag_jax.retrieval.manifest import check_encoder
from rag_jax.retrieval.protocol import Passage
from rag_jax.searching import search
from rag_jax.training import changes, document_encoder, indexing, on_device, pretrained
from rag_jax.training import workdir as workdirs
from rag_jax.training.answer_settings import make_answerer
from rag_jax.training.job import Index, Job, fingerprint
from rag_jax.training.run_index import (
    check_k,
    open_index,
    placed,
)
from rag_jax.types import Answer, Evidence, Params

Path = str | os.PathLike[str]
Questions = Path | Sequence[Example | Mapping[str, Any]]
Given = Passages | Evidence | Iterable[Evidence]
SAME_VECTOR = 0.02  # largest relative distance of two vectors of a text by one encoder


@dataclasses.dataclass(eq=False)
class Rag:
    """A model that answers questions from the passages of its index; `load` opens one.

    Attributes:
      job: its configuration, data (tokenizers, questions) and devices.
      run: its name among the workdir's runs.
      params: of its towers, with looped layers.
      index: of the passages that it reads; None for a closed-book run.
      said: the `pretrained.generation_defaults` of a generator that is not trained; they apply to
        the fields of config.eval that a call leaves open.
      prefixes: states of passages that are kept between questions (config.eval.prefix_mib).
      document_encoder: reads its parameters where `params` has none; only passages need them.
    """

    job: Job
    run: str
    params: Params
    index: Index | None
    said: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)
    prefixes: KeptPrefixes = dataclasses.field(default_factory=KeptPrefixes, repr=False)
    document_encoder: Callable[[], Params] | None = dataclasses.field(default=None, repr=False)

    def __repr__(self) -> str:
        return f"Rag({str(self.job.workdir)!r}, run={self.run!r})"

    def __copy__(self) -> "Rag":
        return type(self)(**vars(self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a Rag holds devices and open files: it cannot be pickled, nor copied "
                        "deeply; call rag_jax.load in each process")

    @property
    def config(self) -> Config:
        """The configuration of the run, as it was opened."""
        return self.job.config

    @property
    def answers(self) -> bool:
        """Whether there is a generator; a workdir of `rag_jax.ingest` may have none."""
        return self.has("generator")

    def has(self, tower: str) -> bool:
        """Whether it has the "query_encoder", "document_encoder" or "generator"."""
        return tower in self.params or (
            tower == document_encoder.TOWER and self.document_encoder is not None)

    def encoder(self, tower: str) -> Params:
        """The parameters of the "query_encoder" or of the "document_encoder"."""
        if not self.has(tower):
            raise ConfigError(f"run {self.run!r} has no {tower.replace('_', ' ')}: it has "
                              f"{', '.join(self.params) or 'no encoder at all'}")
        return self.params[tower] if tower in self.params else self.document_encoder()

    def ask(self, questions: str | Iterable[str], *, seed: int | None = None, **how: Any
            ) -> list[Answer]:
        """Answers questions, each with the passages that its answer came from.

        A single question has batch size 1. Questions that fit into one batch are padded to the
        longest possible input, so that later calls, whatever their lengths, compile nothing. A
        reranker compiles for each of its own lengths, at most eight.

        Args:
          questions: as they are asked; a string is one question.
          seed: of the samples of sample=True, which depend only on it and on the question's
            position; None = config.seed.
          **how: fields of `config.eval` to set otherwise: num_beams=4, strategy="marginal", ...

        Raises:
          DataError: a question is blank, or no string.
          ConfigError: a field is unknown, has a wrong value, or contradicts another.
        """
        return list(self.ask_each(questions, seed=seed, **how))

    def ask_each(self, questions: str | Iterable[str], *, seed: int | None = None, **how: Any
                 ) -> Iterator[Answer]:
        """Like `ask`, but yields each answer as soon as it and those before it are ready."""
        questions = checked_texts(questions)
        self._check_answers()
        shape = {"batch_size": 1} if len(questions) == 1 else {}
        if len(questions) <= self._as_asked(how).eval.batch_size:
            shape["length_step"] = self.config.data.max_source_length
        if seed is not None:
            shape["seed"] = changed(self.config, {"seed": seed}).seed
        answerer = self.answerer(how, **shape)
        if not questions:
            return
        tokens = self._tokenize(questions)
        yield from answerer.decode_each(
            self.params, tokens, answerer.retrieve(self.params, tokens))

    def retrieve(self, questions: str | Iterable[str], k: int | None = None
                 ) -> list[list[Evidence]]:
        """The k best passages for each question, best first, with p(z | x) over these k.

        Args:
          questions: as they are asked; a string is one question.
          k: how many; None = as many as the run reads.

        Raises:
          ConfigError: the run reads no passages, or the index has fewer than k, or k is below 1.
        """
        if self.index is None:
            raise ConfigError(f"run {self.run!r} reads no passages: there is nothing to retrieve")
        if k == 0:
            raise ConfigError("k=0: one passage at least")
        answerer = self.answerer({} if k is None else {"k": k})
        tokens = self._tokenize(checked_texts(questions))
        if not len(tokens):
            return []
        queries = answerer.queries(self.params, tokens)
        return answerer.evidence(queries, search(answerer.index, queries, answerer.k))

    def matches(self, question: str) -> bool:
        """Whether any passage has a word of the question. If none has, BM25 scores all passages 0:
        those that it gives are the first of the index, and say nothing of the question. True where
        embeddings take part, and where no passages are read.

        Raises:
          DataError: the question is blank, or no string.
        """
        question, = checked_texts([question])
        return not isinstance(self.index, Bm25Index) or self.index.knows(question)

    @overload
    def log_likelihood(self, questions: str, answers: str | Iterable[str]) -> float: ...

    @overload
    def log_likelihood(self, questions: Iterable[str], answers: str | Iterable[str]
                       ) -> np.ndarray: ...

    def log_likelihood(self, questions: str | Iterable[str], answers: str | Iterable[str]
                       ) -> float | np.ndarray:
        """log p(answer | question) in nats, marginalised over the passages retrieved.

        With `config.model.head=label_token` the probability of a class is that of its token among
        all tokens, while the `log_prob` of an answer is normalised over the labels.

        Args:
          questions, answers: a text each, or lists of equal length. Of an answer that is longer
            than `config.data.max_target_length` only the beginning is scored, with a warning.

        Returns:
          A float for texts, float32[Q] for lists.

        Raises:
          DataError: a question or an answer is blank, or no string.
          ConfigError: there is no generator.
        """
        asked, given = checked_texts(questions), checked_texts(answers, "answer")
        self._check_answers()
        if len(asked) != len(given):
            raise ConfigError(f"{len(asked)} questions and {len(given)} answers: give as many of "
                              "one as of the other")
        if not self.config.classes:
            self._warn_of_cuts(given)
        tokens, answerer = self._tokenize(asked, given), self.answerer()
        if not asked:
            return np.zeros(0, np.float32)
        values = answerer.log_likelihoods(
            self.params, tokens, answerer.retrieve(self.params, tokens))["log_p"]
        return float(values[0]) if isinstance(questions, str) else values

    def embed_queries(self, questions: str | Iterable[str], *, batch_size: int | None = None,
                      length_step: int | None = None) -> np.ndarray:
        """The query encoder's vectors float32[Q, E], whose inner products search the index.

        The products are the logits of p(z | x): the model's scale is a factor of these vectors.

        batch_size, length_step: as in `answering.Settings`; None = the configuration's.
        """
        self.encoder("query_encoder")
        tokens = self._tokenize(checked_texts(questions))
        return self._embedder(batch_size, length_step).embed_questions(self.params, tokens)

    def embed_passages(self, passages: Given | str | Iterable[str], *,
                       batch_size: int | None = None, length_step: int | None = None
                       ) -> np.ndarray:
        """The document encoder's vectors float32[N, E] of passages, or of texts without a title.

        Args:
          passages: as for `edit`, or texts; a string is one text.
          batch_size, length_step: as for `embed_queries`.
        """
        encoder, data = self.encoder("document_encoder"), self.config.data
        given = list(checked_passages(passages, untitled=True))
        tokenizer = self.job.prepared.retriever_tokenizer
        rows = encoder_input(tokenizer, [p.title for p in given], [p.text for p in given],
                             data.max_passage_length, encoder=self.config.model.retriever)
        return self._embedder(batch_size, length_step).embed(
            encoder, *pad_rows(rows, data.max_passage_length, tokenizer.pad))

    def swap(self, index: Path) -> None:
        """Reads the passages of another index from now on; nothing is trained again.

        Args:
          index: folder of an index, or name of one in the workdir.

        Raises:
          RetrievalError: it was built by another document encoder or from tokens of another
            tokenizer, or is damaged.
          ConfigError: there is no such folder, the index has fewer passages than config.eval.k or
            no tokens of this generator, or the run reads no passages.
        """
        if self.index is None:
            raise ConfigError(f"run {self.run!r} reads no passages: it has no index to swap")
        opened = open_index(self.job, self.run, str(index), self.answers)
        if not self.job.model.lexical:
            check_encoder(opened.path, opened.manifest,
                          self.index.manifest["encoder_fingerprint"])
            indexing.check_encoder_tokens(opened, self.job)
        self.index = placed(self.job, opened)

    def add(self, passages: Path | Given, *, compact: bool | None = None) -> None:
        """Adds passages to the index, as `edit` does."""
        self.edit(passages, compact=compact)

    def delete(self, ids: str | Iterable[str], *, compact: bool | None = None) -> None:
        """Deletes passages from the index by their ids, as `edit` does."""
        self.edit(delete=ids, compact=compact)

    def edit(self, add: Path | Given = (), delete: str | Iterable[str] = (), *,
             queries: Questions | None = None, compact: bool | None = None) -> None:
        """Publishes a new version of the index, with passages deleted and added, and reads that
        from now on. Only added passages are embedded.

        The edit starts from the folder's current version, whichever process has published it.
        Processes that have an earlier version open keep it. A killed edit changes nothing, or,
        where all of it was done, is published by the next one. With `retrieval.where=device`, no
        other thread may ask meanwhile.

        Args:
          add: passages, each an id, a title and a text, a dictionary of them, or an `Evidence` of
            `retrieve`; or a file, as for `build_index`.
          delete: ids; a string is one id. An id that is deleted and added is replaced.
          queries: questions on which recall is measured, as for `questions`; None = the dev
            questions, and where there are none, passages with noise.
          compact: build the whole index again; None = if edits have made its search take twice as
            long.

        Raises:
          RetrievalError: an id to delete does not exist, or one to add does already; the index is
            of another encoder; or no passage, or fewer than config.eval.k, would be left.
          InUseError: another process writes into the index or into the workdir that it is in.
          ConfigError: the run reads no passages or has no document encoder, the index is of another
            generator, or queries are given for BM25.
        """
        if self.index is None:
            raise ConfigError(f"run {self.run!r} reads no passages: it has no index to edit")
        check_recall_questions(self.job, queries)
        gone = checked_texts(delete, "id")
        job, embedder, vectors = self.job, None, None
        if PASSAGE_TABLE in self.index.passages.token_tables:
            indexing.check_tokens(self.index, job.prepared)
        if not job.model.lexical:
            encoder, name = self.encoder("document_encoder"), self.index.manifest[
                "encoder_fingerprint"]
            if fingerprint(job.model, encoder) != name:
                check_vectors(self)
            embedder = indexing.passage_embedder(job, self.answerer().model, encoder, name)
            if queries is None and "dev" in job.prepared.splits:
                queries = indexing.recall_questions(job)
            if queries is not None:
                vectors = self.answerer().embed_questions(
                    self.params, job.tokenize(self.questions(queries)))
        path = pathlib.Path(self.index.path).absolute()
        with workdirs.writing(path):
            index = indexing.with_words(job, indexing.edit_passages(
                job, path, embedder, _passages(add, self.config), gone,
                RecallSettings(vectors, seed=self.config.seed), compact, self.answers))
        if isinstance(self.index, DeviceIndex):
            index = on_device.updated(self.index, index, vectors, job.config, job.prepared.format)
        self.index = index

    def questions(self, source: Questions | None = None) -> Sequence[Example]:
        """Questions with their answers.

        Args:
          source: a split of the workdir; a file, or another source of `config.data`; a list of
            examples, or of dictionaries such as {"question": "Who?", "answers": ["Lima"]}, with
            the fields that `load_examples` describes; None = the split test, or dev where there is
            none.

        Raises:
          DataError: the source is none of these.
          FileNotFoundError: no such file.
        """
        splits = self.job.prepared.splits
        if source is None:
            source = "test" if "test" in splits or "dev" not in splits else "dev"
        if isinstance(source, os.PathLike):
            source = os.fspath(source)
        if not isinstance(source, str):
            if not isinstance(source, Sequence) or not all(
                    isinstance(each, Example | Mapping) for each in source):
                raise DataError(f"questions: {source!r:.60}; give a split, a file, or a list of "
                                'dictionaries such as {"question": "Who?", "answers": ["Lima"]}')
            named = (_named(number, each) for number, each in enumerate(source, 1))
            return collect("questions", named, hidden=True) if source else source
        if source in splits:
            return splits[source]
        if source.isidentifier():  # it can only be the name of a split
            raise DataError(f"questions: no split {source!r} in {self.job.workdir}, which has "
                            f"{', '.join(splits) or 'no questions'}: name another, a file of "
                            "questions (.jsonl, .csv, .tsv), or give a list")
        return load_examples(source, data_dir=self.config.data.data_dir, hidden=True)

    def evaluate(self, questions: Questions | None = None, *,
                 order: np.ndarray | None = None, likelihood: bool = True, overlap: bool = True,
                 **how: Any) -> Evaluation:
        """Answers questions and scores the answers by `config.eval.metrics`.

        Args:
          questions: as for `questions`.
          order: int[Q], for every question the one whose passages it reads; None = its own.
          likelihood: also compute the likelihood of each question's first target, or reference
            answer if it has no targets; it takes one more pass.
          overlap: also score the questions, and the answers, that overlap with the training split.
          **how: fields of `config.eval` to set otherwise; max_examples takes the first ones.
        """
        self._check_answers()
        asked, config = self.questions(questions), self._as_asked(how)
        check_labels(config)
        config = config.eval
        if not len(asked):
            raise DataError("questions: there are none; an evaluation needs one at least")
        if "max_examples" in how:  # the configured one is for evaluations during training
            asked = asked[: config.max_examples or len(asked)]
        if order is not None:
            if self.index is None:
                raise ConfigError(f"order: run {self.run!r} reads no passages, which another "
                                  "question could read; leave it out")
            order = _checked_order(order, len(asked))
        answerer, tokens = self.answerer(how), self.job.tokenize(asked)
        rows = answerer.retrieve(self.params, tokens)
        train = self.job.prepared.splits.get("train", ()) if overlap else ()
        return evaluation.evaluate(
            answerer, self.params, tokens,
            rows if order is None or rows is None else rows[order],
            likelihood=likelihood, how=config, train=train)

    def choose_k(self, ks: Sequence[int]) -> dict[str, float]:
        """Chooses the number of passages that answers the dev questions best.

        Arguments and result as of `evaluation.choose_k`; ConfigError without dev questions.
        """
        try:
            numbers = [operator.index(k) for k in ks]
        except TypeError:
            numbers = []
        if not numbers or min(numbers) < 1:
            raise ConfigError(f"choose_k: {ks!r:.60}; name numbers of passages, such as [5, 10]")
        check_labels(self.config)
        return evaluation.choose_k(lambda k: self.answerer(k=k), self.params,
                                   self._dev(), numbers, self.config.eval)

    def choose_weight(self, weights: Sequence[float]) -> dict[str, float]:
        """Chooses the weight of words that retrieves the best passages for the dev questions, and
        retrieves with it from now on.

        The measure is the mean reciprocal rank of the first passage with an answer among those that
        are read, as it differs between weights that find equally many answers.

        Returns:
          "bm25_weight", the best weight; and the measure of each, in percent, as "dev_mrr@K, weight
          W".

        Raises:
          ConfigError: the run does not retrieve by a convex combination of embeddings and words,
            there are no dev questions, or `weights` are no weights.
        """
        if not isinstance(self.index, HybridIndex) or self.index.fusion.kind != "convex":
            raise ConfigError(
                "a weight of words (--choose-weight, Rag.choose_weight) is chosen for "
                "config.retrieval.retriever=hybrid and config.retrieval.fusion=convex; this run "
                f"has {self.config.retrieval.retriever} and {self.config.retrieval.fusion}")
        given = _array(weights)
        if given.ndim != 1 or not given.size or given.dtype.kind not in "iuf":
            raise ConfigError(f"choose_weight: {weights!r:.60}; name weights, such as [0.0, 0.5]")
        configs = {weight: changed(self.config, {
            "retrieval.bm25_weight": weight, "train.bm25_weight_rate": None})
            for weight in given.astype(float).tolist()}
        answerer, dev = self.answerer(), self._dev()
        queries, scores = answerer.queries(self.params, dev), {}
        for weight in configs:
            queries["weight"] = weight
            rows = search(answerer.index, queries, answerer.k)
            ranks = scoring.answer_ranks(dev.examples, [
                [self.index.passages[int(row)] for row in each] for each in rows])
            scores[weight] = 100 * float(np.mean(1 / (1 + ranks)))
        best = max(scores, key=scores.__getitem__)
        self.job = dataclasses.replace(self.job, config=configs[best])
        self.params = {tower: p for tower, p in self.params.items() if tower != FUSION}
        return {"bm25_weight": best, **{f"dev_mrr@{answerer.k}, weight {weight:g}": score
                                        for weight, score in scores.items()}}

    def answerer(self, how: Mapping[str, Any] | None = None, **changes: Any) -> Answerer:
        """The answerer of batches of tokenized questions.

        Args:
          how: fields of `config.eval` to set otherwise.
          **changes: fields of `answering.Settings` to set otherwise.
        """
        if jax.sharding.AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types:
            raise ConfigError("jax.set_mesh: a mesh with explicit axes is set, and the model has "
                              "one of its own (config.mesh); call it outside, or set "
                              "axis_types=(jax.sharding.AxisType.Auto,)")
        if how and how.get("k") and self.index is None:
            raise ConfigError(f"k={how['k']!r}: run {self.run!r} reads no passages; leave it out")
        job = dataclasses.replace(self.job, config=self._as_asked(how or {}))
        if how and "k" in how and self.index is not None:
            check_k(job.config, self.index)
        return make_answerer(job, self.index, self.prefixes, **changes)

    def _embedder(self, batch_size: int | None, length_step: int | None) -> Answerer:
        shape = {"batch_size": batch_size, "length_step": length_step}
        return self.answerer(**{name: n for name, n in shape.items() if n is not None})

    def _dev(self) -> QuestionTokens:
        """The dev questions, by which settings are chosen."""
        if "dev" not in self.job.prepared.splits:
            raise ConfigError(f"{self.job.workdir} has no dev questions, by which it is chosen; "
                              "set config.eval.k or config.retrieval.bm25_weight, or train with "
                              "config.data.dev")
        return self.job.tokens("dev")

    def _as_asked(self, how: Mapping[str, Any]) -> Config:
        asked = {**dict.fromkeys(self.said), **how}
        config = changed(self.config, {f"eval.{name}": value for name, value in asked.items()})
        config = changes.check_classes(config, self.config.classes, self.job.workdir)
        return pretrained.with_generation_defaults(config, self.said)

    def _check_answers(self) -> None:
        """Raises ConfigError where there is no generator."""
        if not self.answers:
            raise ConfigError(f"{self.job.workdir}: no generator is named, so there is no answer; "
                              "`retrieve` gives passages. Run rag_jax.ingest again, with "
                              "config.model.generator.pretrained")

    def _warn_of_cuts(self, answers: Sequence[str]) -> None:
        """Warns of the first answer of which only a part is scored."""
        longest = self.config.data.max_target_length
        for number, ids in enumerate(
                self.job.prepared.generator_tokenizer.encode_answers(answers), 1):
            if len(ids) >= longest:
                warnings.warn(f"answer {number} has {len(ids)} tokens: the first {longest - 1} and "
                              f"</s> are scored (config.data.max_target_length={longest})",
                              stacklevel=3)
                break

    def _tokenize(self, questions: Sequence[str], answers: Sequence[str] | None = None
                  ) -> QuestionTokens:
        given = [()] * len(questions) if answers is None else [(answer,) for answer in answers]
        return self.job.tokenize([Example(str(i), *pair) for i, pair in enumerate(
            zip(questions, given, strict=True))])


def _named(number: int, given: Example | Mapping[str, Any]) -> tuple[str, Example]:
    """A question of a list with its place there, for errors."""
    where = f"question {number}"
    if isinstance(given, Mapping):
        return where, example_of(Record(where, dict(given)), number)
    return where, given._replace(answers=given.answers or ())


def _passages(given: Path | Given, config: Config) -> Iterator[Passage]:
    """The passages of a file, split as `config.data.chunk_words` says, or those given, checked."""
    if isinstance(given, str | os.PathLike):
        return chunked(read_corpus(given), config.data.chunk_words)
    return checked_passages(given)


def check_recall_questions(job: Job, queries: Questions | None) -> None:
    """Raises ConfigError where questions are given to measure the recall of BM25."""
    if queries is not None and job.model.lexical:
        raise ConfigError("queries: BM25 compares a question with all passages, so that there is "
                          "no recall to measure; leave them out")


def _checked_order(order: Any, count: int) -> np.ndarray:
    """The `order` of `Rag.evaluate` for `count` questions, as an array."""
    array = _array(order)
    if array.shape != (count,) or array.dtype.kind not in "iu" or not (
            (array >= 0) & (array < count)).all():
        raise DataError(f"order: {order!r:.60}; expected {count} integers from 0 to {count - 1}")
    return array


def _array(given: Any) -> np.ndarray:
    """Numbers as an array; ragged lists, which have no shape, as an array of one object."""
    try:
        return np.asarray(given)
    except ValueError:
        return np.array(None)


def check_vectors(rag: Rag) -> None:
    """Raises a RetrievalError where another document encoder has built the index, or by other
    tokens.

    The same encoder gives the first passage the same vector, up to the rounding of bfloat16.
    Fingerprints are no proof: they contain settings of training (dropout) that no source stores.
    """
    ours, indexed = rag.embed_passages([rag.index.passages[0]])[0], rag.index.embeddings([0])[0]
    if ours.shape != indexed.shape or (
            np.linalg.norm(ours - indexed) > SAME_VECTOR * np.linalg.norm(indexed)):
        check_encoder(rag.index.path, rag.index.manifest,
                      fingerprint(rag.job.model, rag.encoder("document_encoder")))
    indexing.check_encoder_tokens(rag.index, rag.job)
