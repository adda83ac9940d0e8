"""Answers on the terminal."""

import contextlib
import itertools
import os
import pathlib
import sys
from collections.abc import Iterable, Iterator

from rag_jax import heatmap, hosts
from rag_jax.documents.workdir import NO_GENERATOR
from rag_jax.errors import DataError
from rag_jax.lines import is_utf8
from rag_jax.training.opened import Rag
from rag_jax.types import Answer, Evidence
from rag_jax.visible import shortened, visible

NO_PASSAGE = "(no passage)"  # the null document
NO_MATCH = "no passage has a word of this question"


def typed() -> Iterator[str]:
    """Yields the questions typed on the terminal, until an empty line.

    Raises:
      DataError: bytes that are not in the encoding of the locale.
    """
    # A strict decoder reads ahead: bytes of a later line would fail before this one is answered.
    with contextlib.suppress(AttributeError):  # the standard input of a notebook
        sys.stdin.reconfigure(errors="surrogateescape")
    while True:
        if sys.stdin.isatty():
            print("question (empty line ends): ", end="", flush=True)
        if not (line := sys.stdin.readline().strip()):
            return
        if not is_utf8(line):
            raise DataError(f"the question {line!r:.60} is typed in another encoding than "
                            f"{sys.stdin.encoding}: convert it, or set LC_ALL to that of the "
                            "terminal")
        yield line


def show_passages(rag: Rag, *questions: Iterable[str]) -> None:
    """Prints the passages retrieved for questions, without answers; all processes call it."""
    for question in itertools.chain(*questions):
        passages, = rag.retrieve(question)
        lines = [f"\n{visible(question)}"]
        if not rag.matches(question):
            lines.append(f"  ({NO_MATCH})")
        else:
            lines.append("  p(z|x)  passage")
            lines += [f"  {passage.prior:6.3f}  {_shown(passage)}" for passage in passages]
        hosts.say("\n".join(lines))
    hosts.say(f"\n{NO_GENERATOR}")


def _has_colours() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")  # https://no-color.org


def _shown(passage: Evidence) -> str:
    """The place of a passage in its document, or its id, and the beginning of its text."""
    text = shortened(passage.text, 100) if passage.id else NO_PASSAGE
    return f"{visible(str(passage.source or passage.id))}  {visible(text)}"


def show(question: str, answer: Answer, heatmap_to: str | None = None, ruled: bool = False,
         matched: bool = True) -> None:
    """Prints the answer, its log-probability, its alternatives and its passages.

    matched: as `Rag.matches`.
    heatmap_to: also the document posterior per token: "terminal", or a .html or .png file.
    ruled: whether settings rule answers out (`Decoding.has_rules`).
    """
    marks = ""
    if answer.certified:
        allowed = " that the settings allow" if ruled else ""
        marks += f", no other answer{allowed} has a higher probability under the model"
    elif answer.expanded > 0:
        marks += (f", another answer may have a higher probability ({answer.expanded} prefixes "
                  "searched)")
    if not answer.finished:
        marks += ", cut at the length limit"
    lines = [f"\n{visible(question)}",
             f"  {visible(answer.text) or '(empty)'}    log p = {answer.log_prob:.3f}{marks}"]
    lines += [f"  {visible(other.text) or '(empty)'}    log p = {other.log_prob:.3f}"
              for other in answer.alternatives]
    if not matched:
        lines.append(f"  ({NO_MATCH}: those below are the first of the index)")
    if answer.passages:
        lines.append("  p(z|x)  p(z|x,y)  passage")
    lines += [f"  {passage.prior:6.3f}  {passage.posterior:8.3f}  {_shown(passage)}"
              for passage in answer.passages]
    print("\n".join(lines), flush=True)
    if heatmap_to and answer.token_posterior:
        cells = (answer.tokens, [i or NO_PASSAGE for i in answer.passage_ids],
                 answer.token_posterior)
        if heatmap_to == "terminal":
            print(heatmap.terminal(*cells, colour=_has_colours()), flush=True)
        else:
            heatmap.write(pathlib.Path(heatmap_to), f"{question} {answer.text}", *cells)
            print(f"  {heatmap_to}", flush=True)
    elif heatmap_to:
        print("  no heat map: nothing says which passage gave which token", flush=True)
