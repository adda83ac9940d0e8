"""An index whose passages lie on the devices: search there, and tables for a jitted step."""

import contextlib
import functools
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from rag_jax.retrieval import device_search
from rag_jax.retrieval.device_search import DeviceSettings, DeviceTables, row_sharding
from rag_jax.retrieval.index import PassageIndex
from rag_jax.retrieval.manifest import ADDED, EMBEDDINGS
from rag_jax.retrieval.passages import check_token_ids
from rag_jax.retrieval.protocol import (
    Index,
    RetrievalError,
    SearchResult,
    check_rows,
    check_vectors,
    stack,
)

ROUND = 1024, 65536  # rows per device are a multiple of one: of the second where they are many
QUERIES = 256  # queries searched at a time; fewer are padded to a power of two
WRITTEN = 1024  # rows written at a time
LOADED = 16384  # rows loaded at a time: the host never holds more of a table


class TokenSpec(NamedTuple):
    """A token table to keep on the devices.

    Attributes:
        length: tokens per row; longer rows are cut.
        dtype: of the ids there.
        limit: all ids must be below it; None = unchecked.
    """

    length: int
    dtype: Any
    limit: int | None = None


class DeviceIndex(Index):
    """The passages of an index directory on all devices of a mesh. Used as a PassageIndex is.

    `update` applies later edits of the directory: built rows keep their numbers, and deleted ones
    leave holes; added rows follow, and are numbered anew by every edit. `swap` replaces all rows.
    Neither changes a shape, so that no program that searches is compiled again.

    Args:
        index: the index to load.
        mesh: rows are split over all of its devices.
        settings: dtype, capacity and recall.
        token_specs: token tables of the passage stores to keep on the devices.

    Attributes:
        tables: the tables on the devices, an argument of jitted programs; changes replace them.
        manifest: that of the index, with another kind, and with recall None until it is measured on
            the devices, because their search differs from that of the directory.
    """

    division = "devices"

    def __init__(self, index: PassageIndex, mesh: Mesh, settings: DeviceSettings,
                 token_specs: Mapping[str, TokenSpec] = {}):  # noqa: B006 (never changed)
        self.mesh, self.settings, self.token_specs = mesh, settings, dict(token_specs)
        self.width, self.fingerprint = index.width, index.manifest["encoder_fingerprint"]
        self.capacity = table_rows(max(settings.capacity, len(index.passages)), mesh)
        self.tables = self._load(index)
        self._adopt(index)

    def swap(self, index: PassageIndex) -> None:
        """Replaces all passages by those of another index of the same encoder.

        Raises:
            RetrievalError: there are too many, another encoder embedded them, or a file is damaged;
                then nothing is changed.
        """
        self._check(index)
        self._verify(index)
        with self._or_as_before():
            self._replace(index)

    def _replace(self, index: PassageIndex) -> None:
        self.tables = None  # frees the old tables before there are new ones
        self.tables = self._load(index)
        self._adopt(index)

    def reload(self) -> None:
        """Loads the index again from its directory."""
        manifest = self.manifest
        self._verify(self._index)
        self._replace(self._index)
        self.manifest = manifest

    def update(self, index: PassageIndex) -> None:
        """Changes to a later version of the index directory. Only added rows are loaded, unless the
        built ones have changed too.

        Raises:
            RetrievalError: as `swap`; then nothing is changed.
        """
        files = [one.manifest["files"] for one in (self._index, index)]
        if any(files[0].get(name) != files[1].get(name)
               for name in (EMBEDDINGS, "passages/meta.json")):
            return self.swap(index)
        self._check(index)
        self._verify(index, first=1)
        count = len(index.passages)
        with self._or_as_before():
            for first in range(index.manifest["size"], count, WRITTEN):
                rows = np.arange(first, first + WRITTEN)
                ids = np.where(rows < count, rows, -1).astype(np.int32)
                self.write(ids, self._values(index, np.minimum(rows, count - 1)))
            self._adopt(index)

    @contextlib.contextmanager
    def _or_as_before(self) -> Iterator[None]:
        """Loads the current index again where an error, of too little memory, say, or a Ctrl-C
        ends the body, in which tables were freed or donated."""
        index, manifest = self._index, self.manifest
        try:
            yield
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # they hold what was loaded so far
            self._replace(index)
            self.manifest = manifest
            raise

    def _adopt(self, index: PassageIndex) -> None:
        """Makes an index the current one: its rows are on the devices. Masks deleted ones."""
        rows = len(index.passages)
        self._index, self.size = index, index.size
        self.path, self.passages = index.path, index.passages
        self.manifest = {**index.manifest, "kind": f"device ({self.settings.dtype})",
                         "recall": None}
        valid = np.arange(self.capacity) < rows
        if index.valid is not None:
            valid[:rows] = index.valid
        self.tables = self.tables._replace(valid=jax.make_array_from_callback(
            (self.capacity,), row_sharding(self.mesh), lambda rows: valid[rows]))

    def write(self, ids: np.ndarray | jax.Array, values: DeviceTables) -> None:
        """Replaces rows int32[R] of the tables by values [R, ...]; -1 = no row.

        values: `valid` must be None; without `tokens`, those of the rows stay.
        """
        tables, kept = self.tables._replace(valid=None), {"valid": self.tables.valid}
        if not values.tokens:
            tables, kept["tokens"] = tables._replace(tokens={}), tables.tokens
        self.tables = _write(tables, ids, values, mesh=self.mesh)._replace(**kept)

    def _search(self, queries: np.ndarray, k: int) -> SearchResult:
        run = jit_search(self.mesh, k, self.settings)
        batches = []
        for begin in range(0, len(queries), QUERIES):
            some = queries[begin : begin + QUERIES]
            padded = np.pad(some, ((0, (1 << (len(some) - 1).bit_length()) - len(some)), (0, 0)))
            batches.append([np.asarray(part)[: len(some)] for part in run(self.tables, padded)])
        result = stack(batches)
        if (result.ids < 0).any():
            raise RetrievalError(
                f"approximate search found fewer than k={k} of {self.size} passages in "
                f"{self.capacity} rows; set recall_target=1.0 for so few.")
        return result

    def embeddings(self, ids: np.ndarray) -> np.ndarray:
        """The embeddings float32[..., E] of rows integers[...], as the devices hold them.

        All processes must ask for the same rows together.
        """
        ids = np.asarray(ids)
        check_rows(ids, len(self.passages), f"{self.path}: embeddings")
        return np.asarray(_lookup(self.tables.embeddings, ids.astype(np.int32), mesh=self.mesh))

    def _check(self, index: PassageIndex) -> None:
        needed = len(index.passages)
        if needed > self.capacity:
            raise RetrievalError(
                f"{index.path}: {needed} passages do not fit into the {self.capacity} "
                f"rows on the devices; set retrieval.capacity to {needed} or more.")
        built_by = index.manifest["encoder_fingerprint"]
        if built_by != self.fingerprint:
            raise RetrievalError(
                f"{index.path}: built by the encoder {built_by}, what is on the devices by "
                f"{self.fingerprint}; their inner products cannot be compared. Build the index "
                "again with that encoder.")

    def _verify(self, index: PassageIndex, first: int = 0) -> None:
        """Verifies and checks all that is to be loaded of an index, before any table is changed.

        first: the first part: 0 = all of it, 1 = only what was added.

        Raises:
            RetrievalError: a file is damaged, or as `_read`.
        """
        if index.files is not None:
            index.files.check_all(name for name in (EMBEDDINGS, f"{ADDED}/{EMBEDDINGS}")[first:]
                                  if name in index.files.names)
        for store in index.passages.stores[first:]:
            for name in self.token_specs:
                store.tokens(name)  # an unknown name is an error
                store.files.check_all([f"tokens.{name}.ids", f"tokens.{name}.offsets"])
        rows = range(index.manifest["size"] if first else 0, len(index.passages))
        for begin in rows[::LOADED]:
            self._read(index, np.arange(begin, min(begin + LOADED, rows.stop)))

    def _read(self, index: PassageIndex, rows: np.ndarray
              ) -> tuple[np.ndarray, dict[str, tuple[np.ndarray, np.ndarray]]]:
        """Embeddings of rows int[R] of an index, and their tokens and lengths in each token table.

        Raises:
            RetrievalError: a number that is not finite or too large, or a token id beyond its
                table.
        """
        embeddings = check_vectors(
            index.embeddings(rows), lambda row: f"{index.path}: the embedding of row {rows[row]}")
        tokens = {}
        for name, spec in self.token_specs.items():
            ids, mask = index.passages.tokens(name).padded(rows, spec.length, 0)
            if spec.limit is not None:
                check_token_ids(ids, spec.limit, index.path, name)
            tokens[name] = ids.astype(spec.dtype), mask.sum(axis=-1, dtype=np.int32)
        return embeddings, tokens

    def _values(self, index: PassageIndex, rows: np.ndarray) -> DeviceTables:
        """Rows int[R] of an index as the tables have them; `valid` is None. Raises as `_read`."""
        embeddings, tokens = self._read(index, rows)
        columns = device_search.encoded(embeddings, self.settings.dtype)
        return DeviceTables(*columns, None, np.zeros(len(rows), np.int32), tokens)

    def _load(self, index: PassageIndex) -> DeviceTables:
        """Tables of an index, zero in spare rows; a process reads only the rows of its devices."""
        sharding = row_sharding(self.mesh)
        whole = abstract_tables(self.capacity, self.width, self.mesh, self.settings,
                                self.token_specs)._replace(valid=None)
        placed = sharding.addressable_devices_indices_map((self.capacity,))
        shards = [self._share(index, whole, device, rows.start or 0)
                  for device, (rows,) in placed.items()]
        return jax.tree.map(
            lambda table, *parts: jax.make_array_from_single_device_arrays(
                table.shape, sharding, list(parts)), whole, *shards)

    def _share(self, index: PassageIndex, whole: DeviceTables, device: jax.Device, first: int
               ) -> DeviceTables:
        """The rows of the tables on one device, from row `first` on, loaded LOADED at a time."""
        local = self.capacity // self.mesh.size
        size = min(local, LOADED)
        share = jax.tree.map(
            lambda table: jnp.zeros((local, *table.shape[1:]), table.dtype, device=device), whole)
        total = len(index.passages)
        for begin in range(0, min(local, total - first), size):
            begin = min(begin, local - size)  # may overlap the rows before: one shape for all
            rows = np.arange(first + begin, min(first + begin + size, total))
            spare = ((0, size - len(rows)),)
            values = jax.tree.map(lambda x: np.pad(x, spare + ((0, 0),) * (x.ndim - 1)),  # noqa: B023
                                  self._values(index, rows))
            share = jax.block_until_ready(_place(share, values, np.int32(begin)))
        return share


def table_rows(passages: int, mesh: Mesh) -> int:
    """How many rows the tables for so many passages have."""
    rows = -(-passages // mesh.size)
    few, many = ROUND
    unit = many if rows > 2 * many else few
    return -(-rows // unit) * unit * mesh.size


def abstract_tables(passages: int, width: int, mesh: Mesh, settings: DeviceSettings,
                    token_specs: Mapping[str, TokenSpec]) -> DeviceTables:
    """Shapes, dtypes and shardings of the tables of an index, to compile for it without data."""
    rows = table_rows(max(settings.capacity, passages), mesh)

    def column(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, *shape), dtype, sharding=row_sharding(mesh))

    codes = settings.dtype == "int8"
    return DeviceTables(
        column(jnp.float32 if settings.dtype == "float32" else jnp.bfloat16, width),
        column(jnp.int8, width) if codes else None, column(jnp.float32) if codes else None,
        column(bool), column(jnp.int32),
        {name: (column(spec.dtype, spec.length), column(jnp.int32))
         for name, spec in token_specs.items()})


@functools.cache
def jit_search(mesh: Mesh, k: int, settings: DeviceSettings) -> Callable:
    """(tables, queries float32[B, E]) -> SearchResult; see device_search.search."""
    return jax.jit(lambda tables, queries: device_search.search(tables, queries, k, mesh, settings))


@functools.partial(jax.jit, donate_argnums=0)
def _place(share: DeviceTables, values: DeviceTables, begin: jax.Array) -> DeviceTables:
    """The tables with `values` from row `begin` on."""
    return jax.tree.map(
        lambda table, rows: jax.lax.dynamic_update_slice_in_dim(table, rows, begin, 0),
        share, values)


_lookup = jax.jit(device_search.lookup, static_argnames="mesh")
_write = jax.jit(device_search.write, static_argnames="mesh", donate_argnames="tables")
