"""The record of a tree of arrays, with which a later reader checks what it has read.

A record maps the name of each leaf (`decoder/layer_0/kernel`) to its shape, dtype and
digest: plain JSON.
"""

import difflib
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rag_jax.errors import first_of

PyTree = Any
Record = Mapping[str, Mapping[str, Any]]

_MAX_LISTED = 8  # differences named in one message
_PIECE = 2**16  # numbers of an array that are worked on at a time


def _name(path: Any) -> str:
    """The name of a leaf by its path in a tree, such as `decoder/layer_0/kernel`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _named(tree: PyTree) -> dict[str, Any]:
    """The leaves of a tree by name."""
    return {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def record(tree: PyTree) -> dict[str, dict[str, Any]]:
    """Shape, dtype and digest of every leaf, by name."""
    leaves = _named(tree)
    for name, leaf in leaves.items():
        if not isinstance(leaf, jax.Array | np.ndarray) or jnp.issubdtype(
            leaf.dtype, jax.dtypes.prng_key
        ):
            raise ValueError(f"{name} is a {type(leaf).__name__}; checkpoints hold plain arrays.")
        if leaf.size == 0:
            raise ValueError(f"{name} has shape {leaf.shape}; Orbax cannot store empty arrays.")
    digests = _of_each(leaves, _digest_of_bytes, _digest)
    return {
        name: {
            "shape": list(leaf.shape),
            "dtype": str(leaf.dtype),
            "digest": f"{int(digests[name]):08x}",
        }
        for name, leaf in leaves.items()
    }


def lacking(recorded: Record, names: Collection[str]) -> set[str]:
    """Those of the top-level names of which a record has no leaf."""
    return set(names) - {name.split("/")[0] for name in recorded}


def verify(kind: str, recorded: Record, tree: PyTree) -> None:
    """Raises ValueError when a restored array is not the one that was saved."""
    restored = record(tree)
    changed = [name for name, entry in recorded.items() if restored.get(name) != entry]
    if changed:
        raise ValueError(f"the stored bytes of {kind} {first_of(changed, 1)} have changed")


def non_finite(tree: PyTree) -> list[str]:
    """Names of the leaves that hold NaN or infinity."""
    leaves = {name: leaf for name, leaf in _named(tree).items()
              if jnp.issubdtype(leaf.dtype, jnp.floating)}
    finite = _of_each(leaves, lambda array: np.isfinite(array).all(), _is_finite)
    return [name for name in leaves if not finite[name]]


def _of_each(leaves: dict[str, Any], on_host: Callable[[np.ndarray], Any],
             on_device: Callable[[jax.Array], jax.Array]) -> dict[str, Any]:
    """Applies a function to every leaf: `on_host`, in numpy, to those in the RAM of this process,
    which is as fast and compiles nothing for each shape; `on_device` to those on devices."""
    def in_ram(leaf: Any) -> bool:
        return isinstance(leaf, np.ndarray) or leaf.is_fully_addressable and all(
            device.platform == "cpu" for device in leaf.sharding.device_set)

    return jax.device_get({name: on_host(np.asarray(leaf)) if in_ram(leaf) else on_device(leaf)
                           for name, leaf in leaves.items()})


def _digest_of_bytes(array: np.ndarray) -> int:
    """The `_digest` of an array in RAM, computed piece by piece, as caches are small."""
    flat = np.ascontiguousarray(array).reshape(-1)
    bits = flat.view({1: np.uint8, 2: np.uint16}.get(flat.dtype.itemsize, np.uint32))
    piece = np.arange(_PIECE, dtype=np.uint32)
    total = 0
    for begin in range(0, bits.size, _PIECE):
        part = bits[begin : begin + _PIECE].astype(np.uint32)
        position = piece[: part.size] + np.uint32((begin + 1) % 2**32)
        total += int(_mix(part ^ _mix(position)).sum(dtype=np.uint32))
    return total % 2**32


_is_finite = jax.jit(lambda array: jnp.isfinite(array).all())


@jax.jit
def _digest(array: jax.Array) -> jax.Array:
    """uint32 digest of an array's bits, computed where the array lies.

    Integer arithmetic modulo 2**32 over (position, bits), so it is the same under every sharding
    and on every backend, and no host gathers the array. A change of any one element (or half of a
    64-bit one) always shows, for `_mix` is a bijection; any other change is missed once in 2**32.
    """
    if array.dtype == jnp.bool_:
        array = array.astype(jnp.uint8)
    unsigned = {1: jnp.uint8, 2: jnp.uint16}.get(array.dtype.itemsize, jnp.uint32)
    bits = jax.lax.bitcast_convert_type(array, unsigned).astype(jnp.uint32)
    position = jnp.zeros(bits.shape, jnp.uint32)
    for axis, size in enumerate(bits.shape):
        position = position * np.uint32(size) + jax.lax.broadcasted_iota(
            jnp.uint32, bits.shape, axis
        )
    return jnp.sum(_mix(bits ^ _mix(position + np.uint32(1))), dtype=jnp.uint32)


def _mix(bits: Any) -> Any:
    """The finaliser of MurmurHash3, a bijection on uint32: every input bit changes every output bit
    with a probability of about one half."""
    bits = (bits ^ (bits >> 16)) * np.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * np.uint32(0xC2B2AE35)
    return bits ^ (bits >> 16)


def restore_targets(recorded: Record, tree: PyTree) -> PyTree:
    """The targets of an Orbax restore: the wanted shardings with the stored dtypes."""
    default = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

    def target(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(recorded[_name(path)]["dtype"]),
                                    sharding=getattr(leaf, "sharding", None) or default)

    return jax.tree_util.tree_map_with_path(target, tree)


def differences(kind: str, recorded: Record, tree: PyTree, compare_dtypes: bool) -> list[str]:
    """Compares a record with the tree that asks for it, without reading an array.

    Args:
      kind: what the messages call a leaf, such as "parameter".
      recorded: the record of what is stored.
      tree: what is asked for; leaves have a shape and a dtype.
      compare_dtypes: whether another dtype is a difference.

    Returns:
      One line for each missing, surplus or misshapen array, cut short after a few.
    """
    stored = {name: (tuple(entry["shape"]), entry["dtype"]) for name, entry in recorded.items()}
    asked = {name: (tuple(leaf.shape), str(leaf.dtype)) for name, leaf in _named(tree).items()}
    surplus = [name for name in stored if name not in asked]
    lines = []
    for name in [name for name in asked if name not in stored]:
        shown = len(lines) < _MAX_LISTED  # a base-size state has a thousand names
        near = difflib.get_close_matches(name, surplus, n=1) if shown else []
        hint = f" (stored under a near name: {near[0]} {_form(stored[near[0]])})" if near else ""
        lines.append(f"{kind} {name} {_form(asked[name])} is missing in the checkpoint{hint}")
    for name in surplus:
        lines.append(f"{kind} {name} {_form(stored[name])} is stored but has no place here")
    for name in [name for name in asked if name in stored]:
        if stored[name][: 1 + compare_dtypes] != asked[name][: 1 + compare_dtypes]:
            lines.append(
                f"{kind} {name} is stored as {_form(stored[name])}, wanted {_form(asked[name])}"
            )
    if len(lines) > _MAX_LISTED:
        lines[_MAX_LISTED:] = [f"and {len(lines) - _MAX_LISTED} more"]
    return lines


def _form(form: tuple[tuple[int, ...], str]) -> str:
    shape, dtype = form
    return f"{dtype}[{','.join(map(str, shape))}]"
