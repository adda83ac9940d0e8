"""benchmarks/accelerator.py: its count of useful operations, and what it draws."""

import importlib.util
import pathlib

import numpy as np
import pytest

from rag_jax.aot.costs import flops

FILE = pathlib.Path(__file__).parent.parent / "benchmarks" / "accelerator.py"


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("accelerator", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_useful_operations_are_those_of_the_step_without_padding(benchmark):
    """A forgotten product, or one that is counted twice, would make the share of the peak a lie."""
    config = benchmark.configuration("tiny", **{"train.batch_size": 8})
    one = benchmark.program("train", config)
    batch = benchmark.questions(one.arguments[1], 512)
    towers = config.model.retriever, config.model.generator
    found = benchmark.useful_flops(*towers, whole(batch))
    assert benchmark.useful_flops(*towers, batch) < 0.7 * found
    counted = flops(one.jitted.trace(*one.arguments).jaxpr.jaxpr)
    assert 0.95 * counted < found <= 1.02 * counted


def whole(batch):
    """Without padding."""
    return batch._replace(**{name: np.ones_like(mask) for name, mask in batch._asdict().items()
                             if mask is not None and name.endswith("_mask")})


def test_lengths_are_those_that_are_stated(benchmark):
    config = benchmark.configuration("tiny", **{"train.batch_size": 8})
    batch = benchmark.questions(benchmark.program("train", config).arguments[1], 512)
    for name, (least, most) in benchmark.LENGTHS.items():
        lengths = getattr(batch, f"{name}_mask").sum(axis=-1)
        assert least <= lengths.min() < lengths.max() <= most, name
    assert batch.doc_mask.all() and batch.weight.all()
    assert 5 <= batch.source_ids.min() and batch.source_ids.max() < 512
