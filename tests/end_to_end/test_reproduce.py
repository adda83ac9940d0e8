"""rag_jax.reproduce from beginning to end in its reduced form, and taken up again."""

import json
import re

import pytest

from rag_jax import paper
from tests.end_to_end.commands import module_to_its_end


def reproduce(workdir, *arguments):
    return module_to_its_end("rag_jax.reproduce", *arguments, f"--workdir={workdir}")


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("reproduce")
    finished = reproduce(workdir, "all", "--reduced", "--seeds=1")
    assert finished.returncode == 0, finished.stderr[-3000:]
    return workdir, finished.stdout


def test_one_report_with_every_experiment_and_its_pictures(done):
    workdir, printed = done
    text = (workdir / "report.md").read_text("utf-8")
    assert "REDUCED" in text and str(workdir / "report.md") in printed
    for row in (r"\| RAG-Token \| \d+\.\d \[.*\] / 44\.1 \|",
                r"\| top 1 \| \d+\.\d \[.*\] / 71\.0 \|",
                r"\| 2016 \| 2018 \| \d+\.\d \[.*\] / 4\.0 \|", r"Input: Denmark\. Output:",
                r"\| Peru \| This \| This.* \| Lima \| too short \| (yes|no) \|",
                r"\| RAG-Sequence \| not run / 44\.5 \|",
                r"\| BART, closed book \| \d+\.\d \[.*\] / - \|"):
        assert re.search(f"^{row}" if row.startswith(r"\|") else row, text, re.M), row
    pictures = {file.name: file.read_bytes() for file in (workdir / "figures").iterdir()}
    assert pictures.keys() == {"figure2.png", "partial_decoding.png",
                               *(f"figure3-{name}.png" for name in paper.FIGURE3)}
    for name, content in pictures.items():
        assert content.startswith(b"\x89PNG\r\n\x1a\n") and f"figures/{name}" in text
    assert (workdir / "report.html").stat().st_size > 10_000
    key = json.loads((workdir / "pairwise" / "key.json").read_text())
    assert len(key) > 16 and (workdir / "pairwise" / "sheet.html").exists()


def test_no_model_is_trained_twice(done):
    _, printed = done
    trained = re.findall(r"^== (rag_token|closed_book)$", printed, re.M)
    assert sorted(trained) == ["closed_book"] * 2 + ["rag_token"] * 3


def test_what_is_done_is_not_done_again_and_what_is_lost_is(done):
    workdir, _ = done
    report = (workdir / "report.md").read_text("utf-8")
    measured = workdir / "questions-0" / "rag_token" / "measured" / "test"
    before = (measured / "predictions.jsonl").read_bytes()
    (measured / "metrics.json").unlink()  # as if it had been killed before the end
    again = reproduce(workdir, "table1", "--reduced", "--seeds=1")
    assert again.returncode == 0, again.stderr[-3000:]
    assert re.findall(r"^== .*: .*$", again.stdout, re.M) == ["== questions-0/rag_token: test"]
    assert (measured / "predictions.jsonl").read_bytes() == before
    dates = r"\d{4}-\d\d-\d\d( to \d{4}-\d\d-\d\d)?"  # midnight may pass in between
    assert re.sub(dates, "", (workdir / "report.md").read_text("utf-8")) == re.sub(
        dates, "", report)


@pytest.mark.parametrize(("arguments", "told"), [
    (["table7"], "invalid choice: 'table7'"),
    (["table1", "--seeds=0"], "--seeds=0: must be at least 1"),
    (["table1", "--tally", "x.csv"], "--tally belongs to pairwise"),
    (["table1", "--scale=paper", "--reduced"], "--reduced belongs to --scale toy"),
    (["table1", "--scale=paper", "--seeds=7"], "--seeds belongs to --scale toy"),
    (["table1", "--data_dir=x"], "--data_dir belongs to --scale paper"),
    (["table1", "--execute"], "--execute belongs to --scale paper"),
])
def test_arguments_that_do_not_fit_are_refused(tmp_path, arguments, told):
    failed = reproduce(tmp_path, *arguments)
    assert failed.returncode == 2 and told in failed.stderr


def test_the_papers_scale_prints_its_recipe_and_reports_nothing_that_was_not_run(tmp_path):
    printed = reproduce(tmp_path, "table1", "--scale=paper")
    assert printed.returncode == 0, printed.stderr[-3000:]
    assert "8 models are not measured" in printed.stdout
    for part in ("configs/paper.py:table1/nq/rag_token", "v4-8", "rag_jax.convert",
                 "44.1 EM on test"):
        assert part in printed.stdout, part
    assert "not run / 44.1" in (tmp_path / "report.md").read_text("utf-8")
    wrong = reproduce(tmp_path, "pairwise", "--tally", str(tmp_path / "none.csv"))
    assert wrong.returncode == 1 and "key.json: no such file" in wrong.stderr


def test_objectives_of_the_retriever_are_compared(tmp_path):
    """Fusion-in-Decoder's retriever trains from a start that another folder has warmed up."""
    finished = reproduce(tmp_path, "objectives", "--reduced", "--seeds=1")
    assert finished.returncode == 0, finished.stderr[-3000:]
    text = (tmp_path / "report.md").read_text("utf-8")
    assert re.search(r"^\| Fusion-in-Decoder, adist \| \d+ \| \d.* / 40\.9 \| ", text, re.M)
    assert (tmp_path / "figures" / "objectives.png").exists()


def test_a_retriever_learns_from_answers_beside_its_frozen_start(tmp_path):
    """With the curves of its training, which come from the run's own folder. Two passages, as here,
    have no recall@5."""
    finished = reproduce(tmp_path, "learned_retrieval", "--reduced", "--seeds=1")
    assert finished.returncode == 0, finished.stderr[-3000:]
    text = (tmp_path / "report.md").read_text("utf-8")
    assert re.search(r"^\| 35 \| \d.* \| not run \|$", text, re.M)
    assert (tmp_path / "figures" / "learned_retrieval.png").exists()
