"""Fusion-in-Decoder and both heads through the entry points, on claims in files."""

import json
import math

import pytest

import rag_jax
from rag_jax.cli import convert, evaluate, generate, train
from rag_jax.config import ConfigError
from tests.end_to_end.commands import SMALLEST, data_flags, write_sources

pytestmark = pytest.mark.usefixtures("compiled_with_less_effort")
LABELS = ("SUPPORTS", "REFUTES", "NOT ENOUGH INFO")
SMALL = ["--config.retriever_warmup.steps=0", "--config.generator_warmup.steps=0",
         "--config.train.steps=2", "--config.eval.batch_size=12",
         *(f"--config.model.{name}=0" for name in (
             "retriever.dropout", "retriever.attention_dropout", "generator.dropout"))]
NAMED = f"--config.eval.labels={','.join(LABELS)}"
HEAD = ["--config.model.head=classification", NAMED]


@pytest.mark.parametrize("task", ["claims", "sentences"])
def test_every_task_of_the_countries_ends_in_a_report(task, tmp_path):
    """It swapped the indexes of two years for questions about leaders, which only one task has, and
    ended with an error after all of the training."""
    report = trained([], tmp_path, f"--config.data.world_task={task}", "--config.runs=rag_token")
    assert "rag_token" in report["em"] and "hot_swap" not in report


@pytest.fixture(scope="module")
def claims(tmp_path_factory):
    """Flags that name passages and claims of the usual form."""
    return data_flags(write_sources(
        tmp_path_factory.mktemp("claims"),
        [(f"Place {i}", f"Place {i} lies in region {i % 3}.") for i in range(12)],
        [(f"Place {i} lies in region 1.", LABELS[i % 3]) for i in range(12)]))


def trained(claims, folder, *flags):
    train.main([f"--config={SMALLEST}", f"--workdir={folder}", *SMALL, *claims, *flags])
    return json.loads((folder / "report.json").read_text())


def predictions(folder, run):
    file = folder / run / "evaluation" / "dev" / "predictions.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()]


def log_p_of_classes(record):
    """By class, in the order of a prediction, which ranks all of them and is certified."""
    names = [record["answer"], *(a["text"] for a in record["alternatives"])]
    assert sorted(names) == sorted(LABELS) and record["certified"]
    ranked = [record, *record["alternatives"]]
    return dict(zip(names, (r["log_prob"] for r in ranked), strict=True))


def exact_match(records):
    right = [record["answer"] == record["references"][0] for record in records]
    return 100 * sum(right) / len(right)


def generate_knows_the_classes_alone(folder, capsys):
    capsys.readouterr()
    generate.main([f"--workdir={folder}", "Place 3 lies in region 1."])
    shown = capsys.readouterr().out
    assert shown.count("log p = -") == 3 and all(label in shown for label in LABELS)
    with pytest.raises(ConfigError, match="was trained with the classes SUPPORTS, REFUTES, NOT"):
        generate.main([f"--workdir={folder}", "--config.eval.labels=A,B,C", "Is it?"])


def test_fusion_in_decoder_trains_evaluates_and_answers(claims, tmp_path, capsys):
    report = trained(claims, tmp_path, "--config.runs=fid")
    assert {"fid", "shuffled"} <= set(report["em"])
    evaluate.main([f"--workdir={tmp_path}"])
    for record in predictions(tmp_path, "fid"):
        assert record["log_prob"] < 0 and len(record["passages"]) == 2
        assert all(p["prior"] == p["posterior"] for p in record["passages"])
    capsys.readouterr()
    generate.main([f"--workdir={tmp_path}", "--heatmap=terminal", "Place 3 lies in region 1."])
    shown = capsys.readouterr().out
    assert "log p = -" in shown and "no heat map" in shown
    convert.main(["--from", str(tmp_path), "--to", str(tmp_path / "exported")])
    said = capsys.readouterr().out
    assert "BartForConditionalGeneration" in said and "DPRQuestionEncoder" in said


def test_a_classifier_trains_evaluates_and_answers(claims, tmp_path, capsys):
    """Marginalised and closed-book; new weights for the head alone."""
    runs = ("rag_token", "closed_book")
    report = trained(claims, tmp_path, *HEAD, f"--config.runs={','.join(runs)}")
    for run in runs:
        records = predictions(tmp_path, run)
        nll = []
        for record in records:
            p = log_p_of_classes(record)
            assert list(p.values()) == sorted(p.values(), reverse=True)
            nll.append(-p[record["references"][0]])
            assert len(record["passages"]) == (0 if run == "closed_book" else 2)
            assert sum(p["posterior"] for p in record["passages"]) == pytest.approx(
                float(run != "closed_book"), abs=1e-5)
        assert report["em"][run] == pytest.approx(exact_match(records))
        assert report["metrics"][run]["nll"] == pytest.approx(sum(nll) / len(nll), rel=1e-4)
    model = rag_jax.load(tmp_path)
    assert rag_jax.load(tmp_path, "closed_book").index is None
    assert {*model.params, "document_encoder"} == {*model.job.model.towers}
    assert model.has("document_encoder") and model.job.model.classes == 3
    generate_knows_the_classes_alone(tmp_path, capsys)
    with pytest.raises(ConfigError, match="config.eval.labels: .* there, .* now"):
        trained(claims, tmp_path, *HEAD, "--config.eval.labels=A,B,C")
    convert.main(["--from", str(tmp_path), "--to", str(tmp_path / "exported")])
    assert "without the classifier" in capsys.readouterr().out
    alone = tmp_path / "alone"
    convert.main(["--from", str(tmp_path), "--to", str(alone), "--run=closed_book"])
    said = capsys.readouterr().out.rstrip()
    assert said.endswith(f"no class; BartForConditionalGeneration in {alone}")


def test_a_label_is_told_by_one_token(claims, tmp_path, capsys):
    """The paper's FEVER: of every answer one token of its label trains and is chosen."""
    report = trained(claims, tmp_path, "--config.model.head=label_token", NAMED,
                     "--config.runs=rag_token")
    records = predictions(tmp_path, "rag_token")
    for record in records:
        assert sum(map(math.exp, log_p_of_classes(record).values())) == pytest.approx(1, abs=1e-5)
        assert len(record["token_log_probs"]) == 1
    assert report["em"]["rag_token"] == pytest.approx(exact_match(records))
    generate_knows_the_classes_alone(tmp_path, capsys)


@pytest.mark.parametrize("head", ["classification", "label_token"])
def test_an_answer_that_is_no_class_ends_before_anything_is_made(claims, tmp_path, head):
    flags = [f"--config.model.head={head}", "--config.eval.labels=SUPPORTS,REFUTES"]
    with pytest.raises(ValueError, match="train.jsonl: question 'train2': the answer 'NOT ENOUGH"):
        trained(claims, tmp_path, *flags)
    assert not (tmp_path / "data" / "memories").exists()
