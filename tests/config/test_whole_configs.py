"""Configurations that are no cell of a table: what they say of themselves, and their shapes.

Nothing is allocated: the programs of training and answering are traced at full size.
"""

import dataclasses
import pathlib

import jax
import pytest

from rag_jax import parallel
from rag_jax.aot.chips import CHIPS
from rag_jax.aot.costs import flops
from rag_jax.aot.programs import programs
from rag_jax.config import MeshConfig, config_files, overrides, rules

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
OTHERS = sorted(file.name for file in CONFIGS.glob("*.py") if file.name != "paper.py")
# Of answering, each of the paper's ways, and what no table has.
WAYS = ["paper.py:table1/nq/rag_token", "paper.py:table1/nq/rag_sequence",
        "paper.py:table2/msmarco/rag_sequence", "own_data.py", "fid_nq.py"]


def traced(name, kind):
    """(configuration of one device, program, its trace) for every run of a file."""
    mesh = MeshConfig()
    config = dataclasses.replace(
        rules.validate(config_files.load_file(str(CONFIGS / name))), mesh=mesh)
    for program in programs(config, parallel.make_mesh(mesh), passages=17_551, kinds=[kind]):
        jaxpr, shapes = jax.make_jaxpr(program.jitted, return_shape=True)(*program.arguments)
        yield config, program, jaxpr, shapes


@pytest.mark.parametrize("name", OTHERS)
def test_the_docstring_has_command_hardware_and_time(name):
    text = config_files.about(str(CONFIGS / name))
    assert "Hardware:" in text and (f"configs/{name}" in text or "this file" in text)
    assert "Time: " in text or "time" in text


@pytest.mark.parametrize("name", OTHERS)
def test_training_steps_have_the_right_shapes_at_full_size(name):
    for config, program, jaxpr, (after, metrics) in traced(name, "train"):
        state = program.arguments[0]
        shapes = [[(x.shape, x.dtype) for x in jax.tree.leaves(s.params)] for s in (state, after)]
        assert shapes[0] == shapes[1] and metrics["nll"].shape == ()
        count = {tower: sum(x.size for x in jax.tree.leaves(params))
                 for tower, params in state.params.items()}
        if name in ("paper_scale.py", "fid_nq.py"):  # BERT-base and BART-large
            assert 108e6 < count["query_encoder"] < 110e6 and 405e6 < count["generator"] < 407e6
        if name == "fid_nq.py":
            hours = config.train.steps * flops(jaxpr.jaxpr) / (4 * CHIPS["TPU v4"].peak) / 3600
            assert f"at least {hours:.1f} hours" in (CONFIGS / name).read_text("utf-8")


@pytest.mark.parametrize("name", WAYS)
def test_answers_have_the_right_shapes_at_full_size(name):
    for config, program, _, decoded in traced(name, "decode"):
        config = overrides.for_run(config, program.name.removeprefix("decode "))
        B, T = config.eval.batch_size, config.data.max_target_length
        K = (config.eval.k or config.retrieval.k) if config.retrieval.k else 1
        assert decoded.ranked.tokens.shape == (B, 1, T) and decoded.prior.shape == (B, K)
        assert decoded.ranked.log_p.shape == (B, 1)
