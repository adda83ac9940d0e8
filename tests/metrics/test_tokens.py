"""Tokenizers against the outputs of spaCy 3.8 (blank English) and Stanford CoreNLP 3.4.1."""

import pytest

from rag_jax.metrics.tokens import ptb_tokens, spacy_tokens
from tests.metrics.goldens import golden


@pytest.mark.parametrize(("text", "spacy", "ptb"), [
    ("I can't say he's the \"President of the U.S.\" (since 2001).",
     'i ca n\'t say he \'s the " president of the u.s. " ( since 2001 ) .',
     "i ca n't say he 's the president of the u.s. -lrb- since 2001 -rrb-"),
    ("It costs $5.00, or €3 - about 1,000.5 yen; 20–25% more!",
     "it costs $ 5.00 , or € 3 - about 1,000.5 yen ; 20–25 % more !",
     "it costs $ 5.00 or $ 3 about 1,000.5 yen 20 25 % more"),
    ("Don't they cannot? We'll see, they'd've gone.",
     "do n't they can not ? we 'll see , they 'd 've gone .",
     "do n't they can not we 'll see they 'd 've gone"),
    ("Dr. Smith's state-of-the-art R&B band, Inc., and/or O'Neill.",
     "dr. smith 's state - of - the - art r&b band , inc. , and/or o'neill .",
     "dr. smith 's state-of-the-art r&b band inc. and/or o'neill"),
    ("see http://example.com/a?b=c or www.example.org, or a@b.co",
     "see http://example.com/a?b=c or www.example.org , or a@b.co",
     "see http://example.com/a?b=c or www.example.org or a@b.co"),
    ("World War I. The war ended at 5 p.m. in 1918... or later?!",
     "world war i. the war ended at 5 p.m. in 1918 ... or later ? !",
     "world war i the war ended at 5 p.m. in 1918 or later ?!"),
    ("No. 5 and no. Group, i.e., c. 1700, vol. 3/4, 9/11/2001",
     "no . 5 and no . group , i.e. , c. 1700 , vol . 3/4 , 9/11/2001",
     "no. 5 and no group i.e. c. 1700 vol 3/4 9/11/2001"),
    ("Charles L. Hutchinson's 1940s mini-game is -40°C, 2½ km.",
     "charles l. hutchinson 's 1940s mini - game is -40 ° c , 2½ km .",
     "charles l. hutchinson 's 1940s mini-game is -40 ° c 2 1/2 km"),
    ("“Curly” ‘quotes’ – it’s São Tomé’s 3rd… one",
     "“ curly ” ‘ quotes ’ – it ’s são tomé ’s 3rd … one",
     "curly quotes it 's são tomé 's 3rd one"),
])
def test_tokens(text, spacy, ptb):
    assert " ".join(spacy_tokens(text)) == spacy
    assert " ".join(ptb_tokens(text)) == ptb


@pytest.mark.parametrize(("text", "tokens"), [
    ("Beyonce\u0301's cafe\u0301", ["beyonce\u0301", "'s", "cafe\u0301"]),
    ("I \u2764\ufe0f Peru", ["i", "\u2764", "peru"]),
    ("@user_1 likes #tag2 and #1", ["@user_1", "likes", "#tag2", "and", "#", "1"]),
    ("Q &amp; A of AT&amp;T, a &lt; b &quot;c&quot;",
     ["q", "&", "a", "of", "at&t", "a", "<", "b", "c"]),
    ("&amp;lt; a@b.co", ["&", "lt", "a@b.co"]),
])
def test_ptb_marks_handles_and_entities_by_the_rules_of_the_lexer(text, tokens):
    """By PTBLexer.flex: marks are letters, @name and #word tokens, entities what they stand for.

    A decomposed accent was a token of its own, and split its word in two.
    """
    assert ptb_tokens(text) == tokens


@pytest.mark.parametrize(("text", "tokens"), [
    ("a  b", ["a", "", "b"]), ("a\nb", ["a", "", "b"]), (" a", ["", "a"]), ("a b ", ["a", "b"]),
    ("a   b", ["a", "", "b"]), ("", []),
])
def test_white_space_beyond_single_spaces_is_a_token_of_spacy(text, tokens):
    assert spacy_tokens(text) == tokens


def test_ptb_values_of_the_reference_implementation():
    for case in golden("generation"):
        texts = [case["prediction"], *case["references"]]
        expected = [case["ptb_prediction"], *case["ptb_references"]]
        assert [" ".join(ptb_tokens(text)) for text in texts] == expected
