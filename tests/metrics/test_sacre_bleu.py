"""SacreBLEU against values that sacrebleu 2.6.0 gave."""

import math

import pytest

from rag_jax.metrics.sacre_bleu import corpus_sacre_bleu, sentence_sacre_bleu, tokens_13a
from tests.metrics.goldens import golden


@pytest.mark.parametrize(("text", "tokens"), [
    ("It costs $5.00, right?", "It costs $ 5.00 , right ?"),
    ("3-4 state-of-the-art", "3 - 4 state-of-the-art"),
    ("don't (say) \"no\".", "don't ( say ) \" no \" ."),
    ("1,000.5, .5", "1,000.5 , . 5"),
    ("R&amp;B &lt;b&gt;", "R & B < b >"),
    ("“curly” – dash", "“curly” – dash"),
])
def test_tokens(text, tokens):
    assert " ".join(tokens_13a(text)) == tokens


def test_a_corpus_with_several_references():
    """Values of sacrebleu 2.6.0."""
    predictions = ["The cat sat on the mat.", "He wrote 3-4 books, I think"]
    references = [["The cat is on the mat.", "There is a cat on the mat."],
                  ["I think he wrote three or four books", "He wrote 3-4 books"]]
    assert corpus_sacre_bleu(predictions, references) == pytest.approx(59.4603557501361)
    # Too short for four-grams: a sentence leaves them out, a corpus does not.
    assert sentence_sacre_bleu("a b", ["a c"]) == pytest.approx(50.0)
    assert corpus_sacre_bleu(["a b"], [["a c"]]) == 0.0
    assert sentence_sacre_bleu("", ["a"]) == 0.0


def test_orders_without_a_match_count_half_a_match_then_a_quarter():
    score = sentence_sacre_bleu("a b c d e", ["e d c b a"])
    assert score == pytest.approx(100 * (1 / 4 / 2 * 1 / 3 / 4 * 1 / 2 / 8) ** (1 / 4))


def test_brevity_is_punished():
    assert sentence_sacre_bleu("a b c d", ["a b c d e f"]) == pytest.approx(
        100 * math.exp(1 - 6 / 4))


def test_values_of_the_reference_implementation():
    for case in golden("generation"):
        pair = case["prediction"], case["references"]
        close = {"rel": 1e-12, "abs": 1e-12}
        assert sentence_sacre_bleu(*pair) == pytest.approx(case["sacrebleu_sentence"], **close)
        assert sentence_sacre_bleu(*pair, lowercase=True) == pytest.approx(
            case["sacrebleu_sentence_lc"], **close)
        assert sentence_sacre_bleu(*pair, max_order=1) == pytest.approx(
            case["sacrebleu_bleu1_sentence"], **close)


def test_misuse_is_an_error():
    with pytest.raises(ValueError, match="no predictions"):
        corpus_sacre_bleu([], [])
    with pytest.raises(ValueError, match="no references"):
        sentence_sacre_bleu("a", [])
    with pytest.raises(ValueError):
        corpus_sacre_bleu(["a"], [["a"], ["b"]])
