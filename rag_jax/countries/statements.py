"""Three further tasks made from the questions and facts on countries, over the same passages.

Sentences: a question is answered by a whole sentence (the form of MS-MARCO's NLG task).
Clues: a sentence about a named thing that does not name it (the form of Jeopardy questions).
Claims: a statement is supported or refuted by the passages, or they do not say (FEVER's form).
"""

import random
from collections.abc import Iterator, Sequence

from rag_jax.countries.facts import Country
from rag_jax.countries.prose import CountryQuestion, passage_id, questions, topics

LABELS = ("SUPPORTS", "REFUTES", "NOT ENOUGH INFO")
STATEMENTS = {
    "capital": ["The capital of {c} is {v}.", "{v} is the capital of {c}."],
    "region": ["The region of {c} is {v}.", "{v} is the region of {c}."],
    "largest_city": ["The largest city of {c} is {v}.", "{v} is the largest city of {c}."],
    "currency": ["The currency of {c} is the {v}.", "The {v} is the currency of {c}."],
    "calling_code": ["The calling code of {c} is {v}.", "Calls to {c} start with {v}."],
    "internet_tld": ["The internet domain of {c} is {v}.", "Web addresses of {c} end in {v}."],
    "drives_on": ["Cars in {c} drive on the {v}.", "{C} drives on the {v}."],
    "language": ["An official language of {c} is {v}.", "{v} is an official language of {c}."],
    "official_name": ["The formal name of {c} is {v}.", "{C} is officially called {v}."],
    "un_member_since": ["{C} joined the United Nations in {v}.",
                        "In {v} the United Nations admitted {c}."],
    "highest_point": ["The highest point of {c} is {v}.", "{v} is the highest point of {c}."],
    "highest_point_m": ["The highest point of {c} is {v} metres high.", "{C} rises to {v} metres."],
    "neighbour": ["{C} borders {v}.", "{v} borders {c}."],
    "office": ["The {title} of {c} is {v}.", "{v} is the {title} of {c}."],
}
# Claims are about what nothing in a country's name tells (no "Peruvian sol", no ".pe") and about
# names, not numbers: which digits two numbers share takes a tiny model much longer to learn.
CLAIMED = ("capital", "region", "largest_city", "highest_point", "office")
STEM = 4  # letters at the beginning of a word that give a name away: "Guatemala City"
CLUES = {
    "country": [
        "This country has the capital {capital} and the largest city {largest_city}.",
        "The capital of this country is {capital} and its highest point is {highest_point}.",
        "This country lies in {region} and its calling code is {calling_code}.",
        "The currency of this country is the {currency} and its capital is {capital}.",
    ],
    "capital": ["This city is the capital of {c}.", "The capital of {c} has this name."],
    "highest_point": ["This place is the highest point of {c}.",
                      "No place in {c} is higher than this one."],
    "office": ["This person is the {title} of {c}.", "The {title} of {c} has this name."],
}
_TOPIC = {"country": "capital", "capital": "capital", "highest_point": "land"}


def _names(country: Country) -> dict[str, str]:
    name = country.prose_name
    return {"c": name, "C": name[0].upper() + name[1:]}


def _title(question: CountryQuestion) -> str:
    """The office that a question of the relation "office" is about; empty for the others."""
    return question.id.split("/")[2].partition(":")[2]


def _stated(question: CountryQuestion, country: Country, value: str) -> list[str]:
    """Every way of saying that `value` is what the question asks for."""
    made = (form.format(**_names(country), v=value, title=_title(question))
            for form in STATEMENTS[question.relation])
    return [text[0].upper() + text[1:] for text in made]


def sentence(question: CountryQuestion, country: Country, seed: int) -> CountryQuestion:
    """The question with whole sentences as its answers; which comes first is drawn by seed."""
    first, *others = (_stated(question, country, value) for value in question.answers)
    random.Random(f"{seed} sentence {question.id}").shuffle(first)
    return question._replace(answers=(*first, *(text for texts in others for text in texts)))


def clues(country: Country, edition: str, seed: int) -> Iterator[CountryQuestion]:
    """The country, its capital, its highest point and its leaders, each with sentences about it.

    What has the name of another of them is left out, and sentences that name the thing.
    """
    things = [("country", country.name, "", country.name)]
    things += [(kind, getattr(country, kind), "", kind) for kind in ("capital", "highest_point")]
    things += [("office", office.holder(edition), office.title, f"office:{office.title}")
               for office in country.offices]
    seen = set()
    for kind, name, title, key in things:
        if name in seen:
            continue
        seen.add(name)
        forms = [text for form in CLUES[kind]
                 if name not in (text := form.format(**vars(country), **_names(country),
                                                     title=title))]
        if not forms:
            continue
        random.Random(f"{seed} clue {edition} {country.name} {key}").shuffle(forms)
        topic = title or _TOPIC[kind]
        yield CountryQuestion(
            id=f"{edition}/{country.name}/{key if kind == 'office' else kind}/clue",
            country=country.name, relation=kind, question=name, answers=tuple(forms),
            positive_id=passage_id(country, topic, edition),
            negative_ids=tuple(passage_id(country, other, edition)
                               for other in topics(country) if other != topic))


def _gives_away(country: Country, value: str) -> bool:
    """Whether a word of the value begins as a word of the country's name does."""
    def stems(text: str) -> set[str]:
        return {word[:STEM] for word in text.lower().replace("-", " ").split() if len(word) >= STEM}

    return bool(stems(country.name) & stems(value))


def claims(countries: Sequence[Country], unwritten: Sequence[Country], edition: str, seed: int
           ) -> Iterator[CountryQuestion]:
    """Claims in threes: one value of three countries, all claims in the first of the forms.

    The value is that of the first country (SUPPORTS) and not that of the second (REFUTES); the
    third is in no passage (NOT ENOUGH INFO). So the labels are balanced, the values are the same
    under each of them, and every country that the passages know is as often in a right claim as
    in a wrong one: nothing but the passages tells them apart. One form, because two names in
    either order are hard to tell apart for a retriever of one layer.

    Args:
      countries: that the passages know.
      unwritten: countries of the same kind that no passage names.
      edition: the year of the facts.
      seed: decides which countries are paired.
    """
    rng = random.Random(f"{seed} claims {edition}")
    asked: dict[str, list[tuple[Country, CountryQuestion]]] = {}
    for country in countries:
        for question in questions(country, edition):
            if question.relation in CLAIMED and question.id.endswith("/0"):
                asked.setdefault(f"{question.relation} {_title(question)}", []).append(
                    (country, question))
    for group in asked.values():
        rng.shuffle(group)
        absent = rng.choices(unwritten, k=len(group))
        for (true, question), (false, other), stranger in zip(
                group, group[1:] + group[:1], absent, strict=True):
            value = question.answers[0]
            three = (true, false, stranger)
            if value in other.answers or any(_gives_away(c, value) for c in three):
                continue
            for label, country in zip(LABELS, three, strict=True):
                about = {"SUPPORTS": question, "REFUTES": other}.get(label)
                tempting = (question.positive_id,) * (label == "REFUTES")  # it has the value
                yield CountryQuestion(
                    id=f"{question.id.rpartition('/')[0]}/{label}", country=country.name,
                    relation=question.relation,
                    question=_stated(question, country, value)[0], answers=(label,),
                    positive_id=about.positive_id if about else "",
                    negative_ids=tempting + about.negative_ids if about else ())
