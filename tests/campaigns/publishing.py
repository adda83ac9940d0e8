"""Processes that publish onto one path while others open it, or are killed; see test_publishing.

    python -m tests.campaigns.publishing opens FOLDER PUBLICATIONS OPENS
    python -m tests.campaigns.publishing kill FOLDER FRACTION REPLACES

They are forks of a process without threads, which has imported nothing of jax.
"""

import collections
import contextlib
import json
import os
import pathlib
import shutil
import signal
import sys
import time

import numpy as np

from rag_jax.locks import InUseError
from rag_jax.retrieval.editing import edit_index
from rag_jax.retrieval.index import PassageIndex
from rag_jax.retrieval.passages import PassageStore
from rag_jax.retrieval.protocol import Passage, RetrievalError
from rag_jax.retrieval.shards import PassageEmbedder
from rag_jax.retrieval.store_writing import write_store
from rag_jax.retrieval.versions import current
from tests.retrieval.indexing import build_index

PUBLISHERS, READERS = 2, 4
CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.link"}


def stores(folder: pathlib.Path) -> list[PassageStore]:
    """Two stores of different sizes, whose passages name their store."""
    made = []
    for number, size in enumerate((11, 23)):
        passages = [Passage(f"{number}-{row}", "", f"store {number}") for row in range(size)]
        made.append(write_store(folder / f"store{number}", passages,
                                {"ids": lambda ps: [[1, 2]] * len(ps)}))
    return made


def publish(store: PassageStore, out: pathlib.Path, number: int) -> None:
    """An index whose manifest, embeddings and passages all tell what it is."""
    build_index(store, lambda ids, mask: np.full((len(ids), 8), number, np.float32), out,
                token_table="ids", encoder_fingerprint=f"{number} {store[0].text}", max_length=4,
                batch_size=4, length_buckets=[], kind="exact", recall_k=1, shard_rows=8,
                progress=False, overwrite=True)


def edit(store: PassageStore, out: pathlib.Path) -> None:
    """Adds a store to the first index that `kill` publishes, of store 0, and deletes from that."""
    embedder = PassageEmbedder(
        lambda ids, mask: np.full((len(ids), 8), 2, np.float32), token_table="ids",
        encoder_fingerprint="1 store 0", max_length=4, batch_size=4, length_buckets=[],
        shard_rows=8, progress=False)
    edit_index(out, embedder, store, ["0-3", "0-5"])


def edited(index: PassageIndex) -> str:
    """Which version of an edited index it is: "old", "new", or "mixed"."""
    ids = [passage.id for passage in index.passages]
    rows, old = np.arange(len(ids)), [f"0-{row}" for row in range(11)]
    if ids == old and index.size == 11 and (index.embeddings(rows) == 1).all():
        return "old"
    both = ids == old + [f"1-{row}" for row in range(23)] and index.size == 32
    found = index.search(np.ones((1, 8), np.float32), 32).ids if both else []
    whole = both and (index.embeddings(rows)[:, 0] == [1] * 11 + [2] * 23).all() and (
        sorted(found[0]) == sorted({*range(34)} - {3, 5}))
    return "new" if whole else "mixed"


def is_whole(index: PassageIndex) -> bool:
    number, text = index.manifest["encoder_fingerprint"].split(" ", 1)
    rows = np.arange(index.size)
    return ((index.embeddings(rows) == float(number)).all()
            and {index.passages[row].text for row in rows} == {text}
            and index.passages.tokens("ids").lengths.tolist() == [2] * index.size)


def fork(work, *args) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        work(*args)
        code = 0
    finally:
        os._exit(code)


def publisher(folder: pathlib.Path, me: int, count: int) -> None:
    """Publishes until `count` were published by all together."""
    made, counts = [PassageStore.open(folder / f"store{n}") for n in range(2)], folder / "published"
    number = 1000 * (me + 1)
    while len(os.listdir(counts)) < count:
        try:
            publish(made[number % 2], folder / "index", number)
        except InUseError:
            continue
        (counts / str(number)).touch()
        number += 1


def reader(folder: pathlib.Path, me: int, count: int) -> None:
    """Opens until all publishers have ended, and `count` times; keeps an index open between."""
    outcomes, kept = collections.Counter(), []
    while outcomes.total() < count or not (folder / "ended").exists():
        try:
            kept.append(PassageIndex.open(folder / "index"))
            outcomes["whole" if all(map(is_whole, kept)) else "mixed"] += 1
        except Exception as error:
            print(f"reader {me}: {error!r}", file=sys.stderr, flush=True)
            outcomes["failed"] += 1
        kept = kept[-3:]
    (folder / f"reader{me}.json").write_text(json.dumps(outcomes))


def opens(folder: pathlib.Path, publications: int, count: int) -> dict[str, int]:
    """Outcomes of all opens during the publications, and what is left in the end."""
    publish(stores(folder)[0], folder / "index", 1)
    (folder / "published").mkdir()
    publishers = [fork(publisher, folder, me, publications) for me in range(PUBLISHERS)]
    readers = [fork(reader, folder, me, -(-count // READERS)) for me in range(READERS)]
    ended = [os.waitpid(child, 0)[1] for child in publishers]
    (folder / "ended").touch()
    ended += [os.waitpid(child, 0)[1] for child in readers]
    found = collections.Counter()
    for me in range(READERS):
        found.update(json.loads((folder / f"reader{me}.json").read_text()))
    publish(PassageStore.open(folder / "store1"), folder / "index", 9999)  # removes the old ones
    return {**found, "died": sum(map(bool, ended)),
            "published": len(os.listdir(folder / "published")),
            "versions": len(os.listdir(folder / "index" / "versions"))}


def kill(folder: pathlib.Path, fraction: float, replaces: float) -> dict[str, str]:
    """A publisher is killed at one of its changes of names; what is seen then, and afterwards.

    With `replaces` 1 there is an index already, with 0 there is none, and with 2 it is edited.
    """
    made, out, before = stores(folder), folder / "index", folder / "before"
    out.mkdir()
    if replaces:
        publish(made[0], out, 1)
    shutil.copytree(out, before)

    def change() -> None:
        if replaces < 2:
            return publish(made[1], out, 2)
        if edited(PassageIndex.open(out)) == "old":
            with contextlib.suppress(RetrievalError):  # whole but for the pointer: now it is read
                edit(made[1], out)

    def killed(at: float) -> int:
        changes, begin = 0, time.monotonic()

        def hook(event, _):
            nonlocal changes
            changes += event in CHANGES
            if event in CHANGES and changes >= at:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        change()
        (folder / "changes").write_text(str(changes))
        assert time.monotonic() - begin < 600
        return changes

    os.waitpid(fork(killed, float("inf")), 0)  # counts them
    expected = content(out)
    total = int((folder / "changes").read_text())
    shutil.rmtree(out)
    shutil.copytree(before, out)
    at = 1 + int(fraction * total)
    status = os.waitpid(fork(killed, at), 0)[1]
    assert os.WTERMSIG(status) == signal.SIGKILL, status
    try:
        index = PassageIndex.open(out)
        seen = index.manifest["encoder_fingerprint"] if is_whole(index) else "mixed"
        if replaces == 2:
            seen = edited(index)
        del index
    except RetrievalError:
        seen = "mixed" if replaces else "none"
    change()
    same = content(out) == expected
    if replaces == 2:  # what the killed one has left goes with the next publication
        folder = current(out).relative_to(out).as_posix()
        same = all(content(out).get(name) == data for name, data in expected.items()
                   if name.startswith(folder)) and edited(PassageIndex.open(out)) == "new"
    return {"seen": seen, "after": "same" if same else str(sorted(content(out)))}


def content(out: pathlib.Path) -> dict[str, bytes]:
    """All files and folders, but for the lock."""
    return {path.relative_to(out).as_posix(): path.read_bytes() if path.is_file() else b""
            for path in out.rglob("*") if path.name != ".lock"}


if __name__ == "__main__":
    what, folder, *numbers = sys.argv[1:]
    run = {"opens": lambda: opens(pathlib.Path(folder), *map(int, numbers)),
           "kill": lambda: kill(pathlib.Path(folder), *map(float, numbers))}[what]
    print(json.dumps(run()))
