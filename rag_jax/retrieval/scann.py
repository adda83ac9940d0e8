"""Approximate search by ScaNN: tree, asymmetric hashing, reordering; guarded against its crashes.

ScaNN 1.4 ends the process on NaN, huge values, zero threads and damaged files, and returns passage
0 with score NaN when it finds fewer than k. So vectors, queries and k are checked first, an index
is built and first loaded in a child process, and exact search answers the queries for which ScaNN
finds too few. ScaNN only nominates rows: the scores returned are exact.
"""

import dataclasses
import importlib.metadata
import itertools
import json
import logging
import math
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from rag_jax.retrieval.exact import ExactIndex, row_scores
from rag_jax.retrieval.protocol import Index, RetrievalError, SearchResult, check_vectors, merge

# The files that the builder writes; no others are read. ScaNN would unpickle a scann_docids.pkl,
# and so run code from it.
SCANN_FILES = ("ah_codebook.pb", "bfloat16_dataset.npy", "datapoint_to_token.npy",
               "hashed_dataset.npy", "hashed_dataset_soar.npy", "scann_assets.pbtxt",
               "scann_config.pb", "serialized_partitioner.pb")
SMALLEST = 16  # passages from which the codes of asymmetric hashing can be learned
EXACT_ROW = 30  # codes that are read in the time in which one row is scored exactly
ROUNDING = 2.0**-8  # relative error of a score from bfloat16 rows, if one coordinate dominates
LARGEST_STRENGTH = 1e9  # of avq, soar_lambda and anisotropic_threshold
COVERED = 8192  # passages whose codes each untuned query reads at least, for small indexes
_CHILD = """
import json, os, sys
task = json.load(sys.stdin)
if sys.platform == "linux":  # it ends with its parent, however that ends
    import ctypes
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
    if os.getppid() != task["parent"]:
        sys.exit("its parent has ended")
sys.path[:] = task["paths"]
from rag_jax.retrieval import scann
scann.child_main(task)
"""
_ASSET = r'assets\s*{\s*asset_type:\s*[A-Z0-9_]+\s+asset_path:\s*"([^"\n]*)"\s*}'
_log = logging.getLogger(__name__)


def scann_missing() -> str | None:
    """Returns None if ScaNN can be imported, else why not and what to do."""
    try:
        import scann  # noqa: F401
    except ImportError as error:
        return (
            f"ScaNN cannot be imported ({error}); it has wheels for Linux only, and this is "
            f"{platform.system()} {platform.machine()}. The exact index serves; on Linux, "
            "pip install scann.")
    return None


def scann_version() -> str | None:
    """The installed distribution that provides ScaNN, for example "scann 1.4.2"."""
    for name in ("scann", "scann-core"):
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


@dataclasses.dataclass(frozen=True)
class ScannSettings:
    """How to build and search a ScaNN index.

    Attributes:
        num_leaves: parts of the tree; None for 1.3 sqrt(N).
        leaves_to_search: parts searched per query. This limits recall first, because questions lie
            apart from passages. None: build_index tunes it to a recall; untuned it is 3.2
            sqrt(num_leaves) (65 of 411 parts at 100,000 passages), but at least as many as hold
            COVERED passages.
        avq: strength of anisotropic partitioning; None for none.
        soar_lambda: strength of SOAR's second assignment of each passage; None for none.
        dimensions_per_block: coordinates that share one 4-bit code.
        anisotropic_threshold: T of the anisotropic quantisation; None for |x| sqrt(2 / (E + 1)).
        pre_reorder_num_neighbors: candidates whose scores are computed again, at least 4 k. Tuning
            of leaves_to_search may halve it.
        random_init: random first centroids: faster, but builds are not reproducible.
        brute_force_below: an index of kind "auto" with fewer passages is exact.
        parts: consecutive parts of the passages, each with a tree of its own, so that each of
            several hosts holds and searches only its share. num_leaves is per part.
    """

    num_leaves: int | None = None
    leaves_to_search: int | None = None
    avq: float | None = 2.5
    soar_lambda: float | None = 1.0
    dimensions_per_block: int = 2
    anisotropic_threshold: float | None = None
    pre_reorder_num_neighbors: int = 100
    random_init: bool = False
    brute_force_below: int = 4000
    parts: int = 1

    def __post_init__(self):
        for name, value in dataclasses.asdict(self).items():
            if isinstance(value, np.generic):  # a number of numpy becomes one of Python, as in JSON
                value = value.item()
                object.__setattr__(self, name, value)
            lowest = 0 if name == "brute_force_below" else 1
            if name in ("avq", "soar_lambda", "anisotropic_threshold"):
                good = value is None or (
                    isinstance(value, int | float) and 0 < value <= LARGEST_STRENGTH)
                allowed = f"a number above 0, up to {LARGEST_STRENGTH:g}, or None"
            elif name == "random_init":
                good, allowed = isinstance(value, bool), "True or False"
            else:
                good = type(value) is int and value >= lowest
                good |= value is None and name in ("num_leaves", "leaves_to_search")
                allowed = f"an integer of at least {lowest}"
            if not good:
                raise RetrievalError(f"ScannSettings.{name}={value!r}; allowed is {allowed}.")

    def leaves(self, size: int) -> tuple[int, int]:
        """Returns (parts of the tree, parts to search) for an index of that many passages."""
        parts = min(size, self.num_leaves or max(1, round(1.3 * math.sqrt(size))))
        covering = math.ceil(COVERED * parts / size)
        searched = self.leaves_to_search or max(covering, math.ceil(3.2 * math.sqrt(parts)))
        return parts, min(parts, searched)

    def work(self, size: int) -> float:
        """The cost of a search, in codes read."""
        parts, searched = self.leaves(size)
        copies = 1 if self.soar_lambda is None else 2
        return copies * searched * size / parts + EXACT_ROW * self.pre_reorder_num_neighbors


def part_rows(size: int, parts: int) -> list[slice]:
    """The rows of each of the consecutive parts of `size` passages."""
    ends = [size * part // parts for part in range(parts + 1)]
    return [slice(*both) for both in itertools.pairwise(ends)]


def part_folder(path: Path, part: int) -> Path:
    """The folder of ScaNN's files of a part, in that of an index version."""
    return path / (f"scann.{part}" if part else "scann")


def check_enough(fewest: int, parts: int) -> None:
    """Raises a RetrievalError if the smallest part, of `fewest` passages, is too small."""
    if fewest < SMALLEST:
        raise RetrievalError(
            f"ScaNN needs {SMALLEST} passages or more in each of {parts} parts, got {fewest}; set "
            'config.retrieval.index=exact (in build_index kind="exact"), or '
            "config.retrieval.scann_parts to fewer.")


def _threads() -> int:
    return max(1, len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1)


def build_scann(embeddings: np.ndarray, file: Path, settings: ScannSettings, directory: Path,
                rows: slice | None = None) -> None:
    """Builds and serializes a ScaNN index in a child process, which then searches it once.

    The same embeddings and settings give the same files, bit by bit.

    Args:
        embeddings: float32[N, E], the content of file.
        file: raw little-endian float32 rows, from which the child reads them.
        settings: see ScannSettings.
        directory: for ScaNN's files; must be new or empty.
        rows: the part to index; None = all.

    Raises:
        RetrievalError: ScaNN would crash on an embedding, or it failed or crashed.
    """
    first, end, _ = (rows or slice(None)).indices(len(embeddings))
    check_enough(end - first, settings.parts)
    for begin in range(first, end, 65536):
        block = embeddings[begin : min(begin + 65536, end)]
        check_vectors(block, lambda row, begin=begin: f"the embedding of row {begin + row}")
    directory = Path(directory).absolute()
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        raise RetrievalError(f"{directory}: not empty; ScaNN would keep stale files. Remove it.")
    task = {
        "task": "build",
        "file": str(Path(file).absolute()),
        "width": embeddings.shape[1],
        "first": first,
        "rows": end - first,
        "settings": dataclasses.asdict(settings),
        "directory": str(directory),
    }
    _run_child(task, "building the ScaNN index")


def _run_child(task: dict, doing: str) -> None:
    """Runs child_main in a new interpreter, which imports neither the caller's __main__ nor jax."""
    missing = scann_missing()
    if missing:
        raise RetrievalError(f"{doing}: {missing}")
    # Not by PYTHONPATH: a sitecustomize.py of the current folder, which may be among these paths,
    # would run.
    given = {**task, "paths": _import_paths(), "parent": os.getpid()}
    child = subprocess.run([sys.executable, "-P", "-c", _CHILD], input=json.dumps(given), text=True,
                           capture_output=True, errors="replace")
    if child.returncode:
        lines = (child.stdout + child.stderr).strip().splitlines() or ["no output"]
        errors = [line for line in lines if "Error" in line or "Check failed" in line] or lines
        raise RetrievalError(
            f"{doing} failed: the child process ended with status {child.returncode}: "
            f"{errors[-1].strip()[:400]}. Check that memory and disk suffice and that the files "
            "are whole, or use an exact index.")


def _import_paths() -> list[str]:
    """sys.path without the current folder, unless this package lies there."""
    here = os.path.realpath(os.curdir)
    is_home = os.path.realpath(Path(__file__).parents[2]) == here
    return [path for path in map(os.path.abspath, sys.path)
            if is_home or os.path.realpath(path) != here]


def child_main(task: dict) -> None:
    """The main function of the child process: one task, of the standard input's JSON."""
    directory, width = task["directory"], task["width"]
    if task["task"] == "build":
        embeddings = np.fromfile(task["file"], "<f4", count=task["rows"] * width,
                                 offset=task["first"] * width * 4).reshape(-1, width)
        _build_here(embeddings, ScannSettings(**task["settings"]), directory)
    queries = np.linspace(-1, 1, 4 * width, dtype=np.float32).reshape(4, width)
    _load(Path(directory)).search_batched_parallel(queries, final_num_neighbors=1, batch_size=4)


def _build_here(embeddings: np.ndarray, settings: ScannSettings, directory: str) -> None:
    from scann import ReorderType, scann_ops_pybind

    size, width = embeddings.shape
    parts, searched = settings.leaves(size)
    sample = embeddings[:: max(1, size // 10000)]
    norm = float(np.linalg.norm(sample, axis=1).mean())
    threshold = settings.anisotropic_threshold or norm * math.sqrt(2 / (width + 1))
    builder = scann_ops_pybind.builder(embeddings, 10, "dot_product")
    builder = builder.set_n_training_threads(_threads()).tree(
        num_leaves=parts,
        num_leaves_to_search=searched,
        avq=settings.avq,
        soar_lambda=settings.soar_lambda,
        random_init=settings.random_init,
    )
    builder = builder.score_ah(
        min(settings.dimensions_per_block, width),
        anisotropic_quantization_threshold=threshold or math.nan,
    )
    builder = builder.reorder(settings.pre_reorder_num_neighbors, ReorderType.BFLOAT16)
    builder.build().serialize(directory, relative_path=True)


def _load(directory: Path) -> Any:
    from scann import scann_ops_pybind

    _check_assets(directory / "scann_assets.pbtxt")
    searcher = scann_ops_pybind.load_searcher(str(directory), assets_backcompat_shim=False)
    searcher.set_num_threads(_threads())
    return searcher


def _check_assets(assets: Path) -> None:
    """Refuses an assets file that names files elsewhere, which ScaNN's loader would read.

    manifest.py refuses other files beside it: the loader would run the code in a scann_docids.pkl.
    """
    if not assets.is_file():
        raise RetrievalError(f"{assets}: missing; build the index again.")
    text = assets.read_text("utf-8", "replace")
    named = re.findall(_ASSET, text)
    if re.sub(_ASSET, "", text).strip() or not set(named) <= set(SCANN_FILES):
        raise RetrievalError(f"{assets}: damaged, or it names files that no index has; build the "
                             "index again.")


def _open_searcher(directory: Path, size: int, width: int, trusted: bool) -> Any:
    """ScaNN's searcher for an index of `size` passages; see ScannIndex."""
    directory = Path(directory).absolute()
    if not trusted:
        task = {"task": "load", "directory": str(directory), "width": width}
        _run_child(task, f"{directory}: loading the ScaNN index")
    try:
        searcher = _load(directory)
        loaded = searcher.size()
    except (RuntimeError, ValueError, IndexError, OSError) as error:
        raise RetrievalError(f"{directory}: ScaNN cannot load it ({error}).") from error
    if loaded != size:
        raise RetrievalError(
            f"{directory}: holds {loaded} passages, expected {size}; build the index again.")
    return searcher


class ScannIndex(Index):
    """Searches a serialized ScaNN index.

    Args:
        directory: ScaNN's files, as build_scann wrote them.
        embeddings: float32[N, E], may be memory-mapped: the rows the index was built from.
        settings: those of the build, of which those for search are used.
        trusted: this process has built the files. Otherwise a child process loads them first, so
            that a crash becomes an error.
        check: called with rows int32[...] before their embeddings are read.
        valid: bool[N], the rows that a search may find; None = all. `size` counts them.

    Attributes:
        settings: may be replaced, to search the same index with others.
    """

    def __init__(self, directory: Path, embeddings: np.ndarray, settings: ScannSettings,
                 trusted: bool = False, check: Callable[[np.ndarray], None] = lambda ids: None,
                 valid: np.ndarray | None = None):
        missing = scann_missing()
        if missing:
            raise RetrievalError(
                f'{directory}: a ScaNN index. {missing} Build the index again with kind="exact".')
        self._rows, self.width = embeddings.shape
        self._embeddings, self.settings, self._check = embeddings, settings, check
        self._exact, self._valid = ExactIndex(embeddings, valid), valid
        self.size = self._exact.size
        self._logged_fewer = False
        self._threads = _threads()
        self._searcher = _open_searcher(directory, self._rows, self.width, trusted)

    def _search(self, queries: np.ndarray, k: int) -> SearchResult:
        # Twice as many candidates where rows are deleted, which ScaNN does not know. Exact search
        # answers the queries of which fewer than k candidates are valid.
        wanted = k + min(k, self._rows - self.size)
        ids, usable = self._nominate(queries, wanted)
        full = usable[:, :wanted].all(axis=1)
        self._check(ids)
        scores = row_scores(queries, self._embeddings, ids)
        if not np.isfinite(scores).all():
            raise RetrievalError("embeddings of rows that were found are NaN, infinite or too "
                                 "large to compare; build the index again.")
        if self._valid is not None:
            usable &= self._valid[ids]
            full &= np.count_nonzero(usable, axis=1) >= k
        scores[~usable] = -np.inf
        ids, scores = merge([SearchResult(ids, scores)], k)
        if not full.all():
            if not self._logged_fewer:
                _log.info("ScaNN found fewer than k=%d for %d of %d queries; exact search answers "
                          "those. More leaves_to_search would help.", k, (~full).sum(), len(full))
                self._logged_fewer = True
            self._check(np.arange(self._rows))
            ids[~full], scores[~full] = self._exact.search(queries[~full], k)
        return SearchResult(ids, scores)

    def _nominate(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns row ids int32[B, C], and bool[B, C]: True for rows that exist, each once.

        C is k, or up to 4 k if ScaNN's scores do not decide which rows are the k best: scores of
        embeddings in a narrow cone differ by less than its rounding.
        """
        count = min(4 * k, self._rows)
        ids, distances = self._searcher.search_batched_parallel(
            queries,
            final_num_neighbors=count,
            pre_reorder_num_neighbors=min(
                self._rows, max(self.settings.pre_reorder_num_neighbors, 4 * k)
            ),
            leaves_to_search=self.settings.leaves(self._rows)[1],
            batch_size=math.ceil(len(queries) / self._threads),  # per thread
        )
        if ids.shape != (len(queries), count):
            return np.zeros((len(queries), k), np.int32), np.zeros((len(queries), k), bool)
        last = distances[:, k - 1 : k]
        near = distances >= last - ROUNDING * np.abs(last)  # False for NaN
        count = max(k, np.count_nonzero(near.any(axis=0)))
        ids, distances = ids[:, :count], distances[:, :count]
        near[:, :k] = True  # each query its own, whatever the others of the batch need
        usable = near[:, :count] & np.isfinite(distances) & (ids < self._rows)
        ascending = np.sort(np.where(usable, ids, -1 - np.arange(count)), axis=1)
        usable &= (ascending[:, 1:] != ascending[:, :-1]).all(axis=1, keepdims=True)
        return np.where(usable, ids, 0).astype(np.int32), usable
