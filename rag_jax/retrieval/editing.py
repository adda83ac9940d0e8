"""Editing an index: passages are added and deleted, and a further version of it is published.

Only added passages are embedded. They lie in a segment of their own, which is searched exactly
beside what was built; the rows of deleted ones stay, and no search finds them. The files that were
built are taken over by their names (hard links), with the digests that they have always had. An
index whose edits make its search slow is compacted: built anew from its rows as they are.
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
from rag_jax.retrieval.protocol import RetrievalError
from rag_jax.retrieval.publish import begun, publish_index, publishing
from rag_jax.retrieval.scann import EXACT_ROW, SMALLEST, ScannSettings
from rag_jax.retrieval.shards import PassageEmbedder, embed_all, join_shards
from rag_jax.retrieval.verification import folder_entries, map_file
from rag_jax.retrieval.versions import current


class Edit(NamedTuple):
    """What an edit makes of an index.

    Attributes:
        base: the version that is edited.
        kept: bool[N], its rows that are neither deleted before nor now.
        added: the new passages; None = none.
    """

    base: IndexFolder
    kept: np.ndarray
    added: PassageStore | None

    @property
    def parts(self) -> list[tuple[PassageStore, np.ndarray]]:
        """Passage stores with their rows int64[R] that stay: built, added before, new."""
        parts = kept_rows(self.base.passages, self.kept)
        return parts if self.added is None else [*parts, (self.added, np.arange(len(self.added)))]

    @property
    def rows(self) -> int:
        """Passages that the edited index has."""
        return sum(len(rows) for _, rows in self.parts)


def planned(out: Path, kinds: tuple[str, ...], fingerprint: str | None, added: PassageStore | None,
            deleted: Sequence[str], least: int = 1) -> Edit:
    """The edit of the current version at `out`, checked before any work.

    Raises:
        RetrievalError: no index of these kinds and this encoder; a deleted id that it has not, an
            added id that it has, or fewer than `least` passages would be left.
    """
    base = open_folder(current(out), kinds, fingerprint)
    for store in base.passages.stores:
        store.files.verify()
    kept = np.ones(len(base.passages), bool) if base.valid is None else base.valid.copy()
    kept[[base.passages.row_of(passage_id) for passage_id in deleted]] = False
    for passage_id in () if added is None else added.ids():
        row = base.passages.find(passage_id)
        if row is not None and kept[row]:
            raise RetrievalError(f"{out}: has a passage {passage_id!r}; to replace it, delete it "
                                 "in the same edit.")
    if added is not None and {*added.token_tables} != {*base.passages.token_tables}:
        raise RetrievalError(f"{out}: has the token tables {sorted(base.passages.token_tables)}, "
                             f"the new passages {sorted(added.token_tables)}.")
    edit = Edit(base, kept, added)
    if not edit.rows:
        raise RetrievalError(f"{out}: nothing would be left of its passages; an index needs one.")
    if edit.rows < least:
        raise RetrievalError(f"{out}: {edit.rows} passages would be left, and {least} are read.")
    return edit


def edit_index(out: Path, embedder: PassageEmbedder, added: PassageStore | None = None,
               deleted: Sequence[str] = (), recall: RecallSettings = RecallSettings(),  # noqa: B008
               compact: bool | None = None, least: int = 1) -> None:
    """Adds passages to an index of vectors and deletes others from it, in one new version.

    A killed edit leaves the version that was, and the same edit again goes on with its embeddings.
    One that was killed when all but the pointer was written is published by the next edit, and then
    the same edit is refused, as its ids are gone or there.

    Args:
        out: the index directory; who has it open keeps the version that is open.
        embedder: the encoder that built the index; embeds the added passages.
        added: passages with the token tables of the index's.
        deleted: ids of passages. An id may be deleted and added: it is replaced.
        recall: how recall is measured afterwards. Its target is that of the build.
        compact: build the index anew from its rows; None = where `is_slow`.
        least: how many passages have to be left.

    Raises:
        RetrievalError: as `planned`, or the embedder reads added passages otherwise than the build
            read its own, or an embedding cannot be used.
        InUseError: another process builds at out; it is named.
    """
    read_manifest(current(out))  # publishing would make an index where there is none
    with publishing(out):
        edit = planned(out, ("exact", "scann"), embedder.encoder_fingerprint, added, deleted,
                       least)
        if added is None and not len(deleted) and not compact:
            return
        _check_embedder(edit, embedder)
        content = begun(out, _key(edit))
        new = _embedded(edit, embedder, content)
        for left in content.iterdir():  # by a killed process
            files.remove_folder(left)
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
    """`edit_index` for an index of words: they are counted anew, as each weight is of all passages.

    Raises:
        RetrievalError: as `planned`, or no passage has a word.
        InUseError: another process builds at out; it is named.
    """
    read_manifest(current(out))
    with publishing(out):
        edit = planned(out, ("bm25",), None, added, deleted, least)
        if added is None and not len(deleted):
            return
        content = begun(out, _key(edit))
        for left in content.iterdir():
            files.remove_folder(left)
        store = copy_rows(content / "passages", edit.parts)
        index_words(store, content / "bm25",
                    Bm25Settings.of_manifest(edit.base.path, edit.base.manifest))
        publish_index(content, out, {
            **edit.base.manifest, "passages_fingerprint": store.fingerprint, "size": len(store),
            "edited": {"added": 0, "deleted": 0}})


def is_slow(edit: Edit) -> bool:
    """Whether a search of an edited index takes more than twice as long as one of a compacted one:
    more than half of the built rows are deleted; the added ones, which are searched exactly, take
    longer than all of ScaNN's; or there are enough by now for ScaNN."""
    manifest, added = edit.base.manifest, sum(len(rows) for _, rows in edit.parts[1:])
    built = manifest["size"]
    if 2 * np.count_nonzero(edit.kept[:built]) < built:
        return True
    if manifest["kind"] == "exact":
        return _kind_anew(manifest, edit.rows) == "scann"
    settings = ScannSettings(**manifest["scann"])
    return EXACT_ROW * added > settings.parts * settings.work(built // settings.parts)


def _kind_anew(manifest: dict[str, Any], size: int) -> str:
    """The kind of an index of `size` passages that is built anew as one with this manifest was."""
    if "auto" in manifest:
        return choose_kind("auto", size, ScannSettings(**manifest["auto"]["scann"]))
    inputs = manifest["inputs"]
    if inputs["kind"] == "scann" and size < SMALLEST * ScannSettings(**inputs["scann"]).parts:
        return "exact"
    return inputs["kind"]


def _key(edit: Edit) -> dict[str, Any]:
    """Names what an edited version is made from."""
    return {"edit": digest_of({
        "base": edit.base.manifest["files"], "kept": np.packbits(edit.kept).tobytes().hex(),
        "added": None if edit.added is None else edit.added.fingerprint})}


def _check_embedder(edit: Edit, embedder: PassageEmbedder) -> None:
    """Raises a RetrievalError where added passages would be read otherwise than those before."""
    inputs = edit.base.manifest["inputs"]
    for name in () if edit.added is None else ("token_table", "max_length"):
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
    """Writes passages and embeddings of some of `edit.parts` into a folder, in their order."""
    embeddings = Embeddings(edit.base)
    embeddings.check_all(list(embeddings.arrays)[parts])
    arrays = [*embeddings.arrays.values(), new][parts]
    with files.replaced(folder / EMBEDDINGS, "wb") as file:
        for array, (_, rows) in zip(arrays, edit.parts[parts], strict=False):
            for begin in range(0, len(rows), 2**14):
                file.write(array[rows[begin : begin + 2**14]].tobytes())
    return copy_rows(folder / "passages", edit.parts[parts])


def _with_segment(edit: Edit, new: np.ndarray, content: Path) -> tuple[dict, dict]:
    """The version with a segment of added passages: its manifest, and the known entries in it."""
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
    """The version that is built anew of all rows; as `_with_segment`."""
    base = edit.base.manifest
    inputs, auto = base["inputs"], base.get("auto")
    store = _write_rows(edit, new, slice(None), content)
    kind, scann = _kind_anew(base, len(store)), None
    if kind == "scann":
        scann = (auto or inputs)["scann"]
        build_parts(content, len(store), ScannSettings(**scann))
    manifest = manifest_of(inputs, store, base["width"], auto) | {"kind": kind, "scann": scann}
    return {**manifest, "edited": {"added": 0, "deleted": 0}}, {}
