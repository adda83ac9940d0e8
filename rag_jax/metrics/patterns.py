"""Answers that are regular expressions, as those of CuratedTREC."""

import functools
import re
import unicodedata
import warnings
from collections.abc import Sequence
from typing import Literal

import regex

from rag_jax.errors import DataError

FLAGS = re.IGNORECASE | re.UNICODE | re.MULTILINE
LIMIT_SECS = 5.0  # of one match; some patterns, as (?:a|aa)+$, would run for ever


class SlowPatternError(DataError):
    """A pattern that is not done with a text within the time limit."""


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
        SlowPatternError: a match has run for LIMIT_SECS.
    """
    if isinstance(patterns, str):
        raise TypeError(f"patterns is the string {patterns!r}: expected a list of strings")
    if len(patterns) == 0:
        raise ValueError("no patterns: expected at least one per question")
    if nfd:
        text, *patterns = (unicodedata.normalize("NFD", each) for each in (text, *patterns))
    return any(_matches(pattern, text, how) for pattern in patterns)


def _matches(pattern: str, text: str, how: str) -> bool:
    compiled = _compiled(pattern)
    try:
        return compiled is not None and bool(getattr(compiled, how)(text, timeout=LIMIT_SECS))
    except TimeoutError:
        raise SlowPatternError(
            f"the regular expression {pattern!r:.200} was not done with a text of {len(text)} "
            f"characters in {LIMIT_SECS:g} seconds: write it without repetitions that can match "
            "the same letters in several ways") from None


@functools.lru_cache(maxsize=4096)
def _compiled(pattern: str) -> regex.Pattern | None:
    """For `regex`, the library that has a time limit; None where Python's own compiles nothing."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of sets such as [[a]
            re.compile(pattern, FLAGS)
            return regex.compile(pattern, int(FLAGS) | regex.VERSION0)
    except (re.error, regex.error, OverflowError, RecursionError):
        return None
