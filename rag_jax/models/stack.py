"""A stack of layers, as a loop or as a scan, and what its backward pass keeps."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax

from rag_jax.models.attention import ATTENDED

# What a layer keeps for the backward pass besides its input: results by the `checkpoint_name` that
# `Linear` and `Attention` set.
REMAT_POLICIES = {
    "full": None,
    "narrow": jax.checkpoint_policies.save_only_these_names("narrow"),
    "dots": jax.checkpoint_policies.save_only_these_names("narrow", "wide"),
}


class Stack(nn.Module):
    """`depth` layers of one kind, as a Python loop or as one `nn.scan` over stacked parameters.

    In the loop, parameters are named `layer_0`, `layer_1`, ...; in the scan, `layers`, with a
    leading axis of the logical name "layers". `unstack_layers` converts the second form to the
    first.

    Attributes:
      block: makes a layer, which is called as layer(x, *arguments, deterministic=...) -> x.
      numbered: `block` takes the number of its layer; only in a loop.
    """

    block: Callable[[], nn.Module]
    depth: int
    remat: str = "none"
    scan: bool = False
    numbered: bool = False

    def setup(self) -> None:
        if self.scan:
            self.layers = self.block()
        else:
            self.layer = [self.block(*[i] * self.numbered) for i in range(self.depth)]

    def loop(self) -> list[nn.Module]:
        """The layers, for callers that run them one by one.

        Raises:
          ValueError: the stack is scanned.
        """
        if self.scan:
            raise ValueError("a scanned stack has no single layers: decode with scan_layers=False "
                             "and unstack_layers(params)")
        return self.layer

    def __call__(self, x: jax.Array, *arguments: Any, deterministic: bool,
                 rows: int | None = None, each: Any = None) -> jax.Array:
        """The last layer's states [R, L, D].

        Args:
          x: [R, L, D].
          arguments: the same for every layer.
          rows: the last layer computes only the first `rows` positions; None = all.
          each: an array with a row for each layer, its last argument; None = no such argument.
        """
        def applied(scanned: bool = False, **settings: Any) -> Callable:
            def apply(block: nn.Module, x: jax.Array, *arguments: Any) -> tuple[jax.Array, None]:
                return block(x, *arguments, deterministic=deterministic, **settings), None

            if self.remat == "none":  # without random numbers, one trace serves all layers
                once = deterministic and not scanned and not self.is_initializing()
                return nn.jit(apply) if once else apply
            return nn.remat(apply, policy=REMAT_POLICIES[self.remat], prevent_cse=not scanned)

        def scan(length: int) -> Callable:
            axes = (nn.broadcast,) * len(arguments) + (0,) * (each is not None)
            return nn.scan(
                applied(scanned=True), variable_axes={"params": 0, ATTENDED: 0},
                split_rngs={"params": True, "dropout": True}, in_axes=axes, length=length,
                metadata_params={nn.PARTITION_NAME: "layers"})

        def with_some(apply: Callable, select: Callable) -> Callable:
            """`apply` with a selection of the stacked parameters."""
            return nn.map_variables(apply, "params", functools.partial(jax.tree.map, select))

        def arguments_of(layers: int | slice) -> tuple[Any, ...]:
            return arguments if each is None else (*arguments, each[layers])

        settings = {} if rows is None else {"rows": rows}  # of the last layer
        if not self.scan:
            apply = applied()
            for number, layer in enumerate(self.layer[:-1]):
                x, _ = apply(layer, x, *arguments_of(number))
            return applied(**settings)(self.layer[-1], x, *arguments_of(-1))[0]
        if rows is None or self.is_initializing():
            return scan(self.depth)(self.layers, x, *arguments_of(slice(None)))[0][:, :rows]
        x, _ = with_some(scan(self.depth - 1), lambda p: p[:-1])(
            self.layers, x, *arguments_of(slice(-1)))
        return with_some(applied(**settings), lambda p: p[-1])(
            self.layers, x, *arguments_of(-1))[0]


def unstack_layers(params: dict) -> dict:
    """Parameters with every scanned stack in the form of a looped one: `layers` -> `layer_0`, ...

    Decoding runs looped stacks, so that its cache is one small pytree per layer, updated in place.
    """
    result = {}
    for name, value in params.items():
        if name == "layers":
            depth = jax.tree.leaves(value)[0].shape[0]
            for index in range(depth):
                result[f"layer_{index}"] = jax.tree.map(lambda x, index=index: x[index], value)
        else:
            result[name] = unstack_layers(value) if isinstance(value, dict) else value
    return result
