"""Countries as prose: short passages in varied phrasing, and question-answer pairs on them.

One passage covers one topic of one country; which of the phrasings in `phrasings.toml` it uses is a
pure function of the country, the topic and the edition.
"""

import random
from collections.abc import Iterable, Iterator

from rag_jax.countries.facts import PHRASINGS, Country
from rag_jax.data.question_files import Example
from rag_jax.retrieval.protocol import Passage

RELATIONS = PHRASINGS["relations"]


def _joined(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def sentence_case(text: str) -> str:
    """The text with a capital letter first."""
    return text[0].upper() + text[1:]


def values(country: Country) -> dict[str, str]:
    """What the names in braces stand for in a sentence about the country."""
    several = len(country.languages) > 1
    language = "official languages" if several else "official language"
    return {
        **{key: str(value) for key, value in vars(country).items()},
        "c": country.prose_name,
        "C": sentence_case(country.prose_name),
        "languages": _joined(country.languages),
        "neighbours": _joined(country.neighbours) if country.neighbours else "",
        "is_are": "are" if several else "is",
        "official_language": language,
        "the_official": f"the {language}",
        "its_official": f"its {language}",
        "formal_name": (country.prose_name if country.official_name == country.name
                        else f"the {country.official_name}"),
    }


def topics(country: Country) -> tuple[str, ...]:
    """What the country's passages are about: one passage each, and one for every office."""
    return (*PHRASINGS["sentences"], *(office.title for office in country.offices))


def passage_id(country: Country, topic: str, edition: str) -> str:
    """EDITION/NAME/TOPIC. The id, unlike the text, marks a fictional country, for readers of an
    answer's sources."""
    return f"{edition}/{country.name}{' (fictional)' * country.fictional}/{topic}"


def _text(country: Country, topic: str, edition: str) -> str:
    rng = random.Random(f"{edition}/{country.name}/{topic}")
    for office in country.offices:
        if topic == office.title:
            forms = PHRASINGS["office"]
            parts = (forms["holder"], forms["roles"][" ".join(office.roles)], forms["edition"])
            named = {"title": office.title, "holder": office.holder(edition), "edition": edition}
            text = "".join(rng.choice(part) for part in parts)
            return sentence_case(text.format(**values(country), **named))
    choices = list(PHRASINGS["sentences"][topic])
    if (topic == "borders" and not country.neighbours
            or topic == "state" and country.un_member_since is None):
        choices[-1] = PHRASINGS["without"][topic]
    return " ".join(sentence_case(rng.choice(c).format(**values(country))) for c in choices)


def passages(country: Country, edition: str) -> list[Passage]:
    """The country's passages, one a topic, at most 100 words each."""
    return [Passage(passage_id(country, topic, edition), country.name,
                    _text(country, topic, edition)) for topic in topics(country)]


def examples(country: Country, topic: str, edition: str, asked: Iterable[tuple[str, str]],
             answers: tuple[str, ...]) -> Iterator[Example]:
    """Questions that one passage of the country answers; its other passages are hard negatives.

    Args:
      country: its name is the only title.
      topic, edition: of the passage.
      asked: (end of the id, after EDITION/NAME/; question).
      answers: to all of them, every right one.
    """
    negatives = tuple(passage_id(country, other, edition)
                      for other in topics(country) if other != topic)
    for key, question in asked:
        yield Example(f"{edition}/{country.name}/{key}", question, answers,
                      (passage_id(country, topic, edition),), negatives, titles=(country.name,))


def relation_of(question: Example) -> tuple[str, str]:
    """The relation that a question is about, and, of "office", which office; else ""."""
    relation, _, office = question.id.split("/")[2].partition(":")
    return relation, office


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
    return special[relation] if relation in special else (str(getattr(country, relation)),)


def questions(country: Country, edition: str) -> Iterator[Example]:
    """Every question on the country, in every phrasing, answered as of `edition`.

    Ids are EDITION/NAME/RELATION/NUMBER, with RELATION:TITLE of an office.
    """
    for relation, forms in RELATIONS.items():
        if relation == "office":
            things = [(f"office:{office.title}", office.title, (office.holder(edition),))
                      for office in country.offices]
        else:
            things = [(relation, forms["topic"], _answers(country, relation))]
        for key, topic, answers in things:
            texts = [form.format(c=country.prose_name, title=topic) for form in forms["questions"]]
            asked = ((f"{key}/{number}", text) for number, text in enumerate(texts))
            if answers:
                yield from examples(country, topic, edition, asked, answers)
