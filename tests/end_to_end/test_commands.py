"""evaluate, generate and build_index on a trained workdir, as a user runs them."""

import dataclasses
import functools
import json
import math
import shutil

import jax
import jax.monitoring
import numpy as np
import pytest
import tiny

import rag_jax
from rag_jax.config import ConfigError, overrides
from rag_jax.metrics.retrieval import has_answer
from rag_jax.models import rag
from rag_jax.retrieval.index import PassageIndex
from rag_jax.training import document_encoder
from rag_jax.training import workdir as workdirs
from rag_jax.training.answer_settings import make_answerer
from rag_jax.training.checkpoint import Checkpointer
from rag_jax.training.report import _Reporter
from rag_jax.training.run import open_job
from rag_jax.training.warm_up import warm_up_retriever
from tests.end_to_end.commands import finish, run


def test_evaluate_writes_metrics_and_predictions(uninterrupted):
    output = finish("evaluate", uninterrupted, "--split=dev")
    metrics = json.loads((uninterrupted / "rag_token/evaluation/dev/metrics.json").read_text())
    for name in ("em", "em_ci_low", "score", "answer_not_retrieved_count", "f1", "nll",
                 "r_precision", "answer_recall@1", "unique_passages", "retrieved_id_entropy",
                 "prior_entropy", "posterior_entropy"):
        assert name in metrics and name in output
    file = uninterrupted / "rag_token/evaluation/dev/predictions.jsonl"
    lines = file.read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert len(records) == metrics["count"]
    for record in records:
        assert record["log_prob"] <= 0 and len(record["passages"]) == 2
        assert sum(p["prior"] for p in record["passages"]) == pytest.approx(1, abs=1e-4)
        assert sum(p["posterior"] for p in record["passages"]) == pytest.approx(1, abs=1e-4)



def test_the_number_of_passages_is_chosen_on_dev_for_the_test(uninterrupted, tmp_path):
    """A number chosen on the test questions themselves would flatter the score."""
    shown = finish("evaluate", uninterrupted, "--choose-k=1,2", f"--out={tmp_path / 'out'}")
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    scores = {k: metrics[f"dev_score@{k}"] for k in (1, 2)}
    assert metrics["k"] == max(scores, key=scores.get) and "dev_score@2" in shown
    first, *_ = (tmp_path / "out" / "predictions.jsonl").read_text().splitlines()
    assert len(json.loads(first)["passages"]) == metrics["k"]


def test_the_families_of_metrics_are_computed_in_training_and_in_its_report(uninterrupted):
    assert '"dev/r_precision": ' in (uninterrupted / "rag_token/metrics.jsonl").read_text()
    report = json.loads((uninterrupted / "report.json").read_text())
    assert {"r_precision", "f1", "score"} <= set(report["metrics"]["rag_token"])


def test_the_frozen_recall_is_that_of_the_encoder_before_fine_tuning(uninterrupted):
    """Measured with the trained query encoder it could never show what training has changed."""
    job = open_job(workdirs.read(uninterrupted), uninterrupted)
    indexes = {name: PassageIndex.open(uninterrupted / "indexes" / name)
               for name in job.prepared.stores}
    before = warm_up_retriever(job)  # done: it is restored
    reporter, index = _Reporter(job, indexes), next(iter(indexes.values()))
    questions, recalls = job.tokens(reporter.split), []
    embed = jax.jit(functools.partial(rag.embed, make_answerer(job, index).model))
    for params in (before, tiny.perturbed(before, scale=1)):
        queries = np.asarray(embed(params["query_encoder"], questions.ids, questions.mask))
        rows = np.argsort(-(queries @ index.table.T), axis=1)[:, :2]
        hit = [any(has_answer(index.passages[int(row)].text, example.answers) for row in best)
               for best, example in zip(rows, questions.examples, strict=True)]
        recalls.append(100 * np.mean(hit))
        found = reporter.frozen_recall("rag_token", params)
        assert found["answer_recall@2"] == pytest.approx(recalls[-1])
    assert recalls[0] != recalls[1]
    report = json.loads((uninterrupted / "report.json").read_text())
    assert report["recall_at_2"]["frozen"] == pytest.approx(recalls[0])


def test_a_frozen_document_encoder_is_saved_once_and_read_for_passages_alone(
        uninterrupted, monkeypatch):
    run = uninterrupted / "rag_token"
    with Checkpointer(run, read_only=True) as checkpointer:
        names = {name.split("/")[0] for name in checkpointer._read_content(10)["params"]}
    assert names == {"query_encoder", "generator"}
    before = warm_up_retriever(open_job(workdirs.read(uninterrupted), uninterrupted))
    reads, read = [], document_encoder.read
    monkeypatch.setattr(document_encoder, "read", lambda *given: reads.append(1) or read(*given))
    rag = rag_jax.load(uninterrupted, run="rag_token")
    questions = ["Where is Peru?", "Why?"]
    assert rag.ask(questions) and rag.retrieve(questions) and len(rag.embed_queries(questions))
    assert not reads and "document_encoder" not in rag.params and rag.has("document_encoder")
    found = dataclasses.replace(rag, index=None).encoder("document_encoder")
    assert rag.encoder("document_encoder") is found and len(reads) == 1
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(before["document_encoder"]),
                          strict=True):
        np.testing.assert_array_equal(one, other)
    words = overrides.replace(rag.config, {"retrieval.retriever": "bm25"})
    assert document_encoder.reader(dataclasses.replace(rag.job, config=words), "bm25") is None
    with pytest.raises(ConfigError, match="has no document encoder: it has generator, query_enco"):
        dataclasses.replace(rag, document_encoder=None).embed_passages("Lima.")


def test_generate_answers_one_many_and_typed_questions(uninterrupted, tmp_path):
    shown = finish("generate", uninterrupted, "What is the capital of Peru?")
    assert "log p = -" in shown and "p(z|x)" in shown
    questions, out = tmp_path / "questions.txt", tmp_path / "answers.jsonl"
    questions.write_text("What is the capital of Peru?\n\nWho is the Emperor of Japan?\n")
    finish("generate", uninterrupted, f"--questions={questions}", f"--out={out}")
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert [a["question"] for a in answers] == questions.read_text().split("\n")[:4:2]
    assert all(len(a["passage_ids"]) == 2 for a in answers)
    typed = finish("generate", uninterrupted, "--interactive", stdin="Where is Peru?\nWhy?\n\n")
    assert typed.count("log p = ") == 2


def test_decoding_and_other_runs_are_flags(uninterrupted, tmp_path):
    out = tmp_path / "map.html"
    shown = finish("generate", uninterrupted, "--config.eval.num_beams=3", "--config.eval.prefix=A",
                   "--config.eval.num_return_sequences=2", f"--heatmap={out}", "Where is Peru?")
    assert shown.count("log p = ") == 2 and all(
        line.strip().startswith("A") for line in shown.splitlines() if "log p = " in line)
    assert "<table>" in out.read_text()
    classes = finish("generate", uninterrupted, "--config.eval.labels=Lima,Quito", "Where is Peru?")
    p = [math.exp(float(line.split("log p = ")[1].split(",")[0]))
         for line in classes.splitlines() if "log p = " in line]
    assert len(p) == 2 and sum(p) == pytest.approx(1, abs=2e-3) and p[0] >= p[1]
    wrong = run("generate", uninterrupted, "--config.eval.num_return_sequences=2", "Where?")
    assert wrong.returncode == 1 and "config.eval: num_return_sequences=2" in wrong.stderr
    wrong = run("generate", uninterrupted, "--run=rag_tokn", "Where is Peru?")
    assert wrong.returncode == 1 and "has the runs rag_token" in wrong.stderr


def test_a_swapped_memory_answers_from_other_passages(uninterrupted):
    now = finish("generate", uninterrupted, "Where is Peru?")
    then = finish("generate", uninterrupted, "--index=2016", "Where is Peru?")
    assert " 2018/" in now and " 2016/" not in now
    assert " 2016/" in then and " 2018/" not in then


def test_the_second_question_and_a_swapped_index_compile_nothing(uninterrupted):
    trained = rag_jax.load(uninterrupted)
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, secs, **_: compiled.append(event) if "backend_compile" in event else None)
    trained.ask(["Where is Peru?"])
    assert compiled, "the listener must see the first question's compilations"
    compiled.clear()
    trained.ask(["Which country borders the Democratic Republic of the Congo?"])
    swapped = rag_jax.load(uninterrupted, index="2016")
    compiled.clear()  # restoring parameters may compile copies
    swapped.ask(["Who is the President of Peru?"])
    assert compiled == []


def test_build_index_from_a_file_and_its_guards(uninterrupted, tmp_path):
    """OUT.passages, a name for working files, was removed, though it was what should be read."""
    rows = [{"id": f"{i}", "title": f"Place {i}", "text": f"Place {i} lies in region {i}."}
            for i in range(40)]
    extracted, out = tmp_path / "index.passages" / "AA", tmp_path / "index"
    extracted.mkdir(parents=True)
    (extracted / "wiki_00").write_text("\n".join(map(json.dumps, rows)))
    built = finish("build_index", uninterrupted, f"--passages={extracted.parent}", f"--out={out}")
    assert "40 passages" in built and "recall@10" in built
    assert [path.name for path in extracted.iterdir()] == ["wiki_00"]
    assert not list(out.rglob("*.rag_jax-*")), "no working files are left"
    moved = tmp_path / "moved"
    out.rename(moved)
    answered = finish("generate", uninterrupted, f"--index={moved}", "Where is Place 7?")
    assert "Place" in answered
    passages = tmp_path / "more.tsv"
    passages.write_text("id\ttitle\ttext\n1\tA\tA.\n2\tB\tB.\n3\tC\tC.\n4\tonly two columns\n")
    bad = run("build_index", uninterrupted, f"--passages={passages}", f"--out={out}")
    assert bad.returncode == 1 and "more.tsv:5" in bad.stderr and "Traceback" not in bad.stderr


def test_an_index_is_edited_by_the_same_command(uninterrupted, tmp_path):
    out, more = tmp_path / "index", tmp_path / "more.tsv"
    shutil.copytree(uninterrupted / "indexes" / "2018", out)
    before = PassageIndex.open(out)
    gone = before.passages[3].id
    more.write_text("id\ttitle\ttext\n1\tAtlantis\tThe capital of Atlantis is A.\n")
    edited = finish("build_index", uninterrupted, "--update", f"--out={out}", f"--add={more}",
                    "--delete", gone)
    assert f"{before.size} passages, exact, 1 added and 1 deleted since it was built" in edited
    assert "recall@10 against exact search 1.0000" in edited
    assert PassageIndex.open(out).passages.row_of("1") == before.size
    for flags, said in (((f"--add={more}",), "--add goes with --update"),
                        (("--update",), "--update goes with --add, --delete or --compact"),
                        ((), "name --passages")):
        wrong = run("build_index", uninterrupted, f"--out={out}", *flags)
        assert wrong.returncode == 2 and said in wrong.stderr


def test_an_index_of_another_encoder_is_refused(uninterrupted, tmp_path):
    foreign = tmp_path / "foreign"
    shutil.copytree(uninterrupted / "indexes" / "2018", foreign)
    from rag_jax.retrieval.manifest import MANIFEST, read_manifest
    from rag_jax.retrieval.versions import current, point

    version = current(foreign)
    manifest = read_manifest(version)
    manifest.pop("checksum", None)
    manifest["encoder_fingerprint"] = "another"
    MANIFEST.write(version, manifest)
    point(foreign, version)
    refused = run("generate", uninterrupted, f"--index={foreign}", "Where is Peru?")
    assert refused.returncode == 1
    assert "encoder" in refused.stderr and "Traceback" not in refused.stderr


def test_missing_workdir_index_and_question_are_one_line_errors(uninterrupted, tmp_path):
    for flags in (["--workdir", str(tmp_path / "none"), "x"], ["--index=nowhere", "x"], []):
        failed = run("generate", uninterrupted, *flags)
        assert failed.returncode != 0 and "Traceback" not in failed.stderr, failed.stderr
