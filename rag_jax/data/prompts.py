"""Prompts: the input of a decoder-only generator, which the answer continues.

A prompt is a template with a passage, then a question, then a tail that is the same for all; or a
chat template of the tokenizer around one. The passage comes first, so that what a generator keeps
of it does not depend on the question. Each part is tokenized by itself, as it continues the last.
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
    if not _in_order(template):
        raise DataError(f"config.data.prompt: {template!r} should have {{passage}} once, and then "
                        "{question} once")
    text = template
    if chat is not None:
        names = {"bos_token": "", "eos_token": "", **tokenizer.config}
        names = {name: text for name, text in names.items() if name.endswith("_token")}
        text = rendered(TODAY + chat, template, ANSWER, tuple(sorted(names.items())))
        if not _in_order(text) or ANSWER not in text:
            raise DataError(f"the tokenizer's chat_template does not write a user's message "
                            f"{template!r} as it is, once, and then the answer {ANSWER}, but "
                            f"{text!r:.300}; set config.data.source_format=prompt")
    pieces = _FIELD.split(text)
    if not pieces[2].strip():
        raise DataError(f"config.data.prompt: {template!r} should end with words of its own, such "
                        "as a line with Answer:, which the answer continues")
    return Parts(*pieces)


def _in_order(text: str) -> bool:
    """Whether a text has a passage, then a question, and perhaps an answer, each once."""
    order = _FIELD.findall(text)
    return len(order) > 1 and order == ["{passage}", "{question}", ANSWER][: len(order)]


class PromptFormat(GeneratorFormat):
    """The generator's input: a prompt without its last token, which is `start`.

    A long input loses the end of its passage, never its question, unless that takes half of it, or
    all that the words before the passage leave.
    """

    title_separator = "\n"

    def __init__(self, tokenizer: Tokenizer, max_length: int, parts: Parts,
                 uncased_questions: bool = False):
        ending = tokenizer.encode_written((parts.ending or "").strip())
        # A marker ends the answers of a chat; plain words at their end do not.
        ends = bool(ending) and (ending[0] == tokenizer.end or tokenizer.is_added(ending[0]))
        after = parts.after
        if parts.ending is None and not after.endswith("\n"):  # else as the chat's template has it
            after = after.rstrip(" ") + " "  # the answer is the next word
        after, gap = tokenizer.encode_part(after)
        super().__init__(tokenizer.answering(ending[0] if ends else tokenizer.end, gap),
                         max_length, uncased_questions=uncased_questions)
        self.begin, self._before_passage = tokenizer.encode_part(
            parts.before, first=True, complete=parts.ending is not None)
        self.begin_alone = tokenizer.encode_written("", first=True)
        self._between, self._before_question = tokenizer.encode_part(parts.between)
        self.room, self.foot = max_length - len(self.begin), []
        self._after, self.start = after[:-1], after[-1]
        tokenizer.mark([*self.begin, *self._between, *after, *ending[:ends]])
        fixed = len(self._between) + len(self._after)
        if 2 * fixed > self.room:
            raise DataError(f"config.data.max_source_length={max_length}: the prompt's own words "
                            f"take {fixed + len(self.begin)} tokens of it; set more, or a shorter "
                            "config.data.prompt")

    def passages(self, titles: Sequence[str], texts: Sequence[str]) -> list[list[int]]:
        """Ids of a title in a line of its own, and its text."""
        return self.tokenizer.encode_behind(self._before_passage, [
            self._head(" ".join(title.split())) + " ".join(text.split())
            for title, text in zip(titles, texts, strict=True)])

    def questions(self, questions: Sequence[str]) -> list[list[int]]:
        """Ids of what follows a passage, to be joined to it; at most half the input, or what
        the words before a passage leave of it."""
        rows = self.tokenizer.encode_behind(
            self._before_question, [" ".join(q.split()) for q in questions])
        room = min(self.max_length // 2, self.room) - len(self._between) - len(self._after)
        return [[*self._between, *row[:max(room, 1)], *self._after] for row in rows]
