"""Q-BLEU-1: the kinds of words, the weights, and the reference implementation's values."""

import numpy as np
import pytest

from rag_jax.metrics.bleu import sentence_bleu
from rag_jax.metrics.q_bleu import Weights, bleu_1, components, q_bleu_1
from rag_jax.metrics.rouge import rouge_l
from rag_jax.metrics.tokens import ptb_tokens
from tests.metrics.goldens import golden

README = Weights(ner=0.6, imp=0.1, qt=0.2, sw=0.1, delta=0.7)


def close(value):
    return pytest.approx(value, abs=1e-7)


def test_each_kind_of_word_is_scored_by_itself():
    """The reference: qt "Who", ner "Hamlet", imp "wrote", sw "the", "of"."""
    reference = "Who wrote the tragedy of Hamlet"
    same = components(reference, reference)
    assert same == (close(1),) * 5
    assert components("Who wrote the tragedy of Macbeth", reference)[:4] == (
        close(0), close(1), close(1), close(1))
    assert components("Where wrote the tragedy of Hamlet", reference)[:4] == (
        close(1), close(1), close(0), close(1))
    # imp: 1 of 2 either way
    assert components("Who wrote the play of Hamlet", reference).imp == close(0.5)
    # sw: precision 1 with a brevity penalty of e^-1, recall 1/2
    precision, recall = np.exp(-1), 0.5
    assert components("Who wrote tragedy of Hamlet", reference).sw == close(
        2 * precision * recall / (precision + recall))


def test_what_and_which_take_the_word_after_them():
    """ "What city" asks for another type than "What state"; it is no other word of the rest."""
    for word in ("What", "which"):
        found = components(f"{word} state is it", f"{word} city is it")
        assert found.qt == close(0.5) and found.imp == 1.0
    assert components("Where state is it", "Where city is it").qt == close(1)


def test_a_question_word_in_front_is_no_name_and_a_capitalised_rest_is():
    assert components("Is Lima big", "Was Lima big").ner == close(0.5)  # Is, Was are names here
    assert components("Who is it", "Where is it").ner == 1.0  # neither has a name


def test_kinds_of_which_both_have_no_word_score_one():
    assert components("play", "game")[:4] == (1.0, close(0), 1.0, 1.0)


def test_weights_are_parameters_and_the_best_reference_counts():
    prediction, reference = "Who wrote Macbeth", "Who wrote Hamlet"
    # ner 0, all else 1; two of three words
    assert q_bleu_1(prediction, [reference]) == close(0.66 * (1 - 0.41) + 0.34 * 2 / 3)
    assert q_bleu_1(prediction, [reference], README) == close(0.7 * 0.4 + 0.3 * 2 / 3)
    assert sum(Weights()[:4]) == pytest.approx(1) and sum(README[:4]) == pytest.approx(1)
    assert q_bleu_1(prediction, ["What else is there", reference]) == q_bleu_1(
        prediction, [reference])


def test_an_empty_question_scores_nothing():
    assert q_bleu_1("", ["Who wrote Hamlet"]) == q_bleu_1("Who", [" "]) == 0.0
    assert q_bleu_1("", [""]) == 0.0
    assert bleu_1("", ["Who"]) == 0.0
    with pytest.raises(ValueError, match="no references"):
        q_bleu_1("Who", [])


def test_values_of_the_reference_implementation():
    for case in golden("qbleu")["pairs"]:
        pair = case["hypothesis"], [case["reference"]]
        found = components(pair[0], pair[1][0])
        for name in ("imp", "ner", "qt", "sw"):
            assert getattr(found, name) == pytest.approx(
                case["components"][name], rel=1e-12, abs=1e-300), (name, case)
        assert found.bleu_1 == pytest.approx(case["components"]["Bleu_1"], rel=1e-14), case
        ours, theirs = map(ptb_tokens, (pair[0], case["reference"]))
        assert sentence_bleu(ours, [theirs], 4)[3] == pytest.approx(
            case["components"]["Bleu_4"], rel=1e-14), case
        assert rouge_l(ours, [theirs]) == pytest.approx(
            case["components"]["ROUGE_L"], rel=1e-14), case
        assert q_bleu_1(*pair, README) == pytest.approx(case["qbleu1_readme"], rel=1e-12)
        assert q_bleu_1(*pair) == pytest.approx(
            case["qbleu1_recalled_squad_tuned_UNVERIFIED"], rel=1e-12)


def test_values_of_the_reference_implementation_in_its_own_unit_test():
    """With other n-gram metrics in BLEU-1's place; what its test expects is of an older version."""
    pair = "Is this a great question?", "Is this a good question?"
    ours, theirs = map(ptb_tokens, pair)
    found = components(*pair)
    fluency = dict(zip(("Bleu_1", "Bleu_2", "Bleu_3"), sentence_bleu(ours, [theirs], 3),
                       strict=True)) | {"ROUGE_L": rouge_l(ours, [theirs])}
    answerability = q_bleu_1(pair[0], [pair[1]], README) - 0.3 * found.bleu_1
    for name, case in golden("qbleu")["repo_unit_tests"].items():
        expected = [answerability + 0.3 * fluency[name], fluency[name]]
        assert case["got"] == pytest.approx(expected, rel=1e-12)
