"""Operations, traffic and collectives of programs whose costs are known by hand."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from rag_jax import parallel
from rag_jax.aot import costs
from rag_jax.config import MeshConfig
from rag_jax.models.fused_attention import short_attention

LAYERS, ROWS, WIDTH = 5, 16, 24


def trace(function, *arguments):
    return jax.jit(function).trace(*arguments)


def flops(function, *arguments):
    return costs.flops(trace(function, *arguments).jaxpr.jaxpr)


def layers(x, kernels):
    return jax.lax.scan(lambda x, kernel: (jnp.tanh(x @ kernel), None), x, kernels)[0]


X = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
KERNELS = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32)
FORWARD = 2 * LAYERS * ROWS * WIDTH * WIDTH


def test_operations_are_counted_through_scans_gradients_and_recomputation():
    assert flops(layers, X, KERNELS) == FORWARD
    loss = lambda x, kernels: layers(x, kernels).sum()  # noqa: E731
    assert flops(jax.grad(loss, argnums=(0, 1)), X, KERNELS) == 3 * FORWARD

    def recomputed(x, kernels):
        block = jax.checkpoint(lambda x, kernel: (jnp.tanh(x @ kernel) @ kernel, None))
        return jax.lax.scan(block, x, kernels)[0].sum()

    assert flops(jax.grad(recomputed, argnums=(0, 1)), X, KERNELS) == 7 * FORWARD  # 2 + 4 + 1


def test_operations_of_products_with_batches_and_on_single_devices():
    batched = functools.partial(jnp.einsum, "BRE,BQE->BQR")
    assert flops(batched, jnp.zeros((3, 7, 5)), jnp.zeros((3, 2, 5))) == 2 * 3 * 2 * 7 * 5
    mesh = parallel.make_mesh(MeshConfig(4, 2))
    split = PartitionSpec(mesh.axis_names)
    sharded = jax.shard_map(lambda x: x @ x.T, mesh=mesh, in_specs=split, out_specs=split)
    assert flops(sharded, X) == 8 * 2 * 2 * 2 * WIDTH  # 8 devices with 2 rows each


def test_operations_of_a_kernel_count_for_every_block():
    rows, targets, sources, width = 3, 16, 48, 512  # two blocks of four heads in each row
    mask = jnp.ones((rows, 1, sources), jnp.int32)
    queries, keys = (jnp.zeros((rows, n, width), jnp.bfloat16) for n in (targets, sources))
    attend = functools.partial(short_attention, 64, mask)
    product = 2 * rows * targets * sources * width
    assert flops(attend, queries, keys, keys) == 2 * product
    total = lambda *arrays: attend(*arrays).sum().astype(jnp.float32)  # noqa: E731
    gradient = jax.grad(total, argnums=(0, 1, 2))
    assert flops(gradient, queries, keys, keys) == 7 * product  # weights again, four gradients


def test_of_two_branches_the_dearer_counts():
    choice = lambda x, kernels: jax.lax.cond(  # noqa: E731
        x[0, 0] > 0, lambda: layers(x, kernels), lambda: x)
    assert flops(choice, X, KERNELS) == FORWARD


@functools.cache
def gathered_by_layer():
    """Five layers whose kernels lie split over eight devices and are gathered one by one."""
    mesh = parallel.make_mesh(MeshConfig(1, 8))
    x = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=parallel.batch_sharding(mesh))
    kernels = jax.ShapeDtypeStruct(
        KERNELS.shape, KERNELS.dtype,
        sharding=NamedSharding(mesh, PartitionSpec(None, None, "fsdp")))

    def run(x, kernels):
        def layer(x, kernel):
            kernel = jax.lax.with_sharding_constraint(kernel, parallel.replicated(mesh))
            return parallel.constrain(jnp.tanh(x @ kernel), "batch", name="x"), None

        return jax.lax.scan(layer, x, kernels)[0]

    return jax.jit(run).lower(x, kernels).compile()


def test_collectives_are_counted_as_often_as_their_loop_runs():
    (gather,) = costs.Module(gathered_by_layer().as_text()).collectives()
    assert gather == costs.Collective("all-gather", f"f32[1,{WIDTH},{WIDTH}]", LAYERS,
                                      LAYERS * 4 * WIDTH * WIDTH)


@pytest.mark.parametrize("function,shapes", [
    (lambda a, b: a @ b, [(64, 32), (32, 16)]),
    (lambda a, b: (a + b, a * b), [(64, 32), (64, 32)]),
    (lambda a: a.sum(axis=0), [(64, 32)])])
def test_traffic_without_loops_is_that_of_xla(function, shapes):
    compiled = jax.jit(function).lower(
        *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)).compile()
    found = costs.Module(compiled.as_text()).accessed()
    assert found == pytest.approx(compiled.cost_analysis()["bytes accessed"], rel=0.01)


@pytest.mark.parametrize("function", [
    lambda table: jax.lax.fori_loop(0, 100, lambda i, total: total + table[i] * 2.0,
                                    jnp.zeros(table.shape[1])),
    lambda table: jax.lax.scan(lambda total, row: (total + 1, row * 2.0), 0.0, table)[1]])
def test_traffic_of_a_loop_is_a_slice_of_what_it_reads_and_fills(function):
    """Every row is read, or written, once, not all of them in every turn."""
    table = jax.ShapeDtypeStruct((100, 1000), jnp.float32)
    found = costs.Module(jax.jit(function).lower(table).compile().as_text()).accessed()
    assert 100 * 1000 * 4 * 2 <= found < 100 * 1000 * 4 * 5


def test_of_two_branches_the_one_with_less_traffic_counts():
    """Both were added up: no bound, and every step was charged for what logged ones alone do."""
    def accessed(function, *arguments):
        text = jax.jit(function).lower(*arguments).compile().as_text()
        return costs.Module(text).accessed()

    x, flag = jax.ShapeDtypeStruct((256, 256), jnp.float32), jax.ShapeDtypeStruct((), bool)
    cheap = lambda x: jnp.sin(x) * 2  # noqa: E731
    dear = lambda x: jnp.sort(jnp.sin(x @ x), axis=0) @ x  # noqa: E731
    choice = lambda x, flag: jax.lax.cond(flag, dear, cheap, x)  # noqa: E731
    assert accessed(choice, x, flag) == pytest.approx(accessed(cheap, x), abs=100)
    turns = lambda x, flag: jax.lax.fori_loop(  # noqa: E731
        0, 7, lambda i, x: jax.lax.cond(flag, dear, cheap, x), x)
    assert accessed(turns, x, flag) >= 7 * accessed(cheap, x)


TPU = """HloModule jit_step, is_scheduled=true

%together (given: bf16[8,128]) -> bf16[64,128] {
  %given = bf16[8,128]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %again = bf16[64,128]{1,0} all-gather(%given), channel_id=1, replica_groups=mesh['a'=1,'b'=8] {'b'}, dimensions={0}
}

%beside (work: bf16[8,128], part: bf16[8,128], room: bf16[64,128]) -> (bf16[8,128], bf16[8,128], bf16[64,128], bf16[64,128]) {
  %work = bf16[8,128]{1,0:T(8,128)(2,1)} parameter(0)
  %part = bf16[8,128]{1,0:T(8,128)(2,1)} parameter(1)
  %room = bf16[64,128]{1,0:T(8,128)(2,1)} parameter(2)
  %arriving = bf16[64,128]{1,0} all-gather(%part), channel_id=1, dimensions={0}
  %twice = bf16[8,128]{1,0} add(%work, %work)
  ROOT %handed = (bf16[8,128]{1,0}, bf16[8,128]{1,0}, bf16[64,128]{1,0}, bf16[64,128]{1,0}) tuple(%twice, %part, %room, %arriving)
}

%other_tiles (table: bf16[12,128,128]) -> bf16[12,128,128] {
  %table = bf16[12,128,128]{2,1,0:T(8,128)(2,1)} parameter(0)
  ROOT %moved = bf16[12,128,128]{2,1,0:T(16,128)(2,1)} copy(%table)
}

%one_layer (stack: bf16[12,128,128], at: s32[]) -> bf16[1,128,128] {
  %stack = bf16[12,128,128]{2,1,0:T(8,128)(2,1)} parameter(0)
  %at = s32[] parameter(1)
  %tiled = bf16[12,128,128]{2,1,0:T(16,128)(2,1)} fusion(%stack), kind=kLoop, calls=%other_tiles
  ROOT %layer = bf16[1,128,128]{2,1,0} dynamic-slice(%tiled, %at, %at, %at), dynamic_slice_sizes={1,128,128}
}

%body (arg: (s32[], bf16[8,128], bf16[12,128,128])) -> (s32[], bf16[8,128], bf16[12,128,128]) {
  %arg = (s32[]{:T(128)}, bf16[8,128]{1,0:T(8,128)(2,1)}, /*index=2*/bf16[12,128,128]{2,1,0:T(8,128)(2,1)}) parameter(0)
  %x = bf16[8,128]{1,0:T(8,128)(2,1)} get-tuple-element(%arg), index=1
  %stacked = bf16[12,128,128]{2,1,0:T(8,128)(2,1)} get-tuple-element(%arg), index=2
  %turn = s32[]{:T(128)S(1)} get-tuple-element(%arg), index=0
  %kernel = bf16[1,128,128]{2,1,0:T(8,128)(2,1)S(1)} fusion(%stacked, %turn), kind=kLoop, calls=%one_layer
  %fast = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} copy(%x)
  %all = (bf16[8,128]{1,0}, bf16[64,128]{1,0}) all-gather-start(%x), channel_id=1, dimensions={0}
  %busy = bf16[64,128]{1,0:T(8,128)(2,1)S(1)} fusion(%fast), kind=kCustom, calls=%together
  %done = bf16[64,128]{1,0} all-gather-done(%all)
  ROOT %out = (s32[], bf16[8,128], bf16[12,128,128]) tuple(%arg)
}

%condition (arg.1: (s32[], bf16[8,128], bf16[12,128,128])) -> pred[] {
  %twelve = s32[]{:T(128)} constant(12)
  %arg.1 = (s32[], bf16[8,128]{1,0}, bf16[12,128,128]{2,1,0}) parameter(0)
  %count = s32[]{:T(128)} get-tuple-element(%arg.1), index=0
  ROOT %less = pred[]{:T(512)} compare(%count, %twelve), direction=LT, backend_config={"flag_configs":[]}
}

ENTRY %main (p: bf16[8,128]) -> bf16[8,128] {
  %p = bf16[8,128]{1,0:T(8,128)(2,1)} parameter(0)
  %loop = (s32[], bf16[8,128]{1,0}, bf16[12,128,128]{2,1,0}) while(%p), condition=%condition, body=%body
  %sum = bf16[8,128]{1,0} all-reduce(%p), channel_id=2, to_apply=%condition
  %place = bf16[64,128]{1,0:T(8,128)(2,1)} get-tuple-element(%loop), index=2
  %overlap = (bf16[8,128]{1,0}, bf16[8,128]{1,0}, bf16[64,128]{1,0}, bf16[64,128]{1,0}) fusion(%sum, %p, %place), kind=kCustom, calls=%beside
  ROOT %result = bf16[8,128]{1,0} get-tuple-element(%loop), index=1
}
"""  # noqa: E501


def test_the_text_of_tpu_programs():
    """Tiled layouts, memory beside HBM, a layer of a stack, a loop's length by its condition, and a
    collective that is written down thrice: in two fusions that run beside it, of which one hands on
    what it sends and what arrives."""
    module = costs.Module(TPU)
    assert module.collectives() == [
        costs.Collective("all-gather", "bf16[64,128]", 12, 12 * 2 * 64 * 128),
        costs.Collective("all-reduce", "bf16[8,128]", 1, 2 * 8 * 128)]
    small = 2 * 8 * 128
    layer = 2 * 128 * 128
    overlap = small + small  # of %twice
    turn = small + small + 8 * small + layer + 9  # 9 = of %less
    assert module.accessed() == 12 * turn + 2 * small + overlap
