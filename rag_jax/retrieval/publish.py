"""An index directory is made beside its name, as OUT.partial, and appears there when it is whole.

OUT.partial/building/inputs.json says from what it is being made: a partial build of other inputs
is thrown away.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from rag_jax.retrieval.index import RetrievalError, file_entry, read_manifest, write_manifest
from rag_jax.retrieval.passages import PassageStore, publish
from rag_jax.retrieval.shards import write_json

Opened = TypeVar("Opened")
UNIMPORTANT = {"batch_size", "shard_rows"}  # inputs that do not change what is built


def finished(out: Path, inputs: dict, overwrite: bool, open_index: Callable[[Path], Opened]
             ) -> Opened | None:
    """The index at out, opened, where it is whole and of these inputs; None: one may be built.

    Raises:
        RetrievalError: something else is there, and `overwrite` does not allow to replace it.
    """
    replaced = out.with_name(out.name + ".replaced")
    if replaced.exists() and not out.exists():  # killed between the two renames of publish_index
        os.rename(replaced, out)
    if not out.exists() or out.is_dir() and not any(out.iterdir()):
        return None
    if not (out / "manifest.json").is_file():
        raise RetrievalError(
            f"{out}: exists and is no index, so it is not replaced; choose another path."
        )
    try:
        built_from = read_manifest(out)["inputs"]
        differ = [key for key in inputs if built_from.get(key) != inputs[key]]
        if set(differ) <= UNIMPORTANT:
            return open_index(out)
        reason = f"it is an index of other inputs ({', '.join(differ)} differ)"
    except RetrievalError as error:
        reason = f"what is there cannot be used ({error})"
    if not overwrite:
        raise RetrievalError(
            f"{out}: {reason}; choose another path, remove it, or build with overwrite=True."
        )
    return None


def open_partial(out: Path, inputs: dict, store: PassageStore) -> Path:
    """The directory to build in, with a copy of the passages.

    What an earlier build of the same inputs left is kept.
    """
    partial = out.with_name(out.name + ".partial")
    file = partial / "building" / "inputs.json"
    try:
        same = json.loads(file.read_text("utf-8")) == inputs
    except (OSError, ValueError):
        same = False
    if not same:
        shutil.rmtree(partial, ignore_errors=True)
        file.parent.mkdir(parents=True)
        write_json(file, inputs)
    (partial / "manifest.json").unlink(missing_ok=True)
    _copy_store(store, partial / "passages")
    return partial


def _copy_store(store: PassageStore, path: Path) -> None:
    try:
        if PassageStore.open(path).fingerprint == store.fingerprint:
            return
    except RetrievalError:
        shutil.rmtree(path, ignore_errors=True)
    copying = path.with_name(path.name + ".partial")
    shutil.rmtree(copying, ignore_errors=True)
    shutil.copytree(store.path, copying)
    for file in copying.iterdir():
        _sync_file(file)
    PassageStore.open(copying).verify()
    publish(copying, path)


def _sync_file(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def publish_index(partial: Path, out: Path, manifest: dict) -> None:
    """Writes the manifest and moves the directory to its name, in place of an older index."""
    building = partial / "building"
    manifest["files"] = {}
    for path in sorted(partial.rglob("*")):
        if path.is_file() and path.parent != building:
            _sync_file(path)
            manifest["files"][path.relative_to(partial).as_posix()] = file_entry(path)
    write_manifest(partial, manifest)
    replaced = out.with_name(out.name + ".replaced")
    if out.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        os.rename(out, replaced)
    publish(partial, out)
    shutil.rmtree(out / "building", ignore_errors=True)
    shutil.rmtree(replaced, ignore_errors=True)
