"""Parameters of modules, with logical names of their dimensions."""

from collections.abc import Callable

import flax.errors
import flax.linen as nn
import jax
import jax.numpy as jnp


def parameter(module: nn.Module, name: str, shape: tuple[int, ...], axes: tuple[str, ...],
              init: Callable) -> jax.Array:
    """A parameter of `module`, float32 where `init` makes it; `rag_jax.parallel` maps its logical
    axes to those of the mesh.

    For a parameter that exists, `nn.Module.param` would trace `init` to compare shapes, which takes
    a quarter of the time of tracing a model.

    Raises:
      flax.errors.ScopeParamShapeError: an existing parameter has another shape.
    """
    if not module.has_variable("params", name):
        return module.param(name, nn.with_logical_partitioning(init, axes), shape, jnp.float32)
    value = nn.unbox(module.get_variable("params", name))
    if value.shape != shape:
        raise flax.errors.ScopeParamShapeError(name, "/".join(module.path), value.shape, shape)
    return value
