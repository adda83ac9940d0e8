"""Answers as JSON: cut as the request asks, with citations, whole or in the chunks of a stream."""

import base64
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np

from rag_jax.answering import Beginning
from rag_jax.data.text import Tokenizer
from rag_jax.types import Answer, Evidence


class Choice(NamedTuple):
    """One of the answers to a request, cut as the request asks."""

    answer: Answer
    reason: str  # "stop", or "length" where the answer is cut
    # The tokens of its text are token_ids[begin:end]: not </s>, and not a forced <s>.
    end: int
    begin: int = 0

    @property
    def spent(self) -> int:
        """The number of tokens of its text."""
        return self.end - self.begin


class Ask(NamedTuple):
    """How many answers a request asks for, and where they are cut."""

    n: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    begin: int = 0  # tokens before the text of every answer: 1 with a forced <s>

    @property
    def most(self) -> int | None:
        """How many tokens an answer may have, with those before its text; None = any number."""
        return None if self.max_tokens is None else self.begin + self.max_tokens


def choices(ask: Ask, answers: Sequence[Answer], tokenizer: Tokenizer, kind: str) -> list[Choice]:
    """The first n of several samples, or of one answer and its alternatives, each of them cut.

    kind: of the model (`config.kind`): it decides the posterior of an answer that is cut.
    """
    best = answers[0]
    if len(answers) == 1:
        answers = [best, *best.alternatives]
    return [_cut(answer, ask, tokenizer, kind) for answer in answers[:ask.n]]


def _cut(answer: Answer, ask: Ask, tokenizer: Tokenizer, kind: str) -> Choice:
    """The answer up to the first text of `ask.stop`, and of at most `ask.most` tokens."""
    ids, reason = answer.token_ids, "stop" if answer.finished else "length"
    text, count = answer.text, len(ids)
    has_end = ids[-1:] == [tokenizer.end]
    if ask.most is not None and ask.most < count - has_end:
        count, reason = ask.most, "length"
        text = tokenizer.decode(ids[:count])
    begins = [text.find(stop) for stop in ask.stop if stop in text]
    if begins:
        text, reason = text[:min(begins)], "stop"
        count = next((n for n in range(1, count)
                      if _goes_beyond(tokenizer.decode_settled(ids[:n]), text)), count)
    if count < len(ids):
        has_end = False
        rows = np.array(answer.token_posterior[:count])
        if len(rows):
            row = rows[-1] if kind == "sequence" else rows.mean(axis=0)
            answer = answer._replace(passages=[passage._replace(posterior=p) for passage, p in zip(
                answer.passages, row.tolist(), strict=True)])
        answer = answer._replace(
            token_ids=ids[:count], tokens=answer.tokens[:count], finished=False, certified=False,
            token_log_probs=answer.token_log_probs[:count],
            token_posterior=answer.token_posterior[:count],
            log_prob=float(np.sum(answer.token_log_probs[:count], dtype=np.float32)))
    return Choice(answer._replace(text=text), reason, count - has_end, ask.begin)


def _goes_beyond(begun: str, text: str) -> bool:
    return begun.startswith(text) and len(begun) > len(text)


def passage(evidence: Evidence) -> dict[str, Any]:
    """A passage as JSON; `span` is its place in the document that `source` names."""
    source = evidence.source and evidence.source.record()
    return {"id": evidence.id, "title": evidence.title, "text": evidence.text,
            "prior": evidence.prior, "posterior": evidence.posterior,
            "span": source["span"] if source else None, "source": source}


def answer_record(answer: Answer) -> dict[str, Any]:
    """The evidence of an answer: its passages, p(z | x), p(z | x, y), and the latter per token."""
    return {"log_prob": answer.log_prob, "certified": answer.certified,
            "finished": answer.finished, "passages": list(map(passage, answer.passages)),
            "tokens": answer.tokens, "token_log_probs": answer.token_log_probs,
            "token_posterior": answer.token_posterior}


def citations(answer: Answer, base: str, index: str) -> list[dict[str, Any]]:
    """The passages of an answer as OpenAI's annotations, by descending p(z | x, y).

    base: address of the server, whose route /passages/INDEX/ID gives a passage.
    """
    ranked = sorted(answer.passages, key=lambda each: -(each.posterior or 0))
    return [{"type": "url_citation", "url_citation": {
        "start_index": 0, "end_index": len(answer.text), "title": each.title or each.id,
        "url": f"{base}passages/{quote(index, safe='')}/{quote(each.id, safe='')}"}}
        for each in ranked if each.id]


class Pieces:
    """Divides the text of an answer into pieces while its tokens are decoded.

    Each piece comes with the slice of the tokens that it is made of. A piece that was yielded is
    final: what may be a part of a letter, or the beginning of a stop text, waits for more tokens.

    Args:
      ask: where the answer is cut.
    """

    def __init__(self, ask: Ask, tokenizer: Tokenizer):
        self._ask, self._tokenizer = ask, tokenizer
        self._begun: list[str] = []  # the text of the first 1, 2, ... tokens
        self._text, self._count = "", ask.begin  # yielded, and the number of its tokens

    def more(self, ids: Sequence[int], whole: str | None = None) -> Iterator[tuple[str, slice]]:
        """The pieces that these first tokens of the answer add.

        whole: the text of the whole answer, if it is known: only text that it begins with is
          yielded. (The text of a class is longer than its one token.)
        """
        for count in range(len(self._begun) + 1, len(ids[:self._ask.most]) + 1):
            text = self._tokenizer.decode_settled(ids[:count])
            self._begun.append(text)
            text = text[:_before(self._ask.stop, text)]
            if len(text) > len(self._text) and (whole is None or whole.startswith(text)):
                yield self._to(text, 1 + next(
                    n for n, begun in enumerate(self._begun) if begun.startswith(text)))

    def rest(self, choice: Choice) -> Iterator[tuple[str, slice]]:
        """The pieces that the whole answer, already cut, adds."""
        text = choice.answer.text
        yield from self.more(choice.answer.token_ids[:choice.end], text)
        if text != self._text or choice.end > self._count:
            yield self._to(text, choice.end)

    def _to(self, text: str, count: int) -> tuple[str, slice]:
        piece = text[len(self._text):], slice(self._count, count)
        self._text, self._count = text, count
        return piece


def _before(stops: Sequence[str], text: str) -> int:
    """Where the first stop text begins, or may begin, in a text that is not complete."""
    return next((begin for begin in range(len(text)) if any(
        stop.startswith(text[begin : begin + len(stop)]) for stop in stops)), len(text))


class Completion:
    """OpenAI's form of the answers to a request, as one object or as the chunks of a stream.

    Args:
      model: name of the model.
      version: of the index, given as "system_fingerprint".
      prompt: number of tokens of the question.
      matched: whether any passage has a word of it (`Rag.matches`).
      logprobs: whether the request asks for log-probabilities.
      tokenizer: the generator's.
      cite: answer -> its annotations.
    """

    def __init__(self, model: str, version: str, prompt: int, matched: bool, logprobs: bool,
                 tokenizer: Tokenizer, cite: Callable[[Answer], list[dict[str, Any]]]):
        self._logprobs, self._prompt, self._matched, self._cite = logprobs, prompt, matched, cite
        self.tokenizer = tokenizer
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()),
                      "model": model, "system_fingerprint": version}

    def whole(self, answers: Sequence[Choice]) -> dict[str, Any]:
        """The answers in one object."""
        return {**self._head, "object": "chat.completion", "usage": self.usage(answers),
                "choices": [{"index": number, "finish_reason": choice.reason,
                             "logprobs": self.log_probs(choice.answer, slice(
                                 choice.begin, choice.end)),
                             "message": {"role": "assistant", "content": choice.answer.text,
                                         "refusal": None, **self.evidence(choice)}}
                            for number, choice in enumerate(answers)]}

    def chunk(self, choices: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        """One chunk of a stream."""
        return {**self._head, "object": "chat.completion.chunk", "choices": choices, **fields}

    def evidence(self, choice: Choice) -> dict[str, Any]:
        return {"annotations": self._cite(choice.answer),
                "evidence": {"matched": self._matched, **answer_record(choice.answer)}}

    def usage(self, answers: Sequence[Choice]) -> dict[str, int]:
        spent = sum(choice.spent for choice in answers)
        return {"prompt_tokens": self._prompt, "completion_tokens": spent,
                "total_tokens": self._prompt + spent}

    def log_probs(self, answer: Answer | Beginning, tokens: slice) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        pieces = map(self.tokenizer.piece, answer.token_ids[tokens])
        return {"refusal": None, "content": [
            {"token": piece, "logprob": log_p, "top_logprobs": [],  # no bytes for part of a letter
             "bytes": None if "\ufffd" in piece else list(piece.encode())}
            for piece, log_p in zip(pieces, answer.token_log_probs[tokens], strict=True)]}


class Chunks:
    """A completion in chunks, while its answers are decoded. The last chunk of each choice has its
    citations and evidence.

    Args:
      ask: how many answers there are, and where they are cut.
      usage: whether one more chunk gives the numbers of tokens.
    """

    def __init__(self, completion: Completion, ask: Ask, usage: bool):
        self._completion, self._usage = completion, usage
        self._pieces = [Pieces(ask, completion.tokenizer) for _ in range(ask.n)]
        self._begun: set[int] = set()

    def more(self, number: int, begun: Beginning) -> Iterator[dict[str, Any]]:
        """The chunks that these first tokens of choice `number` add."""
        yield from self._of(number, begun, self._pieces[number].more(begun.token_ids))

    def rest(self, choices: Sequence[Choice]) -> Iterator[dict[str, Any]]:
        """The chunks that the complete choices add."""
        for number, choice in enumerate(choices):
            yield from self._of(number, choice.answer, self._pieces[number].rest(choice))
            yield self._chunk(number, self._completion.evidence(choice),
                              finish_reason=choice.reason)
        if self._usage:
            yield self._completion.chunk([], usage=self._completion.usage(choices))

    def _of(self, number: int, answer: Answer | Beginning, pieces: Iterator[tuple[str, slice]]
            ) -> Iterator[dict[str, Any]]:
        if number not in self._begun:
            self._begun.add(number)
            yield self._chunk(number, {"role": "assistant", "content": ""})
        for piece, tokens in pieces:
            yield self._chunk(number, {"content": piece},
                              logprobs=self._completion.log_probs(answer, tokens))

    def _chunk(self, number: int, delta: dict[str, Any], **fields: Any) -> dict[str, Any]:
        choice = {"index": number, "delta": delta, "finish_reason": None, "logprobs": None,
                  **fields}
        return self._completion.chunk([choice], **({"usage": None} if self._usage else {}))


def softmax(scores: np.ndarray) -> np.ndarray:
    """The probabilities float32[K] of logits float32[K]."""
    p_K = np.exp(scores - scores.max())
    return p_K / p_K.sum()


def vector(values: np.ndarray, encoding: str) -> list[float] | str:
    """float32[E] as numbers, or as base64 of its little-endian bytes."""
    if encoding == "base64":
        return base64.b64encode(values.astype("<f4").tobytes()).decode("ascii")
    return values.astype(np.float32).tolist()
