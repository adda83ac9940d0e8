"""What `evaluate` makes of answers and passages, and the files that it writes."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from rag_jax import api, evaluation
from rag_jax.cli import evaluate as evaluate_command
from rag_jax.cli import flags
from rag_jax.config import Config, ConfigError, DataConfig, EvalConfig
from rag_jax.config.overrides import replace
from rag_jax.data.question_files import Example
from rag_jax.data.text import Cuts
from rag_jax.errors import UserError
from rag_jax.evaluation import (
    Evaluation,
    choose_k,
    evaluate,
    folder_name,
    retrieval_metrics,
    write_evaluation,
)
from rag_jax.retrieval.protocol import Passage
from rag_jax.scoring import score
from rag_jax.types import Answer, Evidence

QUESTIONS = SimpleNamespace(examples=[
    Example("1", "When?", (r"19\d\d",), regex=True, titles=("Peru",)),
    Example("2", "Where?", ("Lima",), titles=("Lima",)),
], cuts=Cuts(), targets_cut=lambda: 1)
PASSAGES = [Passage("a", "Peru", "since 1950"), Passage("b", "Lima", "a town")]


class Parrot:
    """Answers as it was told, from a store of two passages."""

    decoding = SimpleNamespace(certifies=lambda model: False)
    model = SimpleNamespace(null_document="none", lexical=False)

    def __init__(self, texts, index=True):
        self.texts = texts
        self.index = SimpleNamespace(passages=PASSAGES) if index else None

    def retrieve(self, params, questions):
        return None if self.index is None else np.array([[0, 1], [0, 1]])

    def decode(self, params, questions, retrieved):
        if retrieved is None:
            retrieved = np.zeros((len(self.texts), 0), int)
        return [Answer(text, [2], -1.0, [Evidence(*PASSAGES[row], 1 / len(rows), 1 / len(rows))
                                         for row in rows])
                for text, rows in zip(self.texts, retrieved, strict=True)]

    def reads(self, questions, retrieved):
        cuts = Cuts()
        cuts.count([10, 10], [10, 5])
        return [[PASSAGES[row]._replace(text="a town") for row in rows] for rows in retrieved], cuts

    def log_likelihoods(self, params, questions, retrieved):
        return {"log_p": np.array([-1.0, -3.0])}


def test_answers_are_scored_with_the_passages_that_they_were_given():
    found = evaluate(Parrot(["1950s", "Lima"]), {}, QUESTIONS,
                     how=EvalConfig(metrics=("kilt", "regex"))).metrics
    assert (found["em"], found["score"], found["regex_match"], found["nll"]) == (100, 100, 100, 2)
    assert found["answer_recall@1"] == 50.0, "the pattern is searched for, Lima is in no text"
    assert (found["em_answer_not_retrieved"], found["answer_not_retrieved_count"]) == (100, 1)
    assert found["read_recall@1"] == 0.0, "1950 is in the part that is not read"
    assert (found["inputs_cut"], found["tokens_cut"], found["questions_cut"]) == (50, 25, 0)
    unread, cut = evaluation.remarks(Evaluation(found, [], [True]),
                                     DataConfig(max_source_length=64))
    assert "25.0 % of the passages' tokens" in unread and "max_source_length=64" in unread
    assert found["targets_cut"] == 50, "nll was silently that of the beginning of a reference"
    assert "50.0 % of the reference answers" in cut and "max_target_length=32" in cut
    assert found["r_precision"] == 50.0 and found["unique_passages"] == 2
    given = evaluate(Parrot(["1950s", "Lima"]), {}, QUESTIONS, np.array([[1], [1]]), False)
    assert given.metrics["answer_recall@1"] == 0.0 and "nll" not in given.metrics
    assert retrieval_metrics(Parrot([]), QUESTIONS, np.array([[1], [0]])) == {
        "answer_recall@1": 0.0}


def test_gold_passages_count_where_questions_name_some_of_the_index():
    """Gold passages of another index would make every retriever look useless."""
    class Store(list):
        def find(self, name):
            return {"a": 0, "b": 1}.get(name)

    def metrics(*golds):
        parrot = Parrot(["1950s", "Lima"])
        parrot.index.passages = Store(PASSAGES)
        examples = [example._replace(positive_ids=gold)
                    for example, gold in zip(QUESTIONS.examples, golds, strict=True)]
        found = evaluate(parrot, {}, SimpleNamespace(examples=examples, cuts=Cuts()),
                         likelihood=False).metrics
        return {name: value for name, value in found.items() if name.startswith("gold_")}

    assert metrics((), ("elsewhere",)) == {}
    assert metrics(("b", "elsewhere"), ()) == pytest.approx({
        "gold_recall@1": 0, "gold_recall@2": 100, "gold_mrr": 50, "gold_ndcg@1": 0,
        "gold_ndcg@2": 100 / np.log2(3)})
    assert metrics(("b",), ("a",))["gold_mrr"] == 75


def test_a_closed_book_has_nothing_to_do_with_passages():
    found = evaluate(Parrot(["1950s", "x"], index=False), {}, QUESTIONS).metrics
    assert found["em"] == 50.0 and not {"answer_recall@1", "unique_passages",
                                        "answer_not_retrieved_count"} & set(found)


def test_predictions_say_which_are_correct_also_of_patterns(tmp_path):
    result = evaluate(Parrot(["1950s", "Quito"]), {}, QUESTIONS)
    write_evaluation(tmp_path, result)
    lines = [json.loads(x) for x in (tmp_path / "predictions.jsonl").read_text().splitlines()]
    assert [line["exact_match"] for line in lines] == [True, False]
    assert lines[1]["references"] == ["Lima"] and lines[0]["passages"][0]["id"] == "a"
    assert lines[0]["token_ids"] == [2]
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics == pytest.approx(result.metrics)


def test_how_answers_are_compared_and_what_training_knew_go_into_the_scores(tmp_path):
    """config.eval.nfd reaches both files, and the training questions the slices."""
    asked = SimpleNamespace(examples=[Example("1", "Who?", ("Beyonc\u00e9",)),
                                      Example("2", "Where?", ("Lima",))], cuts=Cuts(),
                            targets_cut=lambda: 0)
    parrot, train = Parrot(["Beyonce\u0301", "Lima"]), [Example("t", "Where?", ("Peru", "LIMA!"))]
    for nfd in (False, True):
        result = evaluate(parrot, {}, asked, how=EvalConfig(nfd=nfd), train=train)
        write_evaluation(tmp_path, result)
        lines = (tmp_path / "predictions.jsonl").read_text().splitlines()
        assert [json.loads(line)["exact_match"] for line in lines] == [nfd, True]
        found = json.loads((tmp_path / "metrics.json").read_text())
        assert found["em"] == (100 if nfd else 50)
        for of in ("answer", "question"):
            assert found[f"em_{of}_overlap"] == 100 and found[f"em_{of}_overlap_count"] == 1
            assert found[f"em_no_{of}_overlap"] == 100 * nfd
    assert "em_answer_overlap" not in evaluate(parrot, {}, asked).metrics


def test_questions_without_known_answers_are_answered_and_not_scored(tmp_path):
    asked = SimpleNamespace(examples=[Example("1", "Who?", ()), Example("2", "Where?", ())],
                            cuts=Cuts())
    result = evaluate(Parrot(["Ann", "Lima"]), {}, asked)
    assert not {"em", "score", "nll", "answer_recall@1"} & set(result.metrics)
    assert (result.metrics["count"], result.metrics["log_prob"]) == (2, -1)
    write_evaluation(tmp_path, result)
    lines = [json.loads(x) for x in (tmp_path / "predictions.jsonl").read_text().splitlines()]
    assert [(line["answer"], line["exact_match"], line["references"]) for line in lines] == [
        ("Ann", None, []), ("Lima", None, [])]
    with pytest.raises(ValueError, match="question '1' has no known answers"):
        score(["Ann", "Lima"], asked.examples)


def test_one_question_without_answers_does_not_take_the_scores_of_the_others():
    """All scores were missing, without a word, after everything was answered."""
    asked = SimpleNamespace(examples=[QUESTIONS.examples[1], Example("9", "Who?", ())])
    with pytest.raises(UserError, match="question '9' has no answers, and others have"):
        evaluate(None, {}, asked)


def test_an_evaluation_on_other_questions_has_a_folder_of_its_own(tmp_path, monkeypatch):
    """`--questions other/test.jsonl` took the place of the evaluation on `test`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    for file in ("test.jsonl", "other/test.jsonl"):
        (tmp_path / file).write_text("")
    names = [folder_name("test", n)
             for n in ("test.jsonl", "other/test.jsonl", "nq:test", "a b:c/d?")]
    assert len(set(names)) == 4 and all(name.startswith("questions-") for name in names)
    assert not any(set(name) & set("/ :?") for name in names)
    assert folder_name("test", str(tmp_path / "test.jsonl")) == names[0]
    kinds = ("kilt:test.jsonl", "tfds-dir:other:test")  # whose files are others elsewhere, too
    here = [folder_name("test", kind) for kind in kinds]
    (tmp_path / "other" / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert not {folder_name("test", kind) for kind in kinds} & {*here}
    named = folder_name("test", "task:nq:test")
    (tmp_path / "other" / "nq").mkdir()
    assert folder_name("test", "task:nq:test") == named, "no name of a file"
    monkeypatch.chdir(tmp_path)
    for questions, folders in (("task:nq:test", 2), ("test.jsonl", 1)):
        assert folders == len({folder_name("test", questions, settings={"data.data_dir": where})
                               for where in ("full", "sample")})


def test_an_evaluation_with_a_long_name_has_a_folder_that_can_be_made(tmp_path):
    """Once all was answered, the folder could not be made, and the answers were lost."""
    asked = tmp_path / f"{'q' * 240}.jsonl"
    names = [folder_name("test", str(asked), "\u00e9" * 120 + end,
                         settings={"eval.prefix": "The " * 20}) for end in "ab"]
    assert len(set(names)) == 2 and all(name.startswith("questions-qqq") for name in names)
    for name in names:
        (tmp_path / name).mkdir()


def test_another_index_or_step_has_a_folder_of_its_own(opened, tmp_path, monkeypatch):
    """`--step=20`, `--index=2016` and other settings took the place of the evaluation on `test`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(evaluation, "write_evaluation", lambda folder, *_: folders.append(folder))
    folders = []
    for argv in ([], ["--step=20"], ["--index=2016"], ["--index=a/2016", "--step=0"],
                 ["--questions=q.jsonl", "--step=20"], ["--config.eval.metrics=kilt"],
                 ["--config.eval.num_beams=4"], ["--out=mine", "--step=20"]):
        (tmp_path / "q.jsonl").write_text('{"question": "Who?", "answers": ["Ann"]}\n')
        evaluate_command.main(["--workdir=w", *argv])
    *within, mine = (folder.as_posix() for folder in folders)
    assert mine == "mine" and len(set(within)) == 7
    kept, step, index, both, questions, metrics, beams = (
        name.removeprefix("w/rag_token/evaluation/") for name in within)
    assert (kept, step) == ("test", "test-step-20")
    assert index.startswith("test-index-2016-") and both.startswith("test-index-2016-")
    assert both.endswith("-step-0")
    assert questions.startswith("questions-q-") and questions.endswith("-step-20")
    assert metrics.startswith("test-metrics_kilt-") and beams.startswith("test-num_beams_4-")
    folders.clear()
    for same in ("eval.batch_size=7", "eval.k=0", "mesh.data=1"):
        evaluate_command.main(["--workdir=w", f"--config.{same}"])
    assert {folder.name for folder in folders} == {"test"}, "as the run answers, the same scores"


def test_an_evaluation_takes_no_other_ones_place(opened, tmp_path):
    """`--out` of an earlier one, and a folder of documents, were written over and into."""
    out = tmp_path / "out"
    for earlier in ('{"em": 12.5}', None):
        if earlier:
            out.mkdir()
            (out / "metrics.json").write_text(earlier)
        evaluate_command.main(["--workdir=w", f"--out={out}"])
        assert json.loads((out / "metrics.json").read_text())["em"] == 37.5
        assert sorted(path.name for path in out.iterdir()) == [
            "earlier-metrics.json", "metrics.json", "predictions.jsonl"], "the same is written once"
    assert (out / "earlier-metrics.json").read_text() == '{"em": 12.5}'
    (tmp_path / "documents").mkdir()
    (tmp_path / "documents" / "thesis.tex").write_text("years")
    with pytest.raises(UserError, match="has thesis.tex, .* name a new or an empty folder"):
        evaluate_command.main(["--workdir=w", f"--out={tmp_path / 'documents'}"])
    assert len(opened) == 2


def test_the_first_questions_are_evaluated_where_the_command_says_so(
        opened, tmp_path, monkeypatch, capsys):
    """--config.eval.max_examples=5 was ignored. That of the workdir is of its training."""
    monkeypatch.setattr(flags, "workdir_config", lambda options: replace(
        Config(), {"eval.max_examples": 7}))
    monkeypatch.setattr(evaluation, "write_evaluation", lambda *_: None)
    evaluate_command.main([f"--workdir={tmp_path}"])
    assert ["max_examples", "0"] in [line.split() for line in capsys.readouterr().out.splitlines()]
    evaluate_command.main([f"--workdir={tmp_path}", "--config.eval.max_examples=7"])
    assert "on test-max_examples_7-" in capsys.readouterr().out, "not where all are evaluated"
    evaluate_command.main([f"--workdir={tmp_path}", "--config.eval.max_examples=5"])
    told = capsys.readouterr().out
    assert "on test-max_examples_5-" in told and "/test-max_examples_5-" in told
    assert ["max_examples", "5"] in [line.split() for line in told.splitlines()]


def test_questions_and_a_split_exclude_each_other(opened):
    """--split was ignored."""
    with pytest.raises(ConfigError, match="--questions and --split: give one of them"):
        evaluate_command.main(["--questions=q.jsonl", "--split=test"])
    assert not opened


@pytest.fixture
def opened(monkeypatch):
    """A trained run that is a stub, and how often it was opened."""
    prepared = SimpleNamespace(splits={"train": [], "test": []})
    calls = []

    def load(*_, **__):
        calls.append(1)
        return SimpleNamespace(run="rag_token", job=SimpleNamespace(prepared=prepared),
                               config=Config(),
                               evaluate=lambda _, **how: Evaluation(
                                   {"em": 37.5, "count": 12345, **how},
                                   [Answer("Ann", [5], -1, [])], [True],
                                   [Example("1", "Who?", ("Ann",))]))

    monkeypatch.setattr(flags, "workdir_config", lambda options: Config())
    monkeypatch.setattr(api, "load", load)
    return calls


def test_metrics_are_printed_even_where_they_cannot_be_written(opened, monkeypatch, capsys,
                                                               tmp_path):
    """A full or read-only disk: hours of answering must not end without a number."""
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(evaluation, "write_evaluation", full)
    with pytest.raises(OSError, match="No space"):
        evaluate_command.main([f"--workdir={tmp_path}"])
    printed = capsys.readouterr().out.split()
    assert "37.5" in printed and "12345" in printed


def test_a_folder_that_cannot_be_made_is_met_before_anything_is_answered(opened, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file is a file, not a folder; name another"):
        evaluate_command.main([f"--out={tmp_path / 'file' / 'out'}"])
    assert not opened


class Reader(Parrot):
    """Knows both answers where it reads three passages or more, the second where it reads two."""

    def __init__(self, k):
        super().__init__([["x", "x"], ["x", "Lima"], ["1950s", "Lima"]][min(k, 3) - 1])
        self.k = k
        self.index = SimpleNamespace(passages=PASSAGES, size=4)

    def retrieve(self, params, questions):
        return np.zeros((2, self.k), int)

    def decode(self, params, questions, retrieved):
        assert retrieved.shape == (2, self.k)
        return super().decode(params, questions, retrieved)


def test_the_number_of_passages_is_the_smallest_with_the_best_score_on_dev():
    """Every number is tried as it will answer, with its own retrieval and decoding."""
    assert choose_k(Reader, {}, QUESTIONS, (4, 2, 3, 1), EvalConfig()) == {
        "k": 3, "dev_score@1": 0, "dev_score@2": 50, "dev_score@3": 100, "dev_score@4": 100}
    with pytest.raises(ConfigError, match="5 is more than the index's 4 passages"):
        choose_k(Reader, {}, QUESTIONS, (1, 5), EvalConfig())
    with pytest.raises(ConfigError, match="this run reads no passages"):
        choose_k(lambda k: Parrot([], index=False), {}, QUESTIONS, (1,), EvalConfig())
