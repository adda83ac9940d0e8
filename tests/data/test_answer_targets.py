"""Training targets of appendix D, against retrieval that a test makes up."""

import re
import tracemalloc

import pytest

from rag_jax.data.answer_targets import (
    DEPTH,
    LOOKS_IN_PASSAGES,
    MOST_EXPANSIONS,
    answers_found,
    best_matches,
    expansions,
)
from rag_jax.data.question_files import Example
from rag_jax.errors import DataError
from rag_jax.metrics import patterns

TEXTS = ["The Sunset Blvd of L.A.", "sunset boulevard", "Nothing."]


def found(*answers, texts=TEXTS):
    (example,) = answers_found([Example("1", "q", answers)], lambda question: texts)
    assert example.answers == answers, "what counts as right does not change"
    return example.targets


def test_answers_that_no_passage_holds_do_not_train():
    assert found("Sunset Blvd", "\N{SUNSET OVER BUILDINGS}", "Sunset Boulevard", "set B") == (
        "Sunset Blvd", "Sunset Boulevard")
    assert found("Elsewhere", "Nowhere") == ("Elsewhere",), "the value of the question itself"
    assert found("Elsewhere", "Nowhere", texts=[]) == ("Elsewhere",)


def test_only_the_first_thousand_passages_count():
    texts = ["x"] * (DEPTH - 1) + ["a", "b"]
    assert DEPTH == 1000 and found("b", "a", texts=texts) == ("a",)


def match(pattern, texts):
    examples = list(best_matches([Example("1", "q", (pattern,), regex=True)], lambda q: texts))
    return examples[0].targets if examples else None


def test_the_string_that_most_often_matches_trains():
    texts = ["Feb was", "in Sept and Feb", "September", "Feb"]
    assert match("Sept?(ember)?|Feb(ruary)?", texts) == ("Feb",)
    texts = ["New  York", "in New York City, NewYork", "NewYork"]
    assert match(r"new\s?york", texts) == ("NewYork",)
    assert match(r"\d*", ["none", "in 1912"]) == ("1912",), "an empty match says nothing"
    assert match("lima", ["x"] * DEPTH + ["Lima"]) == ("lima",), "beyond the first thousand"


def test_an_expression_that_would_run_for_ever_is_named(monkeypatch):
    """Preparation matched without the time limit of the scores."""
    monkeypatch.setattr(patterns, "LIMIT_SECS", 0.02)
    with pytest.raises(DataError, match=r"question '1'.*not done with a text of 81 characters"):
        match("(?:a|aa)+$", ["a" * 80 + "b"])


def test_where_nothing_matches_the_expansions_train():
    assert match("Sept?(ember)?", ["x"]) == ("September", "Sept", "Sepember", "Sep")
    assert match(r"\d+", ["x"]) is None, "nothing to write: left out"


@pytest.mark.parametrize("pattern, texts", [
    ("Saudi Arabia", ["Saudi Arabia"]),
    (r"Long Island|New\s?York", ["Long Island", "New York", "NewYork"]),
    (r"6,?[05]00\s*K", ["6,000 K", "6,500 K", "6000 K", "6500 K"]),
    (r"9,?941.*F", ["9,941 F", "9941 F"]),
    (r"(?:a|b(c|d))\b", ["a", "bc", "bd"]),
    (r"^x[^y]z$", ["x z"]),
    (r"U\.S\.(A\.)?", ["U.S.A.", "U.S."]),
    (r"a{2,3}b", ["b"]),
    (r"(?=x)y(?!z)", ["y"]),
    (r"[a-c]1", ["1"]),
    (r"\W*", []),
])
def test_expansions(pattern, texts):
    assert expansions(pattern) == texts


def test_expansions_of_closed_expressions_match_them():
    for pattern in ("Sept?(ember)?|Feb(ruary)?", r"(The )?Star.Spangled\s+Banner", "[AB](c|d)?e"):
        assert expansions(pattern)
        assert all(re.fullmatch(pattern, text) for text in expansions(pattern))


def test_endless_alternatives_are_cut_off_wherever_they_are():
    """30 optional letters are a thousand million strings."""
    assert len(expansions("a?" * 30)) <= MOST_EXPANSIONS
    tracemalloc.start()
    assert len(expansions("x(" + "a?b?" * 7 + ")y")) <= MOST_EXPANSIONS
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 300_000, "of 16,384 strings"


def test_the_table_says_which_rule_a_task_has():
    examples = [Example("1", "q", ("b", "Nothing"), regex=True)]
    assert LOOKS_IN_PASSAGES.keys() == {"retrieved", "matches"}
    (one,) = LOOKS_IN_PASSAGES["retrieved"](examples, lambda q: TEXTS)
    assert one.targets == ("Nothing",)
    (one,) = LOOKS_IN_PASSAGES["matches"](examples, lambda q: ["b", "Nothing Nothing"])
    assert one.targets == ("Nothing",)
