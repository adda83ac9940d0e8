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


@pytest.mark.parametrize(("text", "ptb"), [
    ("It ended in 2012.At first, ABC.def and node2.local were X.25 or v1.2.",
     "it ended in 2012 at first abc.def and node2.local were x. 25 or v1 .2"),
    ("C.W.Mercer of a U.S.-based firm, J.R.R. Tolkien; F-16.The Baseball-Reference.com",
     "c.w.mercer of a u.s.-based firm j.r.r. tolkien f-16 the baseball-reference com"),
    ("at 9 am., i.e. money.:245, pages:57, 100-70,000 at UTC+09:00, doi:10.1",
     "at 9 am. i.e. money. :245 pages :57 100-70 ,000 at utc +09:00 doi :10.1"),
    ("Kaua'i, Xi'an, B'Day, ma'am; Yan'an, Qur'an, O'Brien; rock 'n' roll of '12 or '12, 'tis 'em",
     "kaua'i xi'an b'day ma'am yan an qur an o'brien rock 'n' roll of '12 or 12 't is 'em"),
    ("R&B of r&b, A+B, AUD$5 and abc$5; why?because and/or 1/p and 139/2004/EC",
     "r&b of r & b a+b aud$ 5 and abc $ 5 why?because and/or 1/p and 139/2004/ec"),
    ("mv² of CO₂, 6⅔ for ₩5, ₹6, 7¢ and greenhouse‐gas gimme",
     "mv ² of co ₂ 6 2/3 for 5 6 7 cents and greenhouse‐gas gim me"),
])
def test_ptb_points_apostrophes_and_signs_as_the_lexer_cuts_them(text, ptb):
    """2012.At was one word, and Xi'an two."""
    assert " ".join(ptb_tokens(text)) == ptb


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
