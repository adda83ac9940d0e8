"""The open indexes, and what is computed with each, by programs of a few shapes that are known."""

import concurrent.futures
import copy
import dataclasses
import functools
import gc
import hashlib
import itertools
import json
import pathlib
from collections.abc import Iterator, Sequence, Sized
from typing import Any, NamedTuple

import numpy as np

from rag_jax.answering import Answerer, Beginning, Draws, Watch, keys_of
from rag_jax.config import Config, ConfigError, overrides
from rag_jax.data.question_files import Example
from rag_jax.data.questions import QuestionTokens
from rag_jax.models.generator import in_dtype
from rag_jax.retrieval.protocol import Passage
from rag_jax.searching import search
from rag_jax.serving.fields import Refused
from rag_jax.serving.listening import Listener
from rag_jax.serving.settings import Settings
from rag_jax.training.answer_settings import passages_read
from rag_jax.training.opened import Rag
from rag_jax.training.run_index import named_indexes, open_index, placed
from rag_jax.types import Answer, Evidence

WHOLE = 1 << 30  # a length step above all lengths: all texts to embed are padded to one length
# What a model can do, and the method of `OpenIndex` that does it for a batch of inputs.
PROGRAMS = {"search": "search", "sample": "sample", "retrieve": "retrieve",
            "query_encoder": "embed_queries", "document_encoder": "embed_passages"}
# What each does, for people.
WORDS_OF = {"search": "answer questions", "sample": "sample answers",
            "retrieve": "find passages", "query_encoder": "embed questions",
            "document_encoder": "embed passages"}
# Fields whose programs have shapes that are not compiled at the start, and what unsets each.
NOT_SERVED = {"eval.exact_nodes": "0", "eval.prefix_mib": "0", "model.reranker.pretrained": "''"}
NO_DRAW = {"sample": False, "temperature": 1.0, "top_k": 0, "top_p": 1.0}


class Question(NamedTuple):
    """A question to answer, and how its answer is sampled; `search` ignores temperature and seed.

    For n samples, a request holds the question n times. The answer to number i is the one that
    `Rag.ask([question] * n, sample=True, seed=seed)` has in place i.
    """

    text: str
    temperature: float = 1.0
    seed: int = 0  # uint32
    number: int = 0
    listener: Listener | None = None  # receives the first tokens while the answer is decoded


class OpenIndex:
    """A model with one version of an index, and its programs, for batches of a few sizes.

    It never changes: an edited index is another OpenIndex. It is in no reference cycle, so that its
    files are closed when the last request that reads them is done.

    Args:
      name: of the folder of the index; "" = closed book.
      rag: the model, with this index or, closed book, without one.
      settings: batch sizes, and how many passages may be retrieved.

    Attributes:
      version: the name, and a digest that differs between versions of the index; the same in all
        processes that search it with the same result.
      k: how many passages an answer reads.
      most: how many passages may be retrieved.
      tokenizer: the generator's.
    """

    def __init__(self, name: str, rag: Rag, settings: Settings):
        self.name, self.rag, self._sizes = name, rag, settings.batch_sizes
        index, data = rag.index, rag.config.data
        self.tokenizer = rag.job.prepared.generator_tokenizer
        manifest = json.dumps(index and index.manifest, sort_keys=True)
        self.version = f"{name}:{hashlib.sha256(manifest.encode()).hexdigest()[:12]}"
        self.k = passages_read(rag.config, index)
        self.most = 0 if index is None else min(max(settings.max_texts, self.k), index.size)
        self._answerers: dict[tuple[str, int], Answerer] = {}
        # A step above half of the longest question: all questions are then padded to one length.
        self._step = max(data.length_step, -(-data.max_source_length // 4),
                         data.max_question_length // 2 + 1)

    @functools.cached_property
    def programs(self) -> tuple[str, ...]:
        """The names in `PROGRAMS` of what this model can do."""
        rag = self.rag
        classes = rag.config.eval.labels or rag.config.classes
        has = {"search": rag.answers, "sample": rag.answers and not classes,
               "retrieve": rag.index is not None} | {
            tower: rag.has(tower) and not rag.job.model.lexical
            for tower in ("query_encoder", "document_encoder")}
        return tuple(program for program in PROGRAMS if has[program])

    def run(self, program: str, inputs: Sequence[Any]) -> list[Any]:
        """The result of a program for each input, in one batch."""
        return getattr(self, PROGRAMS[program])(inputs)

    def search(self, questions: Sequence[Question]) -> list[Answer]:
        """Answers with their alternatives, searched as `config.eval` says."""
        return self._decode("search", questions)

    def sample(self, questions: Sequence[Question]) -> list[Answer]:
        """A sample of each question's answer."""
        return self._decode("sample", questions, self._draws(questions))

    def retrieve(self, questions: Sequence[tuple[str, int]]) -> list[list[Evidence]]:
        """The best k passages for each pair of a question and k, with p(z | x) over these k."""
        answerer = self._answerer("retrieve", self._size(questions))
        queries = self._queries(answerer, self._tokens([text for text, _ in questions]))
        index = answerer.index
        if index.division == "devices":  # its programs are compiled for whole batches and one k
            most = answerer.evidence(queries, search(index, queries, self.most))
            return [_renormalised(passages[:k])
                    for passages, (_, k) in zip(most, questions, strict=False)]
        k_of, passages = np.array([k for _, k in questions]), {}
        for k in set(k_of.tolist()):  # the first passages of a hybrid index depend on k
            numbers = np.flatnonzero(k_of == k)
            rows = search(index, queries[numbers], k)
            passages |= zip(
                numbers.tolist(), answerer.evidence(queries[numbers], rows), strict=True)
        return [passages[number] for number in range(len(questions))]

    def embed_queries(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Vectors float32[E] of the query encoder."""
        return list(self.rag.embed_queries(texts, batch_size=self._size(texts), length_step=WHOLE))

    def embed_passages(self, passages: Sequence[Passage]) -> list[np.ndarray]:
        """Vectors float32[E] of the document encoder."""
        return list(self.rag.embed_passages(passages, batch_size=self._size(passages),
                                            length_step=WHOLE))

    def compile(self) -> Iterator[str]:
        """Runs every program in every shape; yields the name of each once it is compiled."""
        text = "What is it?"
        question = Question(text)
        inputs = {"search": question, "sample": question, "retrieve": (text, self.k),
                  "query_encoder": text, "document_encoder": Passage("", "", text)}
        for size, name in itertools.product(self._sizes, self.programs):
            batch = [inputs[name]] * size
            self.run(name, batch)
            if name in ("search", "sample"):
                self._answerer(name, size).compile(
                    self.rag.params, self._tokens([text] * size),
                    self._draws(batch) if name == "sample" else None)
            yield f"{name}, {size} at a time"

    def _decode(self, program: str, questions: Sequence[Question], draws: Draws | None = None
                ) -> list[Answer]:
        count, size = len(questions), self._size(questions)
        tokens, retrieved = self._tokens([question.text for question in questions]), None
        if self.rag.index is not None:
            searcher = self._answerer("retrieve", size)
            queries = self._queries(searcher, tokens)
            retrieved = search(searcher.index, queries, searcher.k)[:count]
        answerer = self._answerer(program, size)
        listeners = [question.listener for question in questions if question.listener]

        def tell(begun: dict[int, Beginning]) -> bool:
            for row, question in enumerate(questions):
                if question.listener:
                    question.listener.tell(question.number, begun[row])
            return len(listeners) < count or not all(each.left for each in listeners)

        watch = Watch(1 if listeners else answerer.decoding.max_length, tell)
        return answerer.decode(self.rag.params, tokens, retrieved, draws, watch)

    def _queries(self, answerer: Answerer, tokens: QuestionTokens) -> np.ndarray:
        """What searches the index for these questions, filled up to a whole batch."""
        queries = answerer.queries(self.rag.params, tokens)
        return queries[np.arange(self._size(tokens)) % len(tokens)]

    def _answerer(self, program: str, size: int) -> Answerer:
        """What runs a program for `size` questions at a time; it is made once."""
        if (program, size) not in self._answerers:
            how, step = {}, WHOLE
            if program == "search":
                beams = self.rag.config.eval.num_beams or 1
                how, step = {**NO_DRAW, "num_return_sequences": beams}, self._step
            elif program == "sample":
                how, step = {"sample": True, "num_return_sequences": 1}, self._step
            self._answerers[program, size] = self.rag.answerer(
                how, batch_size=size, length_step=step)
        return self._answerers[program, size]

    def _draws(self, questions: Sequence[Question]) -> Draws:
        """How the questions are sampled, filled up to a whole batch."""
        size = self._size(questions)
        filled = [*questions, *[questions[-1]] * (size - len(questions))]
        return Draws(keys_of(np.array([q.seed for q in filled], np.uint32),
                             np.array([q.number for q in filled])),
                     np.array([q.temperature for q in filled], np.float32))

    def _tokens(self, texts: Sequence[str]) -> QuestionTokens:
        return self.rag.job.tokenize(
            [Example(str(number), text, ()) for number, text in enumerate(texts)])

    def _size(self, inputs: Sized) -> int:
        """The smallest batch size that these fit in."""
        return next(size for size in self._sizes if size >= len(inputs))


def _renormalised(passages: Sequence[Evidence]) -> list[Evidence]:
    """The same passages, with p(z | x) over these alone."""
    total = sum(each.prior for each in passages)
    return [each._replace(prior=each.prior / total) for each in passages]


class Indexes:
    """The indexes of a workdir: the open ones, and the current one, for requests that name none.

    Swaps and edits run in a thread of their own, one after the other, while questions are answered.
    A request keeps the index that it began with.

    Args:
      rag: the model, with the index that is current at first.
      settings: as `OpenIndex` takes them.

    Attributes:
      current: the index of requests that name none.
      open: name -> index, of all that a request may name.
    """

    def __init__(self, rag: Rag, settings: Settings):
        config = rag.config
        refused = {name: value for name in NOT_SERVED if (value := overrides.value(config, name))
                   and (config.retrieval.k or not name.startswith("model.reranker."))}
        if refused:
            named = ", ".join(f"config.{name}={value!r}" for name, value in refused.items())
            flags = " ".join(f"--config.{name}={NOT_SERVED[name]}" for name in refused)
            raise ConfigError(f"{named}: its programs have shapes that no start compiles; to "
                              f"serve, set {flags}")
        if rag.answers:
            rag = dataclasses.replace(rag, params={**rag.params, "generator": in_dtype(
                rag.params["generator"], rag.job.model.generator.dtype)})
        self._settings, self._first = settings, None
        if rag.index is not None:
            self._first = pathlib.Path(rag.index.path).absolute()
        name = self._first.name if self._first else ""
        if other := self._of_workdir(rag).get(name):
            if not other.samefile(self._first):
                raise ConfigError(f"--index={self._first}: {other} is another index of this name, "
                                  "by which requests name it; rename one of them")
        self.current = OpenIndex(name, rag, settings)
        self.open = {name: self.current}
        self._changes = concurrent.futures.ThreadPoolExecutor(1, "indexes")

    @property
    def config(self) -> Config:
        return self.current.rag.config

    @property
    def paths(self) -> dict[str, pathlib.Path]:
        """Name -> folder of all indexes of the workdir as it is now, open or not."""
        paths = self._of_workdir(self.current.rag)
        if self._first is not None and self._first.is_dir():
            paths[self._first.name] = self._first
        return dict(sorted(paths.items()))

    def _of_workdir(self, rag: Rag) -> dict[str, pathlib.Path]:
        if self._first is None:
            return {}
        folder, names = named_indexes(rag.job, rag.run)
        return {name: folder / name for name in names}

    def named(self, name: str | None) -> OpenIndex:
        """The open index of this name; None = the current one."""
        if name is None:
            return self.current
        if self._first is None:
            raise Refused("this model reads no passages: leave \"memory\" out", field="memory")
        if name not in self.open:
            raise Refused(f"\"memory\" is {name[:60]!r}: expected one of {', '.join(self.open)}",
                          field="memory")
        return self.open[name]

    def swap(self, name: str) -> concurrent.futures.Future:
        """Opens the newest version of an index and makes that the current one."""
        self._check_reads()
        if name not in self.paths:
            told = "there is no index any more" if not self.paths else (
                f"expected one of {', '.join(self.paths)}")
            raise Refused(f"\"swap\" is {name[:60]!r}: {told}", field="swap")
        return self._changes.submit(self._swap, name)

    def edit(self, add: Sequence[Passage], delete: Sequence[str], name: str | None = None
             ) -> concurrent.futures.Future:
        """Publishes a version of an index with other passages, which then replaces the open one.

        name: of an open index; None = the index that is current when this is called.
        """
        self._check_reads()
        return self._changes.submit(self._edit, self.named(name).name, add, delete)

    def open_also(self, name: str) -> None:
        """Opens one more index that requests may name; called before the worker compiles."""
        if self._first is None:
            raise ConfigError(f"--open={name}: run {self.current.rag.run!r} reads no passages; "
                              "leave it out")
        if name not in self.paths:
            raise ConfigError(f"--open={name}: {self.current.rag.job.workdir} has "
                              f"{', '.join(self.paths) or 'no index'}")
        if name not in self.open:
            self.open[name] = OpenIndex(name, self._opened(name), self._settings)

    def close(self) -> None:
        self._changes.shutdown(cancel_futures=True)

    def _check_reads(self) -> None:
        if self._first is None:
            raise Refused("this model reads no passages: it has no memory to change")

    def _opened(self, name: str) -> Rag:
        rag = copy.copy(self.current.rag)
        rag.swap(self._path(name))
        return rag

    def _path(self, name: str) -> pathlib.Path:
        """The folder of an index that may have been removed since it was opened or named."""
        paths = self.paths
        if name not in paths:
            raise Refused(f"index {name[:60]!r} is not there any more: there is "
                          f"{', '.join(paths) or 'none'}")
        return paths[name]

    def _swap(self, name: str) -> None:
        gc.collect()
        self._show(name, self._opened(name))
        self.current = self.open[name]

    def _edit(self, name: str, add: Sequence[Passage], delete: Sequence[str]) -> None:
        gc.collect()  # closes earlier versions that a cycle keeps open; it rarely runs by itself
        rag = self.current.rag
        # Opened anew and edited on the host: an edit on the devices would change the tables that
        # requests read now.
        index = open_index(rag.job, rag.run, str(self._path(name)), rag.answers)
        rag = dataclasses.replace(rag, index=index)
        rag.edit(add, delete)
        rag.index = placed(rag.job, rag.index)
        self._show(name, rag)
        if name == self.current.name:
            self.current = self.open[name]

    def _show(self, name: str, rag: Rag) -> None:
        """Compiles all programs of an index, and then makes it the open one of this name."""
        index = OpenIndex(name, rag, self._settings)
        for _ in index.compile():
            pass
        self.open[name] = index
