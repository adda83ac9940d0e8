"""Where a tensor lies in a file, and the error of everything that concerns checkpoints."""

import dataclasses
import pathlib

from rag_jax.errors import UserError

ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1,
              "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1}


class HubError(UserError, ValueError):
    """A checkpoint that cannot be used; the message names the file and the remedy."""


@dataclasses.dataclass(frozen=True)
class Stored:
    """Where a tensor lies: `strides` in elements, `offset` in bytes from the file's start."""

    file: pathlib.Path
    dtype: str  # the name that safetensors gives it: F32, F16, BF16, I64, ...
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @property
    def span(self) -> int:
        """Elements from the first to the last, both included."""
        if 0 in self.shape:
            return 0
        return 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
