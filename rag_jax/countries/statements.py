"""Three further tasks made from the questions and facts on countries, over the same passages.

Sentences: a question is answered by a whole sentence (the form of MS-MARCO's NLG task).
Clues: a sentence about a named thing that does not name it (the form of Jeopardy questions).
Claims: a statement is supported or refuted by the passages, or they do not say (FEVER's form).
"""

import random
from collections.abc import Iterator, Sequence

from rag_jax.countries.facts import PHRASINGS, Country
from rag_jax.countries.prose import (
    RELATIONS,
    examples,
    questions,
    relation_of,
    sentence_case,
    values,
)
from rag_jax.data.question_files import Example
from rag_jax.data.task_files import FEVER_LABELS

# Claims are about what nothing in a country's name tells (no "Peruvian sol", no ".pe") and about
# names, not numbers: which digits two numbers share takes a tiny model much longer to learn.
CLAIMED = ("capital", "region", "largest_city", "highest_point", "office")
STEM = 4  # letters at the beginning of a word that give a name away: "Guatemala City"


def _stated(question: Example, country: Country, value: str) -> list[str]:
    """Every way of saying that `value` is what the question asks for."""
    relation, title = relation_of(question)
    return [sentence_case(form.format(**values(country), v=value, title=title))
            for form in RELATIONS[relation]["statements"]]


def sentence(question: Example, country: Country, seed: int) -> Example:
    """The question with whole sentences as its answers; which comes first is drawn by seed."""
    first, *others = (_stated(question, country, value) for value in question.answers)
    random.Random(f"{seed} sentence {question.id}").shuffle(first)
    return question._replace(answers=(*first, *(text for texts in others for text in texts)))


def clues(country: Country, edition: str, seed: int) -> Iterator[Example]:
    """The country, its capital, its highest point and its leaders, each with sentences about it.

    A thing with the name of an earlier one is left out, and so are sentences that name the thing.
    """
    things = [("country", country.name, "capital"), ("capital", country.capital, "capital"),
              ("highest_point", country.highest_point, "land")]
    things += [(f"office:{office.title}", office.holder(edition), office.title)
               for office in country.offices]
    seen = set()
    for key, name, topic in things:
        if name in seen:
            continue
        seen.add(name)
        kind, _, title = key.partition(":")
        texts = (form.format(**values(country), title=title) for form in PHRASINGS["clues"][kind])
        forms = [text for text in texts if name not in text]
        drawn = country.name if kind == "country" else key
        random.Random(f"{seed} clue {edition} {country.name} {drawn}").shuffle(forms)
        if forms:
            yield from examples(country, topic, edition, [(f"{key}/clue", name)], tuple(forms))


def _gives_away(country: Country, value: str) -> bool:
    """Whether a word of the value begins as a word of the country's name does."""
    def stems(text: str) -> set[str]:
        return {word[:STEM] for word in text.lower().replace("-", " ").split() if len(word) >= STEM}

    return bool(stems(country.name) & stems(value))


def claims(countries: Sequence[Country], unwritten: Sequence[Country], edition: str, seed: int
           ) -> Iterator[Example]:
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
    asked: dict[tuple[str, str], list[tuple[Country, Example]]] = {}
    for country in countries:
        for question in questions(country, edition):
            relation, title = relation_of(question)
            if relation in CLAIMED and question.id.endswith("/0"):
                asked.setdefault((relation, title), []).append((country, question))
    for group in asked.values():
        rng.shuffle(group)
        absent = rng.choices(unwritten, k=len(group))
        for (true, question), (false, other), stranger in zip(
                group, group[1:] + group[:1], absent, strict=True):
            value = question.answers[0]
            three = (true, false, stranger)
            if value in other.answers or any(_gives_away(c, value) for c in three):
                continue
            nowhere = Example("", "", ())
            for label, country, about in zip(FEVER_LABELS, three, (question, other, nowhere),
                                             strict=True):
                tempting = question.positive_ids if label == "REFUTES" else ()  # it has the value
                yield about._replace(
                    id=f"{question.id.rpartition('/')[0]}/{label}",
                    question=_stated(question, country, value)[0], answers=(label,),
                    negative_ids=tempting + about.negative_ids)
