"""The device index beside ScaNN and numpy's exact search: recall and queries per second.

    python benchmarks/device_index.py [--embeddings FILE.npy --queries FILE.npy] [--json FILE]

Without files, --passages vectors of --width numbers around random centres, and queries that are
passages with noise of half their norm. All take turns in one process; medians of --repeats turns.
Recall is the share of exact search's first 10 found. ScaNN's search is tuned to a recall of 0.99 on
noisy passages when its index is built. On another machine than a TPU, approximate top-k falls back
to exact.
"""

import argparse
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable

import jax
import numpy as np

from rag_jax import files, parallel, process
from rag_jax.config import MeshConfig
from rag_jax.retrieval.build import RecallSettings, build_index
from rag_jax.retrieval.device import DeviceIndex
from rag_jax.retrieval.device_search import DeviceSettings
from rag_jax.retrieval.index import PassageIndex
from rag_jax.retrieval.protocol import Passage
from rag_jax.retrieval.shards import PassageEmbedder
from rag_jax.retrieval.store_writing import write_store

K = 10


def random_vectors(passages: int, width: int, queries: int) -> tuple[np.ndarray, np.ndarray]:
    """Passages float32[N, E] in clusters, and queries float32[Q, E]."""
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((max(1, passages // 50), width), np.float32)
    rows = rng.integers(0, len(centres), passages)
    vectors = centres[rows] + 0.7 * rng.standard_normal((passages, width), np.float32)
    chosen = vectors[rng.integers(0, passages, queries)]
    noise = rng.standard_normal(chosen.shape, np.float32)
    norms = np.linalg.norm(chosen, axis=1, keepdims=True)
    return vectors, chosen + 0.5 * norms * noise / np.sqrt(np.float32(width))


def numpy_exact(embeddings: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """Rows int[Q, 10] by one matrix product and a partial sort."""
    scores = queries @ embeddings.T
    some = np.argpartition(scores, -K, axis=1)[:, -K:]
    order = np.argsort(-np.take_along_axis(scores, some, axis=1), axis=1, kind="stable")
    return np.take_along_axis(some, order, axis=1)


def recall(ids: np.ndarray, exact: np.ndarray) -> float:
    """The share of the rows of exact search, int[Q, 10], that are in ids int[Q, 10]."""
    return float(np.mean([len(set(a) & set(b)) / K for a, b in zip(ids, exact, strict=True)]))


def open_vectors(embeddings: np.ndarray, folder: pathlib.Path, kind: str = "exact",
                 recall: RecallSettings | None = None) -> PassageIndex:
    """An index directory of the given vectors; passage i is called i."""
    passages = (Passage(str(i), "", "-") for i in range(len(embeddings)))
    store = write_store(folder / "store", passages,
                        {"row": lambda ps: [[int(p.id)] for p in ps]})
    embedder = PassageEmbedder(
        lambda ids, mask: embeddings[ids[:, 0]], token_table="row", encoder_fingerprint="given",
        max_length=1, batch_size=1024, length_buckets=(1,), progress=False)
    return build_index(store, embedder, folder / "index", kind=kind,
                       recall=recall or RecallSettings(embeddings[:1], k=1))


def searches(embeddings: np.ndarray, folder: pathlib.Path) -> dict[str, Callable]:
    """Name -> queries to rows."""
    index = open_vectors(embeddings, folder / "exact")
    scann = open_vectors(embeddings, folder / "scann", "scann", RecallSettings())
    found = {"numpy exact": lambda q: numpy_exact(embeddings, q),
             "ScaNN": lambda q: scann.search(q, K).ids}
    mesh = parallel.make_mesh(MeshConfig())
    for dtype in ("float32", "bfloat16", "int8"):
        placed = DeviceIndex(index, mesh, DeviceSettings(dtype))
        found[f"device {dtype}"] = lambda q, placed=placed: placed.search(q, K).ids
    return found


def parser_of(description: str) -> argparse.ArgumentParser:
    """The options of a benchmark of searches: what is searched, and how often."""
    parser = argparse.ArgumentParser(description=description,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--embeddings", metavar="FILE.npy", help="float32[N, E]")
    parser.add_argument("--queries", metavar="FILE.npy", help="float32[Q, E]")
    parser.add_argument("--passages", type=int, default=100_000)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", metavar="FILE", type=pathlib.Path)
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    options = parser.parse_args()
    if bool(options.embeddings) != bool(options.queries):
        parser.error("--embeddings and --queries go together")
    return options


def given_or_random(options: argparse.Namespace, queries: int) -> tuple[np.ndarray, np.ndarray]:
    """Passages and queries of the files that the options name, or random ones."""
    if options.embeddings:
        return tuple(np.load(file).astype(np.float32)
                     for file in (options.embeddings, options.queries))
    return random_vectors(options.passages, options.width, queries)


def main() -> None:
    process.keep_memory()
    options = parsed(parser_of(__doc__))
    embeddings, queries = given_or_random(options, 512)
    with tempfile.TemporaryDirectory() as folder:
        found = searches(embeddings, pathlib.Path(folder))
        exact = numpy_exact(embeddings, queries)
        recalls = {name: recall(search(queries), exact) for name, search in found.items()}
        rates = {name: {} for name in found}
        for batch in options.batches:
            secs = {name: [] for name in found}
            for repeat in range(options.repeats + 1):  # the first turn compiles
                for name, search in found.items():
                    rows = (np.arange(batch) + repeat * batch) % len(queries)
                    began = time.perf_counter()
                    search(queries[rows])
                    secs[name].append(time.perf_counter() - began)
            for name, taken in secs.items():
                rates[name][batch] = batch / statistics.median(taken[1:])
    print(f"{len(embeddings)} x {embeddings.shape[1]}, {len(jax.devices())} "
          f"{jax.devices()[0].platform} device(s)")
    for name in found:
        shown = ", ".join(f"batch {b} {rate:.0f}" for b, rate in rates[name].items())
        print(f"{name:16s} recall@{K} {recalls[name]:.4f}, queries per second: {shown}")
    if options.json:
        record = {"passages": len(embeddings), "width": embeddings.shape[1], "recall": recalls,
                  "queries_per_second": rates}
        files.write_json(options.json, record)


if __name__ == "__main__":
    main()
