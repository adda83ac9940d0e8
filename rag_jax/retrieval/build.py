"""Building an index directory: embed every passage, index, measure, publish.

While a version is built, a working folder in OUT (publish.py) holds what index.py describes, and
the marks of shards.py.
"""

import contextlib
import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

import rag_jax
from rag_jax import files
from rag_jax.retrieval.exact import measure_recall
from rag_jax.retrieval.index import PassageIndex, RetrievalError
from rag_jax.retrieval.passages import PassageStore, map_file
from rag_jax.retrieval.publish import begun, claimed, copy_store, finished, publish_index
from rag_jax.retrieval.scann import (
    SMALLEST,
    ScannSettings,
    build_scann,
    part_folder,
    part_rows,
    scann_missing,
    scann_version,
)
from rag_jax.retrieval.shards import SHARD_ROWS, Embed, embed_all, join_shards

_log = logging.getLogger(__name__)


def build_index(
    passages: PassageStore | str | os.PathLike,
    embed: Embed,
    out: str | os.PathLike,
    *,
    token_table: str,
    encoder_fingerprint: str,
    max_length: int,
    batch_size: int,
    length_buckets: Sequence[int],
    kind: str = "auto",
    settings: ScannSettings = ScannSettings(),  # noqa: B008 (frozen)
    recall_queries: np.ndarray | None = None,
    recall_k: int = 10,
    seed: int = 0,
    progress: bool = True,
    overwrite: bool = False,
    pad_id: int = 0,
    shard_rows: int = SHARD_ROWS,
    host: int = 0,
    hosts: int = 1,
    wait: Callable[[], None] = lambda: None,
) -> PassageIndex:
    """Embeds all passages and publishes an index of them, or finishes a build that was killed.

    Several hosts with one file system make the same call together: each embeds its own shards and
    builds its share of the ScaNN parts, and host 0 does the rest.

    Args:
        passages: the store, or its path; it is copied into the index.
        embed: token ids int32[b, L] and mask bool[b, L] to float32[b, E]. b is always batch_size
            and L one of the buckets. May return a device array: it is read one batch later.
        out: the index directory. If it is an index of the same inputs it is returned as it is;
            one of others gets a further version, and is as it was for who has it open.
        token_table: the store's table to embed.
        encoder_fingerprint: names the encoder and its parameters.
        max_length: tokens; longer passages are cut.
        batch_size: passages per call of embed.
        length_buckets: lengths L to pad to; those above max_length are ignored, max_length added.
        kind: "exact", "scann", or "auto": exact below settings.brute_force_below passages and where
            ScaNN cannot be imported, else scann.
        settings: of ScaNN.
        recall_queries: float32[Q, E] to measure recall on; None takes passages' own embeddings
            with noise, which is easier than questions, and says so in the manifest.
        recall_k: passages per query of that measurement.
        seed: of the choice of those passages and of the noise.
        progress: show a bar with rate and remaining time on a terminal.
        overwrite: replace an index of other inputs, or a damaged one, that is at out.
        pad_id: token id for padded places, which the mask hides.
        shard_rows: passages between two points of resumption.
        host, hosts: which of how many this is.
        wait: returns once all hosts have called it.

    Raises:
        RetrievalError: an input, what embed returned, or what is at out does not fit.
        InUseError: another process builds at out; it is named.
    """
    store = passages if isinstance(passages, PassageStore) else PassageStore.open(passages)
    out = Path(out).absolute()
    if batch_size < 1 or max_length < 1 or shard_rows < 1 or recall_k < 1:
        raise RetrievalError(
            f"batch_size={batch_size}, max_length={max_length}, shard_rows={shard_rows}, "
            f"recall_k={recall_k}: each must be at least 1."
        )
    inputs = {
        "encoder_fingerprint": encoder_fingerprint,
        "passages_fingerprint": store.fingerprint,
        "token_table": token_table,
        "max_length": max_length,
        "batch_size": batch_size,
        "length_buckets": _buckets(length_buckets, max_length),
        "kind": _choose_kind(kind, len(store), settings),
        "scann": None,
        "pad_id": pad_id,
        "shard_rows": shard_rows,
    }
    if inputs["kind"] == "scann":
        inputs["scann"] = dataclasses.asdict(settings)
    store.tokens(token_table)  # an unknown name is an error before anything is written
    leads = host == 0
    open_share = functools.partial(PassageIndex.open, host=host, hosts=hosts)
    with contextlib.ExitStack() as claim:
        found = claim.enter_context(claimed(out, inputs, overwrite, open_share)) if leads else None
        if leads and found is None:
            copy_store(store, begun(out, inputs))
        wait()
        if not leads:
            found = finished(out, inputs, overwrite, open_share)
        if found is not None:
            return found
        content = begun(out, inputs)
        embed_all(store, embed, content, inputs, progress and leads, host, hosts)
        wait()
        if leads:
            join_shards(content / "embeddings.f32", len(store), shard_rows)
            for folder in list(content.glob("scann*")):
                files.remove_folder(folder)
        wait()
        _build_parts(content, len(store), inputs, host, hosts)
        wait()
        if leads:
            manifest = _measure(content, inputs, recall_queries, recall_k, seed)
            publish_index(content, out, manifest)
        wait()
        return open_share(out, encoder_fingerprint)


def _choose_kind(kind: str, size: int, settings: ScannSettings) -> str:
    if kind not in ("auto", "exact", "scann"):
        raise RetrievalError(f'kind={kind!r}; allowed are "auto", "exact" and "scann".')
    missing = None if kind == "exact" else scann_missing()
    if kind == "scann" and missing:
        raise RetrievalError(f'kind="scann": {missing}')
    if kind != "auto":
        return kind
    smallest = max(SMALLEST * settings.parts, settings.brute_force_below)
    if size < smallest:
        _log.info("exact index: %d passages are fewer than brute_force_below=%d.", size, smallest)
        return "exact"
    if missing:
        _log.warning("exact index for %d passages: %s", size, missing)
        return "exact"
    _log.info("ScaNN index for %d passages.", size)
    return "scann"


def _buckets(lengths: Sequence[int], max_length: int) -> list[int]:
    return sorted({int(length) for length in lengths if 0 < length < max_length} | {max_length})


def _build_parts(content: Path, size: int, inputs: dict, host: int, hosts: int) -> None:
    """Builds this host's share of the ScaNN parts over finished embeddings."""
    if inputs["kind"] != "scann":
        return
    file, settings = content / "embeddings.f32", ScannSettings(**inputs["scann"])
    embeddings = map_file(file, "<f4").reshape(size, -1)
    rows = part_rows(size, settings.parts)
    for part in range(settings.parts)[host::hosts]:
        build_scann(embeddings, file, settings, part_folder(content, part), rows[part])


def _measure(content: Path, inputs: dict, recall_queries, recall_k: int, seed: int) -> dict:
    """Measures the index and returns its manifest."""
    size = len(PassageStore.open(content / "passages"))
    embeddings = map_file(content / "embeddings.f32", "<f4").reshape(size, -1)
    manifest = {
        "kind": inputs["kind"],
        "size": size,
        "width": embeddings.shape[1],
        "dtype": "float32",
        "scann": inputs["scann"] if inputs["kind"] == "scann" else None,
        "encoder_fingerprint": inputs["encoder_fingerprint"],
        "passages_fingerprint": inputs["passages_fingerprint"],
        "inputs": inputs,
        "versions": {
            "rag_jax": getattr(rag_jax, "__version__", "unknown"),
            "numpy": np.__version__,
            "scann": scann_version(),
        },
    }
    index = PassageIndex(content, manifest, PassageStore.open(content / "passages"))
    manifest["recall"] = measure_recall(index, embeddings, recall_queries, recall_k, seed)
    _log.info("recall@%(k)d %(recall).4f on %(queries)d queries (%(source)s).", manifest["recall"])
    return manifest
