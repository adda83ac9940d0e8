"""Training targets of a generator that are not simply the answers: the paper's appendix D.

Retrieval is given as a callable, from a question to the texts of its passages, best first.
"""

import collections
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from rag_jax.data.question_files import Example
from rag_jax.metrics.patterns import FLAGS, all_matches, question_named
from rag_jax.metrics.retrieval import has_answer
from rag_jax.quiet import no_warnings

DEPTH = 1000  # retrieved passages that are searched, for each question
MOST_EXPANSIONS = 64  # of one regular expression

Retrieve = Callable[[str], Sequence[str]]


def answers_found(examples: Iterable[Example], retrieve: Retrieve) -> Iterator[Example]:
    """TriviaQA: trains on the answers that occur in the first 1000 retrieved passages.

    Where none does, the first answer trains, which is TriviaQA's own value; the paper does not say.
    """
    for example in examples:
        absent = list(example.answers)
        for text in retrieve(example.question)[:DEPTH]:
            if absent and has_answer(text, absent):
                absent = [answer for answer in absent if not has_answer(text, [answer])]
        present = tuple(answer for answer in example.answers if answer not in absent)
        yield example._replace(targets=present or example.answers[:1])


def best_matches(examples: Iterable[Example], retrieve: Retrieve) -> Iterator[Example]:
    """CuratedTREC: trains on the string that most often matches the answer's regular expression in
    the first 1000 retrieved passages; where nothing matches, on the expression's expansions.

    Questions whose expression has no expansion with a letter or digit are left out.
    """
    for example in examples:
        with question_named(example.id):
            matches = collections.Counter(
                _matches(example.answers, retrieve(example.question)[:DEPTH]))
        targets = tuple(text for text, _ in matches.most_common(1)) or tuple(
            dict.fromkeys(text for pattern in example.answers for text in expansions(pattern)))
        if targets:
            yield example._replace(targets=targets)


def _matches(patterns: Sequence[str], texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        for pattern in patterns:
            for match in all_matches(text, pattern):
                if _has_letters(match):
                    yield " ".join(match.split())


def _has_letters(text: str) -> bool:
    return any(letter.isalnum() for letter in text)


def expansions(pattern: str) -> list[str]:
    """The strings that a regular expression stands for, with white space for what it leaves open.

    Alternatives, optional parts and sets of listed characters are enumerated; classes, repetitions
    and wildcards become a space. Strings without letter or digit are left out, and those after the
    first MOST_EXPANSIONS.

    Source: appendix D, "replacing non-deterministic symbols in each regex nested tree structure
    with whitespace".
    """
    with no_warnings():  # of sets such as [[a]
        tree = re._parser.parse(pattern, FLAGS)
    texts = (" ".join(text.split()) for text in itertools.islice(_sequence(tree), MOST_EXPANSIONS))
    return list(dict.fromkeys(text for text in texts if _has_letters(text)))


def _sequence(tree: Iterable[tuple[Any, Any]]) -> Iterator[str]:
    """Every way to write the parts of a tree one after the other."""
    parts = [itertools.islice(_part(str(name), value), MOST_EXPANSIONS) for name, value in tree]
    return map("".join, itertools.product(*parts))


def _part(name: str, value: Any) -> Iterator[str]:
    """Every way to write one part of a tree, which Python's parser calls by this name."""
    if name == "LITERAL":
        yield chr(value)
    elif name == "BRANCH":
        for branch in value[1]:
            yield from _sequence(branch)
    elif name == "SUBPATTERN":
        yield from _sequence(value[-1])
    elif name in ("MAX_REPEAT", "MIN_REPEAT") and value[:2] == (0, 1):
        yield from _sequence(value[2])
        yield ""
    elif name == "IN" and all(str(kind) == "LITERAL" for kind, _ in value):
        yield from (chr(code) for _, code in value)
    elif name in ("AT", "ASSERT", "ASSERT_NOT"):
        yield ""
    else:
        yield " "


# By `Task.trains_on`; the other tasks train on their answers as they are.
LOOKS_IN_PASSAGES = {"retrieved": answers_found, "matches": best_matches}
