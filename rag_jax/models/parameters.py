"""The parameters of modules, whose dimensions have logical names."""

from collections.abc import Callable

import flax.errors
import flax.linen as nn
import jax
import jax.numpy as jnp


def parameter(module: nn.Module, name: str, shape: tuple[int, ...], axes: tuple[str, ...],
              init: Callable) -> jax.Array:
    """A parameter of `module`, float32 where it is drawn; `rag_jax.parallel` maps its axes to those
    of the mesh.

    One that is given is not drawn. `nn.Module.param` traces how it would be, to compare shapes,
    which is a quarter of the time in which a model is traced.

    Raises:
      flax.errors.ScopeParamShapeError: one that is given has another shape.
    """
    if not module.has_variable("params", name):
        return module.param(name, nn.with_logical_partitioning(init, axes), shape, jnp.float32)
    value = nn.unbox(module.get_variable("params", name))
    if value.shape != shape:
        raise flax.errors.ScopeParamShapeError(name, "/".join(module.path), value.shape, shape)
    return value
