"""What an index is: one protocol, its guards, and the self-contained directory that holds one.

The directory holds versions of it (versions.py). In the folder of a version:

    manifest.json     sizes, checksums, fingerprints, settings, measured recall; written last
    passages/         the passage store (passages.py)
    embeddings.f32    float32[N, E], little-endian, row = passage row
    scann/ scann.1/   only in an index of kind "scann": what ScaNN serialized, with relative paths;
                      a folder for each of ScannSettings.parts
    bm25/             in an index of kind "bm25", in place of embeddings (bm25.py)

No file holds an absolute path: the directory can be moved, copied and renamed.
"""

import functools
import operator
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from rag_jax import files
from rag_jax.retrieval.passages import PassageStore, RetrievalError, check_rows, map_file
from rag_jax.retrieval.reading import VectorError
from rag_jax.retrieval.verification import (
    VerifiedFiles,
    check_table,
    digest_of,
    file_entry,
    is_count,
    read_object,
    regular_file,
)
from rag_jax.retrieval.versions import AGAIN, POINTER, opened, versions_of

__all__ = [
    "Index",
    "PassageIndex",
    "RetrievalError",
    "SearchResult",
    "check_embeddings",
    "check_queries",
    "file_entry",
    "merge",
    "no_results",
    "read_manifest",
    "write_manifest",
]

INDEX_FORMAT = 1
EMBEDDINGS = "embeddings.f32"
# What the builders write, and nothing else is read. ScaNN unpickles a scann_docids.pkl that it
# finds, that is, runs code from it.
SCANN_FILES = ("ah_codebook.pb", "bfloat16_dataset.npy", "datapoint_to_token.npy",
               "hashed_dataset.npy", "hashed_dataset_soar.npy", "scann_assets.pbtxt",
               "scann_config.pb", "serialized_partitioner.pb")
BM25_FILES = ("data.csc.index.npy", "indices.csc.index.npy", "indptr.csc.index.npy",
              "params.index.json", "vocab.index.json")
LARGEST = 1e6  # of a coordinate; far above any encoder's, far below where squares overflow


# What each of several processes searches with an index: all passages, for its share of the queries;
# its share of the passages, for all queries, and the results are merged; or, with an index on
# devices that they share, all passages for all queries, at the same time as the others.
Division = Literal["queries", "passages", "devices"]


class SearchResult(NamedTuple):
    """The best passages of each query, best first, ties by ascending id.

    Attributes:
        ids: int32[B, K], rows of the passage store; always K real and different rows.
        scores: float32[B, K], inner products of query and passage embedding.
    """

    ids: np.ndarray
    scores: np.ndarray


class Index(Protocol):
    """Anything that finds the passages with the largest inner product."""

    @property
    def size(self) -> int:
        """N, passages."""

    @property
    def width(self) -> int:
        """E, the width of queries and passage embeddings."""

    def search(self, queries: np.ndarray, k: int) -> SearchResult:
        """Finds the k best passages for queries float[B, E], or raises RetrievalError."""


def check_queries(queries: np.ndarray, k: int, size: int, width: int) -> np.ndarray:
    """Returns the queries as contiguous float32[B, E], or says what is wrong with them or with k.

    An empty batch is allowed as [0, E].
    """
    try:
        k = operator.index(k)
    except TypeError:
        raise RetrievalError(f"k must be an integer, got {k!r}.") from None
    if not 1 <= k <= size:
        raise RetrievalError(
            f"k={k}: an index of {size} passages allows 1 to {size}; lower k, or index more."
        )
    queries = np.asarray(queries)
    if queries.ndim != 2 or queries.shape[1] != width:
        raise RetrievalError(
            f"queries have shape {queries.shape}, this index needs [batch, {width}]; use the "
            "encoder that the index was built with, and add a batch axis to a single query."
        )
    return check_embeddings(queries, lambda row: f"query {row} of the batch")


def check_embeddings(rows: np.ndarray, name) -> np.ndarray:
    """Returns vectors as contiguous float32[B, E], after checking that every number can be used.

    Args:
        rows: numbers [B, E], of any real dtype.
        name: function from a row number to its name in an error.
    """
    if rows.dtype.kind not in "fiuV":  # V: bfloat16
        raise RetrievalError(f"vectors must be real numbers, got dtype {rows.dtype}.")
    with np.errstate(over="ignore"):
        rows = np.ascontiguousarray(rows, "<f4")
    usable = np.abs(rows) <= LARGEST  # False for NaN
    if not usable.all():
        row, column = np.argwhere(~usable)[0]
        raise VectorError(
            f"{name(row)} holds {rows[row, column]} at coordinate {column}; allowed are finite "
            f"numbers up to {LARGEST:.0e}. Check the encoder's parameters for NaN or overflow."
        )
    return rows


def no_results(k: int) -> SearchResult:
    """The answer to an empty batch: shapes [0, K]."""
    return SearchResult(np.zeros((0, k), np.int32), np.zeros((0, k), np.float32))


def merge(found: Sequence[SearchResult], k: int) -> SearchResult:
    """The k best of what was found among different passages."""
    ids, scores = (np.concatenate(arrays, axis=1) for arrays in zip(*found, strict=True))
    best = np.lexsort((ids, -scores), axis=1)[:, :k]
    return SearchResult(np.take_along_axis(ids, best, axis=1),
                        np.take_along_axis(scores, best, axis=1))


class PassageIndex:
    """An index directory, opened: search, the embeddings, and the passages. An Index.

    Attributes:
        path: the directory; later versions in it do not change what is open.
        manifest: what it says about itself, for example manifest["recall"].
        passages: the PassageStore with the text and tokens of every row.
        size: N, passages.
        width: E, of queries and embeddings.
        division: how several processes search: see Division.
    """

    def __init__(self, path: Path, manifest: dict, passages: PassageStore,
                 files: VerifiedFiles | None = None, host: int = 0, hosts: int = 1):
        """files: of the manifest; None = this process has just written them."""
        from rag_jax.retrieval import exact, scann  # they import this module

        self.path, self.manifest, self.passages, self.files = path, manifest, passages, files
        self.size, self.width = manifest["size"], manifest["width"]
        embeddings = map_file(path / EMBEDDINGS, "<f4")
        self._table = embeddings.reshape(self.size, self.width)
        self._parts: list[tuple[int, Index]] = [(0, exact.ExactIndex(self._table))]
        self.division: Division = "queries"
        if manifest["kind"] == "scann":
            settings = scann.ScannSettings(**manifest["scann"])
            rows, mine = scann.part_rows(self.size, settings.parts), range(settings.parts)
            if 1 < hosts <= settings.parts:
                self.division, mine = "passages", mine[host::hosts]
            self._parts = [(rows[part].start, self._open_part(part, rows[part], settings))
                           for part in mine]

    def _open_part(self, part: int, rows: slice, settings: Any) -> Index:
        """A part of a ScaNN index, whose files ScaNN reads whole: they are verified before."""
        from rag_jax.retrieval import scann

        folder = scann.part_folder(self.path, part)
        if self.files is not None:
            self.files.check_all(name for name in self.files.names
                                 if name.startswith(f"{folder.name}/"))
        return scann.ScannIndex(
            folder, self._table[rows], settings, trusted=self.files is None,
            check=functools.partial(_check_rows, self.files, self.width, rows.start))

    @property
    def table(self) -> np.ndarray:
        """float32[N, E], all embeddings, memory-mapped, verified whole."""
        if self.files is not None:
            self.files.check_all([EMBEDDINGS])
        return self._table

    @classmethod
    def open(
        cls,
        path: str | os.PathLike,
        encoder_fingerprint: str | None = None,
        verify: bool | None = None,
        host: int = 0,
        hosts: int = 1,
    ) -> "PassageIndex":
        """Opens the current version of an index directory, wherever it was moved.

        Args:
            path: the directory.
            encoder_fingerprint: of the encoder that will be asked; None leaves it unchecked.
            verify: compare every file's sha256 now (about 1 second per GB). None does so for an
                index up to 256 MiB. Of a larger one, and with False, what is read is verified
                then, and all of it in the background.
            host, hosts: which of how many this is. Of an index in at least as many parts each holds
                its share; any other is opened whole.

        Raises:
            RetrievalError: no index there, or it is half built, damaged, from a newer version, or
                built by another encoder or from other passages. The text says what to do.
        """
        def make(folder: Path) -> "PassageIndex":
            parts = open_parts(folder, ("exact", "scann"), encoder_fingerprint)
            index = cls(*parts, host, hosts)
            index.passages.files.verify(verify)
            index.files.verify(verify)
            return index

        return opened(Path(path), make)

    def check_encoder(self, fingerprint: str) -> None:
        """Raises a RetrievalError where another encoder than this one has built the index."""
        _check_fingerprint(self.path, self.manifest, fingerprint)

    def search(self, queries: np.ndarray, k: int) -> SearchResult:
        """Finds the k best passages for queries float[B, E]; see Index.

        With division "passages", the k best of its share, or all of that where it has fewer.
        """
        queries = check_queries(queries, k, self.size, self.width)
        if self.manifest["kind"] == "exact" and self.files is not None:
            self.files.check_all([EMBEDDINGS])  # it reads them all
        found = [(first, part.search(queries, min(k, part.size))) for first, part in self._parts]
        return merge([SearchResult(ids + first, scores) for first, (ids, scores) in found], k)

    def embeddings(self, ids: np.ndarray) -> np.ndarray:
        """Returns the embeddings float32[..., E] of rows integers[...]."""
        ids = np.asarray(ids)
        check_rows(ids, self.size, f"{self.path}: embeddings")
        _check_rows(self.files, self.width, 0, ids)
        return self._table[ids]


def _check_rows(files: VerifiedFiles | None, width: int, first: int, ids: np.ndarray) -> None:
    """Verifies the embeddings of rows integers[...], counted from row `first` of the index."""
    if files is not None:
        begins = (ids.astype(np.int64) + first) * (4 * width)
        files.check_pieces(EMBEDDINGS, begins, begins + 4 * width)


def open_parts(path: Path, kinds: tuple[str, ...], encoder_fingerprint: str | None
               ) -> tuple[Path, dict, PassageStore, VerifiedFiles]:
    """Checks a version of an index of one of these kinds; see PassageIndex.open.

    Returns:
        path, manifest, passages, and the files besides those of the passages. No file is verified
        yet.
    """
    manifest = read_manifest(path)
    if manifest["kind"] not in kinds:
        raise RetrievalError(
            f"{path}: an index of kind {manifest['kind']!r}, and {' or '.join(kinds)} is needed: "
            "DPR searches embeddings, BM25 words. Build one for this run with python -m "
            "rag_jax.build_index --run."
        )
    _check_fingerprint(path, manifest, encoder_fingerprint)
    for name in ("passages/meta.json", *manifest["files"]):
        regular_file(path, name)
    own = {name: entry for name, entry in manifest["files"].items()
           if not name.startswith("passages/")}
    files = VerifiedFiles(path, own)
    for file in (file for folder in path.glob("*") if folder.name.startswith(("scann", "bm25"))
                 for file in (folder, *folder.glob("*"))):
        name = file.relative_to(path).as_posix()
        if name not in own and not any(other.startswith(f"{name}/") for other in own):
            raise RetrievalError(f"{path}: {name} does not belong to this index; remove it.")
    passages = PassageStore.mapped(path / "passages")
    same = passages.fingerprint == manifest["passages_fingerprint"]
    if not same or len(passages) != manifest["size"]:
        raise RetrievalError(
            f"{path}: its passages are not the ones it was built from ({len(passages)} of "
            f"fingerprint {passages.fingerprint[:12]}, built from {manifest['size']} of "
            f"{manifest['passages_fingerprint'][:12]}); {AGAIN}."
        )
    return path, manifest, passages, files


def read_manifest(path: Path) -> dict:
    """Reads and checks the manifest of a version alone."""
    if not path.is_dir():
        raise RetrievalError(f"{path}: no index here; check the path, or build one with python -m "
                             "rag_jax.build_index.")
    file = path / "manifest.json"
    if not file.is_file():
        names = sorted(os.listdir(path))
        state = "an empty directory" if not names else f"no index: it holds {names[:5]}"
        if versions_of(path).is_dir() or "embeddings.f32" in names:
            state = f"an index without {POINTER}, that is half built or half copied"
        raise RetrievalError(
            f"{path}: this is {state}; build one with python -m rag_jax.build_index, or name the "
            f"directory that holds {POINTER} or, in older ones, manifest.json."
        )
    manifest = read_object(path, "manifest.json")
    format_, checksum = manifest.get("format"), manifest.pop("checksum", None)
    if isinstance(format_, int) and format_ > INDEX_FORMAT:
        raise RetrievalError(
            f"{path}: index format {format_}, this version of rag_jax reads up to {INDEX_FORMAT}; "
            "upgrade rag_jax or build the index again."
        )
    if format_ != INDEX_FORMAT or checksum != digest_of(manifest):
        raise RetrievalError(
            f"{path}: manifest.json does not agree with its own checksum, so it is damaged; "
            f"{AGAIN}."
        )
    _check_manifest(path, manifest)
    return manifest


def _check_manifest(path: Path, manifest: dict) -> None:
    """Refuses what the builders never write: anybody can make a checksum."""
    from rag_jax.retrieval.scann import ScannSettings

    def wrong(what: str) -> RetrievalError:
        return RetrievalError(f"{path}: manifest.json is damaged: {what}; {AGAIN}.")

    kind, size = manifest.get("kind"), manifest.get("size")
    if kind not in ("exact", "scann", "bm25"):
        raise wrong(f"kind {kind!r:.80}")
    if not is_count(size, 1) or kind != "bm25" and not is_count(manifest.get("width"), 1):
        raise wrong(f"size {size!r:.80}, width {manifest.get('width')!r:.80}")
    for name in ("encoder_fingerprint", "passages_fingerprint"):
        if not isinstance(manifest.get(name), str):
            raise wrong(f"{name} {manifest.get(name)!r:.80}")
    for name in ("versions", "inputs"):
        if not isinstance(manifest.get(name), dict):
            raise wrong(f"{name} {manifest.get(name)!r:.80}")
    folders = r"passages/(meta\.json|text\.(blob|offsets)|tokens\.[A-Za-z0-9_-]+\.(ids|offsets))"
    parts = 0
    if kind == "scann":
        try:
            parts = ScannSettings(**manifest["scann"]).parts
        except (TypeError, KeyError, RetrievalError) as error:
            raise wrong(f"settings of ScaNN ({error})") from None
        if parts > size:
            raise wrong(f"{parts} parts of {size} passages")
    recall = manifest.get("recall", {"k": 1, "recall": 1.0, "queries": 1})
    if not (isinstance(recall, dict) and is_count(recall.get("k")) and is_count(
            recall.get("queries")) and isinstance(recall.get("recall"), int | float)):
        raise wrong(f"recall {recall!r:.80}")
    table = check_table(manifest.get("files"), path / "manifest.json")
    allowed = {f"scann.{part}/{name}" if part else f"scann/{name}"
               for part in range(min(parts, 10_000)) for name in SCANN_FILES}
    allowed |= {f"bm25/{name}" for name in BM25_FILES if kind == "bm25"}
    allowed |= {EMBEDDINGS} if kind != "bm25" else set()
    for name in table:
        if name not in allowed and not re.fullmatch(folders, name):
            raise wrong(f"its table of files has {name!r:.80}, which no index of kind {kind} has")
    if kind != "bm25" and table.get(EMBEDDINGS, {}).get("bytes") != 4 * size * manifest["width"]:
        raise wrong(f"{EMBEDDINGS} does not hold {size} rows of {manifest['width']} numbers")


def write_manifest(path: Path, manifest: dict) -> None:
    """Writes the manifest with its checksum, and waits until the disk holds it."""
    manifest = {"format": INDEX_FORMAT, **manifest}
    manifest["checksum"] = digest_of(manifest)
    files.write_json(path / "manifest.json", manifest)


def _check_fingerprint(path: Path, manifest: dict, encoder_fingerprint: str | None) -> None:
    built_by = manifest["encoder_fingerprint"]
    if encoder_fingerprint is not None and encoder_fingerprint != built_by:
        raise RetrievalError(
            f"{path}: built by the encoder {built_by[:16]}, asked by {encoder_fingerprint[:16]}; "
            "their inner products mean nothing. Build the index again with this encoder, or use "
            "the checkpoint it was built with."
        )
