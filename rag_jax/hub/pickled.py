"""pytorch_model.bin without torch and without running what the pickle asks for.

The file of torch >= 1.6 is a zip archive: one pickle (`data.pkl`) that rebuilds a dictionary of
tensors, and one uncompressed member of raw bytes per storage. Older files are a row of pickles
followed by the storages. `_load` knows the few opcodes and names that a dictionary of tensors
needs, and refuses every other one: nothing of the file is ever imported or called, and what it
builds takes no more than its opcodes do.
"""

import io
import os
import pathlib
import pickletools
import struct
import zipfile
from collections.abc import Callable
from typing import Any, BinaryIO, NamedTuple

from rag_jax.hub.stored import HEADER_LIMIT, ITEM_BYTES, HubError, Stored

STORAGES = {
    "FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16",
    "DoubleStorage": "F64", "LongStorage": "I64", "IntStorage": "I32", "ShortStorage": "I16",
    "CharStorage": "I8", "ByteStorage": "U8", "BoolStorage": "BOOL",
}
OLD_MAGIC = 0x1950A86A20F9469CFC6C
OPCODE_LIMIT = 300_000  # bart-large has 20,000
CONVERT = ("convert it where torch is installed: import torch, safetensors.torch as s; "
           "s.save_file({{k: v.clone() for k, v in torch.load({name!r}, weights_only=True)"
           ".items()}}, 'model.safetensors', metadata={{'format': 'pt'}})")
NOT_FLAT = ("holds something else than a flat dictionary of tensors: save model.state_dict(), not "
            "the model or the trainer's state")


class Storage(NamedTuple):
    """A row of elements, known by its key in the file."""

    key: str
    dtype: str


class Tensor(NamedTuple):
    """A view of a storage; offset and strides in elements."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _rebuild_tensor(storage: Any, offset: Any, shape: Any, strides: Any, grad: Any = None,
                    hooks: Any = None, metadata: Any = None) -> Tensor:
    if metadata:  # of a view
        raise HubError("holds a tensor whose numbers are not those that are stored (negated or "
                       "conjugated); save tensor.resolve_neg().resolve_conj()")
    sound = isinstance(storage, Storage) and type(offset) is int and all(
        type(sizes) is tuple and len(sizes) <= 8 and all(type(n) is int for n in sizes)
        for sizes in (shape, strides))
    if not sound:
        raise HubError("describes a tensor by something else than a storage and whole numbers")
    return Tensor(storage, offset, shape, strides)


def _dictionary(pairs: Any = None) -> dict[str, Any]:
    """A dictionary of a list of pairs, which is emptied: many dictionaries of one list would take
    more memory than the file has bytes."""
    made: dict[str, Any] = {}
    if pairs is not None and type(pairs) is not list:
        raise HubError(NOT_FLAT)
    for key, value in pairs or ():
        _put(made, key, value)
    if pairs:
        pairs.clear()
    return made


def _put(dictionary: Any, key: Any, value: Any) -> None:
    """Keys are texts and numbers alone: hashing deeply nested tuples can take for ever."""
    if type(dictionary) is not dict or type(key) not in (str, int):
        raise HubError(NOT_FLAT)
    dictionary[key] = value


ALLOWED: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): _dictionary,
    ("torch._utils", "_rebuild_tensor"): _rebuild_tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): lambda tensor, *_: tensor,
    # A trainer's state has these beside tensors; they are read as None.
    **dict.fromkeys((("argparse", "Namespace"), ("torch", "device")), lambda *_: None),
    **{("torch", name): dtype for name, dtype in STORAGES.items()},
}


def _named(module: Any, name: Any) -> Any:
    if type(module) is not str or type(name) is not str or (module, name) not in ALLOWED:
        asked = (f"{module[:80]}.{name[:80]}" if type(module) is type(name) is str
                 else "something that is no name")
        raise HubError(
            f"asks for {asked}, which is no part of a dictionary of "
            "tensors; nothing was run. Use the checkpoint's safetensors instead, or another source")
    return ALLOWED[module, name]


def _storage(key: Any) -> Storage:
    plain = type(key) is tuple and 5 <= len(key) <= 6 and not any(key[5:]) and all(
        type(part) is str for part in key[:3])
    if not plain or key[0] != "storage" or key[1] not in ITEM_BYTES:
        raise HubError("refers to something else than a plain storage of numbers")
    return Storage(key[2], key[1])


CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False,
    "EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}
LITERALS = frozenset((
    "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE",
    "BINUNICODE8", "BINSTRING", "SHORT_BINSTRING"))


class _Machine:
    """A pickle's stack, marks and numbered values; one method call per opcode."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.numbered: dict[int, Any] = {}
        self.storages: dict[str, Storage] = {}  # all that the pickle refers to, by their keys

    def since_mark(self) -> list[Any]:
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def run(self, name: str, value: Any) -> None:
        """Executes an opcode.

        Raises:
          HubError: no dictionary of tensors needs it.
        """
        stack, pop = self.stack, self.stack.pop
        if name in CONSTANTS:
            stack.append(CONSTANTS[name]())
        elif name in LITERALS:
            stack.append(value)
        elif name == "MARK":
            self.marks.append(len(stack))
        elif name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            self.numbered[len(self.numbered) if name == "MEMOIZE" else value] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self.numbered[value])
        elif name in ("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"):
            items = self.since_mark() if name == "TUPLE" else [
                pop() for _ in range(int(name[-1]))][::-1]
            stack.append(tuple(items))
        elif name in ("APPEND", "APPENDS"):
            items = [pop()] if name == "APPEND" else self.since_mark()
            stack[-1].extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            items = [pop(), pop()][::-1] if name == "SETITEM" else self.since_mark()
            for key, item in zip(items[::2], items[1::2], strict=True):
                _put(stack[-1], key, item)
        elif name in ("GLOBAL", "STACK_GLOBAL"):
            names = value.split(" ", 1) if name == "GLOBAL" else [pop(), pop()][::-1]
            stack.append(_named(*names))
        elif name == "BINPERSID":
            stack.append(storage := _storage(pop()))
            self.storages[storage.key] = storage
        elif name in ("REDUCE", "NEWOBJ"):
            arguments = pop()
            if type(arguments) is not tuple or len(arguments) > 8:
                raise HubError(NOT_FLAT)
            stack.append(pop()(*arguments))  # what can be called comes from ALLOWED
        elif name == "BUILD":
            pop()  # attributes of a dictionary, such as the versions of its modules
        elif name not in ("PROTO", "FRAME", "STOP"):
            raise HubError(f"uses the opcode {name}, which no dictionary of tensors needs; nothing "
                           "was run. Use the checkpoint's safetensors instead, or another source")


def _load(stream: BinaryIO, machine: _Machine | None = None) -> Any:
    """The value of the pickle at the stream's position, which then is behind it."""
    machine = machine or _Machine()
    for number, (opcode, value, _) in enumerate(pickletools.genops(stream)):
        if number >= OPCODE_LIMIT:
            raise HubError(f"its pickle has more than {OPCODE_LIMIT} opcodes, which no dictionary "
                           "of tensors here needs")
        machine.run(opcode.name, value)
    return machine.stack.pop()


class _Bounded(io.BufferedReader):
    """A file of which no single read takes more than HEADER_LIMIT bytes, whatever sizes the file
    itself claims."""

    def read(self, size: int | None = -1) -> bytes:
        rest = os.fstat(self.fileno()).st_size - self.tell()
        wanted = rest if size is None or size < 0 else size
        if min(wanted, rest) > HEADER_LIMIT:
            raise HubError(f"its list of tensors takes {wanted} bytes; at most {HEADER_LIMIT} are "
                           "read")
        return super().read(min(wanted, rest))

    def readline(self, size: int | None = -1) -> bytes:
        return super().readline(HEADER_LIMIT)


def read_torch(file: pathlib.Path, part: str | None = None) -> dict[str, Stored]:
    """The entries of one pytorch_model.bin.

    Args:
      file: as torch.save wrote it.
      part: the entry of its dictionary that holds the tensors; None = the dictionary holds them.

    Raises:
      HubError: the pickle asks for anything but tensors, or the file is damaged.
    """
    try:
        with _Bounded(io.FileIO(file)) as stream:
            read = _read_zip if zipfile.is_zipfile(stream) else _read_old
            stream.seek(0)
            tensors, places = read(stream)
            return _entries(file, tensors[part] if part else tensors, places)
    except HubError as error:
        raise HubError(f"{file}: {error}") from None
    except (zipfile.BadZipFile, struct.error, EOFError, LookupError, AttributeError, TypeError,
            ValueError, OverflowError, MemoryError, RuntimeError) as error:
        raise HubError(
            f"{file}: damaged, or not a torch file of tensors ({type(error).__name__}: "
            f"{str(error)[:200]}); download it again, or {CONVERT.format(name=file.name)}"
        ) from None


def _entries(file: pathlib.Path, tensors: Any, places: Callable[[str], tuple[int, int]]
             ) -> dict[str, Stored]:
    """places(key) -> first byte and number of bytes of a storage."""
    if type(tensors) is not dict or not all(
            type(name) is str and isinstance(v, Tensor) for name, v in tensors.items()):
        raise HubError(NOT_FLAT)
    end, entries = file.stat().st_size, {}
    for name, tensor in tensors.items():
        start, size = places(tensor.storage.key)
        item = ITEM_BYTES[tensor.storage.dtype]
        stored = Stored(file, tensor.storage.dtype, tensor.shape, tensor.strides,
                        start + item * tensor.offset)
        inside = tensor.offset >= 0 and start + size <= end and (
            len(tensor.shape) == len(tensor.strides)
            and min((0, *tensor.shape, *tensor.strides)) == 0)
        if not inside or item * (tensor.offset + stored.span) > size:
            raise HubError(f"tensor {name!r} reaches beyond its storage of {size} bytes: the file "
                           "is damaged, download it again")
        if stored.size > size:  # a few bytes could become an array of any size
            raise HubError(f"tensor {name!r} has {stored.size} bytes in a storage of {size}: it "
                           "repeats its numbers (torch's expand), which is not read; save it with "
                           ".contiguous()")
        entries[name] = stored
    return entries


def _read_zip(stream: BinaryIO) -> tuple[Any, Callable[[str], tuple[int, int]]]:
    archive = zipfile.ZipFile(stream)
    members = archive.namelist()
    pickles = [n for n in members if n.endswith("/data.pkl")]
    if len(pickles) != 1 or len(set(members)) < len(members):
        raise HubError(f"a zip archive with {len(pickles)} data.pkl and {len(members)} members of "
                       f"{len(set(members))} names, not a torch file of tensors")
    root = pickles[0].removesuffix("data.pkl")

    def place(name: str) -> tuple[int, int]:
        member = archive.getinfo(root + name)
        if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1:
            raise HubError(f"{name} is compressed or encrypted, which torch never does")
        stream.seek(max(member.header_offset, 0))
        header = stream.read(30)
        if header[:4] != b"PK\3\4" or member.header_offset < 0:
            raise HubError(f"{name} is not where the archive's list says: download it again")
        name_length, extra_length = struct.unpack("<26x2H", header)
        return member.header_offset + 30 + name_length + extra_length, member.file_size

    def content(name: str) -> bytes:
        size = place(name)[1]
        if size > HEADER_LIMIT:
            raise HubError(f"{name} has {size} bytes; at most {HEADER_LIMIT} are read")
        return archive.read(root + name)

    if root + "byteorder" in members and content("byteorder") != b"little":
        raise HubError("written on a big-endian machine, which is not read: "
                       + CONVERT.format(name="pytorch_model.bin"))
    return _load(io.BytesIO(content("data.pkl"))), lambda key: place(f"data/{key}")


def _read_old(stream: BinaryIO) -> tuple[Any, Callable[[str], tuple[int, int]]]:
    """The format before torch 1.6: magic number, version, system, tensors, keys, storages."""
    machine = _Machine()  # of the tensors
    magic, _, system = (_load(stream) for _ in range(3))
    tensors, keys = _load(stream, machine), _load(stream)
    if magic != OLD_MAGIC or not system.get("little_endian", True):
        raise HubError("no torch file of tensors: " + CONVERT.format(name="pytorch_model.bin"))
    if type(keys) is not list or not all(type(key) is str for key in keys):
        raise HubError("no list of storages: " + CONVERT.format(name="pytorch_model.bin"))
    end, places = os.fstat(stream.fileno()).st_size, {}
    for key in keys:
        item = ITEM_BYTES[machine.storages[key].dtype]
        size = struct.unpack("<q", stream.read(8))[0] * item
        places[key] = (stream.tell(), size)
        if size < 0 or stream.seek(size, os.SEEK_CUR) > end:
            raise HubError("cut off: download it again")
    return tensors, places.__getitem__
