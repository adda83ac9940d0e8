"""Reuse of the embeddings of an earlier index, for passages that have not changed."""

import dataclasses
import hashlib
import itertools

import numpy as np

from rag_jax.retrieval.index import PassageIndex
from rag_jax.retrieval.passages import PassageStore
from rag_jax.retrieval.shards import PassageEmbedder, embed_rows

ROWS = 4096  # passages whose tokens are read at a time


class KeptEmbeddings:
    """The embeddings of an earlier index, for a new index that has some of its passages.

    Args:
        index: the earlier one; nothing of it is used if another encoder built it, or if it read
            passages from another token table or up to another length.

    Attributes:
        embedded: how many passages the embedder of `around` embeds anew.
    """

    def __init__(self, index: PassageIndex):
        self._index = index
        self.embedded = 0

    def around(self, embedder: PassageEmbedder, store: PassageStore) -> PassageEmbedder:
        """An embedder that returns a passage's earlier embedding if there is one, else embeds it.

        Two passages are the same if their tokens are.
        """
        manifest, same = self._index.manifest, ("token_table", "max_length")
        if manifest["encoder_fingerprint"] != embedder.encoder_fingerprint or any(
                manifest["inputs"].get(name) != getattr(embedder, name) for name in same):
            self.embedded = len(store)
            return embedder
        kept = dict(zip(self._keys(self._index.passages, embedder), itertools.count()))
        new: dict[bytes, int] = {}  # the first row of each new passage, in their order
        repeated: set[bytes] = set()
        for row, key in enumerate(self._keys(store, embedder)):
            if key not in kept and new.setdefault(key, row) != row:
                repeated.add(key)
        self.embedded, rows = len(new), np.fromiter(new.values(), np.int64)
        fresh: dict[int, np.ndarray] = {}  # by row

        def look_up(ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
            keys = _keys_of(ids, mask)
            for key in keys:  # with all new ones of its shard, so that a killed build can resume
                if key in new and new[key] not in fresh:
                    begin = new[key] // embedder.shard_rows * embedder.shard_rows
                    first, end = np.searchsorted(rows, [begin, begin + embedder.shard_rows])
                    fresh.update(embed_rows(store, embedder, rows[first:end]))
            vectors = self._index.embeddings(np.array([kept.get(key, 0) for key in keys]))
            vectors = np.stack([fresh[new[key]] if key in new else vector
                                for key, vector in zip(keys, vectors, strict=True)])
            for key in new.keys() & set(keys) - repeated:
                del fresh[new[key]]  # it is not needed again, and there may be millions
            return vectors

        return dataclasses.replace(embedder, embed=look_up)

    def _keys(self, store: PassageStore, embedder: PassageEmbedder) -> list[bytes]:
        """A digest of each passage's tokens, up to the length at which the embedder cuts them."""
        table, keys = store.tokens(embedder.token_table), []
        for begin in range(0, len(store), ROWS):
            rows = np.arange(begin, min(begin + ROWS, len(store)))
            keys += _keys_of(*table.padded(rows, embedder.max_length, embedder.pad_id))
        return keys


def _keys_of(ids: np.ndarray, mask: np.ndarray) -> list[bytes]:
    """A digest of each row of token ids int32[b, L], without the places that bool[b, L] masks."""
    return [hashlib.blake2b(row[:count].astype("<i4").tobytes(), digest_size=16).digest()
            for row, count in zip(ids, mask.sum(axis=1), strict=True)]
