"""Answers as JSON: cut as the request asks, cited, and in the pieces of a stream."""

import base64
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np

from rag_jax.data.text import Tokenizer
from rag_jax.types import Alternative, Answer, Evidence


class Choice(NamedTuple):
    """One of the answers to a request."""

    answer: Answer
    reason: str  # "stop", or "length" where the answer is cut
    end: int  # how many of its tokens are text: </s> is none


class Ask(NamedTuple):
    """What a request asks for, apart from the question."""

    n: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()


def choices(ask: Ask, answers: Sequence[Answer], tokenizer: Tokenizer, kind: str) -> list[Choice]:
    """Of samples each, of one answer itself and its alternatives; n of them, cut.

    kind: the model's, on which the posterior of an answer that is cut depends.
    """
    best = answers[0]
    if len(answers) == 1:
        answers = [best, *(_in_place_of(best, other, tokenizer) for other in best.alternatives)]
    return [_cut(answer, ask, tokenizer, kind) for answer in answers[:ask.n]]


def _in_place_of(best: Answer, other: Alternative, tokenizer: Tokenizer) -> Answer:
    passages = [passage._replace(posterior=p) for passage, p in zip(
        best.passages, other.posterior, strict=True)]
    fields = {name: value for name, value in other._asdict().items() if name != "posterior"}
    return best._replace(**fields, passages=passages, certified=False,
                         tokens=[tokenizer.piece(i) for i in other.token_ids])


def _cut(answer: Answer, ask: Ask, tokenizer: Tokenizer, kind: str) -> Choice:
    """The answer up to `max_tokens` tokens, and before the first `stop` text."""
    ids, reason = answer.token_ids, "stop" if answer.finished else "length"
    text, count = answer.text, len(ids)
    if ask.max_tokens is not None and ask.max_tokens < count - answer.finished:
        count, reason = ask.max_tokens, "length"
        text = tokenizer.decode(ids[:count])
    begins = [text.find(stop) for stop in ask.stop if stop in text]
    if begins:
        text, reason = text[:min(begins)], "stop"
        count = next((n for n in range(1, count) if len(tokenizer.decode(ids[:n])) > len(text)),
                     count)
    if count < len(ids):
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
    return Choice(answer._replace(text=text), reason, count - answer.finished)


def passage(evidence: Evidence) -> dict[str, Any]:
    """A whole passage; `span` is its place in the document that `source` names."""
    source = evidence.source and evidence.source.record()
    return {"id": evidence.id, "title": evidence.title, "text": evidence.text,
            "prior": evidence.prior, "posterior": evidence.posterior,
            "span": source["span"] if source else None, "source": source}


def answer_record(answer: Answer) -> dict[str, Any]:
    """The evidence of an answer: passages, p(z | x), p(z | x, y), and the same of every token."""
    return {"log_prob": answer.log_prob, "certified": answer.certified,
            "finished": answer.finished, "passages": list(map(passage, answer.passages)),
            "tokens": answer.tokens, "token_log_probs": answer.token_log_probs,
            "token_posterior": answer.token_posterior}


def citations(answer: Answer, base: str, index: str) -> list[dict[str, Any]]:
    """Its passages as OpenAI's annotations, those first that it came from most probably.

    base: address of the server, at which /passages/INDEX/ID gives a passage.
    """
    ranked = sorted(answer.passages, key=lambda each: -(each.posterior or 0))
    return [{"type": "url_citation", "url_citation": {
        "start_index": 0, "end_index": len(answer.text), "title": each.title or each.id,
        "url": f"{base}passages/{quote(index, safe='')}/{quote(each.id, safe='')}"}}
        for each in ranked if each.id]


def pieces(choice: Choice, tokenizer: Tokenizer) -> Iterator[tuple[str, slice]]:
    """The text token by token, and which tokens they are; one that ends inside a character comes
    with the next."""
    text, shown, first = choice.answer.text, "", 0
    for count in range(1, choice.end + 1):
        now = text if count == choice.end else tokenizer.decode(choice.answer.token_ids[:count])
        if text.startswith(now) and (len(now) > len(shown) or count == choice.end):
            yield now[len(shown):], slice(first, count)
            shown, first = now, count


class Completion:
    """OpenAI's form of an answer, whole or as the chunks of a stream.

    Args:
      model: its name.
      version: of the index, as "system_fingerprint".
      prompt: tokens of the question.
      logprobs: whether they were asked for.
    """

    def __init__(self, model: str, version: str, prompt: int, logprobs: bool):
        self._logprobs, self._prompt = logprobs, prompt
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()),
                      "model": model, "system_fingerprint": version}

    def whole(self, answers: Sequence[Choice], cited: Sequence[list]) -> dict[str, Any]:
        """The answer in one object."""
        return {**self._head, "object": "chat.completion", "usage": self._usage(answers),
                "choices": [{"index": number, "finish_reason": choice.reason,
                             "logprobs": self._log_probs(choice, slice(choice.end)),
                             "message": {"role": "assistant", "content": choice.answer.text,
                                         "refusal": None, "annotations": each,
                                         "evidence": answer_record(choice.answer)}}
                            for number, (choice, each) in enumerate(
                                zip(answers, cited, strict=True))]}

    def chunks(self, answers: Sequence[Choice], cited: Sequence[list], tokenizer: Tokenizer,
               usage: bool) -> Iterator[dict[str, Any]]:
        """The same in chunks; citations and evidence are in each choice's last."""
        def chunk(number: int, delta: dict[str, Any], **fields: Any) -> dict[str, Any]:
            return {**self._head, "object": "chat.completion.chunk", "choices": [
                {"index": number, "delta": delta, "finish_reason": None, "logprobs": None,
                 **fields}], **({"usage": None} if usage else {})}

        for number, choice in enumerate(answers):
            yield chunk(number, {"role": "assistant", "content": ""})
            for piece, tokens in pieces(choice, tokenizer):
                yield chunk(number, {"content": piece}, logprobs=self._log_probs(choice, tokens))
            yield chunk(number, {"annotations": cited[number],
                                 "evidence": answer_record(choice.answer)},
                        finish_reason=choice.reason)
        if usage:
            yield {**self._head, "object": "chat.completion.chunk", "choices": [],
                   "usage": self._usage(answers)}

    def _usage(self, answers: Sequence[Choice]) -> dict[str, int]:
        spent = sum(len(choice.answer.token_ids) for choice in answers)
        return {"prompt_tokens": self._prompt, "completion_tokens": spent,
                "total_tokens": self._prompt + spent}

    def _log_probs(self, choice: Choice, tokens: slice) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        answer = choice.answer
        return {"refusal": None, "content": [
            {"token": token, "logprob": log_p, "bytes": list(token.encode()), "top_logprobs": []}
            for token, log_p in zip(
                answer.tokens[tokens], answer.token_log_probs[tokens], strict=True)]}


def softmax(scores: np.ndarray) -> np.ndarray:
    """p float32[K] of logits float32[K]."""
    p_K = np.exp(scores - scores.max())
    return p_K / p_K.sum()


def vector(values: np.ndarray, encoding: str) -> list[float] | str:
    """float32[E] as numbers, or as base64 of its little-endian bytes."""
    if encoding == "base64":
        return base64.b64encode(values.astype("<f4").tobytes()).decode("ascii")
    return values.astype(np.float32).tolist()
