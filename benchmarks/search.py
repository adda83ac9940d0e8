"""Search on the host beside FAISS: queries per second at a recall, building time and memory.

    python benchmarks/search.py [--json OUT] [--folder DIR] [--embeddings FILE.npy --queries
        FILE.npy] [--target 0.99]

Needs the [benchmarks] extra. Without files, 100,000 vectors of 768 numbers around random centres,
and queries that are such vectors with noise of half their norm. Half of the queries are the sample
on which searches are tuned, the others ask. Compared are

    ours         an index that build_index makes: ScaNN, tuned to the recall@10 on the sample
    ours_default the same before tuning: as an index of an earlier version is searched
    hnsw64       FAISS IndexHNSWFlat, 64 links, efConstruction 200; efSearch is the smallest that
                 reaches the recall@10 on the sample
    flat         FAISS IndexFlatIP, exact

Every index is built in a process of its own, and all are searched in one, in turns of half a second
each; medians of --repeats turns. --folder keeps the indexes: with them, only searching is measured
again. --json writes {"ratios": {"ours/hnsw64 batch 1": queries per second of ours over the rival's,
...}, "queries_per_sec", "recall", "build_secs", "build_peak_gib" and "loaded_gib" of each, "tuned",
"cpu"}. The peak is of the building process with the vectors in it; loaded is what opening adds.
"""

import bisect
import concurrent.futures
import functools
import itertools
import json
import multiprocessing
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable

import numpy as np
from device_index import (
    K,
    given_or_random,
    numpy_exact,
    open_vectors,
    parsed,
    parser_of,
    recall,
)
from measuring import cpu_name, peak_gib

from rag_jax import files
from rag_jax.retrieval.build import RecallSettings
from rag_jax.retrieval.index import PassageIndex
from rag_jax.retrieval.scann import ScannSettings

TURN = 0.5  # seconds
Search = Callable[[np.ndarray], np.ndarray]  # queries [B, E] to rows [B, 10]


def build(side: str, folder: pathlib.Path, target: float) -> dict[str, float]:
    """In a process of its own: makes FOLDER/SIDE and returns what that took."""
    embeddings, sample, _ = vectors(folder)
    began = time.perf_counter()
    if side == "ours":
        open_vectors(embeddings, folder, "scann", RecallSettings(sample, K, target=target))
    else:
        import faiss

        if side == "flat":
            index = faiss.IndexFlatIP(embeddings.shape[1])
        else:
            index = faiss.IndexHNSWFlat(embeddings.shape[1], 64, faiss.METRIC_INNER_PRODUCT)
            index.hnsw.efConstruction = 200
        index.add(embeddings)
        faiss.write_index(index, str(folder / side))
    secs = time.perf_counter() - began
    return {"build_secs": secs, "build_peak_gib": peak_gib(children=True)}


def vectors(folder: pathlib.Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Embeddings, the queries for tuning, and those that ask."""
    queries = np.load(folder / "queries.npy")
    return np.load(folder / "embeddings.npy"), queries[::2], queries[1::2]


def open_sides(folder: pathlib.Path, target: float) -> tuple[dict[str, Search], dict]:
    """Every side's search, and the leaves, depth and efSearch; says what opening adds to memory."""
    import faiss

    embeddings, sample, _ = vectors(folder)
    exact, tuned = numpy_exact(embeddings, sample), {"loaded_gib": {}}
    del embeddings

    def resident() -> float:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**30

    def opened(side: str, make: Callable):
        before = resident()
        index = make()
        tuned["loaded_gib"][side] = resident() - before
        return index

    index = opened("ours", lambda: PassageIndex.open(folder / "index", verify=True))
    hnsw = opened("hnsw64", lambda: faiss.read_index(str(folder / "hnsw64")))
    flat = opened("flat", lambda: faiss.read_index(str(folder / "flat")))

    def reached(ef: int) -> float:
        hnsw.hnsw.efSearch = ef
        return recall(hnsw.search(sample, K)[1], exact)

    hnsw.hnsw.efSearch = 1 + bisect.bisect_left(range(1, 1024), target, key=reached)
    found = ScannSettings(**index.manifest["scann"])
    before = ScannSettings(**index.manifest["inputs"]["scann"])
    tuned |= {"efSearch": hnsw.hnsw.efSearch, "leaves": found.leaves(index.size),
              "default_leaves": before.leaves(index.size), "depth": found.pre_reorder_num_neighbors}

    def ours(settings: ScannSettings, queries: np.ndarray) -> np.ndarray:
        index.search_as(settings)
        return index.search(queries, K).ids

    return {"ours": functools.partial(ours, found), "ours_default": functools.partial(ours, before),
            "hnsw64": lambda queries: hnsw.search(queries, K)[1],
            "flat": lambda queries: flat.search(queries, K)[1]}, tuned


def turn(search: Search, queries: np.ndarray, batch: int) -> float:
    """Queries per second; every batch has other queries."""
    batches = itertools.cycle(np.array_split(queries, max(1, len(queries) // batch)))
    asked, began = 0, time.perf_counter()
    while time.perf_counter() < began + TURN:
        some = next(batches)[:batch]
        search(some)
        asked += len(some)
    return asked / (time.perf_counter() - began)


def compare(folder: pathlib.Path, target: float, batches: list[int], repeats: int) -> dict:
    sides, tuned = open_sides(folder, target)
    embeddings, _, queries = vectors(folder)
    exact = numpy_exact(embeddings, queries)
    report = {"cpu": cpu_name(), "shape": embeddings.shape, **tuned, "recall": {}, "ratios": {},
              "queries_per_sec": {side: {} for side in sides}}
    del embeddings
    for side, search in sides.items():
        report["recall"][side] = recall(search(queries), exact)
    for batch in batches:
        rates = [{side: turn(search, queries, batch) for side, search in sides.items()}
                 for _ in range(repeats)]
        for side in sides:
            report["queries_per_sec"][side][batch] = statistics.median(r[side] for r in rates)
        for side in ("hnsw64", "flat"):
            report["ratios"][f"ours/{side} batch {batch}"] = statistics.median(
                r["ours"] / r[side] for r in rates)
    return report


def show(report: dict) -> None:
    size, width = report["shape"]
    print(f"{report['cpu']}, {size} x {width}; ours searches {report['leaves'][1]} of "
          f"{report['leaves'][0]} leaves and scores {report['depth']} candidates again (default "
          f"{report['default_leaves'][1]} and 100), hnsw64 has efSearch {report['efSearch']}")
    for side, rates in report["queries_per_sec"].items():
        shown = ", ".join(f"batch {batch} {rate:.0f}" for batch, rate in rates.items())
        print(f"{side:13} recall@{K} {report['recall'][side]:.4f}, queries per second: {shown}")
    for side, gib in report["loaded_gib"].items():
        print(f"{side:13} built in {report['build_secs'][side]:.0f} s, peak "
              f"{report['build_peak_gib'][side]:.2f} GiB; opened {gib:.2f} GiB")
    for name, ratio in report["ratios"].items():
        print(f"{name}: {ratio:.2f}")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--target", type=float, default=0.99, help="recall@10 (default: 0.99)")
    parser.add_argument("--folder", type=pathlib.Path, help="keep the indexes there")
    options = parsed(parser)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or pathlib.Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "queries.npy").exists():
            embeddings, queries = given_or_random(options, 2048)
            np.save(folder / "embeddings.npy", embeddings)
            np.save(folder / "queries.npy", queries)
        built = {}
        for side in ("ours", "hnsw64", "flat"):
            note = folder / f"{side}.json"
            if not note.exists():
                with concurrent.futures.ProcessPoolExecutor(
                        1, multiprocessing.get_context("spawn")) as pool:
                    took = pool.submit(build, side, folder, options.target).result()
                note.write_text(json.dumps(took), "utf-8")
            built[side] = json.loads(note.read_text("utf-8"))
        report = compare(folder, options.target, options.batches, options.repeats)
    for name in ("build_secs", "build_peak_gib"):
        report[name] = {side: took[name] for side, took in built.items()}
    show(report)
    if options.json:
        files.write_json(options.json, report)


if __name__ == "__main__":
    main()
