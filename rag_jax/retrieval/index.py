"""An open index directory of vectors. Its manifest decides how it is searched."""

import dataclasses
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from rag_jax.retrieval.exact import ExactIndex, row_scores
from rag_jax.retrieval.joined import JoinedRows, split
from rag_jax.retrieval.manifest import ADDED, EMBEDDINGS, IndexFolder, open_folder
from rag_jax.retrieval.protocol import (
    ALONE,
    Division,
    Hosts,
    Index,
    RetrievalError,
    SearchResult,
    check_queries,
    check_rows,
    merge,
)
from rag_jax.retrieval.scann import ScannIndex, ScannSettings, part_folder, part_rows
from rag_jax.retrieval.verification import VerifiedFiles, map_file
from rag_jax.retrieval.versions import opened

_ADDED = f"{ADDED}/{EMBEDDINGS}"


class Embeddings:
    """The embeddings of an index, memory-mapped.

    Attributes:
        unverified: float32[N, E]; rows must be verified by `check` or `check_all` before they are
            used.
        arrays: the parts of it, by the names of their files.
    """

    def __init__(self, folder: IndexFolder):
        counts = {EMBEDDINGS: folder.manifest["size"], _ADDED: len(folder.passages)}
        counts[_ADDED] -= counts[EMBEDDINGS]
        self.arrays = {
            name: map_file(folder.path / name, "<f4").reshape(count, folder.manifest["width"])
            for name, count in counts.items() if count}
        arrays = list(self.arrays.values())
        self.unverified = JoinedRows(arrays) if len(arrays) > 1 else arrays[0]
        self._files = folder.files

    def check(self, rows: np.ndarray) -> None:
        """Verifies rows integers[...].

        Raises:
            RetrievalError: they are damaged, or damage to the index was noticed before.
        """
        if self._files is None:
            return
        for name, (array, _, local) in zip(
                self.arrays, split(self.arrays.values(), rows), strict=True):
            begins = local.astype(np.int64) * array.strides[0]
            self._files.check(name, begins, begins + array.strides[0])

    def check_all(self, names: Iterable[str] | None = None) -> None:
        """Verifies all rows, or those of the named files; raises as `check`."""
        if self._files is not None:
            self._files.check_all(self.arrays if names is None else names)


class PassageIndex(Index):
    """An open index directory of vectors: search, embeddings and passages.

    Args:
        folder: the open version.
        embeddings: those of all its passages.
        parts: indexes of consecutive parts of the passages, each with its first row; with division
            "passages", this process's share of them.
        division: how several processes divide a search.

    Attributes:
        path: the directory; later versions in it do not change what is open.
        manifest: that of the open version, for example with manifest["recall"].
        passages: the PassageStore with the text and tokens of every row.
        files: all but those of the passage stores; None = this process has just written them.
        valid: bool[N], the rows that were not deleted; None = all.
        size: passages that a search can find.
        width: E, of queries and embeddings.
    """

    def __init__(self, folder: IndexFolder, embeddings: Embeddings,
                 parts: Sequence[tuple[int, Index]], division: Division = "queries"):
        self.path, self.manifest, self.passages, self.files, self.valid = folder
        self.size, self.width = self.manifest["size"], self.manifest["width"]
        if self.valid is not None:
            self.size = int(np.count_nonzero(self.valid))
        self.division, self._embeddings, self._parts = division, embeddings, parts

    @property
    def table(self) -> np.ndarray | JoinedRows:
        """float32[N, E], all embeddings, memory-mapped, verified whole."""
        self._embeddings.check_all()
        return self._embeddings.unverified

    @classmethod
    def open(cls, path: str | os.PathLike, encoder_fingerprint: str | None = None,
             verify: bool | None = None, hosts: Hosts = ALONE) -> "PassageIndex":
        """Opens the current version of an index directory, wherever it was moved.

        Args:
            path: the directory.
            encoder_fingerprint: that of the encoder that will embed the queries; None = unchecked.
            verify: compare every file's sha256 now (about 1 second per GB). None does so for an
                index up to 256 MiB. Otherwise each block is verified before it is first read, and
                all others in the background.
            hosts: the processes that open it. If it has at least as many parts as there are
                processes, each holds its share of them; else each holds all.

        Raises:
            RetrievalError: there is no index, or it is half built, damaged, from a newer version,
                or built by another encoder or from other passages.
        """
        def make(version: Path) -> "PassageIndex":
            folder = open_folder(version, ("exact", "scann"), encoder_fingerprint)
            index = of_folder(folder, hosts)
            for store in folder.passages.stores:
                store.files.verify(verify)
            folder.files.verify(verify)
            return index

        return opened(Path(path), make)

    def search_as(self, settings: ScannSettings) -> None:
        """From now on searches ScaNN's parts with other settings, also named in the manifest."""
        self.manifest["scann"] = dataclasses.asdict(settings)
        for _, part in self._parts:
            if isinstance(part, ScannIndex):
                part.settings = settings

    def _search(self, queries: np.ndarray, k: int) -> SearchResult:
        """With division "passages", the k best of this process's share, or all if it has fewer."""
        if self.manifest["kind"] == "exact":  # it reads all rows
            self._embeddings.check_all()
        elif self.manifest.get("edited", {}).get("added"):  # these are searched exactly
            self._embeddings.check_all([_ADDED])
        results = [(first, part._search(queries, min(k, part.size)))
                   for first, part in self._parts if part.size]
        if not results:  # all rows of this share were deleted
            return SearchResult(np.zeros((len(queries), 0), np.int32),
                                np.zeros((len(queries), 0), np.float32))
        return merge([SearchResult(ids + first, scores) for first, (ids, scores) in results], k)

    def scores(self, queries: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """Inner products float32[B, K] of queries float32[B, E] with rows integers[B, K]."""
        ids, queries = np.asarray(ids), check_queries(queries, self.width)
        if ids.ndim != 2 or len(ids) != len(queries):
            raise RetrievalError(f"{self.path}: scores: rows have shape {list(ids.shape)}: must be "
                                 f"[{len(queries)}, K], K for each query.")
        check_rows(ids, len(self.passages), f"{self.path}: scores")
        self._embeddings.check(ids)
        return row_scores(queries, self._embeddings.unverified, ids)

    def embeddings(self, ids: np.ndarray) -> np.ndarray:
        """Returns the embeddings float32[..., E] of rows integers[...]."""
        ids = np.asarray(ids)
        check_rows(ids, len(self.passages), f"{self.path}: embeddings")
        self._embeddings.check(ids)
        return self._embeddings.unverified[ids]


def of_folder(folder: IndexFolder, hosts: Hosts = ALONE) -> PassageIndex:
    """The index in a folder, of the kind that its manifest says.

    Passages that were added to a ScaNN index are searched exactly, by host 0 where hosts share it.
    """
    embeddings, size = Embeddings(folder), folder.manifest["size"]
    if folder.manifest["kind"] == "exact":
        return PassageIndex(
            folder, embeddings, [(0, ExactIndex(embeddings.unverified, folder.valid))])
    settings = ScannSettings(**folder.manifest["scann"])
    rows = part_rows(size, settings.parts)
    shared = 1 < hosts.count <= settings.parts
    numbers = range(settings.parts)[hosts.index :: hosts.count] if shared else range(settings.parts)
    parts = [(rows[part].start, _open_part(folder, embeddings, part, rows[part], settings))
             for part in numbers]
    if _ADDED in embeddings.arrays and (hosts.leads or not shared):
        parts.append((size, ExactIndex(embeddings.arrays[_ADDED])))
    return PassageIndex(folder, embeddings, parts, "passages" if shared else "queries")


def _open_part(folder: IndexFolder, embeddings: Embeddings, part: int, rows: slice,
               settings: ScannSettings) -> ScannIndex:
    """A part of a ScaNN index. ScaNN reads its files whole, so they are verified first."""
    files: VerifiedFiles | None = folder.files
    path = part_folder(folder.path, part)
    if files is not None:
        files.check_all(name for name in files.names if name.startswith(f"{path.name}/"))
    valid = None if folder.valid is None or folder.valid[rows].all() else folder.valid[rows]
    return ScannIndex(path, embeddings.arrays[EMBEDDINGS][rows], settings, trusted=files is None,
                      check=lambda ids: embeddings.check(ids + rows.start), valid=valid)
