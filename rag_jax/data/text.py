"""Text to token ids and back: tokenizers, the paper's chunks, inputs of encoders and generators.

The hot path uses the `tokenizers` library; transformers is imported only to read names of the
Hugging Face hub and folders of its checkpoints.
"""

import copy
import functools
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rag_jax import files
from rag_jax.config import BertConfig
from rag_jax.data import tokenizer_file
from rag_jax.errors import DataError

SENTINELS = ("<extra_id_0>", "▁<extra_id_0>")  # T5's and mT5's, in the place of a mask
# Fields of tokenizer_config.json that name a special token, and the usual tokens where they name
# none. The named one comes first: Gemma's <s> and </s> are tags of HTML, and its texts end with
# <eos>.
ROLES = {("bos_token", "cls_token"): ("<s>", "[CLS]"),
         ("eos_token", "sep_token"): ("</s>", "[SEP]"),
         ("pad_token",): ("<pad>", "[PAD]"),
         ("mask_token",): ("<mask>", "[MASK]", *SENTINELS)}


class PairForm(NamedTuple):
    """The ids before, between and after two texts that are read together, and the token type of the
    second text; that of the first is 0."""

    before: list[int]
    between: list[int]
    after: list[int]
    second_type: int


class Joint(NamedTuple):
    """How a text continues another: encoded behind `text`, without the first `dropped` tokens."""

    text: str = ""
    dropped: int = 0


class Tokenizer:
    """Token ids of plain text (no special tokens) and back, around a `tokenizers.Tokenizer`.

    `start`, `end`, `pad` and `mask` are the special tokens that the tokenizer_config.json names. Of
    those that it leaves out, they are <s> </s> <pad> <mask> for BART, [CLS] [SEP] [PAD] [MASK] for
    BERT and None </s> <pad> <extra_id_0> for T5 vocabularies; its end stands for what is missing.

    Attributes:
      config: the fields kept of the tokenizer_config.json: the names of special tokens, and the
        chat_template.
      gap: how an answer continues the text before it.
      own_end: the end token of the vocabulary; a copy for answers may have another `end`.
      has_types: the two texts of a pair have token types of their own.
    """

    def __init__(self, backend: Any, config: Mapping[str, str] | None = None,
                 has_types: bool = True):
        self._backend, self.config, self.gap = backend, dict(config or {}), Joint(" ")
        self.has_types = has_types
        self._backend.no_padding()
        self._backend.no_truncation()
        self._backend.encode_special_tokens = True  # "</s>" in a text is letters, not an end
        names = [next((n for n in (*map(self.config.get, own), *usual)
                       if n and backend.token_to_id(n) is not None), None)
                 for own, usual in ROLES.items()]
        begins = names[3] not in SENTINELS  # T5's inputs begin with their text
        if begins and (end := self.config.get("eos_token")) and end in names:
            names = [name or end for name in names]
        if None in (names if begins else names[1:]):
            raise DataError(
                f"the tokenizer lacks a start, end, padding or mask token: found {names}; BART has "
                "<s> </s> <pad> <mask>, BERT [CLS] [SEP] [PAD] [MASK]; if it has others, name them "
                f"in {tokenizer_file.SETTINGS}, the end as eos_token")
        self.end, self.pad, self.mask = map(backend.token_to_id, names[1:])
        self.own_end = self.end
        self.start = backend.token_to_id(names[0]) if begins else None
        self.mark([self.end, *({self.start} - {None})])
        self._letter = backend.encode("a", add_special_tokens=False).ids
        # Where bytes are tokens, one that is in no letter: a run of bytes with it has no letters.
        self._stray = backend.token_to_id("<0xFF>")

    @classmethod
    def load(cls, source: str | pathlib.Path, rows: int = 0) -> "Tokenizer":
        """From a tokenizer.json, a folder that holds one, or a Hugging Face name or folder.

        Args:
          source: path or name.
          rows: rows of the model's token table; 0 = not known. A padding token without a row, such
            as one that was added to Llama's tokenizer alone, is replaced by the end token, because
            no model reads padding.

        Raises:
          DataError: there is no tokenizer, or it is damaged.
        """
        parts = tokenizer_file.read(source)
        try:
            loaded = cls(*parts)
        except DataError as error:
            raise DataError(f"{source}: {error}") from None
        if 0 < rows <= loaded.pad:
            loaded.pad = loaded.end
        return loaded

    def save(self, directory: str | pathlib.Path) -> None:
        """Writes DIRECTORY/tokenizer.json; last, so that where it is there, all is."""
        path = pathlib.Path(directory)
        path.mkdir(parents=True, exist_ok=True)
        if self.config:
            files.write_json(path / tokenizer_file.SETTINGS, self.config)
        files.write_text(path / tokenizer_file.TOKENIZER, self._backend.to_str(pretty=True))

    @functools.cached_property
    def vocab_size(self) -> int:
        """Rows of a token table with one for every id; the ids may have gaps."""
        return 1 + max(self._backend.get_vocab().values())

    @property
    def needed_rows(self) -> int:
        """Rows that a token table needs. Special tokens that no text becomes, such as Gemma 3's for
        images, may have ids beyond it. So may the padding token, and the mask token, as that of
        bart-large-cnn, which only the warm-up of a generator reads."""
        unused = {i for i, token in self._backend.get_added_tokens_decoder().items()
                  if token.special} | {self.pad, self.mask}
        return 1 + max(set(self._backend.get_vocab().values()) - (unused - {self.start, self.end}))

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, without special tokens."""
        batch = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in batch]

    @property
    def begins_words(self) -> bool:
        """Whether the tokenizer puts a space before a text; one in the text would be a second."""
        with_space, without = (self._backend.encode(text, add_special_tokens=False).tokens
                               for text in (" a", "a"))
        return "".join(without).startswith("▁") and with_space != without

    @functools.cached_property
    def pair_form(self) -> PairForm | None:
        """How the post-processor joins two texts; None = it puts no token between them."""
        pair = self._backend.encode("a", "a")
        first, second = ([place for place, of in enumerate(pair.sequence_ids) if of == number]
                         for number in (0, 1))
        between = pair.ids[first[-1] + 1 : second[0]] if first and second else []
        second_type = pair.type_ids[second[0]] if self.has_types and second else 0
        return PairForm(pair.ids[: first[0]], between, pair.ids[second[-1] + 1 :],
                        second_type) if between else None

    def mark(self, ids: Iterable[int]) -> None:
        """Makes special tokens of those that were added and not said to be special: in a text their
        names are letters, and an answer's text leaves them out. White space stays text."""
        from tokenizers import AddedToken

        added = self._backend.get_added_tokens_decoder()
        plain = [added[i] for i in dict.fromkeys(ids) if i in added and not added[i].special
                 and added[i].content.strip("▁ \t\r\n")]
        self._backend.add_special_tokens([AddedToken(
            one.content, single_word=one.single_word, lstrip=one.lstrip, rstrip=one.rstrip,
            normalized=one.normalized, special=True) for one in plain])

    def is_added(self, token_id: int) -> bool:
        """Whether a token was added to the vocabulary, as markers are."""
        return token_id in self._backend.get_added_tokens_decoder()

    def encode_behind(self, joint: Joint, texts: Sequence[str]) -> list[list[int]]:
        """Ids of texts that continue another."""
        return [row[joint.dropped :] for row in self.encode([joint.text + text for text in texts])]

    def encode_answers(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text as the continuation of another."""
        return self.encode_behind(self.gap, texts)

    def encode_within(self, text: str) -> list[int]:
        """Ids of a text that continues any other, without the space that tokenizers may put before
        a text that stands alone; names of special tokens are letters, but in `encode_written`."""
        for before in (".", "a"):  # with one of them the text may merge into a single token
            begun, whole = self.encode([before, before + text])
            if whole[: len(begun)] == begun and len(whole) > len(begun):
                return whole[len(begun) :]
        return self.encode([text])[0]

    def encode_written(self, text: str, first: bool = False, complete: bool = False) -> list[int]:
        """Ids of a part of a prompt, in which the names of special tokens are these tokens.

        Args:
          first: with the tokens that the tokenizer puts before a text; else it continues another.
          complete: of a text that has such tokens already, as that of a chat template.
        """
        self._backend.encode_special_tokens = False
        try:
            if not first:
                return self.encode_within(text)
            ids, = self.encode([text])
        finally:
            self._backend.encode_special_tokens = True
        if complete:
            return ids
        letter = self._backend.encode("a")
        begun = letter.ids[: letter.sequence_ids.index(0)] if self._letter else []
        return ids if ids[: len(begun)] == begun else [*begun, *ids]

    def encode_part(self, text: str, first: bool = False, complete: bool = False
                    ) -> tuple[list[int], Joint]:
        """Ids of a part of a prompt, as `encode_written`, and how texts that come after it continue
        it: so that both together are the ids of the whole, unless the two merge. A space at its end
        is theirs."""
        ways = [(text, Joint()), (text, Joint("\n", len(self.encode(["\n"])[0])))]
        if text.endswith(" "):  # which Llama 2's tokenizer writes itself
            ways = [(text[:-1], Joint(" ")), (text[:-1], Joint())]
        whole = self.encode_written(text + "a", first, complete)
        for part, joint in ways:
            ids = self.encode_written(part, first, complete)
            if [*ids, *self.encode_behind(joint, ["a"])[0]] == whole:
                return ids, joint
        return self.encode_written(ways[0][0], first, complete), ways[0][1]

    def answering(self, end: int, gap: Joint) -> "Tokenizer":
        """A copy for answers that end with this token and so continue the text before them."""
        other = copy.copy(self)
        other.end, other.gap = end, gap
        return other

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids; special tokens are left out and outer spaces stripped."""
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=True).strip()

    def decode_settled(self, ids: Sequence[int]) -> str:
        """The beginning of the ids' text that no further ids can change: a letter that lacks bytes,
        and bytes that further ones could turn into other letters, are left out."""
        text = self.decode(ids if self._stray is None else [*ids, self._stray])
        return text.rstrip("\ufffd").rstrip()

    def piece(self, token_id: int) -> str:
        """Text of one token, special or not, with the space before a word; bytes that are no whole
        letter come as "�"."""
        before = self._letter
        text, known = (self._backend.decode(ids, skip_special_tokens=False)
                       for ids in ([*before, int(token_id)], before))
        return text.removeprefix(known)


def begin(tokenizer: Tokenizer) -> list[int]:
    """The ids before a text: <s>, where the vocabulary has one."""
    return [] if tokenizer.start is None else [tokenizer.start]


def chunks(text: str, words: int = 100) -> Iterator[str]:
    """The paper's disjoint chunks: at most `words` words each, in order, none left out.

    Source: section 3, "each Wikipedia article is split into disjoint 100-word chunks".
    """
    pieces = text.split()
    for start in range(0, len(pieces), words):
        yield " ".join(pieces[start : start + words])


class Cuts:
    """How many texts were cut, and how many of their tokens were lost by it."""

    def __init__(self):
        self.texts = self.cut = self.tokens = self.lost = 0

    def count(self, lengths: np.ndarray | Sequence[int], kept: np.ndarray | Sequence[int]) -> None:
        """Adds texts with their tokens, and how many of each were kept."""
        lost = np.asarray(lengths, np.int64) - np.asarray(kept, np.int64)
        self.texts, self.cut = self.texts + lost.size, self.cut + int((lost > 0).sum())
        self.tokens, self.lost = self.tokens + int(np.sum(lengths)), self.lost + int(lost.sum())

    def __str__(self) -> str:
        share = 100 * self.lost / max(self.tokens, 1)
        return (f"{self.cut} of {self.texts} passages are cut, {self.lost} of {self.tokens} tokens "
                f"lost ({share:.1f} %)")


def encoder_input(tokenizer: Tokenizer, firsts: Sequence[str], seconds: Sequence[str] | None,
                  max_length: int, cuts: Cuts | None = None,
                  encoder: BertConfig = BertConfig()) -> list[list[int]]:  # noqa: B008 (immutable)
    """BERT inputs: [CLS] first [SEP], or [CLS] first [SEP] second [SEP] for passages.

    As in DPR, `first` is the question, or a passage's title and `second` its text; a long input
    is cut before the last [SEP], and counted in `cuts`; token types are all 0. The encoder may
    join title and text, and may have prefixes.
    """
    prefix = encoder.query_prefix if seconds is None else encoder.passage_prefix
    if seconds is not None and encoder.titles == "joined":
        firsts = [f"{a} {b}" if a else b for a, b in zip(firsts, seconds, strict=True)]
        seconds = None
    if prefix:
        firsts = [prefix + text for text in firsts]
    rows = tokenizer.encode(firsts)
    if seconds is not None:
        rows = [a + [tokenizer.end] + b
                for a, b in zip(rows, tokenizer.encode(seconds), strict=True)]
    if cuts is not None:
        lengths = np.array([len(row) for row in rows], np.int64)
        cuts.count(lengths, np.minimum(lengths, max_length - 2))
    return [[tokenizer.start, *row[: max_length - 2], tokenizer.end] for row in rows]


def label_tokens(tokenizer: Tokenizer, labels: Sequence[str]) -> list[int]:
    """One token for each label, by which it differs from all others.

    The labels are tokenized as inside a text. The tokens are those at the first place where no two
    labels have the same: with BART's vocabulary place one, with a small one perhaps the place after
    a space.

    Raises:
      DataError: there is no such place.
    """
    if not labels:
        return []
    rows = tokenizer.encode_answers(labels)
    for tokens in zip(*rows, strict=False):
        if len(set(tokens)) == len(labels):
            return list(tokens)
    raise DataError(
        f"labels: config.model.head=label_token tells {', '.join(map(repr, labels))} by one token "
        "each, and at no place do the tokens of all differ; name other labels, or set "
        "config.model.head=classification")


class GeneratorFormat:
    """The generator's input: <s> title / text // question </s>.

    White space is normalised, a passage without a title has no " / ", and a long input loses the
    end of its passage; only a question that takes more than half of it is cut. `like_hugging_face`
    builds the string of Hugging Face's RAG instead: titles lose one quotation mark at either end,
    double spaces are replaced once, and a long input loses its right end, question first.
    `question_first` is Fusion-in-Decoder's form, which Flan-T5 knows, too: question: Q title: T
    context: text </s>. With `uncased_questions` a question is as the retriever's tokenizer gives it
    back, lower-cased and cut, as in Hugging Face's RAG.
    """

    title_separator, question_separator = " / ", " // "

    def __init__(self, tokenizer: Tokenizer, max_length: int, like_hugging_face: bool = False,
                 question_first: bool = False, uncased_questions: bool = False):
        self.tokenizer, self.max_length = tokenizer, max_length
        self.like_hugging_face = like_hugging_face
        self.question_first, self.uncased_questions = question_first, uncased_questions
        self.begin, self.foot = begin(tokenizer), [tokenizer.end]  # around every input
        self.begin_alone = self.begin  # before a text by itself
        self.start: int | None = None  # the decoder's first input, where inputs decide it
        # Tokens of passage and question that there is room for between them.
        self.room = max_length - len(self.begin) - 1

    def _head(self, title: str) -> str:
        """What stands before a passage's text."""
        if self.question_first:
            return f"title: {title} context: " if title else "context: "
        if self.like_hugging_face:
            return title.removeprefix('"').removesuffix('"') + self.title_separator
        return title + self.title_separator if title else ""

    def passages(self, titles: Sequence[str], texts: Sequence[str]) -> list[list[int]]:
        """Ids of "title / text", which a passage store keeps as its token table."""
        if self.like_hugging_face:
            after = self.question_separator
            joined = [self._head(t) + x + after for t, x in zip(titles, texts, strict=True)]
            return self.tokenizer.encode(
                [text.replace("  ", " ").removesuffix(after) for text in joined])
        joined = [self._head(t) + x for t, x in zip(titles, texts, strict=True)]
        return self.tokenizer.encode([" ".join(text.split()) for text in joined])

    def questions(self, questions: Sequence[str]) -> list[list[int]]:
        """Ids of " // question", to be joined to a passage's; at most half the input, but where the
        whole is cut as Hugging Face does."""
        if self.like_hugging_face:
            return self.tokenizer.encode(
                [(self.question_separator + q).replace("  ", " ") for q in questions])
        before = "question: " if self.question_first else self.question_separator
        rows = self.tokenizer.encode([before + " ".join(q.split()) for q in questions])
        return [row[: self.max_length // 2] for row in rows]

    def alone(self, texts: Sequence[str], max_length: int) -> list[list[int]]:
        """<s> text </s>, as a classifier's decoder reads a question; cut before </s>."""
        rows = self.tokenizer.encode([" ".join(text.split()) for text in texts])
        room = max_length - len(self.begin_alone) - 1
        return [[*self.begin_alone, *row[:room], self.tokenizer.end] for row in rows]

    def joined_length(self, passage: np.ndarray, question: np.ndarray) -> np.ndarray:
        """Length of a joined input, from the lengths of its passage and its question."""
        return np.minimum(passage + question, self.room) + self.max_length - self.room

    def kept(self, passage: np.ndarray, question: np.ndarray) -> np.ndarray:
        """Tokens of the passage that a joined input keeps, from the lengths of both."""
        if self.like_hugging_face:
            question = np.zeros_like(question)
        return np.minimum(passage, np.maximum(self.room - question, 0))

    def text_of(self, title: str, ids: Sequence[int]) -> str:
        """The text, without its title, of the first ids of a passage."""
        before = " ".join(self._head(title).split())
        text = " ".join(self.tokenizer.decode(ids).split())
        return "" if before.startswith(text) else text.removeprefix(before).strip()

    def join(self, passage: Sequence[int], question: Sequence[int]) -> list[int]:
        """One input row; the passage gets what the question leaves of `max_length`."""
        if not self.like_hugging_face:
            passage = passage[: max(self.room - len(question), 0)]
        both = [*question, *passage] if self.question_first else [*passage, *question]
        return [*self.begin, *both[: self.room], *self.foot]
