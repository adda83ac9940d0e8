"""The indexes that are open, and what is computed with each: programs of few, known shapes."""

import concurrent.futures
import copy
import dataclasses
import functools
import gc
import hashlib
import itertools
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from rag_jax import overrides
from rag_jax.answering import Answerer, Beginning, Draws, Watch, keys_of
from rag_jax.config import Config, ConfigError
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

WHOLE = 1 << 30  # a length step above all lengths: texts to embed have one padded length
# What a model can do, each a method that answers a list of these in one batch.
PROGRAMS = {"search": "search", "sample": "sample", "retrieve": "retrieve",
            "query_encoder": "embed_queries", "document_encoder": "embed_passages"}
# Fields whose programs have shapes that no start compiles, and what unsets each.
NOT_SERVED = {"eval.exact_nodes": "0", "eval.prefix_mib": "0", "model.reranker.pretrained": "''"}
NO_DRAW = {"sample": False, "temperature": 1.0, "top_k": 0, "top_p": 1.0}


class Question(NamedTuple):
    """A question to answer, and how its answer is drawn; by `search` only its text counts.

    n samples of one request are the question asked n times: that in place i is the one that
    `Rag.ask([question] * n, sample=True)` gives there, with config.seed = seed.
    """

    text: str
    temperature: float = 1.0
    seed: int = 0  # uint32
    place: int = 0
    listener: Listener | None = None  # to be told of the answer while it grows


class OpenIndex:
    """An index, and what is computed with it, in batches of one of a few sizes.

    Nothing in it changes: an edited index is another one. Nothing in it refers to it, so that it
    and its files are let go with the last request that reads them.

    Args:
      name: of its folder.
      rag: the model, with this index or, closed book, without one.
      settings: batch sizes, and how many passages may be retrieved.

    Attributes:
      version: tells this index from others, those of its folder included; the same in all processes
        that search it alike.
      k: how many passages an answer reads.
      most: how many may be retrieved.
    """

    def __init__(self, name: str, rag: Rag, settings: Settings):
        self.name, self.rag, self._sizes = name, rag, settings.batch_sizes
        index, data = rag.index, rag.config.data
        told = json.dumps(index and index.manifest, sort_keys=True)
        self.version = f"{name}:{hashlib.sha256(told.encode()).hexdigest()[:12]}"
        self.k = passages_read(rag.config, index)
        self.most = 0 if index is None else min(max(settings.max_texts, self.k), index.size)
        self._answerers: dict[tuple[str, int], Answerer] = {}
        # Above half of a question's longest length, questions have one padded length.
        self._step = max(data.length_step, -(-data.max_source_length // 4),
                         data.max_question_length // 2 + 1)

    @functools.cached_property
    def programs(self) -> tuple[str, ...]:
        """Those of `PROGRAMS` that the model has."""
        rag = self.rag
        classes = rag.config.eval.labels or rag.config.classes
        has = {"search": rag.answers, "sample": rag.answers and not classes,
               "retrieve": rag.index is not None} | {
            tower: tower in rag.params and not rag.job.model.lexical
            for tower in ("query_encoder", "document_encoder")}
        return tuple(program for program in PROGRAMS if has[program])

    def run(self, program: str, given: Sequence[Any]) -> list[Any]:
        """What a program answers to each of these."""
        return getattr(self, PROGRAMS[program])(given)

    def search(self, questions: Sequence[Question]) -> list[Answer]:
        """Answers, each with its alternatives, as `config.eval` says."""
        return self._decode("search", questions)

    def sample(self, questions: Sequence[Question]) -> list[Answer]:
        """A sample of each question's answer."""
        return self._decode("sample", questions, self._draws(questions))

    def retrieve(self, questions: Sequence[tuple[str, int]]) -> list[list[Evidence]]:
        """The best k passages for each pair of a question and k, with p(z | x) over these k."""
        tokens = self._filled([text for text, _ in questions])
        answerer = self._answerer("retrieve", len(tokens))
        queries, index = answerer.queries(self.rag.params, tokens), answerer.index
        if index.division == "devices":  # what it runs is compiled, for whole batches and one k
            most = answerer.evidence(queries, search(index, queries, self.most))
            return [_over(found[:k]) for found, (_, k) in zip(most, questions, strict=False)]
        asked, found = np.array([k for _, k in questions]), {}
        for k in set(asked.tolist()):  # on which it depends what a hybrid index finds first
            numbers = np.flatnonzero(asked == k)
            rows = search(index, queries[numbers], k)
            found |= zip(numbers.tolist(), answerer.evidence(queries[numbers], rows), strict=True)
        return [found[number] for number in range(len(questions))]

    def embed_queries(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Vectors float32[E] of the query encoder."""
        size = self._size(texts)
        return list(self.rag.embed_queries(_fill(texts, size), batch_size=size,
                                           length_step=WHOLE)[:len(texts)])

    def embed_passages(self, passages: Sequence[Passage]) -> list[np.ndarray]:
        """Vectors float32[E] of the document encoder."""
        size = self._size(passages)
        return list(self.rag.embed_passages(_fill(passages, size), batch_size=size,
                                            length_step=WHOLE)[:len(passages)])

    def compile(self) -> Iterator[str]:
        """Runs every program in every shape; yields what has been compiled."""
        text = "What is it?"
        asked = Question(text)
        given = {"search": asked, "sample": asked, "retrieve": (text, self.k),
                 "query_encoder": text, "document_encoder": Passage("", "", text)}
        for size, name in itertools.product(self._sizes, self.programs):
            questions = [given[name]] * size
            self.run(name, questions)
            if name in ("search", "sample"):
                self._answerer(name, size).compile(
                    self.rag.params, self._filled([text] * size),
                    self._draws(questions) if name == "sample" else None)
            yield f"{name}, {size} at a time"

    def _decode(self, program: str, questions: Sequence[Question], draws: Draws | None = None
                ) -> list[Answer]:
        count, size, params = len(questions), self._size(questions), self.rag.params
        tokens, retrieved = self._tokens([question.text for question in questions]), None
        if self.rag.index is not None:
            searcher = self._answerer("retrieve", size)
            queries = searcher.queries(params, tokens)[np.arange(size) % count]
            retrieved = search(searcher.index, queries, searcher.k)[:count]
        answerer = self._answerer(program, size)
        listening = [each.listener for each in questions if each.listener]

        def tell(begun: dict[int, Beginning]) -> bool:
            for number, each in enumerate(questions):
                if each.listener:
                    each.listener.tell(each.place, begun[number])
            return len(listening) < len(questions) or not all(each.left for each in listening)

        watch = Watch(1 if listening else answerer.decoding.max_length, tell)
        return answerer.decode(params, tokens, retrieved, draws, watch)

    def _answerer(self, program: str, size: int) -> Answerer:
        """What answers `size` questions at a time; it is made once."""
        if (program, size) not in self._answerers:
            how = {"sample": {"sample": True, "num_return_sequences": 1}, "search": {
                **NO_DRAW, "num_return_sequences": self.rag.config.eval.num_beams or 1}
                   }.get(program, {})
            self._answerers[program, size] = self.rag.answerer(
                how, batch_size=size, length_step=self._step if how else WHOLE)
        return self._answerers[program, size]

    def _draws(self, questions: Sequence[Question]) -> Draws:
        filled = _fill(questions, self._size(questions))
        return Draws(keys_of(np.array([q.seed for q in filled], np.uint32),
                             np.array([q.place for q in filled])),
                     np.array([q.temperature for q in filled], np.float32))

    def _filled(self, texts: Sequence[str]) -> QuestionTokens:
        """Tokens of one whole batch."""
        return self._tokens(_fill(texts, self._size(texts)))

    def _tokens(self, texts: Sequence[str]) -> QuestionTokens:
        return self.rag.job.tokenize(
            [Example(str(number), text, ()) for number, text in enumerate(texts)])

    def _size(self, given: Sequence[Any]) -> int:
        return next(size for size in self._sizes if size >= len(given))


def _over(passages: Sequence[Evidence]) -> list[Evidence]:
    """With p(z | x) over these alone."""
    whole = sum(each.prior for each in passages)
    return [each._replace(prior=each.prior / whole) for each in passages]


def _fill(given: Sequence[Any], size: int) -> list[Any]:
    return [*given, *[given[-1]] * (size - len(given))]


class Indexes:
    """The indexes of a workdir: those that are open, and the one that answers where none is named.

    What changes them runs in one thread, one change after the other, while questions are answered;
    a question keeps the index with which it came.

    Args:
      rag: opened, with the index that is current at first.
      settings: of the server.
    """

    def __init__(self, rag: Rag, settings: Settings):
        config = rag.config
        given = {name: value for name in NOT_SERVED if (value := overrides.value(config, name))
                 and (config.retrieval.k or not name.startswith("model.reranker."))}
        if given:
            named = ", ".join(f"config.{name}={value!r}" for name, value in given.items())
            flags = " ".join(f"--config.{name}={NOT_SERVED[name]}" for name in given)
            raise ConfigError(f"{named}: its programs have shapes that no start compiles; to "
                              f"serve, set {flags}")
        if rag.answers:
            rag = dataclasses.replace(rag, params={**rag.params, "generator": in_dtype(
                rag.params["generator"], rag.job.model.generator.dtype)})
        self._settings, self._first = settings, None
        if rag.index is not None:
            self._first = pathlib.Path(rag.index.path).absolute()
        name = self._first.name if self._first else ""
        self.current = OpenIndex(name, rag, settings)
        self.open = {name: self.current}
        self._changes = concurrent.futures.ThreadPoolExecutor(1, "indexes")

    @property
    def config(self) -> Config:
        return self.current.rag.config

    @property
    def paths(self) -> dict[str, pathlib.Path]:
        """The folders of all that there are by now, open or not, by name."""
        if self._first is None:
            return {}
        folder, names = named_indexes(self.current.rag.job, self.current.rag.run)
        return dict(sorted({**{each: folder / each for each in names},
                            self._first.name: self._first}.items()))

    def named(self, name: str | None) -> OpenIndex:
        """An open index; None = the current one."""
        if name is None:
            return self.current
        if self._first is None:
            raise Refused("this model reads no passages: leave \"memory\" out", field="memory")
        if name not in self.open:
            raise Refused(f"\"memory\" is {name[:60]!r}: expected one of {', '.join(self.open)}",
                          field="memory")
        return self.open[name]

    def swap(self, name: str) -> concurrent.futures.Future:
        """Opens the newest version of an index, and answers from it from then on."""
        self._check_reads()
        if name not in self.paths:
            raise Refused(f"\"swap\" is {name[:60]!r}: expected one of {', '.join(self.paths)}",
                          field="swap")
        return self._changes.submit(self._swap, name)

    def edit(self, add: Sequence[Passage], delete: Sequence[str], name: str | None = None
             ) -> concurrent.futures.Future:
        """Publishes a version of an index with other passages, and answers from it then.

        name: of an open one; None = of that which is the current one now.
        """
        self._check_reads()
        return self._changes.submit(self._edit, self.named(name).name, add, delete)

    def open_also(self, name: str) -> None:
        """Opens an index that may be named, before the worker compiles."""
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
        rag.swap(self.paths[name])
        return rag

    def _swap(self, name: str) -> None:
        gc.collect()
        self._show(name, self._opened(name))
        self.current = self.open[name]

    def _edit(self, name: str, add: Sequence[Passage], delete: Sequence[str]) -> None:
        gc.collect()  # earlier versions that a cycle keeps open; by itself it would hardly come
        rag = self.current.rag
        # Edited on the host, as the devices' tables would change under those who read them.
        index = open_index(rag.job, rag.run, str(self.paths[name]), rag.answers)
        rag = dataclasses.replace(rag, index=index)
        rag.edit(add, delete)
        rag.index = placed(rag.job, rag.index)
        self._show(name, rag)
        if name == self.current.name:
            self.current = self.open[name]

    def _show(self, name: str, rag: Rag) -> None:
        """Compiles all programs of an index, and answers from it then where its name is given."""
        index = OpenIndex(name, rag, self._settings)
        for _ in index.compile():
            pass
        self.open[name] = index
