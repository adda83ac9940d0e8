"""Questions with their passages as padded host batches, and the one place that makes a `Batch`."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from rag_jax.data.packed import Groups
from rag_jax.data.questions import QuestionTokens
from rag_jax.data.text import bucket, pad_rows
from rag_jax.retrieval.bm25 import Bm25Index
from rag_jax.retrieval.hybrid import HybridIndex
from rag_jax.retrieval.index import PassageIndex
from rag_jax.retrieval.reranked import RerankedIndex
from rag_jax.types import Array, Batch, Prefixes, QuestionBatch

Searchable = PassageIndex | Bm25Index | HybridIndex | RerankedIndex
PASSAGE_TABLE = "generator"  # token table of "title / text" in a passage store
SHORTEST_REST = 16  # padded tokens of what follows a passage that is read by itself
ENCODER_TABLE = "document_encoder"  # token table of [CLS] title [SEP] text [SEP]


def assemble(questions: QuestionBatch, source_ids: Array, source_mask: Array, doc_mask: Array,
             doc_embeddings: Array | None, **passages: Array | None) -> Batch:
    """A `Batch` of questions and their passages; on the host or inside a jitted program.

    Args:
      questions: the share of the questions, which is carried over.
      source_ids, source_mask, doc_mask, doc_embeddings: fields of `Batch`.
      passages: its optional fields about passages.
    """
    asked = questions._asdict()
    del asked["suffix_ids"], asked["suffix_mask"]  # they are part of source_ids
    return Batch(**asked, source_ids=source_ids, source_mask=source_mask, doc_mask=doc_mask,
                 doc_embeddings=doc_embeddings, **passages)


class _Passages(NamedTuple):
    """The passages of this host's questions, before they are joined to them."""

    tokens: list[list[Sequence[int]]]  # of every passage of every question
    fields: dict[str, Any]  # of `Batch`


def input_shape(longest: int, tokens: int, inputs: int, step: int, limit: int) -> tuple[int, int]:
    """Padded length of generator inputs, and how many tokens a question has when its inputs are
    packed; 0 = they are not.

    Args:
      longest: tokens of the longest input.
      tokens: of all inputs of the question with most; 0 = inputs are not packed.
      inputs: how many a question has.
      step: `RagBatcher.length_step`.
      limit: tokens that an input may have.
    """
    length = bucket(longest, step, limit)
    padded = inputs * length
    if not tokens or 4 * step > limit or bucket(tokens, inputs * step, padded) == padded:
        return length, 0  # not a step of each is saved
    return bucket(longest, 2 * step, limit), bucket(tokens, inputs * max(1, step // 2), padded)


class RagBatcher:
    """Questions with retrieved passages as `Batch`es.

    Args:
      questions: the tokenized questions.
      length_step: generator inputs are padded to multiples of this; see `QuestionTokens.batch`.
      embedding_width: E.
      null_document: one more input to each question, the last, without a passage.
      packed: `Batch.source_places` says where tokens are, if that leaves less padding. They are
        a multiple of half of length_step for each of K inputs, whose padded length, on which
        little depends then, is one of twice that step. Where length_step is more than a quarter of
        the longest, shapes are to be few, and inputs are not packed.
      groups: as for `QuestionTokens.batch`.
      read: what reads passages by themselves, `decoding.prefixes.Reader`; the batch then has
        `Batch.prefixes`. None = they are read with their question.
    """

    def __init__(self, questions: QuestionTokens, length_step: int, embedding_width: int,
                 null_document: bool = False, packed: bool = False, groups: Groups | None = None,
                 read: Callable[..., tuple[np.ndarray, np.ndarray]] | None = None):
        self.questions, self.packed, self.read = questions, packed, read
        self.groups = groups
        self.null_document = null_document
        self.length_step = length_step
        self.embedding_width = embedding_width

    def batch(self, rows: np.ndarray, retrieved: np.ndarray | None,
              index: Searchable | None = None,
              rng: np.random.Generator | None = None, weight: np.ndarray | None = None,
              own: np.ndarray | slice = slice(None)) -> Batch:  # noqa: B008 (immutable)
        """The batch of question `rows`.

        Args:
          rows: int[B], positions in `questions`.
          retrieved: int[B, K] rows of `index`, -1 for padding; None = closed book.
          index: holds the passages and their scores.
          rng, weight: as in `QuestionTokens.batch`.
          own: places in `rows` whose passages are looked up and which come back; the padded
            lengths and the draws are those of the whole batch.
        """
        questions = self.questions
        asked = questions.batch(rows, rng, weight, own, self.length_step, suffixes=False,
                                groups=self.groups)
        if retrieved is None:
            passages = self._closed_book(rows, own)
        else:
            passages = self._retrieved(rows, retrieved, index, own)
        length, packed = self._shape(self._lengths(rows, retrieved, index))
        inputs = [questions.format.join(passage, questions.suffixes[row])
                  for row, tokens in zip(rows[own], passages.tokens, strict=True)
                  for passage in tokens]
        if self.read is not None:
            passages.fields["prefixes"], inputs = self._in_two(passages.tokens, rows[own], inputs)
            length = max(SHORTEST_REST, 1 << (max(map(len, inputs)) - 1).bit_length())
        shape = (len(passages.tokens), -1, length)
        ids, mask = pad_rows(inputs, length, questions.format.tokenizer.pad)
        if packed:
            of_questions = mask.reshape(shape[0], -1)
            passages.fields["source_places"] = pad_rows(
                [np.flatnonzero(row) for row in of_questions], packed, of_questions.shape[1])[0]
        return assemble(asked, ids.reshape(shape), mask.reshape(shape), **passages.fields)

    def _in_two(self, passages: list[list[Sequence[int]]], rows: np.ndarray,
                inputs: list[list[int]]) -> tuple[Prefixes, list[list[int]]]:
        """What is kept of the passages of questions, and what follows them in their inputs.

        A passage is read as it is without any question: one that a question cuts is as long.
        """
        format, shape = self.questions.format, (len(rows), -1)
        after = [len(self.questions.suffixes[row]) + len(format.foot)
                 for row, tokens in zip(rows, passages, strict=True) for _ in tokens]
        lengths = [len(row) - rest for row, rest in zip(inputs, after, strict=True)]
        whole = [[*format.begin, *passage[: format.room]] for tokens in passages
                 for passage in tokens]
        kept = self.read(whole, [bucket(len(row), self.length_step, format.max_length)
                                 for row in whole])
        keys, values = (each.reshape(*shape, *each.shape[1:]) for each in kept)
        return (Prefixes(keys, values, np.array(lengths, np.int32).reshape(shape)),
                [row[length:] for row, length in zip(inputs, lengths, strict=True)])

    def _shape(self, lengths: np.ndarray) -> tuple[int, int]:
        """`input_shape` of a batch with inputs of so many tokens int64[B, K]."""
        return input_shape(
            int(lengths.max()), int(lengths.sum(axis=1).max()) if self.packed else 0,
            lengths.shape[1], self.length_step, self.questions.format.max_length)

    def lengths(self, rows: np.ndarray, retrieved: np.ndarray | None,
                index: Searchable | None = None) -> np.ndarray:
        """Tokens of the longest generator input of each question, int64[B]; as in `batch`."""
        return self._lengths(rows, retrieved, index).max(axis=1)

    def _lengths(self, rows: np.ndarray, retrieved: np.ndarray | None,
                 index: Searchable | None) -> np.ndarray:
        """Tokens of every generator input, int64[B, K], with a null document [B, K + 1]."""
        suffixes = np.array([[len(self.questions.suffixes[row])] for row in rows], np.int64)
        passages = np.zeros((len(rows), 1), np.int64)
        if retrieved is not None:
            table = index.passages.tokens(PASSAGE_TABLE)
            passages = table.lengths_of(np.maximum(retrieved, 0))
            passages = np.pad(passages, ((0, 0), (0, int(self.null_document))))
        return self.questions.format.joined_length(passages, suffixes)

    def _closed_book(self, rows: np.ndarray, own: np.ndarray | slice) -> _Passages:
        """One empty passage with prior 1 for each question."""
        count = len(rows[own])
        return _Passages([[[]]] * count, {
            "doc_embeddings": np.zeros((count, 1, self.embedding_width), np.float32),
            "doc_mask": np.ones((count, 1), bool)})

    def _retrieved(self, rows: np.ndarray, retrieved: np.ndarray,
                   index: Searchable, own: np.ndarray | slice) -> _Passages:
        """The passages in rows int[B, K] of an index."""
        safe, table = np.maximum(retrieved, 0), index.passages.tokens(PASSAGE_TABLE)
        empty = [[]] * self.null_document
        tokens = [[*(table.rows(int(row)) for row in docs), *empty] for docs in safe[own]]
        doc_ids = retrieved[own].astype(np.int32)
        fields = {"doc_ids": doc_ids, "doc_mask": doc_ids >= 0, "doc_embeddings": None}

        def asked(look: Callable[..., np.ndarray], *of_rows: np.ndarray) -> np.ndarray:
            """All processes ask for the same, where they share the devices that answer."""
            if index.division == "devices":
                return look(*of_rows)[own]
            return look(*(each[own] for each in of_rows))

        if isinstance(index, Bm25Index | HybridIndex | RerankedIndex):
            fields["doc_scores"] = asked(index.scores, self.questions.texts[rows], safe)
        if not isinstance(index, Bm25Index | RerankedIndex):
            embeddings = asked(index.embeddings, safe)
            fields["doc_embeddings"] = embeddings * fields["doc_mask"][..., None]
        return _Passages(tokens, fields)
