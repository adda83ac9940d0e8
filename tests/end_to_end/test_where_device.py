"""Retrieval on the devices, through the commands that a user types."""

import json

import jax.monitoring
import pytest

import rag_jax
from rag_jax.retrieval.manifest import read_manifest
from rag_jax.retrieval.versions import current
from tests.end_to_end.commands import begin, finish

DEVICE = "--config.retrieval.where=device"


def losses(workdir):
    lines = (workdir / "rag_token" / "metrics.jsonl").read_text().splitlines()
    return [r["rag_token/nll"] for r in map(json.loads, lines) if "rag_token/nll" in r]


def test_training_on_the_devices_follows_training_with_the_host(trained, tmp_path):
    """Same passages, same padding (one bucket), same dropout: the losses of every step agree."""
    begin(tmp_path, trained, "retriever", "generator")
    finish("train", tmp_path, DEVICE, "--config.retrieval.device_dtype=float32")
    assert losses(tmp_path) == pytest.approx(losses(trained), rel=1e-3)
    assert len(losses(tmp_path)) == 10
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["index"]["2018"]["recall"] == 1.0
    assert set(report["hot_swap"]) == {
        f"index{a}_leaders{b}" for a in ("2016", "2018") for b in ("2016", "2018")}


def test_a_run_trained_with_the_host_answers_on_the_devices(uninterrupted):
    question = ["Who is the President of Peru?"]
    host = rag_jax.load(uninterrupted).ask(question)[0]
    config = {"retrieval.where": "device", "retrieval.device_dtype": "float32"}
    trained = rag_jax.load(uninterrupted, config=config)
    found = trained.ask(question)[0]
    assert (found.text, found.passage_ids) == (host.text, host.passage_ids)
    swapped = rag_jax.load(uninterrupted, index="2016", config=config)
    assert swapped.index.capacity == trained.index.capacity
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, secs, **_: compiled.append(event) if "backend_compile" in event else None)
    then = swapped.ask(["Where is Peru?"])[0]
    assert compiled == [] and all(name.startswith("2016/") for name in then.passage_ids)


def test_evaluate_generate_and_build_index_on_the_devices(uninterrupted, tmp_path):
    assert "answer_recall@1" in finish("evaluate", uninterrupted, "--split=dev", DEVICE)
    assert " 2018/" in finish("generate", uninterrupted, DEVICE, "Where is Peru?")
    passages = tmp_path / "more.tsv"
    rows = [f"{i}\tPlace {i}\tPlace {i} lies in region {i}." for i in range(40)]
    passages.write_text("id\ttitle\ttext\n" + "\n".join(rows) + "\n")
    built = finish("build_index", uninterrupted, f"--passages={passages}",
                   f"--out={tmp_path / 'index'}", DEVICE)
    assert "40 passages" in built and "device (bfloat16), recall@10" in built


def test_a_trained_document_encoder_has_indexes_of_its_own(trained, tmp_path):
    begin(tmp_path, trained, "retriever", "generator")
    finish("train", tmp_path, DEVICE, "--config.train.document_encoder=refresh",
           "--config.train.refresh_every=2", "--config.train.refresh_passages=64",
           "--config.train.steps=5")
    lines = (tmp_path / "rag_token" / "metrics.jsonl").read_text().splitlines()
    stale = [r["rag_token/staleness"] for r in map(json.loads, lines) if "rag_token/staleness" in r]
    assert stale[0] == 0 and len(stale) == 5 and max(stale) > 0
    own, first = (
        read_manifest(current(tmp_path / folder / "indexes" / "2018"))["encoder_fingerprint"]
        for folder in ("rag_token", "."))
    assert own != first
    shown = finish("generate", tmp_path, "--index=2016", "Where is Peru?")
    assert " 2016/" in shown and " 2018/" not in shown
