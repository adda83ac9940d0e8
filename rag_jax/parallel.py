"""The device mesh, THE table of sharding rules, and the crossing from host to device."""

import functools
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from rag_jax.config import ConfigError, MeshConfig

RULES: dict[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp"),  # questions; the K passages of a question stay together
    "vocab": ("model",),
    "heads": ("model",),
    "mlp": ("model",),
    "embed": ("fsdp",),  # of parameters: gathered where a layer needs them; states keep it whole
    "retrieval": (),
    "classes": (),
    "positions": (),
    "token_types": (),
    "norm": (),
    "layers": (),
}
_AXES = {axis for axes in RULES.values() for axis in axes}


def make_mesh(config: MeshConfig, devices: list[jax.Device] | None = None) -> Mesh:
    """A (data, fsdp, model) mesh over `devices` (all by default).

    Raises:
      ConfigError: the axes do not multiply to the number of devices.
    """
    devices = devices or jax.devices()
    sizes = {"data": config.data, "fsdp": config.fsdp, "model": config.model}
    free = [name for name, size in sizes.items() if size == -1]
    fixed = int(np.prod([size for size in sizes.values() if size != -1]))
    if len(free) > 1 or 0 in sizes.values() or len(devices) % fixed or (
            not free and fixed != len(devices)):
        raise ConfigError(
            f"config.mesh: {' x '.join(f'{name}={size}' for name, size in sizes.items())} does not "
            f"fit {len(devices)} devices; the product must be {len(devices)}, one axis may be -1"
        )
    shape = tuple(size if size != -1 else len(devices) // fixed for size in sizes.values())
    return jax.make_mesh(shape, tuple(sizes), axis_types=(AxisType.Auto,) * 3, devices=devices)


def spec(axes: tuple[str | None, ...], name: str = "tensor") -> PartitionSpec:
    """The mesh axes of a tensor with these logical axes.

    Raises:
      ValueError: a logical axis without a rule, or two that map to one mesh axis.
    """
    used: set[str] = set()
    mapped = []
    for axis in axes:
        if axis is not None and axis not in RULES:
            raise ValueError(f"{name}: no sharding rule for axis {axis!r}; known: {list(RULES)}")
        targets = RULES[axis] if axis is not None else ()
        if used & set(targets):
            raise ValueError(f"{name}: two of its axes {axes} map to mesh axis "
                             f"{(used & set(targets)).pop()!r}")
        used |= set(targets)
        mapped.append(targets or None)
    return PartitionSpec(*mapped)


def _shards(mesh: Mesh | AbstractMesh, targets: str | tuple[str, ...] | None) -> int:
    """Into how many parts these mesh axes split a dimension."""
    names = (targets,) if isinstance(targets, str) else targets or ()
    return math.prod(mesh.shape[name] for name in names)


def _is_ours(mesh: Mesh | AbstractMesh) -> bool:
    """Whether a mesh has several devices and the axes of the rules. A caller's own may have others:
    there, as without a mesh, the compiler lays out all values."""
    return mesh.size > 1 and set(mesh.shape) >= _AXES


def shards(mesh: Mesh | AbstractMesh, axis: str) -> int:
    """Into how many parts a mesh splits a logical axis; 1 where it has not several devices, or not
    the axes of the rules."""
    return _shards(mesh, RULES[axis]) if _is_ours(mesh) else 1


def platform(x: jax.Array) -> str:
    """"cpu", "gpu" or "tpu": the devices of a value inside a jitted function, which need not exist;
    where it has no mesh, those of this process."""
    device = jax.typeof(x).sharding.mesh.abstract_device
    return device.platform if device is not None else jax.default_backend()


def of_least_memory(mesh: Mesh) -> dict[str, str]:
    """Options of a compilation for the devices of a mesh: XLA's CPU backend orders operations so
    that few arrays are there at once, not so that many may run side by side. jax takes options of
    outermost functions alone, which nothing else traces."""
    platform = mesh.devices.flat[0].platform
    option = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
    return option if platform == "cpu" else {}


def filled_up(size: int, mesh: Mesh) -> int:
    """`size` rows, rounded up to what can be split over the mesh as a batch."""
    parts = shards(mesh, "batch")
    return -(-size // parts) * parts


def param_shardings(boxed: Any, mesh: Mesh) -> Any:
    """NamedSharding of every parameter of a tree with logical axis names (boxed by Linen).

    A dimension that its mesh axis does not divide is replicated; `undivided` lists them.
    """

    def one(path: Any, leaf: Any) -> NamedSharding:
        name = jax.tree_util.keystr(path)
        if not isinstance(leaf, nn.LogicallyPartitioned):
            raise ValueError(f"{name}: a parameter without logical axis names")
        sizes = leaf.value.shape
        entries = [
            targets if size % _shards(mesh, targets) == 0 else None
            for targets, size in zip(spec(leaf.names, name), sizes, strict=True)
        ]
        return NamedSharding(mesh, PartitionSpec(*entries))

    return jax.tree_util.tree_map_with_path(one, boxed, is_leaf=_is_box)


def _is_box(leaf: Any) -> bool:
    return isinstance(leaf, nn.LogicallyPartitioned)


def undivided(boxed: Any, mesh: Mesh) -> list[str]:
    """Messages about dimensions that `param_shardings` replicates although a rule splits them."""
    messages = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(boxed, is_leaf=_is_box):
        name = jax.tree_util.keystr(path)
        for axis, size in zip(leaf.names, leaf.value.shape, strict=True):
            if size % _shards(mesh, RULES[axis]):
                messages.append(
                    f"{name}: {axis} {size} is whole on every device, as "
                    f"{' x '.join(RULES[axis])} = {_shards(mesh, RULES[axis])} does not divide it")
    return messages


def constrain(x: jax.Array, *axes: str | None, name: str) -> jax.Array:
    """Lays out a value inside a jitted function as the rules say, on the mesh of its arguments.

    Left alone, the compiler may follow the layout of a parameter instead, and move a batch between
    devices where it should gather the parameters of a layer.

    Args:
      x: is returned as it is where there is no mesh of several devices, or one without the axes of
        the rules, or where the mesh does not divide the named dimensions.
      axes: logical names of the leading dimensions; the others are whole on every device.
      name: of the value, for errors.

    Raises:
      ValueError: as `spec`.
    """
    mesh, wanted = jax.typeof(x).sharding.mesh, spec(axes, name)
    if set(mesh.axis_types) != {AxisType.Auto} or not _is_ours(mesh) or any(
            size % _shards(mesh, targets) for size, targets in zip(x.shape, wanted, strict=False)):
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, wanted))


def random_bits(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """uint32[shape] of random bits for a batch of shape[0] rows inside a jitted function.

    Threefry's bits depend only on the key. The compiler splits no other generator: every device
    would draw the whole batch to take its own rows. So each device draws only its own rows, with a
    key of its place in the mesh; devices that have the same rows draw the same bits.
    """
    mesh, axes = jax.typeof(key).sharding.mesh, RULES["batch"]
    parts = shards(mesh, "batch")
    threefry = str(jax.random.key_impl(key)) == "threefry2x32"
    if threefry or parts == 1 or shape[0] % parts:
        return jax.random.bits(key, shape)

    def own(key: jax.Array) -> jax.Array:
        place = jax.random.fold_in(key, jax.lax.axis_index(axes))
        return jax.random.bits(place, (shape[0] // parts, *shape[1:]))

    return jax.shard_map(own, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(axes),
                         check_vma=False)(key)


def row_parts(x: jax.Array) -> int:
    """Into how many parts the mesh of a batch inside a jitted function splits it: 1 where there is
    no mesh of several devices, or where the mesh does not divide the rows."""
    parts = shards(jax.typeof(x).sharding.mesh, "batch")
    return 1 if x.shape[0] % parts else parts


def gathered(params: Any, boxed: Any) -> Any:
    """Parameters inside a jitted function, gathered over fsdp once, for all that follows.

    Left alone, the compiler gathers them in every iteration of a loop. The dimensions that `model`
    splits stay split.

    Args:
      boxed: the same tree with logical axis names.
    """

    def one(path: Any, leaf: jax.Array, box: nn.LogicallyPartitioned) -> jax.Array:
        mesh = jax.typeof(leaf).sharding.mesh
        if not _is_ours(mesh):
            return leaf
        axes = [axis if "fsdp" not in RULES[axis] and size % _shards(mesh, RULES[axis]) == 0
                else None for axis, size in zip(box.names, leaf.shape, strict=True)]
        return constrain(leaf, *axes, name=jax.tree_util.keystr(path))

    return jax.tree_util.tree_map_with_path(one, params, boxed)


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Leading axis over `data` and `fsdp`, the rest replicated."""
    return NamedSharding(mesh, spec(("batch",)))


def check_splits(size: int, mesh: Mesh) -> None:
    """Raises a ConfigError where a batch of `size` cannot be split evenly over the mesh."""
    parts = shards(mesh, "batch")
    if size % parts:
        raise ConfigError(f"a batch of {size} rows cannot be split over {parts} devices: make "
                          "batch_size a multiple of config.mesh's data x fsdp")


def own_rows(size: int, mesh: Mesh) -> np.ndarray:
    """The rows of a global batch of `size` that lie on this process's devices, int64, ascending.

    Raises:
      ConfigError: the batch size is not a multiple of the number of its parts.
    """
    check_splits(size, mesh)
    sharding = batch_sharding(mesh)
    if sharding.is_fully_addressable:
        return np.arange(size)
    places = sharding.addressable_devices_indices_map((size,)).values()
    return np.unique(np.concatenate([np.arange(size)[place] for place in places]))


def put_number(number: int, sharding: Sharding) -> jax.Array:
    """int32[] on all devices of a sharding; every process gives the same number, unchecked.

    It is an explicit transfer, which jax.transfer_guard allows, unlike a numpy argument of a jitted
    function. `jax.device_put` would compare the numbers of all processes at every step.
    """
    copies = [jax.device_put(np.int32(number), device) for device in sharding.addressable_devices]
    return jax.make_array_from_single_device_arrays((), sharding, copies)


def put_rows(batch: Any, mesh: Mesh) -> Any:
    """A global batch on the mesh, of which every process gives its own rows as host arrays."""
    sharding = batch_sharding(mesh)
    if sharding.is_fully_addressable:
        return jax.device_put(batch, sharding)
    return jax.tree.map(
        lambda x: jax.make_array_from_process_local_data(sharding, np.asarray(x)), batch)


def put_batch(batch: Any, mesh: Mesh) -> Any:
    """Host arrays of a global batch onto the mesh, split along their leading axis.

    Every process has the whole batch, and places its own rows.

    Raises:
      ConfigError: the batch size is not a multiple of the number of its parts.
    """
    return put_rows(jax.tree.map(lambda x: x[own_rows(len(x), mesh)], batch), mesh)


def whole(tree: Any) -> Any:
    """Device arrays that this process can read: the parts on others' devices are sent, without
    waiting."""

    def one(x: Any) -> Any:
        if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
            return x
        return _replicate(x.sharding.mesh)(x)

    return jax.tree.map(one, tree)


@functools.cache
def _replicate(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda x: x, out_shardings=replicated(mesh))


def fetch(tree: Any) -> Any:
    """Device arrays as host arrays, on every process."""
    return jax.device_get(whole(tree))


def own_mesh(mesh: Mesh) -> Mesh:
    """`mesh`, or all devices of this process where the mesh has others too."""
    if set(mesh.devices.flat) <= set(jax.local_devices()):
        return mesh
    return make_mesh(MeshConfig(), jax.local_devices())


def micro_batches(batch: Any, pieces: int) -> Any:
    """A device batch [B, ...] as [pieces, B / pieces, ...]: piece p has the rows p, p + pieces, ...

    Each piece then has the same share of every device's rows, and no row moves between devices.

    Raises:
      ConfigError: a piece is too small to be split over the mesh.
    """

    def split(x: jax.Array) -> jax.Array:
        parts = shards(jax.typeof(x).sharding.mesh, "batch")
        if x.shape[0] % (pieces * parts):
            raise ConfigError(f"a batch of {x.shape[0]} rows cannot be split into {pieces} "
                              f"micro-batches over {parts} devices each: make batch_size a "
                              f"multiple of {pieces * parts} (accumulate x mesh.data x mesh.fsdp)")
        pieced = jnp.swapaxes(x.reshape(-1, pieces, *x.shape[1:]), 0, 1)
        return constrain(pieced, None, "batch", name="micro-batches")

    return jax.tree.map(split, batch)
