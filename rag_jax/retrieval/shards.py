"""Embedding all passages, shard by shard: a killed build does not repeat finished shards.

The rows of all shards are in content/embeddings.f32 of the working folder, which also holds

    shards/0000008192.json    the mark of the finished shard that begins at this row: its checksum
"""

import dataclasses
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rag_jax import files
from rag_jax.retrieval.passages import PassageStore
from rag_jax.retrieval.protocol import ALONE, Hosts, RetrievalError, check_vectors
from rag_jax.visible import is_terminal

SHARD_ROWS = 8192  # passages of a shard


@dataclasses.dataclass(frozen=True)
class PassageEmbedder:
    """How the passages of a store are embedded.

    Attributes:
        embed: function from token ids int32[b, L] and mask bool[b, L] to float32[b, E]. b is always
            batch_size and L one of the buckets. It may return a device array, which is read one
            batch later. The other rows of a batch may change a row by rounding only.
        token_table: the table of the store that is embedded.
        encoder_fingerprint: identifies the encoder and its parameters.
        max_length: tokens; longer passages are cut.
        batch_size: passages per call of embed.
        length_buckets: lengths L to pad to; those above max_length are ignored, max_length added.
        pad_id: token id of padding, where the mask is False.
        shard_rows: passages of a shard.
        progress: show a progress bar on a terminal.
    """

    embed: Callable[[np.ndarray, np.ndarray], Any]
    token_table: str
    encoder_fingerprint: str
    max_length: int
    batch_size: int
    length_buckets: Sequence[int]
    pad_id: int = 0
    shard_rows: int = SHARD_ROWS
    progress: bool = True

    @property
    def buckets(self) -> list[int]:
        """The lengths that batches are padded to, ascending."""
        shorter = {int(length) for length in self.length_buckets if 0 < length < self.max_length}
        return sorted(shorter | {self.max_length})


def embed_all(store: PassageStore, embedder: PassageEmbedder, file: Path, hosts: Hosts = ALONE
              ) -> None:
    """Embeds this host's shards into a file, except for those that are already done.

    The batch of a passage, which changes its embedding by rounding only, depends on the store and
    the embedder, not on where a build was interrupted.
    """
    from tqdm import tqdm

    shard_rows, counts = embedder.shard_rows, _counts(len(store), embedder.shard_rows)
    begins = list(counts)[hosts.index :: hosts.count]
    done = {begin: mark for begin in begins if (mark := _read_mark(file, begin, counts[begin]))}
    width = next(iter(done.values()))["width"] if done else None
    batches = _batches(embedder, _lengths(store, embedder), [b for b in begins if b not in done])
    shard, missing = np.zeros((0, 0), "<f4"), 0
    with tqdm(total=sum(counts[begin] for begin in begins), desc="embedding",
              initial=sum(mark["rows"] for mark in done.values()), unit=" passages",
              disable=not (embedder.progress and hosts.leads and is_terminal(sys.stderr))) as bar:
        for rows, result in _results(store, embedder, batches):
            vectors = _checked(store, embedder, rows, result, width)
            begin, width = int(rows[0]) // shard_rows * shard_rows, vectors.shape[1]
            if not missing:
                missing = counts[begin]
                shard = np.zeros((missing, width), "<f4")
            shard[rows - begin] = vectors
            missing -= len(rows)
            bar.update(len(rows))
            if not missing:
                _write_shard(file, begin, shard)


def embed_rows(store: PassageStore, embedder: PassageEmbedder, rows: np.ndarray
               ) -> dict[int, np.ndarray]:
    """The embeddings float32[E] of some rows int64[R], by row; they are not checked."""
    lengths = np.minimum(store.tokens(embedder.token_table).lengths_of(rows), embedder.max_length)
    batches = ((rows[places], length) for places, length in _by_length(embedder, lengths))
    return {int(row): vector.copy()  # a view would keep the whole batch in memory
            for batch, result in _results(store, embedder, batches)
            for row, vector in zip(batch, np.asarray(result), strict=False)}


def join_shards(file: Path, size: int, shard_rows: int) -> None:
    """Checks that all shards are done and of one width, and cuts the file after the last row."""
    marks = {begin: _read_mark(file, begin, count)
             for begin, count in _counts(size, shard_rows).items()}
    missing = [begin for begin, mark in marks.items() if mark is None]
    if missing:
        raise RetrievalError(
            f"{file}: the rows of shard {missing[0]} are not there as they were written; do all "
            "hosts share this folder? The same command embeds them again.")
    widths = {mark["width"] for mark in marks.values()}
    if len(widths) > 1:
        raise RetrievalError(f"{file}: shards of widths {sorted(widths)}; the embedder changed.")
    os.truncate(file, size * widths.pop() * 4)


def _lengths(store: PassageStore, embedder: PassageEmbedder) -> np.ndarray:
    """Returns int64[N], the number of tokens of each passage that are embedded; 0 is an error."""
    lengths = store.tokens(embedder.token_table).lengths
    if not lengths.all():
        row = int(np.argmin(lengths))
        raise RetrievalError(
            f"passage {store[row].id!r} has no tokens in table {embedder.token_table!r}; write "
            "the store again with an encoder that gives every passage at least one token.")
    return np.minimum(lengths, embedder.max_length)


def _batches(embedder: PassageEmbedder, lengths: np.ndarray, begins: Iterable[int]
             ) -> Iterator[tuple[np.ndarray, int]]:
    """Yields the rows int64[n], n <= batch_size, of a batch, and the length to pad them to.

    Within a shard, the longest passages come first: there is little padding, and a batch that does
    not fit into a device's memory fails at once.
    """
    for begin in begins:
        for places, length in _by_length(embedder, lengths[begin : begin + embedder.shard_rows]):
            yield begin + places, length


def _by_length(embedder: PassageEmbedder, lengths: np.ndarray
               ) -> Iterator[tuple[np.ndarray, int]]:
    """Yields places int64[n], n <= batch_size, in lengths int64[R], the longest first, and the
    length to pad them to."""
    order = np.argsort(-lengths, kind="stable")
    for first in range(0, len(order), embedder.batch_size):
        batch = order[first : first + embedder.batch_size]
        yield batch, embedder.buckets[np.searchsorted(embedder.buckets, lengths[batch[0]])]


def _results(store: PassageStore, embedder: PassageEmbedder,
             batches: Iterable[tuple[np.ndarray, int]]) -> Iterator[tuple[np.ndarray, Any]]:
    """Yields the rows of each batch, and what embed returned for them.

    A batch is yielded after the next one was passed to embed, so that a device does not wait while
    results are checked and written.
    """
    table, waiting = store.tokens(embedder.token_table), None
    for rows, length in batches:
        # A short batch is filled with its last passage: a row of padding alone would give NaN in
        # the softmax of an encoder.
        full = np.pad(rows, (0, embedder.batch_size - len(rows)), mode="edge")
        try:
            result = embedder.embed(*table.padded(full, length, embedder.pad_id))
        except BaseException:
            if waiting is not None:
                yield waiting  # it may complete a shard
            raise
        if waiting is not None:
            yield waiting
        waiting = rows, result
    if waiting is not None:
        yield waiting


def _checked(store: PassageStore, embedder: PassageEmbedder, rows: np.ndarray, result: Any,
             width: int | None) -> np.ndarray:
    """The checked embeddings float32[len(rows), E] in a result; width None = not known yet."""
    array, batch_size = np.asarray(result), embedder.batch_size
    if array.ndim != 2 or len(array) != batch_size or 0 in array.shape:
        raise RetrievalError(
            f"the embedder returned shape {array.shape} for {batch_size} passages; "
            f"it must return [{batch_size}, width].")
    if width not in (None, array.shape[1]):
        raise RetrievalError(
            f"the embedder returned width {array.shape[1]} after width {width}; if "
            "the encoder changed, so must its fingerprint.")
    return check_vectors(array[: len(rows)],
                         lambda i: f"the embedding of passage {store[rows[i]].id!r}")


def _write_shard(file: Path, begin: int, shard: np.ndarray) -> None:
    """Writes a shard into its place, flushed to the disk, and then its mark."""
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


def _counts(size: int, shard_rows: int) -> dict[int, int]:
    """How many rows each shard has, by the first of them."""
    return {begin: min(shard_rows, size - begin) for begin in range(0, size, shard_rows)}


def _read_mark(file: Path, begin: int, count: int) -> dict | None:
    """Returns the mark of a shard of `count` rows if these have its checksum in the file, else
    None; shards that were made with another shard_rows have other counts."""
    try:
        mark = json.loads(_mark_path(file, begin).read_text("utf-8"))
        if mark["rows"] != count:
            return None
        with open(file, "rb") as data:
            data.seek(begin * mark["width"] * 4)
            rows = data.read(count * mark["width"] * 4)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return mark if hashlib.sha256(rows).hexdigest() == mark["sha256"] else None
