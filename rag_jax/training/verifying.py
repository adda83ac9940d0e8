"""Reads whole folders, compares them with their digests and names what is damaged."""

import contextlib
import pathlib
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from rag_jax.data import inputs
from rag_jax.documents import workdir as documents
from rag_jax.errors import UserError
from rag_jax.retrieval.hybrid import WORDS
from rag_jax.retrieval.manifest import MANIFEST, open_folder
from rag_jax.retrieval.passages import PassageStore
from rag_jax.retrieval.protocol import RetrievalError
from rag_jax.retrieval.verification import VerifiedFiles, open_digests
from rag_jax.retrieval.versions import POINTER, current, opened, read_pointer, versions_of
from rag_jax.steps import has_stopped, steps_in
from rag_jax.training import document_encoder, weights, workdir
from rag_jax.training.checkpoint import (
    CheckpointDamaged,
    Checkpointer,
    CheckpointError,
    CheckpointMismatch,
)
from rag_jax.training.clock import Clock

_INDEXES = ("indexes", "indexes_bm25")


class Part(NamedTuple):
    """One part of a folder that was read.

    Attributes:
      name: of the part.
      size: in words.
      damage: a line for each file or step that is damaged.
    """

    name: str
    size: str
    damage: list[str]


def verify(path: pathlib.Path) -> Iterator[Part]:
    """Reads an index, a passage store or a workdir whole.

    Raises:
      UserError: the folder is none of these, or the machine could not read a checkpoint that may
        be sound.
    """
    path = path.absolute()
    if not path.exists():
        raise UserError(f"{path}: there is no such folder")
    if documents.exists(path):
        yield from _documents(path)
    elif (path / "config.json").is_file() and not workdir.is_checkpoint(path):
        yield from _workdir(path)
    elif (path / POINTER).is_file() or (path / "manifest.json").is_file():
        yield from _index(path)
    elif (path / "meta.json").is_file():
        yield _store(path)
    else:
        raise UserError(f"{path}: neither an index nor a passage store nor a workdir: it has none "
                        f"of {POINTER}, manifest.json, meta.json and config.json of this package")


def _files(*folders: VerifiedFiles) -> tuple[str, list[str]]:
    """The size of the files of folders in words, and which of them are damaged."""
    count, size = (sum(len(one.names) for one in folders), sum(one.bytes for one in folders))
    return (f"{count} files, {size / 1e6:.1f} MB",
            [str(one.folder / name) for one in folders for name in one.damaged()])


def _index(path: pathlib.Path) -> Iterator[Part]:
    """An index, and the index of its passages' words that may lie in it."""
    try:  # opened, so that a later version does not remove this one meanwhile
        held = opened(path, lambda folder: types.SimpleNamespace(**open_folder(folder)._asdict()))
    except UserError as error:
        yield Part(str(path), "index", [str(error), *_damaged_files(path)])
    else:
        passages, valid = held.passages, held.valid
        size, damage = _files(held.files, *(store.files for store in passages.stores))
        count = len(passages) if valid is None else int(valid.sum())
        yield Part(str(path), f"index of {count} passages, {size}", damage)
    words = path / WORDS
    if words.is_dir() and not _is_half_built(words):  # else the next use counts them again
        yield from _index(words)


def _is_half_built(path: pathlib.Path) -> bool:
    """Whether nothing of an index has been published."""
    with contextlib.suppress(RetrievalError):
        pointer = read_pointer(path)
        return pointer == "" or pointer is None and not (
            versions_of(path).exists() or (path / "manifest.json").exists())
    return False  # its pointer is damaged


def _damaged_files(path: pathlib.Path) -> Iterator[str]:
    """The damaged files of an index that cannot be opened, as far as its manifest can be read."""
    with contextlib.suppress(UserError):
        folder = current(path)
        for name, entry in MANIFEST.read(folder)[0]["files"].items():
            try:
                yield from _files(VerifiedFiles(folder, {name: entry}))[1]
            except RetrievalError:  # it is missing, or has another size
                yield str(folder / name)


def _store(path: pathlib.Path) -> Part:
    try:
        store = PassageStore.mapped(path)
    except UserError as error:
        return Part(str(path), "passage store", [str(error)])
    size, damage = _files(store.files)
    return Part(str(path), f"{len(store)} passages, {size}", damage)


def _documents(path: pathlib.Path) -> Iterator[Part]:
    yield _record(path / "config.json", "settings", _settings)
    yield _record(path / documents.RECORD, "list of documents", lambda _: documents.read(path))
    yield from _index(path / documents.INDEX)
    if workdir.exists(path / documents.TRAINED):
        yield from _workdir(path / documents.TRAINED)


def _workdir(path: pathlib.Path) -> Iterator[Part]:
    for pattern, what, read in _RECORDS:
        for file in sorted(path.glob(pattern)):
            yield _record(file, what, read)
    data = path / "data"
    try:
        digests = open_digests(data)
    except UserError as error:
        yield Part(str(data), "list of digests", [str(error)])
    else:
        if digests is not None:
            yield Part(str(data), *_files(digests))
        elif data.is_dir():
            yield Part(str(data), "but without digests: made by an earlier version, or without "
                       "its digests.json", [])
    if inputs.is_prepared(path) and not (data / inputs.RECORD).exists():
        yield Part(str(data), "but without inputs.json: whether what they were made from has "
                   "changed cannot be told", [])
    for store in _folders(data / "memories"):
        yield _store(store)
    for folder in (path, *_folders(path)):
        for kind in _INDEXES:
            for index in _folders(folder / kind):
                yield from _index(index)
    for folder in _folders(path):
        if folder.name not in _INDEXES:  # an index may have the name of a year
            for one in (folder, folder / document_encoder.FOLDER):
                yield from _checkpoints(one)


def _settings(file: pathlib.Path) -> Any:
    return workdir.read(file.parent)


# (pattern in a workdir, what such a file is, what reads it)
_RECORDS = (
    ("config.json", "settings", _settings),
    ("seconds.json", "times", lambda file: Clock(file.parent)),
    ("*/eval.json", "settings", lambda file: workdir.eval_of(file.parents[1], file.parent.name)),
    ("*/stopped.json", "note of a stop", lambda file: has_stopped(file.parent)),
    (f"data/{inputs.RECORD}", "what the data were made from", inputs.read),
    (weights.RECORD, "what training began from", weights.read),
)


def _record(path: pathlib.Path, what: str, read: Callable[[pathlib.Path], Any]) -> Part:
    """A file or folder that has no digests: its reader alone finds damage."""
    try:
        read(path)
    except UserError as error:
        return Part(str(path), what, [str(error)])
    return Part(str(path), what, [])


def _checkpoints(folder: pathlib.Path) -> Iterator[Part]:
    if not (steps := steps_in(folder)):
        return
    with Checkpointer(folder, read_only=True) as checkpointer:
        for step in steps:
            path, damage = folder / str(step), []
            try:
                checkpointer.verify(step)
            except CheckpointError as error:
                if not path.exists():  # a training run has removed it meanwhile
                    continue
                if not isinstance(error, CheckpointDamaged | CheckpointMismatch):
                    raise  # the machine could not read it
                damage.append(str(error))
            yield Part(str(path), "checkpoint", damage)


def _folders(path: pathlib.Path) -> list[pathlib.Path]:
    """The folders in a folder, without hidden ones; [] where it does not exist."""
    return sorted(f for f in (path.iterdir() if path.is_dir() else ())
                  if f.is_dir() and not f.name.startswith("."))
