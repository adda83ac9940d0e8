"""The quickstart's data: nothing of the test may be seen in training."""

import re

import pytest

from rag_jax.countries.facts import EDITIONS, load_countries
from rag_jax.countries.world import NOW, build_world, lookalikes, mentions, split_countries

REAL = load_countries()
TRAIN, DEV, TEST = split_countries(REAL)
UNSEEN = re.compile(r"\b(" + "|".join(re.escape(c.name) for c in DEV + TEST) + r")\b", re.I)


@pytest.fixture(scope="module")
def world():
    return build_world(400, 0)


def test_the_split_covers_every_country_once():
    assert sorted(c.name for c in TRAIN + DEV + TEST) == sorted(c.name for c in REAL)
    assert len(TEST) == 40 and len(DEV) == 15
    assert split_countries(REAL) == (TRAIN, DEV, TEST)


def test_no_unseen_name_is_part_of_another_country_name():
    """"Niger" in test would be seen in "Nigeria"."""
    for c in DEV + TEST:
        assert not [r.name for r in REAL if r != c and (c.name in r.name or r.name in c.name)]


def test_no_training_question_or_answer_names_an_unseen_country(world):
    seen = [e for e in world.splits["train"] if UNSEEN.search(" | ".join((e.question, *e.answers)))]
    assert seen == []


def test_no_training_question_points_at_a_passage_of_an_unseen_country(world):
    for e in world.splits["train"]:
        for passage_id in (*e.positive_ids, *e.negative_ids):
            assert not UNSEEN.search(passage_id), e


def test_no_warm_up_text_names_an_unseen_country(world):
    assert [t for t in world.warmup_texts if UNSEEN.search(t)] == []
    assert len(world.warmup_texts) > 1000


def test_cloze_cards_have_no_question_no_unseen_country_and_no_changed_office(world):
    """A question with its passage would be a gold passage; a holder would answer the hot-swap."""
    cards = build_world(60, 0, cards="cloze")
    assert cards.splits == build_world(60, 0).splits
    stated = {(p.title, p.text): p.id for p in cards.passages["2018"]}
    changed = {f"2018/{c.name}/{o.title}" for c in REAL for o in c.offices if o.changed}
    whole = 0
    for text in cards.warmup_texts:
        span, _, rest = text.partition(" : ")
        (title, _, passage), asked = rest.split(" // ")[0].partition(" / "), rest.split(" // ")[1]
        assert stated[title, passage] not in changed and not UNSEEN.search(text)
        before, _, after = asked.partition("what")
        assert f"{before}{span}" in passage and passage.count(after) and not asked.endswith("?")
        whole += asked == "what"
    assert len(cards.warmup_texts) > 1500 and whole < 5  # "St." ends a sentence
    assert len({text.partition(" : ")[0] for text in cards.warmup_texts}) > 1000


def test_dev_and_test_ask_about_their_own_countries_alone(world):
    for split, countries in (("dev", DEV), ("test", TEST)):
        asked = {e.positive_ids[0].split("/")[1] for e in world.splits[split]}
        assert asked == {c.name for c in countries}


def test_offices_that_changed_hands_are_in_no_training_question(world):
    changed = {(c.name, o.title) for c in REAL for o in c.offices if o.changed}
    asked = {tuple(e.id.split("/")[1:3]) for e in world.splits["train"]}
    assert asked and not {(name, f"office:{title}") for name, title in changed} & asked
    texts = {e.question for e in world.splits["train"]} | {
        line.rpartition(" // ")[2] for line in world.warmup_texts}
    for name, title in changed:
        the = next(c.prose_name for c in REAL if c.name == name)
        assert not [t for t in texts if f" {title} of {the}?" in t]


def test_both_leader_splits_ask_the_same_questions_with_different_answers(world):
    old, new = (world.splits[f"leaders_{e}"] for e in EDITIONS)
    assert [e.question for e in old] == [e.question for e in new]
    assert len(old) >= 80 and len({e.question for e in old}) == len(old)
    assert all(a.answers != b.answers for a, b in zip(old, new, strict=True))


def test_questions_point_at_passages_of_their_memory(world):
    ids = {edition: {p.id for p in memory} for edition, memory in world.passages.items()}
    for split, examples in world.splits.items():
        edition = split.removeprefix("leaders_") if split.startswith("leaders_") else NOW
        for e in examples:
            assert {*e.positive_ids, *e.negative_ids} <= ids[edition], (split, e)


def test_both_memories_hold_every_country_under_ids_of_their_edition(world):
    assert set(world.passages) == set(EDITIONS)
    for edition, memory in world.passages.items():
        assert len({p.id for p in memory}) == len(memory) >= 5 * (195 + 400)
        assert len({p.title for p in memory}) == 195 + 400
        assert all(p.id.startswith(f"{edition}/") for p in memory)


def test_ids_of_passages_tell_fiction_and_nothing_that_trains_does(world):
    """Whoever asks about a real country sees when the answer was read in an invented sentence."""
    real = {c.name for c in REAL}
    for passage in (p for memory in world.passages.values() for p in memory):
        assert ("(fictional)" in passage.id) == (passage.title not in real)
        assert "fictional" not in passage.title + passage.text
    assert not any("fictional" in title for e in world.splits["train"] for title in e.titles)
    assert {title for e in world.splits["train"] for title in e.titles} <= {
        p.title for p in world.passages[NOW]}


def test_ids_of_questions_are_unique_within_a_split(world):
    for split, examples in world.splits.items():
        assert len({e.id for e in examples}) == len(examples), split


def test_the_world_is_a_pure_function_of_size_and_seed(world):
    assert build_world(400, 0) == world
    assert build_world(400, 1).splits["train"] != world.splits["train"]
    assert build_world(400, 1).splits["leaders_2016"] == world.splits["leaders_2016"]


def test_mentions_matches_whole_words_only():
    pattern = mentions(["Chad", "São Tomé and Príncipe"])
    assert pattern.search("borders Chad, Niger") and pattern.search("in São Tomé and Príncipe.")
    assert not pattern.search("Chadian") and not pattern.search("São Tomé")


def test_lookalikes_share_most_letter_pairs():
    found = lookalikes(["Peru", "Perusia", "Chad", "Beru", "Chadia"], 2)
    assert found["Peru"] == ["Perusia", "Beru"] and found["Chad"][0] == "Chadia"
    assert all(name not in near and len(near) == 2 for name, near in found.items())


def test_training_questions_have_one_answer_and_hard_negatives_of_two_kinds(world):
    """Other passages of the country teach the topic; lookalikes' passages teach the name."""
    for e in world.splits["train"]:
        _, country, topic = e.positive_ids[0].split("/")
        assert len(e.answers) == 1
        others = [i.split("/")[1:] for i in e.negative_ids]
        assert all((c == country) != (t == topic) for c, t in others), e
        assert any(c == country for c, _ in others) and (
            not topic.islower() or any(t == topic for _, t in others)), e
    assert any(len(e.answers) > 1 for e in world.splits["test"])
