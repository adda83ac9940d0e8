"""Layers one after another, as a loop or as a scan, and what their backward pass keeps."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax

from rag_jax.models.attention import ATTENDED

# What a block keeps for the backward pass besides its input: names that products have above.
REMAT_POLICIES = {
    "full": None,
    "narrow": jax.checkpoint_policies.save_only_these_names("narrow"),
    "dots": jax.checkpoint_policies.save_only_these_names("narrow", "wide"),
}


class Stack(nn.Module):
    """`depth` copies of `block`, as a python loop or as one `nn.scan` over stacked parameters.

    `block()(x, *arguments, deterministic) -> x`; the arguments are the same for every layer, but
    for the last one where there is `each`. `numbered`: it is block(0), block(1), ..., in a loop.
    Parameters are named `layer_0 ...` in the loop, and `layers` with a leading layer axis
    (logical name "layers") in the scan; `unstack_layers` turns the second form into the first.
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
        """The layers one by one; only the looped form has them."""
        if self.scan:
            raise ValueError("a scanned stack has no single layers: decode with scan_layers=False "
                             "and unstack_layers(params)")
        return self.layer

    def __call__(self, x: jax.Array, *arguments: Any, deterministic: bool,
                 rows: int | None = None, each: Any = None) -> jax.Array:
        """The last layer's states; `rows` asks for those of the first so many positions only.
        each: an array with a row for every layer, which gets it."""
        def applied(scanned: bool = False, **settings: Any) -> Callable:
            def apply(block: nn.Module, x: jax.Array, *arguments: Any) -> tuple[jax.Array, None]:
                return block(x, *arguments, deterministic=deterministic, **settings), None

            if self.remat == "none":  # where nothing is drawn, all layers are traced as one
                once = deterministic and not scanned and not self.is_initializing()
                return nn.jit(apply) if once else apply
            return nn.remat(apply, policy=REMAT_POLICIES[self.remat], prevent_cse=not scanned)

        def scan(length: int) -> Callable:
            axes = (nn.broadcast,) * len(arguments) + (0,) * (each is not None)
            return nn.scan(
                applied(scanned=True), variable_axes={"params": 0, ATTENDED: 0},
                split_rngs={"params": True, "dropout": True}, in_axes=axes, length=length,
                metadata_params={nn.PARTITION_NAME: "layers"})

        def part(apply: Callable, of_stack: Callable) -> Callable:
            """`apply` with a part of the stacked parameters."""
            return nn.map_variables(apply, "params", functools.partial(jax.tree.map, of_stack))

        def own(number: int | slice) -> tuple[Any, ...]:
            return arguments if each is None else (*arguments, each[number])

        settings = {} if rows is None else {"rows": rows}  # the last layer computes no others
        if not self.scan:
            apply = applied()
            for number, layer in enumerate(self.layer[:-1]):
                x, _ = apply(layer, x, *own(number))
            return applied(**settings)(self.layer[-1], x, *own(-1))[0]
        if rows is None or self.is_initializing():
            return scan(self.depth)(self.layers, x, *own(slice(None)))[0][:, :rows]
        x, _ = part(scan(self.depth - 1), lambda p: p[:-1])(
            self.layers, x, *own(slice(-1)))
        return part(applied(**settings), lambda p: p[-1])(self.layers, x, *own(-1))[0]


def unstack_layers(params: dict) -> dict:
    """Parameters of a scanned stack in the form of the looped one (`layers` -> `layer_0` ...).

    Decoding runs the looped form: its cache is then one small pytree per layer, updated in place.
    Trees without scanned stacks come back unchanged.
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
