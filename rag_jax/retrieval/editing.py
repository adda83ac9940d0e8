"""Editing an index: passages are added and deleted, and a further version of it is published.

Only added passages are embedded. They lie in a segment of their own, which is searched exactly
besides what was built. The rows of deleted passages stay, but no search finds them. The built files
are hard-linked into the new version, with the digests that they have in the old one. An index that
its edits have made slow is compacted: rebuilt from the embeddings that it has.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rag_jax import files
from rag_jax.retrieval.bm25 import Bm25Settings, index_words
from rag_jax.retrieval.build import (
    RecallSettings,
    build_parts,
    choose_kind,
    manifest_of,
    measure,
)
from rag_jax.retrieval.index import Embeddings
from rag_jax.retrieval.joined import copy_rows, kept_rows
from rag_jax.retrieval.json_files import digest_of
from rag_jax.retrieval.manifest import (
    ADDED,
    DELETED,
    EMBEDDINGS,
    MANIFEST,
    IndexFolder,
    open_folder,
    read_manifest,
)
from rag_jax.retrieval.passages import PassageStore
from rag_jax.retrieval.protocol import PassageIdError, RetrievalError
from rag_jax.retrieval.publish import begin_version, publish_index, publishing
from rag_jax.retrieval.scann import EXACT_ROW, SMALLEST, ScannSettings
from rag_jax.retrieval.shards import PassageEmbedder, embed_all, join_shards
from rag_jax.retrieval.verification import folder_entries, map_file
from rag_jax.retrieval.versions import current

_PERHAPS = "An edit that was killed may have"  # at its very end


class Edit(NamedTuple):
    """An edit of an index.

    Attributes:
        base: the version that is edited.
        kept: bool[N], its rows that were not deleted before and are not now.
        added: the new passages; None = none.
    """

    base: IndexFolder
    kept: np.ndarray
    added: PassageStore | None

    @property
    def parts(self) -> list[tuple[PassageStore, np.ndarray]]:
        """Each passage store with its kept rows int64[R]: built, added before, new."""
        parts = kept_rows(self.base.passages, self.kept)
        return parts if self.added is None else [*parts, (self.added, np.arange(len(self.added)))]

    @property
    def size(self) -> int:
        """Passages that the edited index has."""
        return sum(len(rows) for _, rows in self.parts)


def planned(out: Path, kinds: tuple[str, ...], fingerprint: str | None, added: PassageStore | None,
            deleted: Sequence[str], least: int = 1) -> Edit:
    """The edit of the current version at `out`, checked before any work.

    Raises:
        RetrievalError: there is no index of these kinds and this encoder, a deleted id is not in
            it, an added id is, or fewer than `least` passages would be left.
    """
    base = open_folder(current(out), kinds, fingerprint)
    for store in base.passages.stores:
        store.files.verify()
    kept = np.ones(len(base.passages), bool) if base.valid is None else base.valid.copy()
    try:
        kept[[base.passages.row_of(passage_id) for passage_id in deleted]] = False
    except PassageIdError as error:
        raise PassageIdError(f"{error} {_PERHAPS} deleted it.") from None
    if added is not None:
        for passage_id in added.ids():
            row = base.passages.find(passage_id)
            if row is not None and kept[row]:
                raise PassageIdError(f"{out}: has a passage {passage_id!r}; to replace it, delete "
                                     f"it in the same edit. {_PERHAPS} added it.")
        if {*added.token_tables} != {*base.passages.token_tables}:
            raise RetrievalError(
                f"{out}: has the token tables {sorted(base.passages.token_tables)}, the new "
                f"passages {sorted(added.token_tables)}.")
    edit = Edit(base, kept, added)
    if not edit.size:
        raise RetrievalError(f"{out}: nothing would be left of its passages; an index needs one.")
    if edit.size < least:
        raise RetrievalError(f"{out}: {edit.size} passages would be left, and {least} are read.")
    return edit


def edit_index(out: Path, embedder: PassageEmbedder, added: PassageStore | None = None,
               deleted: Sequence[str] = (), recall: RecallSettings = RecallSettings(),  # noqa: B008
               compact: bool | None = None, least: int = 1) -> None:
    """Adds passages to an index of vectors and deletes others from it, in one new version.

    A killed edit leaves the old version as it is, and the same edit, made again, goes on with the
    embeddings it had finished. If it was killed when all but the pointer was written, the next edit
    publishes it; the same edit is then refused, because its ids are already deleted or added.

    Args:
        out: the index directory; who has it open keeps the old version.
        embedder: embeds the added passages; of the encoder that built the index.
        added: new passages, with the same token tables as the index.
        deleted: ids of passages. An id that is both deleted and added is replaced.
        recall: how recall is measured afterwards. Its target is that of the build.
        compact: rebuild the index; None = if `is_slow`.
        least: how many passages have to be left.

    Raises:
        RetrievalError: as `planned`, or the embedder reads another token table or length than that
            of the build, or an embedding cannot be used.
        InUseError: another process builds at out; it is named.
    """
    read_manifest(current(out))  # an error if there is none, which publishing would make
    with publishing(out):
        edit = planned(out, ("exact", "scann"), embedder.encoder_fingerprint, added, deleted,
                       least)
        if added is None and not len(deleted) and not compact:
            return
        _check_embedder(edit, embedder)
        content = _begin_anew(out, edit)
        new = _embedded(edit, embedder, content)
        if compact or compact is None and is_slow(edit):
            manifest, known = _compacted(edit, new, content)
        else:
            manifest, known = _with_segment(edit, new, content)
        manifest["files"] = folder_entries(content, known)
        MANIFEST.write(content, manifest)
        folder = open_folder(content)
        measure(folder, recall)
        publish_index(content, out, folder.manifest, manifest["files"])


def edit_words(out: Path, added: PassageStore | None = None, deleted: Sequence[str] = (),
               least: int = 1) -> None:
    """`edit_index` for a BM25 index, which is built anew: each weight depends on all passages.

    Raises:
        RetrievalError: as `planned`, or no passage has a word.
        InUseError: another process builds at out; it is named.
    """
    read_manifest(current(out))
    with publishing(out):
        edit = planned(out, ("bm25",), None, added, deleted, least)
        if added is None and not len(deleted):
            return
        content = _begin_anew(out, edit)
        store = copy_rows(content / "passages", edit.parts)
        index_words(store, content / "bm25",
                    Bm25Settings.of_manifest(edit.base.path, edit.base.manifest))
        publish_index(content, out, {
            **edit.base.manifest, "passages_fingerprint": store.fingerprint, "size": len(store),
            "edited": {"added": 0, "deleted": 0}})


def is_slow(edit: Edit) -> bool:
    """Whether searching the edited index would take more than twice as long as after compaction.

    That is so if more than half of the built rows are deleted, if searching the added rows exactly
    takes longer than ScaNN's search of the built ones, or if an exact
    index has enough passages for ScaNN by now.
    """
    manifest, added = edit.base.manifest, sum(len(rows) for _, rows in edit.parts[1:])
    built = manifest["size"]
    if 2 * np.count_nonzero(edit.kept[:built]) < built:
        return True
    if manifest["kind"] == "exact":
        return _kind_anew(manifest, edit.size) == "scann"
    settings = ScannSettings(**manifest["scann"])
    return EXACT_ROW * added > settings.parts * settings.work(built // settings.parts)


def _kind_anew(manifest: dict[str, Any], size: int) -> str:
    """The kind of an index of `size` passages, rebuilt as one with this manifest was built."""
    if "auto" in manifest:
        return choose_kind("auto", size, ScannSettings(**manifest["auto"]["scann"]))
    inputs = manifest["inputs"]
    if inputs["kind"] == "scann" and size < SMALLEST * ScannSettings(**inputs["scann"]).parts:
        return "exact"
    return inputs["kind"]


def _begin_anew(out: Path, edit: Edit) -> Path:
    """The folder in which the edited version is made, emptied; its parent keeps the embeddings that
    a killed process made for the same edit."""
    content = begin_version(out, {"edit": digest_of({
        "base": edit.base.manifest["files"], "kept": np.packbits(edit.kept).tobytes().hex(),
        "added": None if edit.added is None else edit.added.fingerprint})})
    for left in content.iterdir():  # from a killed process
        files.remove_folder(left)
    return content


def _check_embedder(edit: Edit, embedder: PassageEmbedder) -> None:
    """Raises a RetrievalError unless added passages are read as those of the build were."""
    if edit.added is None:
        return
    inputs = edit.base.manifest["inputs"]
    for name in ("token_table", "max_length"):
        ours = getattr(embedder, name)
        if inputs.get(name, ours) != ours:
            raise RetrievalError(
                f"{edit.base.path}: was built with {name}={inputs[name]!r}, the new passages would "
                f"be embedded with {ours!r}; edit it with what it was built with "
                "(config.data.max_passage_length for max_length), or build it again.")


def _embedded(edit: Edit, embedder: PassageEmbedder, content: Path) -> np.ndarray:
    """The embeddings float32[A, E] of the new passages."""
    width = edit.base.manifest["width"]
    if edit.added is None:
        return np.zeros((0, width), np.float32)
    file, size = content.parent / "new" / EMBEDDINGS, len(edit.added)
    file.parent.mkdir(exist_ok=True)
    embed_all(edit.added, embedder, file)
    join_shards(file, size, embedder.shard_rows)
    new = map_file(file, "<f4").reshape(size, -1)
    if new.shape[1] != width:
        raise RetrievalError(f"{edit.base.path}: has embeddings of width {width}, the embedder "
                             f"returned {new.shape[1]}; if the encoder changed, so must its "
                             "fingerprint.")
    return new


def _write_rows(edit: Edit, new: np.ndarray, parts: slice, folder: Path) -> PassageStore:
    """Writes the passages and embeddings of some of `edit.parts` into a folder, in their order."""
    embeddings = Embeddings(edit.base)
    embeddings.check_all(list(embeddings.arrays)[parts])
    arrays = [*embeddings.arrays.values(), new][parts]
    with files.replaced(folder / EMBEDDINGS, "wb") as file:
        for array, (_, rows) in zip(arrays, edit.parts[parts], strict=False):
            for begin in range(0, len(rows), 2**14):
                file.write(array[rows[begin : begin + 2**14]].tobytes())
    return copy_rows(folder / "passages", edit.parts[parts])


def _with_segment(edit: Edit, new: np.ndarray, content: Path) -> tuple[dict, dict]:
    """Makes a version with a segment of added passages.

    Returns:
        Its manifest, and the entries of files that are linked from the old version.
    """
    base, built = edit.base, edit.base.manifest["size"]
    known = {name: entry for name, entry in base.manifest["files"].items()
             if name != DELETED and not name.startswith(f"{ADDED}/")}
    for name in known:
        files.take_over(base.path / name, content / name)
    gone = np.flatnonzero(~edit.kept[:built])
    if len(gone):
        files.write_bytes(content / DELETED, gone.astype("<i8").tobytes())
    edited = {"added": sum(len(rows) for _, rows in edit.parts[1:]), "deleted": len(gone),
              "passages_fingerprint": None}
    if edited["added"]:
        (content / ADDED).mkdir()
        store = _write_rows(edit, new, slice(1, None), content / ADDED)
        edited["passages_fingerprint"] = store.fingerprint
    return {**base.manifest, "edited": edited}, known


def _compacted(edit: Edit, new: np.ndarray, content: Path) -> tuple[dict, dict]:
    """Makes a version that is rebuilt from all rows; returns as `_with_segment`."""
    base = edit.base.manifest
    inputs, auto = base["inputs"], base.get("auto")
    store = _write_rows(edit, new, slice(None), content)
    kind, scann = _kind_anew(base, len(store)), None
    if kind == "scann":
        scann = (auto or inputs)["scann"]
        build_parts(content, len(store), ScannSettings(**scann))
    manifest = manifest_of(inputs, store, base["width"], auto) | {"kind": kind, "scann": scann}
    return {**manifest, "edited": {"added": 0, "deleted": 0}}, {}
