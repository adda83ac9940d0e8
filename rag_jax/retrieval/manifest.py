"""The self-contained folder of one version of an index, and its manifest.

    manifest.json     sizes, checksums, fingerprints, settings, measured recall; written last
    passages/         the passage store (passages.py)
    embeddings.f32    float32[N, E], little-endian, row = passage row
    scann/ scann.1/   only in an index of kind "scann": ScaNN's files, with relative paths, in a
                      folder for each of ScannSettings.parts
    bm25/             only in an index of kind "bm25", which has no embeddings (bm25.py)
    added/            only if passages were added later (editing.py): their passages/ and
                      embeddings.f32, whose rows follow those above
    deleted.i64       only if passages were deleted later: int64[D], their rows, ascending

In the manifest of an edited index, "edited" has the numbers of added and deleted passages; sizes,
settings, fingerprints and "inputs" are still those of the build. If the kind was chosen by the
number of passages, "auto" has the settings of ScaNN for the next time it is chosen.

No file holds an absolute path: the folder can be moved, copied and renamed. For the versions in an
index directory see versions.py.
"""

import functools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rag_jax.retrieval.joined import JoinedPassages
from rag_jax.retrieval.json_files import is_count, regular_file
from rag_jax.retrieval.passages import PassageStore
from rag_jax.retrieval.protocol import OtherEncoderError, RetrievalError
from rag_jax.retrieval.scann import SCANN_FILES, ScannSettings
from rag_jax.retrieval.verification import FolderRecord, VerifiedFiles
from rag_jax.retrieval.versions import AGAIN, POINTER, versions_of

MANIFEST = FolderRecord("manifest.json", "index", "checksum", AGAIN)
EMBEDDINGS = "embeddings.f32"
KINDS = ("exact", "scann", "bm25")
ADDED = "added"
DELETED = "deleted.i64"
BM25_FILES = ("data.csc.index.npy", "indices.csc.index.npy", "indptr.csc.index.npy",
              "params.index.json", "vocab.index.json")
_STORE_FILE = (r"(added/)?passages/(meta\.json|(text|citations)\.(blob|offsets)|"
               r"tokens\.[A-Za-z0-9_-]+\.(ids|offsets))")
_TYPES = {"encoder_fingerprint": str, "passages_fingerprint": str, "versions": dict, "inputs": dict}


class IndexFolder(NamedTuple):
    """A version of an index: its manifest is checked, its other files are not verified yet.

    Attributes:
        path: its folder.
        manifest: the content of manifest.json.
        passages: its passage store, or stores.
        files: all but those of the passage stores; None = this process has just written them.
        valid: bool[N], the rows that were not deleted; None = all.
    """

    path: Path
    manifest: dict[str, Any]
    passages: PassageStore | JoinedPassages
    files: VerifiedFiles | None
    valid: np.ndarray | None = None


def open_folder(path: Path, kinds: tuple[str, ...] = KINDS,
                encoder_fingerprint: str | None = None) -> IndexFolder:
    """Opens and checks the version in a folder, of one of these kinds; see PassageIndex.open."""
    manifest = read_manifest(path)
    if manifest["kind"] not in kinds:
        raise RetrievalError(
            f"{path}: an index of kind {manifest['kind']!r}, and {' or '.join(kinds)} is needed: "
            "DPR searches embeddings, BM25 words. Build one for this run with python -m "
            "rag_jax.build_index --run.")
    check_encoder(path, manifest, encoder_fingerprint)
    for name in ("passages/meta.json", *manifest["files"]):
        regular_file(path, name)
    files = VerifiedFiles(path, {name: entry for name, entry in manifest["files"].items()
                                 if re.fullmatch(_STORE_FILE, name) is None})
    _refuse_foreign(path, files.names)
    passages = _store(path / "passages", manifest["size"], manifest["passages_fingerprint"])
    edited = manifest.get("edited")
    if not edited:
        return IndexFolder(path, manifest, passages, files)
    stores = [passages]
    if edited["added"]:
        stores.append(_store(path / ADDED / "passages", edited["added"],
                             edited["passages_fingerprint"]))
    valid = np.ones(manifest["size"] + edited["added"], bool)
    if edited["deleted"]:
        valid[_deleted(path, files, manifest)] = False
    return IndexFolder(path, manifest, JoinedPassages(stores, valid), files, valid)


def _store(path: Path, size: int, fingerprint: str) -> PassageStore:
    """Opens a passage store of an index, whose manifest has its size and fingerprint."""
    passages = PassageStore.mapped(path)
    if passages.fingerprint != fingerprint or len(passages) != size:
        raise RetrievalError(
            f"{path.parent}: its passages are not the ones it was built from ({len(passages)} of "
            f"fingerprint {passages.fingerprint[:12]}, built from {size} of "
            f"{fingerprint[:12]}); {AGAIN}.")
    return passages


def _deleted(path: Path, files: VerifiedFiles, manifest: dict[str, Any]) -> np.ndarray:
    """The rows int64[D] that were deleted, verified and checked."""
    files.check_all([DELETED])
    rows = files.map(DELETED, "<i8")
    MANIFEST.need(path, 0 <= rows[0] and rows[-1] < manifest["size"] and (np.diff(rows) > 0).all(),
                  f"{DELETED} does not hold ascending rows of {manifest['size']}")
    return rows


def _refuse_foreign(path: Path, names: tuple[str, ...]) -> None:
    """Refuses files in the folders of ScaNN and bm25s that the manifest does not list.

    Hidden files, as operating systems write them, are allowed: neither library reads them.
    """
    known = {*names, *(name.partition("/")[0] for name in names)}
    for folder in path.glob("*"):
        if folder.name.startswith(("scann", "bm25")):
            for file in (folder, *folder.glob("[!.]*")):
                name = file.relative_to(path).as_posix()
                if name not in known:
                    raise RetrievalError(
                        f"{path}: {name} does not belong to this index; remove it.")


def check_encoder(path: Path, manifest: dict, encoder_fingerprint: str | None) -> None:
    """Raises OtherEncoderError where another encoder than this one has built the index."""
    built_by = manifest["encoder_fingerprint"]
    if encoder_fingerprint is not None and encoder_fingerprint != built_by:
        raise OtherEncoderError(
            f"{path}: built by the encoder {built_by[:16]}, asked by {encoder_fingerprint[:16]}; "
            "their inner products mean nothing. Build the index again with this encoder, or use "
            "the checkpoint it was built with.")


def read_manifest(path: Path) -> dict[str, Any]:
    """Reads and checks the manifest of a version, and no other file."""
    if not path.is_dir():
        raise RetrievalError(f"{path}: no index here; check the path, or build one with python -m "
                             "rag_jax.build_index.")
    if not (path / "manifest.json").is_file():
        names = sorted(os.listdir(path))
        state = "an empty directory" if not names else f"no index: it holds {names[:5]}"
        if versions_of(path).is_dir() or EMBEDDINGS in names:
            state = f"an index without {POINTER}, that is half built or half copied"
        raise RetrievalError(
            f"{path}: this is {state}; build one with python -m rag_jax.build_index, or name the "
            f"directory that holds {POINTER} or, in older ones, manifest.json.")
    manifest, _ = MANIFEST.read(path)
    _check_manifest(path, manifest)
    return manifest


def _check_inputs(need: Callable[[bool, str], None], manifest: dict[str, Any]) -> None:
    """Refuses "inputs" of an index of vectors with which an edit could not rebuild it."""
    inputs = manifest["inputs"]
    need("scann" in manifest and inputs.get("kind") in ("exact", "scann")
         and inputs.get("encoder_fingerprint") == manifest["encoder_fingerprint"],
         f"inputs {inputs!r:.80}")
    for asked, used in ((inputs, inputs["kind"] == "scann"), (manifest.get("auto"), True)):
        if asked is None or not used:
            continue
        try:
            ScannSettings(**asked["scann"])
            target = asked.get("recall_target")
            good = target is None or isinstance(target, int | float)
        except (TypeError, KeyError, AttributeError, RetrievalError):
            good = False
        need(good, f"settings of ScaNN that it is built with anew ({asked!r:.200})")


def _check_manifest(path: Path, manifest: dict[str, Any]) -> None:
    """Refuses a manifest that no builder writes."""
    need = functools.partial(MANIFEST.need, path)
    kind, size, width = (manifest.get(name) for name in ("kind", "size", "width"))
    need(kind in KINDS, f"kind {kind!r:.80}")
    need(is_count(size, 1) and (kind == "bm25" or is_count(width, 1)),
         f"size {size!r:.80}, width {width!r:.80}")
    for name, type_ in _TYPES.items():
        need(isinstance(manifest.get(name), type_), f"{name} {manifest.get(name)!r:.80}")
    parts = 0
    if kind == "scann":
        try:
            parts = ScannSettings(**manifest["scann"]).parts
        except (TypeError, KeyError, RetrievalError) as error:
            need(False, f"settings of ScaNN ({error})")
        need(parts <= size, f"{parts} parts of {size} passages")
    if kind != "bm25":
        _check_inputs(need, manifest)
    recall = manifest.get("recall", {"k": 1, "recall": 1.0, "queries": 1})
    need(isinstance(recall, dict) and is_count(recall.get("k")) and is_count(recall.get("queries"))
         and all(isinstance(share, int | float) and 0 <= share <= 1
                 for share in (recall.get("recall"), recall.get("target", 0))),
         f"recall {recall!r:.80}")
    allowed = {f"scann.{part}/{name}" if part else f"scann/{name}"
               for part in range(min(parts, 10_000)) for name in SCANN_FILES}
    allowed |= {f"bm25/{name}" for name in BM25_FILES} if kind == "bm25" else {
        EMBEDDINGS, f"{ADDED}/{EMBEDDINGS}", DELETED}
    for name in manifest["files"]:
        need(name in allowed or re.fullmatch(_STORE_FILE, name) is not None,
             f"its table of files has {name!r:.80}, which no index of kind {kind} has")
    edited = manifest.get("edited", {"added": 0, "deleted": 0})
    added, deleted = (edited.get(name) if isinstance(edited, dict) else None
                      for name in ("added", "deleted"))
    need(is_count(added) and is_count(deleted) and deleted <= size and size + added > deleted
         and (not added or isinstance(edited.get("passages_fingerprint"), str))
         and (kind != "bm25" or not added + deleted), f"edited {edited!r:.80}")
    sizes = {} if kind == "bm25" else {
        EMBEDDINGS: 4 * size * width, f"{ADDED}/{EMBEDDINGS}": 4 * added * width,
        DELETED: 8 * deleted}
    for name, bytes_ in sizes.items():
        need(manifest["files"].get(name, {"bytes": 0})["bytes"] == bytes_,
             f"{name} does not have the {bytes_} bytes of its rows")
