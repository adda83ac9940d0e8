"""Fictional countries: made by rule, the same for the same seed, never named like a real one."""

import unicodedata

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
               if uncased(c.name) in uncased(real) or uncased(real) in uncased(c.name)]
    assert clashes == []


def uncased(name):
    """What an uncased tokenizer leaves of a name."""
    return "".join(c for c in unicodedata.normalize("NFD", name)
                   if unicodedata.category(c) != "Mn").lower()


def names_of(c):
    return set(map(uncased, (c.name, c.official_name, c.demonym, c.capital, c.largest_city,
                             c.highest_point, c.currency, *c.languages,
                             *(name for office in c.offices for _, name in office.holders))))


def test_no_name_of_the_real_world_is_given_to_a_fictional_country():
    """Chile's president would be a fictional "Chilé"'s; and dev and test ask for real names."""
    # With the chain fitted to few countries, chance would often hit.
    made = fictional_countries(1500, 0, DEV + TEST, TEST)
    real = set().union(*map(names_of, DEV + TEST))
    assert [n for c in made for n in names_of(c) & real] == []


def test_no_two_fictional_countries_share_a_name_but_of_languages(invented):
    """A question about one would be answered from the passages of the other."""
    owner = {}
    for c in invented:
        for name in names_of(c) - set(map(uncased, c.languages)):
            assert owner.setdefault(name, c.name) == c.name, name
    # Nor is a language named as another country is.
    countries = {uncased(c.name) for c in invented}
    assert not [c for c in invented
                if (set(map(uncased, c.languages)) - {uncased(c.name)}) & countries]


def test_names_are_different_and_as_many_as_asked(invented):
    assert len({c.name for c in invented}) == len(invented) == 2500
    assert all(c.fictional for c in invented)


def test_the_same_arguments_give_the_same_countries():
    first = fictional_countries(20, 3, TRAIN, DEV + TEST)
    assert first == fictional_countries(20, 3, TRAIN, DEV + TEST)
    other = fictional_countries(20, 4, TRAIN, DEV + TEST)
    assert len({c.name for c in first} & {c.name for c in other}) < 3


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
