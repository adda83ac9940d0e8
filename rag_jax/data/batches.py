"""Questions with their passages as padded host batches, and the one place that makes a `Batch`."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rag_jax.data import packed
from rag_jax.data.packed import Groups
from rag_jax.data.padding import bucket, pad_rows
from rag_jax.data.questions import QuestionTokens
from rag_jax.retrieval.bm25 import Bm25Index
from rag_jax.retrieval.hybrid import HybridIndex
from rag_jax.retrieval.index import PassageIndex
from rag_jax.retrieval.passages import check_token_ids
from rag_jax.retrieval.reranked import RerankedIndex
from rag_jax.types import Array, Batch, Prefixes, QuestionBatch

Searchable = PassageIndex | Bm25Index | HybridIndex | RerankedIndex
PASSAGE_TABLE = "generator"  # token table of "title / text" in a passage store
ENCODER_TABLE = "document_encoder"  # token table of [CLS] title [SEP] text [SEP]
SHORTEST_REST = 16  # least padded length of the tokens after a passage that is read by itself


def assemble(questions: QuestionBatch, source_ids: Array, source_mask: Array, doc_mask: Array,
             doc_embeddings: Array | None, **passages: Array | None) -> Batch:
    """A `Batch` of questions and their passages; on the host or inside a jitted program.

    Args:
      questions: their batch, whose fields are taken over.
      source_ids, source_mask, doc_mask, doc_embeddings: fields of `Batch`.
      passages: its optional fields about passages.
    """
    asked = questions._asdict()
    del asked["suffix_ids"], asked["suffix_mask"]  # they are part of source_ids
    return Batch(**asked, source_ids=source_ids, source_mask=source_mask, doc_mask=doc_mask,
                 doc_embeddings=doc_embeddings, **passages)


def input_shape(longest: int, tokens: int, inputs: int, step: int, limit: int) -> tuple[int, int]:
    """Padded length of generator inputs, and the places for the tokens of a group when its inputs
    are packed; 0 = they are not.

    Args:
      longest: tokens of the longest input.
      tokens: the most that the inputs of one group have together; 0 = inputs are not packed.
      inputs: generator inputs per group.
      step: `RagBatcher.length_step`.
      limit: tokens that an input may have.
    """
    length = bucket(longest, step, limit)
    padded = inputs * length
    if not tokens or 4 * step > limit or bucket(tokens, inputs * step, padded) == padded:
        return length, 0  # packing would not save a step of each input
    # The sum of N lengths varies by their deviation times sqrt(N).
    unit = min(2 * step * math.isqrt(inputs), inputs * max(1, step // 2))
    places = bucket(tokens, unit, padded)
    return (bucket(longest, 2 * step, limit), places) if places < padded else (length, 0)


def input_places(lengths: np.ndarray, groups: Groups | None, step: int, limit: int
                 ) -> tuple[int, np.ndarray | None]:
    """Padded length of inputs of so many tokens, int[B, K], and their tokens' places in each group,
    int32[G, N]; None = inputs are not packed. step, limit: as for `input_shape`."""
    inputs, tokens = lengths.shape[1], 0
    if groups is not None:
        inputs *= len(lengths) // groups.count
        tokens = int(groups.rows(lengths).sum(axis=1).max())
    length, room = input_shape(int(lengths.max()), tokens, inputs, step, limit)
    if not room:
        return length, None
    mask = np.arange(length) < lengths[..., None]  # -> [B, K, S]
    return length, packed.places(mask.reshape(len(lengths), -1), groups, room)


class RagBatcher:
    """Questions with retrieved passages as `Batch`es.

    Args:
      questions: the tokenized questions.
      length_step: generator inputs are padded to multiples of this; see `QuestionTokens.batch`.
      embedding_width: E.
      null_document: one more input to each question, the last, without a passage.
      groups: in which targets are packed, as for `QuestionTokens.batch`; None = nothing is packed.
        Inputs are packed too, where that leaves less padding: `Batch.source_places` then says where
        their tokens are. For a group of N inputs the number of places is a multiple of twice
        length_step times sqrt(N), or, if that is less, of half of it times N; the inputs' padded
        length, which then costs little, is a multiple of twice length_step. Where length_step is
        more than a quarter of the longest input, few shapes are wanted, and inputs are not packed.
      read: reads passages by themselves (`decoding.prefixes.Reader`); the batch then has
        `Batch.prefixes`. None = passages are read with their question.
    """

    def __init__(self, questions: QuestionTokens, length_step: int, embedding_width: int,
                 null_document: bool = False, groups: Groups | None = None,
                 read: Callable[..., tuple[np.ndarray, np.ndarray]] | None = None):
        self.questions, self.groups, self.read = questions, groups, read
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
          own: places in `rows` that are returned, with their passages; the padded lengths and the
            draws are those of the whole batch.
        """
        questions, format = self.questions, self.questions.format
        asked = questions.batch(rows, rng, weight, own, self.length_step, suffixes=False,
                                groups=self.groups)
        lengths = self.lengths(rows, retrieved, index)
        length, places = input_places(lengths, self.groups, self.length_step, format.max_length)
        passages, fields = (self._closed_book(rows[own]) if retrieved is None
                            else self._retrieved(rows, retrieved, index, own))
        suffixes = [questions.suffixes[row] for row in np.repeat(rows[own], lengths.shape[1])]
        inputs = list(map(format.join, passages, suffixes))
        if self.read is not None:
            fields["prefixes"], inputs = self._in_two(passages, suffixes, inputs, lengths.shape[1])
            length = max(SHORTEST_REST, 1 << (max(map(len, inputs)) - 1).bit_length())
        shape = (-1, lengths.shape[1], length)
        ids, mask = pad_rows(inputs, length, format.tokenizer.pad)
        if places is not None:
            fields["source_places"] = self.groups.own(places, own, len(rows))
        return assemble(asked, ids.reshape(shape), mask.reshape(shape), **fields)

    def _in_two(self, passages: list[Sequence[int]], suffixes: list[list[int]],
                inputs: list[list[int]], count: int) -> tuple[Prefixes, list[list[int]]]:
        """The states of passages, and the rest of each input after its passage.

        count: inputs per question. A passage is read whole, even where its question cuts it.
        """
        format = self.questions.format
        lengths = [len(row) - len(suffix) - len(format.foot)
                   for row, suffix in zip(inputs, suffixes, strict=True)]
        whole = [[*format.begin, *passage[: format.room]] for passage in passages]
        kept = self.read(whole, [bucket(len(row), self.length_step, format.max_length)
                                 for row in whole])
        keys, values = (each.reshape(-1, count, *each.shape[1:]) for each in kept)
        ids, _ = pad_rows(whole, keys.shape[-1], format.tokenizer.pad)
        return (Prefixes(keys, values, np.array(lengths, np.int32).reshape(-1, count),
                         ids.reshape(-1, count, ids.shape[1])),
                [row[length:] for row, length in zip(inputs, lengths, strict=True)])

    def lengths(self, rows: np.ndarray, retrieved: np.ndarray | None,
                index: Searchable | None = None) -> np.ndarray:
        """Tokens of every generator input, int64[B, K], with a null document [B, K + 1]; as in
        `batch`."""
        suffixes = np.array([[len(self.questions.suffixes[row])] for row in rows], np.int64)
        passages = np.zeros((len(rows), 1), np.int64)
        if retrieved is not None:
            table = index.passages.tokens(PASSAGE_TABLE)
            passages = table.lengths_of(np.maximum(retrieved, 0))
            passages = np.pad(passages, ((0, 0), (0, int(self.null_document))))
        return self.questions.format.joined_length(passages, suffixes)

    def _closed_book(self, rows: np.ndarray) -> tuple[list[Sequence[int]], dict[str, Any]]:
        """One empty passage with prior 1 for each question: its tokens, and fields of `Batch`."""
        return [()] * len(rows), {
            "doc_embeddings": np.zeros((len(rows), 1, self.embedding_width), np.float32),
            "doc_mask": np.ones((len(rows), 1), bool)}

    def _retrieved(self, rows: np.ndarray, retrieved: np.ndarray, index: Searchable,
                   own: np.ndarray | slice) -> tuple[list[Sequence[int]], dict[str, Any]]:
        """The passages in rows int[B, K] of an index: their tokens, and fields of `Batch`."""
        safe, table = np.maximum(retrieved, 0), index.passages.tokens(PASSAGE_TABLE)
        empty = [()] * self.null_document
        tokens = [passage for docs in safe[own]
                  for passage in (*(table.row(int(row)) for row in docs), *empty)]
        for passage in tokens:
            check_token_ids(np.asarray(passage), self.questions.format.tokenizer.vocab_size,
                            index.passages.path, PASSAGE_TABLE)
        doc_ids = retrieved[own].astype(np.int32)
        fields = {"doc_ids": doc_ids, "doc_mask": doc_ids >= 0, "doc_embeddings": None}

        def asked(look: Callable[..., np.ndarray], *of_rows: np.ndarray) -> np.ndarray:
            """Looks up `own`; processes that share the devices of an index look up all rows."""
            if index.division == "devices":
                return look(*of_rows)[own]
            return look(*(each[own] for each in of_rows))

        if isinstance(index, Bm25Index | HybridIndex | RerankedIndex):
            fields["doc_scores"] = asked(index.scores, self.questions.texts[rows], safe)
        if not isinstance(index, Bm25Index | RerankedIndex):
            embeddings = asked(index.embeddings, safe)
            fields["doc_embeddings"] = embeddings * fields["doc_mask"][..., None]
        return tokens, fields
