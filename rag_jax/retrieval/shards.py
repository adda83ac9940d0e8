"""The embeddings of all passages, shard by shard: what is finished is not embedded again.

The rows of all shards are in content/embeddings.f32 of the working folder, which also holds

    shards/0000008192.json    checksum of the finished rows that begin there
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from rag_jax import files
from rag_jax.retrieval.index import RetrievalError, check_embeddings
from rag_jax.retrieval.passages import PassageStore

SHARD_ROWS = 8192  # passages embedded between two points from which a killed build resumes

Embed = Callable[[np.ndarray, np.ndarray], np.ndarray]


def embed_all(
    store: PassageStore, embed: Embed, content: Path, inputs: dict, progress: bool, host: int,
    hosts: int,
) -> None:
    """Fills this host's shards of embeddings.f32, beginning after those that are already done."""
    from tqdm import tqdm

    size, shard_rows = len(store), inputs["shard_rows"]
    file = content / "embeddings.f32"
    begins = range(0, size, shard_rows)[host::hosts]
    done = {begin: mark for begin in begins if (mark := _read_mark(file, begin))}
    width = next(iter(done.values()))["width"] if done else None
    skipped = sum(mark["rows"] for mark in done.values())
    lengths = _lengths(store, inputs)
    mine = sum(min(shard_rows, size - begin) for begin in begins)
    with tqdm(
        total=mine, initial=skipped, desc="embedding", unit=" passages",
        disable=None if progress else True,
    ) as bar:
        for begin in begins:
            if begin in done:
                continue
            rows = np.arange(begin, min(begin + shard_rows, size))
            shard = _embed_shard(store, embed, rows, lengths[rows], inputs, width, bar.update)
            width = shard.shape[1]
            _write_shard(file, begin, shard)


def join_shards(file: Path, size: int, shard_rows: int) -> None:
    """Checks that every shard is there, of one width, and ends the file after the last row."""
    marks = {begin: _read_mark(file, begin) for begin in range(0, size, shard_rows)}
    missing = [begin for begin, mark in marks.items() if mark is None]
    if missing:
        raise RetrievalError(
            f"{file}: the rows of shard {missing[0]} are not there as they were written; do all "
            "hosts share this folder? The same command embeds them again."
        )
    widths = {mark["width"] for mark in marks.values()}
    if len(widths) > 1:
        raise RetrievalError(f"{file}: shards of widths {sorted(widths)}; the embedder changed.")
    os.truncate(file, size * widths.pop() * 4)


def _lengths(store: PassageStore, inputs: dict) -> np.ndarray:
    """Returns the tokens int64[N] of each passage, which must have some."""
    lengths = store.tokens(inputs["token_table"]).lengths
    if not lengths.all():
        row = int(np.argmin(lengths))
        raise RetrievalError(
            f"passage {store[row].id!r} has no tokens in table {inputs['token_table']!r}; write "
            "the store again with an encoder that gives every passage at least one token."
        )
    return np.minimum(lengths, inputs["max_length"])


def _embed_shard(store, embed, rows, lengths, inputs, width, update) -> np.ndarray:
    """Returns the embeddings float32[len(rows), E] of one shard; width None means not yet known."""
    shard = None if width is None else np.zeros((len(rows), width), "<f4")
    for places, result in _results(store, embed, rows, lengths, inputs):
        array = np.asarray(result)
        if array.ndim != 2 or len(array) != inputs["batch_size"] or 0 in array.shape:
            raise RetrievalError(
                f"the embedder returned shape {array.shape} for {inputs['batch_size']} passages; "
                f"it must return [{inputs['batch_size']}, width]."
            )
        if shard is None:
            shard = np.zeros((len(rows), array.shape[1]), "<f4")
        if array.shape[1] != shard.shape[1]:
            raise RetrievalError(
                f"the embedder returned width {array.shape[1]} after width {shard.shape[1]}; if "
                "the encoder changed, so must its fingerprint."
            )
        shard[places] = check_embeddings(
            array[: len(places)],
            lambda i, ids=rows[places]: f"the embedding of passage {store[ids[i]].id!r}",
        )
        update(len(places))
    return shard


def _results(store, embed, rows, lengths, inputs) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields (places in the shard int64[n], n <= batch_size, and what embed returned for them).

    A batch is yielded after the next one was handed to embed, so that a device need not wait.
    """
    table, batch_size, waiting = store.tokens(inputs["token_table"]), inputs["batch_size"], None
    bucket_of = np.searchsorted(inputs["length_buckets"], lengths)
    for bucket, length in enumerate(inputs["length_buckets"]):
        members = np.flatnonzero(bucket_of == bucket)
        for begin in range(0, len(members), batch_size):
            places = members[begin : begin + batch_size]
            # A short batch is filled with its last passage: a row of nothing but padding would give
            # NaN in an encoder's softmax.
            full = np.pad(places, (0, batch_size - len(places)), mode="edge")
            result = embed(*table.padded(rows[full], length, inputs["pad_id"]))
            if waiting is not None:
                yield waiting
            waiting = places, result
    if waiting is not None:
        yield waiting


def _write_shard(file: Path, begin: int, shard: np.ndarray) -> None:
    """Writes rows into their place; the mark that they are done follows once the disk has them."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    with open(descriptor, "r+b") as out:
        out.seek(begin * shard.shape[1] * 4)
        out.write(shard.tobytes())
        out.flush()
        os.fsync(out.fileno())
    checksum = hashlib.sha256(shard.tobytes()).hexdigest()
    mark = {"rows": len(shard), "width": shard.shape[1], "sha256": checksum}
    _mark_path(file, begin).parent.mkdir(exist_ok=True)
    files.write_json(_mark_path(file, begin), mark)


def _mark_path(file: Path, begin: int) -> Path:
    return file.parent.parent / "shards" / f"{begin:010d}.json"


def _read_mark(file: Path, begin: int) -> dict | None:
    """Returns the mark of a shard whose rows are in the file as they were written, else None."""
    try:
        mark = json.loads(_mark_path(file, begin).read_text("utf-8"))
        with open(file, "rb") as data:
            data.seek(begin * mark["width"] * 4)
            rows = data.read(mark["rows"] * mark["width"] * 4)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return mark if hashlib.sha256(rows).hexdigest() == mark["sha256"] else None
