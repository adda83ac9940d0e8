"""Building an index directory: check, embed every passage, index, measure, publish.

While a version is built, a working folder in OUT (publish.py) holds the files of manifest.py, and
the marks of shards.py.
"""

import bisect
import contextlib
import dataclasses
import functools
import logging
import math
import os
from pathlib import Path
from typing import Any

import numpy as np

import rag_jax
from rag_jax import files
from rag_jax.retrieval.exact import RecallSample
from rag_jax.retrieval.index import PassageIndex, of_folder
from rag_jax.retrieval.manifest import EMBEDDINGS, IndexFolder
from rag_jax.retrieval.passages import PassageStore
from rag_jax.retrieval.protocol import ALONE, Hosts, RetrievalError
from rag_jax.retrieval.publish import begin_version, claimed, copy_store, finished, publish_index
from rag_jax.retrieval.scann import (
    SMALLEST,
    ScannSettings,
    build_scann,
    check_enough,
    part_folder,
    part_rows,
    scann_missing,
    scann_version,
)
from rag_jax.retrieval.shards import PassageEmbedder, embed_all, join_shards
from rag_jax.retrieval.verification import map_file

FEWEST = 1024  # passages whose codes tuning lets each query read at least
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class RecallSettings:
    """How the recall of a new index is measured against exact search.

    Attributes:
        queries: float32[Q, E] to measure on; None = embeddings of passages with noise. These are
            easier than questions; the manifest says which were used.
        k: passages per query.
        seed: of the choice of those passages and of the noise.
        target: the recall that ScaNN's search is tuned to if its leaves_to_search is None.
    """

    queries: np.ndarray | None = None
    k: int = 10
    seed: int = 0
    target: float = 0.99


def build_index(passages: PassageStore | str | os.PathLike, embedder: PassageEmbedder,
                out: str | os.PathLike, *, kind: str = "auto",
                scann: ScannSettings = ScannSettings(),  # noqa: B008 (frozen)
                recall: RecallSettings = RecallSettings(),  # noqa: B008 (frozen)
                overwrite: bool = False, hosts: Hosts = ALONE) -> PassageIndex:
    """Embeds all passages and publishes an index of them, or finishes a build that was killed.

    Several hosts with one file system make the same call together: each embeds its own shards and
    builds its share of the ScaNN parts, and host 0 does the rest.

    Args:
        passages: the store, or its path; it is copied into the index.
        embedder: makes the embeddings.
        out: the index directory. An index of the same inputs that is there is returned as it is;
            one of other inputs gets a new version, and who has it open keeps the old one.
        kind: "exact", "scann", or "auto": exact below scann.brute_force_below passages and where
            ScaNN cannot be imported, else scann.
        scann: settings of ScaNN.
        recall: how recall is measured.
        overwrite: replace an index at out that has other inputs or is damaged.
        hosts: the processes that make the same call.

    Raises:
        RetrievalError: an input, an embedding, or what is at out cannot be used.
        InUseError: another process builds at out; it is named.
        UserError: another host failed; it is named, with its error.
    """
    store = passages if isinstance(passages, PassageStore) else PassageStore.open(passages)
    out = Path(out).absolute()
    inputs = _checked_inputs(store, embedder, kind, scann, recall)
    auto = _scann_inputs(scann, recall) if kind == "auto" else None
    open_share = functools.partial(PassageIndex.open, hosts=hosts)
    with contextlib.ExitStack() as claim:
        def begin() -> PassageIndex | None:
            index = claim.enter_context(claimed(out, inputs, overwrite, open_share))
            if index is None:
                copy_store(store, begin_version(out, inputs))
            return index

        index = hosts.lead(begin)
        if not hosts.leads:
            index = finished(out, inputs, overwrite, open_share)
        if index is not None:
            return index
        content = begin_version(out, inputs)
        _build(store, embedder, content, inputs, hosts)
        hosts.lead(lambda: _publish(content, out, inputs, auto, recall))
        return open_share(out, embedder.encoder_fingerprint)


def _checked_inputs(store: PassageStore, embedder: PassageEmbedder, kind: str,
                    scann: ScannSettings, recall: RecallSettings) -> dict[str, Any]:
    """The inputs of the index, as its manifest has them, checked before any work."""
    sizes = {"batch_size": embedder.batch_size, "max_length": embedder.max_length,
             "shard_rows": embedder.shard_rows, "recall_k": recall.k}
    if min(sizes.values()) < 1:
        given = ", ".join(f"{name}={size}" for name, size in sizes.items())
        raise RetrievalError(f"{given}: each must be at least 1.")
    if not 0 < recall.target <= 1:
        raise RetrievalError(f"RecallSettings.target={recall.target}: allowed is more than 0, up "
                             "to 1.")
    store.tokens(embedder.token_table)  # an unknown name is an error
    kind = choose_kind(kind, len(store), scann)
    asked = _scann_inputs(scann, recall)
    return {
        "kind": kind,
        **(asked if kind == "scann" else dict.fromkeys(asked)),
        "encoder_fingerprint": embedder.encoder_fingerprint,
        "passages_fingerprint": store.fingerprint,
        **{name: getattr(embedder, name)
           for name in ("token_table", "max_length", "batch_size", "pad_id", "shard_rows")},
        "length_buckets": embedder.buckets,
    }


def _scann_inputs(scann: ScannSettings, recall: RecallSettings) -> dict[str, Any]:
    """How ScaNN is to be built and searched, as a manifest has it."""
    return {"scann": dataclasses.asdict(scann),
            "recall_target": recall.target if scann.leaves_to_search is None else None}


def choose_kind(kind: str, size: int, scann: ScannSettings) -> str:
    """The kind of an index of `size` passages, "exact" or "scann"; arguments as of `build_index`.

    Raises:
        RetrievalError: there is no such kind, or it is "scann" and ScaNN cannot be built.
    """
    if kind not in ("auto", "exact", "scann"):
        raise RetrievalError(f'kind={kind!r}; allowed are "auto", "exact" and "scann".')
    missing = None if kind == "exact" else scann_missing()
    if kind == "scann" and missing:
        raise RetrievalError(f'kind="scann": {missing}')
    if kind == "scann":
        check_enough(size // scann.parts, scann.parts)
    if kind != "auto":
        return kind
    smallest = max(SMALLEST * scann.parts, scann.brute_force_below)
    if size < smallest:
        given = f"brute_force_below={smallest}" if smallest == scann.brute_force_below else (
            f"{smallest}, ScaNN's {SMALLEST} for each of {scann.parts} parts")
        _log.info("exact index: %d passages are fewer than %s.", size, given)
        return "exact"
    if missing:
        _log.warning("exact index for %d passages: %s", size, missing)
        return "exact"
    _log.info("ScaNN index for %d passages.", size)
    return "scann"


def _build(store: PassageStore, embedder: PassageEmbedder, content: Path, inputs: dict[str, Any],
           hosts: Hosts) -> None:
    """Makes this host's share of the embeddings and ScaNN parts; returns when all hosts have made
    theirs."""
    file, size = content / EMBEDDINGS, len(store)

    def join() -> None:
        join_shards(file, size, embedder.shard_rows)
        for folder in list(content.glob("scann*")):
            files.remove_folder(folder)

    hosts.each(lambda: embed_all(store, embedder, file, hosts))
    hosts.lead(join)
    if inputs["kind"] == "scann":
        scann = ScannSettings(**inputs["scann"])
        hosts.each(lambda: build_parts(content, size, scann, hosts))


def _publish(content: Path, out: Path, inputs: dict[str, Any], auto: dict[str, Any] | None,
             recall: RecallSettings) -> None:
    """Measures the recall of what was built, and makes it the current version of the index."""
    store = PassageStore.open(content / "passages")
    width = (content / EMBEDDINGS).stat().st_size // (4 * len(store))
    manifest = manifest_of(inputs, store, width, auto)
    measure(IndexFolder(content, manifest, store, None), recall)
    publish_index(content, out, manifest)


def build_parts(content: Path, size: int, scann: ScannSettings, hosts: Hosts = ALONE) -> None:
    """Builds this host's share of the ScaNN parts of `size` embeddings."""
    file = content / EMBEDDINGS
    embeddings, rows = map_file(file, "<f4").reshape(size, -1), part_rows(size, scann.parts)
    for part in range(scann.parts)[hosts.index :: hosts.count]:
        build_scann(embeddings, file, scann, part_folder(content, part), rows[part])


def manifest_of(inputs: dict[str, Any], store: PassageStore, width: int,
                auto: dict[str, Any] | None) -> dict[str, Any]:
    """The manifest of an index, without its recall and its files.

    Args:
        inputs: those of the build; after an edit, the store is not the one that they name.
        store: its passages.
        width: of their embeddings.
        auto: how ScaNN is built if there are enough passages; None = their number decides nothing.
    """
    return {
        **({} if auto is None else {"auto": auto}),
        **{name: inputs[name] for name in ("kind", "scann", "encoder_fingerprint")},
        "passages_fingerprint": store.fingerprint,
        "size": len(store),
        "width": width,
        "dtype": "float32",
        "inputs": inputs,
        "versions": {"rag_jax": rag_jax.__version__, "numpy": np.__version__,
                     "scann": scann_version()},
    }


def measure(folder: IndexFolder, recall: RecallSettings) -> None:
    """Measures the recall of an index that is not yet published, and puts it into the manifest.

    A ScaNN index that has a target recall is tuned first if it was never tuned, or misses it.
    """
    index, asked = of_folder(folder), folder.manifest.get("auto", folder.manifest["inputs"])
    sample = RecallSample(index.table, recall.queries, recall.k, recall.seed, index.valid)
    target = asked.get("recall_target") if folder.manifest["kind"] == "scann" else None
    tuned = folder.manifest["scann"] != asked["scann"]
    measured = sample.measure(index) if tuned or target is None else None
    if target is not None and (measured is None or measured["recall"] < target):
        index.search_as(ScannSettings(**asked["scann"]))
        _tune(index, sample, target)
        measured = sample.measure(index)
    if target is not None:
        measured["target"] = target
    folder.manifest["recall"] = measured
    _log.info("recall@%(k)d %(recall).4f on %(queries)d queries (%(source)s).", measured)


def _tune(index: PassageIndex, sample: RecallSample, target: float) -> None:
    """Lets a ScaNN index search as little as reaches the recall on the sample, or all leaves.

    Recall grows with the leaves searched. Of two numbers of candidates to score again, the smaller
    one needs more leaves; the cheaper pair is taken.
    """
    asked = ScannSettings(**index.manifest["scann"])
    size = index.manifest["size"] // asked.parts
    most = asked.leaves(size)[0]
    fewest = min(most, math.ceil(FEWEST * most / size))

    def recall(settings: ScannSettings) -> float:
        index.search_as(settings)
        return sample.measure(index)["recall"]

    reached, deepest = [], asked.pre_reorder_num_neighbors
    for depth in (deepest, max(1, deepest // 2)):
        ways = [dataclasses.replace(asked, leaves_to_search=leaves, pre_reorder_num_neighbors=depth)
                for leaves in range(fewest, most + 1)]
        reached += ways[bisect.bisect_left(ways, target, key=recall) :][:1]
    if not reached:
        _log.warning("ScaNN does not reach the recall %s asked for with all of its %d leaves; more "
                     "candidates to score again (reorder) would help, or an exact index.", target,
                     most)
        reached = [dataclasses.replace(asked, leaves_to_search=most)]
    index.search_as(min(reached, key=lambda settings: settings.work(size)))
