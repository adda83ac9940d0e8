"""Answers that are regular expressions, as those of CuratedTREC."""

import contextlib
import functools
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import regex

from rag_jax.errors import DataError
from rag_jax.metrics.references import refuse_string
from rag_jax.quiet import no_warnings

FLAGS = re.IGNORECASE | re.MULTILINE  # UNICODE is the default, and (?a) may replace it
LIMIT_SECS = 5.0  # of one match; some patterns, as (?:a|aa)+$, would run for ever
LIMIT_PARTS = 20_000  # of a pattern, its repetitions written out: `regex` takes 3 KB for each


class SlowPatternError(DataError):
    """A pattern that takes more than the time limit for a text, or too much memory for any."""


@contextlib.contextmanager
def question_named(name: str) -> Iterator[None]:
    """Names the question whose answers hold a pattern that takes too long."""
    try:
        yield
    except SlowPatternError as error:
        raise DataError(f"answers of question {name!r}: {error}") from None


def pattern_match(text: str, patterns: Sequence[str], how: Literal["match", "search"] = "match",
                  nfd: bool = False) -> bool:
    """Whether one of the patterns matches the text, as it is (nothing is normalised).

    Args:
        text: a prediction, or a passage.
        patterns: regular expressions. One that does not compile matches nothing, as in DPR.
        how: "match" anchors at the start of the text, not at its end (DrQA's and ORQA's scorers);
            "search" finds the pattern anywhere (DPR's retrieval, the data set's own README).
        nfd: both sides are canonically decomposed first (DrQA's pipeline, DPR's retrieval).

    Raises:
        ValueError: no patterns.
        TypeError: `patterns` is one string.
        SlowPatternError: a match has run for LIMIT_SECS, or a pattern has over LIMIT_PARTS.
    """
    refuse_string(patterns, "patterns is")
    if len(patterns) == 0:
        raise ValueError("no patterns: expected at least one per question")
    if nfd:
        text, *patterns = (unicodedata.normalize("NFD", each) for each in (text, *patterns))
    return any(_matched(pattern, text, lambda compiled: bool(
        getattr(compiled, how)(text, timeout=LIMIT_SECS))) for pattern in patterns)


def all_matches(text: str, pattern: str) -> list[str]:
    """What a pattern matches in a text, one after the other; errors as of `pattern_match`."""
    return _matched(pattern, text, lambda compiled: [
        match[0] for match in compiled.finditer(text, timeout=LIMIT_SECS)]) or []


def _matched(pattern: str, text: str, run: Callable[[regex.Pattern], Any]) -> Any:
    """What `run` makes of the compiled pattern; None where it does not compile."""
    try:
        compiled = _compiled(pattern)
        return None if compiled is None else run(compiled)
    except TimeoutError:
        raise SlowPatternError(
            f"the regular expression {pattern!r:.200} was not done with a text of {len(text)} "
            f"characters in {LIMIT_SECS:g} seconds: write it without repetitions that can match "
            "the same letters in several ways") from None


@functools.lru_cache(maxsize=4096)
def _compiled(pattern: str) -> regex.Pattern | None:
    """Compiled by `regex`, which has a time limit; None where Python's `re` does not compile it.
    What means other things to both, such as {e<=1} and [[:alpha:]], is as `regex` has it."""
    try:
        with no_warnings():  # of sets such as [[a]
            re.compile(pattern, FLAGS)
            parts = _parts(re._parser.parse(pattern, FLAGS))
            if parts <= LIMIT_PARTS:
                return regex.compile(pattern, int(FLAGS) | regex.VERSION0)
    except (re.error, regex.error, ValueError, OverflowError, RecursionError):
        return None
    raise SlowPatternError(
        f"the regular expression {pattern!r:.200} has {parts} parts with its repetitions written "
        f"out, at most {LIMIT_PARTS} are matched: lower its {{N}}")


def _parts(value: Any) -> int:
    """The number of parts in a parsed pattern, or in a part of one, at all depths."""
    if isinstance(value, re._parser.SubPattern):
        return sum((max(1, part[0]) if str(name).endswith("_REPEAT") else 1) * (1 + _parts(part))
                   for name, part in value)
    return sum(map(_parts, value)) if isinstance(value, list | tuple) else 0
