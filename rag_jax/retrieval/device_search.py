"""Search and lookup in passage tables that are split by rows over all devices of a mesh.

Pure functions for use inside jitted programs. The tables are arguments, never constants, and have
spare rows and a validity mask, so that passages are added, deleted and replaced without compiling.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rag_jax.parallel import platform
from rag_jax.retrieval.protocol import RetrievalError, SearchResult

DTYPES = ("float32", "bfloat16", "int8")
MARGIN = 16  # candidates beyond k that are scored again
GROUP = 128  # scores of which the maximum is looked at first
INT8_CANDIDATES = 4  # times k, for int8 rows: their scores are coarser


@dataclasses.dataclass(frozen=True)
class DeviceSettings:
    """How passages are stored on the devices and searched.

    Attributes:
        dtype: "float32", "bfloat16", or "int8": candidates from int8 rows, scores from bfloat16
            rows beside them (3 bytes per number, of which a search reads 1 for every passage).
        capacity: rows of the tables at least, rounded up; the number of passages of the first index
            if that is more.
        recall_target: 1.0 = exact; less = approx_max_k with that expected recall.
        score_bytes: of the scores that exist at a time, per device.
    """

    dtype: str = "bfloat16"
    capacity: int = 0
    recall_target: float = 1.0
    score_bytes: int = 256 * 2**20

    def __post_init__(self):
        for name, value in dataclasses.asdict(self).items():
            if name == "dtype":
                good, allowed = value in DTYPES, ", ".join(DTYPES)
            elif name == "recall_target":
                good = isinstance(value, int | float | np.floating) and 0 < value <= 1
                allowed = "a number above 0, up to 1"
            else:
                lowest = int(name == "score_bytes")
                good = isinstance(value, int | np.integer) and value >= lowest
                allowed = f"an integer of at least {lowest}"
            if not good:
                raise RetrievalError(f"DeviceSettings.{name}={value!r}; allowed is {allowed}.")


class DeviceTables(NamedTuple):
    """Tables on the devices, all [C, ...] with C rows of capacity, split by rows.

    Attributes:
        embeddings: float32 or bfloat16[C, E]; scores and priors are computed from them.
        codes: int8[C, E], embeddings / scales rounded, or None.
        scales: float32[C], or None.
        valid: bool[C], False = spare or deleted, never found.
        steps: int32[C], the training step whose document encoder made the embedding.
        tokens: name of a token table -> (uint16 or int32[C, P] ids, int32[C] tokens in the row).
    """

    embeddings: jax.Array
    codes: jax.Array | None
    scales: jax.Array | None
    valid: jax.Array
    steps: jax.Array
    tokens: dict[str, tuple[jax.Array, jax.Array]]


def row_sharding(mesh: Mesh) -> NamedSharding:
    """Leading axis over all devices of the mesh, in their order."""
    return NamedSharding(mesh, PartitionSpec(mesh.axis_names))


def search(tables: DeviceTables, queries: jax.Array, k: int, mesh: Mesh, settings: DeviceSettings
           ) -> SearchResult:
    """The k passages with the largest inner product, on every device alike.

    Every device nominates candidates by a matrix product in the dtype of its rows and scores them
    again in float32, always in one order of additions; the best of all devices are the result. So
    neither ids nor scores depend on the number of devices. With recall_target 1.0 the result is
    exact over the table's rows unless more than MARGIN of them (int8: 3 k + MARGIN) lie within the
    product's rounding error of the k-th best, and identical rows are in order of their ids. Of int8
    this error is that of the rows' quantisation: a 254th of the largest entry of each, per entry.

    Args:
        tables: those of the passages.
        queries: float32[B, E].
        k: passages per query.
        mesh, settings: of the tables.

    Returns:
        ids int32[B, k], -1 where there are fewer than k valid rows, and scores float32[B, k] in
        descending order, -inf there; ties by ascending id.
    """
    axes = mesh.axis_names

    def on_device(tables: DeviceTables, queries: jax.Array) -> tuple[jax.Array, jax.Array]:
        first = lax.axis_index(axes) * tables.valid.shape[0]
        nominal, rows = _nominate(tables, queries, k, settings, mesh.size)
        scores = _ordered_sum(queries[:, None] * tables.embeddings[rows].astype(jnp.float32))
        scores = jnp.where(jnp.isneginf(nominal), -jnp.inf, scores)
        scores, ids = _best(scores, rows + first, k)
        # As integers, so that one collective carries both.
        bits = jnp.stack([lax.bitcast_convert_type(scores, jnp.int32), ids])
        bits, ids = lax.all_gather(bits, axes, axis=2, tiled=True)
        return _best(lax.bitcast_convert_type(bits, jnp.float32), ids, k)

    scores, ids = jax.shard_map(
        on_device, mesh=mesh, in_specs=(PartitionSpec(axes), PartitionSpec()),
        out_specs=PartitionSpec(), check_vma=False,
    )(tables._replace(tokens={}), queries)
    return SearchResult(jnp.where(jnp.isneginf(scores), -1, ids), scores)


def _nominate(tables: DeviceTables, queries: jax.Array, k: int, settings: DeviceSettings,
              devices: int) -> tuple[jax.Array, jax.Array]:
    """Candidates of one device: (scores float32[B, c], rows int32[B, c]).

    A candidate with score -inf is not valid. Rows are scored in blocks of equal size, whose scores
    take at most settings.score_bytes; a slice that begins at any row would be copied on TPUs.
    """
    table = tables.embeddings if tables.codes is None else tables.codes
    local = table.shape[0]
    wanted = k + MARGIN if tables.codes is None else INT8_CANDIDATES * k + MARGIN
    alive = 3 if _keeps_both(table) else 1
    most = max(1, settings.score_bytes // (4 * alive * len(queries)))
    blocks = next(n for n in range(-(-local // most), local + 1) if local % n == 0)
    count = min(wanted, local // blocks)

    def one(block: tuple) -> tuple[jax.Array, jax.Array]:
        begin, rows, scales, valid = block
        scores = _products(queries, rows)
        if scales is not None:
            scores = scores * scales[None]
        scores = jnp.where(valid[None], scores, -jnp.inf)
        if settings.recall_target < 1:
            best = lax.approx_max_k(scores, count, recall_target=settings.recall_target,
                                    reduction_input_size_override=devices * local)
        else:
            best = _top_k(scores, count)
        return best[0], best[1] + begin

    split = jax.tree.map(lambda x: x.reshape(blocks, -1, *x.shape[1:]),
                         (table, tables.scales, tables.valid))
    begins = jnp.arange(0, local, local // blocks, dtype=jnp.int32)
    scores, rows = lax.map(one, (begins, *split))
    scores, rows = (jnp.moveaxis(x, 0, 1).reshape(len(queries), -1) for x in (scores, rows))
    scores, places = lax.top_k(scores, min(wanted, scores.shape[1]))
    return scores, jnp.take_along_axis(rows, places, axis=1)


def _top_k(scores: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """`lax.top_k` of scores float32[B, R]; accelerators sort no more than a few of long rows.

    The best `count` are in the `count` groups with the largest maxima: where more groups have the
    last of these, in the first of them. There 0 and -0 are one score.
    """
    length = scores.shape[1]
    if platform(scores) == "cpu" or length <= 2 * count * GROUP:
        return lax.top_k(scores, count)
    grouped = jnp.pad(scores, ((0, 0), (0, -length % GROUP)), constant_values=-jnp.inf).reshape(
        len(scores), -1, GROUP)
    groups = jnp.sort(lax.top_k(grouped.max(axis=-1), count)[1], axis=1)  # ties are by place
    found = jnp.take_along_axis(grouped, groups[..., None], axis=1).reshape(len(scores), -1)
    best, at = lax.top_k(found, count)
    return best, jnp.take_along_axis(groups, at // GROUP, axis=1) * GROUP + at % GROUP


def _products(queries: jax.Array, rows: jax.Array) -> jax.Array:
    """Inner products float32[B, R].

    For bfloat16 and int8 rows, a query is the sum of two bfloat16 vectors (relative error 2^-17),
    so that matrix units take half the bytes and lose almost nothing.
    """
    if rows.dtype == jnp.float32:
        return jnp.einsum("BE,RE->BR", queries, rows, precision=lax.Precision.HIGHEST)
    high = lax.reduce_precision(queries, 8, 7)  # a cast there and back would be optimised away
    parts = jnp.stack([high, queries - high]).astype(jnp.bfloat16)
    products = jnp.einsum("PBE,RE->PBR", parts, rows.astype(jnp.bfloat16),
                          preferred_element_type=jnp.float32)
    return products[0] + products[1] if _keeps_both(rows) else products.sum(axis=0)


def _keeps_both(rows: jax.Array) -> bool:
    """Whether both products of a query exist before they are added.

    XLA's CPU backend makes one loop of product and sum, which takes two to seven times as long for
    bfloat16; int8 rows it would convert beforehand, all of them.
    """
    return rows.dtype == jnp.bfloat16 and platform(rows) == "cpu"


def _ordered_sum(products: jax.Array) -> jax.Array:
    """Sums over the last axis by halves: one order of additions, whatever the shape.

    A reduction, or a multiplication fused with an addition, rounds differently from shape to shape.
    """
    products = lax.optimization_barrier(products)
    width = products.shape[-1]
    size = 1 << (width - 1).bit_length()
    products = jnp.pad(products, ((0, 0),) * (products.ndim - 1) + ((0, size - width),))
    while size > 1:
        size //= 2
        products = products[..., :size] + products[..., size:]
    return products[..., 0]


def _best(scores: jax.Array, ids: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The k best [B, k], ties by id, filled up with -inf where there are fewer."""
    negative, ids = lax.sort((-scores, ids), dimension=1, num_keys=2)
    fill = ((0, 0), (0, max(0, k - ids.shape[1])))
    return (jnp.pad(-negative[:, :k], fill, constant_values=-jnp.inf), jnp.pad(ids[:, :k], fill))


def lookup(tables: Any, ids: jax.Array, mesh: Mesh) -> Any:
    """Rows of tables, on every device alike.

    Args:
        tables: tree of arrays [C, ...], split by rows.
        ids: int32[...], rows from 0 to C - 1.
        mesh: of the tables.

    Returns:
        The same tree of [..., ...]: numbers as float32, token ids as int32.
    """

    def on_device(tables: Any, ids: jax.Array) -> Any:
        def one(table: jax.Array) -> jax.Array:
            place, local = _places(ids, table.shape[0], mesh)
            rows = table[jnp.where(local, place, 0)]
            floating = jnp.issubdtype(table.dtype, jnp.floating)
            local = jnp.expand_dims(local, range(ids.ndim, rows.ndim))
            return jnp.where(local, rows.astype(jnp.float32 if floating else jnp.int32), 0)

        # Each row is on one device; all others add zeros.
        return lax.psum(jax.tree.map(one, tables), mesh.axis_names)

    return jax.shard_map(
        on_device, mesh=mesh, in_specs=(PartitionSpec(mesh.axis_names), PartitionSpec()),
        out_specs=PartitionSpec())(tables, ids)


def write(tables: Any, ids: jax.Array, values: Any, mesh: Mesh) -> Any:
    """The tables with rows ids int32[R] replaced by `values`, a tree of [R, ...]; -1 = no row."""

    def on_device(tables: Any, ids: jax.Array, values: Any) -> Any:
        def one(table: jax.Array, rows: jax.Array) -> jax.Array:
            place, local = _places(ids, table.shape[0], mesh)
            place = jnp.where(local, place, table.shape[0])  # beyond the end: dropped
            return table.at[place].set(rows.astype(table.dtype), mode="drop")

        return jax.tree.map(one, tables, values)

    rows = PartitionSpec(mesh.axis_names)
    return jax.shard_map(
        on_device, mesh=mesh, in_specs=(rows, PartitionSpec(), PartitionSpec()), out_specs=rows
    )(tables, ids, values)


def _places(ids: jax.Array, local: int, mesh: Mesh) -> tuple[jax.Array, jax.Array]:
    """The local numbers of global rows on this device, and which of them are on it."""
    place = ids - lax.axis_index(mesh.axis_names) * local
    return place, (place >= 0) & (place < local)


def encoded(embeddings: Any, dtype: str, xp: Any = np) -> tuple[Any, Any, Any]:
    """float32[R, E] as the embeddings, codes and scales of DeviceTables.

    xp: numpy, or jax.numpy in a jitted program.
    """
    if dtype == "float32":
        return embeddings, None, None
    rows = embeddings.astype(jnp.bfloat16)
    if dtype == "bfloat16":
        return rows, None, None
    largest = xp.abs(embeddings).max(axis=1)
    scales = xp.where(largest > 0, largest, 1).astype(np.float32) / np.float32(127)
    return rows, xp.rint(embeddings / scales[:, None]).astype(np.int8), scales
