"""pytorch_model.bin without torch and without running what the pickle asks for.

The file of torch >= 1.6 is a zip archive: one pickle (`data.pkl`) that rebuilds a dictionary of
tensors, and one uncompressed member of raw bytes per storage. Older files are a row of pickles
followed by the storages. The unpickler here knows the few names that a dictionary of tensors
needs, and refuses every other one: nothing of the file is ever imported or called.
"""

import collections
import os
import pathlib
import pickle
import struct
import types
import zipfile
from collections.abc import Callable
from typing import Any, BinaryIO, NamedTuple

from rag_jax.hub.stored import ITEM_BYTES, HubError, Stored

STORAGES = {
    "FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16",
    "DoubleStorage": "F64", "LongStorage": "I64", "IntStorage": "I32", "ShortStorage": "I16",
    "CharStorage": "I8", "ByteStorage": "U8", "BoolStorage": "BOOL",
}
OLD_MAGIC = 0x1950A86A20F9469CFC6C
CONVERT = ("convert it where torch is installed: import torch, safetensors.torch as s; "
           "s.save_file({{k: v.clone() for k, v in torch.load({name!r}, weights_only=True)"
           ".items()}}, 'model.safetensors', metadata={{'format': 'pt'}})")


class Storage(NamedTuple):
    """A row of `size` elements, known by its key in the file."""

    key: str
    dtype: str
    size: int


class Tensor(NamedTuple):
    """A view of a storage; offset and strides in elements."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _rebuild_tensor(storage: Storage, offset: int, shape: tuple, strides: tuple, *_: Any) -> Tensor:
    return Tensor(storage, int(offset), tuple(map(int, shape)), tuple(map(int, strides)))


def _rebuild_parameter(tensor: Tensor, *_: Any) -> Tensor:
    return tensor


ALLOWED: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("torch._utils", "_rebuild_tensor"): _rebuild_tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    **{("torch", name): dtype for name, dtype in STORAGES.items()},
}


class _TensorsOnly(pickle.Unpickler):
    """Builds dictionaries of `Tensor`; any name outside ALLOWED is refused before it is used."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise HubError(
                f"asks for {module}.{name}, which is no part of a dictionary of tensors; nothing "
                "was run. Use the checkpoint's safetensors instead, or another source")
        allowed = ALLOWED[module, name]
        if isinstance(allowed, types.FunctionType):
            return lambda *arguments: allowed(*arguments)  # what a pickle changes on it is lost
        return allowed

    def persistent_load(self, key: Any) -> Storage:
        kind, dtype, name, _, size = key[:5]
        if kind != "storage" or dtype not in ITEM_BYTES or any(key[5:]):
            raise HubError(f"refers to {kind!r} of {dtype!r}, not to a plain storage")
        return Storage(str(name), dtype, int(size))


def read_torch(file: pathlib.Path) -> dict[str, Stored]:
    """The entries of one pytorch_model.bin.

    Raises:
      HubError: the pickle asks for anything but tensors, or the file is damaged.
    """
    read = _read_zip if zipfile.is_zipfile(file) else _read_old
    try:
        with file.open("rb") as stream:
            tensors, places = read(stream)
            return _entries(file, tensors, places)
    except HubError as error:
        raise HubError(f"{file}: {error}") from None
    except (pickle.UnpicklingError, zipfile.BadZipFile, struct.error, EOFError, KeyError,
            IndexError, AttributeError, TypeError, ValueError, OverflowError,
            MemoryError, RecursionError) as error:
        raise HubError(
            f"{file}: damaged, or not a torch file of tensors ({type(error).__name__}: {error}); "
            f"download it again, or {CONVERT.format(name=file.name)}") from None


def _entries(file: pathlib.Path, tensors: Any, places: Callable[[str], tuple[int, int]]
             ) -> dict[str, Stored]:
    """places(key) -> first byte and number of bytes of a storage."""
    if not isinstance(tensors, dict) or not all(isinstance(v, Tensor) for v in tensors.values()):
        raise HubError("holds something else than a flat dictionary of tensors: save "
                       "model.state_dict(), not the model or the trainer's state")
    entries = {}
    for name, tensor in tensors.items():
        start, size = places(tensor.storage.key)
        item = ITEM_BYTES[tensor.storage.dtype]
        stored = Stored(file, tensor.storage.dtype, tensor.shape, tensor.strides,
                        start + item * tensor.offset)
        inside = tensor.offset >= 0 and len(tensor.shape) == len(tensor.strides) and (
            min((0, *tensor.shape, *tensor.strides)) == 0)
        if not inside or item * (tensor.offset + stored.span) > size:
            raise HubError(f"tensor {name!r} reaches beyond its storage of {size} bytes: the file "
                           "is damaged, download it again")
        entries[str(name)] = stored
    return entries


def _read_zip(stream: BinaryIO) -> tuple[Any, Callable[[str], tuple[int, int]]]:
    archive = zipfile.ZipFile(stream)
    pickles = [n for n in archive.namelist() if n.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise HubError(f"a zip archive with {len(pickles)} data.pkl, not a torch file of tensors")
    root = pickles[0].removesuffix("data.pkl")
    if root + "byteorder" in archive.namelist() and archive.read(root + "byteorder") != b"little":
        raise HubError("written on a big-endian machine, which is not read: "
                       + CONVERT.format(name="pytorch_model.bin"))

    def place(key: str) -> tuple[int, int]:
        member = archive.getinfo(f"{root}data/{key}")
        if member.compress_type != zipfile.ZIP_STORED:
            raise HubError(f"storage {key} is compressed, which torch never does")
        stream.seek(member.header_offset)
        name_length, extra_length = struct.unpack("<26x2H", stream.read(30))
        return member.header_offset + 30 + name_length + extra_length, member.file_size

    with archive.open(pickles[0]) as data:
        return _TensorsOnly(data).load(), place


def _read_old(stream: BinaryIO) -> tuple[Any, Callable[[str], tuple[int, int]]]:
    """The format before torch 1.6: magic number, version, system, tensors, keys, storages."""
    magic, _, system, tensors, keys = (_TensorsOnly(stream).load() for _ in range(5))
    if magic != OLD_MAGIC or not system.get("little_endian", True):
        raise HubError("no torch file of tensors: " + CONVERT.format(name="pytorch_model.bin"))
    sizes = {t.storage.key: ITEM_BYTES[t.storage.dtype] for t in tensors.values()
             if isinstance(t, Tensor)}
    end, places = os.fstat(stream.fileno()).st_size, {}
    for key in map(str, keys):
        size = struct.unpack("<q", stream.read(8))[0] * sizes[key]
        places[key] = (stream.tell(), size)
        if size < 0 or stream.seek(size, os.SEEK_CUR) > end:
            raise HubError("cut off: download it again")
    return tensors, places.__getitem__
