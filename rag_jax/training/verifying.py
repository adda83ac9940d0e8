"""All of a folder compared with its digests, and what in it is damaged, by name."""

import pathlib
from collections.abc import Iterator
from typing import NamedTuple

from rag_jax.data import inputs
from rag_jax.documents import workdir as documents
from rag_jax.errors import UserError
from rag_jax.retrieval.hybrid import WORDS
from rag_jax.retrieval.manifest import open_folder
from rag_jax.retrieval.passages import PassageStore
from rag_jax.retrieval.verification import VerifiedFiles, open_digests
from rag_jax.retrieval.versions import POINTER, current
from rag_jax.training import workdir
from rag_jax.training.checkpoint import Checkpointer
from rag_jax.training.run import Clock

_INDEXES = ("indexes", "indexes_bm25")


class Part(NamedTuple):
    """What was read of one part of a folder.

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
      UserError: it is none of them.
    """
    path = path.absolute()
    if documents.exists(path):
        yield from _documents(path)
    elif (path / "config.json").is_file():
        yield from _workdir(path)
    elif _is_index(path):
        yield from _index(path)
    elif (path / "meta.json").is_file():
        yield _store(path)
    else:
        raise UserError(f"{path}: neither an index nor a passage store nor a workdir: it has none "
                        f"of {POINTER}, manifest.json, meta.json and config.json")


def _is_index(path: pathlib.Path) -> bool:
    return (path / "manifest.json").is_file() or (path / POINTER).is_file()


def _files(files: VerifiedFiles) -> tuple[str, list[str]]:
    return (f"{len(files.names)} files, {files.bytes / 1e6:.1f} MB",
            [str(files.folder / name) for name in files.damaged()])


def _index(path: pathlib.Path) -> Iterator[Part]:
    """An index, and that of the same passages' words in it, if there is one."""
    try:
        folder, _, passages, files, _ = open_folder(current(path))
    except UserError as error:
        yield Part(str(path), "index", [str(error)])
        return
    (size, damage), of_passages = _files(files), [_files(store.files) for store in passages.stores]
    yield Part(str(path), f"index of {len(passages)} passages, {size}",
               damage + [name for _, names in of_passages for name in names])
    if (folder / WORDS).is_dir():
        yield from _index(folder / WORDS)


def _store(path: pathlib.Path) -> Part:
    try:
        store = PassageStore.mapped(path)
    except UserError as error:
        return Part(str(path), "passage store", [str(error)])
    size, damage = _files(store.files)
    return Part(str(path), f"{len(store)} passages, {size}", damage)


def _documents(path: pathlib.Path) -> Iterator[Part]:
    for name, read in (("config.json", workdir.read), (documents.RECORD, documents.read)):
        yield Part(str(path / name), "settings" if read is workdir.read else "list of documents",
                   _errors(lambda read=read: read(path)))
    yield from _index(path / documents.INDEX)
    if workdir.exists(path / documents.TRAINED):
        yield from _workdir(path / documents.TRAINED)


def _workdir(path: pathlib.Path) -> Iterator[Part]:
    for name, read in (("config.json", workdir.read), ("seconds.json", Clock)):
        if (path / name).exists():
            yield Part(str(path / name), "settings" if read is workdir.read else "times",
                       _errors(lambda read=read: read(path)))
    for file in sorted(path.glob("*/eval.json")):
        yield Part(str(file), "settings",
                   _errors(lambda file=file: workdir.eval_of(path, file.parent.name)))
    for file in sorted(path.glob("*/stopped.json")):
        yield Part(str(file), "note of a stop",
                   _errors(lambda file=file: workdir.has_stopped(file.parent)))
    data = path / "data"
    if (data / inputs.RECORD).exists():
        yield Part(str(data / inputs.RECORD), "what the data were made from",
                   _errors(lambda: inputs.read(data / inputs.RECORD)))
    found: list[VerifiedFiles | None] = []
    damage = _errors(lambda: found.append(open_digests(data)))
    if found and found[0] is not None:
        yield Part(str(data), *_files(found[0]))
    elif damage:
        yield Part(str(data), "list of digests", damage)
    elif data.is_dir():
        yield Part(str(data), "but without digests: made by an earlier version", [])
    for store in _folders(data / "memories"):
        yield _store(store)
    for folder in (path, *_folders(path)):
        for kind in _INDEXES:
            for index in _folders(folder / kind):
                yield from _index(index)
    for folder in _folders(path):  # an index may have the name of a year
        if folder.name not in _INDEXES and any(step.name.isdigit() for step in _folders(folder)):
            yield from _checkpoints(folder)


def _checkpoints(folder: pathlib.Path) -> Iterator[Part]:
    with Checkpointer(folder, read_only=True) as checkpointer:
        for step in sorted(int(f.name) for f in _folders(folder) if f.name.isdigit()):
            yield Part(str(folder / str(step)), "checkpoint",
                       _errors(lambda step=step: checkpointer.verify(step)))


def _folders(path: pathlib.Path) -> list[pathlib.Path]:
    """The folders in a folder, without working folders; [] where there is none."""
    return sorted(f for f in (path.iterdir() if path.is_dir() else ())
                  if f.is_dir() and not f.name.startswith("."))


def _errors(read) -> list[str]:
    try:
        read()
    except UserError as error:
        return [str(error)]
    return []
