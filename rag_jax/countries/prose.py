"""Countries as prose: short passages in varied phrasing, and question-answer pairs on them.

One passage covers one topic of one country; which phrasings it uses is a pure function of the
country, the topic and the edition. `{c}` is the country as prose names it, `{C}` capitalised.
"""

import random
from collections.abc import Iterator
from typing import NamedTuple

from rag_jax.countries.facts import Country

OPENINGS = {
    "capital": [
        "{C} is a country in {region} whose capital is {capital}.",
        "The capital of {c}, a state in {region}, is {capital}.",
        "{capital} is the capital of {c}, which lies in {region}.",
        "{C} lies in {region}. Its seat of government is the capital, {capital}.",
        "In {region} lies {c}, governed from its capital {capital}.",
    ],
    "money": [
        "The currency of {c} is the {currency}.",
        "{C} uses the {currency} as its currency.",
        "People in {c} pay with the {currency}.",
        "The {currency} is the legal tender of {c}.",
        "Prices in {c} are quoted in the {currency}.",
    ],
    "people": [
        "{C}, officially the {official_name}, has {languages} as {its_official}.",
        "{languages} {is_are} {the_official} of {c}, whose formal name is the {official_name}.",
        "The formal name of {c} is the {official_name}. Its {official_language} {is_are} "
        "{languages}.",
        "{demonym} law names {languages} as {the_official} of {c}, the {official_name}.",
    ],
    "land": [
        "The highest point of {c} is {highest_point}, at {highest_point_m} metres.",
        "{highest_point}, {highest_point_m} metres high, is the highest point of {c}.",
        "{C} rises to {highest_point_m} metres at {highest_point}, its highest point.",
        "At {highest_point_m} metres, {highest_point} is the summit that no other place in {c} "
        "tops.",
    ],
}
MORE = {
    "capital": [
        "Its largest city is {largest_city}.",
        "The largest city is {largest_city}.",
        "Most city dwellers live in {largest_city}, the largest city.",
        "No city there is larger than {largest_city}.",
    ],
    "money": [
        "Telephone calls to the country start with {calling_code}, and its internet domain is "
        "{internet_tld}. Traffic drives on the {drives_on}.",
        "Its internet domain is {internet_tld}, its calling code {calling_code}. Cars keep to "
        "the {drives_on}.",
        "Cars drive on the {drives_on}. The calling code is {calling_code} and web addresses end "
        "in {internet_tld}.",
    ],
    "people": [
        "It joined the United Nations in {un_member_since}.",
        "It has been a member of the United Nations since {un_member_since}.",
        "In {un_member_since} it was admitted to the United Nations.",
    ],
    "land": [
        "It shares land borders with {neighbours}.",
        "By land it borders {neighbours}.",
        "It borders {neighbours}.",
    ],
}
NO_NEIGHBOURS = ["It has no land borders.", "No other state borders it by land."]
OBSERVER = ["It is an observer at the United Nations.", "At the United Nations it is an observer."]
OFFICES = [
    "The {title} of {c} is {holder}.",
    "{holder} is the {title} of {c}.",
    "{holder} serves as {title} of {c}.",
    "In {c}, the office of {title} is held by {holder}.",
    "{C} has {holder} as its {title}.",
]
ROLES = {
    ("state",): ["", " It is the office of the head of state.", " The {title} is head of state."],
    ("government",): ["", " The {title} leads the government.", " The {title} heads the cabinet."],
    ("state", "government"): [
        "", " The {title} is head of state and of government.", " Both state and government have "
        "the {title} as their head."],
}
EDITION_NOTES = ["", " This was so at the end of {edition}.", " As of December {edition}."]

FIXED_TOPICS = ("capital", "money", "people", "land")  # and a topic for each office, its title

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
    "capital": "capital", "largest_city": "capital", "region": "capital",
    "currency": "money", "calling_code": "money", "internet_tld": "money", "drives_on": "money",
    "language": "people", "official_name": "people", "un_member_since": "people",
    "highest_point": "land", "highest_point_m": "land", "neighbour": "land",
}


class CountryPassage(NamedTuple):
    """A passage of one country; its id is "EDITION/NAME/TOPIC"."""

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
        "official_language": "official languages" if several else "official language",
    }


def topics(country: Country) -> tuple[str, ...]:
    """What the country's passages are about: one passage each."""
    return (*FIXED_TOPICS, *(office.title for office in country.offices))


def passage_id(country: Country, topic: str, edition: str) -> str:
    return f"{edition}/{country.name}/{topic}"


def _text(country: Country, topic: str, edition: str) -> str:
    rng = random.Random(passage_id(country, topic, edition))
    values = _values(country)
    for office in country.offices:
        if topic == office.title:
            named = {"title": office.title, "holder": office.holder(edition), "edition": edition}
            parts = (OFFICES, ROLES[office.roles], EDITION_NOTES)
            return _sentence("".join(rng.choice(p) for p in parts).format(**values, **named))
    more = rng.choice(MORE[topic])
    if topic == "land" and not country.neighbours:
        more = rng.choice(NO_NEIGHBOURS)
    if topic == "people" and country.un_member_since is None:
        more = rng.choice(OBSERVER)
    return _joined_sentences([rng.choice(OPENINGS[topic]).format(**values), more.format(**values)])


def _joined_sentences(sentences: list[str]) -> str:
    return " ".join(_sentence(sentence) for sentence in sentences)


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
        for number, phrasing in enumerate(phrasings):
            yield CountryQuestion(
                id=f"{edition}/{country.name}/{relation}{suffix}/{number}",
                country=country.name,
                relation=relation,
                question=phrasing,
                answers=answers,
                positive_id=passage_id(country, topic, edition),
                negative_ids=tuple(passage_id(country, other, edition)
                                   for other in topics(country) if other != topic),
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
