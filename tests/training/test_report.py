"""What the report measures with which index, parameters and questions."""

import dataclasses
import re
import shlex
import types

import numpy as np
import pytest

from rag_jax import paper
from rag_jax.config import RUNS, Config, ConfigError, overrides
from rag_jax.data.question_files import Example
from rag_jax.evaluation import Evaluation
from rag_jax.retrieval.protocol import Passage
from rag_jax.training import report, workdir
from rag_jax.training.job import Job
from rag_jax.training.report import format_report, someone_elses


def test_every_cell_of_the_hot_swap_has_its_own_index_and_questions(monkeypatch, tmp_path):
    """With one index for all four cells the table would look as if nothing had been swapped."""
    years = ("2016", "2018")
    stores = dict.fromkeys(reversed(years))
    config = Config()
    workdir.start(config, tmp_path)
    job = Job(config, tmp_path, types.SimpleNamespace(stores=stores, splits={}), None)
    monkeypatch.setattr(report.pretrained, "load_params",
                        lambda job, run: (f"parameters of {run}", {}))
    monkeypatch.setattr(report.indexing, "indexes_of", lambda job, run, indexes: indexes)
    monkeypatch.setattr(report.Rag, "evaluate", lambda rag, questions, **_: (
        types.SimpleNamespace(metrics={"em": (rag.run, rag.index, rag.params, questions)})))
    reporter = report._Reporter(job, {year: f"index of {year}" for year in years})
    assert report._hot_swap(reporter, "rag_token") == {
        f"index{index}_leaders{year}": ("rag_token", f"index of {index}",
                                        "parameters of rag_token", f"leaders_{year}")
        for index in years for year in years}


def test_a_source_that_has_gone_meanwhile_costs_one_row(monkeypatch, tmp_path, capsys):
    """What was trained for hours is reported, though what it began from cannot be read again."""
    def gone(towers):
        raise ConfigError(f"{towers[0]} has gone")

    monkeypatch.setattr(report._Reporter, "evaluate", lambda self, run: (
        self.metrics.update({run: {"em": 7.0}})))
    job = Job(Config(runs=("rag_token",)), tmp_path,
              types.SimpleNamespace(stores={}, splits={"dev": [None]}), None)
    given = {"a": types.SimpleNamespace(manifest={"recall": 1})}, types.SimpleNamespace(params=gone)
    found = report.evaluate_runs(job, *given)
    assert found["em"] == {"rag_token": 7.0}
    assert "encoder is left out: query_encoder has gone" in capsys.readouterr().out
    for fields in ({"train.steps": 0}, {"train.query_encoder_rate": None},
                   {"retrieval.retriever": "hybrid", "retrieval.fusion": "reciprocal_rank"}):
        untrained = overrides.replace(job.config, fields)
        report.evaluate_runs(dataclasses.replace(job, config=untrained), *given)
        assert not capsys.readouterr().out, "nothing was trained: there is one encoder"
    assert not any(name.startswith("recall_at_") for name in found)


@pytest.mark.parametrize("count", [2, 3, 40])
def test_every_question_reads_another_ones_passages_and_all_are_read(count):
    """A question that kept its own would make reading look less needed than it is."""
    for seed in range(5):
        other = someone_elses(count, seed)
        assert sorted(other) == list(range(count))
        assert not (other == np.arange(count)).any()
        assert (other == someone_elses(count, seed)).all()


def test_every_number_of_the_paper_says_what_it_is_of():
    """T5's beside our BART, and development beside test sets, were read as comparable."""
    of = {"em": 50.0, "em_ci_low": 45.0, "em_ci_high": 55.0, "count": 100}
    results = {"em": dict.fromkeys((*RUNS, "shuffled"), 50.0), "split": "test",
               "metrics": dict.fromkeys((*RUNS, "shuffled", *paper.HOT_SWAP), of),
               "recall_at_5": {"trained": 80.0, "frozen": 70.0},
               "hot_swap": dict.fromkeys(paper.HOT_SWAP, 60.0), "wall_secs": 1.0,
               "stage_secs": {"train": 1.0}, "peak_rss_gib": 1.0, "seed": 0}
    rows = [re.split(r"  +", line.strip()) for line in format_report(results).splitlines()]
    beside = {row[0]: row[2] for row in rows if len(row) == 3 and row[1][0].isdigit()}
    assert len(beside) == len(RUNS) + 1 + 2 + 4
    assert beside["EM, closed_book"] == "34.5 (T5-11B, NQ test)"
    assert beside["EM, rag_token"] == "44.1 (RAG-Token, NQ test)" and beside["EM, fid"] == "-"
    assert beside["EM, frozen"] == "37.8 (RAG-Token, NQ dev)" and beside["EM, shuffled"] == "-"
    assert beside["answer recall@5, frozen query encoder"] == "65.09 (DPR, NQ dev)"
    for text in beside.values():
        assert text == "-" or re.fullmatch(r"[\d.]+ \(.*(NQ test|NQ dev|82 leaders)\)", text), text


def test_every_share_has_its_interval():
    """82.4 beside 83.7 was read as a difference, on questions too few to tell."""
    of = {"em": 80.0, "em_ci_low": 76.5, "em_ci_high": 83.4, "count": 575}
    cells = dict.fromkeys(paper.HOT_SWAP, {**of, "em": 70.0, "count": 98})
    text = format_report({"em": {"rag_token": 80.0}, "split": "test", "wall_secs": 1.0,
                          "recall_at_5": {"trained": 99.0}, "metrics": {"rag_token": of, **cells},
                          "hot_swap": dict.fromkeys(cells, 70.0), "stage_secs": {"train": 1.0},
                          "peak_rss_gib": 1.0, "seed": 0})
    assert "EM, rag_token" in text and text.count(" (76.5 to 83.4)") == 1 + len(cells)
    low, high = re.search(r"trained query encoder +99.0 \(([\d.]+) to ([\d.]+)\)", text).groups()
    assert 97 < float(low) < 99 < float(high) < 100, "of 575 questions"
    assert "over the 575 test questions, of the hot-swap over 98 leaders" in text


def test_what_training_adds_is_told_question_by_question():
    """Of two shares with intervals that overlap nobody sees whether one is above the other."""
    def evaluation(right, at):
        texts = ["It is Lima.", "Nothing."]
        answers = [types.SimpleNamespace(passages=[Passage("", "", t) for t in texts[::way]])
                   for way in at]
        return Evaluation({}, answers, right, [Example("q", "?", ("Lima",))] * len(at))

    trained = evaluation([True] * 60 + [False] * 40, [1] * 70 + [-1] * 30)
    frozen = evaluation([True] * 50 + [False] * 50, [1] * 30 + [-1] * 70)
    unknown = evaluation([None] * 100, [1] * 100)
    shares = {name: report._shares(of) for name, of in (
        ("rag_token", trained), ("frozen", frozen), ("rag_sequence", trained),
        ("frozen_sequence", unknown), ("closed_book", unknown))}
    added = report._above_frozen(shares)
    assert list(added) == ["EM, rag_token above frozen", "answer recall@1, rag_token above frozen"]
    em, recall = added.values()
    assert em["points"] == 10 and recall["points"] == 40
    assert 3 < em["ci_low"] < 6 and 14 < em["ci_high"] < 17, "both are right or wrong on 90 of 100"
    metrics = {name: {"em": 50.0, "em_ci_low": 40.0, "em_ci_high": 60.0, "count": 100}
               for name in ("rag_token", "frozen")}
    text = format_report({"em": {"rag_token": 60.0, "frozen": 50.0}, "split": "test",
                          "metrics": metrics,
                          "above_frozen": added, "wall_secs": 1.0, "stage_secs": {"train": 1.0},
                          "peak_rss_gib": 1.0, "seed": 0})
    row = next(line for line in text.splitlines() if line.startswith("EM, rag_token above frozen"))
    assert "+10.0 (+" in row and row.endswith("+5.7 (RAG-Token, NQ dev)")
    assert report._above_frozen({"rag_token": shares["rag_token"]}) == {}


def test_the_report_ends_with_a_command_that_asks_the_run(tmp_path, monkeypatch):
    """A command that names no workdir would ask the quickstart's model."""
    monkeypatch.chdir(tmp_path)
    splits = {name: [Example("1", f"Who is {name}'s?", ())] for name in ("train", "dev", "test")}
    job = Job(Config(runs=("fid",)), tmp_path / "runs" / "a b", types.SimpleNamespace(
        splits=splits), None)
    line = report.next_command(job).splitlines()[-1]
    assert shlex.split(line)[1:] == ["-m", "rag_jax.generate", "--workdir", "runs/a b", "--run",
                                     "fid", "Who is test's?"]
    documents = tmp_path / "mine"  # asked there, what is trained answers from them as they are now
    documents.mkdir()
    (documents / "ingest.json").touch()
    line = report.next_command(dataclasses.replace(job, workdir=documents / "trained"))
    assert shlex.split(line.splitlines()[-1])[3:] == ["--workdir", "mine", "Who is test's?"]


def test_recall_is_of_as_many_passages_as_are_read():
    """Of two passages it was printed as answer recall@5, beside the paper's."""
    report = {"metrics": {"rag_token": {"count": 4, "em": 50.0, "em_ci_low": 1.0,
                                        "em_ci_high": 99.0}},
              "split": "test", "em": {"rag_token": 50.0}, "stage_secs": {}, "wall_secs": 1.0,
              "peak_rss_gib": 1.0, "seed": 0, "recall_at_2": {"trained": 75.0, "frozen": 25.0}}
    table = format_report(report)
    assert "answer recall@2, trained query encoder" in table and "recall@5" not in table
