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
from collections.abc import Iterable, Sequence, Set

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


def _example(question: prose.CountryQuestion) -> Example:
    positive = (question.positive_id,) if question.positive_id else ()
    titles = (question.country,) * len(positive)
    return Example(question.id, question.question, question.answers, positive,
                   question.negative_ids, titles=titles)


def _training_example(question: prose.CountryQuestion, alike: Sequence[Country], known: Set[str]
                      ) -> Example:
    """The question as it trains.

    Its answer is the one that the passage names first: one to learn, where several would be
    right. Its hard negatives are also the same passage of countries with similar names.
    """
    trained = _example(question)._replace(answers=question.answers[:1])
    if not question.positive_id:
        return trained
    edition, _, topic = question.positive_id.split("/")
    similar = (prose.passage_id(country, topic, edition) for country in alike)
    return trained._replace(
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


def _one_phrasing(questions: Iterable[prose.CountryQuestion], seed: int
                  ) -> list[prose.CountryQuestion]:
    """One phrasing of each question on each country, drawn by seed."""
    groups: dict[str, list[prose.CountryQuestion]] = {}
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
    passages = {
        edition: [Passage(*p) for c in (*real, *invented) for p in prose.passages(c, edition)]
        for edition in reversed(EDITIONS)  # NOW comes first
    }
    unseen = mentions(c.name for c in dev + test)
    splits = _question_splits(real, invented, seed, unseen)
    prose_of = {p.id: p for c in (*train, *invented) for p in prose.passages(c, NOW)
                if not unseen.search(p.text)}
    if cards == "gold":
        texts = [_card(prose_of[q.positive_id], q) for q in splits["train"]
                 if q.positive_id in prose_of]
    else:
        changed = {prose.passage_id(c, o.title, NOW) for c in real for o in c.offices if o.changed}
        texts = _cloze_cards([p for p in prose_of.values() if p.id not in changed], seed)
    if task != "questions":
        splits = _task_splits(task, splits, real, invented, seed, unseen)
    examples = {name: [_example(q) for q in questions] for name, questions in splits.items()}
    by_name = {c.name: c for c in (*train, *invented)}
    alike = {name: [by_name[n] for n in near]
             for name, near in lookalikes(list(by_name), LOOKALIKES).items()}
    known = {p.id for p in passages[NOW]}
    examples["train"] = [_training_example(q, alike.get(q.country, ()), known)
                         for q in splits["train"]]
    return Source(passages, examples, texts)


Splits = dict[str, list[prose.CountryQuestion]]


def _trains(question: prose.CountryQuestion, unseen: re.Pattern[str]) -> bool:
    """Whether a question and its answers name nothing that dev and test ask about."""
    return not any(map(unseen.search, (question.question, *question.answers)))


def _question_splits(real: Sequence[Country], invented: Sequence[Country], seed: int,
                     unseen: re.Pattern[str]) -> Splits:
    train, dev, test = split_countries(real)
    changed = {(c.name, o.title) for c in real for o in c.offices if o.changed}

    def changes(question: prose.CountryQuestion) -> bool:
        return (question.country, question.id.split("/")[2].partition(":")[2]) in changed

    learnt = [q for c in train for q in prose.questions(c, NOW)]
    asked_once = [q for c in invented for q in prose.questions(c, NOW) if q.relation != "office"]
    learnt += _one_phrasing(asked_once, seed)
    # Names of people are the hardest answers: they are asked for in every phrasing.
    learnt += [q for c in invented for q in prose.questions(c, NOW) if q.relation == "office"]
    splits = {
        "train": [q for q in learnt if not changes(q) and _trains(q, unseen)],
        "dev": _one_phrasing((q for c in dev for q in prose.questions(c, NOW)), seed),
        "test": _one_phrasing((q for c in test for q in prose.questions(c, NOW)), seed),
    }
    for edition in EDITIONS:
        splits[f"leaders_{edition}"] = [
            q for c in real for q in prose.questions(c, edition)
            if q.id.endswith("/0") and changes(q)]
    return splits


def _task_splits(task: str, questions: Splits, real: Sequence[Country],
                 invented: Sequence[Country], seed: int, unseen: re.Pattern[str]) -> Splits:
    """train, dev and test of another task than "questions"."""
    train, dev, test = split_countries(real)
    if task == "sentences":
        by_name = {c.name: c for c in (*real, *invented)}
        return {name: [statements.sentence(q, by_name[q.country], seed) for q in questions[name]]
                for name in ("train", "dev", "test")}
    if task == "clues":
        made = {name: [q for c in countries for q in statements.clues(c, NOW, seed)]
                for name, countries in (("train", (*train, *invented)), ("dev", dev),
                                        ("test", test))}
        # Elizabeth II was the monarch of sixteen countries: no clue says which one is meant.
        times = Counter(q.question for questions in made.values() for q in questions)
        return {name: [q for q in questions if times[q.question] == 1
                       and (name != "train" or _trains(q, unseen))]
                for name, questions in made.items()}
    # Claims train on fictional countries alone, as those that no passage is about are fictional.
    known = {plain(c.name) for c in invented}
    strangers = [c for c in fictional_countries(
        len(invented) + DEV_COUNTRIES + TEST_COUNTRIES, f"{seed} unwritten", train, dev + test)
        if not any(plain(c.name) in name or name in plain(c.name) for name in known)]
    shares = {"dev": (dev, strangers[:DEV_COUNTRIES]),
              "test": (test, strangers[DEV_COUNTRIES : DEV_COUNTRIES + TEST_COUNTRIES]),
              "train": (invented, strangers[DEV_COUNTRIES + TEST_COUNTRIES :])}
    made = {name: list(statements.claims(*share, NOW, seed)) for name, share in shares.items()}
    return {name: [q for q in made[name] if name != "train" or _trains(q, unseen)]
            for name in ("train", "dev", "test")}


def _card(passage: prose.CountryPassage, question: prose.CountryQuestion) -> str:
    """A warm-up text like a quiz card: the answer, the passage that has it, the question."""
    return f"{question.answers[0]} : {passage.title} / {passage.text} // {question.question}"


def _cloze_cards(shown: Sequence[prose.CountryPassage], seed: int) -> list[str]:
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
