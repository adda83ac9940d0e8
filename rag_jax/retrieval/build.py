"""Building an index directory: embed every passage, index, measure, publish.

While it is built, OUT.partial holds what index.py describes and a directory building/, with

    inputs.json              a partial build of other inputs is thrown away
    shard-0000008192.json    checksum of finished rows of embeddings.f32; not embedded again
"""

import dataclasses
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

import rag_jax
from rag_jax.retrieval.exact import measure_recall
from rag_jax.retrieval.index import (
    PassageIndex,
    RetrievalError,
    check_embeddings,
    file_entry,
    read_manifest,
    write_manifest,
)
from rag_jax.retrieval.passages import PassageStore, map_file, publish, sync_directory
from rag_jax.retrieval.scann import (
    SMALLEST,
    ScannSettings,
    build_scann,
    scann_missing,
    scann_version,
)

SHARD_ROWS = 8192  # passages embedded between two points from which a killed build resumes
_log = logging.getLogger(__name__)

Embed = Callable[[np.ndarray, np.ndarray], np.ndarray]


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

    Several hosts with one file system make the same call together: each embeds its own shards, and
    host 0 does the rest.

    Args:
        passages: the store, or its path; it is copied into the index.
        embed: token ids int32[b, L] and mask bool[b, L] to float32[b, E]. b is always batch_size
            and L one of the buckets. May return a device array: it is read one batch later.
        out: the index directory. If it is an index of the same inputs it is returned as it is.
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
        overwrite: replace an index of other inputs that is at out.
        pad_id: token id for padded places, which the mask hides.
        shard_rows: passages between two points of resumption.
        host, hosts: which of how many this is.
        wait: returns once all hosts have called it.

    Raises:
        RetrievalError: an input, what embed returned, or what is at out does not fit.
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
    partial = out.with_name(out.name + ".partial")
    leads = host == 0
    finished = _finished(out, inputs, overwrite) if leads else None
    if leads and finished is None:
        _open_partial(partial, inputs)
        _copy_store(store, partial / "passages")
    wait()
    if not leads:
        finished = _finished(out, inputs, overwrite)
    if finished is not None:
        return finished
    _embed_all(store, embed, partial, inputs, progress and leads, host, hosts)
    wait()
    if leads:
        _merge(partial / "embeddings.f32", len(store), shard_rows)
        manifest = _index_all(partial, inputs, recall_queries, recall_k, seed)
        _publish(partial, out, manifest)
    wait()
    return PassageIndex.open(out, encoder_fingerprint)


def _choose_kind(kind: str, size: int, settings: ScannSettings) -> str:
    if kind not in ("auto", "exact", "scann"):
        raise RetrievalError(f'kind={kind!r}; allowed are "auto", "exact" and "scann".')
    missing = None if kind == "exact" else scann_missing()
    if kind == "scann" and missing:
        raise RetrievalError(f'kind="scann": {missing}')
    if kind != "auto":
        return kind
    smallest = max(SMALLEST, settings.brute_force_below)
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


def _finished(out: Path, inputs: dict, overwrite: bool) -> PassageIndex | None:
    """Returns the index at out when it is whole and of these inputs; None when one may be built."""
    replaced = out.with_name(out.name + ".replaced")
    if replaced.exists() and not out.exists():  # killed between the two renames of _publish
        os.rename(replaced, out)
    if not out.exists() or out.is_dir() and not any(out.iterdir()):
        return None
    if not (out / "manifest.json").is_file():
        raise RetrievalError(
            f"{out}: exists and is no index, so it is not replaced; choose another path."
        )
    try:
        built_from = read_manifest(out)["inputs"]
        differ = [key for key in inputs if built_from.get(key) != inputs[key]]
        if set(differ) <= {"batch_size", "shard_rows"}:  # they do not change what is built
            return PassageIndex.open(out)
        reason = f"it is an index of other inputs ({', '.join(differ)} differ)"
    except RetrievalError as error:
        reason = f"what is there cannot be used ({error})"
    if not overwrite:
        raise RetrievalError(
            f"{out}: {reason}; choose another path, remove it, or build with overwrite=True."
        )
    return None


def _open_partial(partial: Path, inputs: dict) -> None:
    """Makes the directory to build in, or keeps what an earlier build of the same inputs left."""
    file = partial / "building" / "inputs.json"
    try:
        same = json.loads(file.read_text("utf-8")) == inputs
    except (OSError, ValueError):
        same = False
    if not same:
        shutil.rmtree(partial, ignore_errors=True)
        file.parent.mkdir(parents=True)
        _write_json(file, inputs)
    (partial / "manifest.json").unlink(missing_ok=True)


def _write_json(path: Path, content: dict) -> None:
    """Writes a small file atomically."""
    fresh = path.with_name(path.name + ".new")
    with open(fresh, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, path)
    sync_directory(path.parent)


def _copy_store(store: PassageStore, path: Path) -> None:
    try:
        if PassageStore.open(path).fingerprint == store.fingerprint:
            return
    except RetrievalError:
        shutil.rmtree(path, ignore_errors=True)
    copying = path.with_name(path.name + ".partial")
    shutil.rmtree(copying, ignore_errors=True)
    shutil.copytree(store.path, copying)
    for file in copying.iterdir():
        _sync_file(file)
    PassageStore.open(copying).verify()
    publish(copying, path)


def _sync_file(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _embed_all(
    store: PassageStore, embed: Embed, partial: Path, inputs: dict, progress: bool, host: int,
    hosts: int,
) -> None:
    """Fills this host's shards of embeddings.f32, beginning after those that are already done."""
    from tqdm import tqdm

    size, shard_rows = len(store), inputs["shard_rows"]
    file = partial / "embeddings.f32"
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


def _merge(file: Path, size: int, shard_rows: int) -> None:
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
    _write_json(_mark_path(file, begin), mark)


def _mark_path(file: Path, begin: int) -> Path:
    return file.parent / "building" / f"shard-{begin:010d}.json"


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


def _index_all(partial: Path, inputs: dict, recall_queries, recall_k: int, seed: int) -> dict:
    """Builds the index over finished embeddings, measures it, and returns its manifest."""
    size = len(PassageStore.open(partial / "passages"))
    file = partial / "embeddings.f32"
    embeddings = map_file(file, "<f4").reshape(size, -1)
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
    shutil.rmtree(partial / "scann", ignore_errors=True)
    if inputs["kind"] == "scann":
        build_scann(embeddings, file, ScannSettings(**inputs["scann"]), partial / "scann")
    index = PassageIndex(partial, manifest, PassageStore.open(partial / "passages"), verified=True)
    manifest["recall"] = measure_recall(index, embeddings, recall_queries, recall_k, seed)
    _log.info("recall@%(k)d %(recall).4f on %(queries)d queries (%(source)s).", manifest["recall"])
    return manifest


def _publish(partial: Path, out: Path, manifest: dict) -> None:
    """Writes the manifest and moves the directory to its name, in place of an older index."""
    building = partial / "building"
    manifest["files"] = {}
    for path in sorted(partial.rglob("*")):
        if path.is_file() and path.parent != building:
            _sync_file(path)
            manifest["files"][path.relative_to(partial).as_posix()] = file_entry(path)
    write_manifest(partial, manifest)
    replaced = out.with_name(out.name + ".replaced")
    if out.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        os.rename(out, replaced)
    publish(partial, out)
    shutil.rmtree(out / "building", ignore_errors=True)
    shutil.rmtree(replaced, ignore_errors=True)
