"""Cells of the toy scale: seeds, shared warm-up, and nothing but what is asked for."""

import importlib.util

from rag_jax.cli import reproduce
from rag_jax.data.task_files import FEVER_LABELS
from rag_jax.reproduction import run
from rag_jax.reproduction.toy import OBJECTIVES, TASKS, Toy


def test_seeds_are_of_fine_tuning_from_one_warm_up_and_on_the_same_data(tmp_path):
    first, *others = Toy(tmp_path, seeds=3).cells("nq", "rag_token")
    assert [c.folder for c in (first, *others)] == ["questions-0", "questions-1", "questions-2"]
    assert first.first is None and not first.config.model.sources
    for seed, cell in enumerate(others, 1):
        assert cell.first.folder == "questions-0" and cell.config.seed == seed
        assert set(cell.config.model.sources.values()) == {str(tmp_path / "questions-0")}
    assert {c.config.data.world_seed for c in (first, *others)} == {0}


def test_cells_are_measured_on_all_questions(tmp_path):
    """The quickstart evaluates on some dev questions while it trains; a table of so many test
    questions would say that it is of all."""
    scale = Toy(tmp_path, seeds=1)
    cells = [scale.cells(*of)[0] for of in (
        ("nq", "rag_token"), ("fever3", "closed_book"), ("start_70", "rag_token"),
        ("objective_marginal", "frozen"))]
    assert {cell.config.eval.max_examples for cell in cells} == {0}


def test_tasks_are_of_their_form_and_ablations_are_on_the_questions_with_one_seed(tmp_path):
    scale = Toy(tmp_path, seeds=3)
    for task, world_task in TASKS.items():
        cell = scale.cells(task, "rag_sequence")[0]
        assert cell.config.data.world_task == world_task
        assert len(scale.cells(task, "frozen")) == (task == "nq")
    claims, = scale.cells("fever3", "closed_book")
    assert claims.config.eval.labels == FEVER_LABELS and claims.config.eval.metrics == ("fever",)
    with_words = importlib.util.find_spec("bm25s") and importlib.util.find_spec("Stemmer")
    assert len(scale.cells("nq", "bm25")) == bool(with_words)
    assert scale.cells("tqa", "rag_token") == scale.cells("nq", "fid") == []


def test_what_is_said_of_how_a_task_reads_is_what_its_configuration_says(tmp_path):
    for scale in (Toy(tmp_path), Toy(tmp_path, reduced=True)):
        for task, world_task in TASKS.items():
            for cell in scale.cells(task, "rag_token")[:1]:
                config, rate = cell.config, cell.config.train.query_encoder_rate
                by = "frozen" if rate is None else "trained"
                assert f"{world_task}: {cell.reading}" in scale.about
                assert cell.reading.startswith(f"{config.retrieval.k} passage")
                assert cell.reading.endswith(f"a {by} query encoder")
    assert scale.cells("nq", "closed_book")[0].reading == "no passages"


def test_a_retriever_of_questions_is_not_asked_what_is_no_question(tmp_path):
    scale = Toy(tmp_path)
    for task in TASKS:
        cell = scale.cells(task, "rag_token")[-1]
        assert cell.config.model.generator.pretrained == str(tmp_path / "questions-0")
        assert cell.own_retriever == (task in ("fever3", "jeopardy"))
        assert bool(cell.config.model.retriever.pretrained) != cell.own_retriever


def test_the_reduced_form_has_five_models(tmp_path):
    wanted = run.lacking(reproduce.NAMES, tmp_path, Toy(tmp_path, seeds=1, reduced=True))[0]
    assert len({(cell.folder, cell.run) for cell, _ in wanted}) == 5
    assert {cell.config.train.steps for cell, _ in wanted} == {4}


def test_objectives_have_one_reader_one_weak_retriever_and_equal_compute(tmp_path):
    """A forward pass more was for nothing, and two objectives in one folder were one model."""
    scale = Toy(tmp_path, seeds=2)
    cells = {(objective, name, seed): cell for name, objectives in OBJECTIVES.items()
             for objective in objectives
             for seed, cell in enumerate(scale.cells(f"objective_{objective}", name))}
    assert len({(cell.folder, cell.run) for cell in cells.values()}) == len(cells) == 20
    for (objective, name, seed), cell in cells.items():
        config = cell.running
        assert config.train.retriever_objective == objective and config.seed == seed
        again = config.retrieval.k if objective == "loop" else 1
        step = 3 + again * (name == "fid_joint")
        whole = 3 * cells["marginal", "frozen", 0].config.train.steps
        assert whole - step < config.train.steps * step <= whole
        assert (cell.start.folder, cell.start.run) == ("questions-0", "frozen")
        assert config.model.generator.pretrained == str(tmp_path / "questions-0/exported_frozen")
        first = objective == "marginal" and seed == 0
        assert cell.first.folder == ("questions-0" if first else "objective-marginal-0")
        assert config.model.retriever.pretrained == (
            "" if first else str(tmp_path / "objective-marginal-0"))
    assert scale.cells("objective_adist", "rag_token") == []


def test_starts_differ_in_their_warm_up_alone(tmp_path):
    """One generator for all, or what a start is worth would be its generator's luck."""
    scale = Toy(tmp_path, seeds=2)
    assert len(scale.starts) == 6 and scale.cells("start_36", "frozen") == []
    for start in scale.starts:
        for run_name in ("frozen", "rag_token"):
            for seed, cell in enumerate(scale.cells(f"start_{start}", run_name)):
                assert cell.folder == f"start-{start}-{seed}" and cell.run == run_name
                assert cell.config.retriever_warmup.steps == start
                assert cell.config.seed == seed and cell.own_retriever
                if cell.first is not None:
                    assert cell.first.folder == "start-35-0"
                    assert list(cell.config.model.sources) == ["generator"]
