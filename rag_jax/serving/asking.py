"""What a request asks for, from its checked fields: a question and how to answer it, texts to
rank, passages to add."""

import secrets
from typing import Any, NamedTuple

from rag_jax.config import EvalConfig
from rag_jax.retrieval.protocol import Passage
from rag_jax.serving.fields import Fields, Refused
from rag_jax.serving.indexes import Question
from rag_jax.serving.results import Ask
from rag_jax.serving.settings import Settings

HOW = ("n", "temperature", "max_tokens", "max_completion_tokens", "stop", "seed", "memory")
CHAT = (*HOW, "model", "messages", "stream", "stream_options", "logprobs", "top_logprobs",
        # These change no answer.
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
        "prompt_cache_retention", "parallel_tool_calls", "reasoning_effort", "verbosity")
NEUTRAL = {"top_p": (1,), "frequency_penalty": (0,), "presence_penalty": (0,), "logit_bias": ({},),
           "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],),
           "response_format": ({"type": "text"},), "modalities": (["text"],), "top_logprobs": (0,)}
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
INT64 = 2**63


class Asked(NamedTuple):
    """A question, once for each answer that a program computes, and how the answers are cut."""

    program: str  # "search" or "sample"
    questions: list[Question]
    ask: Ask
    prompt: int = 0  # tokens of the question, before it is cut


def asked(fields: Fields, text: str, settings: Settings, run: EvalConfig) -> Asked:
    """What the fields of HOW ask for, about the question `text`.

    run: the model's own settings of a search.
    """
    # OpenAI's default is 1; here it is 0, the most probable answer: samples have to be asked for.
    temperature = fields.number("temperature", 0, 0, 2)
    n = fields.number("n", 1, 1, settings.max_choices, whole=True)
    seed = fields.number("seed", secrets.randbits(32), -INT64, INT64 - 1, whole=True) % 2**32
    longest = [fields.number(name, None, 1, 2**31, whole=True)
               for name in ("max_completion_tokens", "max_tokens")]
    stop = fields.strings("stop", 4, 100) if fields.filled("stop") else ()
    if not temperature and n > (most := most_answers(run)):
        more = "" if run.labels else (": set a temperature above 0 to draw answers, or serve with "
                                      f"--config.eval.num_beams={n}")
        raise Refused(f"{fields.where}: \"n\" is {n}: the search gives {most} at most{more}",
                      field="n")
    numbers = range(n if temperature else 1)
    # The name of a class is not cut: a part of it would be no class.
    ask = Ask(n) if run.labels else Ask(
        n, next(filter(None, longest), None), stop, begin=int(bool(run.forced_bos)))
    return Asked("sample" if temperature else "search",
                 [Question(text, float(temperature), seed, number) for number in numbers], ask)


def most_answers(run: EvalConfig) -> int:
    """How many answers a search gives: as many as it has beams, or labels."""
    return len(run.labels) or run.num_beams or 1


def question(fields: Fields, key: str, settings: Settings) -> str:
    """A question of at most `max_question` characters."""
    text = fields.text(key)
    if len(text) > settings.max_question:
        raise fields.error(key, f"at most {settings.max_question} characters, and it has "
                           f"{len(text)}")
    return text


def chat_question(fields: Fields, settings: Settings) -> str:
    """The text of the last message, which must be the user's; no earlier message is read."""
    messages = fields.objects("messages", 1000)
    for message in messages:
        message.choice("role", "", ROLES)
    last = messages[-1]
    if last.fields["role"] != "user":
        raise last.error("role", "user, as the last message is the question")
    if not isinstance(last.fields.get("content"), list):
        return question(last, "content", settings)
    parts = last.objects("content", 100)
    for part in parts:
        part.choice("type", "", ("text",))
    joined = "\n".join(part.text("text") for part in parts)
    return question(Fields(last.where, {"content": joined}), "content", settings)


def documents(fields: Fields, most: int) -> list[Passage]:
    """Texts to rank: strings, or objects with a text and perhaps a title."""
    value = fields.fields.get("documents")
    if not isinstance(value, list) or not 1 <= len(value) <= most:
        raise fields.error("documents", f"a list of 1 to {most} texts")
    rows = [Fields(f"{fields.where}: documents[{number}]",
                   {"text": each} if isinstance(each, str) else each)
            for number, each in enumerate(value)]
    return [_passage(row, "") for row in rows]


def passages(fields: Fields, key: str, most: int, longest: int) -> list[Passage]:
    """Passages to add: objects with id, title and text."""
    if not fields.filled(key):
        return []
    added = []
    for row in fields.objects(key, most):
        row.only(("id", "title", "text"))
        passage = _passage(row, row.name("id"))
        if sum(map(len, passage)) > longest:
            raise row.error("text", f"with id and title, at most {longest} characters")
        added.append(passage)
    return added


def _passage(row: Fields, name: str) -> Passage:
    title = row.text("title", blank=True) if row.has("title") else ""
    return Passage(name, title, row.text("text"))


def known_model(fields: Fields, models: dict[str, Any]) -> Any:
    """The value in `models` of the model that the request names.

    Raises:
      Refused: 404, it is none of `models`.
    """
    name = fields.text("model")
    if name not in models:
        raise Refused(f"request: \"model\" is {name[:60]!r}: expected one of {', '.join(models)}",
                      404, "model")
    return models[name]
