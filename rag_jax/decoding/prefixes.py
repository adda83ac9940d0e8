"""A cache of passages that a decoder-only generator has read, from one question to the next.

In a prompt the passage comes before the question, so that its keys and values depend on no
question. With a cache, an input is read in two parts, by two programs: first its passage, unless
that is cached, and then what follows the passage. Both programs get the same numbers whether the
passage was cached or not, so that the size of the cache changes no bit of an answer.
"""

import collections
import functools
import threading
import weakref
from collections.abc import Callable, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from rag_jax import parallel
from rag_jax.config import GeneratorConfig
from rag_jax.decoding.memory import MIB
from rag_jax.models import rag
from rag_jax.models.generator import build
from rag_jax.types import Params

KeysValues = tuple[np.ndarray, np.ndarray]  # dtype[layers, G, C, P] and dtype[layers, G, P, C]
Passages = collections.OrderedDict[tuple[int, bytes], KeysValues]  # by padded length and tokens
# (rows of tokens, the length to which each is padded) -> keys dtype[rows, layers, G, C, P] and
# values dtype[rows, layers, G, P, C] on the host, where P is the greatest of these lengths. G is
# the number of heads of keys and values.
Reader = Callable[[Sequence[Sequence[int]], Sequence[int]], KeysValues]


class KeptPrefixes:
    """Keys and values, in host memory, of the passages that one generator has read last.

    A passage is identified by its tokens, because its number may mean another text in another
    index. Threads may share an instance.
    """

    def __init__(self):
        self._kept: Passages = collections.OrderedDict()
        self._generator: tuple[GeneratorConfig | None, list[weakref.ref]] = None, []
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def reader(self, model: rag.RagModel, params: Params, converted: Params, mib: int) -> Reader:
        """A function that reads passages with these parameters and keeps `mib` MiB of them. What
        other parameters have read is dropped.

        converted: the parameters as `generator.in_dtype` makes them, anew at every call.
        """
        config, weights = model.generator, jax.tree.leaves(params["generator"])
        with self._lock:
            known_config, known = self._generator
            if known_config != config or len(known) != len(weights) or any(
                    ref() is not weight for ref, weight in zip(known, weights, strict=True)):
                self._kept = collections.OrderedDict()
                self._generator = config, [weakref.ref(weight) for weight in weights]
            return functools.partial(self._read, self._kept, config, converted["generator"],
                                     mib)

    def _read(self, kept: Passages, config: GeneratorConfig, params: Params, mib: int,
              rows: Sequence[Sequence[int]], padded: Sequence[int]) -> KeysValues:
        """The `Reader` of these parameters."""
        keys = [(length, np.array(row, np.int32).tobytes())
                for row, length in zip(rows, padded, strict=True)]
        with self._lock:
            found = {key: kept[key] for key in keys if key in kept}
        new = {key: _program(config)(params, *_padded(row, key[0]))
               for key, row in dict(zip(keys, rows, strict=True)).items() if key not in found}
        for (length, row), read in new.items():  # all were dispatched before the first is fetched
            tokens = len(row) // 4  # of int32
            whole_keys, whole_values = parallel.fetch(read)
            found[length, row] = (whole_keys[..., :tokens].copy(),
                                  whole_values[..., :tokens, :].copy())
        with self._lock:
            for key in found:
                kept[key] = found[key]
                kept.move_to_end(key)
            excess = sum(map(_bytes, kept.values())) - mib * MIB
            while excess > 0:
                excess -= _bytes(kept.popitem(last=False)[1])
        return _stacked([found[key] for key in keys], max(padded))


def _bytes(kept: KeysValues) -> int:
    return sum(array.nbytes for array in kept)


def _padded(row: Sequence[int], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids int32[1, 1, S] of one passage, padded to `length`, and their mask."""
    ids = np.zeros((1, 1, length), np.int32)
    ids[0, 0, : len(row)] = row
    return ids, np.arange(length)[None, None] < len(row)


def _stacked(kept: Sequence[KeysValues], length: int) -> KeysValues:
    """Keys and values of several passages in one array each, padded to `length`."""
    first_keys, first_values = kept[0]
    keys = np.zeros((len(kept), *first_keys.shape[:-1], length), first_keys.dtype)
    values = np.zeros((len(kept), *first_values.shape[:-2], length, first_values.shape[-1]),
                      first_values.dtype)
    for row, (own_keys, own_values) in enumerate(kept):
        keys[row, ..., : own_keys.shape[-1]] = own_keys
        values[row, ..., : own_values.shape[-2], :] = own_values
    return keys, values


@functools.cache
def _program(config: GeneratorConfig) -> jax.stages.Wrapped:
    """(params, ids int32[1, 1, S], mask) -> keys and values of one passage."""
    def read(params: Params, ids: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
        source = nn.apply(lambda generator: generator.read(ids, mask), build(config))(
            {"params": params})
        return tuple(jnp.stack([each[0] for each in every])
                     for every in zip(*source.layers, strict=True))

    return jax.jit(read)
