"""Checkpoints and tokenizers that someone else made to do harm: no code of theirs runs, nothing
crashes, and no more memory is taken than twice the file and 100 MB."""

import io
import json
import os
import pathlib
import pickle
import random
import resource
import signal
import struct
import sys
import tempfile
import zipfile

import numpy as np
import pytest
import safetensors.numpy
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rag_jax.data import text
from rag_jax.data.tokenizer_training import BART_SPECIALS
from rag_jax.errors import UserError
from rag_jax.hub import sentence, stored, tensors
from rag_jax.hub.families import detect
from tests.campaigns import campaign

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="fork and ru_maxrss in KiB")
TENSORS = {f"layer.{n}.weight": np.full((8, 16), n, np.float32) for n in range(20)}
MEMORY, SECONDS = 100 << 20, 20  # bytes beside twice the file; of processor time


def pickled(rng: random.Random, target: pathlib.Path) -> bytes:
    """A pickle that calls, nests, repeats or claims; `target` is what its code would make."""
    call = f"cos\nsystem\n(Vtouch {target}\ntR.".encode()
    size = rng.randrange(1000, 250_000)
    laughs = b"]" + b"".join(b"q%c(%st" % (n, b"h%c" % n * 20) for n in range(1, 60))
    return rng.choice([
        call, call.replace(b"cos", b"cposix"), b"\x80\x04\x8c\x02os\x8c\x06system\x93" + call[10:],
        b"(i" + call[1:], b"}" * size + b".", b"}\x94" * size + b".", b"(" * size + b"t" * size,
        b"}r" + struct.pack("<I", rng.randrange(2**31, 2**32)) + b".",
        b"\x8e" + struct.pack("<Q", rng.randrange(2**40, 2**63)) + b"x.",
        b"X" + struct.pack("<I", rng.randrange(2**28, 2**32)) + b"x.",
        b"\x8b" + struct.pack("<I", 2**31 - 1) + b"\1.", laughs + b".",
        b"}" + laughs + b"K\1s.", b"ccollections\nOrderedDict\n" + laughs + b"\x85R.",
        b"ctorch._utils\n_rebuild_tensor_v2\n(" + laughs + b"K\0))tR.",
        laughs + b"Q.", rng.randbytes(size)])


def torch_zip(rng: random.Random, folder: pathlib.Path, target: pathlib.Path) -> None:
    """Archives whose members unpack to far more than the file, are many, or share a name."""
    bomb = rng.choice(["none", "none", "data.pkl", "byteorder", "data/0", "many", "twice"])
    bombs = bomb in ("data.pkl", "byteorder", "data/0")
    how = zipfile.ZIP_DEFLATED if bombs else zipfile.ZIP_STORED
    with zipfile.ZipFile(folder / "pytorch_model.bin", "w", how) as archive:
        pad = b"\0" * (150 << 20 if bombs else 0)
        archive.writestr("a/data.pkl", pad if bomb == "data.pkl" else b"\x80\x02"
                         + pickled(rng, target))
        archive.writestr("a/byteorder", pad if bomb == "byteorder" else b"little")
        archive.writestr("a/data/0", pad if bomb == "data/0" else b"\0" * 64)
        for n in range(rng.randrange(20_000) if bomb == "many" else 0):
            archive.writestr(f"a/{n}", b"")
        if bomb == "twice":
            archive.writestr("a/./data.pkl", b"}.")


def torch_old(rng: random.Random, folder: pathlib.Path, target: pathlib.Path) -> None:
    head = [pickle.dumps(v, 2) for v in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True})]
    at = rng.randrange(len(head) + 1)
    body = b"".join(head[:at]) + pickled(rng, target) + b"".join(head[at:])
    (folder / "pytorch_model.bin").write_bytes(body + rng.randbytes(rng.randrange(100)))


def safe(rng: random.Random, folder: pathlib.Path, target: pathlib.Path) -> None:
    """Headers that lie about lengths, places, types and names."""
    del target
    whole = safetensors.numpy.save(TENSORS)
    length = struct.unpack("<Q", whole[:8])[0]
    header, data = json.loads(whole[8 : 8 + length]), whole[8 + length :]
    entry = header[rng.choice(sorted(header))]
    kind = rng.choice(["offsets", "shape", "dtype", "deep", "wide", "long", "many", "length",
                       "name", "flip"])
    if kind == "offsets":
        entry["data_offsets"][rng.randrange(2)] = rng.choice([0, -1, 2**63, 10**30, 7, 1e400])
    elif kind == "shape":
        entry["shape"] = rng.choice([[2**40], [-8, -16], [2**62, 4], [8.5, 16], ["8", 16], {}])
    elif kind == "dtype":
        entry["dtype"] = rng.choice(["O", "F64", "C64", None, "F4", "V8", 3])
    elif kind == "many":
        header = {str(n): {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
                  for n in range(rng.randrange(60_000))}
        data = b""
    text = {"deep": b"[" * 1_000_000, "wide": b'{"a":[' + b"{}," * 1_000_000 + b"{}]}",
            "long": b'{"a":{"dtype":"F32","shape":[' + b"1," * 1_000_000 + b'1],"data_offsets":'
                    b"[0,4]}}"}.get(kind, json.dumps(header).encode())
    if kind == "name":
        text = text.replace(b"layer.1.", b"layer.2.")
    claimed = rng.choice([2**63, 2**40, 0, len(data) * 3]) if kind == "length" else len(text)
    content = bytearray(struct.pack("<Q", claimed) + text + data)
    if kind == "flip":
        content[rng.randrange(8 + len(text))] ^= 1 << rng.randrange(8)
    (folder / "model.safetensors").write_bytes(content)


def index(rng: random.Random, folder: pathlib.Path, target: pathlib.Path) -> None:
    """JSON files: shards outside the folder, deep nesting, and numbers that are none."""
    del target
    (folder / "secret").write_bytes(safetensors.numpy.save(TENSORS))
    text = rng.choice([
        json.dumps({"weight_map": {"a": "../secret"}}),
        json.dumps({"weight_map": {"a": "/dev/zero"}}),
        json.dumps({"weight_map": {"a": "x\0y"}}), json.dumps({"weight_map": [["a", "b"]]}),
        json.dumps({"weight_map": {"a": 3}}), json.dumps({"weight_map": {"a": ""}}),
        json.dumps({"weight_map": {"a": "."}}), '{"weight_map":{"a":"secret","a":"b"}}',
        '{"a":' + "[" * 500_000, '{"a":' + "9" * 100_000 + "}", "[" + "{}," * 900_000 + "{}]",
        " " * 5_000_000, '{"weight_map": NaN}', "\ud800".encode("utf-16", "surrogatepass").hex()])
    (folder / "model.safetensors.index.json").write_text(text)
    for name in ("config.json", "modules.json"):
        (folder / name).write_text(rng.choice([text, "[]", "[{}]", '[{"type": 3}]', (
            '[{"type": "x.Pooling", "path": "../.."}]'), '{"architectures": [[]]}',
            '{"architectures": 3, "model_type": {}}']))


def tokenizer(rng: random.Random, folder: pathlib.Path, target: pathlib.Path) -> None:
    """Tokenizers that grow texts, never end, lack their tokens, or number them up to 2**32."""
    del target
    vocabulary = {t: n for n, t in enumerate([*BART_SPECIALS, *"abcdefghij"])}
    made = Tokenizer(models.BPE(vocabulary, [], unk_token=None))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    value = json.loads(made.to_str())
    grow = {"type": "Replace", "pattern": {"String": "a"}, "content": "aaaaaaaa"}
    kind = rng.choice(["grow", "regex", "ids", "unk", "deep", "padding", "merges", "cut",
                       "decoder"])
    if kind in ("grow", "decoder"):
        part = "normalizer" if kind == "grow" else "decoder"
        value[part] = {"type": "Sequence", "normalizers" if kind == "grow" else "decoders":
                       [grow] * rng.randrange(4, 60)}
    elif kind == "regex":
        value["pre_tokenizer"] = {"type": "Split", "pattern": {"Regex": "(a+)+$"},
                                  "behavior": "Isolated", "invert": False}
    elif kind == "ids":
        value["model"]["vocab"]["huge"] = rng.choice([2**32 - 1, 2**31, 2**40, -1, 1.5])
    elif kind == "unk":
        value["model"] = {"type": "WordPiece", "unk_token": "no", "vocab": {"[CLS]": 0},
                          "continuing_subword_prefix": "##", "max_input_chars_per_word": 2**40}
    elif kind == "padding":
        value["padding"] = {"strategy": {"Fixed": 2**40}, "direction": "Right", "pad_id": 0,
                            "pad_to_multiple_of": None, "pad_type_id": 0, "pad_token": "<pad>"}
        value["truncation"] = {"direction": "Right", "max_length": 2, "stride": 2**40,
                               "strategy": "LongestFirst"}
    elif kind == "merges":
        value["model"]["merges"] = [["a", "no"]]
    written = "[" * 1_000_000 if kind == "deep" else json.dumps(value)
    written = written[: rng.randrange(len(written))] if kind == "cut" else written
    (folder / "tokenizer.json").write_text(written)


def open_all(folder: pathlib.Path) -> str:
    """What reading a checkpoint folder does before it computes anything."""
    if (folder / "tokenizer.json").exists():
        found = text.Tokenizer.load(folder)
        found.decode(found.encode(["an aardvark ate a cabbage" * 10])[0])
        return "opened"
    if (folder / "config.json").exists():
        config = stored.read_json(folder / "config.json")
        sentence.read(folder, config)
        detect(config, [], folder / "config.json")
    opened = tensors.open_tensors(folder)
    for name in list(opened)[:50]:
        if opened[name].dtype in tensors.FLOATS:
            opened.read(name)
    return "opened"


def one_case(rng: random.Random) -> str:
    """In a process of its own: (refused | opened), or how it died, or what it took too much of."""
    with tempfile.TemporaryDirectory() as name:
        folder, target = pathlib.Path(name), pathlib.Path(name, "executed")
        rng.choice([torch_zip, torch_old, safe, index, tokenizer])(rng, folder, target)
        size = sum(file.stat().st_size for file in folder.iterdir())
        outcome, peak = forked(lambda: open_all(folder))
        if target.exists():
            return "code of the file ran"
    return "more memory than twice the file and 100 MB" if peak > 2 * size + MEMORY else outcome


def forked(work) -> tuple[str, int]:
    """(outcome, bytes that the process grew by at its peak)."""
    receive, send = os.pipe()
    if (child := os.fork()) == 0:
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        signal.alarm(30 * SECONDS)  # if a thread of the parent held a lock that it waits for
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            outcome = work()
        except UserError:
            outcome = "refused"
        except BaseException as error:
            outcome = f"crashed: {type(error).__name__}: {str(error)[:200]}"
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        os.write(send, f"{peak << 10} {outcome}".encode())
        os._exit(0)
    os.close(send)
    with io.FileIO(receive) as stream:
        said = stream.readall().decode()
    status = os.waitpid(child, 0)[1]
    peak, _, outcome = said.partition(" ")
    return (outcome, int(peak)) if said else (f"died by signal {status & 127}", 0)


@pytest.mark.parametrize("count", campaign.counts(12, 300))
def test_hostile_checkpoints_and_tokenizers(count):
    outcomes = campaign.run("hostile-checkpoints", count, one_case)
    assert set(outcomes) <= {"refused", "opened"}, outcomes
