"""Small indexes of every kind, and a passage store, whose files have digests of 64 byte blocks."""

import random

import numpy as np
import pytest

from rag_jax.retrieval import verification
from rag_jax.retrieval.bm25 import build_bm25
from rag_jax.retrieval.protocol import Passage
from rag_jax.retrieval.scann import ScannSettings
from rag_jax.retrieval.store_writing import write_store
from tests.retrieval.indexing import build_index

WIDTH = 8
WORDS = "red fox blue dog green bird old house new river tall tree".split()


def embed(ids, mask):
    draw = np.random.default_rng(0).standard_normal((1000, WIDTH), np.float32)
    return (draw[ids] * mask[..., None]).sum(1)


def build(folder, kind, size=40):
    """An index of one kind, or a passage store, with blocks of 64 bytes."""
    draw = random.Random(1)
    passages = [Passage(f"p{i}", f"title {i}", " ".join(draw.choices(WORDS, k=6)))
                for i in range(size)]
    store = write_store(folder / "store", passages, {
        "bert": lambda ps: [[draw.randrange(900) for _ in range(5)] for _ in ps]})
    if kind == "bm25":
        return build_bm25(store, folder / "index").path
    if kind != "store":
        return build_index(store, embed, folder / "index", token_table="bert", max_length=5,
                           encoder_fingerprint="e", batch_size=8, length_buckets=(5,), kind=kind,
                           settings=ScannSettings(brute_force_below=0), recall_k=2).path
    return store.path


def folder_of_each_kind(tmp_path_factory):
    made = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verification, "BLOCK_BYTES", 64)
        for kind in ("store", "exact", "scann", "bm25"):
            made[kind] = build(tmp_path_factory.mktemp(kind), kind)
    return made
