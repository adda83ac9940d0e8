"""The indexes that are open, and what is computed with each: programs of few, known shapes."""

import concurrent.futures
import copy
import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from rag_jax.answering import Answerer, Beginning, Draws, Watch, keys_of, search
from rag_jax.config import Config, ConfigError
from rag_jax.data.question_files import Example
from rag_jax.data.questions import QuestionTokens
from rag_jax.models.generator import in_dtype
from rag_jax.retrieval.protocol import Passage
from rag_jax.serving.fields import Refused
from rag_jax.serving.listening import Listener
from rag_jax.serving.settings import Settings
from rag_jax.training.opened import Rag, named_indexes, open_index, placed
from rag_jax.types import Answer, Evidence

WHOLE = 1 << 30  # a length step above all lengths: texts to embed have one padded length


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

    Nothing in it changes: an edited index is another one. The methods that take a list answer it
    in one batch; they are `PROGRAMS`.

    Args:
      name: of its folder.
      rag: the model, with this index or, closed book, without one.
      settings: batch sizes, and how many passages may be retrieved.
    """

    _versions = itertools.count(1)

    def __init__(self, name: str, rag: Rag, settings: Settings):
        self.name, self.rag, self._sizes = name, rag, settings.batch_sizes
        self.version = f"{name}:{next(self._versions)}"
        self.most = 0 if rag.index is None else min(settings.max_texts, rag.index.size)
        data = rag.config.data
        self._answerers: dict[tuple[str, int], Answerer] = {}
        # Above half of a question's longest length, questions have one padded length.
        self._step = max(data.length_step, -(-data.max_source_length // 4),
                         data.max_question_length // 2 + 1)

    @functools.cached_property
    def programs(self) -> dict[str, Callable[[Sequence[Any]], list[Any]]]:
        """What the model can do, by name."""
        rag, can = self.rag, {}
        if rag.answers:
            can["search"] = self.search
            if not (rag.config.eval.labels or rag.config.classes):
                can["sample"] = self.sample
        if rag.index is not None:
            can["retrieve"] = self.retrieve
        for tower, program in (("query_encoder", self.embed_queries),
                               ("document_encoder", self.embed_passages)):
            if tower in rag.params and not rag.job.model.lexical:
                can[tower] = program
        return can

    def search(self, questions: Sequence[Question]) -> list[Answer]:
        """Answers, each with its alternatives, as `config.eval` says."""
        return self._decode("search", questions)

    def sample(self, questions: Sequence[Question]) -> list[Answer]:
        """A sample of each question's answer."""
        return self._decode("sample", questions, self._draws(questions))

    def retrieve(self, questions: Sequence[str]) -> list[list[Evidence]]:
        """The best passages, `most` of them, with p(z | x) over these."""
        tokens = self._filled(questions)
        answerer = self._answerer("retrieve", len(tokens))
        queries = answerer.queries(self.rag.params, tokens)
        rows = search(answerer.index, queries, self.most)
        return answerer.evidence(queries, rows)[:len(questions)]

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
        asked, programs = Question(text), self.programs
        given = {"search": asked, "sample": asked, "retrieve": text, "query_encoder": text,
                 "document_encoder": Passage("", "", text)}
        for size, (name, program) in itertools.product(self._sizes, programs.items()):
            questions = [given[name]] * size
            program(questions)
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
            how = {"sample": {"sample": True, "num_return_sequences": 1},
                   "search": {"num_return_sequences": self.rag.config.eval.num_beams or 1},
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
        if (config.eval.exact_nodes or config.eval.prefix_mib
                or config.model.reranker.pretrained and config.retrieval.k):
            raise ConfigError("config.eval.exact_nodes, config.eval.prefix_mib and "
                              "config.model.reranker: their programs have shapes that no start "
                              "compiles; to serve, leave all three out")
        if rag.answers:
            rag = dataclasses.replace(rag, params={**rag.params, "generator": in_dtype(
                rag.params["generator"], rag.job.model.generator.dtype)})
        self._settings, self._paths = settings, {}
        name = ""
        if rag.index is not None:
            path = pathlib.Path(rag.index.path).absolute()
            folder, names = named_indexes(rag.job, rag.run)
            name, self._paths = path.name, {each: folder / each for each in names}
            self._paths[name] = path
        self.current = OpenIndex(name, rag, settings)
        self.open = {name: self.current}
        self._changes = concurrent.futures.ThreadPoolExecutor(1, "indexes")

    @property
    def config(self) -> Config:
        return self.current.rag.config

    @property
    def names(self) -> list[str]:
        """Of all that there are, open or not."""
        return sorted(self._paths)

    def named(self, name: str | None) -> OpenIndex:
        """An open index; None = the current one."""
        if name is None:
            return self.current
        if name not in self.open:
            raise Refused(f"\"memory\" is {name[:60]!r}: expected one of {', '.join(self.open)}",
                          field="memory")
        return self.open[name]

    def swap(self, name: str) -> concurrent.futures.Future:
        """Opens the newest version of an index, and answers from it from then on."""
        if name not in self._paths:
            raise Refused(f"\"swap\" is {name[:60]!r}: expected one of {', '.join(self.names)}",
                          field="swap")
        return self._changes.submit(self._swap, name)

    def edit(self, add: Sequence[Passage], delete: Sequence[str]) -> concurrent.futures.Future:
        """Publishes a version of the current index with other passages, and answers from it."""
        if self.current.rag.index is None:
            raise Refused("this model reads no passages")
        return self._changes.submit(self._edit, add, delete)

    def open_also(self, name: str) -> None:
        """Opens an index that may be named, before there are requests."""
        first = self.current
        self.swap(name).result()
        self.current = first

    def close(self) -> None:
        self._changes.shutdown(cancel_futures=True)

    def _swap(self, name: str) -> None:
        rag = copy.copy(self.current.rag)
        rag.swap(self._paths[name])
        self._show(name, rag)

    def _edit(self, add: Sequence[Passage], delete: Sequence[str]) -> None:
        name, rag = self.current.name, self.current.rag
        # Edited on the host, as the devices' tables would change under those who read them.
        index = open_index(rag.job, rag.run, str(self._paths[name]))
        rag = dataclasses.replace(rag, index=index)
        rag.edit(add, delete)
        rag.index = placed(rag.job, rag.index)
        self._show(name, rag)

    def _show(self, name: str, rag: Rag) -> None:
        """Answers from an index from now on, once all that this takes is compiled."""
        index = OpenIndex(name, rag, self._settings)
        for _ in index.compile():
            pass
        self.current = self.open[name] = index
