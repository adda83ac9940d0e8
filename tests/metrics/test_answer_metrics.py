"""EM and F1 against hand-made cases, and the reference implementations' values where at hand."""

import pytest

from rag_jax.metrics.answers import exact_match, f1, normalize_answer
from tests.metrics.goldens import golden


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  Lima,\tPeru!", "lima peru"),
        ("an apple a day", "apple day"),
        ("theatre another banana", "theatre another banana"),  # articles are whole words
        ("a-the", "athe"),  # punctuation goes before articles
        ("The-End", "theend"),
        ("“Lima”", "“lima”"),  # curly quotes are not in string.punctuation
        ("1–0", "1–0"),  # nor are long dashes
        ("São Tomé", "são tomé"),
        ("non\u00a0breaking", "non breaking"),
        ("The.", ""),
    ],
)
def test_normalisation(text, expected):
    assert normalize_answer(text) == expected


def test_exact_match_takes_any_reference_and_no_substring():
    assert exact_match("the Nuevo Sol", ["peso", "nuevo sol."])
    assert not exact_match("Lima", ["Lima, Peru"])
    assert not exact_match("", ["Lima"])
    assert exact_match("Lima", ("Lima",)) is True


def test_unicode_forms_stay_different():
    assert not exact_match("caf\u00e9", ["cafe\u0301"])
    assert f1("caf\u00e9", ["cafe\u0301"]) == 0.0


def test_unicode_forms_are_equal_when_decomposed():
    assert exact_match("caf\u00e9", ["cafe\u0301"], nfd=True)
    assert exact_match("cafe\u0301", ["the Caf\u00e9!"], nfd=True)
    assert f1("caf\u00e9", ["cafe\u0301"], nfd=True) == 1.0
    assert not exact_match("caf\u00e9", ["cafe"], nfd=True)  # the accent still counts


def test_both_sides_empty_match_exactly_but_have_no_f1():
    for prediction, reference in [("the", "a"), ("!!!", "???"), ("", "")]:
        assert exact_match(prediction, [reference])
        assert f1(prediction, [reference]) == 0.0


@pytest.mark.parametrize("nfd", [False, True])
def test_no_prediction_matches_no_answer_that_normalises_to_nothing(nfd):
    """An empty prediction was right wherever an answer is "A" or "The"."""
    for prediction in ("", " \n"):
        assert not exact_match(prediction, ["Lima", "A", "The", "!"], nfd=nfd)
    assert exact_match("A", ["Lima", "A"], nfd=nfd)


def test_f1_counts_repeated_tokens_and_takes_the_best_reference():
    # two of "lima lima peru" in common with "lima peru": precision 2/3, recall 1
    assert f1("Lima Lima Peru", ["Lima Peru"]) == pytest.approx(0.8)
    assert f1("Lima Peru", ["Lima Lima Peru"]) == pytest.approx(0.8)
    assert f1("Lima Lima", ["Lima Lima Peru"]) == pytest.approx(0.8)  # both of them are in common
    assert f1("Lima, in Peru", ["Quito", "Peru", "Lima"]) == pytest.approx(0.5)
    assert f1("Peru Lima", ["Lima Peru"]) == 1.0  # order does not matter


def test_misuse_is_an_error_and_not_a_low_score():
    with pytest.raises(TypeError, match="list of strings"):
        exact_match("Lima", "Lima")
    with pytest.raises(ValueError, match="no references"):
        f1("Lima", [])


def test_values_of_the_reference_implementations():
    for case in golden("qa_em_f1"):
        prediction, references = case["prediction"], case["references"]
        assert normalize_answer(prediction) == case["normalized_prediction"], case
        assert exact_match(prediction, references) == bool(case["squad_v11_em"]), case
        assert exact_match(prediction, references) == bool(case["dpr_em"]), case
        assert exact_match(prediction, references) == bool(case["kilt_em"]), case
        assert exact_match(prediction, references, nfd=True) == bool(case["drqa_pipeline_em"]), case
        assert f1(prediction, references) == case["squad_v11_f1"] == case["kilt_f1"], case
        assert [normalize_answer(text) for text in references] == case["normalized_references"]
