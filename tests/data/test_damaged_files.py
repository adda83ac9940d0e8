"""A thousand damaged files of each form: a clear error with the place, or the damage is harmless.

Damage to the structure (fields gone, renamed, emptied or of another type, bytes that are not UTF-8,
a cut inside a line, rubbish at the end) must be refused. A flipped bit may hit nothing but the
letters of a text, which no reader can know; so a file that is read in spite of one must still have
the structure of the sample by an independent reading: the same records with the same fields, none
of them empty.
"""

import ast
import bz2
import copy
import gzip
import io
import json
import random
import re
import xml.etree.ElementTree as ElementTree
import zipfile

import pytest

from tests.data.official_files import FORMATS, Format

COUNT = 1000
WRONG = ({}, 1.5, True, [[]], [None], [1.5], [{}], "", " ", [])
NEVER_RIGHT = (1.5, True, [None], [1.5])
JSON_LINES = ("jsonl", "txt", "wiki_00")


def form(sample: Format) -> str:
    """The file's extension without that of its packing."""
    return sample.name.removesuffix(".gz").removesuffix(".bz2").rpartition(".")[2].rpartition(
        "/")[2]


# --- What a file holds, by an independent reading ------------------------------------------------


def skeleton(sample: Format, value):
    """The keys that are needed, wherever they are, and whether there is something under them."""
    if isinstance(value, dict):
        return {k: skeleton(sample, v) for k, v in value.items() if k in sample.needed}
    if isinstance(value, list):
        return [skeleton(sample, item) for item in value]
    return bool(str(value).strip()) if isinstance(value, str | int) else value


def structure(sample: Format, data: bytes):
    """What may not change unnoticed; any error says that the file is damaged."""
    if sample.name.endswith(".gz"):
        data = gzip.decompress(data)
    if sample.name.endswith(".bz2"):
        data = bz2.decompress(data)
    kind = form(sample)
    if kind == "zip":
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            names = [n for n in archive.namelist() if n.endswith(".json") and "MACOSX" not in n]
            return [skeleton(sample, json.loads(archive.read(name))) for name in names]
    if kind in ("parquet", "arrow"):
        return None  # bits of a text and of the structure cannot be told apart
    text = data.decode()
    rows = [line for line in text.split("\n") if line.strip()]
    if kind in JSON_LINES:
        return [skeleton(sample, json.loads(line)) for line in rows]
    if kind == "json":
        return skeleton(sample, json.loads(text))
    if kind == "tsv":
        return rows[0], [line.count("\t") for line in rows]
    if kind == "csv":
        return [len(ast.literal_eval(line.split("\t")[1].strip())) for line in rows]
    root = ElementTree.fromstring(re.sub(r"<(\w+)\s[^<>]*?(/?)>", r"<\1\2>", text))
    return [sorted(child.tag for child in page.iter()) for page in root]


# --- Damage ---------------------------------------------------------------------------------------


def places(sample: Format, value, found: list) -> list:
    """Pairs of an object and one of its needed keys."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        if isinstance(value, dict) and key in sample.needed and not key.endswith(".json"):
            found.append((value, key))
        read = isinstance(value, list) or key in sample.needed
        if read and isinstance(inner, dict | list):
            places(sample, inner, found)
    return found


def damaged_fields(sample: Format, rng: random.Random) -> bytes:
    """A field that is gone, renamed, of another type, or empty."""
    content = copy.deepcopy(sample.content)
    if isinstance(content, str):
        return damaged_text(sample, content, rng)
    if form(sample) in ("parquet", "arrow"):
        return damaged_columns(sample, content, rng)
    record, key = rng.choice(places(sample, content, []))
    what = rng.choice(["gone", "renamed", "wrong", "wrong"])
    if what == "renamed":
        record[key + rng.choice("xy_")] = record.pop(key)
    elif key in sample.may_be_empty:
        record[key] = rng.choice(NEVER_RIGHT)
    elif what == "gone":
        del record[key]
    else:
        record[key] = rng.choice(WRONG)
    return sample.write(content)


def damaged_text(sample: Format, text: str, rng: random.Random) -> bytes:
    """A tab or a tag that is gone, or a name in the header."""
    pattern = r"</?(?:title|ns|id|text|page|mediawiki|revision)\b[^>]*>" if "xml" in sample.name \
        else "\t" if form(sample) == "csv" else r"\t|\A\w+|(?<=\t)te(?=xt\t)|(?<=\t)ti(?=tle\n)"
    hit = rng.choice(list(re.finditer(pattern, text)))
    return sample.write(text[: hit.start()] + rng.choice(["", " ", "#"]) + text[hit.end():])


def damaged_columns(sample: Format, columns: dict, rng: random.Random) -> bytes:
    name = rng.choice(["id", "text", "title"])
    values = columns.pop(name)
    what = rng.choice(["gone", "renamed", "type", "null", "empty"])
    if what == "renamed":
        columns[name + "s"] = values
    elif what == "type":
        columns[name] = rng.choice([[1, 2, 3], [0.5, 1.5, 2.5], [["a"], ["b"], ["c"]]])
    elif what in ("null", "empty"):
        values = list(values)
        values[rng.randrange(3)] = None if what == "null" or name == "title" else ""
        columns[name] = values
    return sample.write(columns)


def cut(data: bytes, rng: random.Random) -> bytes:
    """Shortened, but not between two lines, or in a line's last field: that is a whole file."""
    ends = [at for at in range(1, len(data.rstrip())) if b"\n" not in data[at - 1 : at + 1]]
    if data.startswith(b"id\ttext\ttitle\n"):
        ends = [at for at in ends if at < 13 or data[:at].rpartition(b"\n")[2].count(b"\t") < 2]
    return data[: rng.choice(ends)]


def not_utf8(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + bytes([rng.randrange(0xF8, 0x100)]) + data[at:]


def flipped(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


def overwritten(data: bytes, rng: random.Random) -> bytes:
    at, size = rng.randrange(len(data)), rng.randrange(1, 9)
    return data[:at] + rng.randbytes(size) + data[at + size :]


def read_damaged(sample: Format, path, data: bytes) -> list | None:
    """What is read of a damaged file; None = it is refused, with the place of the damage."""
    path.unlink(missing_ok=True)  # ext4 would wait for the disk where a file is written over
    path.write_bytes(data)
    try:
        return sample.read(str(path))
    except ValueError as error:
        place = re.escape(str(path)) + r"(:\d+|: record \S+|: row \d+)"
        whole = re.escape(str(path.parent.parent)) + r"\S*: no (examples|passages) in"
        assert re.match(f"{place}|{whole}", str(error)), error
        return None


@pytest.mark.parametrize("sample", FORMATS, ids=lambda sample: sample.name)
def test_the_sample_means_what_it_says(tmp_path, sample):
    path = tmp_path / sample.name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(sample.write(sample.content))
    assert sample.read(str(path)) == sample.meaning


@pytest.mark.parametrize("sample", FORMATS, ids=lambda sample: sample.name)
def test_no_damage_is_accepted_in_silence(tmp_path, sample):
    rng = random.Random(sample.name)
    path = tmp_path / sample.name
    path.parent.mkdir(exist_ok=True)
    intact = sample.write(sample.content)
    binary = form(sample) in ("zip", "parquet", "arrow") or sample.name.endswith((".gz", ".bz2"))
    refused = 0
    for number in range(COUNT):
        kind = number % 8
        if kind in (0, 1, 2):
            data, certain = damaged_fields(sample, rng), True
        elif kind == 3:
            data, certain = cut(intact, rng), True
        elif kind == 4 and not binary:
            data, certain = not_utf8(intact, rng), True
        elif kind == 5 and number < 16:
            data, certain = b"" if number < 8 else b"\n \n", not binary or number < 8
        elif kind == 6:
            data, certain = overwritten(intact, rng), False
        else:
            data, certain = flipped(intact, rng), False
        found = read_damaged(sample, path, data)
        if found is None:
            refused += 1
            continue
        assert not certain, data
        if found == sample.meaning:
            continue
        assert len(found) == len(sample.meaning) or form(sample) == "xml", data
        assert structure(sample, data) == structure(sample, intact), data
    assert refused > COUNT / 2
