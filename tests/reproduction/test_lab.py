"""A lab with real models of the smallest size: shared indexes, and weights of another cell."""

import json
import pathlib

import pytest

from rag_jax import overrides
from rag_jax.reproduction.cells import Cell, Measurement, exported
from rag_jax.reproduction.lab import Lab

SMALLEST = pathlib.Path(__file__).parents[1] / "end_to_end" / "smallest.py"
SHORT = {"retriever_warmup.steps": 0, "generator_warmup.steps": 0, "train.steps": 1,
         "data.fictional_countries": 2}  # compiling the warm-ups would take most of the time


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(lab, first cell, a cell that starts from it, the results of the latter)."""
    root = tmp_path_factory.mktemp("lab")
    config = overrides.replace(overrides.load_file(str(SMALLEST)), SHORT)
    first = Cell("first", config, "rag_token")
    weights = root / exported("first", "rag_token")
    later = Cell("later", overrides.replace(config, {
        "data.world_seed": 0, "seed": 1, "train.steps": 0, "model.rag.pretrained": str(weights),
        "model.document_encoder.pretrained": str(weights / "document_encoder")}),
        "rag_token", first=first, start=first)
    lab = Lab(root, None, work=True)
    return lab, first, later, lab.measure(later, Measurement("dev"))


def test_a_cell_starts_from_the_trained_weights_and_index_of_another(trained):
    lab, _, later, found = trained
    assert (lab.root / "first" / "rag_token").is_dir(), "trained before, as it was needed"
    assert (lab.root / exported("first", "rag_token") / "config.json").is_file()
    for name in ("data/memories", "indexes"):
        assert (lab.root / "later" / name).is_symlink()
        assert (lab.root / "later" / name).resolve() == lab.root / "first" / name
    assert found.metrics["count"] == len(found.predictions) == later.config.eval.max_examples


def test_results_on_disk_are_read_and_nothing_is_opened(trained, monkeypatch):
    lab, _, later, found = trained
    reader = Lab(lab.root, None, work=False)
    monkeypatch.setattr(Lab, "_warmed", None)
    assert reader.measure(later, Measurement("dev")) == found
    assert reader.measure(later, Measurement("test")) is None
    assert list(reader.used) == list(reader.missing) == [("later", "rag_token")]


def test_an_explained_answer_is_kept(trained, monkeypatch):
    lab, _, later, _ = trained
    one = lab.explain(later, "Peru")
    assert len(one.posterior) == len(one.tokens) and len(one.passages) == len(one.texts) == 2
    for row in one.posterior:
        assert sum(row) == pytest.approx(1, abs=1e-4)
    monkeypatch.setattr(Lab, "_warmed", None)
    assert Lab(lab.root, None, work=False).explain(later, "Peru") == one
    assert Lab(lab.root, None, work=False).explain(later, "Chile") is None


def test_other_passages_k_and_memories_are_other_measurements(trained):
    lab, first, _, _ = trained
    plain, more, swapped, shuffled = (
        lab.measure(first, what) for what in (
            Measurement("dev"), Measurement("dev", k=3), Measurement("dev", memory="2016"),
            Measurement("dev", shuffled=True)))

    def ids(result):
        return [[p["id"] for p in record["passages"]] for record in result.predictions]

    assert {len(row) for row in ids(more)} == {3} and {len(row) for row in ids(plain)} == {2}
    assert all(i.startswith("2016/") for row in ids(swapped) for i in row)
    assert sorted(ids(shuffled)) == sorted(ids(plain))
    assert lab.measure(first, Measurement("leaders_2030")) is None
    names = {f.parent.name for f in (lab.root / "first").rglob("measured/*/metrics.json")}
    assert names == {"dev", "dev-k_3", "dev-index_2016", "dev-shuffled"}
    assert json.loads((lab.root / "first" / "config.json").read_text())["eval"]["k"] == 0
