"""Scores of answers and of retrieval over a set of questions."""

import hashlib
import json
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rag_jax import files, scoring
from rag_jax.answering import Answerer
from rag_jax.config import ConfigError, DataConfig, EvalConfig, overrides
from rag_jax.data.question_files import Example
from rag_jax.data.questions import QuestionTokens
from rag_jax.errors import DataError
from rag_jax.metrics.retrieval import gold_metrics, retrieval_monitors
from rag_jax.models.rag import FUSION, word_weight
from rag_jax.types import Answer, Params

LONGEST_NAME = 255  # bytes of a file's name
SAME_SCORES = ("mesh.", "eval.batch_size")  # fields on which no score depends


class Evaluation(NamedTuple):
    """Metrics (percent, nats), and the answers that they are of, in the order of the questions."""

    metrics: dict[str, float]
    answers: list[Answer]
    correct: list[bool | None]  # exact match of each answer; None where references are not known
    examples: Sequence[Example] = ()


def evaluate(answerer: Answerer, params: Params, questions: QuestionTokens,
             retrieved: np.ndarray | None = None, likelihood: bool = True,
             how: EvalConfig | None = None, train: Sequence[Example] = ()) -> Evaluation:
    """Answers and scores questions.

    Args:
      answerer: model, index and decoding.
      params: of the model.
      questions: with reference answers.
      retrieved: int[Q, K] passages to read instead of those that the retriever finds.
      likelihood: also compute the marginal NLL of the first target, or of the first reference where
        a question has no targets; it takes another pass.
      how: config.eval: its metrics, and how they are computed; None = the defaults.
      train: the training questions, as for `scoring.score`.

    Returns:
      What `scoring.score` returns; only the count where the references are not known.
      nll: mean nats per question, where the references are known; targets_cut: percent of the
        references that are too long, whose nll is that of their beginnings.
      log_prob: mean nats of the answers given.
      questions_cut: percent of the questions that the query encoder reads in part; inputs_cut:
        percent of the pairs of question and passage that the generator reads in part; tokens_cut:
        percent of the passages' tokens that it does not read.
      read_recall@K: answer_recall@K of the parts of the passages that the generator reads.
      gold_recall@K, gold_mrr, gold_ndcg@K: percent, where questions name passages of the index.
      certified: percent, where the decoding can certify answers.
      The retrieval-collapse monitors.
      With a null document: retrieval_utility, the mean nats by which the likelihood of the first
        reference exceeds that without a document; null_prior and null_posterior, the means of the
        null document's probabilities.
      hybrid_weight: where the weight of words is learned.
    """
    known, how = _known(questions.examples), how or EvalConfig()
    scoring.check(questions.examples, how, retrieved is not None or answerer.index is not None)
    if retrieved is None:
        retrieved = answerer.retrieve(params, questions)
    answers = answerer.decode(params, questions, retrieved)
    texts = [answer.text for answer in answers]
    metrics = {"count": len(texts)}
    if known:
        passages = None if retrieved is None else [
            answer.passages[: retrieved.shape[1]] for answer in answers]
        metrics = scoring.score(texts, questions.examples, how.metrics, passages, how=how,
                                train=train)
    metrics["log_prob"] = float(np.mean([answer.log_prob for answer in answers]))
    if answerer.decoding.certifies(answerer.model):
        metrics["certified"] = 100 * float(np.mean([answer.certified for answer in answers]))
    if likelihood and known:
        nats = answerer.log_likelihoods(params, questions, retrieved)
        metrics["nll"] = -nats["log_p"].mean()
        metrics["targets_cut"] = 100 * questions.targets_cut() / len(texts)
        if "log_p_null" in nats:
            metrics["retrieval_utility"] = (nats["log_p"] - nats["log_p_null"]).mean()
    if retrieved is not None:
        metrics |= _read_metrics(answerer, questions, retrieved, known)
        metrics |= _gold_metrics(answerer, questions, retrieved)
        beliefs = {"prior": np.array([a.prior for a in answers], np.float64),
                   "posterior": np.array([a.posterior for a in answers], np.float64)}
        if answerer.model.null_document != "none":
            metrics |= {f"null_{name}": p[:, -1].mean() for name, p in beliefs.items()}
            beliefs = {name: given_a_passage(p) for name, p in beliefs.items()}
        if beliefs["prior"].any():  # else the null document has all the probability everywhere
            metrics |= retrieval_monitors(retrieved, **beliefs)
        if FUSION in params:
            metrics["hybrid_weight"] = word_weight(answerer.model, params)
    correct = [scoring.is_correct(text, example, how.nfd) if known else None
               for text, example in zip(texts, questions.examples, strict=True)]
    return Evaluation({name: float(value) for name, value in metrics.items()}, answers, correct,
                      questions.examples)


def choose_k(answerer: Callable[..., Answerer], params: Params, dev: QuestionTokens,
             ks: Sequence[int], how: EvalConfig) -> dict[str, float]:
    """The number of passages that answers the development questions best (section 4.5).

    Args:
      answerer: makes an answerer for a number of passages, `k`.
      params: of the model.
      dev: development questions.
      ks: the numbers to try.
      how: config.eval.

    Returns:
      "k", the number with the best score, the smallest of several; and "dev_score@K" of each.

    Raises:
      ConfigError: a number is above that of the passages, or the run reads none.
    """
    index = answerer(k=max(ks)).index
    if index is None:
        raise ConfigError("this run reads no passages: there is no k to choose")
    if max(ks) > index.size:
        raise ConfigError(f"k={max(ks)} is more than the index's {index.size} passages")
    scores = {k: evaluate(answerer(k=k), params, dev, likelihood=False, how=how).metrics["score"]
              for k in sorted(ks)}
    best = max(scores, key=scores.__getitem__)  # the first of equals
    return {"k": best, **{f"dev_score@{k}": score for k, score in scores.items()}}


def _read_metrics(answerer: Answerer, questions: QuestionTokens, retrieved: np.ndarray,
                  known: bool) -> dict[str, float]:
    """How much of questions and passages is cut, and the recall of what is read, in percent."""
    passages, cuts = answerer.reads(questions, retrieved)
    metrics = {"inputs_cut": 100 * cuts.cut / cuts.texts,
               "tokens_cut": 100 * cuts.lost / max(cuts.tokens, 1)}
    if not answerer.model.lexical:
        metrics["questions_cut"] = 100 * questions.cuts.cut / len(questions.examples)
    if known:
        recalls = scoring.answer_recalls(
            scoring.answer_ranks(questions.examples, passages), passages)
        metrics |= {name.replace("answer_", "read_"): value for name, value in recalls.items()}
    return metrics


def _gold_metrics(answerer: Answerer, questions: QuestionTokens, retrieved: np.ndarray
                  ) -> dict[str, float]:
    """`gold_metrics` over the questions that name passages of this index; {} without any."""
    store, pairs = answerer.index.passages, []
    for example, rows in zip(questions.examples, retrieved, strict=True):
        gold = [name for name in example.positive_ids if store.find(name) is not None]
        if gold:
            pairs.append(([store[int(row)].id for row in rows], set(gold)))
    if not pairs:
        return {}
    ids, gold = zip(*pairs, strict=True)
    return gold_metrics(ids, gold, scoring.depths(ids))


def _known(examples: Sequence[Example]) -> bool:
    """Whether the answers of questions are known.

    Raises:
      DataError: the answers of some are known, and of others not.
    """
    unknown = [example.id for example in examples if not example.answers]
    if 0 < len(unknown) < len(examples):
        raise DataError(f"question {unknown[0]!r} has no answers, and others have: give it some or "
                        "leave it out; beside it nothing is scored")
    return not unknown


def remarks(result: Evaluation, data: DataConfig) -> list[str]:
    """Remarks on the metrics of an evaluation: what was cut, or not scored.

    data: the run's config.data.
    """
    lines = []
    if lost := result.metrics.get("tokens_cut"):
        lines.append(f"{lost:.1f} % of the passages' tokens do not fit into config.data."
                     f"max_source_length={data.max_source_length} beside the question: they are "
                     "not read")
    if cut := result.metrics.get("targets_cut"):
        lines.append(f"{cut:.1f} % of the reference answers do not fit into config.data."
                     f"max_target_length={data.max_target_length}: nll is that of their beginnings")
    if result.correct[0] is None:
        lines.append("not scored: the answers to these questions are not public")
    return lines


def given_a_passage(p: np.ndarray) -> np.ndarray:
    """p(z | z is not the null document) float64[Q, K] from p(z) [Q, K + 1]; 0 where the null
    document has all the probability."""
    passages = p[:, :-1]
    total = passages.sum(axis=1, keepdims=True)
    return np.divide(passages, total, out=np.zeros_like(passages), where=total > 0)


def retrieval_metrics(answerer: Answerer, questions: QuestionTokens, retrieved: np.ndarray
                      ) -> dict[str, float]:
    """answer_recall@K in percent: questions with an answer in one of the first K passages."""
    store = answerer.index.passages
    passages = [[store[int(row)] for row in rows] for rows in retrieved]
    return scoring.answer_recalls(scoring.answer_ranks(questions.examples, passages), passages)


def folder_name(split: str, questions: str | None = None, index: str | None = None,
                step: int | None = None, settings: Mapping[str, Any] | None = None) -> str:
    """The name of an evaluation's folder: the split, where the run's index and best checkpoint
    answer it with the run's configuration; otherwise a name that no other evaluation has.

    Args:
      split: of the workdir.
      questions: file or other source that is answered in its place.
      index, step: another index or checkpoint than the run's.
      settings: values of fields that differ from the run's.
    """
    parts = [f"questions-{_named(questions)}" if questions else split]
    if index is not None:
        parts.append(f"index-{_named(index)}")
    if step is not None:
        parts.append(f"step-{step}")
    same = SAME_SCORES if questions and not pathlib.Path(questions).exists() else (
        *SAME_SCORES, "data.data_dir")  # the folder of named data sets
    if given := {name: value for name, value in (settings or {}).items()
                 if not name.startswith(same)}:
        whole = ",".join(f"{name.rpartition('.')[2]}={overrides.shown(value)}"
                         for name, value in given.items())
        parts.append(_digested(whole[:60], repr(given)))
    name = "-".join(parts)
    return name if len(name.encode()) <= LONGEST_NAME else _digested(name, name)


def _named(source: str) -> str:
    """A file, folder or other source as part of a folder's name, different for each source."""
    path = pathlib.Path(source)
    if path.exists():
        return _digested(path.stem, str(path.resolve()))
    parts = list(map(pathlib.Path, source.split(":")))
    if source.startswith(("kilt:", "tfds-dir:")) and parts[1].exists():  # the others have names
        parts[1] = parts[1].resolve()
    return _digested(path.stem, ":".join(map(str, parts)))


def _digested(stem: str, whole: str) -> str:
    """The stem, in letters that a file's name allows, with a digest of `whole`; it can be the whole
    name of a file."""
    digest = f"-{hashlib.sha256(whole.encode()).hexdigest()[:8]}"
    stem = re.sub(r"[^\w.-]+", "_", stem).encode()[: LONGEST_NAME - len(digest)]
    return stem.decode(errors="ignore") + digest


def write_evaluation(folder: pathlib.Path, result: Evaluation, aside: bool = False) -> None:
    """Writes FOLDER/metrics.json and FOLDER/predictions.jsonl.

    A line per prediction: answer, log-probability, and the passages with prior and posterior. The
    posterior of each token is left out; `generate --out` writes it. aside: as of `files.replaced`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files.remove_leftovers(folder)
    lines = []
    for example, answer, correct in zip(result.examples, result.answers, result.correct,
                                        strict=True):
        lines.append(json.dumps({
            "id": example.id,
            "question": example.question,
            "answer": answer.text,
            "token_ids": answer.token_ids,
            "references": list(example.answers),
            "exact_match": correct,
            "log_prob": answer.log_prob,
            "token_log_probs": answer.token_log_probs,
            "finished": answer.finished,
            "certified": answer.certified,
            "expanded": answer.expanded,
            "alternatives": [
                {name: value for name, value in other.alternative().items()
                 if name != "token_posterior"} for other in answer.alternatives],
            "passages": [{"id": p.id, "prior": p.prior, "posterior": p.posterior}
                         for p in answer.passages],
        }, ensure_ascii=False))
    files.write_text(folder / "predictions.jsonl", "\n".join(lines) + "\n", aside)
    files.write_json(folder / "metrics.json", result.metrics, aside)
