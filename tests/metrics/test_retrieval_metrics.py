"""Answer matching as in DPR, answer recall at K, and the retrieval-collapse monitors."""

import unicodedata

import numpy as np
import pytest

from rag_jax.metrics.answers import normalize_answer
from rag_jax.metrics.retrieval import (
    _joined_tokens,
    answer_rank,
    gold_metrics,
    has_answer,
    recall_at,
    retrieval_monitors,
    title_precision,
)
from tests.metrics.goldens import golden


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("Lima is the capital.", "lima", True),
        ("Romeo loved Juliet", "Rome", False),  # parts of words do not count
        ("in 1950", "95", False),
        ("The Andes of Peru", "Andes Peru", False),  # tokens must be contiguous
        ("the U.S. Senate", "U.S.", True),
        ("the US Senate", "U.S.", False),
        ("Lima, Peru", "Lima , Peru", True),  # spacing around punctuation is free
        ("Lima Peru", "Lima, Peru", False),  # but punctuation is a token
        ("$1,000 prize", "1,000", True),
        ("snake_case", "snake", True),  # "_" is no letter, unlike in \w
        ("O'Neill", "O\u2019Neill", False),
        ("1\u20130", "1-0", False),
        ("caf\u00e9 noir", "cafe\u0301", True),  # composed and decomposed forms are equal
        ("cafe noir", "caf\u00e9", False),  # accents count
        ("caf\u00e9 noir", "cafe", False),  # a mark belongs to its word
        ("S\u00c3O TOM\u00c9", "s\u00e3o tom\u00e9", True),
        ("stra\u00dfe", "STRASSE", False),
        ("\u6771\u4eac\u90fd", "\u6771\u4eac", False),  # one run of letters is one token
        ("\u0928\u0908 \u0926\u093f\u0932\u094d\u0932\u0940 \u092e\u0947\u0902",
         "\u0926\u093f\u0932\u094d\u0932\u0940", True),  # marks belong to the word
        ("x\u00b2 + y", "x\u00b2", True),  # category No is a digit
        ("zero\u200bwidth", "zero width", True),  # invisible characters separate tokens
        ("\U0001f600 x", "\U0001f600", True),
        ("a\nb", "a b", True),
        ("anything", "", False),
        ("anything", " \u200b", False),
        ("", "x", False),
    ],
)  # fmt: skip
def test_has_answer(text, answer, expected):
    assert has_answer(text, [answer]) is expected


def test_tokens_are_those_of_the_characters_categories():
    """A quick form for ASCII, or a library's classes, that differ would change the recall."""
    for code in range(0x3000):
        kind = unicodedata.category(chr(code))[0]
        if unicodedata.normalize("NFD", chr(code)) != chr(code) or not unicodedata.name(
                chr(code), ""):
            continue  # several characters, or one that Python may not know yet
        tokens = {"L": [f"a{chr(code)}b"], "Z": ["a", "b"], "C": ["a", "b"]}
        tokens |= {"N": tokens["L"], "M": tokens["L"]}
        expected = tokens.get(kind, ["a", chr(code), "b"])
        assert _joined_tokens(f"a{chr(code)}b").split() == " ".join(expected).lower().split(), code


def test_has_answer_takes_any_of_the_answers():
    assert has_answer("the euro", ["peso", "euro"])
    assert not has_answer("the euro", [])
    with pytest.raises(TypeError, match="list of strings"):
        has_answer("the euro", "euro")


def test_has_answer_values_of_the_reference_implementation():
    for case in golden("has_answer"):
        text, answers = case["text"], case["answers"]
        assert has_answer(text, answers) == bool(case["dpr_string"]), case
        assert has_answer(text, answers, regex=True) == bool(case["dpr_regex"]), case
        assert _joined_tokens(text).split() == case["dpr_tokens"], case
        inside = any(normalize_answer(a) in normalize_answer(text) for a in answers)
        assert inside == bool(case["kilt"]), case


def test_patterns_are_searched_in_the_text_as_it_is():
    """An anchored match, or one on tokens, would miss what CuratedTREC's patterns describe."""
    assert has_answer("It is 20,320 feet high", [r"20,?320\s*f(ee|oo)t"], regex=True)
    assert not has_answer("It is 20,320 feet high", [r"20,?320\s*f(ee|oo)t"])
    assert has_answer("in Romeo", ["rome"], regex=True)
    assert answer_rank(["no", "in 1950", "1950"], [r"19\d0"], regex=True) == 1
    assert answer_rank(["no"], [r"19\d0"], regex=True) == float("inf")


def test_title_precision_counts_a_title_once_and_the_places_asked_for():
    titles = ["Peru", "Peru", "Lima", "Quito"]
    assert title_precision(titles, ["Peru", "Lima"], 1) == 1.0
    assert title_precision(titles, ["Peru", "Lima"], 2) == 0.5  # Peru twice is one title
    assert title_precision(titles, ["Quito"], 3) == 0.0
    assert title_precision(titles, ["Quito"], 4) == 0.25
    assert title_precision(["Peru"], ["peru"], 1) == 0.0  # titles are names, taken literally


def test_answer_recall_counts_questions_by_their_first_hit():
    retrieved = [["no", "Lima", "Lima"], ["Quito"], ["no", "no", "in La Paz"], []]
    answers = [["Lima"], ["quito", "Q"], ["La Paz"], ["Bogota"]]
    ranks = list(map(answer_rank, retrieved, answers))
    assert recall_at(ranks, [1, 2, 3]) == {1: 25.0, 2: 50.0, 3: 75.0}
    with pytest.raises(TypeError, match="passages"):
        answer_rank("abc", ["a"])


def test_monitors_of_healthy_retrieval():
    ids = np.arange(6).reshape(3, 2)
    uniform = np.full((3, 2), 0.5, np.float32)
    certain = np.tile(np.float32([1, 0]), (3, 1))
    monitors = retrieval_monitors(ids, uniform, certain)
    assert monitors == {
        "unique_passages": 6,
        "unique_passage_share": 1.0,
        "retrieved_id_entropy": pytest.approx(np.log(6)),
        "top_passage_share": pytest.approx(1 / 3),
        "prior_entropy": pytest.approx(np.log(2)),
        "posterior_entropy": 0.0,
    }


def test_monitors_of_collapsed_retrieval():
    monitors = retrieval_monitors(np.tile([7, 3], (4, 1)), np.full((4, 2), 0.5))
    assert monitors["unique_passages"] == 2
    assert monitors["unique_passage_share"] == 0.25
    assert monitors["retrieved_id_entropy"] == pytest.approx(np.log(2))
    assert monitors["top_passage_share"] == 1.0
    assert "posterior_entropy" not in monitors


def test_monitors_entropy_is_the_mean_over_questions_in_nats():
    prior = np.array([[0.25, 0.75], [0.5, 0.5]])
    expected = np.mean([-0.25 * np.log(0.25) - 0.75 * np.log(0.75), np.log(2)])
    assert retrieval_monitors([[0, 1], [0, 2]], prior)["prior_entropy"] == pytest.approx(expected)


def test_monitors_ignore_padding():
    """Padding ids, whatever their number, must neither look like a passage nor like collapse."""
    prior = np.array([[0.5, 0.5], [1.0, 0.0], [0.0, 0.0]])
    posterior = np.array([[0.9, 0.1], [1.0, 0.0], [0.0, 0.0]])
    plain = retrieval_monitors([[4, 5], [6, -1], [-1, -1]], prior, posterior)
    assert plain == retrieval_monitors([[4, 5], [6, 4], [4, 4]], prior, posterior)
    assert plain["unique_passages"] == 3
    assert plain["unique_passage_share"] == 1.0
    assert plain["retrieved_id_entropy"] == pytest.approx(np.log(3))
    assert plain["top_passage_share"] == pytest.approx(1 / 3)
    assert plain["prior_entropy"] == pytest.approx(np.log(2) / 2)


def test_monitors_count_a_repeated_passage_once_per_question():
    monitors = retrieval_monitors([[1, 1], [2, 3]], np.full((2, 2), 0.5))
    assert monitors["top_passage_share"] == 0.5


@pytest.mark.parametrize(
    ("ids", "prior", "posterior", "message"),
    [
        ([1, 2], [0.5, 0.5], None, r"expected int\[B, K\]"),
        ([[1.0, 2.0]], [[0.5, 0.5]], None, r"expected int\[B, K\]"),
        ([[1, 2]], [[1.0]], None, "prior has shape"),
        ([[1, 2]], [[-0.7, -1.2]], None, "prior holds negative"),
        ([[1, 2]], [[np.nan, 1.0]], None, "prior holds negative or non-finite"),
        ([[1, 2]], [[7.0, 3.0]], None, r"prior\[0\] sums to 10"),
        ([[1, 2]], [[0.5, 0.5]], [[0.5, 0.1]], r"posterior\[0\] sums to 0.6"),
        ([[-1, -1]], [[0.0, 0.0]], None, "no passages"),
    ],
)
def test_monitors_refuse_what_is_no_distribution(ids, prior, posterior, message):
    with pytest.raises(ValueError, match=message):
        retrieval_monitors(ids, prior, posterior)


def test_gold_metrics_by_hand():
    """Ranks count from 1; nDCG takes nothing for what there are no places for, or no gold."""
    found = gold_metrics([["a", "b", "c"], ["d", "e", "f"], ["g"]],
                         [{"b", "c", "x"}, {"z"}, ["g", "y", "g"]], [1, 2, 5])
    two, three = 1 / np.log2(3), 1 / np.log2(4)
    expected = {
        "gold_recall@1": [0, 0, 1 / 2], "gold_recall@2": [1 / 3, 0, 1 / 2],
        "gold_recall@5": [2 / 3, 0, 1 / 2], "gold_mrr": [1 / 2, 0, 1],
        "gold_ndcg@1": [0, 0, 1], "gold_ndcg@2": [two / (1 + two), 0, 1 / (1 + two)],
        "gold_ndcg@5": [(two + three) / (1 + two + three), 0, 1 / (1 + two)]}
    assert found == pytest.approx({name: 100 * np.mean(each) for name, each in expected.items()})


def test_ids_that_differ_in_their_last_letter_alone_are_others():
    """numpy drops zero characters at the end of a text."""
    assert gold_metrics([["p0", "p1"]], [["p0\0"]], [1])["gold_mrr"] == 0


@pytest.mark.parametrize("found, gold", [([], []), ([["a"]], []), ([["a"]], [set()])])
def test_gold_metrics_need_gold(found, gold):
    with pytest.raises(ValueError, match="a gold passage for each"):
        gold_metrics(found, gold, [1])
