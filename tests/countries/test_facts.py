"""The facts that are shipped: complete, consistent, and a check that finds what is planted."""

import dataclasses
import importlib.resources
import unicodedata
from collections import Counter
from collections.abc import Sequence

import pytest

from rag_jax.countries.facts import EDITIONS, Country, Office, load_countries


def inconsistencies(countries: Sequence[Country]) -> list[str]:
    """What contradicts itself between entries; an empty list for facts fit to print."""
    found = []
    by_name = {country.name: country for country in countries}
    if len(by_name) != len(countries):
        found.append("two countries have the same name")
    for c in countries:
        for neighbour in c.neighbours:
            if neighbour not in by_name:
                found.append(f"{c.name}: unknown neighbour {neighbour}")
            elif c.name not in by_name[neighbour].neighbours:
                found.append(f"{c.name} borders {neighbour}, which does not border it")
        if c.drives_on not in ("left", "right"):
            found.append(f"{c.name}: drives on {c.drives_on!r}")
        if not (c.calling_code.startswith("+") and c.internet_tld.startswith(".")):
            found.append(f"{c.name}: calling code {c.calling_code!r}, domain {c.internet_tld!r}")
        if not 0 < c.highest_point_m < 8900:
            found.append(f"{c.name}: highest point {c.highest_point_m} m")
        if c.un_member_since is not None and not 1945 <= c.un_member_since <= 2018:
            found.append(f"{c.name}: UN member since {c.un_member_since}")
        if not (c.languages and c.offices):
            found.append(f"{c.name}: no language or no office")
        if any(not name for office in c.offices for _, name in office.holders):
            found.append(f"{c.name}: an office without holder")
        titles = [office.title for office in c.offices]
        if len(set(titles)) != len(titles):
            found.append(f"{c.name}: an office twice")
    for field in ("capital", "internet_tld", "official_name"):
        for value, count in Counter(getattr(c, field) for c in countries).items():
            if count > 1:
                found.append(f"{field} {value!r} belongs to {count} countries")
    return found


def without_accents(text):
    return unicodedata.normalize("NFD", text).encode("ascii", "ignore")


def office(title="President", holders=("Ada", "Bo")):
    return Office(title, ("state",), tuple(zip(EDITIONS, holders, strict=True)))


def country(name, neighbours, number, **changes):
    values = dict(
        name=name, article=False, official_name=f"Republic of {name}", demonym=f"{name}n",
        region="South Asia", capital=f"{name} City", capital_also=(), largest_city=f"{name} City",
        currency="crown", currency_also=(), languages=("Aish",), neighbours=neighbours,
        highest_point="Peak", highest_point_m=100, calling_code="+1", internet_tld=f".{number}",
        drives_on="left", un_member_since=1990, offices=(office(),))
    return Country(**{**values, **changes})


def two(**changes):
    """Two consistent neighbours, the first with some fields replaced."""
    first = country("Aland", ("Bland",), 1)
    return [dataclasses.replace(first, **changes), country("Bland", ("Aland",), 2)]


def test_the_shipped_facts_are_consistent():
    assert inconsistencies(load_countries()) == []


def test_every_member_and_observer_is_there_once_in_order():
    names = [c.name for c in load_countries()]
    assert len(names) == len(set(names)) == 195
    assert names == sorted(names, key=without_accents)
    observers = {c.name for c in load_countries() if c.un_member_since is None}
    assert observers == {"Palestine", "Vatican City"}


def test_each_role_is_held_or_a_note_says_why_not():
    """A head of state that was forgotten would silently go unasked."""
    for c in load_countries():
        roles = {role for o in c.offices for role in o.roles}
        assert roles == {"state", "government"} or c.office_note, c.name
        assert roles <= {"state", "government"}, c.name


def test_enough_offices_changed_hands_for_a_hot_swap_test():
    changed = [o for c in load_countries() for o in c.offices if o.changed]
    assert len(changed) >= 80
    assert all(o.holder("2016") != o.holder("2018") for o in changed)


def test_an_unchanged_office_is_not_called_changed():
    assert not office(holders=("Ada", "Ada")).changed
    assert office().changed


def test_holders_known_from_the_papers_years():
    """An edition read from the wrong column would swap these."""
    by_name = {c.name: c for c in load_countries()}
    titles = {o.title: o for o in by_name["United States"].offices}
    assert titles["President"].holder("2016") == "Barack Obama"
    assert titles["President"].holder("2018") == "Donald Trump"
    assert by_name["Peru"].capital == "Lima" and "Bolivia" in by_name["Peru"].neighbours


def test_the_planted_world_is_consistent():
    assert inconsistencies(two()) == []


@pytest.mark.parametrize("changes, told", [
    ({"name": "Bland", "neighbours": ()}, "same name"),
    ({"neighbours": ("Bland", "Nowhere")}, "Aland: unknown neighbour Nowhere"),
    ({"neighbours": ()}, "Bland borders Aland, which does not border it"),
    ({"drives_on": "middle"}, "drives on 'middle'"),
    ({"calling_code": "1"}, "calling code '1'"),
    ({"internet_tld": "al"}, "domain 'al'"),
    ({"highest_point_m": 0}, "highest point 0 m"),
    ({"highest_point_m": 8900}, "highest point 8900 m"),
    ({"un_member_since": 1944}, "since 1944"),
    ({"un_member_since": 2019}, "since 2019"),
    ({"languages": ()}, "no language or no office"),
    ({"offices": ()}, "no language or no office"),
    ({"offices": (office(holders=("Ada", "")),)}, "office without holder"),
    ({"offices": (office(), office())}, "an office twice"),
    ({"capital": "Bland City"}, "capital 'Bland City' belongs to 2 countries"),
    ({"internet_tld": ".2"}, "internet_tld '.2' belongs to 2"),
    ({"official_name": "Republic of Bland"}, "official_name 'Republic of Bland' belongs to 2"),
])
def test_a_planted_inconsistency_is_found(changes, told):
    assert any(told in line for line in inconsistencies(two(**changes)))


def test_the_facts_stay_small_enough_to_ship():
    data = importlib.resources.files("rag_jax.countries").joinpath("countries.jsonl").read_bytes()
    assert len(data) < 1_000_000
