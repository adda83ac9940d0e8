"""Examples to padded host batches. Token ids of questions, answers and passages are made once."""

from collections.abc import Sequence

import numpy as np

from rag_jax.data import noise, order
from rag_jax.data.question_files import Example, check_labels
from rag_jax.data.text import (
    Cuts,
    GeneratorFormat,
    Tokenizer,
    encoder_input,
    label_tokens,
    pad_rows,
)
from rag_jax.retrieval.bm25 import Bm25Index
from rag_jax.types import Batch, QuestionBatch, RetrieverBatch, Seq2SeqBatch

PASSAGE_TABLE = "generator"  # token table of "title / text" in a passage store
ENCODER_TABLE = "document_encoder"  # token table of [CLS] title [SEP] text [SEP]


def bucket(length: int, step: int, longest: int) -> int:
    """`length` rounded up to a multiple of `step`, at most `longest`."""
    return min(longest, -(-max(length, 1) // step) * step)


class QuestionTokens:
    """Questions and answers as token ids.

    Args:
      examples: the questions; the first of `targets or answers` trains unless a seeded draw
        picks another.
      retriever_tokenizer, generator_format: of the model.
      max_question_length, max_target_length: tokens, special tokens included.
      uncased_roundtrip: the generator reads a question as the retriever's tokenizer gives it
        back, lower-cased and cut, as in Hugging Face's RAG.
      labels: the classes that the answers are; the target of one is its token of `label_tokens`.
      classifies: it is its number among them, for a classification head, and the decoder reads
        the question, cut to max_question_length.
    """

    def __init__(self, examples: Sequence[Example], retriever_tokenizer: Tokenizer,
                 generator_format: GeneratorFormat, max_question_length: int,
                 max_target_length: int, uncased_roundtrip: bool = False,
                 labels: tuple[str, ...] = (), classifies: bool = False):
        self.examples = list(examples)
        questions = [e.question for e in examples]
        self.texts = np.array(questions, object)  # as asked
        self.format = generator_format
        self.max_target_length = 1 if labels else max_target_length
        self.cuts = Cuts()  # by the retriever
        rows = encoder_input(retriever_tokenizer, questions, None, max_question_length, self.cuts)
        self.ids, self.mask = pad_rows(rows, max_question_length, retriever_tokenizer.pad)
        if uncased_roundtrip:
            questions = [retriever_tokenizer.decode(row) for row in rows]
        self.suffixes = generator_format.questions(questions)
        check_labels("questions", self.examples, labels)
        self._decoder_inputs = None
        if classifies:
            self._decoder_inputs = pad_rows(
                generator_format.alone(questions, max_question_length), max_question_length,
                generator_format.tokenizer.pad)
        codes = range(len(labels)) if classifies else label_tokens(
            generator_format.tokenizer, labels)
        self._targets = {label: [code] for label, code in zip(labels, codes, strict=True)}
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
            ids = tokenizer.encode([f" {answer}"])[0][: self.max_target_length - 1]
            self._targets[answer] = [*ids, tokenizer.end]
        return self._targets[answer]

    def targets(self, rows: np.ndarray, rng: np.random.Generator | None
                ) -> tuple[np.ndarray, np.ndarray]:
        """Targets int32[B, T] and mask; `rng` picks among several texts, None takes the first."""
        chosen = []
        for row in rows:
            texts = self.examples[row].targets or self.examples[row].answers or self._unknown
            pick = 0 if rng is None else int(rng.integers(len(texts)))
            chosen.append(self.target(texts[pick]))
        return pad_rows(chosen, self.max_target_length, self.format.tokenizer.pad)

    def decoder_inputs(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """What a `Batch` for a classification head has besides; nothing otherwise."""
        if self._decoder_inputs is None:
            return {}
        ids, mask = self._decoder_inputs
        return {"decoder_ids": ids[rows], "decoder_mask": mask[rows]}

    def batch(self, rows: np.ndarray, rng: np.random.Generator | None = None) -> QuestionBatch:
        """The batch of `rows` without passages, which the devices will find."""
        longest = max(map(len, self.suffixes))
        return QuestionBatch(
            self.ids[rows], self.mask[rows],
            *pad_rows([self.suffixes[row] for row in rows], longest, self.format.tokenizer.pad),
            *self.targets(rows, rng), np.ones(len(rows), np.float32),
            **self.decoder_inputs(rows))


class RagBatcher:
    """Questions with retrieved passages as `Batch`es.

    Args:
      questions: the tokenized questions.
      length_step: generator inputs are padded to multiples of this.
      embedding_width: E.
      null_document: one more input to each question, the last, without a passage.
    """

    def __init__(self, questions: QuestionTokens, length_step: int, embedding_width: int,
                 null_document: bool = False):
        self.questions = questions
        self.null_document = null_document
        self.length_step = length_step
        self.embedding_width = embedding_width

    def batch(self, rows: np.ndarray, retrieved: np.ndarray | None, index=None,
              rng: np.random.Generator | None = None, weight: np.ndarray | None = None,
              own: np.ndarray | slice = slice(None)) -> Batch:  # noqa: B008 (immutable)
        """The batch of question `rows`.

        Args:
          rows: int[B], positions in `questions`.
          retrieved: int[B, K] rows of `index`, -1 for padding; None = closed book: one empty
            passage with prior 1.
          index: a `PassageIndex` or `Bm25Index`.
          rng: picks among several answers; None takes the first.
          weight: float32[B], 0 for rows that only fill the batch; None = ones.
          own: places in `rows` whose passages are looked up and which come back; the padded
            lengths and the draws are those of the whole batch.
        """
        q = self.questions
        target_ids, target_mask = (x[own] for x in q.targets(rows, rng))
        longest = self._longest(rows, retrieved, index)
        rows = rows[own]
        count = len(rows)
        doc_ids, doc_scores, embeddings = None, None, None
        if retrieved is None:
            passages = [[[]]] * count
            embeddings = np.zeros((count, 1, self.embedding_width), np.float32)
            doc_mask = np.ones((count, 1), bool)
        else:
            doc_ids = retrieved[own].astype(np.int32)
            doc_mask = doc_ids >= 0
            safe = np.maximum(retrieved, 0)
            table, nothing = index.passages.tokens(PASSAGE_TABLE), [[]] * self.null_document
            passages = [[*(table.rows(int(d)) for d in docs), *nothing] for docs in safe[own]]
            if isinstance(index, Bm25Index):
                doc_scores = index.scores(q.texts[rows], safe[own])
            else:
                # All processes ask for the same, where they share the devices that answer.
                found = (index.embeddings(safe)[own] if index.division == "devices"
                         else index.embeddings(safe[own]))
                embeddings = found * doc_mask[..., None]
        inputs = [q.format.join(p, q.suffixes[row])
                  for row, docs in zip(rows, passages, strict=True) for p in docs]
        length = bucket(longest, self.length_step, q.format.max_length)
        ids, mask = pad_rows(inputs, length, q.format.tokenizer.pad)
        shape = (count, len(inputs) // count, length)
        return Batch(
            question_ids=q.ids[rows],
            question_mask=q.mask[rows],
            source_ids=ids.reshape(shape),
            source_mask=mask.reshape(shape),
            doc_embeddings=embeddings,
            doc_mask=doc_mask,
            target_ids=target_ids,
            target_mask=target_mask,
            weight=np.ones(count, np.float32) if weight is None else weight[own],
            doc_ids=doc_ids,
            doc_scores=doc_scores,
            **q.decoder_inputs(rows),
        )

    def _longest(self, rows: np.ndarray, retrieved: np.ndarray | None, index) -> int:
        """Tokens of the longest input of a whole batch."""
        suffixes = np.array([len(self.questions.suffixes[row]) for row in rows])
        passages = np.zeros((len(rows), 1), np.int64)
        if retrieved is not None:
            table = index.passages.tokens(PASSAGE_TABLE)
            passages = table.lengths_of(np.maximum(retrieved, 0))
        return int(self.questions.format.joined_length(passages, suffixes[:, None]).max())


class RetrieverBatcher:
    """DPR training batches: positives, hard negatives, and who is whose positive.

    Questions without a positive passage are left out.
    """

    def __init__(self, questions: QuestionTokens, store, passage_length: int, pad_id: int,
                 hard_negatives: int):
        self.questions = questions
        self.table = store.tokens(ENCODER_TABLE)
        self.size = len(store)
        self.passage_length, self.pad_id = passage_length, pad_id
        self.hard_negatives = hard_negatives
        self.positives, self.negatives = [], []
        for example in questions.examples:
            self.positives.append([store.row_of(i) for i in example.positive_ids])
            self.negatives.append([store.row_of(i) for i in example.negative_ids])
        self.rows = np.array([r for r, p in enumerate(self.positives) if p], np.int64)

    def batch(self, step: int, batch_size: int, seed: int) -> RetrieverBatch:
        rng = order.generator(seed, 2, step)
        rows = self.rows[order.batch_indices(len(self.rows), batch_size, seed, step)]
        positives = np.array([rng.choice(self.positives[r]) for r in rows])
        hard = [
            rng.choice(self.negatives[r]) if self.negatives[r] else rng.integers(self.size)
            for _ in range(self.hard_negatives) for r in rows
        ]
        passages = np.concatenate([positives, np.array(hard, np.int64)]).astype(np.int64)
        known = [set(self.positives[r]) for r in rows]
        same = np.array([[p in k for p in passages] for k in known])
        np.fill_diagonal(same, False)
        ids, mask = self.table.padded(passages, self.passage_length, self.pad_id)
        return RetrieverBatch(self.questions.ids[rows], self.questions.mask[rows], ids, mask, same)


class DenoisingBatcher:
    """BART denoising batches over a list of texts.

    Texts are cut to `length` - 2 tokens; the source is noised, the target the text and </s>.
    Both are padded to a multiple of `length_step`.
    """

    def __init__(self, texts: Sequence[str], tokenizer: Tokenizer, length: int, length_step: int,
                 mask_ratio: float, span_length: float, permute: float):
        self.texts, self.tokenizer = list(texts), tokenizer
        self.length, self.length_step = length, length_step
        self.mask_ratio, self.span_length, self.permute = mask_ratio, span_length, permute

    def batch(self, step: int, batch_size: int, seed: int) -> Seq2SeqBatch:
        rng = order.generator(seed, 3, step)
        rows = order.batch_indices(len(self.texts), batch_size, seed, step)
        tok, room = self.tokenizer, self.length - 2
        kept = [ids[:room] for ids in tok.encode([self.texts[r] for r in rows])]
        # Sentences are permuted after the cut: source and target then hold the same words.
        noised = tok.encode([noise.permute_sentences(tok.decode(ids), rng)
                             if rng.random() < self.permute else "" for ids in kept])
        sources, targets = [], []
        for ids, permuted in zip(kept, noised, strict=True):
            noisy = noise.infill((permuted or ids)[:room], tok.mask, self.mask_ratio,
                                 self.span_length, rng)
            sources.append([tok.start, *noisy[:room], tok.end])
            targets.append([*ids, tok.end])
        longest = bucket(max(map(len, sources + targets)), self.length_step, self.length)
        return Seq2SeqBatch(*pad_rows(sources, longest, tok.pad),
                            *pad_rows(targets, longest, tok.pad))
