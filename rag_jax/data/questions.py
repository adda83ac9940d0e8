"""Questions and answers as token ids, made once, and their share of every batch."""

import functools
from collections.abc import Sequence

import numpy as np

from rag_jax.config import BertConfig
from rag_jax.data import packed
from rag_jax.data.packed import Groups
from rag_jax.data.padding import halved, pad_rows
from rag_jax.data.question_files import Example, check_labels
from rag_jax.data.text import Cuts, GeneratorFormat, Tokenizer, encoder_input, label_tokens
from rag_jax.types import QuestionBatch


class QuestionTokens:
    """Questions and answers as token ids.

    Args:
      examples: the questions; the first of `targets or answers` trains unless a seeded draw
        picks another.
      retriever_tokenizer: makes the query encoder's input.
      generator_format: lays out the generator's input.
      max_question_length, max_target_length: in tokens, special tokens included.
      labels: the classes of a classifier, to which every answer must belong; () = answers are
        texts. The target of a class is its token by `label_tokens`.
      encoder: the query encoder, which may have a prefix for questions.
      classifies: for a classification head. The target of a class is then its number in `labels`,
        and the decoder reads the question, cut to max_question_length.
    """

    def __init__(self, examples: Sequence[Example], retriever_tokenizer: Tokenizer,
                 generator_format: GeneratorFormat, max_question_length: int,
                 max_target_length: int, labels: tuple[str, ...] = (), classifies: bool = False,
                 encoder: BertConfig = BertConfig()):  # noqa: B008 (immutable)
        self.examples = list(examples)
        questions = [e.question for e in examples]
        self.texts = np.array(questions, object)  # as asked
        self.format = generator_format
        self.max_target_length = 1 if labels else max_target_length
        self.cuts = Cuts()  # by the retriever
        rows = encoder_input(retriever_tokenizer, questions, None, max_question_length, self.cuts,
                             encoder)
        self.ids, self.mask = pad_rows(rows, max_question_length, retriever_tokenizer.pad)
        if generator_format.uncased_questions:
            if encoder.query_prefix:
                rows = encoder_input(retriever_tokenizer, questions, None, max_question_length)
            questions = [retriever_tokenizer.decode(row) for row in rows]
        self.suffixes = generator_format.questions(questions)
        self.longest_suffix = max(map(len, self.suffixes), default=0)
        check_labels("questions", self.examples, labels)
        self._asked = [(self.ids, self.mask)]
        if classifies:  # what the decoder reads
            self._asked.append(pad_rows(
                generator_format.alone(questions, max_question_length), max_question_length,
                generator_format.tokenizer.pad))
        codes = range(len(labels)) if classifies else label_tokens(
            generator_format.tokenizer, labels)
        self._targets = {label: [code] for label, code in zip(labels, codes, strict=True)}
        self._cut: set[str] = set()  # answers whose targets are cut
        self._unknown = labels[:1] or ("",)  # fills the batch of a question without answers

    def __len__(self) -> int:
        return len(self.examples)

    def target(self, answer: str) -> list[int]:
        """Ids of an answer and </s>; a long answer is cut before </s>.

        The answer is tokenized as inside a text, with a space before it, so that it has the ids
        of the passage that it repeats (Hugging Face's RAG: add_prefix_space). A class has one
        target and no </s>.
        """
        if answer not in self._targets:
            tokenizer = self.format.tokenizer
            ids, = tokenizer.encode_answers([answer])
            if len(ids) >= self.max_target_length:
                self._cut.add(answer)
            self._targets[answer] = [*ids[: self.max_target_length - 1], tokenizer.end]
        return self._targets[answer]

    def targets_cut(self) -> int:
        """The number of questions whose first target is cut."""
        firsts = [self._texts(row)[0] for row in range(len(self))]
        for answer in firsts:
            self.target(answer)
        return sum(answer in self._cut for answer in firsts)

    def _texts(self, row: int) -> tuple[str, ...]:
        """The texts that a question trains on."""
        return self.examples[row].targets or self.examples[row].answers or self._unknown

    def targets(self, rows: np.ndarray, rng: np.random.Generator | None
                ) -> tuple[np.ndarray, np.ndarray]:
        """Targets int32[B, T] and mask; `rng` picks among several texts, None takes the first."""
        chosen = []
        for row in rows:
            texts = self._texts(row)
            pick = 0 if rng is None else int(rng.integers(len(texts)))
            chosen.append(self.target(texts[pick]))
        return pad_rows(chosen, self.max_target_length, self.format.tokenizer.pad)

    def batch(self, rows: np.ndarray, rng: np.random.Generator | None = None,
              weight: np.ndarray | None = None,
              own: np.ndarray | slice = slice(None),  # noqa: B008 (immutable)
              length_step: int | None = None, suffixes: bool = True,
              groups: Groups | None = None) -> QuestionBatch:
        """The batch of question `rows`, without passages.

        Args:
          rows: int[B], positions among the questions.
          rng: picks among several answers; None takes the first.
          weight: float32[B], 0 for rows that only fill the batch; None = ones.
          own: places in `rows` that are returned; the padded lengths and the draws are those of the
            whole batch.
          length_step: tokens between the lengths of generator inputs. The longest length of
            questions is halved for shorter ones down to so many tokens, that of targets down to a
            quarter: shapes are few where these two, which cost less, seldom change. None = padded
            to the longest.
          suffixes: whether the batch has the questions' part of generator inputs.
          groups: in which targets are packed; None = they are not.
        """
        targets = self.targets(rows, rng)
        asked = [(ids[rows], mask[rows]) for ids, mask in self._asked]
        if length_step is not None:
            targets = halved(*targets, length_step // 4)
            asked = [halved(*pair, length_step) for pair in asked]
        weight = np.ones(len(rows), np.float32) if weight is None else weight
        after = pad_rows([self.suffixes[row] for row in rows], self.longest_suffix,
                         self.format.tokenizer.pad) if suffixes else (None, None)
        batch = QuestionBatch(*asked[0], *after, *targets, weight, *sum(asked[1:], ()))
        batch = QuestionBatch(*(None if array is None else array[own] for array in batch))
        if groups is not None:
            room = packed.room(self._usual, len(rows) // groups.count)
            places = packed.places(targets[1], groups, room)
            if places is not None:
                batch = batch._replace(target_places=groups.own(places, own, len(rows)))
        return batch

    @functools.cached_property
    def _usual(self) -> np.ndarray:
        """Tokens of the targets of a sample of questions."""
        return self.targets(packed.sample(len(self)), None)[1].sum(axis=1)
