"""The sharding rules, and one device against eight."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from jax.sharding import PartitionSpec

from rag_jax import parallel
from rag_jax.config import ConfigError, MeshConfig, OptimizerConfig
from rag_jax.models import rag
from rag_jax.training import optim, step

TRAINED = ("query_encoder", "generator")
MODEL = tiny.rag_model(retriever={"projection": 12})


def abstract(model):
    return jax.eval_shape(lambda: model.init(jax.random.key(0)))


@pytest.mark.parametrize("data,model,shape", [(-1, 1, (8, 1)), (4, 2, (4, 2)), (-1, 2, (4, 2)),
                                              (2, -1, (2, 4))])
def test_mesh_shapes(data, model, shape):
    mesh = parallel.make_mesh(MeshConfig(data, model))
    assert tuple(mesh.shape.values()) == shape and mesh.axis_names == ("data", "model")


@pytest.mark.parametrize("data,model", [(3, -1), (2, 2), (-1, -1), (0, 8), (16, 1)])
def test_meshes_that_do_not_fit_are_errors_with_the_numbers(data, model):
    with pytest.raises(ConfigError, match=f"data={data} x model={model} does not fit 8 devices"):
        parallel.make_mesh(MeshConfig(data, model))


def test_unknown_and_colliding_axes_are_errors_that_name_the_tensor():
    assert parallel.spec(("vocab", "embed")) == PartitionSpec("model", None)
    assert parallel.spec(("embed", "heads")) == PartitionSpec(None, "model")
    with pytest.raises(ValueError, match="some/kernel.*no sharding rule.*'hedas'"):
        parallel.spec(("embed", "hedas"), "some/kernel")
    with pytest.raises(ValueError, match="some/kernel.*'vocab', 'mlp'.*'model'"):
        parallel.spec(("vocab", "mlp"), "some/kernel")
    mesh = parallel.make_mesh(MeshConfig(4, 2))
    bad = {"wi": {"kernel": nn.LogicallyPartitioned(jnp.zeros((2, 2)), ("mlp", "heads"))}}
    with pytest.raises(ValueError, match=r"\['wi'\]\['kernel'\]"):
        parallel.param_shardings(bad, mesh)
    with pytest.raises(ValueError, match=r"\['wi'\]\['bias'\].*without logical axis names"):
        parallel.param_shardings({"wi": {"bias": jnp.zeros(2)}}, mesh)


@pytest.mark.parametrize("scan", [False, True])
def test_every_parameter_has_logical_axes_of_its_rank(scan):
    """Towers with every optional part; a scan adds the axis "layers" in front."""
    model = tiny.rag_model(retriever={"projection": 12, "scan_layers": scan, "layers": 2},
                           generator={"scan_layers": scan})
    is_box = lambda leaf: isinstance(leaf, nn.LogicallyPartitioned)  # noqa: E731
    boxes = jax.tree_util.tree_leaves_with_path(abstract(model), is_leaf=is_box)
    for path, box in boxes:
        name = jax.tree_util.keystr(path)
        assert is_box(box), f"{name} has no logical axes"
        assert len(box.names) == box.value.ndim and set(box.names) <= set(parallel.RULES), name
        assert ("layers" in box.names) == ("['layers']" in name), name
        assert None not in box.names, name
        assert len(parallel.spec(box.names, name)) == box.value.ndim
    by_name = {jax.tree_util.keystr(path): box.names for path, box in boxes}
    layer = "['layers']" if scan else "['layer_0']"
    front = ("layers",) if scan else ()
    kernel = f"['generator']['decoder']{layer}['mlp']['wi']['kernel']"
    assert by_name[kernel] == (*front, "embed", "mlp")
    assert by_name["['generator']['embedding']"] == ("vocab", "embed")


def test_dimensions_that_do_not_divide_are_replicated():
    mesh = parallel.make_mesh(MeshConfig(4, 2))
    odd = tiny.rag_model(generator={"vocab_size": 37})
    shardings = parallel.param_shardings(abstract(odd), mesh)
    assert shardings["generator"]["embedding"].spec == PartitionSpec(None, None)
    assert shardings["query_encoder"]["bert"]["token_embedding"].spec[0] == "model"


def test_batches_that_cannot_be_split_are_errors():
    mesh = parallel.make_mesh(MeshConfig(4, 2))
    with pytest.raises(ConfigError, match="3 rows cannot be split over 4 devices"):
        parallel.put_batch(tiny.rag_batch(questions=3), mesh)
    placed = parallel.put_batch(tiny.rag_batch(questions=8), mesh)
    assert placed.source_ids.sharding.shard_shape((8, 3, 6)) == (2, 3, 6)


def keep_gradients():
    """An optimiser stage whose state is the last gradient."""
    return optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params),
                                        lambda updates, state, params=None: (updates, updates))


def one_step(data, model_axis, pieces, devices=None):
    """(state before, state after, metrics) of one training step on a mesh.

    Adam's epsilon is large: gradients that are zero but for rounding (biases of keys) would
    otherwise turn into steps of full size.
    """
    mesh = parallel.make_mesh(MeshConfig(data, model_axis), devices)
    config = OptimizerConfig(learning_rate=0.1, warmup_steps=0, eps=1e-2, clip_norm=1.0)
    optimizer = optax.chain(
        keep_gradients(), optim.make_optimizer(config, 10, dict.fromkeys(TRAINED, 1.0)))
    make, _, shardings = step.init_state(MODEL, rag.TOWERS, TRAINED, optimizer, 0, mesh)
    train_step = step.make_train_step(
        step.rag_loss(MODEL, 0.1), optimizer, TRAINED, pieces, None, shardings, mesh)
    batch = tiny.rag_batch(questions=8, model=MODEL)
    batch = batch._replace(weight=np.float32([1, 1, 0, 1, 1, 1, 1, 0]))
    state, placed = make(), parallel.put_batch(batch, mesh)
    before = jax.device_get(state)
    compiled = train_step.lower(state, placed, np.int32(0)).compile(
        compiler_options={"xla_backend_optimization_level": 0})
    after, metrics = compiled(state, placed, np.int32(0))
    return before, after, metrics


@pytest.fixture(scope="module")
def on_one_device():
    return one_step(1, 1, 1, jax.devices()[:1])


@pytest.mark.parametrize("data,model_axis,pieces", [(8, 1, 1), (4, 2, 2)])
def test_eight_devices_compute_what_one_computes(on_one_device, data, model_axis, pieces):
    """Initial parameters, loss, gradients and updated parameters; also with 2 micro-batches."""
    before, after, metrics = one_step(data, model_axis, pieces)
    one_before, one_after, one_metrics = on_one_device
    tiny.assert_trees_close(before, one_before, rtol=1e-6)
    tiny.assert_trees_close(metrics, one_metrics, rtol=1e-5)
    gradients, one_gradients = after.opt_state[0], one_after.opt_state[0]
    assert not tiny.is_zero(one_gradients)
    tiny.assert_trees_close(gradients, one_gradients, rtol=1e-5, atol=2e-6)
    tiny.assert_trees_close(after.params, one_after.params, rtol=1e-5, atol=1e-5)
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), jax.device_get(after.params),
                         before.params)
    assert not tiny.is_zero(moved["generator"]) and tiny.is_zero(moved["document_encoder"])
    embedding = after.params["generator"]["embedding"]
    assert len(embedding.sharding.device_set) == 8
    assert embedding.sharding.shard_shape(embedding.shape) == (38 // model_axis, 16)
    moments = [leaf for path, leaf in jax.tree_util.tree_leaves_with_path(after.opt_state)
               if "embedding'" in jax.tree_util.keystr(path)[-12:] and leaf.shape == (38, 16)]
    assert len(moments) == 3, "the kept gradient and Adam's two moments"
    assert all(m.sharding.is_equivalent_to(embedding.sharding, 2) for m in moments)


def test_a_mesh_config_is_the_whole_difference():
    """The config's default mesh is all devices on `data`."""
    assert dataclasses.asdict(MeshConfig()) == {"data": -1, "model": 1}
    assert dict(parallel.make_mesh(MeshConfig()).shape) == {"data": 8, "model": 1}
