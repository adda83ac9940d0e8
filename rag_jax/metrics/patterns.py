"""Answers that are regular expressions, as those of CuratedTREC."""

import functools
import re
import unicodedata
import warnings
from collections.abc import Sequence
from typing import Literal

FLAGS = re.IGNORECASE | re.UNICODE | re.MULTILINE


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
    """
    if isinstance(patterns, str):
        raise TypeError(f"patterns is the string {patterns!r}: expected a list of strings")
    if len(patterns) == 0:
        raise ValueError("no patterns: expected at least one per question")
    if nfd:
        text, *patterns = (unicodedata.normalize("NFD", each) for each in (text, *patterns))
    compiled = (_compiled(pattern) for pattern in patterns)
    return any(found is not None and getattr(found, how)(text) for found in compiled)


@functools.lru_cache(maxsize=4096)
def _compiled(pattern: str) -> re.Pattern[str] | None:
    try:
        with warnings.catch_warnings(action="ignore"):  # of sets such as [[a]
            return re.compile(pattern, FLAGS)
    except (re.error, OverflowError, RecursionError):
        return None
