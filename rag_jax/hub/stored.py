"""Where a tensor lies in a file, JSON files, and the error of everything about checkpoints."""

import collections
import dataclasses
import json
import math
import os
import pathlib
from typing import Any

from rag_jax.errors import UserError

ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1,
              "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1}
# Bytes that a JSON file, a header or a pickle may have: bart-large's header has 60 KB, its pickle
# 100 KB. Parsed, it takes some twenty times as much.
HEADER_LIMIT = 4_000_000


class HubError(UserError, ValueError):
    """A checkpoint that cannot be used; the message names the file and the remedy."""


@dataclasses.dataclass(frozen=True, slots=True)
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

    @property
    def size(self) -> int:
        """Bytes of the tensor by itself; of dtypes that no model here has, its elements."""
        return math.prod(self.shape) * ITEM_BYTES.get(self.dtype, 1)


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For `object_pairs_hook`: a JSON object in which every name occurs once. Of two values of one
    name, some readers take the first, others the last.

    Raises:
      ValueError: a name occurs twice.
    """
    values = dict(pairs)
    if len(values) < len(pairs):
        counted = collections.Counter(name for name, _ in pairs)
        raise ValueError(f"the name {counted.most_common(1)[0][0]!r} stands there twice")
    return values


def read_json(file: pathlib.Path) -> dict[str, Any]:
    """The JSON object in a file of a checkpoint.

    Raises:
      HubError: there is no such file, or it is no JSON object.
    """
    value = read_json_value(file)
    if not isinstance(value, dict):
        raise HubError(f"{file}: not a JSON object: download it again")
    return value


def refuse_broken_link(file: pathlib.Path) -> None:
    """Raises a HubError for a link to what is not there, as of a cache that was copied in part."""
    if file.is_symlink() and not file.exists():
        raise HubError(f"{file}: is a link to {os.readlink(file)}, which is missing: download it "
                       "again")


def read_json_value(file: pathlib.Path) -> Any:
    """As `read_json`, of any JSON."""
    try:
        refuse_broken_link(file)
        if file.exists() and not (file.is_file() or file.is_dir()):
            raise HubError(f"{file}: is a pipe, a socket or a device, and no file")
        with file.open("rb") as stream:
            content = stream.read(HEADER_LIMIT + 1)
    except FileNotFoundError:
        raise HubError(f"{file}: missing; a checkpoint folder holds config.json and weights"
                       ) from None
    except OSError as error:
        raise HubError(f"{file}: cannot be read ({error.strerror})") from None
    if len(content) > HEADER_LIMIT:
        raise HubError(f"{file}: more than {HEADER_LIMIT} bytes, which no such file needs")
    try:
        return json.loads(content.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise HubError(f"{file}: not JSON ({error}): download it again") from None
