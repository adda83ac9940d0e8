"""Checkpoints come back bit for bit, the right ones stay, and misfits are named."""

import concurrent.futures
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from rag_jax import parallel, process
from rag_jax.config import MeshConfig
from rag_jax.steps import steps_taken
from rag_jax.training import checkpoint, tree_record
from rag_jax.training.checkpoint import Checkpointer, CheckpointError, CheckpointMismatch


def make_params(seed, size=16):
    """Nested parameters in float32, bfloat16 and of rank zero, a function of the seed."""
    keys = jax.random.split(jax.random.key(seed), 3)
    return {
        "encoder": {
            "kernel": jax.random.normal(keys[0], (size, 8)),
            "half": jax.random.normal(keys[1], (8, size), jnp.bfloat16),
        },
        "decoder": {
            "layer_0": {"bias": jax.random.normal(keys[2], (size,)), "scale": jnp.ones(())}
        },
    }


def make_state(seed, size=16):
    """Parameters and the state of an optimiser with a frozen part, after one update."""
    params = make_params(seed, size)
    optimiser = optax.multi_transform(
        {
            "train": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
            "frozen": optax.set_to_zero(),
        },
        {"encoder": "train", "decoder": "frozen"},
    )
    _, opt_state = optimiser.update(params, optimiser.init(params), params)
    return params, opt_state


def abstract(tree, sharding=None):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def assert_same_bits(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def save_steps(directory, steps, **kwargs):
    with Checkpointer(directory, **kwargs) as checkpointer:
        for step in steps:
            checkpointer.save(step, *make_state(step), {"step": step})


def restore(directory, step, state=None):
    params, opt_state = make_state(step) if state is None else state
    with Checkpointer(directory, read_only=True) as checkpointer:
        return checkpointer.restore(step, abstract(params), abstract(opt_state))


# Round trips.


def test_round_trip_restores_every_bit_and_the_optimiser_structure(tmp_path, monkeypatch):
    """From a relative directory too, which Orbax accepts at first and refuses when it saves."""
    monkeypatch.chdir(tmp_path)
    params, opt_state = make_state(3)
    meta = {"epoch": 2, "config": {"name": "tiny", "ids": [1, 2]}, "best": None}
    with Checkpointer("run/checkpoints") as checkpointer:
        checkpointer.save(3, params, opt_state, meta)
        got = checkpointer.restore(3, abstract(params), abstract(opt_state))
    assert_same_bits(got[0], params)
    assert_same_bits(got[1], opt_state)
    assert got[2] == meta


def test_stateless_optimiser_and_special_values_round_trip(tmp_path):
    """-0.0, NaN payloads, infinities and subnormals are bits like any other."""
    bits = np.array([0x80000000, 0x7FC00001, 0xFF800000, 0x7F800000, 1], np.uint32)
    special = {"w": jnp.asarray(bits.view(np.float32))}
    params = {"w": jnp.asarray(bits[[0, 4]].view(np.float32))}  # the others are refused
    state = (special, optax.sgd(0.1).init(params))
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, params, state, {})
    got_params, got_state, _ = restore(tmp_path, 1, (params, state))
    assert_same_bits(got_params, params)
    assert_same_bits(got_state, state)


def test_on_cpus_a_step_is_written_when_save_returns(tmp_path, monkeypatch):
    """While it is written, the next step would need memory for a second state; on accelerators,
    whose state has been copied, the next step begins at once."""
    given_back = []
    monkeypatch.setattr(process, "give_back_memory", lambda: given_back.append("in pieces"))
    with Checkpointer(tmp_path) as checkpointer:
        for number, platform in enumerate(("cpu", "tpu")):
            monkeypatch.setattr(jax, "default_backend", lambda platform=platform: platform)
            checkpointer.save(number, *make_state(number), {})
            assert (checkpointer._writer is not None) == (platform == "tpu")
            assert given_back == ["in pieces"], "by the CPU alone"


@pytest.mark.parametrize("platform, size, limit", [
    ("cpu", 9, {"save_concurrent_gb": 1}), ("cpu", 250_000_000, {"save_concurrent_gb": 2}),
    ("tpu", 9, {})])
def test_on_cpus_few_gigabytes_are_compressed_at_once_and_the_largest_array_always_can(
        tmp_path, monkeypatch, platform, size, limit):
    """All at once took as much memory as the state; Orbax refuses an array beyond its limit."""
    asked = []
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    monkeypatch.setattr(checkpoint, "_content", lambda *given: {"metrics": {}})

    def handler(**settings):
        asked.append(settings)
        raise OSError("enough is known")

    with Checkpointer(tmp_path) as checkpointer:
        monkeypatch.setattr(checkpointer, "_handler", handler)
        with pytest.raises(CheckpointError, match="enough is known"):
            checkpointer.save(1, {"w": np.broadcast_to(np.float32(1), size)}, {}, {})
    assert asked == [limit]


def test_background_save_holds_the_values_of_its_step_while_buffers_are_donated(
        tmp_path, monkeypatch):
    """The next step overwrites donated buffers in place while the save is being written."""
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    tree = {str(i): jnp.full((256, 1024), i, jnp.float32) for i in range(6)}
    expected = jax.tree.map(np.array, tree)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(0, tree, tree, {})
        for _ in range(20):
            tree = step(tree)
        jax.block_until_ready(tree)
        got = checkpointer.restore(0, abstract(expected), abstract(expected))
    assert_same_bits(got[0], expected)
    assert_same_bits(got[1], expected)


def test_restore_params_leaves_the_optimiser_state_unread_and_casts_after_verifying(tmp_path):
    save_steps(tmp_path, [1])
    shutil.rmtree(tmp_path / "1" / "opt_state")
    params = make_params(1)
    wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), params)
    with Checkpointer(tmp_path, read_only=True) as checkpointer:
        exact, meta = checkpointer.restore_params(1, abstract(params))
        halved, _ = checkpointer.restore_params(1, wanted)
    assert meta == {"step": 1}
    assert_same_bits(exact, params)
    assert_same_bits(halved, jax.tree.map(lambda x: x.astype(jnp.bfloat16), params))


def test_one_device_to_eight_and_back(tmp_path):
    assert len(jax.devices()) == 8, "tests/conftest.py asks for eight virtual CPU devices"
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    split = NamedSharding(mesh, PartitionSpec("data", "model"))
    whole = NamedSharding(mesh, PartitionSpec())
    params, opt_state = make_state(5)

    def on_mesh(tree):
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=split if x.ndim > 1 else whole
            ),
            tree,
        )

    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, params, opt_state, {})
        spread = checkpointer.restore(1, on_mesh(params), on_mesh(opt_state))
        kernel = spread[0]["encoder"]["kernel"]
        assert kernel.sharding == split and kernel.addressable_shards[0].data.shape == (4, 4)
        checkpointer.save(2, *spread)
        gathered = checkpointer.restore(2, abstract(params), abstract(opt_state))
    for leaf in jax.tree.leaves(gathered[:2]):
        assert leaf.devices() == {jax.local_devices()[0]}
    for got in (spread, gathered):
        assert_same_bits(got[0], params)
        assert_same_bits(got[1], opt_state)


def on_mesh(tree, shape):
    """Shapes on a (data, fsdp, model) mesh, matrices split over fsdp and model."""
    devices = jax.devices()[: np.prod(shape)]
    mesh = parallel.make_mesh(MeshConfig(*shape), devices)

    def one(x):
        spec = PartitionSpec("fsdp", "model") if x.ndim > 1 else PartitionSpec()
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(one, tree)


def test_saved_by_fsdp_restored_by_one_device_and_by_a_mesh_of_all_axes(tmp_path):
    state = make_state(6)
    spread = jax.tree.map(lambda x, s: jax.device_put(x, s.sharding), state,
                          on_mesh(state, (1, 8, 1)))
    assert spread[0]["encoder"]["kernel"].addressable_shards[0].data.shape == (2, 8)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, *spread, {})
        for shape, part in (((1, 1, 1), (16, 8)), ((2, 2, 2), (8, 4))):
            wanted = on_mesh(state, shape)
            found = checkpointer.restore(1, *wanted)
            assert_same_bits(found[:2], state)
            kernel = found[0]["encoder"]["kernel"]
            assert kernel.sharding == wanted[0]["encoder"]["kernel"].sharding
            assert kernel.addressable_shards[0].data.shape == part


@pytest.mark.parametrize("digest", [tree_record._digest, tree_record._digest_of_bytes])
def test_digest_sees_every_bit_and_the_order_but_not_the_sharding(digest):
    values = np.arange(24, dtype=np.uint32).reshape(4, 6)
    base = int(digest(values))
    for bit in range(32):
        flipped = values.copy()
        flipped[2, 3] ^= np.uint32(1 << bit)
        assert int(digest(flipped)) != base
    twice = values ^ np.uint32(0)
    twice[0, :2] ^= np.uint32(1 << 31)  # two sign flips, which a plain sum would cancel
    assert int(digest(twice)) != base
    assert int(digest(values[::-1])) != base
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    spread = jax.device_put(values, NamedSharding(mesh, PartitionSpec(None, "data")))
    assert int(digest(spread)) == base


@pytest.mark.parametrize("shape", [(), (3, 5), (tree_record._PIECE + 3, 2)])
@pytest.mark.parametrize("dtype", ["bool", "int8", "float16", "bfloat16", "float32", "int32",
                                   "float64", "int64"])
def test_arrays_in_memory_and_on_devices_have_one_digest(dtype, shape):
    """What one machine has saved, a TPU has to find sound."""
    values = np.random.default_rng(0).normal(size=shape).astype(jnp.dtype(dtype))
    with jax.enable_x64(True):
        there = tree_record._digest(jnp.asarray(values))
    assert tree_record._digest_of_bytes(values) == int(there)


def test_one_thread_saves_at_a_time(tmp_path, monkeypatch):
    """From its beginning until all is written: Orbax took the files of one save for another's."""
    seen = []

    def free():
        def take():
            taken = checkpoint._saving.acquire(blocking=False)
            if taken:
                checkpoint._saving.release()
            return taken

        return threads.submit(take).result()

    def watched(method):
        def call(self, *args, **more):
            seen.append(free())
            return method(self, *args, **more)

        return call

    for name in ("save", "wait_until_finished"):
        monkeypatch.setattr(
            ocp.AsyncCheckpointer, name, watched(getattr(ocp.AsyncCheckpointer, name)))
    with concurrent.futures.ThreadPoolExecutor() as threads:
        with Checkpointer(tmp_path) as checkpointer:
            save_small(checkpointer, 1)
            assert len(seen) >= 2 and not any(seen) and free()


def test_threads_save_one_after_another(tmp_path):
    def save(name):
        with Checkpointer(tmp_path / name, keep=9) as checkpointer:
            for step in range(1, 9):
                save_small(checkpointer, step)
            return checkpointer.all_steps()

    with concurrent.futures.ThreadPoolExecutor() as threads:
        assert list(threads.map(save, "abc")) == [list(range(1, 9))] * 3


# Which steps stay.


def save_small(checkpointer, step, metrics=None):
    checkpointer.save(step, {"w": jnp.full(2, step)}, {"count": jnp.array(step)}, {}, metrics)


def save_scored(checkpointer, scores):
    for step, score in scores.items():
        metrics = None if score is None else {"em": score, "f1": 0.0}
        save_small(checkpointer, step, metrics)


def test_keeps_the_latest_and_the_best(tmp_path):
    """Keeping by score alone would delete the latest step and send a resume backwards."""
    with Checkpointer(tmp_path, keep=2, best_metric=("em",)) as checkpointer:
        save_scored(checkpointer, {1: float("nan"), 2: 50.0, 3: 20.0, 4: 10.0, 5: None, 6: 30.0})
        assert checkpointer.all_steps() == [2, 5, 6]
        assert (checkpointer.latest_step(), checkpointer.best_step()) == (6, 2)
    with Checkpointer(tmp_path, keep=1, best_metric=("em",)) as checkpointer:
        assert checkpointer.best_step() == 2  # scores are read back from disk
        save_scored(checkpointer, {7: 50.0})
        assert checkpointer.all_steps() == [7]  # a tie goes to the later step
    assert sorted(os.listdir(tmp_path)) == ["7"]


def test_steps_of_before_there_was_a_score_are_ranked_by_em(tmp_path):
    """A run begun with an older version goes on, and is answered from, as if nothing had changed;
    where a step has both, the EM of a task that EM does not measure must not choose."""
    with Checkpointer(tmp_path, keep=9, best_metric=("em",)) as checkpointer:
        save_scored(checkpointer, {1: 10.0, 2: 30.0})
    with Checkpointer(tmp_path, keep=9, best_metric=("score", "em")) as checkpointer:
        assert checkpointer.best_step() == 2
        save_small(checkpointer, 3, {"em": 99.0, "score": 20.0})
        assert checkpointer.best_step() == 2
        save_small(checkpointer, 4, {"em": 0.0, "score": 40.0})
        assert checkpointer.best_step() == 4


def test_scores_of_another_metric_are_not_compared(tmp_path):
    """config.eval.metrics may change on the way: 29 % of BLEU were never reached by EM, and the
    run was answered from the step of then for ever."""
    bleu = {1: {"em": 1.0, "bleu": 29.0}, 2: {"em": 3.0, "bleu": 28.0}}
    with Checkpointer(tmp_path, keep=9, best_metric=("bleu",)) as checkpointer:
        for step, metrics in bleu.items():
            save_small(checkpointer, step, metrics)
        assert checkpointer.best_step() == 1
    with Checkpointer(tmp_path, keep=9, best_metric=("em",)) as checkpointer:
        assert checkpointer.best_step() == 1, "nothing is scored otherwise yet"
        save_small(checkpointer, 3, {"em": 2.0})
        assert checkpointer.best_step() == 2
    with Checkpointer(tmp_path, best_metric=("bleu",), read_only=True) as reader:
        assert reader.best_step() == 2, "as it was trained, whoever reads"
    with Checkpointer(tmp_path, keep=9, best_metric=("f1",)) as checkpointer:
        save_small(checkpointer, 4, {"f1": 0.0})
        assert checkpointer.best_step() == 4, "of the others nobody knows"


def test_scores_that_were_measured_otherwise_are_not_compared(tmp_path):
    """config.eval may change on the way: 100 % of the single question of max_examples=1 was never
    reached on all of them, and the step of then stayed the best for ever."""
    def saved(measured, scores, keep=9):
        with Checkpointer(tmp_path, keep=keep, best_metric=("em",), measured=measured) as writer:
            save_scored(writer, scores)
            best, steps = writer.best_step(), writer.all_steps()
        with Checkpointer(tmp_path, best_metric=("em",), read_only=True) as reader:
            assert reader.best_step() == best, "as it was trained, whoever reads"
        return best, steps

    assert saved(None, {1: 90.0, 2: 80.0})[0] == 1, "of an earlier version, among themselves"
    assert saved({"max_examples": "1"}, {})[0] == 1, "nothing is measured otherwise yet"
    assert saved({"max_examples": "1"}, {3: 100.0, 4: 0.0})[0] == 3
    assert saved({}, {5: None})[0] == 3, "nor here"
    assert saved({}, {6: 30.0, 7: 20.0})[0] == 6
    assert saved({}, {8: 25.0}, keep=1) == (6, [6, 8])


def test_steps_of_an_earlier_version_count_by_the_metric_that_was_theirs(tmp_path, monkeypatch):
    """They do not say which; where config.eval.metrics had changed, that was told as a defect."""
    with Checkpointer(tmp_path, keep=9, best_metric=("em",)) as checkpointer:
        save_scored(checkpointer, {1: 9.0, 2: 1.0})
    read = Checkpointer._read_content
    monkeypatch.setattr(Checkpointer, "_read_content", lambda *given: {
        name: value for name, value in read(*given).items() if name != "best_metric"})
    with Checkpointer(tmp_path, keep=9, best_metric=("rouge_l",)) as checkpointer:
        assert checkpointer.best_step() == 1
        save_small(checkpointer, 3, {"em": 0.0, "rouge_l": 1.0})


def test_without_a_metric_only_the_latest_stay_and_there_is_no_best(tmp_path):
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        assert checkpointer.latest_step() is None and checkpointer.best_step() is None
        save_scored(checkpointer, {1: 9.0, 2: 1.0, 3: 1.0})
        assert checkpointer.all_steps() == [2, 3]
        assert checkpointer.best_step() is None


def test_stray_numbered_directory_is_no_checkpoint(tmp_path):
    """An empty `9/` must not be the latest step, push out real ones, or block step 9."""
    (tmp_path / "9").mkdir()
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        assert checkpointer.latest_step() is None
        save_scored(checkpointer, {1: None, 2: None})
        assert checkpointer.all_steps() == [1, 2]
        save_scored(checkpointer, {9: None})
        assert checkpointer.all_steps() == [2, 9]


@pytest.mark.parametrize("name", ["010", "\u00b2", "\u0663"])
def test_a_folder_of_another_name_than_a_step_gets_is_no_checkpoint(tmp_path, name):
    """"010" was read as step 10, whose folder is not there; int() does not read "\u00b2"."""
    with Checkpointer(tmp_path) as checkpointer:
        save_small(checkpointer, 2)
    shutil.copytree(tmp_path / "2", tmp_path / name)
    assert steps_taken(tmp_path) == 2
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.all_steps() == [2]
        save_small(checkpointer, 3)
    assert sorted(os.listdir(tmp_path)) == sorted(["2", "3", name])


def test_a_step_is_saved_once(tmp_path):
    """A second save would replace what a reader has open."""
    with Checkpointer(tmp_path, keep=5, best_metric=("em",)) as checkpointer:
        save_scored(checkpointer, {1: 1.0, 2: 2.0, 3: 3.0})
        with pytest.raises(CheckpointError, match="step 3 exists already"):
            save_scored(checkpointer, {3: 0.0})
        assert checkpointer.all_steps() == [1, 2, 3]


def test_opening_drops_no_step(tmp_path):
    """Where the last one turns out to be damaged, training goes on from an earlier one."""
    with Checkpointer(tmp_path, keep=3) as checkpointer:
        save_scored(checkpointer, {1: None, 2: None, 3: None})
    with Checkpointer(tmp_path, keep=1) as checkpointer:
        assert checkpointer.all_steps() == [1, 2, 3]
        save_scored(checkpointer, {4: None})
        assert checkpointer.all_steps() == [4]


def test_reader_neither_creates_nor_clears_anything_nor_saves(tmp_path):
    """`evaluate` beside a training run must not delete the save under way."""
    with Checkpointer(tmp_path / "none", read_only=True) as reader:
        assert reader.latest_step() is None
        with pytest.raises(CheckpointError, match="no checkpoint of step 1"):
            reader.restore_params(1, {})
        with pytest.raises(CheckpointError, match="read-only"):
            save_small(reader, 1)
    assert os.listdir(tmp_path) == []
    save_steps(tmp_path, [1])
    unfinished = tmp_path / "2.orbax-checkpoint-tmp"
    shutil.copytree(tmp_path / "1", unfinished)
    with Checkpointer(tmp_path, read_only=True) as reader:
        assert reader.all_steps() == [1]
    assert unfinished.exists()
    with Checkpointer(tmp_path) as writer:
        save_small(writer, 3)
    assert not unfinished.exists()


# Refused input.


def test_unusable_arguments_are_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match="keep=0"):
        Checkpointer(tmp_path, keep=0)
    with Checkpointer(tmp_path, best_metric=("em",)) as checkpointer:
        with pytest.raises(ValueError, match="meta of checkpoint step 1 is no JSON"):
            checkpointer.save(1, {}, {}, {"function": print})
        with pytest.raises(ValueError, match="'em'.*step 1: f1, nll"):
            checkpointer.save(1, {}, {}, {}, metrics={"f1": 1.0, "nll": 2.0})
        with pytest.raises(ValueError, match="rng is a .*plain arrays"):
            checkpointer.save(1, {"rng": jax.random.key(0)}, {}, {})
        with pytest.raises(ValueError, match="a/count is a int"):
            checkpointer.save(1, {"a": {"count": 3}}, {}, {})
        with pytest.raises(ValueError, match=r"b has shape \(0, 4\)"):
            checkpointer.save(1, {"b": jnp.zeros((0, 4))}, {}, {})
        assert checkpointer.all_steps() == []


def test_renamed_missing_surplus_and_misshapen_parameters_are_listed(tmp_path):
    save_steps(tmp_path, [1])
    params, opt_state = make_state(1)
    wanted = abstract(params)
    wanted["encoder"]["kernal"] = wanted["encoder"].pop("kernel")
    wanted["encoder"]["half"] = jax.ShapeDtypeStruct((8, 32), jnp.bfloat16)
    wanted["decoder"]["layer_0"]["scale"] = jax.ShapeDtypeStruct((), jnp.bfloat16)
    with Checkpointer(tmp_path, read_only=True) as checkpointer:
        with pytest.raises(CheckpointMismatch) as caught:
            checkpointer.restore(1, wanted, abstract(opt_state))
    assert str(caught.value).splitlines()[1:] == [
        "  parameter encoder/kernal float32[16,8] is missing in the checkpoint "
        "(stored under a near name: encoder/kernel float32[16,8])",
        "  parameter encoder/kernel float32[16,8] is stored but has no place here",
        "  parameter decoder/layer_0/scale is stored as float32[], wanted bfloat16[]",
        "  parameter encoder/half is stored as bfloat16[8,16], wanted bfloat16[8,32]",
    ]


def test_near_names_are_looked_for_where_they_are_shown(monkeypatch):
    """Of the 900 arrays of a base-size state they took a minute and a half, in each resumption."""
    looked_for = []
    monkeypatch.setattr(tree_record.difflib, "get_close_matches",
                        lambda name, names, n: looked_for.append(name) or [])
    wanted = {f"new_{i}": jax.ShapeDtypeStruct((2,), jnp.float32) for i in range(100)}
    stored = {f"old_{i}": {"shape": [2], "dtype": "float32"} for i in range(100)}
    lines = tree_record.differences("parameter", stored, wanted, compare_dtypes=True)
    assert len(lines) == 9 and lines[-1] == "and 192 more"
    assert len(looked_for) == 8


def test_of_several_forms_the_one_that_fits_is_restored_and_each_that_does_not_is_told(tmp_path):
    """The last one's faults alone would hide what a user has changed in the first."""
    save_steps(tmp_path, [1])
    params, opt_state = make_state(1)
    first, second = ({name: abstract(opt_state)} for name in ("first", "second"))
    with Checkpointer(tmp_path) as checkpointer:
        found = checkpointer.restore_latest(abstract(params), first, abstract(opt_state))
        assert_same_bits(found[2], opt_state)
        with pytest.raises(CheckpointMismatch, match="(?s) first/.*\nRead in another .* second/"):
            checkpointer.restore_latest(abstract(params), first, second)


def test_another_optimiser_and_a_long_list_are_mismatches_of_a_few_lines(tmp_path):
    save_steps(tmp_path, [1])
    params, _ = make_state(1)
    many = {f"layer_{i}": jax.ShapeDtypeStruct((2,), jnp.float32) for i in range(100)}
    with Checkpointer(tmp_path, read_only=True) as checkpointer:
        with pytest.raises(CheckpointMismatch, match="optimiser array .*mu/encoder/half"):
            checkpointer.restore(1, abstract(params), abstract(optax.sgd(0.1).init(params)))
        with pytest.raises(CheckpointMismatch, match="and 96 more") as caught:
            checkpointer.restore_params(1, many)
    assert len(str(caught.value).splitlines()) == 10
