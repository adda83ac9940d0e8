"""Batches of the warm-ups: DPR or passages alone for the retriever, denoising for the generator."""

import functools
from collections import Counter
from collections.abc import Sequence, Set

import numpy as np

from rag_jax.config import BertConfig
from rag_jax.data import noise, order, packed
from rag_jax.data.batches import ENCODER_TABLE
from rag_jax.data.packed import Groups
from rag_jax.data.padding import bucket, halved, pad_rows
from rag_jax.data.questions import QuestionTokens
from rag_jax.data.text import Tokenizer, begin, encoder_input
from rag_jax.retrieval.passages import PassageStore
from rag_jax.retrieval.protocol import Passage
from rag_jax.types import RetrieverBatch, Seq2SeqBatch

REMOVED = 0.9  # share of the cloze queries that are removed from their passage (Lee et al. 2019)
CROP = (0.1, 0.5)  # shortest and longest crop, as shares of the text (Izacard et al. 2021)
TITLE_LAST = 0.7  # share of the queries of words that end with the title
COMMON, SAMPLE = 0.01, 10_000  # share of the passages that have a common word; passages looked at
UNKNOWN = 3  # most unknown words in a query


class RetrieverBatcher:
    """DPR training batches: positives, hard negatives, and who is whose positive.

    Questions without a positive passage are left out. Passages are padded to multiples of
    `length_step`, questions as in `QuestionTokens.batch`.
    """

    def __init__(self, questions: QuestionTokens, store: PassageStore, passage_length: int,
                 length_step: int, pad_id: int, hard_negatives: int):
        self.questions = questions
        self.table = store.tokens(ENCODER_TABLE)
        self.size = len(store)
        self.passage_length, self.length_step, self.pad_id = passage_length, length_step, pad_id
        self.hard_negatives = hard_negatives
        self.positives, self.negatives = [], []
        for example in questions.examples:
            self.positives.append([store.row_of(i) for i in example.positive_ids])
            self.negatives.append([store.row_of(i) for i in example.negative_ids])
        self.rows = np.array([r for r, p in enumerate(self.positives) if p], np.int64)

    def batch(self, step: int, batch_size: int, seed: int) -> RetrieverBatch:
        rng = order.generator(seed, 2, step)
        rows = self.rows[order.batch_indices(len(self.rows), batch_size, seed, step)]
        drawn = [_one_of(self.positives[r], rng) for r in rows]
        drawn += [_one_of(self.negatives[r], rng) if self.negatives[r] else rng.integers(self.size)
                  for _ in range(self.hard_negatives) for r in rows]
        passages = np.array(drawn, np.int64)
        asked = halved(self.questions.ids[rows], self.questions.mask[rows], self.length_step)
        longest = bucket(int(self.table.lengths_of(passages).max()), self.length_step,
                         self.passage_length)
        ids, mask = self.table.padded(passages, longest, self.pad_id)
        same = np.array([np.isin(passages, self.positives[r]) for r in rows])
        texts = np.unique(ids, axis=0, return_inverse=True)[1].reshape(-1)  # equal ones, one number
        same |= texts[None] == texts[: len(rows), None]
        np.fill_diagonal(same, False)
        return RetrieverBatch(*asked, ids, mask, same)


class PairBatcher:
    """Batches of the retriever's warm-up from passages alone: no question, answer or label.

    Every row is a query drawn from a passage and what is left of this passage, under its title;
    the other rows' passages are its negatives. Where nothing is left, the title alone has to be
    found, or the whole passage if it has none. Lengths are padded as in `RetrieverBatcher`.

    Args:
      store: the passages.
      tokenizer: the retriever's.
      pairs: how a query is drawn: `PAIRS`.
      question_length, passage_length: longest inputs in tokens, special tokens included.
      length_step: as for `RetrieverBatcher`.
      encoder: the retriever's, which may have prefixes and join titles to texts.
    """

    def __init__(self, store: PassageStore, tokenizer: Tokenizer, pairs: str,
                 question_length: int, passage_length: int, length_step: int,
                 encoder: BertConfig = BertConfig()):  # noqa: B008 (immutable)
        self.store, self.tokenizer, self.draw = store, tokenizer, PAIRS[pairs]
        if pairs == "words":
            common = common_words(store)
            self.draw = functools.partial(words, common=common, unknown=unknown_words(common))
        self.question_length, self.passage_length = question_length, passage_length
        self.length_step, self.encoder = length_step, encoder

    def batch(self, step: int, batch_size: int, seed: int) -> RetrieverBatch:
        rng = order.generator(seed, 2, step)
        rows = order.batch_indices(len(self.store), batch_size, seed, step)
        passages = [self.store[int(row)] for row in rows]
        queries, left = zip(*(self.draw(p, rng) for p in passages), strict=True)
        texts = [text if text or p.title else p.text
                 for text, p in zip(left, passages, strict=True)]
        tokenizer, longest = self.tokenizer, self.question_length
        asked = pad_rows(encoder_input(tokenizer, queries, None, longest, encoder=self.encoder),
                         longest, tokenizer.pad)
        read = encoder_input(tokenizer, [p.title for p in passages], texts, self.passage_length,
                             encoder=self.encoder)
        longest = bucket(max(map(len, read)), self.length_step, self.passage_length)
        ids, mask = pad_rows(read, longest, tokenizer.pad)
        # Neither a passage of the same text nor one of which the same is left is a negative.
        same = _equal([p.text for p in passages]) | _equal(read)
        np.fill_diagonal(same, False)
        return RetrieverBatch(*halved(*asked, self.length_step), ids, mask, same)


def _equal(items: Sequence) -> np.ndarray:
    """bool[B, B]: which of B items are equal."""
    first: dict[str, int] = {}
    keys = np.array([first.setdefault(str(item), len(first)) for item in items])
    return keys[:, None] == keys


def cloze(passage: Passage, rng: np.random.Generator) -> tuple[str, str]:
    """A sentence, and the text without it nine times in ten (Lee et al. 2019)."""
    parts = noise.sentences(passage.text)
    query = parts.pop(int(rng.integers(len(parts))))
    return query, noise.joined(parts) if rng.random() < REMOVED else passage.text


def words(passage: Passage, rng: np.random.Generator, common: Set[str],
          unknown: Sequence[str] = ()) -> tuple[str, str]:
    """The title after or before up to four common words of the text and up to three unknown ones,
    and the text; one time in two a query of `cloze`.

    A question names what it is about, as a title does, and what it asks for by words that many
    passages have, or none; rare ones are its answer. From cloze alone, a passage of one sentence
    teaches its title, and nothing of what it says. Without unknown words, those of a question, "in
    which part of the world", lead away from what it names.
    """
    if rng.random() < 0.5:
        return cloze(passage, rng)
    named = passage.title.split()
    asked = [word for word in _bare(passage.text) if word in common and word not in named]
    count = min(int(rng.integers(1, 5)), len(asked))
    drawn = [asked[i] for i in np.sort(rng.permutation(len(asked))[:count])]
    for _ in range(int(rng.integers(UNKNOWN + 1)) if unknown else 0):
        drawn.insert(int(rng.integers(len(drawn) + 1)), unknown[int(rng.integers(len(unknown)))])
    parts = (*drawn, passage.title) if rng.random() < TITLE_LAST else (passage.title, *drawn)
    return " ".join(filter(None, parts)), passage.text


def common_words(store: Sequence[Passage]) -> frozenset[str]:
    """Words that more than a hundredth of the passages have, of a sample of them."""
    rows = packed.sample(len(store), SAMPLE)
    times = Counter(word for row in rows for word in set(_bare(store[int(row)].text)))
    return frozenset(word for word, count in times.items() if count > COMMON * len(rows))


def unknown_words(common: Set[str]) -> list[str]:
    """Words that say hardly anything of passages: common ones backwards, of which rare ones may be
    words too."""
    return sorted({word[::-1] for word in common} - common)


def _bare(text: str) -> list[str]:
    return [word for word in (word.strip(".,;:!?()\"'") for word in text.split()) if word]


def crops(passage: Passage, rng: np.random.Generator) -> tuple[str, str]:
    """Two independent spans of words, a tenth to half of the text (Izacard et al. 2021)."""
    words = passage.text.split() or [""]

    def crop() -> str:
        length = max(1, int(len(words) * rng.uniform(*CROP)))
        start = int(rng.integers(len(words) - length + 1))
        return " ".join(words[start : start + length])

    return crop(), crop()


PAIRS = {"cloze": cloze, "crops": crops, "words": words}


def _one_of(rows: list[int], rng: np.random.Generator) -> int:
    """The row that rng.choice draws, without the array that it makes of the list."""
    return rows[int(rng.integers(len(rows)))]


class DenoisingBatcher:
    """BART denoising batches over a list of texts.

    Texts are cut to `length` - 2 tokens; the source is noised, the target the text and </s>.
    Both are padded to a multiple of `length_step`, and packed in `groups`, if there are any.
    """

    def __init__(self, texts: Sequence[str], tokenizer: Tokenizer, length: int, length_step: int,
                 mask_ratio: float, span_length: float, permute: float,
                 groups: Groups | None = None):
        self.texts, self.tokenizer = texts, tokenizer
        self.length, self.length_step, self.groups = length, length_step, groups
        self.mask_ratio, self.span_length, self.permute = mask_ratio, span_length, permute

    def batch(self, step: int, batch_size: int, seed: int) -> Seq2SeqBatch:
        rng = order.generator(seed, 3, step)
        rows = order.batch_indices(len(self.texts), batch_size, seed, step)
        tok, (sources, targets) = self.tokenizer, self._pairs(rows, rng)
        longest = bucket(max(map(len, sources + targets)), self.length_step, self.length)
        read, written = (pad_rows(of, longest, tok.pad) for of in (sources, targets))
        places = {}
        if self.groups is not None:
            rooms = (packed.room(usual, batch_size // self.groups.count) for usual in self._usual)
            places = {name: packed.places(mask, self.groups, room) for name, (_, mask), room in zip(
                ("source_places", "target_places"), (read, written), rooms, strict=True)}
        return Seq2SeqBatch(*read, *written, **places)

    @functools.cached_property
    def _usual(self) -> tuple[list[int], list[int]]:
        """Tokens of the sources, and of the targets, of a sample of texts."""
        pairs = self._pairs(packed.sample(len(self.texts)), np.random.default_rng(0))
        return tuple([len(row) for row in of] for of in pairs)

    def _pairs(self, rows: np.ndarray, rng: np.random.Generator
               ) -> tuple[list[list[int]], list[list[int]]]:
        """Sources and targets of texts."""
        tok, room = self.tokenizer, self.length - 2
        kept = [ids[:room] for ids in tok.encode([self.texts[r] for r in rows])]
        # Sentences are permuted after the cut: source and target then hold the same words.
        noised = tok.encode([noise.permute_sentences(tok.decode(ids), rng)
                             if rng.random() < self.permute else "" for ids in kept])
        sources, targets = [], []
        for ids, permuted in zip(kept, noised, strict=True):
            noisy = noise.infill((permuted or ids)[:room], tok.mask, self.mask_ratio,
                                 self.span_length, rng)
            sources.append([*begin(tok), *noisy[:room], tok.end])
            targets.append([*ids, tok.end])
        return sources, targets
