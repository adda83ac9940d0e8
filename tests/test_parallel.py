"""The sharding rules, and one device against eight."""

import dataclasses
import itertools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from rag_jax import parallel
from rag_jax.config import CausalConfig, ConfigError, MeshConfig, OptimizerConfig
from rag_jax.data import packed
from rag_jax.data.packed import Groups
from rag_jax.decoding.answer import decode
from rag_jax.decoding.settings import Decoding
from rag_jax.fusion import Fusion
from rag_jax.models import likelihood, rag
from rag_jax.models.products import Linear
from rag_jax.training import optim, step
from rag_jax.types import RetrieverBatch, Seq2SeqBatch

TRAINED = ("query_encoder", "generator", "classifier")
CLASSES = 11
MODEL = tiny.rag_model(retriever={"projection": 12}, classes=CLASSES)


def abstract(model):
    return jax.eval_shape(lambda: model.init(jax.random.key(0)))


@pytest.mark.parametrize("sizes,shape", [
    ((-1, 1, 1), (8, 1, 1)), ((4, 1, 2), (4, 1, 2)), ((-1, 2, 2), (2, 2, 2)),
    ((1, -1, 1), (1, 8, 1)), ((2, 1, -1), (2, 1, 4))])
def test_mesh_shapes(sizes, shape):
    mesh = parallel.make_mesh(MeshConfig(*sizes))
    assert tuple(mesh.shape.values()) == shape and mesh.axis_names == ("data", "fsdp", "model")


@pytest.mark.parametrize("sizes", [(3, 1, -1), (2, 1, 2), (-1, 2, -1), (0, 1, 8), (16, 1, 1)])
def test_meshes_that_do_not_fit_are_errors_with_the_numbers(sizes):
    shown = "data={} x fsdp={} x model={} does not fit 8 devices".format(*sizes)
    with pytest.raises(ConfigError, match=shown):
        parallel.make_mesh(MeshConfig(*sizes))


def test_unknown_and_colliding_axes_are_errors_that_name_the_tensor():
    assert parallel.spec(("vocab", "embed")) == PartitionSpec("model", "fsdp")
    assert parallel.spec(("embed", "heads")) == PartitionSpec("fsdp", "model")
    assert parallel.spec(("batch", None)) == PartitionSpec(("data", "fsdp"), None)
    with pytest.raises(ValueError, match="states.*'batch', 'embed'.*'fsdp'"):
        parallel.spec(("batch", "embed"), "states")
    with pytest.raises(ValueError, match="some/kernel.*no sharding rule.*'hedas'"):
        parallel.spec(("embed", "hedas"), "some/kernel")
    with pytest.raises(ValueError, match="some/kernel.*'vocab', 'mlp'.*'model'"):
        parallel.spec(("vocab", "mlp"), "some/kernel")
    mesh = parallel.make_mesh(MeshConfig(2, 2, 2))
    bad = {"wi": {"kernel": nn.LogicallyPartitioned(jnp.zeros((2, 2)), ("mlp", "heads"))}}
    with pytest.raises(ValueError, match=r"\['wi'\]\['kernel'\]"):
        parallel.param_shardings(bad, mesh)
    with pytest.raises(ValueError, match=r"\['wi'\]\['bias'\].*without logical axis names"):
        parallel.param_shardings({"wi": {"bias": jnp.zeros(2)}}, mesh)


def test_states_with_unknown_and_colliding_axes_are_errors_that_name_them():
    with pytest.raises(ValueError, match="scores.*no sharding rule for axis 'bacth'"):
        parallel.constrain(jnp.zeros((8, 2)), "bacth", name="scores")

    class Tower(nn.Module):
        axes: tuple[str, str]

        @nn.compact
        def __call__(self, x):
            return Linear(6, self.axes, name="wo")(x)

    for axes, message in [(("embed", "hedas"), "no sharding rule for axis 'hedas'"),
                          (("mlp", "batch"), r"two of its axes \('batch', None, 'batch'\)")]:
        with pytest.raises(ValueError, match=f"^wo: {message}"):
            Tower(axes).init(jax.random.key(0), jnp.zeros((8, 3, 4)))


@pytest.mark.parametrize("scan", [False, True])
def test_every_parameter_has_logical_axes_of_its_rank(scan):
    """Towers with every optional part; a scan adds the axis "layers" in front."""
    model = tiny.rag_model(retriever={"projection": 12, "scan_layers": scan, "layers": 2},
                           generator={"scan_layers": scan}, classes=CLASSES)
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
    assert by_name["['classifier']['out']['kernel']"] == ("mlp", "classes")


def test_the_model_axis_splits_heads_feed_forward_and_vocabulary_and_fsdp_the_width():
    """A rule that is dropped leaves every result as it is, and every device with all of it."""
    shardings = parallel.param_shardings(abstract(MODEL), parallel.make_mesh(MeshConfig(2, 2, 2)))
    layer = shardings["generator"]["decoder"]["layer_0"]
    assert shardings["generator"]["embedding"].spec == PartitionSpec("model", "fsdp")
    for attention in ("self_attention", "cross_attention"):
        for name in ("query", "key", "value"):
            assert layer[attention][name]["kernel"].spec == PartitionSpec("fsdp", "model")
            assert layer[attention][name]["bias"].spec == PartitionSpec("model")
        assert layer[attention]["out"]["kernel"].spec == PartitionSpec("model", "fsdp")
    assert layer["mlp"]["wi"]["kernel"].spec == PartitionSpec("fsdp", "model")
    assert layer["mlp"]["wo"]["kernel"].spec == PartitionSpec("model", "fsdp")


def test_dimensions_that_do_not_divide_are_replicated():
    mesh = parallel.make_mesh(MeshConfig(2, 2, 2))
    odd = tiny.rag_model(generator={"vocab_size": 37})
    shardings = parallel.param_shardings(abstract(odd), mesh)
    assert shardings["generator"]["embedding"].spec == PartitionSpec(None, "fsdp")
    even = shardings["query_encoder"]["bert"]["token_embedding"]
    assert even.spec == PartitionSpec("model", "fsdp")
    said = [f"['generator']['{name}']: vocab 37 is whole on every device, as model = 2 does not "
            "divide it" for name in ("embedding", "final_logits_bias")]
    assert parallel.undivided(abstract(odd), mesh) == said
    assert parallel.undivided(abstract(MODEL), mesh) == []


@pytest.mark.parametrize("vocab", [38, 37])
def test_gathered_parameters_are_whole_over_fsdp_and_split_over_model(vocab):
    mesh = parallel.make_mesh(MeshConfig(2, 2, 2))
    model = tiny.rag_model(generator={"vocab_size": vocab})
    boxed, params = abstract(model), tiny.rag_params(model)
    placed = jax.device_put(params, parallel.param_shardings(boxed, mesh))
    found = tiny.jit(lambda params: parallel.gathered(params, boxed))(placed)
    for x, given in zip(jax.tree.leaves(found), jax.tree.leaves(params), strict=True):
        assert "fsdp" not in str(x.sharding.spec)
        np.testing.assert_array_equal(x, given)
    kernel = found["generator"]["encoder"]["layer_0"]["mlp"]["wi"]["kernel"]
    assert kernel.sharding.shard_shape(kernel.shape) == (16, 16)
    table = found["generator"]["embedding"]
    assert table.sharding.shard_shape(table.shape) == ((19, 16) if vocab == 38 else (37, 16))
    alone = jax.jit(lambda params: parallel.gathered(params, boxed))(params)
    assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(alone))


def test_batches_that_cannot_be_split_are_errors():
    mesh = parallel.make_mesh(MeshConfig(2, 2, 2))
    with pytest.raises(ConfigError, match="3 rows cannot be split over 4 devices"):
        parallel.put_batch(tiny.rag_batch(questions=3), mesh)
    placed = parallel.put_batch(tiny.rag_batch(questions=8), mesh)
    assert placed.source_ids.sharding.shard_shape((8, 3, 6)) == (2, 3, 6)
    with pytest.raises(ConfigError, match="8 rows.*4 micro-batches.*multiple of 16"):
        jax.eval_shape(lambda batch: parallel.micro_batches(batch, 4), placed)


@pytest.mark.parametrize("implementation", ["threefry2x32", "unsafe_rbg"])
def test_every_device_draws_its_own_rows_of_random_bits(implementation):
    """A TPU's generator drew those of the whole batch on every device, 22 of 262 GB a step; the
    same key for all rows would zero the same places of every document, and other bits for the
    parts of a split layer different ones of one state."""
    mesh, key = parallel.make_mesh(MeshConfig(2, 2, 2)), jax.random.key(3, impl=implementation)
    row = jax.device_put(key, parallel.replicated(mesh))

    def compiled(shape):
        return jax.jit(lambda key: parallel.random_bits(key, shape)).lower(row).compile()

    draw = compiled((8, 5))
    bits = draw(row)
    assert bits.shape == (8, 5) and len(np.unique(bits)) == bits.size
    for shard in bits.addressable_shards:
        np.testing.assert_array_equal(shard.data, np.asarray(bits)[shard.index])
    if implementation == "threefry2x32":
        np.testing.assert_array_equal(bits, jax.random.bits(key, (8, 5)))
    else:
        assert "u32[2,5]" in draw.as_text() and "[8,5]" not in draw.as_text()
        odd = compiled((6, 5))(row)  # no multiple of the devices
        np.testing.assert_array_equal(odd, jax.random.bits(key, (6, 5)))


def test_micro_batches_take_their_rows_from_every_device():
    mesh = parallel.make_mesh(MeshConfig(4, 2))
    rows = parallel.put_batch(np.arange(16), mesh)
    compiled = jax.jit(lambda batch: parallel.micro_batches(batch, 2)).lower(rows).compile()
    assert np.array_equal(compiled(rows), np.arange(16).reshape(8, 2).T)
    assert not collectives(compiled)


COLLECTIVE = re.compile(
    r" = (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")


def collectives(compiled):
    """(kind, shape without sizes of 1) of every array that a compiled program communicates."""
    return [(kind, tuple(int(n) for n in sizes.split(",") if n not in ("", "1")))
            for shapes, kind in COLLECTIVE.findall(compiled.as_text())
            for sizes in re.findall(r"\w+\[([\d,]*)\]", shapes)]


# No size of a state is one of a parameter here, whole or split.
SIZES = {"questions": 24, "passages": 3, "source": 7, "target": 5, "length": 9}
SCANNED = {"scan_layers": True, "remat": "dots"}


@pytest.mark.parametrize("sizes,dtype", [((4, 2, 1), "float32"), ((2, 2, 2), "bfloat16")])
def test_only_parameters_and_gradients_travel_between_questions(sizes, dtype):
    """Neither marginal communicates over documents; fsdp gathers one layer, never the stack.

    With `model`, partial sums of states are added within its groups; rows still move nowhere.
    """
    model = tiny.rag_model(
        retriever={"projection": 12, "vocab_size": 32, "mlp_width": 40, "layers": 3, "dtype": dtype,
                   **SCANNED},
        generator={"vocab_size": 44, "mlp_width": 40, "encoder_layers": 3, "decoder_layers": 3,
                   "dtype": dtype, **SCANNED}, classes=CLASSES)
    mesh = parallel.make_mesh(MeshConfig(*sizes))
    optimizer = tiny.descent(TRAINED)  # what Adam adds is computed where its parameter lies
    _, state, shardings = step.init_state(model, model.towers, optimizer, 0, mesh)
    batch, claims = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=parallel.batch_sharding(mesh)),
        (tiny.packed_targets(tiny.packed(tiny.rag_batch(**SIZES, model=model), 19),
                             Groups(sizes[0] * sizes[1])),
         tiny.class_batch(CLASSES, claim=10, **SIZES, model=model)))
    train_step = step.make_train_step(
        sum_of_losses(every_kind(model)), optimizer, shardings)
    found = collectives(compile_quickly(
        train_step, state, (batch, batch, claims), np.int32(0)))
    shapes = [leaf.shape[1:] if "['layers']" in jax.tree_util.keystr(path) else leaf.shape
              for path, leaf in jax.tree_util.tree_leaves_with_path(state.params)]
    # Position tables are cut.
    shapes += [(size, 16) for size in (10, SIZES["source"], SIZES["target"], SIZES["length"])]
    parameters = {tuple(n for n in part if n > 1) for shape in shapes
                  for part in itertools.product(*([n, n // 2, n // 4] for n in shape))}
    strange = [(kind, shape) for kind, shape in found if shape not in parameters
               and not (kind == "all-reduce" and (not shape or sizes[2] > 1))]
    assert not strange
    assert ("all-gather", (16, 40 // sizes[2])) in found, "fsdp gathers a layer's parameters"


def every_kind(model):
    """Losses of RAG-Token, RAG-Sequence, and a classifier by Fusion-in-Decoder."""
    kinds = (("token", 0), ("sequence", 0), ("fid", model.classes))
    return [step.rag_loss(dataclasses.replace(model, kind=kind, classes=classes), 0.1)
            for kind, classes in kinds]


def sum_of_losses(losses):
    """One loss of a tuple of batches, each loss's own value among the metrics."""
    def loss(params, batches, key):
        found = [f(params, batch, key) for f, batch in zip(losses, batches, strict=True)]
        metrics = {f"{n}/{name}": value for n, (_, _, metrics) in enumerate(found)
                   for name, value in metrics.items()}
        return sum(total for total, _, _ in found), jnp.float32(1), metrics

    return loss


def compile_quickly(jitted, *arguments):
    return jitted.lower(*arguments).compile(compiler_options={"xla_backend_optimization_level": 0})


@pytest.mark.parametrize("implementation", ["threefry2x32", "unsafe_rbg"])
@pytest.mark.parametrize("axes", [("data",), ("replica", "rows")])
def test_a_mesh_with_other_axes_is_left_to_the_compiler(axes, implementation):
    """A caller's own loss, data parallel on a mesh of its own, ended with KeyError: 'model'."""
    mesh = jax.make_mesh((8, 1)[: len(axes)], axes, axis_types=(AxisType.Auto,) * len(axes))
    model, key = tiny.rag_model(), jax.random.key(3, impl=implementation)
    params, batch = tiny.rag_params(model), tiny.rag_batch(questions=8, model=model)

    @jax.jit
    def loss(params, batch, key):
        return likelihood.log_likelihood(model, params, batch, dropout_key=key)["log_p"].mean()

    everywhere = NamedSharding(mesh, PartitionSpec())
    placed = (jax.device_put(params, everywhere),
              jax.device_put(batch, NamedSharding(mesh, PartitionSpec(axes[:1]))),
              jax.device_put(key, everywhere))
    np.testing.assert_allclose(loss(*placed), loss(params, batch, key), rtol=1e-5)


def test_gradients_in_shard_map_are_those_of_the_whole_batch():
    """As docs/functional.md says; without the cast, JAX refuses what the backward passes give."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    model = tiny.rag_model()
    params, batch = tiny.rag_params(model), tiny.rag_batch(questions=8, model=model)

    def loss(params, batch):
        return likelihood.log_likelihood(model, params, batch)["log_p"].sum()

    def shard(params, batch):
        params = jax.lax.pcast(params, "data", to="varying")
        return jax.lax.psum(jax.grad(loss)(params, batch), "data")

    split = jax.shard_map(shard, mesh=mesh, out_specs=PartitionSpec(),
                          in_specs=(PartitionSpec(), PartitionSpec("data")))
    tiny.assert_trees_close(tiny.jit(split)(params, batch), tiny.jit(jax.grad(loss))(params, batch),
                            rtol=1e-4, atol=1e-5)


def mesh_of(sizes):
    return parallel.make_mesh(MeshConfig(*sizes), jax.devices()[: np.prod(sizes)])


def keep_gradients():
    """An optimiser stage whose state is the last gradient."""
    return optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params),
                                        lambda updates, state, params=None: (updates, updates))


def one_step(model, loss, batch, sizes=(1, 1, 1), pieces=1, towers=MODEL.towers, ratios=False):
    """(state before, state after, metrics) of one training step of `towers` on a mesh.

    Adam's first step is g / (|g| + eps): what is zero but for rounding becomes a step of full size.
    With eps=1e-8 or 1e-7 single numbers of that kind leave 2e-5 to 3e-5 of a parameter's norm, with
    1e-3 1.3e-5.
    """
    mesh = mesh_of(sizes)
    config = OptimizerConfig(learning_rate=0.1, warmup_steps=0, eps=1e-2, clip_norm=1.0,
                             update_ratios=ratios)
    optimizer = optim.make_optimizer(config, 10, dict.fromkeys(towers, 1.0))
    init, update = optax.chain(keep_gradients(), optax.GradientTransformation(*optimizer[:2]))
    optimizer = optimizer._replace(  # the scales of towers, all 1 here, are no argument of optax
        init=init, update=lambda *given: update(*given[:3]))
    make, _, shardings = step.init_state(model, towers, optimizer, 0, mesh)
    train_step = step.make_train_step(loss, optimizer, shardings, pieces)
    state, placed = compile_quickly(make)(), parallel.put_batch(batch, mesh)
    before = jax.device_get(state)
    after, metrics = compile_quickly(train_step, state, placed, np.int32(0))(
        state, placed, np.int32(0))
    return before, after, metrics


def updated_by_default(before, after):
    """Parameters after the default optimiser's step with the gradients of `one_step`, where they
    lie. No parameter is 0, as in training: a bias that is would have its first step for its value.
    """
    rng = np.random.default_rng(3)
    optimizer = optim.make_optimizer(
        OptimizerConfig(warmup_steps=0), 10, dict.fromkeys(after.params, 1.0))
    params = jax.tree.map(lambda p, lies: jax.device_put(
        p + rng.normal(0, 0.05, p.shape).astype(p.dtype), lies.sharding), before.params,
        after.params)

    def update(params, gradients):
        updates, _ = optimizer.update(gradients, optimizer.init(params), params)
        return optax.apply_updates(params, updates)

    gradients = after.opt_state[0]
    return compile_quickly(jax.jit(update), params, gradients)(params, gradients)


NOTHING = 1e-7  # of the whole gradient's norm: rounding, as in what adds the same to all scores


def differences(found, expected, leave_out=frozenset()):
    """Leaf -> |found - expected| / |expected|, norms in float64."""
    def leaves(tree):
        return {jax.tree_util.keystr(path): np.asarray(leaf, np.float64)
                for path, leaf in jax.tree_util.tree_leaves_with_path(jax.device_get(tree))}

    found, expected = leaves(found), leaves(expected)
    assert found.keys() == expected.keys()
    return {name: np.linalg.norm(found[name] - one) / max(np.linalg.norm(one), 1e-30)
            for name, one in expected.items() if name not in leave_out}


def without_gradient(gradients):
    """Leaves whose gradient is zero but for rounding: biases of keys for one."""
    norms = {jax.tree_util.keystr(path): np.linalg.norm(leaf)
             for path, leaf in jax.tree_util.tree_leaves_with_path(jax.device_get(gradients))}
    whole = np.linalg.norm(list(norms.values()))
    return {name for name, norm in norms.items() if norm < NOTHING * whole}


def assert_same_step(found, expected):
    """Metrics, gradients, Adam's first moments and what the default optimiser makes of them to 1e-5
    of every leaf's norm, parameters that `one_step` updated entry by entry.

    Returns:
      The largest difference of each of the first four.
    """
    (before, after, metrics), (one_before, one_after, one_metrics) = found, expected
    tiny.assert_trees_close(before, one_before, rtol=1e-6)
    gradients, one_gradients = after.opt_state[0], one_after.opt_state[0]
    assert all(not tiny.is_zero(tower) for tower in one_gradients.values())
    zero = without_gradient(one_gradients)
    assert zero == without_gradient(gradients) and len(zero) < 10
    largest = []
    moments = (optax.tree_utils.tree_get(state.opt_state, "mu") for state in (after, one_after))
    updated = updated_by_default(before, after), updated_by_default(one_before, one_after)
    for one, other, left_out in ((metrics, one_metrics, ()), (gradients, one_gradients, zero),
                                 (*moments, zero), (*updated, zero)):
        differ = differences(one, other, left_out)
        largest.append(max(differ.values()))
        assert largest[-1] <= 1e-5, {name: d for name, d in differ.items() if d > 1e-5}
    tiny.assert_trees_close(after.params, one_after.params, rtol=1e-5, atol=1e-5)
    assert not tiny.is_zero(jax.tree.map(np.subtract, jax.device_get(after.params), before.params))
    return largest


def every_batch():
    """Batches of `every_kind`, of DPR with a hard negative, and of denoising."""
    batch = tiny.rag_batch(questions=8, model=MODEL)
    batch = batch._replace(weight=np.float32([1, 1, 0, 1, 1, 1, 1, 0]))
    other = tiny.rag_batch(seed=1, questions=16, model=MODEL)
    same = np.random.default_rng(2).random((8, 16)) < 0.1
    np.fill_diagonal(same, False)
    pairs = RetrieverBatch(batch.question_ids, batch.question_mask, other.question_ids,
                           other.question_mask, same)
    texts = Seq2SeqBatch(other.source_ids[:, 0], other.source_mask[:, 0], other.target_ids,
                         other.target_mask)
    claims = tiny.class_batch(CLASSES, questions=8, model=MODEL)
    return batch, batch, claims, pairs, texts


EVERY_LOSS = sum_of_losses(
    [*every_kind(MODEL), step.retriever_loss(MODEL), step.seq2seq_loss(MODEL)])


@pytest.fixture(scope="module")
def on_one_device():
    return one_step(MODEL, EVERY_LOSS, every_batch())


@pytest.mark.parametrize("sizes", [(8, 1, 1), (1, 8, 1), (2, 2, 2)])
def test_eight_devices_compute_what_one_computes(on_one_device, sizes):
    """Every kind, DPR and denoising; the optimiser's state lies as the parameters."""
    before, after, metrics = one_step(MODEL, EVERY_LOSS, every_batch(), sizes)
    largest = assert_same_step((before, after, metrics), on_one_device)
    print("mesh {} x {} x {}: losses {:.1e}, gradients {:.1e}, moments {:.1e}, parameters {:.1e}"
          .format(*sizes, *largest))
    embedding = after.params["generator"]["embedding"]
    assert len(embedding.sharding.device_set) == 8
    assert embedding.sharding.shard_shape(embedding.shape) == (38 // sizes[2], 16 // sizes[1])
    moments = [leaf for path, leaf in jax.tree_util.tree_leaves_with_path(after.opt_state)
               if "embedding'" in jax.tree_util.keystr(path)[-12:] and leaf.shape == (38, 16)]
    assert len(moments) == 3, "the kept gradient and Adam's two moments"
    assert all(m.sharding.is_equivalent_to(embedding.sharding, 2) for m in moments)


def test_objectives_of_the_retriever_are_the_same_on_eight_devices():
    """Fusion-in-Decoder's further readings see the passages of their own questions alone; in-batch
    negatives are the passages of all devices; the weight of words, a number, is on each of them."""
    cases = (("token", "loop", False), ("fid", "adist", False), ("fid", "loop", False),
             ("sequence", "marginal", True))
    fused = dataclasses.replace(MODEL, classes=0, fusion=Fusion("convex", 0.3, learned=True))
    loss = sum_of_losses([
        step.rag_loss(dataclasses.replace(
            fused, kind=kind, fusion=fused.fusion if kind == "token" else None), 0.1, objective,
                      in_batch_negatives=in_batch) for kind, objective, in_batch in cases])
    batch = every_batch()[0]
    batch = batch._replace(doc_scores=np.random.default_rng(5).gamma(
        2, 1, batch.doc_mask.shape).astype(np.float32))  # the sum of few that cancel
    batches, towers = (batch,) * len(cases), ("query_encoder", "generator", rag.FUSION)
    expected = one_step(fused, loss, batches, towers=towers)
    assert_same_step(one_step(fused, loss, batches, (2, 2, 2), towers=towers), expected)


def test_accumulation_scan_and_remat_compute_the_same_on_eight_devices():
    """Against one device with the whole batch at once."""
    model = tiny.rag_model(generator={**SCANNED, "remat": "full"})
    batch, loss = every_batch()[-1], step.seq2seq_loss(model)
    expected = one_step(model, loss, batch, towers=("generator",), ratios=True)
    found = one_step(model, loss, batch, (2, 2, 2), pieces=4, towers=("generator",), ratios=True)
    assert_same_step(found, expected)


def test_packed_targets_and_texts_are_the_same_on_eight_devices_in_micro_batches():
    """Against padded ones there; each micro-batch of a device is a group. With large weights in the
    generator posteriors are far from p(z|x); else 2e-5 of the query encoder's are rounding."""
    model, groups = tiny.rag_model("sequence", generator={"init_std": 0.8}), Groups(4, 2)
    batch = tiny.rag_batch(questions=16, model=model)
    texts = Seq2SeqBatch(batch.source_ids[:, 0], batch.source_mask[:, 0], batch.target_ids,
                         batch.target_mask)
    loss = sum_of_losses([step.rag_loss(model, 0.1), step.seq2seq_loss(model)])
    longest = int(groups.rows(texts.source_mask).sum(axis=1).max())
    same = (tiny.packed_targets(batch, groups),
            tiny.packed_targets(texts, groups)._replace(
                source_places=packed.places(texts.source_mask, groups, longest)))
    assert same[1].source_places is not None
    towers = "query_encoder", "generator"
    expected = one_step(model, loss, (batch, texts), (2, 2, 2), pieces=2, towers=towers)
    assert_same_step(one_step(model, loss, same, (2, 2, 2), pieces=2, towers=towers), expected)


FAMILIES = {"t5": tiny.T5, "causal": CausalConfig(
    variant="gemma3", vocab_size=38, max_positions=32, width=16, decoder_layers=2, heads=4,
    kv_heads=2, head_size=4, mlp_width=24, init_std=0.3, window=3, global_every=2, final_cap=4.0,
    logit_chunk=3, rope_theta=100.0, rope_local_theta=10.0)}


@pytest.mark.parametrize("family, kind", [("t5", "sequence"), ("causal", "token")])
def test_every_family_trains_and_answers_on_eight_devices_as_on_one(family, kind):
    """Guards against heads, tables of positions or caches of which a device sees its part alone."""
    model, towers = tiny.rag_model(kind, generator=FAMILIES[family]), TRAINED[:2]
    params = jax.device_get(tiny.rag_params(model))
    batch = tiny.rag_batch(questions=8, model=model)

    def answers(params, rows):
        return [decode(model, how, params, rows) for how in (
            Decoding(num_beams=2, max_length=3), Decoding(max_length=4, prompt_lookup=2))]

    def run(sizes):
        mesh, optimizer = mesh_of(sizes), tiny.descent(towers)
        _, _, shardings = step.init_state(model, model.towers, optimizer, 0, mesh)
        zeros = jax.tree.map(np.zeros_like, {t: params[t] for t in towers})
        state = jax.device_put(step.TrainState(params, zeros), shardings)
        rows = parallel.put_batch(batch, mesh)
        answered = compile_quickly(jax.jit(answers), state.params, rows)(state.params, rows)
        train_step = step.make_train_step(step.rag_loss(model, 0.1), optimizer, shardings)
        given = state, rows, np.int32(0)
        return jax.device_get((answered, compile_quickly(train_step, *given)(*given)))

    (answered, trained), (one_answered, one_trained) = run((2, 2, 2)), run((1, 1, 1))
    for many, one in zip(answered, one_answered, strict=True):
        np.testing.assert_array_equal(many.best.tokens, one.best.tokens)
        for found, expected in ((many.best.log_p, one.best.log_p),
                                (many.best.posterior, one.best.posterior),
                                (many.prior, one.prior)):
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    zero = without_gradient(one_trained[0].opt_state)
    for found, expected, left_out in ((trained[1], one_trained[1], ()),
                                      (trained[0].opt_state, one_trained[0].opt_state, zero),
                                      (trained[0].params, one_trained[0].params, ())):
        differ = differences(found, expected, left_out)
        assert max(differ.values()) <= 1e-5, {n: d for n, d in differ.items() if d > 1e-5}
    assert all(not tiny.is_zero(tower) for tower in one_trained[0].opt_state.values())


def test_every_axis_of_every_family_has_a_rule():
    """Guards against a report of what is whole on every device that cannot name an axis."""
    mesh = parallel.make_mesh(MeshConfig(1, 2, 4))
    for family, named in (("t5", "['decoder_bias']: heads 2"),
                          ("causal", "['embedding']: vocab 38")):
        model = tiny.rag_model(generator=FAMILIES[family])
        assert named in " ".join(parallel.undivided(abstract(model), mesh))


def test_a_mesh_config_is_the_whole_difference():
    """The config's default mesh is all devices on `data`."""
    assert dataclasses.asdict(MeshConfig()) == {"data": -1, "fsdp": 1, "model": 1}
    assert dict(parallel.make_mesh(MeshConfig()).shape) == {"data": 8, "fsdp": 1, "model": 1}
