"""Scores of predictions, by families of metrics that belong to a task.

Every family is a function of predictions, examples, the passages retrieved (where there was a
retriever) and config.eval.
"""

import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from rag_jax.config import ConfigError, EvalConfig
from rag_jax.data.question_files import Example
from rag_jax.data.records import json_lines
from rag_jax.errors import DataError
from rag_jax.metrics import bootstrap, kilt, overlap, retrieval
from rag_jax.metrics.answers import exact_match, f1
from rag_jax.metrics.bleu import corpus_bleu, corpus_sacre_bleu, distinct_ngram_ratio
from rag_jax.metrics.classification import accuracies, label_name
from rag_jax.metrics.patterns import pattern_match, question_named
from rag_jax.metrics.q_bleu import bleu_1, q_bleu_1
from rag_jax.metrics.rouge import rouge_l
from rag_jax.metrics.tokens import spacy_tokens
from rag_jax.retrieval.protocol import Passage
from rag_jax.types import Evidence

RECALL_AT = (1, 5, 10, 20)
READ = ("data.data_dir", "eval.metrics", "eval.nfd")
NO_ANSWER = "No Answer Present."  # MS-MARCO's reference of a question that has none

Texts = Sequence[str]
Retrieved = Sequence[Sequence[Passage | Evidence]]  # of every question, best first


class Scores(NamedTuple):
    """What a family returns.

    Attributes:
      headline: of every question that counts, from 0 to 1; its mean is the family's headline.
        None = it is em, which every task has.
      others: further values by name, percentages unless the name says count.
    """

    headline: Sequence[float] | None
    others: Mapping[str, float]


def is_correct(prediction: str, example: Example, nfd: bool = False) -> bool:
    """Exact match with one of the answers; where they are regular expressions, a match of one.

    `nfd` is config.eval.nfd.
    """
    match = pattern_match if example.regex else exact_match
    with question_named(example.id):
        return match(prediction, example.answers, nfd=nfd)


def check_read(fields: Iterable[str]) -> None:
    """Raises a ConfigError for a dotted field that scores of answers that are there do not read."""
    for name in fields:
        if name not in READ:
            raise ConfigError(f"config.{name}: would change nothing about answers that are there, "
                              f"all of which are scored; leave it out (read are {', '.join(READ)})")


def check(examples: Sequence[Example], how: EvalConfig, retrieves: bool = True) -> None:
    """Raises the ConfigErrors of `score` that are about the questions alone, of which it has no
    score where one has no known answers.

    retrieves: they are answered from passages, whose pages are scored, too.
    """
    if not all(example.answers for example in examples):
        return
    if "regex" in how.metrics:
        _patterns(examples)
    if "ms_marco" in how.metrics:
        _answerable(examples)
    if retrieves and "kilt" in how.metrics:
        for example in examples:
            _evidence(example, how.kilt_pages == "id")


def score(predictions: Texts, examples: Sequence[Example], families: Sequence[str] = ("qa",),
          retrieved: Retrieved | None = None, *, how: EvalConfig | None = None,
          train: Sequence[Example] = ()) -> dict[str, float]:
    """Scores predictions by families of metrics, and by what holds for every task.

    Args:
        predictions: the answer to each question.
        examples: the questions.
        families: names from FAMILIES.
        retrieved: the passages of each question; None = closed book, or not known.
        how: `nfd` and `kilt_pages`; None = the defaults.
        train: the training questions, for the em over those that occur in them; () = none.

    Returns:
        em (`is_correct`).
        answer_recall@K; em_answer_not_retrieved, the em over the questions that have their answer
            in none of their passages, and their number, answer_not_retrieved_count.
        em_answer_overlap, em_no_answer_overlap: the em over the questions that have an answer of a
            training question, and over the others; em_question_overlap, em_no_question_overlap
            likewise; with their counts.
        the values that the families return.
        NAME_ci_low, NAME_ci_high: of em and of each family's headline, the bounds of its 95 %
            bootstrap interval.
        score: the first family's headline, by which the best checkpoint is chosen (the highest).
        count: of questions.

    Raises:
        ValueError: no questions, or not as many predictions.
        DataError: questions without known answers.
    """
    how = how or EvalConfig()
    if len(predictions) != len(examples):
        raise ValueError(f"{len(predictions)} predictions for {len(examples)} questions")
    if not examples:
        raise ValueError("no questions: scores over none are undefined")
    for example in examples:
        if not example.answers:
            raise DataError(f"question {example.id!r} has no known answers: its predictions can "
                             "be handed in where the answers are, not scored here")
    correct = np.array([is_correct(text, example, how.nfd)
                        for text, example in zip(predictions, examples, strict=True)])
    scores = _with_interval("em", correct)
    if retrieved is not None:
        ranks = answer_ranks(examples, retrieved)
        scores |= answer_recalls(ranks, retrieved)
        missed = np.isinf(ranks)
        if missed.any():
            scores["em_answer_not_retrieved"] = _percent(correct[missed])
        scores["answer_not_retrieved_count"] = int(missed.sum())
    if train:
        scores |= _overlaps(correct, examples, train, how.nfd)
    for family in families:
        values, others = FAMILIES[family].metrics(predictions, examples, retrieved, how)
        if values is not None:
            scores |= _with_interval(FAMILIES[family].headline, values)
        scores |= others
    return scores | {"score": scores[headline(families)], "count": len(examples)}


def headline(families: Sequence[str]) -> str:
    """The name of the metric by which the best checkpoint is chosen."""
    return FAMILIES[families[0]].headline if families else "em"


def _with_interval(name: str, values: Sequence[float]) -> dict[str, float]:
    low, high = bootstrap.interval(100.0 * np.asarray(values, np.float64))
    return {name: _percent(values), f"{name}_ci_low": low, f"{name}_ci_high": high}


def _overlaps(correct: np.ndarray, examples: Sequence[Example], train: Sequence[Example],
              nfd: bool) -> dict[str, float]:
    """The em over the questions that share their answer, or their question, with training; answers
    are compared where they are texts and no expressions."""
    texts = np.array([not example.regex for example in examples])
    slices = overlap.slices(correct, overlap.overlaps(
        [[e.question] for e in examples], [[e.question] for e in train], nfd), "question_overlap")
    if texts.any():
        slices |= overlap.slices(correct[texts], overlap.overlaps(
            [e.answers for e in examples if not e.regex],
            [e.answers for e in train if not e.regex], nfd), "answer_overlap")
    return {f"em_{name}": value for name, value in slices.items()}


def answer_ranks(examples: Sequence[Example], retrieved: Retrieved) -> np.ndarray:
    """Rank from 0 of the first passage that has an answer; infinity if none has; float[Q]."""
    ranks = []
    for example, passages in zip(examples, retrieved, strict=True):
        with question_named(example.id):
            ranks.append(retrieval.answer_rank([passage.text for passage in passages],
                                               example.answers, example.regex))
    return np.array(ranks)


def answer_recalls(ranks: np.ndarray, retrieved: Retrieved) -> dict[str, float]:
    """answer_recall@K: percent of the questions with an answer in one of the first K passages."""
    return {f"answer_recall@{k}": value
            for k, value in retrieval.recall_at(ranks, depths(retrieved)).items()}


def depths(retrieved: Sequence[Sequence]) -> list[int]:
    """The values of K in metrics@K: the usual ones, and the number of passages retrieved."""
    deepest = max(map(len, retrieved))
    return [*(k for k in RECALL_AT if k < deepest), deepest]


# --- families -----------------------------------------------------------------------------------


def _qa(predictions: Texts, examples: Sequence[Example], retrieved: Retrieved | None,
        how: EvalConfig) -> Scores:
    """em; f1 over the questions whose answers are texts (absent where there are none)."""
    values = [f1(prediction, example.answers, how.nfd)
              for prediction, example in zip(predictions, examples, strict=True)
              if not example.regex]
    return Scores(None, {"f1": _percent(values)} if values else {})


def _regex(predictions: Texts, examples: Sequence[Example], retrieved: Retrieved | None,
           how: EvalConfig) -> Scores:
    """regex_match (anchored at the start) and regex_search, where answers are such expressions."""
    match, search = [], []
    for row in _patterns(examples):
        prediction, example = predictions[row], examples[row]
        with question_named(example.id):
            for kind, values in (("match", match), ("search", search)):
                values.append(pattern_match(prediction, example.answers, kind, nfd=how.nfd))
    return Scores(match, {"regex_search": _percent(search)})


def _patterns(examples: Sequence[Example]) -> list[int]:
    """The questions whose answers are regular expressions; ConfigError where there are none."""
    rows = [row for row, example in enumerate(examples) if example.regex]
    if not rows:
        raise ConfigError("config.eval.metrics=regex: no question has regular expressions as "
                          'answers; mark those that have with "regex": true, or leave it out')
    return rows


def _ms_marco(predictions: Texts, examples: Sequence[Example], retrieved: Retrieved | None,
              how: EvalConfig) -> Scores:
    """rouge_l and bleu_1 as MS-MARCO's scorer, and sacre_bleu, over the questions that have an
    answer; and distinct_trigrams of all predictions."""
    tokens = [spacy_tokens(text) for text in predictions]
    answerable = _answerable(examples)
    references = [examples[i].answers for i in answerable]
    scored = [(tokens[i], list(map(spacy_tokens, texts)))
              for i, texts in zip(answerable, references, strict=True)]
    words = (without_spaces(*pair) for pair in scored)
    return Scores([rouge_l(*pair) for pair in scored], {
        "bleu_1": 100.0 * corpus_bleu(*zip(*words, strict=True))[0],
        "sacre_bleu": corpus_sacre_bleu([predictions[i] for i in answerable], references),
        "distinct_trigrams": 100.0 * distinct_ngram_ratio(tokens),
        "answerable_count": len(scored),
    })


def _answerable(examples: Sequence[Example]) -> list[int]:
    """The questions that have an answer; ConfigError where there are none."""
    rows = [row for row, example in enumerate(examples) if NO_ANSWER not in example.answers]
    if not rows:
        raise ConfigError(f"config.eval.metrics=ms_marco: every answer is {NO_ANSWER!r}")
    return rows


def without_spaces(prediction: list[str], references: list[list[str]]
                   ) -> tuple[list[str], list[list[str]]]:
    """Without the empty tokens of extra spaces, which ROUGE-L's side of the scorer alone sees."""
    return list(filter(None, prediction)), [list(filter(None, each)) for each in references]


def _jeopardy(predictions: Texts, examples: Sequence[Example], retrieved: Retrieved | None,
              how: EvalConfig) -> Scores:
    """q_bleu_1, the mean sentence BLEU-1 that its script prints too, and distinct_trigrams."""
    pairs = [(text, e.answers) for text, e in zip(predictions, examples, strict=True)]
    return Scores([q_bleu_1(*pair) for pair in pairs], {
        "sentence_bleu_1": _percent([bleu_1(*pair) for pair in pairs]),
        "distinct_trigrams": 100.0 * distinct_ngram_ratio(map(spacy_tokens, predictions)),
    })


def _fever(predictions: Texts, examples: Sequence[Example], retrieved: Retrieved | None,
           how: EvalConfig) -> Scores:
    """Label accuracies; the share of claims with a gold page among the retrieved ones."""
    labels = [example.answers[0] for example in examples]
    right = [label_name(a) == label_name(b) for a, b in zip(predictions, labels, strict=True)]
    return Scores(right, accuracies(predictions, labels) | _titles(examples, retrieved))


def _kilt(predictions: Texts, examples: Sequence[Example], retrieved: Retrieved | None,
          how: EvalConfig) -> Scores:
    """em, and KILT's scores where there are passages. Without evidence sets, each gold title is an
    evidence set."""
    if retrieved is None:
        return Scores(None, {})
    by_id = how.kilt_pages == "id"
    pages = [[p.id.partition(".")[0] if by_id else p.title for p in passages]
             for passages in retrieved]
    sets = [_evidence(example, by_id) for example in examples]
    precisions = [kilt.r_precision(*pair) for pair in zip(pages, sets, strict=True)]
    supported = [kilt.supported(text, example.answers, precision, how.nfd)
                 for text, example, precision in zip(
                     predictions, examples, precisions, strict=True)]
    scores = {"r_precision": _percent(precisions)}
    for k in depths(retrieved):
        scores[f"page_recall@{k}"] = _percent(
            [kilt.page_recall(*pair, k) for pair in zip(pages, sets, strict=True)])
    for name, values in zip(kilt.Supported._fields, zip(*supported, strict=True), strict=True):
        scores[f"kilt_{name}"] = _percent(values)
    return Scores(None, scores | _titles(examples, retrieved))


def _evidence(example: Example, by_id: bool) -> list[set[str]]:
    """Evidence sets of page ids or titles.

    Raises:
        ConfigError: ids are asked for where the question has titles alone.
    """
    if example.evidence:
        return [{line.split("\t", 1)[not by_id] for line in pages.split("\n")}
                for pages in example.evidence]
    if by_id and example.titles:
        raise ConfigError(f"config.eval.kilt_pages=id: question {example.id!r} has titles, but no "
                          "ids of its pages, as kilt: files have; set title")
    return [{title} for title in example.titles]


def _titles(examples: Sequence[Example], retrieved: Retrieved | None) -> dict[str, float]:
    """title_overlap@K and title_precision@K over the titled_count questions with gold titles, if
    any."""
    if retrieved is None or not any(example.titles for example in examples):
        return {}
    pairs = [([passage.title for passage in passages], example.titles)
             for example, passages in zip(examples, retrieved, strict=True) if example.titles]
    scores = {"titled_count": len(pairs)}
    for k in depths(retrieved):
        precisions = [retrieval.title_precision(*pair, k) for pair in pairs]
        scores[f"title_overlap@{k}"] = _percent([value > 0 for value in precisions])
        scores[f"title_precision@{k}"] = _percent(precisions)
    return scores


def _percent(values: Sequence[float]) -> float:
    return 100.0 * float(np.mean(values))


class Family(NamedTuple):
    metrics: Callable[[Texts, Sequence[Example], Retrieved | None, EvalConfig], Scores]
    headline: str  # the name of the metric that `Scores.headline` is of


FAMILIES = {
    "qa": Family(_qa, "em"),
    "regex": Family(_regex, "regex_match"),
    "ms_marco": Family(_ms_marco, "rouge_l"),
    "jeopardy": Family(_jeopardy, "q_bleu_1"),
    "fever": Family(_fever, "accuracy"),
    "kilt": Family(_kilt, "em"),
}


# --- predictions in a file ----------------------------------------------------------------------


def read_predictions(path: pathlib.Path, examples: Sequence[Example]) -> list[str]:
    """The predictions of a JSONL file of {"id", "answer"}, in the order of the examples.

    Raises:
        ConfigError: no such file, or ids that are not the examples'.
        DataError: a malformed line.
    """
    if not path.is_file():
        raise ConfigError(f"--predictions={path}: no such file")
    answers = {}
    for _, record in json_lines(path):
        name, answer = record.name("id"), record.fields.get("answer")
        if not isinstance(answer, str):  # which may be empty
            raise record.error("answer", "a string")
        if name in answers:
            raise ConfigError(f"{record.where}: a second answer to question {name!r}")
        answers[name] = answer
    wanted = [example.id for example in examples]
    for name in sorted({*wanted} ^ {*answers}):
        where = "no prediction" if name in wanted else "no question, but a prediction"
        raise ConfigError(f"--predictions={path}: {where} for id {name!r}: predictions and "
                          "questions must have the same ids")
    return [answers[name] for name in wanted]
