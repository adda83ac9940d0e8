"""A workdir with one of everything, made in a second."""

import json

import jax.numpy as jnp
import numpy as np

from rag_jax.config import Config
from rag_jax.config.overrides import replace
from rag_jax.data.batches import ENCODER_TABLE
from rag_jax.data.prepare import prepare
from rag_jax.training import workdir
from rag_jax.training.checkpoint import Checkpointer
from rag_jax.training.clock import Clock
from tests.retrieval.indexing import build_index


def embed(ids, mask):
    return np.cos(ids * mask).astype(np.float32)[:, :4]


def make(folder):
    """(configuration, workdir) with data, an index, a checkpoint and times."""
    rows = ["id\ttext\ttitle", *(f"p{i}\tLima is city {i} of Peru\tTitle {i}" for i in range(30))]
    (folder / "p.tsv").write_text("\n".join(rows) + "\n")
    question = {"question": "Which city?", "answers": ["Lima"], "positive_ids": ["p3"]}
    (folder / "q.jsonl").write_text(json.dumps(question) + "\n")
    config = replace(Config(), {
        "data.passages": str(folder / "p.tsv"), "data.train": str(folder / "q.jsonl"),
        "data.dev": str(folder / "q.jsonl"), "data.generator_vocab": 320,
        "data.retriever_vocab": 120})
    path = workdir.start(config, folder / "work")
    with Clock(path).time("data"):
        store = prepare(config, path).stores["passages"]
    build_index(store, embed, path / "indexes" / "passages", token_table=ENCODER_TABLE,
                encoder_fingerprint="e", max_length=8, batch_size=8, length_buckets=(8,),
                kind="exact", recall_k=2)
    workdir.begin_run(path, "rag_token", config.eval)
    with Checkpointer(path / "rag_token") as checkpointer:
        checkpointer.save(3, {"a": {"b": jnp.arange(500.0)}}, {"m": (jnp.ones(7),)}, {"x": 1})
    return config, path
