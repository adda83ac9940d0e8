"""Claims, sentences and clues: true to the passages, and not to be guessed without them."""

import math
import re
from collections import Counter, defaultdict

import pytest

from rag_jax.countries.facts import load_countries
from rag_jax.countries.prose import RELATIONS
from rag_jax.countries.statements import CLAIMED
from rag_jax.countries.world import NOW, TASKS, build_world, mentions, split_countries
from rag_jax.data.task_files import FEVER_LABELS
from rag_jax.metrics.answers import normalize_answer

REAL = load_countries()
TRAIN, DEV, TEST = split_countries(REAL)
SPLITS = ("train", "dev", "test")


@pytest.fixture(scope="module")
def worlds():
    return {task: build_world(60, 0, task) for task in TASKS}


def texts(world):
    """Passages as scoring sees them."""
    return {p.id: f" {normalize_answer(p.text)} " for p in world.passages[NOW]}


def words(text):
    return normalize_answer(text).split()


def said(value, normalized):
    return f" {normalize_answer(value)} " in normalized


def parsed(claim):
    """(relation, form, country, value) of a claim, read back from its text."""
    relation = claim.id.split("/")[2].partition(":")[0]
    for form in RELATIONS[relation]["statements"]:
        pattern = re.escape(form[0].upper() + form[1:]).replace(r"\{C\}", r"(?P<c>.+)")
        for name in ("c", "v", "title"):
            pattern = pattern.replace(rf"\{{{name}\}}", f"(?P<{name}>.+)")
        if match := re.fullmatch(pattern, claim.question):
            return relation, form, match["c"], match["v"]
    raise AssertionError(claim)


def test_all_tasks_share_passages_warm_up_texts_and_the_split_of_countries(worlds):
    first = worlds["questions"]
    for world in worlds.values():
        assert world.passages == first.passages and world.warmup_texts == first.warmup_texts
        for split, countries in (("dev", DEV), ("test", TEST)):
            asked = {i.split("/")[1] for e in world.splits[split] for i in e.positive_ids}
            assert asked == {c.name for c in countries}


@pytest.mark.parametrize("task", TASKS[1:])
def test_no_training_text_names_an_unseen_country(worlds, task):
    unseen = mentions(c.name for c in DEV + TEST)
    for e in worlds[task].splits["train"]:
        assert not unseen.search(" | ".join((e.question, *e.answers, *e.positive_ids))), e


def test_every_form_and_value_comes_once_under_each_label(worlds):
    """Otherwise a closed book could learn what is usually right."""
    for split in SPLITS[1:]:  # training leaves out what names an unseen country
        found = {label: Counter() for label in FEVER_LABELS}
        for e in worlds["claims"].splits[split]:
            relation, form, _, value = parsed(e)
            found[e.answers[0]][relation, form, value] += 1
        assert found["SUPPORTS"] == found["REFUTES"] == found["NOT ENOUGH INFO"]
        assert {relation for relation, *_ in found["SUPPORTS"]} == set(CLAIMED)


def test_claims_are_what_their_labels_say(worlds):
    memory = texts(worlds["claims"])
    everything = "\n".join(memory.values())
    for split in SPLITS:
        for e in worlds["claims"].splits[split]:
            relation, _, country, value = parsed(e)
            if e.answers == ("NOT ENOUGH INFO",):
                assert not e.positive_ids and not said(country, everything), e
                continue
            passage = memory[e.positive_ids[0]]
            assert said(country, passage), e
            assert said(value, passage) == (e.answers[0] == "SUPPORTS"), (e, passage)


def test_the_words_of_a_claim_do_not_tell_its_label(worlds):
    """Naive Bayes over words and over pairs of words stays near a third on unseen countries."""
    splits = worlds["claims"].splits

    def features(text):
        found = words(text)
        return found + [" ".join(pair) for pair in zip(found, found[1:], strict=False)]

    counts = defaultdict(Counter)
    for e in splits["train"]:
        counts[e.answers[0]].update(features(e.question))
    known = set().union(*counts.values())

    def guess(text):
        def log_p(label):
            total = counts[label].total() + len(known)
            return sum(math.log((counts[label][f] + 1) / total)
                       for f in features(text) if f in known)
        return max(FEVER_LABELS, key=log_p)

    right = [guess(e.question) == e.answers[0] for e in (*splits["dev"], *splits["test"])]
    assert len(right) > 600 and sum(right) / len(right) < 0.40


def test_no_value_of_a_claim_resembles_the_name(worlds):
    for e in worlds["claims"].splits["test"]:
        _, _, country, value = parsed(e)
        shared = {w[:4] for w in words(country) if len(w) > 3} & {
            w[:4] for w in words(value) if len(w) > 3}
        assert not shared, e


def test_sentences_answer_the_questions_with_what_the_passage_says(worlds):
    memory = texts(worlds["sentences"])
    for split in SPLITS:
        short, long = (worlds[task].splits[split] for task in ("questions", "sentences"))
        assert [e.question for e in short] == [e.question for e in long]
        for question, e in zip(short, long, strict=True):
            assert e.answers[0].endswith(".")
            assert said(question.answers[0], f" {normalize_answer(e.answers[0])} "), e
            assert said(question.answers[0], memory[e.positive_ids[0]]), e
            assert e.positive_ids == question.positive_ids
    assert any(len(e.answers) > 2 for e in worlds["sentences"].splits["test"])
    assert all(len(e.answers) == 1 for e in worlds["sentences"].splits["train"])


def test_clues_do_not_name_what_they_are_about_and_ask_about_one_thing(worlds):
    asked = Counter()
    for split in SPLITS:
        for e in worlds["clues"].splits[split]:
            asked[e.question] += 1
            assert e.answers and all(e.question not in a for a in e.answers), e
            assert "{" not in e.answers[0] and e.answers[0].endswith(".")
    assert max(asked.values()) == 1 and asked["Lima"] == 1 and "Elizabeth II" not in asked
    for twice in ("Singapore", "Hassanal Bolkiah"):  # a country and its capital; two offices
        assert asked[twice] == 1


def test_ids_are_unique_and_tasks_are_pure_functions_of_size_and_seed(worlds):
    for task in TASKS[1:]:
        ids = Counter(e.id for e in worlds[task].splits["train"])
        assert max(ids.values()) == 1
    assert build_world(60, 0, "claims") == worlds["claims"]
    assert build_world(60, 1, "claims").splits["dev"] != worlds["claims"].splits["dev"]
