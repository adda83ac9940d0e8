"""The device mesh, THE table of sharding rules, and the crossing from host to device."""

from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from rag_jax.config import ConfigError, MeshConfig

RULES: dict[str, str | None] = {
    "batch": "data",  # questions; the K passages of a question stay together
    "vocab": "model",
    "heads": "model",
    "mlp": "model",
    "embed": None,
    "retrieval": None,
    "positions": None,
    "token_types": None,
    "norm": None,
    "layers": None,
}


def make_mesh(config: MeshConfig, devices: list[jax.Device] | None = None) -> Mesh:
    """A (data, model) mesh over `devices` (all by default).

    Raises:
      ConfigError: the two axes do not multiply to the number of devices.
    """
    devices = devices or jax.devices()
    sizes = {"data": config.data, "model": config.model}
    free = [name for name, size in sizes.items() if size == -1]
    fixed = int(np.prod([size for size in sizes.values() if size != -1]))
    if len(free) > 1 or 0 in sizes.values() or len(devices) % fixed or (
            not free and fixed != len(devices)):
        raise ConfigError(
            f"config.mesh: data={config.data} x model={config.model} does not fit "
            f"{len(devices)} devices; the product must be {len(devices)}, one axis may be -1"
        )
    shape = tuple(size if size != -1 else len(devices) // fixed for size in sizes.values())
    return jax.make_mesh(shape, tuple(sizes), axis_types=(AxisType.Auto,) * 2, devices=devices)


def spec(axes: tuple[str | None, ...], name: str = "tensor") -> PartitionSpec:
    """The mesh axes of a tensor with these logical axes.

    Raises:
      ValueError: a logical axis without a rule, or two that map to one mesh axis.
    """
    mapped = []
    for axis in axes:
        if axis is not None and axis not in RULES:
            raise ValueError(f"{name}: no sharding rule for axis {axis!r}; known: {list(RULES)}")
        target = RULES.get(axis)
        if target is not None and target in mapped:
            raise ValueError(f"{name}: two of its axes {axes} map to mesh axis {target!r}")
        mapped.append(target)
    return PartitionSpec(*mapped)


def param_shardings(boxed: Any, mesh: Mesh) -> Any:
    """NamedSharding of every parameter of a tree with logical axis names (boxed by Linen).

    A dimension that its mesh axis does not divide is replicated.
    """

    def one(path: Any, leaf: Any) -> NamedSharding:
        name = jax.tree_util.keystr(path)
        if not isinstance(leaf, nn.LogicallyPartitioned):
            raise ValueError(f"{name}: a parameter without logical axis names")
        sizes = leaf.value.shape
        entries = [
            axis if axis and size % mesh.shape[axis] == 0 else None
            for axis, size in zip(spec(leaf.names, name), sizes, strict=True)
        ]
        return NamedSharding(mesh, PartitionSpec(*entries))

    is_box = lambda leaf: isinstance(leaf, nn.LogicallyPartitioned)  # noqa: E731
    return jax.tree_util.tree_map_with_path(one, boxed, is_leaf=is_box)


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Leading axis over `data`, the rest replicated."""
    return NamedSharding(mesh, PartitionSpec(RULES["batch"]))


def put_batch(batch: Any, mesh: Mesh) -> Any:
    """Host arrays of a global batch onto the mesh, split along their leading axis.

    Raises:
      ConfigError: the batch size is not a multiple of the `data` axis.
    """
    rows = {leaf.shape[0] for leaf in jax.tree.leaves(batch)}
    bad = [r for r in rows if r % mesh.shape["data"]]
    if bad:
        raise ConfigError(f"a batch of {bad[0]} rows cannot be split over {mesh.shape['data']} "
                          "devices: make batch_size a multiple of the mesh's data axis")
    return jax.device_put(batch, batch_sharding(mesh))
