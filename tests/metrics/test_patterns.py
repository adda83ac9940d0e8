"""Answers that are regular expressions: anchored, or found anywhere; on the text as it is."""

import pytest

from rag_jax.errors import DataError
from rag_jax.metrics import patterns
from rag_jax.metrics.patterns import pattern_match
from tests.metrics.goldens import golden


@pytest.mark.parametrize(("text", "pattern", "match", "search"), [
    ("1960s", r"196\d", True, True),
    ("the 1960s", r"196\d", False, True),  # anchored at the start, not at the end
    ("new york", "New York", True, True),
    ("ΣΊΣΥΦΟΣ", "σίσυφος", True, True),
    ("a\nChina", "^China$", False, True),  # ^ and $ also at line ends
    ("The Hague!", "the hague", True, True),  # nothing is normalised away
    ("Hague", "The Hague", False, False),
    ("", "x?", True, True),
    ("abc", "[", False, False),  # no regular expression: no match, no error
    ("abc", "(?a)(?u)abc", False, False),  # nor is this one, which says two alphabets
    ("5 KM", r"(?a)\d+ km", True, True),
    ("\u0665 km", r"(?a)\d+ km", False, False),  # ARABIC-INDIC DIGIT FIVE
    ("\u0665 km", r"\d+ km", True, True),
])
def test_how_a_pattern_matches(text, pattern, match, search):
    assert pattern_match(text, [pattern]) is match
    assert pattern_match(text, [pattern], "search") is search


def test_any_pattern_counts_and_decomposition_is_of_both_sides():
    assert pattern_match("Tokyo", ["Kyoto", "tokyo"])
    for text, pattern in (("cafe\u0301", "caf\u00e9"), ("caf\u00e9", "cafe\u0301")):
        assert not pattern_match(text, [pattern])
        assert pattern_match(text, [pattern], nfd=True)


def test_misuse_is_an_error_and_not_a_low_score():
    with pytest.raises(TypeError, match="list of strings"):
        pattern_match("Lima", "Lima")
    with pytest.raises(ValueError, match="no patterns"):
        pattern_match("Lima", [])


def test_values_of_the_reference_implementations():
    for case in golden("regex_pairs"):
        pair = case["prediction"], case["patterns"]
        assert pattern_match(*pair) == bool(case["drqa_match_raw"]), case
        assert pattern_match(*pair, nfd=True) == bool(case["drqa_pipeline_match_nfd"]), case
        assert pattern_match(*pair, "search", nfd=True) == bool(case["dpr_search_nfd"]), case


def test_a_pattern_that_would_run_for_ever_is_named(monkeypatch):
    """One such answer in a file kept an evaluation from ever ending."""
    monkeypatch.setattr(patterns, "LIMIT_SECS", 0.02)
    with pytest.raises(DataError, match=r"\(\?:a\|aa\)\+\$.* of 81 characters in 0.02 seconds"):
        pattern_match("a" * 80 + "b", ["b", "(?:a|aa)+$"])


@pytest.mark.parametrize("pattern", ["x{100000000}", "(?:(?:(x{1000}|y)?z){1000}?){1000}"])
def test_a_pattern_that_would_fill_the_memory_is_named(pattern):
    """Twelve letters took 3 GB: the library writes repetitions out."""
    with pytest.raises(DataError, match=r"parts with its repetitions written out.*lower its \{N\}"):
        pattern_match("x", [pattern])
    assert pattern_match("xx", ["(?:x{1,60000}){0,60000}", "x{1000}"])
