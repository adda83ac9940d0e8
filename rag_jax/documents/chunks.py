"""Dividing documents into cited passages of a limited number of words or tokens."""

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterator, Sequence

from rag_jax.citation import Citation
from rag_jax.documents.document import Document
from rag_jax.errors import UserError
from rag_jax.retrieval.bm25 import CJK, marks
from rag_jax.retrieval.protocol import Passage

# Titles and texts of some passages -> the number of tokens of each, as the encoder reads it.
Measure = Callable[[Sequence[str], Sequence[str]], Sequence[int]]
LEAST_TOKENS = 32
LONGEST_WORD = 40  # characters; a longer one counts as several words, and may be cut
# The end of a sentence, with closing quotes and brackets, also of Chinese and Japanese; an empty
# line.
_END = re.compile(r"""[.!?\u2026]["'\u201d\u2019\u00bb)\]]*(?=\s)"""
                  r"|[\u3002\uff01\uff1f][\u300d\u300f\u201d]?"
                  r"|\n[^\S\n]*\n")


@functools.cache
def _word() -> re.Pattern:
    """The pattern of a word. In Chinese and Japanese, which have no spaces, each character is one.

    A word that is cut keeps the combining marks of its last letter.
    """
    return re.compile(rf"[{CJK}]|[^\s{CJK}]{{1,{LONGEST_WORD}}}[{marks()}]{{0,8}}")


@dataclasses.dataclass(frozen=True)
class Chunking:
    """How documents are divided.

    Attributes:
      words: at most, of a passage without its title; the paper has 100.
      tokens: at most, of a passage as the encoder reads it, in place of `words`; 0 = by words.
      overlap: words (or tokens) at most, of whole sentences at the end of a passage that the next
        one repeats; 0 = disjoint, as in the paper.

    Raises:
      UserError: a number is not allowed.
    """

    words: int = 100
    tokens: int = 0
    overlap: int = 0

    def __post_init__(self) -> None:
        if not all(type(number) is int for number in dataclasses.astuple(self)):
            raise UserError(f"{self}: words, tokens and overlap are integers")
        if self.words < 1 or self.overlap < 0 or (self.tokens and self.tokens < LEAST_TOKENS):
            raise UserError(f"chunks of {self.words} words, {self.tokens} tokens, overlap "
                            f"{self.overlap}: allowed are 1 word or more, {LEAST_TOKENS} tokens or "
                            "more, or 0 for none, and an overlap of 0 or more")
        if 2 * self.overlap > (self.tokens or self.words):
            raise UserError(f"an overlap of {self.overlap}: allowed is at most half of a passage, "
                            f"{(self.tokens or self.words) // 2}")


@dataclasses.dataclass(frozen=True)
class Window:
    """How much an encoder can read.

    Attributes:
      tokens: at most, of a passage with its title and special tokens.
      measure: counts them.
    """

    tokens: int
    measure: Measure


def passage_id(name: str, number: int) -> str:
    """The id of a passage of a file; its number counts from 1."""
    return f"{name}#{number}"


def passages_of(name: str, document: Document, chunking: Chunking, window: Window | None = None
                ) -> list[tuple[Passage, Citation]]:
    """The passages of a document, in its order, each with its citation.

    Args:
      name: of its file.
      document: the content of the file.
      chunking: how it is divided.
      window: of the encoder that will read the passages; None = no encoder will.

    Raises:
      UserError: chunking.tokens is given without an encoder, or above its window.
    """
    title = _title_at(name, document, chunking, window)
    spans = _spans(title, document, chunking, window)
    return [(Passage(passage_id(name, number), title(begin),
                     " ".join(document.text[begin:end].split())),
             Citation(name, (begin, end), document.pages_of(begin, end),
                      document.sections_of(begin, end)))
            for number, (begin, end) in enumerate(spans, 1)]


def _title_at(name: str, document: Document, chunking: Chunking, window: Window | None
              ) -> Callable[[int], str]:
    """A function from the place where a passage begins to its title, which is cut to half of what
    the encoder reads of a passage, so that there is room for the text."""

    @functools.cache
    def fitting(title: str) -> str:
        most = (chunking.tokens or window.tokens) // 2
        while title and window.measure([title], [""])[0] > most:
            title = title[: 3 * len(title) // 4].rstrip()
        return title

    def title_at(begin: int) -> str:
        title = document.title_at(begin, name)
        return title if window is None else fitting(title)

    return title_at


def _spans(title: Callable[[int], str], document: Document, chunking: Chunking,
           window: Window | None) -> list[tuple[int, int]]:
    """Where each passage begins and ends in the text."""
    if chunking.tokens and window is None:
        raise UserError(f"chunks of {chunking.tokens} tokens: of which encoder? Name "
                        "config.model.retriever.pretrained, or give a number of words")
    if chunking.tokens and chunking.tokens > window.tokens:
        raise UserError(f"chunks of {chunking.tokens} tokens: the encoder reads {window.tokens} "
                        "(config.data.max_passage_length, and what its folder says)")
    counted = list(_pieces(document, chunking.tokens or chunking.words))
    pieces, words = [piece for piece, _ in counted], [n for _, n in counted]
    by_words = None if chunking.tokens else _packed(
        pieces, [(words, [chunking.words] * len(words))], chunking.overlap, document)
    if window is None:
        return by_words

    def measured(spans: Sequence[tuple[int, int]]) -> list[int]:
        return list(window.measure([title(begin) for begin, _ in spans],
                                   [document.text[begin:end] for begin, end in spans]))

    most = chunking.tokens or window.tokens
    if by_words is not None and max(measured(by_words), default=0) <= most:
        return by_words
    pieces = _fitting(document.text, pieces, measured, most)
    titles = [title(begin) for begin, _ in pieces]
    different = list(dict.fromkeys(titles))
    frames = dict(zip(different, window.measure(different, [""] * len(different)), strict=True))
    tokens = [size - frames[one] for size, one in zip(measured(pieces), titles, strict=True)]
    limits = [(tokens, [max(1, most - frames[one]) for one in titles])]
    if by_words is not None:
        limits.insert(0, ([len(_words_of(document.text, *piece)) for piece in pieces],
                          [chunking.words] * len(pieces)))
    spans = _packed(pieces, limits, chunking.overlap, document)
    return _fitting(document.text, spans, measured, most)


def _pieces(document: Document, most: int) -> Iterator[tuple[tuple[int, int], int]]:
    """Where sentences and headings begin and end, each with its number of words, `most` at most:
    longer ones are cut."""
    text, begin = document.text, 0
    borders = iter([*(place for place, _ in document.sections), len(text)])
    border = next(borders)
    while begin < len(text):
        while border <= begin:
            border = next(borders)
        match = _END.search(text, begin, border)
        end = match.end() if match else border
        first = last = words = 0
        for word in _word().finditer(text, begin, end):
            if words == most:
                yield (first, last), words
                words = 0
            first, last, words = first if words else word.start(), word.end(), words + 1
        if words:
            yield (first, last), words
        begin = end


def _words_of(text: str, begin: int, end: int) -> list[tuple[int, int]]:
    """Where each word of a span begins and ends."""
    return [word.span() for word in _word().finditer(text, begin, end)]


def _packed(pieces: Sequence[tuple[int, int]],
            limits: Sequence[tuple[Sequence[int], Sequence[int]]],
            overlap: int, document: Document) -> list[tuple[int, int]]:
    """Joins consecutive pieces to passages, each of as many as all limits allow. A passage does not
    end with a heading unless it must, and a row of a table that fits into one is not divided.

    limits: of each limit, the size of each piece, and the largest size of a passage that begins
      with it, which depends on its title; `overlap` is in the unit of the first limit.
    """
    totals = [([0, *itertools.accumulate(sizes)], most) for sizes, most in limits]
    places = {place for place, _ in document.sections}
    headings, rows = (places, set()) if document.headed else (set(), places)

    def fits(first: int, end: int) -> bool:
        return all(total[end] - total[first] <= most[first] for total, most in totals)

    spans: list[tuple[int, int]] = []
    first, before = 0, totals[0][0]  # the first piece of the passage that is being made
    row = 0  # the piece with which the row of a table begins
    for number in range(1, len(pieces)):
        row = number if pieces[number][0] in rows else row
        if fits(first, number + 1):
            continue
        end = row if first < row and fits(row, number + 1) else number
        # Of headings alone, as in a table of contents, each would be a passage of its own.
        alone = all(begin in headings for begin, _ in pieces[first : number + 1])
        while (not alone and end - first > 1 and pieces[end - 1][0] in headings
               and fits(end - 1, number + 1)):
            end -= 1
        if not spans or pieces[end - 1][1] > spans[-1][1]:  # else all of it is overlap
            spans.append((pieces[first][0], pieces[end - 1][1]))
        first = end
        while (first and before[number] - before[first - 1] <= overlap
               and fits(first - 1, number + 1) and pieces[first - 1][0] > spans[-1][0]):
            first -= 1
    return [*spans, (pieces[first][0], pieces[-1][1])] if pieces else []


def _fitting(text: str, spans: Sequence[tuple[int, int]],
             measured: Callable[[Sequence[tuple[int, int]]], Sequence[int]], most: int
             ) -> list[tuple[int, int]]:
    """The spans, with those of more than `most` tokens halved until they fit, and without those
    that lie in another."""
    done: list[tuple[int, int]] = []
    while spans:
        parts = []
        for size, span in zip(measured(spans), spans, strict=True):
            if size > most and span[1] - span[0] > 1:
                parts += _halves(text, *span)
            else:
                done.append(span)
        spans = parts
    kept: list[tuple[int, int]] = []
    for begin, end in sorted(done, key=lambda span: (span[0], -span[1])):
        if not kept or end > kept[-1][1]:
            kept.append((begin, end))
    return kept


def _halves(text: str, begin: int, end: int) -> list[tuple[int, int]]:
    """Two halves of a span, divided between words if it has at least two."""
    words = _words_of(text, begin, end)
    half = len(words) // 2
    if not half:
        middle = (begin + end) // 2
        return [(begin, middle), (middle, end)]
    return [(begin, words[half - 1][1]), (words[half][0], end)]
