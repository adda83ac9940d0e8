"""SacreBLEU against values that sacrebleu 2.6.0 gave: a later version must give them too."""

import math

import pytest
from sacrebleu.metrics.bleu import BLEU

from rag_jax.metrics.bleu import corpus_sacre_bleu
from tests.metrics.goldens import golden


def test_a_corpus_with_several_references():
    """Values of sacrebleu 2.6.0; questions have different numbers of references."""
    predictions = ["The cat sat on the mat.", "He wrote 3-4 books, I think"]
    references = [["The cat is on the mat.", "There is a cat on the mat."],
                  ["I think he wrote three or four books", "He wrote 3-4 books"]]
    assert corpus_sacre_bleu(predictions, references) == pytest.approx(59.4603557501361)
    repeated = [references[0] * 2, references[1]]
    assert corpus_sacre_bleu(predictions, repeated) == pytest.approx(59.4603557501361)
    assert corpus_sacre_bleu(["a b"], [["a c"]]) == 0.0, "a corpus too short for four-grams"


@pytest.mark.parametrize(("one", "other"), [
    ("It costs $5.00, right?", "It costs $ 5.00 , right ?"),
    ("3-4 state-of-the-art", "3 - 4 state-of-the-art"),
    ("don't (say) \"no\".", "don't ( say ) \" no \" ."),
    ("1,000.5, .5", "1,000.5 , . 5"),
    ("R&amp;B &lt;b&gt; <i>", "R & B < b > < i >"),
    ("“curly” – dash –", "“curly” – dash –"),
])
def test_tokens_are_those_of_mteval_13a(one, other):
    """Another tokenizer would give other numbers than those that papers report."""
    assert corpus_sacre_bleu([one], [[other]]) == pytest.approx(100.0)


def test_orders_without_a_match_count_half_a_match_then_a_quarter():
    assert corpus_sacre_bleu(["a b c d e"], [["e d c b a"]]) == pytest.approx(
        100 * (1 / 4 / 2 * 1 / 3 / 4 * 1 / 2 / 8) ** (1 / 4))


def test_brevity_is_punished():
    assert corpus_sacre_bleu(["a b c d"], [["a b c d e f"]]) == pytest.approx(
        100 * math.exp(1 - 6 / 4))


def test_values_of_the_reference_implementation():
    scorers = {"sacrebleu_sentence": BLEU(effective_order=True),
               "sacrebleu_sentence_lc": BLEU(effective_order=True, lowercase=True),
               "sacrebleu_bleu1_sentence": BLEU(effective_order=True, max_ngram_order=1)}
    for case in golden("generation"):
        for name, scorer in scorers.items():
            found = scorer.sentence_score(case["prediction"], case["references"]).score
            assert found == pytest.approx(case[name], rel=1e-12, abs=1e-12)


def test_misuse_is_an_error():
    for predictions, references, message in (
            ([], [], "no predictions"), (["a"], [[]], "no references"),
            (["a"], [["a"], ["b"]], "1 predictions but references of 2")):
        with pytest.raises(ValueError, match=message):
            corpus_sacre_bleu(predictions, references)
