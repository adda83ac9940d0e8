"""Files for which ScaNN itself ends the process or answers wrongly, in an index whose digests fit.

Such an index is hostile, not damaged: what it answers is its maker's affair, but the process stays
alive and gets rows that exist, or an error.
"""

import json
import shutil

import numpy as np
import pytest

from rag_jax.retrieval.index import PassageIndex
from rag_jax.retrieval.manifest import MANIFEST
from rag_jax.retrieval.protocol import Passage, RetrievalError
from rag_jax.retrieval.store_writing import write_store
from rag_jax.retrieval.verification import file_entry
from tests.campaigns import campaign
from tests.retrieval.indexing import build_index

WIDTH, SIZE = 32, 500
WAYS = ("rows", "flip", "head", "many", "cut", "longer", "zeros")


@pytest.fixture(scope="module")
def version(tmp_path_factory):
    """The folder of the version of a ScaNN index."""
    folder = tmp_path_factory.mktemp("faults")
    vectors = np.random.default_rng(0).standard_normal((SIZE + 1, WIDTH), np.float32)
    store = write_store(folder / "s", [Passage(f"p{i}", "", f"text {i}") for i in range(SIZE)],
                        {"ids": lambda ps: [[int(p.id[1:]) + 1] for p in ps]})
    index = build_index(store, lambda ids, mask: vectors[ids[:, 0]], folder / "i",
                        token_table="ids", max_length=1, encoder_fingerprint="e", batch_size=100,
                        length_buckets=(1,), kind="scann", recall_k=2)
    return index.files.folder


def change(file, how, rng):
    data = bytearray(file.read_bytes())
    if how in ("flip", "head"):
        data[rng.randrange(len(data) if how == "flip" else min(len(data), 200))] ^= 1 << (
            rng.randrange(8))
    elif how == "many":
        for _ in range(50):
            data[rng.randrange(len(data))] = rng.randrange(256)
    elif how == "cut":
        del data[rng.randrange(len(data)) :]
    elif how == "longer":
        data += rng.randbytes(100)
    elif how == "zeros":
        data = bytearray(len(data))
    file.write_bytes(data)
    if how == "rows":  # a sound file of fewer rows ended the process
        rows = np.load(file)
        np.save(file, rows[: len(rows) // 2] if rng.random() < 0.7 else np.tile(rows, 2))


@pytest.mark.parametrize("count", campaign.counts(2, 100))
def test_hostile_files_of_scann_never_end_the_process(version, tmp_path, count):
    queries = np.random.default_rng(1).standard_normal((100, WIDTH), np.float32)

    def case(rng):
        path = shutil.copytree(version, tmp_path / f"{rng.random()}")
        how = rng.choice(WAYS)
        file = rng.choice(sorted((path / "scann").glob("*.npy" if how == "rows" else "*")))
        change(file, how, rng)
        manifest = json.loads((path / "manifest.json").read_text())
        del manifest["checksum"]
        manifest["files"][f"scann/{file.name}"] = file_entry(file)
        MANIFEST.write(path, manifest)
        try:
            index = PassageIndex.open(path)
            for k in (1, 10):
                ids, scores = index.search(queries, k)
                assert ((ids >= 0) & (ids < SIZE)).all() and np.isfinite(scores).all()
            return "answered"
        except RetrievalError as error:
            assert str(path) in str(error)
            return "refused"
        finally:
            shutil.rmtree(path)

    assert campaign.run("scann-hostile", count, case).total() == count
