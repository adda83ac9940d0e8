"""Passages and questions: what is asked must literally stand in the passage that is named."""

from collections import Counter, defaultdict

import pytest

from rag_jax.countries.facts import EDITIONS, load_countries
from rag_jax.countries.fiction import fictional_countries
from rag_jax.countries.prose import passage_id, passages, questions, relation_of, topics
from rag_jax.metrics.answers import normalize_answer

REAL = load_countries()
# Relations with several spellings of one answer; a passage states the first of them alone.
SPELLINGS = {"capital", "currency", "highest_point_m"}


@pytest.fixture(scope="module")
def countries():
    return [*REAL, *fictional_countries(300, 1, REAL[:120], REAL[120:])]


def stated(answer, text):
    """Whether the words of `answer` stand in `text` one after the other, as scoring sees them."""
    bare = normalize_answer(answer)
    return bare != "" and f" {bare} " in f" {normalize_answer(text)} "


def asked(countries):
    for country in countries:
        for edition in EDITIONS:
            texts = {p.id: p.text for p in passages(country, edition)}
            for question in questions(country, edition):
                yield question, texts


def test_the_first_answer_is_literally_in_the_positive_passage(countries):
    """An answer that the passage does not hold cannot be read, and training on it teaches lies."""
    missing = [(q.id, q.answers, texts[q.positive_ids[0]]) for q, texts in asked(countries)
               if not stated(q.answers[0], texts[q.positive_ids[0]])]
    assert missing == []


def test_all_answers_are_in_the_passage_where_they_are_different_things(countries):
    """A neighbour or language left out of the passage could be trained on but never read."""
    missing = [(q.id, a, texts[q.positive_ids[0]]) for q, texts in asked(countries)
               if relation_of(q)[0] not in SPELLINGS
               for a in q.answers if not stated(a, texts[q.positive_ids[0]])]
    assert missing == []


def test_the_passage_names_the_country_and_the_office_that_are_asked_about(countries):
    for question, texts in asked(countries):
        text = texts[question.positive_ids[0]]
        assert question.titles[0] in text
        if relation_of(question)[0] == "office":
            assert question.id.split("/")[2].removeprefix("office:") in text


def test_passages_are_short_titled_and_numbered(countries):
    for country in countries:
        for edition in EDITIONS:
            made = passages(country, edition)
            ids = [passage_id(country, topic, edition) for topic in topics(country)]
            assert [p.id for p in made] == ids
            for p in made:
                assert p.title == country.name
                assert len(p.text.split()) + len(p.title.split()) <= 100
                assert "{" not in p.text and "None" not in p.text and "  " not in p.text
                assert p.text[0] == p.text[0].upper() and p.text.endswith((".", "+"))


def test_passages_vary_in_phrasing():
    """One template a topic would be learnt by position instead of being read."""
    forms = defaultdict(Counter)
    for country in REAL:
        for topic, p in zip(topics(country), passages(country, "2018"), strict=True):
            text = p.text
            known = [country.prose_name, country.capital, country.largest_city, country.region,
                     country.currency, country.official_name, country.highest_point,
                     *country.languages, *(o.title for o in country.offices),
                     *(o.holder("2018") for o in country.offices)]
            for value in sorted(known, key=len, reverse=True):
                text = text.replace(value, "_").replace(value[0].upper() + value[1:], "_")
            topic = topic if topic.islower() else "an office"
            forms[topic][" ".join(text.split()[:4])] += 1
    for topic, found in forms.items():
        assert len(found) >= 4, (topic, found)
        assert found.most_common(1)[0][1] < 0.6 * found.total(), (topic, found)


def test_only_the_offices_differ_in_facts_between_the_editions():
    """What an edition changes is the holders; each edition names its own and not the other's."""
    for country in REAL:
        text = {e: " ".join(p.text for p in passages(country, e)[-len(country.offices):])
                for e in EDITIONS}
        for office in country.offices:
            for edition in EDITIONS:
                assert office.holder(edition) in text[edition]
        everyone = {name for o in country.offices for _, name in o.holders}
        now = {o.holder("2018") for o in country.offices}
        gone = [name for name in everyone - now if not any(name in other for other in now)]
        assert not any(name in text["2018"] for name in gone), text["2018"]


def test_the_phrasing_is_a_pure_function_of_country_topic_and_edition():
    assert passages(REAL[7], "2016") == passages(REAL[7], "2016")


def test_question_ids_are_unique_and_negatives_are_the_other_passages(countries):
    ids = Counter(q.id for q, _ in asked(countries))
    assert max(ids.values()) == 1
    for question, texts in asked(countries[:20]):
        assert {*question.positive_ids, *question.negative_ids} == set(texts)
        assert question.positive_ids[0] not in question.negative_ids


def test_every_office_is_asked_about_and_answered_by_its_holder():
    for country in REAL:
        for edition in EDITIONS:
            answers = {q.id.split("/")[2].removeprefix("office:"): q.answers
                       for q in questions(country, edition) if relation_of(q)[0] == "office"}
            assert answers == {o.title: (o.holder(edition),) for o in country.offices}


def test_what_a_country_lacks_is_not_asked():
    relations = {c.name: {relation_of(q)[0] for q in questions(c, "2018")} for c in REAL}
    assert "neighbour" not in relations["Iceland"] and "neighbour" in relations["France"]
    assert "un_member_since" not in relations["Vatican City"]
