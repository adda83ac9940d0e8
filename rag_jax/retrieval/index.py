"""What an index is: one protocol, its guards, and the self-contained directory that holds one.

    manifest.json     sizes, checksums, fingerprints, settings, measured recall; written last
    passages/         the passage store (passages.py)
    embeddings.f32    float32[N, E], little-endian, row = passage row
    scann/ scann.1/   only in an index of kind "scann": what ScaNN serialized, with relative paths;
                      a folder for each of ScannSettings.parts
    bm25/             in an index of kind "bm25", in place of embeddings (bm25.py)

No file holds an absolute path: the directory can be moved, copied and renamed.
"""

import hashlib
import json
import operator
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import numpy as np

from rag_jax.retrieval.passages import PassageStore, RetrievalError, check_rows, map_file

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
LARGEST = 1e6  # of a coordinate; far above any encoder's, far below where squares overflow
VERIFY_BYTES = 256 * 2**20  # an index up to this size is read and checked whole at opening
_AGAIN = "copy it again from where it is whole, or build it again"


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
        raise RetrievalError(
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
        path: the directory.
        manifest: what it says about itself, for example manifest["recall"].
        passages: the PassageStore with the text and tokens of every row.
        size: N, passages.
        width: E, of queries and embeddings.
        table: float32[N, E], all embeddings, memory-mapped.
        division: how several processes search: see Division.
    """

    def __init__(self, path: Path, manifest: dict, passages: PassageStore, verified: bool,
                 host: int = 0, hosts: int = 1):
        from rag_jax.retrieval import exact, scann  # they import this module

        self.path, self.manifest, self.passages = path, manifest, passages
        self.size, self.width = manifest["size"], manifest["width"]
        embeddings = map_file(path / "embeddings.f32", "<f4")
        self.table = embeddings.reshape(self.size, self.width)
        self._parts: list[tuple[int, Index]] = [(0, exact.ExactIndex(self.table))]
        self.division: Division = "queries"
        if manifest["kind"] == "scann":
            settings = scann.ScannSettings(**manifest["scann"])
            as_built = verified and manifest["versions"]["scann"] == scann.scann_version()
            rows, mine = scann.part_rows(self.size, settings.parts), range(settings.parts)
            if 1 < hosts <= settings.parts:
                self.division, mine = "passages", mine[host::hosts]
            self._parts = [
                (rows[part].start,
                 scann.ScannIndex(scann.part_folder(path, part), self.table[rows[part]], settings,
                                  trusted=as_built))
                for part in mine]

    @classmethod
    def open(
        cls,
        path: str | os.PathLike,
        encoder_fingerprint: str | None = None,
        verify: bool | None = None,
        host: int = 0,
        hosts: int = 1,
    ) -> "PassageIndex":
        """Opens an index directory, wherever it was moved.

        Args:
            path: the directory.
            encoder_fingerprint: of the encoder that will be asked; None leaves it unchecked.
            verify: compare every file's sha256 (about 1 second per GB). None does so for an index
                up to 256 MiB. Sizes, manifest and the store's meta data are always checked.
            host, hosts: which of how many this is. Of an index in at least as many parts each holds
                its share; any other is opened whole.

        Raises:
            RetrievalError: no index there, or it is half built, damaged, from a newer version, or
                built by another encoder or from other passages. The text says what to do.
        """
        parts = open_parts(Path(path), ("exact", "scann"), encoder_fingerprint, verify)
        return cls(*parts, host, hosts)

    def search(self, queries: np.ndarray, k: int) -> SearchResult:
        """Finds the k best passages for queries float[B, E]; see Index.

        With division "passages", the k best of its share, or all of that where it has fewer.
        """
        queries = check_queries(queries, k, self.size, self.width)
        found = [(first, part.search(queries, min(k, part.size))) for first, part in self._parts]
        return merge([SearchResult(ids + first, scores) for first, (ids, scores) in found], k)

    def embeddings(self, ids: np.ndarray) -> np.ndarray:
        """Returns the embeddings float32[..., E] of rows integers[...]."""
        ids = np.asarray(ids)
        check_rows(ids, self.size, f"{self.path}: embeddings")
        return self.table[ids]


def open_parts(path: Path, kinds: tuple[str, ...], encoder_fingerprint: str | None,
               verify: bool | None) -> tuple[Path, dict, PassageStore, bool]:
    """Checks an index directory of one of these kinds; see PassageIndex.open.

    Returns:
        path, manifest, passages, and whether every file agrees with its sha256.
    """
    manifest = read_manifest(path)
    if manifest["kind"] not in kinds:
        raise RetrievalError(
            f"{path}: an index of kind {manifest['kind']!r}, and {' or '.join(kinds)} is needed: "
            "DPR searches embeddings, BM25 words. Build one for this run with python -m "
            "rag_jax.build_index --run."
        )
    _check_fingerprint(path, manifest, encoder_fingerprint)
    if verify is None:
        total = sum(file["bytes"] for file in manifest["files"].values())
        verify = total <= VERIFY_BYTES
    _check_files(path, manifest, verify)
    passages = PassageStore.open(path / "passages")
    same = passages.fingerprint == manifest["passages_fingerprint"]
    if not same or len(passages) != manifest["size"]:
        raise RetrievalError(
            f"{path}: its passages are not the ones it was built from ({len(passages)} of "
            f"fingerprint {passages.fingerprint[:12]}, built from {manifest['size']} of "
            f"{manifest['passages_fingerprint'][:12]}); {_AGAIN}."
        )
    return path, manifest, passages, verify


def read_manifest(path: Path) -> dict:
    """Reads and checks the manifest of an index directory alone."""
    if not path.is_dir():
        half = path.with_name(path.name + ".partial").is_dir()
        raise RetrievalError(
            f"{path}: no index here"
            + (", only one that is half built; run the same build again to finish it." if half
               else "; check the path, or build one with python -m rag_jax.build_index.")
        )
    file = path / "manifest.json"
    if not file.is_file():
        names = sorted(os.listdir(path))
        state = "an empty directory" if not names else f"no index: it holds {names[:5]}"
        if "building" in names or "embeddings.f32" in names:
            state = "a half built index, without manifest.json"
        raise RetrievalError(
            f"{path}: this is {state}; build one with python -m rag_jax.build_index, or name the "
            "directory that holds manifest.json."
        )
    try:
        manifest = json.loads(file.read_text("utf-8"))
        format_, checksum = manifest["format"], manifest.pop("checksum")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RetrievalError(f"{path}: manifest.json is damaged ({error!r}); {_AGAIN}.") from None
    if isinstance(format_, int) and format_ > INDEX_FORMAT:
        raise RetrievalError(
            f"{path}: index format {format_}, this version of rag_jax reads up to {INDEX_FORMAT}; "
            "upgrade rag_jax or build the index again."
        )
    if checksum != _checksum(manifest):
        raise RetrievalError(
            f"{path}: manifest.json does not agree with its own checksum; {_AGAIN}."
        )
    return manifest


def write_manifest(path: Path, manifest: dict) -> None:
    """Writes the manifest with its checksum, and waits until the disk holds it."""
    manifest = {"format": INDEX_FORMAT, **manifest}
    manifest["checksum"] = _checksum(manifest)
    with open(path / "manifest.json", "w", encoding="utf-8") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _checksum(manifest: dict) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def file_entry(path: Path) -> dict[str, int | str]:
    """What the manifest says about a file."""
    with open(path, "rb") as file:
        checksum = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": checksum}


def _check_fingerprint(path: Path, manifest: dict, encoder_fingerprint: str | None) -> None:
    built_by = manifest["encoder_fingerprint"]
    if encoder_fingerprint is not None and encoder_fingerprint != built_by:
        raise RetrievalError(
            f"{path}: built by the encoder {built_by[:16]}, asked by {encoder_fingerprint[:16]}; "
            "their inner products mean nothing. Build the index again with this encoder, or use "
            "the checkpoint it was built with."
        )


def _check_files(path: Path, manifest: dict, verify: bool) -> None:
    """Checks that each file is there and whole, and that ScaNN will meet no file but its own."""
    for name, entry in manifest["files"].items():
        if not (path / name).is_file():
            raise RetrievalError(f"{path}: {name} is missing; {_AGAIN}.")
        size = (path / name).stat().st_size
        if size != entry["bytes"]:
            raise RetrievalError(
                f"{path}: {name} has {size} bytes, should have {entry['bytes']}; {_AGAIN}."
            )
        if verify and file_entry(path / name) != entry:
            raise RetrievalError(f"{path}: {name} differs from its sha256; {_AGAIN}.")
    # ScaNN unpickles a scann_docids.pkl that it finds, that is, runs code from it.
    for file in path.glob("scann*/*"):
        name = file.relative_to(path).as_posix()
        if name not in manifest["files"]:
            raise RetrievalError(f"{path}: {name} does not belong to this index; remove that file.")
