"""File formats: safetensors and torch pickles, whole, sharded, damaged and hostile."""

import collections
import io
import json
import os
import pathlib
import pickle
import struct
import sys
import tracemalloc
import types
import zipfile

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from rag_jax.hub import pickled
from rag_jax.hub.stored import HubError, read_json
from rag_jax.hub.tensors import open_tensors, write_safetensors

RNG = np.random.default_rng(0)
VALUES = {"a.weight": RNG.normal(size=(3, 4)).astype(np.float32),
          "b": RNG.normal(size=(5,)).astype(np.float32), "scalar": np.array(2.5, np.float32)}


def _global(module: str, name: str):
    """An object that pickles as the bare global module.name, without that module installed."""
    made = sys.modules.setdefault(module, types.ModuleType(module))
    if not hasattr(made, name):
        thing = type(name, (), {"__module__": module}) if name.endswith("Storage") else (
            types.FunctionType((lambda *a: None).__code__, {}, name))
        thing.__module__, thing.__qualname__ = module, name
        setattr(made, name, thing)
    return getattr(made, name)


class _Rebuilt:
    """Pickles as torch._utils._rebuild_tensor_v2(storage, offset, shape, strides, ...)."""

    def __init__(self, storage, offset, shape, strides, *metadata):
        self.state = (storage, offset, shape, strides, False, collections.OrderedDict(), *metadata)

    def __reduce__(self):
        return _global("torch._utils", "_rebuild_tensor_v2"), self.state


class _Storage:
    def __init__(self, kind: str, key: str, values: np.ndarray):
        self.kind, self.key, self.values = kind, key, values


@pytest.fixture
def fake_torch(monkeypatch):
    """Names of torch for the pickler; gone again when the test reads the file."""
    for module in ("torch", "torch._utils"):
        monkeypatch.setitem(sys.modules, module, types.ModuleType(module))


class _Pickler(pickle.Pickler):
    def persistent_id(self, value):
        if isinstance(value, _Storage):
            return ("storage", _global("torch", value.kind), value.key, "cpu", value.values.size)
        return None


def write_zip(file: pathlib.Path, tensors, storages, byteorder=b"little") -> None:
    """A file as torch.save writes it since 1.6, made by hand."""
    stream = io.BytesIO()
    _Pickler(stream, protocol=2).dump(tensors)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", stream.getvalue())
        archive.writestr("archive/byteorder", byteorder)
        for storage in storages:
            archive.writestr(f"archive/data/{storage.key}", storage.values.tobytes())


def torch_file(folder: pathlib.Path, name: str = "pytorch_model.bin") -> dict[str, np.ndarray]:
    """A checkpoint with a transposed view, an offset, tied copies and three dtypes."""
    floats = RNG.normal(size=20).astype(np.float32)
    halves = RNG.normal(size=6).astype(np.float16)
    brains = RNG.normal(size=4).astype(ml_dtypes.bfloat16)
    longs = np.arange(3)
    s = [_Storage("FloatStorage", "0", floats), _Storage("HalfStorage", "1", halves),
         _Storage("BFloat16Storage", "2", brains), _Storage("LongStorage", "3", longs)]
    tensors = collections.OrderedDict(
        plain=_Rebuilt(s[0], 0, (4, 5), (5, 1)), tied=_Rebuilt(s[0], 0, (4, 5), (5, 1)),
        turned=_Rebuilt(s[0], 2, (3, 4), (1, 5)), half=_Rebuilt(s[1], 0, (2, 3), (3, 1)),
        brain=_Rebuilt(s[2], 1, (3,), (1,)), ids=_Rebuilt(s[3], 0, (1, 3), (3, 1)))
    tensors._metadata = collections.OrderedDict()  # as module.state_dict() has it
    write_zip(folder / name, tensors, s)
    table = floats.reshape(4, 5)
    return {"plain": table, "tied": table, "turned": table[:, 2:5].T,
            "half": halves.reshape(2, 3), "brain": brains[1:]}


def assert_holds(tensors, values) -> None:
    for name, value in values.items():
        read = tensors.read(name)
        assert read.dtype == value.dtype and read.shape == value.shape == tensors[name].shape
        assert read.tobytes() == np.ascontiguousarray(value).tobytes(), name


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_safetensors_are_read_in_every_float_type(dtype, tmp_path):
    values = {k: v.astype(dtype) for k, v in VALUES.items()}
    safetensors.numpy.save_file(values, tmp_path / "model.safetensors")
    tensors = open_tensors(tmp_path)
    assert set(tensors) == set(values)
    assert_holds(tensors, values)


@pytest.mark.parametrize("shard_bytes", [10**9, 40, 1])
def test_written_safetensors_are_read_by_the_library_and_by_us(shard_bytes, tmp_path):
    write_safetensors(tmp_path, {k: v.shape for k, v in VALUES.items()}, VALUES.__getitem__,
                      shard_bytes)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) == {10**9: 1, 40: 2, 1: 3}[shard_bytes]
    found = {}
    for file in files:
        found.update(safetensors.numpy.load_file(file))
        with safetensors.safe_open(file, "numpy") as opened:
            assert opened.metadata() == {"format": "pt"}
    assert {k: v.tobytes() for k, v in found.items()} == {k: v.tobytes() for k, v in VALUES.items()}
    assert_holds(open_tensors(tmp_path), VALUES)
    assert not list(tmp_path.glob("*.tmp"))


def test_an_interrupted_write_leaves_no_file_of_that_name(tmp_path):
    def read(name):
        if name == "b":
            raise KeyboardInterrupt
        return VALUES[name]

    with pytest.raises(KeyboardInterrupt):
        write_safetensors(tmp_path, {k: v.shape for k, v in VALUES.items()}, read)
    assert not (tmp_path / "model.safetensors").exists()


def test_torch_file_views_ties_and_types(fake_torch, tmp_path):
    values = torch_file(tmp_path)
    tensors = open_tensors(tmp_path)
    assert_holds(tensors, values)
    with pytest.raises(HubError, match=r"'ids' has dtype I64.*F32, F16, BF16"):
        tensors.read("ids")


def test_sharded_torch_files(fake_torch, tmp_path):
    values = torch_file(tmp_path, "pytorch_model-00001-of-00001.bin")
    names = {name: "pytorch_model-00001-of-00001.bin" for name in (*values, "ids")}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": names}))
    assert_holds(open_tensors(tmp_path), values)


def write_old(file: pathlib.Path, tensors, storage: _Storage) -> None:
    """The format before torch 1.6, made by hand: pickles in a row, then the storages."""
    with file.open("wb") as stream:
        for value in (pickled.OLD_MAGIC, 1001, {"little_endian": True}):
            pickle.dump(value, stream, protocol=2)

        class Old(_Pickler):
            def persistent_id(self, value):
                key = super().persistent_id(value)
                return key and (*key, None)  # the view's metadata

        Old(stream, protocol=2).dump(tensors)
        pickle.dump([storage.key], stream, protocol=2)
        stream.write(struct.pack("<q", storage.values.size) + storage.values.tobytes())


def test_old_torch_file(fake_torch, tmp_path):
    storage = _Storage("FloatStorage", "7", np.arange(6, dtype=np.float32))
    tensors = {"w": _Rebuilt(storage, 1, (2, 2), (2, 1))}
    write_old(tmp_path / "trainer.bin", {"model": tensors, "step": 3}, storage)
    assert pickled.read_torch(tmp_path / "trainer.bin", part="model")["w"].shape == (2, 2)
    write_old(tmp_path / "pytorch_model.bin", tensors, storage)
    assert_holds(open_tensors(tmp_path), {"w": np.arange(1, 5, dtype=np.float32).reshape(2, 2)})
    damaged = (tmp_path / "pytorch_model.bin").read_bytes()[:-4]
    (tmp_path / "pytorch_model.bin").write_bytes(damaged)
    with pytest.raises(HubError, match="cut off"):
        open_tensors(tmp_path)


class _Evil:
    def __init__(self, call):
        self.call = call

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("as_zip", [True, False])
def test_a_hostile_pickle_is_refused_and_not_executed(as_zip, tmp_path):
    target = tmp_path / "executed"
    evil = {"w": _Evil((pathlib.Path.touch, (pathlib.PosixPath(target),)))}
    file = tmp_path / "pytorch_model.bin"
    if as_zip:
        write_zip(file, evil, [])
    else:
        file.write_bytes(pickle.dumps(evil, protocol=2))
    with pytest.raises(HubError, match="pytorch_model.bin.*nothing was run"):
        open_tensors(tmp_path)
    assert not target.exists()
    pickle.loads(pickle.dumps(evil))  # what a blind unpickler does
    assert target.exists()


@pytest.mark.parametrize("call", [
    (getattr, ("", "join")), (eval, ("1",)), (exec, ("",)), (print, ()), (__import__, ("os",)),
    (collections.Counter, ()), (np.zeros, (3,))])
def test_only_tensors_are_rebuilt(call, tmp_path):
    write_zip(tmp_path / "pytorch_model.bin", {"w": _Evil(call)}, [])
    with pytest.raises(HubError, match="no part of a dictionary of tensors"):
        open_tensors(tmp_path)


@pytest.mark.parametrize("offset,shape,strides", [
    (0, (100,), (1,)), (19, (2,), (1,)), (-1, (2,), (1,)), (4, (2,), (-1,)), (0, (-2,), (1,)),
    (0, (2, 2), (1,)), (0, (3, 3), (10**18, 1))])
def test_a_tensor_beyond_its_storage_is_refused(offset, shape, strides, fake_torch, tmp_path):
    """Otherwise other bytes of the file, or of memory, would become weights."""
    storage = _Storage("FloatStorage", "0", np.zeros(20, np.float32))
    write_zip(tmp_path / "pytorch_model.bin",
              {"w": _Rebuilt(storage, offset, shape, strides)}, [storage])
    with pytest.raises(HubError, match="'w' reaches beyond its storage"):
        open_tensors(tmp_path)


def test_other_contents_of_a_torch_file_are_named(fake_torch, tmp_path):
    file = tmp_path / "pytorch_model.bin"
    write_zip(file, {"epoch": 3}, [])
    with pytest.raises(HubError, match=r"flat dictionary.*state_dict"):
        open_tensors(tmp_path)
    storage = _Storage("FloatStorage", "0", np.zeros(1, np.float32))
    write_zip(file, {"w": _Rebuilt(storage, 0, (1,), (1,))}, [storage], b"big")
    with pytest.raises(HubError, match="big-endian"):
        open_tensors(tmp_path)
    write_zip(file, {"w": _Rebuilt(storage, 0, (1,), (1,))}, [])
    with pytest.raises(HubError, match="damaged"):
        open_tensors(tmp_path)
    write_zip(file, {"w": _Rebuilt(storage, 0, (1,), (1,), {"neg": True})}, [storage])
    with pytest.raises(HubError, match="numbers are not those that are stored"):
        open_tensors(tmp_path)
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(HubError, match="(?s)pytorch_model.bin.*download it again.*weights_only"):
        open_tensors(tmp_path)


@pytest.mark.parametrize("keep", [0, 5, 30, -4])
def test_truncated_safetensors(keep, tmp_path):
    file = tmp_path / "model.safetensors"
    safetensors.numpy.save_file(VALUES, file)
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(HubError, match=r"model\.safetensors: .*cut off.*download it again"):
        open_tensors(tmp_path)


def test_a_dtype_that_no_model_here_has_is_no_damage(tmp_path):
    """A file with a scale of 8 bits was to be downloaded again, for ever."""
    header = (b'{"a": {"dtype": "F8_E8M0", "shape": [4], "data_offsets": [0, 4]},'
              b' "b": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}')
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 8)
    tensors = open_tensors(tmp_path)
    assert tensors["a"].size == 4 and tensors.read("b") == [0]
    with pytest.raises(HubError, match="'a' has dtype F8_E8M0; weights must be F32"):
        tensors.read("a")


@pytest.mark.parametrize("header", [
    b"[]", b"{ ", b'{"a": {"dtype": "F32"}}',
    b'{"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}',
    b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
    b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}}',
    b'{"a": {"dtype": {"F32": null}, "shape": [1], "data_offsets": [0, 4]}}',
    b'{"a": {"dtype": "F32", "shape": [1,1,1,1,1,1,1,1,1], "data_offsets": [0, 4]}}',
    b'{"a": {"dtype": "F16", "shape": [1], "data_offsets": [0, 2]}}',  # bytes of nobody
    b'{"a": {"dtype": "I8", "shape": [1], "data_offsets": [0, 1]},'
    b' "b": {"dtype": "I8", "shape": [2], "data_offsets": [2, 4]}}',
    b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},'  # bytes of two
    b' "b": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}',
    b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},'
    b' "a": {"dtype": "I32", "shape": [1], "data_offsets": [0, 4]}}'])
def test_a_damaged_header(header, tmp_path):
    """Of overlaps, gaps and double names, two readers of one file would make two models."""
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4)
    with pytest.raises(HubError, match=r"model\.safetensors: damaged or cut off: its header"):
        open_tensors(tmp_path)


def test_a_member_before_the_file_is_damage(fake_torch, tmp_path):
    """The system's error for its place named neither the file nor what to do."""
    torch_file(tmp_path)
    file = tmp_path / "pytorch_model.bin"
    with zipfile.ZipFile(file) as archive:
        place = archive.getinfo("archive/byteorder").header_offset
    content = bytearray(file.read_bytes())
    entry = content.index(b"PK\1\2")
    while content[entry + 46 : entry + 63] != b"archive/byteorder":
        entry = content.index(b"PK\1\2", entry + 1)
    assert content[entry + 42 : entry + 46] == place.to_bytes(4, "little")
    end = content.rindex(b"PK\5\6")
    start = int.from_bytes(content[end + 16 : end + 20], "little")
    content[end + 16 : end + 20] = (start + place + 9).to_bytes(4, "little")  # all lie before it
    file.write_bytes(content)
    with pytest.raises(HubError, match=r"pytorch_model\.bin: .*download it again"):
        open_tensors(tmp_path)


@pytest.mark.parametrize("pickled_bytes", [
    b"}" * 300_001, b"}r\xff\xff\xff\x7f.", b"X\xff\xff\xff\xffab",
    b"(" * 1000 + b"t" * 999 + b"Q.",
    b"ccollections\nOrderedDict\nq\0]q\1(" + b"".join(b"X\4\0\0\0%04dN\x86" % i for i in range(
        9999)) + b"e\x85q\2" + b"h\0h\2R" * 999 + b".",
    b"\x80\2)" + b"".join(b"q%ch%c\x86" % (i, i) for i in range(24)) + b"X\1\0\0\0a\x93.",
    b"c__builtin__\neval\n.", b"(ios\nsystem\n.", b"\x8c\x02os\x8c\x06system\x93.", b"}}2s.",
    b"}K\1K\2s."])
def test_a_pickle_takes_no_more_than_its_opcodes(pickled_bytes, tmp_path, monkeypatch):
    """Numbers of the file (memo, lengths, nesting), and one list of which many dictionaries were
    made (9 GB of 180 KB), or a name of tuples in tuples, must not decide how much is allocated, and
    no opcode reaches anything but a dictionary of tensors."""
    file = tmp_path / "pytorch_model.bin"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", pickled_bytes)
    tracemalloc.start()
    try:
        assert not open_tensors(tmp_path)
    except HubError as error:
        assert str(file) in str(error)
        assert (b"}}}" not in pickled_bytes) or "more than 300000 opcodes" in str(error)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * len(pickled_bytes) + 3e7


@pytest.mark.parametrize("inside", ["archive/data.pkl", "archive/byteorder", "archive/data/0"])
def test_a_member_that_would_unpack_to_more_than_the_file_is_refused(inside, fake_torch, tmp_path):
    """300 KB of a compressed member made 600 MiB."""
    torch_file(tmp_path)
    file = tmp_path / "pytorch_model.bin"
    with zipfile.ZipFile(file) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    members[inside] = members[inside] + b"\0" * 50_000_000
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    with pytest.raises(HubError, match="is compressed or encrypted"):
        open_tensors(tmp_path)


def test_a_view_larger_than_its_storage_is_refused(fake_torch, tmp_path):
    """Strides of 0 repeat an element: a few bytes would be read as an array of any size."""
    storage = _Storage("FloatStorage", "0", np.zeros(20, np.float32))
    write_zip(tmp_path / "pytorch_model.bin",
              {"w": _Rebuilt(storage, 0, (10**6, 10**6), (0, 0))}, [storage])
    with pytest.raises(HubError, match="'w' has 4000000000000 bytes in a storage of 80: it"):
        open_tensors(tmp_path)


def _shards(folder: pathlib.Path, weight_map: dict[str, str]) -> None:
    for number, name in enumerate(VALUES, 1):
        safetensors.numpy.save_file({name: VALUES[name]}, folder / f"model-{number}.safetensors")
    text = json.dumps({"weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)


MAP = {name: f"model-{number}.safetensors" for number, name in enumerate(VALUES, 1)}


def test_a_missing_shard(tmp_path):
    _shards(tmp_path, MAP)
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(HubError, match=r"model-2\.safetensors: this shard.*is missing"):
        open_tensors(tmp_path)


@pytest.mark.parametrize("weight_map,message", [
    ({**MAP, "c": "model-1.safetensors"}, r"model-1\.safetensors.*but it lacks c"),
    ({"a.weight": MAP["a.weight"], "b": MAP["a.weight"]}, "lacks b"),
    ({**MAP, "b": "../b.safetensors"}, "not a plain file name"),
    ({**MAP, "b": "m" * 5000}, "index.json: shard 'm+'... has a name that no file can have"),
    ({**MAP, "b": "model-1.safetensors"}, "lacks b"),
])
def test_an_index_that_does_not_fit_its_shards(weight_map, message, tmp_path):
    _shards(tmp_path, weight_map)
    with pytest.raises(HubError, match=message):
        open_tensors(tmp_path)


def test_a_shard_with_more_than_its_index_says(tmp_path):
    _shards(tmp_path, MAP)
    safetensors.numpy.save_file(VALUES, tmp_path / "model-1.safetensors")
    with pytest.raises(HubError, match="omits b, scalar"):
        open_tensors(tmp_path)


def test_a_cache_that_was_copied_in_part_is_told_as_one(tmp_path):
    """Weights that a listing of the folder shows were "no weights"."""
    for name in ("model.safetensors", "config.json"):
        (tmp_path / name).symlink_to("../../blobs/abc")
    told = "is a link to ../../blobs/abc, which is missing: download it again"
    with pytest.raises(HubError, match=f"model.safetensors: {told}"):
        open_tensors(tmp_path)
    with pytest.raises(HubError, match=f"config.json: {told}"):
        read_json(tmp_path / "config.json")
    safetensors.numpy.save_file(VALUES, tmp_path / "w")
    (tmp_path / "w").rename(tmp_path / "model-1.safetensors")
    text = json.dumps({"weight_map": dict.fromkeys(VALUES, "model-1.safetensors")})
    (tmp_path / "model.safetensors.index.json").write_text(text)
    assert {*open_tensors(tmp_path)} == {*VALUES}, "the shards are whole"
    (tmp_path / "config.json").unlink()
    os.mkfifo(tmp_path / "config.json")  # it was waited for
    with pytest.raises(HubError, match="config.json: is a pipe, a socket or a device, and"):
        read_json(tmp_path / "config.json")


def test_a_folder_without_weights_says_what_it_found(tmp_path):
    with pytest.raises(HubError, match=r"no weights; expected model\.safetensors"):
        open_tensors(tmp_path)
    (tmp_path / "tf_model.h5").touch()
    with pytest.raises(HubError, match=r"found only tf_model\.h5"):
        open_tensors(tmp_path)
