"""Texts to vectors, and vectors to the passages of an index: what training and answering share."""

import functools
from collections.abc import Callable

import jax
import numpy as np

from rag_jax import hosts, parallel
from rag_jax.data.batches import Searchable
from rag_jax.decoding.settings import PROGRAMS
from rag_jax.models import rag
from rag_jax.models.dpr import DprEncoder
from rag_jax.retrieval.protocol import SearchResult, merge
from rag_jax.types import Array


def jit_embed(model: rag.RagModel) -> Callable[..., Array]:
    """(encoder params, ids, mask) -> embeddings that this process can read."""
    embed = embed_program(model.encoder_module)
    return lambda *arguments: parallel.whole(embed(*arguments))


@functools.lru_cache(PROGRAMS)
def embed_program(encoder: DprEncoder) -> jax.stages.Wrapped:
    """The jitted part of `jit_embed`."""
    return jax.jit(lambda params, *texts: encoder.apply({"params": params}, *texts))


def search(index: Searchable, queries: np.ndarray, k: int) -> np.ndarray:
    """Rows int32[B, K] of the best passages for queries, vectors or words, found by all processes.

    How they share the work is `index.division`; all call this with the same queries.
    """
    if index.division == "devices":
        return index.search(queries, k).ids
    if index.division == "queries":
        return hosts.together(lambda rows: index.search(rows, k).ids, queries, k)

    def everywhere(rows: np.ndarray) -> np.ndarray:
        mine = index.search(rows, k)
        results = hosts.exchange([mine.ids.tolist(), mine.scores.tolist()])
        return merge([SearchResult(np.array(ids, np.int32), np.array(scores, np.float32))
                      for ids, scores in results], k).ids

    return hosts.in_messages(everywhere, queries, k)
