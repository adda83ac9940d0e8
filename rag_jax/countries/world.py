"""The quickstart's data: two editions of the passages, and questions split by country.

Beside the questions there are three further tasks over the same passages and the same split of
countries (statements.py). Countries of the dev and test split occur in no training question and no
warm-up text. Offices that changed hands between the editions are asked about in no training
question either: they are the hot-swap test.
"""

import itertools
import random
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set

import numpy as np

from rag_jax.countries import prose, statements
from rag_jax.countries.facts import EDITIONS, Country, load_countries
from rag_jax.countries.fiction import fictional_countries, plain
from rag_jax.data.noise import sentences
from rag_jax.data.question_files import Example
from rag_jax.data.source import Source
from rag_jax.retrieval.protocol import Passage

NOW = "2018"  # the edition that trains
DEV_COUNTRIES, TEST_COUNTRIES = 15, 40
TASKS = ("questions", "claims", "sentences", "clues")
RARE = 0.01  # share of the passages that a name or number is in at most, for a cloze card
LOOKALIKES = 8  # countries of similar name whose passages are hard negatives


def split_countries(countries: Sequence[Country]) -> tuple[list[Country], ...]:
    """(train, dev, test); a name that occurs inside another one stays in train."""
    names = [c.name for c in countries]
    lone = [c for c in countries
            if not any(c.name != n and (c.name in n or n in c.name) for n in names)]
    random.Random("split of countries").shuffle(lone)
    test, dev = lone[:TEST_COUNTRIES], lone[TEST_COUNTRIES : TEST_COUNTRIES + DEV_COUNTRIES]
    unseen = {c.name for c in test + dev}
    return [c for c in countries if c.name not in unseen], dev, test


def mentions(names: Iterable[str]) -> re.Pattern[str]:
    """Matches any text that names one of `names`."""
    return re.compile(r"\b(" + "|".join(map(re.escape, names)) + r")\b")


def _training_example(question: Example, alike: Mapping[str, Sequence[Country]], known: Set[str]
                      ) -> Example:
    """The question as it trains.

    Its answer is the one that the passage names first: one to learn, where several would be
    right. Its hard negatives are also the same passage of countries with similar names.
    """
    similar = []
    for name, passage_id in zip(question.titles, question.positive_ids, strict=True):
        edition, _, topic = passage_id.split("/")
        similar += [prose.passage_id(country, topic, edition) for country in alike[name]]
    return question._replace(
        answers=question.answers[:1],
        negative_ids=(*question.negative_ids, *(i for i in similar if i in known)))


def lookalikes(names: Sequence[str], count: int) -> dict[str, list[str]]:
    """For every name, the `count` others that share most pairs of letters with it (Jaccard)."""
    pairs = [{f"^{name.lower()}$"[i : i + 2] for i in range(len(name) + 1)} for name in names]
    columns = {pair: i for i, pair in enumerate(sorted(set().union(*pairs)))}
    present = np.zeros((len(names), len(columns)), np.float32)
    for row, of in enumerate(pairs):
        present[row, [columns[pair] for pair in of]] = 1
    shared = present @ present.T
    size = present.sum(axis=1)
    similarity = shared / (size[:, None] + size[None] - shared)
    np.fill_diagonal(similarity, -1)
    nearest = np.argsort(-similarity, axis=1, kind="stable")[:, :count]
    return {name: [names[i] for i in row] for name, row in zip(names, nearest, strict=True)}


def _one_phrasing(questions: Iterable[Example], seed: int) -> list[Example]:
    """One phrasing of each question on each country, drawn by seed."""
    groups: dict[str, list[Example]] = {}
    for question in questions:
        groups.setdefault(question.id.rpartition("/")[0], []).append(question)
    return [random.Random(f"{seed} {key}").choice(group) for key, group in groups.items()]


def build_world(fictional: int, seed: int, task: str = "questions", cards: str = "gold"
                ) -> Source:
    """The world with `fictional` made-up countries beside the 195 real ones.

    Passages are by edition, the one that trains first. Splits: train, dev, test, and, of the task
    "questions", leaders_2016 / leaders_2018: the same questions about offices that changed hands
    ("Who is {position}?"), with the holder in either year.

    Args:
      fictional: how many.
      seed: decides the fictional countries and the questions that are asked.
      task: one of TASKS; the passages and the warm-up texts are the same for all of them.
      cards: what a warm-up text has beside a passage: "gold" = a training question and its answer,
        "cloze" = one of its sentences and a span that was taken out of it.
    """
    real = load_countries()
    train, dev, test = split_countries(real)
    invented = fictional_countries(fictional, seed, train, dev + test)
    shares = {"train": [*train, *invented], "dev": dev, "test": test}
    passages = {
        edition: [p for c in (*real, *invented) for p in prose.passages(c, edition)]
        for edition in reversed(EDITIONS)  # NOW comes first
    }
    unseen = mentions(c.name for c in dev + test)
    changed = {(c.name, o.title) for c in real for o in c.offices if o.changed}

    def trains(question: Example) -> bool:
        """Whether a question and its answers name nothing that dev and test ask about."""
        return not any(map(unseen.search, (question.question, *question.answers)))

    splits = _question_splits(shares, changed, seed)
    splits["train"] = list(filter(trains, splits["train"]))
    by_name = {c.name: c for c in shares["train"]}
    prose_of = {p.id: p for p in passages[NOW] if p.title in by_name and not unseen.search(p.text)}
    if cards == "gold":
        texts = [_card(prose_of[q.positive_ids[0]], q) for q in splits["train"]
                 if q.positive_ids[0] in prose_of]
    else:
        holders = {f"{NOW}/{name}/{title}" for name, title in changed}
        texts = _cloze_cards([p for p in prose_of.values() if p.id not in holders], seed)
    if task != "questions":
        splits = _task_splits(task, splits, shares, seed)
    alike = {name: [by_name[n] for n in near]
             for name, near in lookalikes(list(by_name), LOOKALIKES).items()}
    known = {p.id for p in passages[NOW]}
    trained = [_training_example(q, alike, known) for q in splits["train"] if trains(q)]
    return Source(passages, {**splits, "train": trained}, texts)


Shares = Mapping[str, Sequence[Country]]  # the countries of each split
Splits = dict[str, list[Example]]


def _question_splits(shares: Shares, changed: Set[tuple[str, str]], seed: int) -> Splits:
    """changed: (country, office) of those that changed hands."""
    def asked(countries: Iterable[Country]) -> list[Example]:
        return [q for c in countries for q in prose.questions(c, NOW)]

    def changes(question: Example) -> bool:
        return (*question.titles, prose.relation_of(question)[1]) in changed

    learnt = asked(c for c in shares["train"] if not c.fictional)
    invented = asked(c for c in shares["train"] if c.fictional)
    learnt += _one_phrasing((q for q in invented if prose.relation_of(q)[0] != "office"), seed)
    # Names of people are the hardest answers: they are asked for in every phrasing.
    learnt += [q for q in invented if prose.relation_of(q)[0] == "office"]
    splits = {"train": [q for q in learnt if not changes(q)],
              "dev": _one_phrasing(asked(shares["dev"]), seed),
              "test": _one_phrasing(asked(shares["test"]), seed)}
    for edition in EDITIONS:
        splits[f"leaders_{edition}"] = [
            q for c in load_countries() for q in prose.questions(c, edition)
            if q.id.endswith("/0") and changes(q)]
    return splits


def _task_splits(task: str, questions: Splits, shares: Shares, seed: int) -> Splits:
    """train, dev and test of another task than "questions"."""
    if task == "sentences":
        by_name = {c.name: c for countries in shares.values() for c in countries}
        return {name: [statements.sentence(q, by_name[q.titles[0]], seed) for q in questions[name]]
                for name in shares}
    if task == "clues":
        made = {name: [q for c in countries for q in statements.clues(c, NOW, seed)]
                for name, countries in shares.items()}
        # Elizabeth II was the monarch of sixteen countries: no clue says which one is meant.
        times = Counter(q.question for questions in made.values() for q in questions)
        return {name: [q for q in questions if times[q.question] == 1]
                for name, questions in made.items()}
    # Claims train on fictional countries alone, as those that no passage is about are fictional.
    invented = [c for c in shares["train"] if c.fictional]
    known = {plain(c.name) for c in invented}
    train, dev, test = split_countries(load_countries())
    evaluated = len(dev) + len(test)
    strangers = [c for c in fictional_countries(len(invented) + evaluated, f"{seed} unwritten",
                                                train, dev + test)
                 if not any(plain(c.name) in name or name in plain(c.name) for name in known)]
    pairs = {"train": (invented, strangers[evaluated:]),
             "dev": (dev, strangers[: len(dev)]),
             "test": (test, strangers[len(dev) : evaluated])}
    return {name: list(statements.claims(*pair, NOW, seed)) for name, pair in pairs.items()}


def _card(passage: Passage, question: Example) -> str:
    """A warm-up text like a quiz card: the answer, the passage that has it, the question."""
    return f"{question.answers[0]} : {passage.title} / {passage.text} // {question.question}"


def _cloze_cards(shown: Sequence[Passage], seed: int) -> list[str]:
    """Warm-up texts like the quiz cards, of passages alone: a span of a sentence, which is names
    and numbers where it has any, the passage, and the sentence with "what" in the span's place."""
    times = Counter(word for passage in shown for word in set(passage.text.split()))
    common = {word for word, count in times.items() if count > RARE * len(shown)}
    cards = []
    for passage in shown:
        rng = random.Random(f"{seed} card {passage.id}")
        words = rng.choice(sentences(passage.text)).split()
        usual = common | {word for word in words if plain(word) in plain(passage.title)}
        rare = (lambda word, usual=usual: word not in usual) if set(words) - usual else None
        runs = [(sought, " ".join(run)) for sought, run in itertools.groupby(words, rare)]
        span = rng.choice([number for number, (sought, _) in enumerate(runs) if sought])
        asked = " ".join("what" if number == span else run for number, (_, run) in enumerate(runs))
        cards.append(f"{runs[span][1].rstrip('.,;')} : {passage.title} / {passage.text} // {asked}")
    return cards
