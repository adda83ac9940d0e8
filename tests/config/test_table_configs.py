"""The configurations of the paper's tables: complete, true to the paper, and of fitting shapes.

No weight is allocated: shapes are traced at full size, once for what several cells have in common.
"""

import dataclasses
import functools
import hashlib
import json
import shlex

import jax
import numpy as np
import pytest

from rag_jax import api, paper, parallel
from rag_jax.aot.chips import CHIPS
from rag_jax.aot.costs import flops
from rag_jax.cli import train
from rag_jax.config import ConfigError, MeshConfig, config_files, overrides, rules
from rag_jax.models import rag
from rag_jax.reproduction.full import Full
from rag_jax.training import step, workdir
from rag_jax.training.optim import make_optimizer
from rag_jax.types import Batch

CELLS = {  # of the models that the paper trains, by what a table scores
    "table1": (("nq", "tqa", "wq", "ct"), ("rag_token", "rag_sequence")),
    "table2": (("jeopardy", "msmarco", "fever3", "fever2"),
               ("closed_book", "rag_token", "rag_sequence")),
    "table6": (("nq", "tqa", "wq", "ct", "jeopardy", "msmarco", "fever3", "fever2"),
               ("bm25", "bm25_sequence", "frozen", "frozen_sequence")),
}
CELLS = [f"{table}/{task}/{run}" for table, (tasks, runs) in CELLS.items()
         for task in tasks for run in runs
         if not (task.startswith("fever") and run.endswith("_sequence"))]
TABLES = {"table1": paper.TABLE1, "table2": paper.TABLE2, "table6": paper.TABLE6}
# Of the fields that cells set, as sorted JSON; another one means another recipe.
RECIPES = "cb6bf97c1c06c35e54ab5edd809d8c3da145f3e38b5701b94bbdb6c271091b39"


def load(cell):
    return config_files.load_file(f"configs/paper.py:{cell}")


def test_every_cell_of_ours_can_be_named():
    assert len(CELLS) == 46 and set(CELLS) == set(paper.CELLS)


def test_the_recipes_are_those_that_were_published():
    """A default or a helper that changes would change 46 experiments without a word."""
    fields = {cell: {name: overrides.value(config, name) for name in overrides.not_default(config)}
              for cell, config in ((cell, load(cell)) for cell in CELLS)}
    assert hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest() == RECIPES


@pytest.mark.parametrize("cell", CELLS)
def test_a_cell_says_its_command_hardware_time_and_the_papers_score(cell):
    table, task, run = cell.split("/")
    text = config_files.about(f"configs/paper.py:{cell}")
    config = load(cell)
    assert config.runs == (run,) and f"--config=configs/paper.py:{cell} " in text
    for column, value in TABLES[table][run].items():
        if column.split(".")[0] == task:
            assert f" {value} " in text.splitlines()[0]
    assert "Hardware:" in text and f"Time: {config.train.steps:,} steps" in text
    assert "v4-8" in text and "not measured" in text
    assert ("rag_jax.convert" in text) == bool(set(config.model.sources.values())
                                               & {f"runs/paper/nq/exported_{run}"})
    assert f"at least {least_hours(cell):.1f} hours" in " ".join(text.split())


def test_help_of_a_cell_says_what_it_costs_and_scores(capsys):
    with pytest.raises(SystemExit):
        train.main(["--config=configs/paper.py:table2/msmarco/rag_token", "--help"])
    text = capsys.readouterr().out
    assert "Table 2, MS-MARCO, RAG-Token: 40.1 ROUGE-L and 41.5 BLEU-1 on test." in text
    assert "at least 1.1 hours" in text and "test set are hidden: dev alone" in text
    assert "--config.train.steps=24019" in text


@pytest.mark.parametrize("cell, told", [
    ("", "configs/paper.py: name a cell after ':'"),
    (":table1/nq/rag_tokn", "no cell 'table1/nq/rag_tokn'; did you mean table1/nq/rag_token"),
    (":table1/nq/closed_book", "no cell 'table1/nq/closed_book'; did you mean table2/"),
    (":nq/rag", "or TASK/RUN, with a task of nq"),
])
def test_a_wrong_cell_is_told_near_matches_and_all_cells(cell, told):
    with pytest.raises(ConfigError) as error:
        config_files.load_file(f"configs/paper.py{cell}")
    assert told in str(error.value)
    assert "\n  table6/{fever3,fever2}/{bm25,frozen}\n" in str(error.value)


@functools.cache
def initial(model, rates, optimizer):
    """The optimiser, and the shapes and shardings of the state; the same for many cells."""
    transform = make_optimizer(optimizer, 1000, dict(rates))
    _, state, shardings = step.init_state(model, model.towers, transform, 0,
                                          parallel.make_mesh(MeshConfig()))
    return transform, state, shardings


@functools.cache
def traced(model, rates, optimizer, smoothing, shape, targets):
    """A training step of `shape` = (batch, passages, source), without allocating.

    Returns the shapes of the state, of the state after it and of the metrics; and its operations.
    """
    transform, state, shardings = initial(model, rates, optimizer)
    B, K, S = shape
    struct = jax.ShapeDtypeStruct

    def pair(*size):
        return struct(size, np.int32), struct(size, np.bool_)

    further = {"doc_scores": struct((B, K), np.float32)} if model.lexical else {}
    batch = Batch(*pair(B, 64), *pair(B, K, S), struct((B, K, 768), np.float32),
                  struct((B, K), np.bool_), *pair(B, targets), struct((B,), np.float32), **further)
    train = step.make_train_step(step.rag_loss(model, smoothing), transform, shardings,
                                 optimizer.accumulate, step.DropoutKeys(0))
    jaxpr, (after, metrics) = jax.make_jaxpr(train, return_shape=True)(
        state, batch, struct((), np.int32))
    return state, after, metrics, flops(jaxpr.jaxpr)


def step_of(cell):
    """`traced` for a cell, with its model, run's configuration and rates."""
    config = overrides.for_run(rules.validate(load(cell)), cell.split("/")[2])
    model = rag.RagModel(dataclasses.replace(config.model.retriever, pretrained=""),
                         dataclasses.replace(config.model.generator, pretrained=""),
                         config.kind, 2, 2, 1, lexical=config.retrieval.retriever == "bm25",
                         classes=config.head_classes)
    rates = {"query_encoder": config.train.query_encoder_rate, "generator": 1.0}
    rates = tuple((tower, rate) for tower, rate in rates.items() if rate is not None)
    data = config.data
    shape = (config.train.batch_size, max(config.retrieval.k, 1), data.max_source_length)
    return config, model, rates, traced(model, rates, config.train.optimizer,
                                        config.train.label_smoothing, shape,
                                        1 if config.classes else data.max_target_length)


def least_hours(cell):
    """Of training on a v4-8, four chips: no step is faster than its operations at peak speed."""
    config, _, _, (*_, operations) = step_of(cell)
    return config.train.steps * operations / (4 * CHIPS["TPU v4"].peak) / 3600


@pytest.mark.parametrize("cell", CELLS)
def test_a_training_step_has_the_right_shapes_at_full_size(cell):
    _, task, run = cell.split("/")
    config, model, rates, (state, after, metrics, _) = step_of(cell)
    assert not model.classes, "labels are single tokens, as in the paper's main text"
    assert bool(config.classes) == task.startswith("fever")
    shapes = [[(x.shape, x.dtype) for x in jax.tree.leaves(t.params)] for t in (state, after)]
    assert shapes[0] == shapes[1] and metrics["nll"].shape == ()
    count = {tower: sum(x.size for x in jax.tree.leaves(params))
             for tower, params in state.params.items()}
    if not model.lexical:
        assert 108e6 < count["query_encoder"] == count["document_encoder"] < 110e6
    assert 405e6 < count["generator"] < 407e6
    trained = sum(count[tower] for tower, _ in rates)
    assert run != "rag_token" or 513e6 < trained < 518e6, "the paper's 626M count a frozen tower"


def test_recipes_by_task_and_run():
    assert load("fever2/closed_book") == load("table2/fever2/closed_book")
    assert load("nq/fid").eval == load("nq/rag_token").eval  # no cell of the paper


def test_cells_of_the_papers_scale(tmp_path):
    scale = Full(tmp_path)
    nq, = scale.cells("nq", "rag_token")
    assert (nq.folder, nq.first, nq.start) == ("nq", None, None)
    assert "configs/paper.py:table1/nq/rag_token" in nq.recipe
    wq, = scale.cells("wq", "rag_sequence")
    assert wq.folder == "wq_rag_sequence" and wq.start.run == "rag_sequence"
    assert wq.config.model.rag.pretrained == str(tmp_path / "nq" / "exported_rag_sequence")
    assert wq.first.folder == wq.start.folder == "nq"
    ct, = scale.cells("ct", "bm25")
    assert ct.config.model.generator.pretrained == str(tmp_path / "nq" / "exported_bm25")
    assert scale.cells("nq", "bm25_nothing") == []
    assert not wq.questions and not wq.indexes
    assert set(nq.questions) == {"leaders_2016", "leaders_2018"}
    assert nq.indexes["2018"].path == nq.config.data.passages, "no second index of it is built"
    assert nq.indexes["2016"].path.endswith("/hot_swap/enwiki-20161220-pages-articles.xml.bz2")
    assert Full(tmp_path, "files").cells("wq", "rag_token")[0].config.data.data_dir == "files"


@pytest.mark.parametrize("name", ["root", "of mine", "runs/paper/mine"])
def test_a_recipe_trains_by_hand_what_the_report_reads(tmp_path, monkeypatch, name):
    """It named runs/paper whatever --workdir, and no --data_dir; and then it put the one in the
    place of a part of the other."""
    cell, = Full(tmp_path / name, f"{name} files").cells("wq", "rag_token")
    words = shlex.split(cell.recipe.split("\n\n")[1].replace("\\\n", ""))
    trained, at = [], words.index("rag_jax.train")
    monkeypatch.chdir(config_files.CONFIGS.parent)
    monkeypatch.setattr(api, "train", lambda *given: trained.append(given))
    train.main(words[at + 1:])
    assert trained == [(cell.config, str(tmp_path / name / cell.folder), None)]
    assert cell.config.model.rag.pretrained == words[words.index("rag_jax.convert") + 3
                                                     ].removeprefix("--to=")


@pytest.mark.parametrize("task", ["nq", "tqa", "jeopardy", "msmarco", "fever3", "fever2"])
def test_the_runs_of_one_folder_go_together(tmp_path, task):
    """The commands that `reproduce` prints were refused from the second on: each run's own value of
    a field that it sets by itself was compared."""
    for name in [name for name in CELLS if name.split("/")[1] == task]:
        cell, = Full(tmp_path).cells(task, name.split("/")[2])
        path = workdir.start(cell.config, tmp_path / cell.folder)
        (path / cell.run / "1").mkdir(parents=True)  # it has trained
        assert cell.run in workdir.read(path).runs
