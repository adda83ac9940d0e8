"""Diversity, label accuracy and overlap on cases worked out by hand."""

import numpy as np
import pytest

from rag_jax.metrics.bleu import corpus_bleu, corpus_sacre_bleu, distinct_ngram_ratio
from rag_jax.metrics.classification import accuracies
from rag_jax.metrics.overlap import overlaps, slices
from rag_jax.metrics.q_bleu import bleu_1, q_bleu_1
from rag_jax.metrics.rouge import rouge_l


def test_distinct_trigrams_are_counted_over_all_texts_together():
    texts = ["a b c d".split(), "a b c".split(), "a b".split()]
    assert distinct_ngram_ratio(texts) == 2 / 3  # abc, bcd, abc
    assert distinct_ngram_ratio(texts, 1) == 4 / 9
    assert distinct_ngram_ratio(["x y z".split(), "y z x".split()]) == 1.0  # order matters
    assert distinct_ngram_ratio([["a"]]) == 0.0
    assert distinct_ngram_ratio(iter(texts)) == 2 / 3


def test_accuracy_of_three_classes_two_classes_and_parts():
    labels = ["SUPPORTS", "SUPPORTS", "REFUTES", "NOT ENOUGH INFO"]
    predictions = ["supports", "NOT ENOUGH INFO", "REFUTES ", "not_enough_info"]
    found = accuracies(predictions, labels)
    assert found == {
        "accuracy": 75.0,
        "accuracy_2way": pytest.approx(200 / 3), "count_2way": 3,
        "accuracy_supports": 50.0, "count_supports": 2,
        "accuracy_refutes": 100.0, "count_refutes": 1,
        "accuracy_not_enough_info": 100.0, "count_not_enough_info": 1,
    }
    two = accuracies(["REFUTES", "REFUTES"], ["REFUTES", "SUPPORTS"])
    assert two["accuracy"] == two["accuracy_2way"] == 50.0
    with pytest.raises(ValueError, match="no predictions"):
        accuracies([], [])
    with pytest.raises(ValueError):
        accuracies(["SUPPORTS"], ["SUPPORTS", "REFUTES"])


def test_overlap_with_the_training_set_is_after_normalisation():
    answers = overlaps([["Lima"], ["Quito", "the Nuevo Sol!"], ["Peru"]],
                       [["nuevo sol"], ["lima"], ["Lima, Peru"]])
    assert answers.tolist() == [True, True, False]
    questions = overlaps([["Where is the Peru?"], ["Where is Quito"]], [["where is Peru"]])
    assert questions.tolist() == [True, False]


def test_overlap_is_what_exact_match_says():
    """With nfd, the answers of training were told apart from those that exact match found equal."""
    composed, decomposed = [["Beyonc\u00e9"]], [["Beyonce\u0301"]]
    assert not overlaps(composed, decomposed) and overlaps(composed, decomposed, nfd=True)


@pytest.mark.parametrize("wrong", [
    lambda: overlaps(["Lima"], [["L"]]), lambda: overlaps([["L"]], ["Lima"]),
    lambda: q_bleu_1("Who is it?", "Who is it?"), lambda: bleu_1("Who is it?", "Who is it?"),
    lambda: rouge_l(["who"], "who"), lambda: rouge_l(["who"], ["who"]),
    lambda: rouge_l("who", [["who"]]), lambda: corpus_bleu([["who"]], ["who"]),
    lambda: corpus_bleu([["who"]], [["who"]]), lambda: corpus_sacre_bleu(["Who is it?"], ["Who?"])])
def test_a_string_in_the_place_of_a_list_is_an_error_and_no_score(wrong):
    """Its letters were scored as answers, or as tokens."""
    with pytest.raises(TypeError, match="expected a list"):
        wrong()


def test_slices_split_every_question_once():
    correct = [True, False, True, True]
    found = slices(correct, np.array([True, True, False, False]), "answer_overlap")
    assert found == {"answer_overlap": 50.0, "answer_overlap_count": 2,
                     "no_answer_overlap": 100.0, "no_answer_overlap_count": 2}
    assert slices(correct, np.ones(4, bool), "x") == {
        "x": 75.0, "x_count": 4, "no_x_count": 0}  # no score over no questions
