"""Prompts: the input of a decoder-only generator, which the answer continues.

A prompt is a template with a passage, then a question, then a tail that is the same for all; or a
chat template of the tokenizer around one. The passage comes first, so that what a generator keeps
of it does not depend on the question. Each part is tokenized by itself.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from rag_jax.data.chat import rendered
from rag_jax.data.text import GeneratorFormat, Tokenizer
from rag_jax.errors import DataError

TEMPLATES = {  # by config.data.source_format
    "prompt": "{passage}\n\nQuestion: {question}\nAnswer:",
    "chat": "{passage}\n\nQuestion: {question}\nAnswer with as few words as possible.",
}
ANSWER = "{answer}"
_FIELD = re.compile(r"\{passage\}|\{question\}|\{answer\}")
# Defines the date that a chat template may ask for, so that prompts are the same every day. It is
# the default of Llama's template.
TODAY = "{% macro strftime_now(format) %}26 Jul 2024{% endmacro +%}"


class Parts(NamedTuple):
    """The fixed texts of a prompt: before the passage, between it and the question, after the
    question; and what ends an answer in a chat, "" = the tokenizer's end token; None = no chat."""

    before: str
    between: str
    after: str
    ending: str | None = None


def parts_of(template: str, chat: str | None, tokenizer: Tokenizer) -> Parts:
    """The parts of a template, as the only message of a chat template's user where `chat` is one.

    Raises:
      DataError: not one passage and then one question, or nothing after them; or as `rendered`.
    """
    text = template
    if chat is not None:
        names = {"bos_token": "", "eos_token": "", **tokenizer.config}
        text = rendered(TODAY + chat, template, ANSWER, names["bos_token"], names["eos_token"])
    pieces, order = _FIELD.split(text), _FIELD.findall(text)
    if order != ["{passage}", "{question}", ANSWER][: len(order)] or len(order) < 2:
        raise DataError(f"config.data.prompt: {template!r} should have {{passage}} once, and then "
                        "{question} once")
    if not pieces[2].strip():
        raise DataError(f"config.data.prompt: {template!r} should end with words of its own, such "
                        "as a line with Answer:, which the answer continues")
    return Parts(*pieces)


class PromptFormat(GeneratorFormat):
    """The generator's input: a prompt without its last token, which is `start`.

    A long input loses the end of its passage, never its question, unless that takes half of it, or
    all that the words before the passage leave.
    """

    title_separator = "\n"

    def __init__(self, tokenizer: Tokenizer, max_length: int, parts: Parts,
                 uncased_questions: bool = False):
        after = tokenizer.encode_written(parts.after.rstrip(" "))
        ending = tokenizer.encode_written((parts.ending or "").strip())
        space = "" if tokenizer.begins_words else " "  # Llama 2's tokenizer writes it itself
        # A chat's answer follows as its template has it, that of a prompt as the next word.
        apart = parts.after[-1:] != "\n" if parts.ending is None else parts.after[-1:] == " "
        gap = space * apart
        super().__init__(tokenizer.answering(ending[0] if ending else tokenizer.end, gap),
                         max_length, uncased_questions=uncased_questions)
        self.begin, self.foot = tokenizer.encode_written(parts.before, first=True), []
        self.room = max_length - len(self.begin)
        between = parts.between.removesuffix(" ")
        self._between = tokenizer.encode_written(between)
        self._gap = space * (len(between) < len(parts.between))
        self._after, self.start = after[:-1], after[-1]
        fixed = len(self._between) + len(self._after)
        if 2 * fixed > self.room:
            raise DataError(f"config.data.max_source_length={max_length}: the prompt's own words "
                            f"take {fixed + len(self.begin)} tokens of it; set more, or a shorter "
                            "config.data.prompt")

    def passages(self, titles: Sequence[str], texts: Sequence[str]) -> list[list[int]]:
        """Ids of a title in a line of its own, and its text."""
        return self.tokenizer.encode([
            self._head(" ".join(title.split())) + " ".join(text.split())
            for title, text in zip(titles, texts, strict=True)])

    def questions(self, questions: Sequence[str]) -> list[list[int]]:
        """Ids of what follows a passage, to be joined to it; at most half the input, or what
        the words before a passage leave of it."""
        rows = self.tokenizer.encode([self._gap + " ".join(q.split()) for q in questions])
        room = min(self.max_length // 2, self.room) - len(self._between) - len(self._after)
        return [[*self._between, *row[:max(room, 1)], *self._after] for row in rows]
