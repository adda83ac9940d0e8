"""Fictional countries: made by rule, the same for the same seed, never named like a real one."""

import pytest

from rag_jax.countries.facts import load_countries
from rag_jax.countries.fiction import fictional_countries
from rag_jax.countries.prose import questions
from rag_jax.countries.world import split_countries
from rag_jax.metrics.answers import normalize_answer

REAL = load_countries()
NAMES = [c.name for c in REAL]
TRAIN, DEV, TEST = split_countries(REAL)


@pytest.fixture(scope="module")
def invented():
    return fictional_countries(2500, 0, TRAIN, DEV + TEST)


def test_no_name_contains_or_is_contained_in_a_real_name(invented):
    """A fictional "Peruvia" would put the name of a test country into training."""
    clashes = [(c.name, real) for c in invented for real in NAMES
               if c.name.lower() in real.lower() or real.lower() in c.name.lower()]
    assert clashes == []


def names_of(c):
    return {c.name, c.capital, c.largest_city, c.highest_point, *c.languages,
            *(name for office in c.offices for _, name in office.holders)}


def test_no_name_of_an_unseen_country_is_given_to_a_fictional_one():
    """They are the answers of the test: training must not teach to say them."""
    # With the chain fitted to the unseen countries themselves, chance would often hit.
    made = fictional_countries(1500, 0, DEV + TEST, TEST)
    unseen = set().union(*map(names_of, TEST))
    assert [n for c in made for n in names_of(c) & unseen] == []


def test_names_are_different_and_as_many_as_asked(invented):
    assert len({c.name for c in invented}) == len(invented) == 2500
    assert all(c.fictional for c in invented)


def test_the_same_arguments_give_the_same_countries():
    first = fictional_countries(20, 3, TRAIN, DEV + TEST)
    assert first == fictional_countries(20, 3, TRAIN, DEV + TEST)
    assert first != fictional_countries(20, 4, TRAIN, DEV + TEST)


def test_none_are_asked_for():
    assert fictional_countries(0, 0, TRAIN, DEV + TEST) == []


def test_borders_are_mutual(invented):
    by_name = {c.name: c for c in invented}
    assert any(c.neighbours for c in invented)
    for c in invented:
        assert all(c.name in by_name[n].neighbours for n in c.neighbours)


def test_no_answer_vanishes_in_the_scoring(invented):
    """A domain ".an" is normalised to the empty string, which every empty answer would match."""
    for c in invented:
        for question in questions(c, "2018"):
            assert all(map(normalize_answer, question.answers)), question


def test_some_offices_change_hands_and_some_do_not(invented):
    changed = [o.changed for c in invented for o in c.offices]
    assert 0.2 < sum(changed) / len(changed) < 0.6
