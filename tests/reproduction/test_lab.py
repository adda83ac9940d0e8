"""A lab with real models of the smallest size: shared indexes, and weights of another cell."""

import dataclasses
import pathlib
import shutil

import pytest

from rag_jax.config import ConfigError, config_files, overrides
from rag_jax.reproduction.cells import Cell, Measurement, Question, exported
from rag_jax.reproduction.lab import Lab
from rag_jax.reproduction.worker import Worker

SMALLEST = pathlib.Path(__file__).parents[1] / "end_to_end" / "smallest.py"
SHORT = {"retriever_warmup.steps": 0, "generator_warmup.steps": 0, "train.steps": 1,
         "data.fictional_countries": 2}  # compiling the warm-ups would take most of the time


@pytest.fixture(scope="module")
def trained(one_device, tmp_path_factory):
    """(worker, first cell, a cell that starts from it and has been measured)."""
    root = tmp_path_factory.mktemp("lab")
    config = overrides.replace(config_files.load_file(str(SMALLEST)), SHORT)
    first = Cell("first", config, "rag_token")
    weights = root / exported("first", "rag_token")
    later = Cell("later", overrides.replace(config, {
        "data.world_seed": 0, "seed": 1, "train.steps": 0, "model.rag.pretrained": str(weights),
        "model.document_encoder.pretrained": str(weights / "document_encoder")}),
        "rag_token", first=first, start=first)
    worker = Worker(root)
    worker.work_out(later, Measurement("dev"))
    return worker, first, later


def read(worker, cell, what):
    return Lab(worker.root, None).result(cell, what)


def test_a_cell_starts_from_the_trained_weights_and_index_of_another(trained):
    worker, _, later = trained
    assert (worker.root / "first" / "rag_token").is_dir(), "trained before, as it was needed"
    assert (worker.root / exported("first", "rag_token") / "config.json").is_file()
    for name in ("data/memories", "indexes"):
        assert (worker.root / "later" / name).is_symlink()
        assert (worker.root / "later" / name).resolve() == worker.root / "first" / name
    found = read(worker, later, Measurement("dev"))
    assert found.metrics["count"] == len(found.predictions) == later.config.eval.max_examples


def test_cells_of_the_same_data_share_all_of_it(trained):
    worker, first, later = trained
    config = dataclasses.replace(later.config, data=first.config.data)
    worker._share(first, dataclasses.replace(later, folder="same", config=config))
    assert (worker.root / "same" / "data").resolve() == worker.root / "first" / "data"


def test_a_cell_shares_with_its_own_first_cell_alone(trained):
    """Data and indexes of another configuration were linked, and the record named this one."""
    worker, first, later = trained
    other = dataclasses.replace(first, config=overrides.replace(first.config, {"seed": 7}))
    for changed in ({"first": other, "start": None}, {"first": None, "start": other}):
        fresh = dataclasses.replace(later, folder="fresh", **changed)
        with pytest.raises(ConfigError, match="first was started with another .*\n.*seed: 0 there"):
            Worker(worker.root).work_out(fresh, Measurement("dev"))
        assert not (worker.root / "fresh" / "indexes").exists()


def test_a_root_that_was_moved_goes_on(trained, tmp_path):
    """Its configurations name folders below it, of which another path was another configuration."""
    worker, first, later = trained
    moved = tmp_path / "moved"
    shutil.copytree(worker.root, moved, symlinks=True)
    config = config_files.from_json(config_files.to_json(later.config).replace(
        str(worker.root), str(moved)))
    there = dataclasses.replace(later, config=config)
    shutil.rmtree(moved / "later" / "rag_token" / "measured")
    Worker(moved).work_out(there, Measurement("dev"))
    found, expected = read(Worker(moved), there, Measurement("dev")), read(
        worker, later, Measurement("dev"))
    assert found.predictions == expected.predictions
    other = dataclasses.replace(there, config=overrides.replace(config, {"seed": 9}))
    with pytest.raises(ConfigError, match="seed: 1 there, 9 now"):
        Worker(moved).work_out(other, Measurement("test"))


def test_a_lab_notes_what_is_there_and_what_is_not(trained):
    worker, _, later = trained
    lab = Lab(worker.root, None)
    assert lab.result(later, Measurement("dev")) and not lab.missing
    assert lab.result(later, Measurement("test")) is None
    assert lab.result(later, Question("Chile")) is None
    assert lab.missing == [(later, Measurement("test")), (later, Question("Chile"))]
    assert list(lab.used) == [("later", "rag_token")]


def test_an_answer_is_explained_and_kept(trained):
    worker, _, later = trained
    for question in ("Peru", "Fiji"):
        worker.work_out(later, Question(question))
    one, other = (Lab(worker.root, None).result(later, Question(q)) for q in ("Peru", "Fiji"))
    assert one != other, "each has its own answer, or its own probabilities"
    assert len(one.posterior) == len(one.tokens) and len(one.passages) == len(one.texts) == 2
    for row in one.posterior:
        assert sum(row) == pytest.approx(1, abs=1e-4)


def test_a_beginning_is_completed_and_kept(trained):
    """What was given must not be shown as what the generator knows."""
    worker, _, later = trained
    beginnings = [Question("Peru", text, "Lima", "") for text in ("The capital", "A")]
    for beginning in beginnings:
        worker.work_out(later, beginning)
    for beginning in beginnings:
        found = Lab(worker.root, None).result(later, beginning)
        assert found.answer.strip().startswith(beginning.beginning)
        assert len(found.tokens) == len(found.p) > 0 and all(0 < p <= 1 for p in found.p)
        assert "".join(found.tokens[:2]) not in beginning.beginning
    lab = Lab(worker.root, None)
    other = beginnings[0]._replace(subject="Chile")
    assert lab.result(later, other) is None and lab.missing == [(later, other)]


def test_other_passages_k_and_indexes_are_other_measurements(trained):
    worker, first, _ = trained

    def measured(*arguments, **named):
        worker.work_out(first, Measurement(*arguments, **named))
        return read(worker, first, Measurement(*arguments, **named))

    def ids(result):
        return [[p["id"] for p in record["passages"]] for record in result.predictions]

    plain, more = measured("dev"), measured("dev", k=3)
    swapped, shuffled = measured("dev", index="2016"), measured("dev", shuffled=True)
    assert {len(row) for row in ids(more)} == {3} and {len(row) for row in ids(plain)} == {2}
    assert all(i.startswith("2016/") for row in ids(swapped) for i in row)
    assert sorted(ids(shuffled)) == sorted(ids(plain))
    with pytest.raises(ConfigError, match="no questions 'leaders_2030' .* train, dev, test"):
        measured("leaders_2030")
    names = {f.parent.name for f in (worker.root / "first").rglob("measured/*/metrics.json")}
    assert names == {"dev", "dev-k_3", "dev-index_2016", "dev-shuffled"}
