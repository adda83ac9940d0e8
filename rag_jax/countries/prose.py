"""Countries as prose: short passages in varied phrasing, and question-answer pairs on them.

One passage covers one topic of one country; which phrasings it uses is a pure function of the
country, the topic and the edition. `{c}` is the country as prose names it, `{C}` capitalised.
"""

import random
from collections.abc import Iterator
from typing import NamedTuple

from rag_jax.countries.facts import Country

SENTENCES = {
    "capital": [[
        "{C} is a country in {region} whose capital is {capital}.",
        "The capital of {c}, a state in {region}, is {capital}.",
        "{capital} is the capital of {c}, which lies in {region}.",
        "{C} lies in {region}. Its seat of government is the capital, {capital}.",
        "In {region} lies {c}, governed from its capital {capital}.",
    ]],
    "city": [[
        "The largest city of {c} is {largest_city}.",
        "{largest_city} is the largest city of {c}.",
        "Most city dwellers of {c} live in {largest_city}, the largest city.",
        "No city in {c} is larger than {largest_city}.",
    ], [
        "Traffic there drives on the {drives_on}.",
        "Cars keep to the {drives_on}.",
        "Cars drive on the {drives_on}.",
        "On its roads one drives on the {drives_on}.",
    ]],
    "money": [[
        "The currency of {c} is the {currency}.",
        "{C} uses the {currency} as its currency.",
        "People in {c} pay with the {currency}.",
        "The {currency} is the legal tender of {c}.",
        "Prices in {c} are quoted in the {currency}.",
    ]],
    "network": [[
        "Telephone calls to {c} start with {calling_code}, and its internet domain is "
        "{internet_tld}.",
        "The internet domain of {c} is {internet_tld}, its calling code {calling_code}.",
        "The calling code of {c} is {calling_code} and web addresses end in {internet_tld}.",
        "Web addresses of {c} end in {internet_tld}; its calling code is {calling_code}.",
    ]],
    "people": [[
        "{C} has {languages} as {its_official}.",
        "{languages} {is_are} {the_official} of {c}.",
        "The {official_language} of {c} {is_are} {languages}.",
        "{demonym} law names {languages} as {the_official} of {c}.",
    ]],
    "state": [[
        "{C} is officially called {formal_name}.",
        "The formal name of {c} is {formal_name}.",
        "Treaties call {c} by its formal name, {formal_name}.",
        "In full, {c} is {formal_name}.",
    ], [
        "It joined the United Nations in {un_member_since}.",
        "It has been a member of the United Nations since {un_member_since}.",
        "In {un_member_since} it was admitted to the United Nations.",
    ]],
    "land": [[
        "The highest point of {c} is {highest_point}, at {highest_point_m} metres.",
        "{highest_point}, {highest_point_m} metres high, is the highest point of {c}.",
        "{C} rises to {highest_point_m} metres at {highest_point}, its highest point.",
        "At {highest_point_m} metres, {highest_point} is the summit that no other place in {c} "
        "tops.",
    ]],
    "borders": [[
        "{C} shares land borders with {neighbours}.",
        "By land {c} borders {neighbours}.",
        "The neighbours of {c} are {neighbours}.",
        "On the land borders of {c} lie {neighbours}.",
    ]],
}
NO_NEIGHBOURS = ["{C} has no land borders.", "No other state borders {c} by land.",
                 "On all sides {c} is surrounded by the sea."]
OBSERVER = ["It is an observer at the United Nations.", "At the United Nations it is an observer."]
OFFICES = [
    "The {title} of {c} is {holder}.",
    "{holder} is the {title} of {c}.",
    "{holder} serves as {title} of {c}.",
    "In {c}, the office of {title} is held by {holder}.",
    "{C} has {holder} as its {title}.",
]
ROLES = {
    ("state",): ["", " The {title} is head of state.", " The {title} heads the state."],
    ("government",): ["", " The {title} leads the government.", " The {title} heads the cabinet."],
    ("state", "government"): ["", " The {title} heads state and government.",
                              " The {title} leads both state and government."],
}
EDITION_NOTES = ["", " As of December {edition}.", " So it was at the end of {edition}."]

QUESTIONS = {
    "capital": ["What is the capital of {c}?", "Which city is the capital of {c}?",
                "Name the capital of {c}.", "From which capital is {c} governed?"],
    "largest_city": ["What is the largest city of {c}?", "Which city is the largest in {c}?",
                     "What is the biggest city in {c}?"],
    "region": ["In which region is {c}?", "In which part of the world is {c}?",
               "Where is {c}?"],
    "currency": ["What is the currency of {c}?", "Which currency is used in {c}?",
                 "What do people pay with in {c}?"],
    "calling_code": ["What is the calling code of {c}?",
                     "With which code do telephone calls to {c} start?"],
    "internet_tld": ["What is the internet domain of {c}?",
                     "In what do web addresses of {c} end?"],
    "drives_on": ["On which side do cars drive in {c}?",
                  "Which side of the road does {c} drive on?"],
    "language": ["What is an official language of {c}?", "Which language is official in {c}?",
                 "Name an official language of {c}."],
    "official_name": ["What is the formal name of {c}?", "What is {c} officially called?"],
    "un_member_since": ["When did {c} join the United Nations?",
                        "Since when has {c} been a member of the United Nations?"],
    "highest_point": ["What is the highest point of {c}?", "What is the highest point in {c}?",
                      "Which summit is the highest of {c}?"],
    "highest_point_m": ["How high is the highest point of {c}?",
                        "How many metres does {c} rise to?"],
    "neighbour": ["Which country borders {c}?", "Name a neighbour of {c}.",
                  "With which country does {c} share a border?"],
    "office": ["Who is the {title} of {c}?", "Who holds the office of {title} of {c}?",
               "Who serves as {title} of {c}?"],
}
TOPIC_OF = {
    "capital": "capital", "region": "capital",
    "largest_city": "city", "drives_on": "city",
    "currency": "money",
    "calling_code": "network", "internet_tld": "network",
    "language": "people",
    "official_name": "state", "un_member_since": "state",
    "highest_point": "land", "highest_point_m": "land",
    "neighbour": "borders",
}


class CountryPassage(NamedTuple):
    """A passage of one country; its id is "EDITION/NAME/TOPIC", of fiction with a mark."""

    id: str
    title: str
    text: str


class CountryQuestion(NamedTuple):
    """A question about one country with all right answers in one edition."""

    id: str
    country: str
    relation: str
    question: str
    answers: tuple[str, ...]
    positive_id: str  # the passage that states the answer
    negative_ids: tuple[str, ...]  # the country's other passages


def _joined(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def _values(country: Country) -> dict[str, str]:
    several = len(country.languages) > 1
    return {
        **{key: str(value) for key, value in vars(country).items()},
        "c": country.prose_name,
        "C": _sentence(country.prose_name),
        "languages": _joined(country.languages),
        "neighbours": _joined(country.neighbours) if country.neighbours else "",
        "is_are": "are" if several else "is",
        "the_official": "the official languages" if several else "the official language",
        "its_official": "its official languages" if several else "its official language",
        "formal_name": (country.prose_name if country.official_name == country.name
                        else f"the {country.official_name}"),
        "official_language": "official languages" if several else "official language",
    }


def topics(country: Country) -> tuple[str, ...]:
    """What the country's passages are about: one passage each, and one for every office."""
    return (*SENTENCES, *(office.title for office in country.offices))


def passage_id(country: Country, topic: str, edition: str) -> str:
    """Who reads an answer's sources sees in them what is invented; the texts do not say it."""
    return f"{edition}/{country.name}{' (fictional)' * country.fictional}/{topic}"


def _text(country: Country, topic: str, edition: str) -> str:
    rng = random.Random(f"{edition}/{country.name}/{topic}")
    values = _values(country)
    for office in country.offices:
        if topic == office.title:
            named = {"title": office.title, "holder": office.holder(edition), "edition": edition}
            parts = (OFFICES, ROLES[office.roles], EDITION_NOTES)
            return _sentence("".join(rng.choice(p) for p in parts).format(**values, **named))
    choices = list(SENTENCES[topic])
    if topic == "borders" and not country.neighbours:
        choices = [NO_NEIGHBOURS]
    if topic == "state" and country.un_member_since is None:
        choices[-1] = OBSERVER
    return " ".join(_sentence(rng.choice(c).format(**values)) for c in choices)


def passages(country: Country, edition: str) -> list[CountryPassage]:
    """The country's passages, one a topic, at most 100 words each."""
    return [
        CountryPassage(passage_id(country, topic, edition), country.name,
                       _text(country, topic, edition))
        for topic in topics(country)
    ]


def _answers(country: Country, relation: str) -> tuple[str, ...]:
    special = {
        "capital": (country.capital, *country.capital_also),
        "currency": (country.currency, *country.currency_also),
        "language": country.languages,
        "neighbour": country.neighbours,
        "region": (country.region.removeprefix("the "),),
        "highest_point_m": (str(country.highest_point_m), f"{country.highest_point_m} metres"),
        "un_member_since": (str(country.un_member_since),) if country.un_member_since else (),
    }
    return special.get(relation) or (
        () if relation in special else (str(getattr(country, relation)),))


def questions(country: Country, edition: str) -> Iterator[CountryQuestion]:
    """Every question on the country, in every phrasing, answered as of `edition`."""
    def build(relation: str, phrasings: list[str], answers: tuple[str, ...], topic: str,
              suffix: str = "") -> Iterator[CountryQuestion]:
        negative_ids = tuple(passage_id(country, other, edition)
                             for other in topics(country) if other != topic)
        for number, phrasing in enumerate(phrasings):
            yield CountryQuestion(
                id=f"{edition}/{country.name}/{relation}{suffix}/{number}",
                country=country.name,
                relation=relation,
                question=phrasing,
                answers=answers,
                positive_id=passage_id(country, topic, edition),
                negative_ids=negative_ids,
            )

    for relation, phrasings in QUESTIONS.items():
        if relation == "office":
            for office in country.offices:
                texts = [p.format(c=country.prose_name, title=office.title) for p in phrasings]
                yield from build(relation, texts, (office.holder(edition),), office.title,
                                 f":{office.title}")
        elif answers := _answers(country, relation):
            texts = [p.format(c=country.prose_name) for p in phrasings]
            yield from build(relation, texts, answers, TOPIC_OF[relation])
