"""Adding passages to an index against building it again with them.

    python benchmarks/editing.py [--embeddings FILE.npy] [--json FILE]

Without a file, --passages vectors of --width numbers around random centres. The embeddings are
given: no encoder runs on either side, so that a rebuild takes less time here than with one. Its
ScaNN index is tuned to a recall of 0.99 on noisy passages, and the edit measures it on as many.
"""

import argparse
import pathlib
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from device_index import random_vectors

from rag_jax import files, process
from rag_jax.retrieval.build import build_index
from rag_jax.retrieval.editing import edit_index
from rag_jax.retrieval.index import PassageIndex
from rag_jax.retrieval.protocol import Passage
from rag_jax.retrieval.shards import PassageEmbedder
from rag_jax.retrieval.store_writing import write_store

TEXT = "A passage of about as many words as one has. " * 10


class Given:
    """Gives the embeddings of passages whose only token is their row, and counts them."""

    def __init__(self, vectors: np.ndarray):
        self.vectors, self.rows = vectors, set()

    def embedder(self) -> PassageEmbedder:
        return PassageEmbedder(
            self._embed, token_table="row", encoder_fingerprint="given", max_length=1,
            batch_size=64, length_buckets=(1,), progress=False)

    def _embed(self, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        self.rows |= set(ids[:, 0].tolist())
        return self.vectors[ids[:, 0]]


def store_of(path: pathlib.Path, rows: range):
    return write_store(path, (Passage(str(row), f"Title {row}", TEXT) for row in rows),
                       {"row": lambda ps: [[int(p.id)] for p in ps]})


def measured(vectors: np.ndarray, new: int, repeats: int, folder: pathlib.Path) -> dict:
    """Seconds of a build of all, and of edits that add the last `new` and take them out again."""
    size, given = len(vectors) - new, Given(vectors)
    store, whole = store_of(folder / "old", range(size)), store_of(folder / "all",
                                                                   range(len(vectors)))
    more = store_of(folder / "new", range(size, len(vectors)))
    index = build_index(store, given.embedder(), folder / "index", kind="scann")
    record = {"passages": size, "added": new, "width": vectors.shape[1],
              "recall": {"before": index.manifest["recall"]["recall"]}}
    del index
    turns: dict[str, list] = {"add": [], "delete": [], "rebuild": []}

    def timed(name: str, run: Callable, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter(), cpu_secs()
        result = run(*args, **kwargs)
        turns[name].append((time.perf_counter() - began[0], cpu_secs() - began[1]))
        return result

    for _ in range(repeats):
        given.rows.clear()
        timed("add", edit_index, folder / "index", given.embedder(), more)
        record["embedded"] = len(given.rows)
        recall = PassageIndex.open(folder / "index").manifest["recall"]["recall"]
        record["recall"]["added"] = recall
        timed("delete", edit_index, folder / "index", given.embedder(),
              deleted=[p.id for p in more])
    index = timed("rebuild", build_index, whole, given.embedder(), folder / "again", kind="scann")
    record["recall"]["rebuilt"] = index.manifest["recall"]["recall"]
    for name, secs in turns.items():
        wall, cpu = map(statistics.median, zip(*secs, strict=True))
        record |= {f"{name}_secs": wall, f"{name}_cpu_secs": cpu}
    return record


def cpu_secs() -> float:
    """Of this process and of its children that have ended: ScaNN builds and first loads in one."""
    return sum(used.ru_utime + used.ru_stime for used in map(
        resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))


def main() -> None:
    process.keep_memory()
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--embeddings", metavar="FILE.npy", help="float32[N, E]")
    parser.add_argument("--passages", type=int, default=100_000)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--add", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", metavar="FILE", type=pathlib.Path)
    options = parser.parse_args()
    vectors = np.load(options.embeddings).astype(np.float32) if options.embeddings else (
        random_vectors(options.passages + options.add, options.width, 1)[0])
    with tempfile.TemporaryDirectory() as folder:
        record = measured(vectors, options.add, options.repeats, pathlib.Path(folder))
    print("{passages} x {width}: {added} added, {embedded} embedded; recall {recall}"
          .format(**record))
    for name in ("secs", "cpu_secs"):
        add, delete, rebuild = (record[f"{what}_{name}"] for what in ("add", "delete", "rebuild"))
        print(f"{name}: add {add:.2f}, delete {delete:.2f}, rebuild {rebuild:.1f}; adding takes "
              f"{100 * add / rebuild:.2f} % of a rebuild")
    if options.json:
        files.write_json(options.json, record)


if __name__ == "__main__":
    main()
