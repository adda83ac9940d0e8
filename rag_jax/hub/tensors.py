"""The tensors of a checkpoint folder, read one at a time without torch, and written again.

Every format comes down to the same thing: a tensor is a dtype, a shape and strides over some
bytes of a file. Opening reads headers only; `Tensors.read` reads the bytes of one tensor.
"""

import collections
import json
import math
import os
import pathlib
import struct
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import safetensors

from rag_jax import files
from rag_jax.hub.pickled import read_torch
from rag_jax.hub.stored import (
    HEADER_LIMIT,
    HubError,
    Stored,
    read_json,
    refuse_broken_link,
    unique,
)

SAFETENSORS, TORCH = "model.safetensors", "pytorch_model.bin"
FLOATS = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16),
          "BF16": np.dtype(ml_dtypes.bfloat16)}


class Tensors(collections.UserDict[str, Stored]):
    """Names and places of a checkpoint's tensors; `read` brings one of them into memory."""

    def __init__(self, entries: Mapping[str, Stored], source: pathlib.Path):
        super().__init__(entries)
        self.source = source  # the file to name in messages: the weights, or their index

    @property
    def files(self) -> set[pathlib.Path]:
        """The files with the weights."""
        return {stored.file for stored in self.values()}

    @property
    def file_bytes(self) -> int:
        """Bytes of all files together."""
        return sum(file.stat().st_size for file in self.files)

    def read(self, name: str) -> np.ndarray:
        """The tensor as a contiguous array: float32, float16 or (ml_dtypes) bfloat16.

        Raises:
          HubError: another dtype, or the file ends too early.
        """
        stored = self[name]
        if stored.dtype not in FLOATS:
            raise HubError(
                f"{stored.file}: tensor {name!r} has dtype {stored.dtype}; weights must be "
                f"{', '.join(FLOATS)}: save the model again in one of these")
        dtype = FLOATS[stored.dtype]
        values = np.fromfile(stored.file, dtype, stored.span, offset=stored.offset)
        if values.size != stored.span:
            raise HubError(f"{stored.file}: cut off inside tensor {name!r}: download it again")
        strides = [dtype.itemsize * s for s in stored.strides]
        view = np.lib.stride_tricks.as_strided(values, stored.shape, strides, writeable=False)
        return np.ascontiguousarray(view).reshape(stored.shape)


def open_tensors(directory: str | os.PathLike) -> Tensors:
    """Opens the weights of a folder: model.safetensors or pytorch_model.bin, one file or shards.

    safetensors are preferred where both are there.

    Raises:
      HubError: no weights, a damaged or missing file, or an index that does not fit its shards.
    """
    folder = pathlib.Path(directory)
    for name, read in ((SAFETENSORS, read_header), (TORCH, read_torch)):
        file, index = folder / name, folder / f"{name}.index.json"
        if file.is_file():
            return Tensors(read(file), file)
        if index.is_file():
            return _open_shards(index, read)
    for name in (SAFETENSORS, TORCH):
        refuse_broken_link(folder / name)
        refuse_broken_link(folder / f"{name}.index.json")
    others = sorted(p.name for p in folder.glob("*") if p.suffix in (".h5", ".msgpack", ".ot"))
    found = f"found only {', '.join(others)}, which are not read: " if others else ""
    raise HubError(
        f"{folder}: no weights; {found}expected {SAFETENSORS} or {TORCH}, or their .index.json "
        "with shards (write them with save_pretrained of transformers)")


def _open_shards(index: pathlib.Path, read: Callable[[pathlib.Path], dict[str, Stored]]
                 ) -> Tensors:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
            isinstance(shard, str) for shard in weight_map.values()):
        raise HubError(f"{index}: no \"weight_map\" of tensors to files: download it again")
    entries = {}
    for shard in sorted(set(weight_map.values())):
        file = index.parent / shard
        if pathlib.PurePath(shard).name != shard:
            raise HubError(f"{index}: shard {shard!r} is not a plain file name")
        if not files.can_exist(file):
            raise HubError(f"{index}: shard {shard[:60]!r}... has a name that no file can have")
        refuse_broken_link(file)
        if not file.is_file():
            raise HubError(f"{file}: this shard, named in {index.name}, is missing: download it")
        inside = read(file)
        listed = {name for name, where in weight_map.items() if where == shard}
        for names, fault in ((listed - set(inside), f"{index.name} places there, but it lacks"),
                             (set(inside) - listed, f"it holds, but {index.name} omits")):
            if names:
                raise HubError(f"{file}: {fault} {', '.join(sorted(names)[:10])}; index and "
                               "shards are of different checkpoints: download both again")
        entries.update(inside)
    return Tensors(entries, index)


def read_header(file: pathlib.Path) -> dict[str, Stored]:
    """The entries of one safetensors file: the library checks it, JSON says where tensors lie.

    Not by the library alone: of two tensors of one name it takes the last, it reads headers of
    100 MB, and one reader of places in files serves torch's files too.

    Raises:
      HubError: not a safetensors file, cut off, or its tensors overlap, leave gaps or share a name.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= min(size - 8, HEADER_LIMIT):
            raise HubError(
                f"{file}: not a safetensors file, or cut off in its header ({size} bytes; its "
                f"header would have {length}, at most {HEADER_LIMIT} are read): download it again")
        header = stream.read(length)
    try:
        with safetensors.safe_open(file, "np"):
            pass  # dtypes, shapes and sizes agree, and no byte has two owners or none
        entries = json.loads(header, object_pairs_hook=unique)
        entries.pop("__metadata__", None)
        return {name: _entry(file, 8 + length, value) for name, value in entries.items()}
    except (safetensors.SafetensorError, ValueError) as error:
        raise HubError(f"{file}: damaged or cut off: its header of {length} bytes and its {size} "
                       f"bytes do not agree ({error}): download it again") from None


def _entry(file: pathlib.Path, data_start: int, value: Mapping[str, Any]) -> Stored:
    if not isinstance(value["dtype"], str):  # the library takes {"F32": null}, too
        raise ValueError(f"dtype {value['dtype']!r:.60}")
    shape = tuple(value["shape"])
    if len(shape) > 8:
        raise ValueError(f"a tensor of {len(shape)} dimensions")
    strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))  # it is row-major
    return Stored(file, value["dtype"], shape, strides, data_start + value["data_offsets"][0])


def write_safetensors(directory: str | os.PathLike, shapes: Mapping[str, tuple[int, ...]],
                      read: Callable[[str], np.ndarray], shard_bytes: int = 5_000_000_000
                      ) -> None:
    """Writes float32 tensors, one in memory at a time: one file, or shards with their index.

    A file gets its name only when it is complete. The library's own writer takes all tensors of a
    file at once.

    Args:
      directory: an existing folder.
      shapes: every tensor's shape, in the order of the file.
      read: gives the tensor of a name.
      shard_bytes: a file holds at most so many bytes (and at least one tensor).
    """
    import huggingface_hub

    folder = pathlib.Path(directory)
    split = huggingface_hub.split_state_dict_into_shards_factory(
        shapes, get_storage_size=lambda shape: 4 * math.prod(shape),
        filename_pattern="model{suffix}.safetensors", max_shard_size=shard_bytes)
    for file, names in split.filename_to_tensors.items():
        _write_file(folder / file, {name: shapes[name] for name in names}, read)
    if split.is_sharded:
        files.write_json(folder / f"{SAFETENSORS}.index.json", {
            "metadata": split.metadata, "weight_map": split.tensor_to_filename})


def _write_file(file: pathlib.Path, shapes: Mapping[str, tuple[int, ...]],
                read: Callable[[str], np.ndarray]) -> None:
    header: dict = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, shape in shapes.items():
        end = position + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with files.replaced(file, "wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for name, shape in shapes.items():
            value = np.ascontiguousarray(read(name), "<f4").reshape(shape)
            stream.write(memoryview(value).cast("B") if value.size else b"")
