"""Rules of decoding against a plain beam search with the same options."""

import dataclasses

import numpy as np
import pytest
from tables import END, Tables, valid
from test_beam import assert_plain

from rag_jax.config import EvalConfig
from rag_jax.decoding.settings import Decoding
from rag_jax.hub.config_json import SEARCH

MODEL = Tables(rows=25, documents=2, longest=6, seed=4, end_bias=-1.0, spread=1.5)
OPTIONS = [
    {"min_length": 4},
    {"no_repeat_ngram_size": 1, "forced_eos": True},
    {"no_repeat_ngram_size": 2},
    {"no_repeat_ngram_size": 3, "length_penalty": 1.5},
    {"bad_words": ((3,), (0, 1), (1, 1, 0))},
    {"forced_bos": 3, "min_length": 3},
    {"forced_eos": True, "length_penalty": 1.0},
    {"prefix": (1, 0), "length_penalty": 0.7},
    {"prefix": (0, 0, 0), "no_repeat_ngram_size": 2, "bad_words": ((0, 3),), "min_length": 5,
     "forced_eos": True},
]


@pytest.mark.parametrize("kind", ["token", "sequence"])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options))
def test_beams_match_a_plain_search_with_the_same_rules(kind, options):
    if kind == "sequence" and "prefix" not in options:
        width = 1  # greedy, and fewer programs to compile
    else:
        width = 3
    free = assert_plain(MODEL, kind, num_beams=width)
    assert assert_plain(MODEL, kind, num_beams=width, **options) != free, "the rule changes nothing"


def test_what_each_rule_promises():
    """Read off the answers, without any model of the search."""
    def answers(**options):
        found = MODEL.search(num_beams=3, **options)
        return [y for row in range(len(MODEL.log_p)) for _, y in valid(found, row)]

    assert min(map(len, answers(min_length=4))) >= 4
    for y in answers(no_repeat_ngram_size=2):
        grams = list(zip(y, y[1:], strict=False))
        assert len(set(grams)) == len(grams)
    for y in answers(**OPTIONS[4]):
        text = "".join(map(str, y))
        assert not any(word in text for word in ("3", "01", "110"))
    assert {y[0] for y in answers(forced_bos=3, min_length=3)} == {3}
    assert {y[-1] for y in answers(forced_eos=True, length_penalty=1.0)} == {END}
    assert {y[:2] for y in answers(prefix=(1, 0), length_penalty=0.7)} == {(1, 0)}


@pytest.mark.parametrize("rule, some_are_out", [
    ({}, False), ({"min_length": 1, "forced_eos": True, "length_penalty": 1.0}, False),
    ({"min_length": 2}, True), ({"no_repeat_ngram_size": 2}, True), ({"prefix": (3,)}, True),
    ({"forced_bos": 3}, True), ({"bad_words": ((3,),)}, True), ({"labels": ((3,), (4,))}, True)])
def test_which_settings_rule_answers_out(rule, some_are_out):
    assert Decoding(**rule).has_rules == some_are_out


def test_nothing_is_found_where_the_rules_allow_nothing():
    """No NaN, no junk that looks like an answer."""
    found = MODEL.search(num_beams=2, bad_words=((0,), (1,), (3,)), min_length=6)
    assert not any(valid(found, row) for row in range(len(MODEL.log_p)))
    assert not found.finished.any() and not np.isnan(found.bound).any()


@pytest.mark.parametrize("settings, word", [
    ({"strategy": "quick"}, r"strategy='quick': expected marginal\|thorough\|fast"),
    ({"num_beams": 2.0}, "num_beams=2.0: expected int"),
    ({"max_length": True}, "max_length=True: expected int"),
    ({"length_penalty": float("nan")}, "length_penalty=nan: must be a finite number"),
    ({"bad_words": [[1]]}, "bad_words=.*: expected"),
    ({"forced_bos": 2, "forced_eos": True, "max_length": 1}, "the only token of max_length=1"),
    ({"num_beams": 0}, "num_beams=0"),
    ({"min_length": 9, "max_length": 8}, "min_length=9"),
    ({"temperature": 0.0, "sample": True}, "temperature=0.0"),
    ({"top_p": 1.5, "sample": True}, "top_p=1.5"),
    ({"top_k": 5}, "sample=True"),
    ({"num_return_sequences": 5, "num_beams": 4}, "num_beams=4"),
    ({"bad_words": ((),)}, "bad word"),
    ({"prefix": (1,), "forced_bos": 2}, "prefix"),
    ({"prefix": (1, 2), "max_length": 2}, "prefix has 2 tokens"),
    ({"max_length": 0}, "max_length=0: must be at least 1"),
    ({"max_length": -1}, "max_length=-1: must be at least 1"),
    ({"memory_mib": -1}, "memory_mib=-1"),
    ({"labels": ((1,), (2,)), "prefix": (1,)}, "labels and prefix"),
    ({"labels": ((1,), (2,)), "bad_words": ((1,),)}, "labels and bad_words"),
])
def test_settings_that_cannot_be_met_are_refused_by_name(settings, word):
    with pytest.raises(ValueError, match=word):
        Decoding(**settings)


def test_a_setting_has_the_default_of_the_configuration():
    """num_beams was 1 on the command line and 4 from Python."""
    ours, theirs = Decoding(), EvalConfig()
    texts = {"prefix", "forced_bos"}  # token ids here: none in place of an empty text or false
    for name in {f.name for f in dataclasses.fields(ours)} - texts - {"max_length"}:
        of_checkpoint = name in (*SEARCH, "forced_eos")  # none there = as a checkpoint says
        assert getattr(theirs, name) == (None if of_checkpoint else getattr(ours, name)), name
