"""Runs that retrieve by BM25, or may answer without a passage, from training to the last answer."""

import json

import pytest

import rag_jax
from rag_jax.config import ConfigError
from tests.end_to_end.commands import begin, finish, module_to_its_end, run

FEW = ("--config.train.steps=3", "--config.train.eval_every=3", "--config.eval.max_examples=2")


@pytest.fixture(scope="module")
def words(trained, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("bm25")
    begin(workdir, trained, "generator")
    return workdir, finish("train", workdir, "--config.runs=bm25_sequence", *FEW)


def test_a_bm25_run_makes_no_encoder_and_no_embedding(words):
    workdir, said = words
    assert not (workdir / "retriever").exists() and not (workdir / "indexes").exists()
    assert "bm25" in said and "retriever warm-up" not in said
    metrics = json.loads((workdir / "report.json").read_text())["metrics"]["bm25_sequence"]
    assert metrics["answer_recall@2"] > 20 and 0 < metrics["prior_entropy"] < 0.7


def convert(workdir, out):
    return module_to_its_end("rag_jax.convert", f"--from={workdir}", f"--to={out}")


def test_a_bm25_run_is_exported_as_the_generator_that_it_is(words, tmp_path):
    done = convert(words[0], tmp_path / "x")
    assert done.stdout.startswith("BartForConditionalGeneration in"), done.stderr


def evaluated(workdir, folder, *flags):
    finish("evaluate", workdir, f"--out={folder}", *flags)
    lines = (folder / "predictions.jsonl").read_text().splitlines()
    return json.loads((folder / "metrics.json").read_text()), list(map(json.loads, lines))


def test_other_depths_and_memories_are_evaluated_with_nothing_retrained(words, tmp_path):
    """Points of figure 3, and the hot-swap."""
    deep, lines = evaluated(words[0], tmp_path / "7", "--config.eval.k=7")
    assert {len(line["passages"]) for line in lines} == {7}
    swapped, others = evaluated(words[0], tmp_path / "1", "--config.eval.k=1", "--index=2016")
    assert {len(line["passages"]) for line in others} == {1}
    assert deep["answer_recall@7"] > deep["answer_recall@1"] > swapped["answer_recall@1"]
    assert sum(p["prior"] for p in lines[0]["passages"]) == pytest.approx(1, abs=1e-5)


def test_a_memory_is_built_for_a_bm25_run(words, tmp_path):
    passages = tmp_path / "more.tsv"
    passages.write_text("id\ttitle\ttext\n7\tPeru\tThe President of Peru is a llama.\n"
                        "8\tChile\tSantiago is a city.\n9\tBolivia\tLa Paz is high.\n")
    said = finish("build_index", words[0], f"--passages={passages}", f"--out={tmp_path / 'i'}")
    assert "3 passages, bm25" in said
    found = finish("generate", words[0], "Who is the President of Peru?",
                   f"--index={tmp_path / 'i'}")
    best = [line for line in found.splitlines() if line.strip().startswith(("0.", "1."))][0]
    assert best.split()[2] == "7" and "llama" in best


def test_a_run_trains_and_answers_with_embeddings_and_words(trained, tmp_path):
    begin(tmp_path, trained, "retriever", "generator", "indexes")
    finish("train", tmp_path, "--config.runs=rag_token", "--config.retrieval.retriever=hybrid",
           "--config.retrieval.bm25_weight=0.3", "--config.train.bm25_weight_rate=100",
           "--config.train.full_information=0", *FEW)
    metrics = json.loads((tmp_path / "report.json").read_text())["metrics"]["rag_token"]
    assert metrics["answer_recall@2"] > 20
    seen = [json.loads(line).get("rag_token/hybrid_weight") for line in (
        tmp_path / "rag_token" / "metrics.jsonl").read_text().splitlines()]
    seen = [weight for weight in seen if weight is not None]
    assert seen[0] == pytest.approx(0.3) and metrics["hybrid_weight"] != pytest.approx(0.3, rel=0.1)
    rag = rag_jax.load(tmp_path)
    answer, found = rag.ask("Who is the President of Peru?")[0], rag.retrieve(
        "Who is the President of Peru?")[0]
    assert [p.prior for p in found] == pytest.approx(answer.prior, rel=1e-3)
    again = rag_jax.load(tmp_path)
    again.choose_weight([metrics["hybrid_weight"]])  # a fixed one of the same value
    assert again.ask("Who is the President of Peru?")[0].prior == pytest.approx(
        answer.prior, rel=1e-4)
    assert again.config.train.bm25_weight_rate is None
    none = {"train.bm25_weight_rate": None}
    for fields, message in (
            ({"retrieval.bm25_weight": 0.5}, "bm25_weight=0.5: .* weight of .* leave it at 0.3"),
            ({"retrieval.retriever": "dpr", **none}, "retriever=dpr: .* leave it at hybrid"),
            ({"retrieval.fusion": "reciprocal_rank", **none}, "fusion=rec.* leave it at convex"),
            (none, "bm25_weight_rate=none: .* has learned its .* leave it at 100")):
        with pytest.raises(ConfigError, match=f"config.[a-z]+.{message}"):
            rag_jax.load(tmp_path, config=fields)
    done = convert(tmp_path, tmp_path / "out")
    assert ("set config.retrieval.retriever=hybrid config.retrieval.bm25_weight="
            f"{metrics['hybrid_weight']:.4g};") in done.stdout
    said = finish("evaluate", tmp_path, "--choose-weight=0,0.3,1")
    assert "bm25_weight" in said and "dev_mrr@2, weight 0.3" in said
    wrong = run("train", tmp_path, "--config.retrieval.retriever=hybrid",
                "--config.retrieval.where=device")
    assert wrong.returncode == 1 and "words are searched on the host" in wrong.stderr


@pytest.fixture(scope="module")
def null(trained, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("null")
    begin(workdir, trained, "retriever", "generator", "indexes")
    finish("train", workdir, "--config.runs=rag_token", "--config.model.null_document=mlp",
           "--config.train.collapse_guard=stop", "--config.train.collapse_window=1", *FEW)
    return workdir


def test_a_null_document_is_trained_saved_and_answered_with(null, tmp_path):
    metrics, lines = evaluated(null, tmp_path / "out")
    assert {line["passages"][-1]["id"] for line in lines} == {""}
    assert {len(line["passages"]) for line in lines} == {3}
    shares = [line["passages"][-1]["prior"] for line in lines]
    assert metrics["null_prior"] == pytest.approx(sum(shares) / len(shares), rel=1e-4)
    assert 0 < metrics["null_prior"] < 1 and metrics["retrieval_utility"] != 0
    shown = finish("generate", null, "Who is the President of Peru?", "--heatmap")
    assert shown.count("(no passage)") == 2


def test_a_dense_index_is_refused_by_a_bm25_run(words, null):
    done = run("generate", words[0], "Who?", f"--index={null / 'indexes' / '2018'}")
    assert done.returncode == 1 and "an index of kind 'exact', and bm25 is needed" in done.stderr


def test_a_guarded_run_tells_what_it_retrieves(null):
    lines = map(json.loads, (null / "rag_token" / "metrics.jsonl").read_text().splitlines())
    found = [line["rag_token/effective_passages"] for line in lines
             if "rag_token/effective_passages" in line]
    assert len(found) == 3 and all(2 <= value <= 16 for value in found)


def test_transformers_has_no_null_document(null, tmp_path):
    done = convert(null, tmp_path / "x")
    assert done.returncode == 1 and "null document" in done.stderr


def test_the_runs_of_two_commands_are_both_there(words):
    """Last: it adds to the workdir."""
    workdir = words[0]
    before = json.loads((workdir / "report.json").read_text())["metrics"]["bm25_sequence"]
    finish("train", workdir, "--config.runs=bm25", "--config.eval.k=1", *FEW)
    report = json.loads((workdir / "report.json").read_text())
    assert list(report["em"]) == ["bm25_sequence", "bm25"]
    assert report["metrics"]["bm25_sequence"] == before, "k=1 is for the other run"
    assert "answer_recall@2" not in report["metrics"]["bm25"]
    assert "log p = " in finish("generate", workdir, "--run=bm25_sequence", "Who?")
