"""What a decoder-only generator keeps of passages, from one question to the next.

In a prompt the passage comes before the question, so that its keys and values depend on no
question. With room for them, an input is read in two parts, by two programs: its passage alone,
unless what was kept of it is there still, and then what follows the passage, about that. Both run
on the same numbers whether the passage was met before or not: what there is room for changes no bit
of an answer.
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
from rag_jax.models.generator import build, in_dtype
from rag_jax.types import Params

KeysValues = tuple[np.ndarray, np.ndarray]  # dtype[layers, G, C, P] and dtype[layers, G, P, C]
Passages = collections.OrderedDict[tuple[int, bytes], KeysValues]  # by padded length and tokens
# Rows of tokens, and the length to which each is padded -> dtype[rows, layers, G, C, P] and dtype[
# rows, layers, G, P, C] on the host, with P the longest of these lengths.
Reader = Callable[[Sequence[Sequence[int]], Sequence[int]], KeysValues]


class KeptPrefixes:
    """Keys and values of the passages that were read last, by one generator, in host memory.

    They are known by their tokens, as another index may have another text under the same number.
    Threads may share it.
    """

    def __init__(self):
        self._kept: Passages = collections.OrderedDict()
        self._generator: tuple[GeneratorConfig | None, list[weakref.ref]] = None, []
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def reader(self, model: rag.RagModel, params: Params, mib: int) -> Reader:
        """What reads the beginnings of inputs with these parameters, and keeps `mib` MiB of them;
        what was kept of other parameters is dropped."""
        config, weights = model.generator, jax.tree.leaves(params["generator"])
        with self._lock:
            of, known = self._generator
            if of != config or len(known) != len(weights) or any(
                    ref() is not weight for ref, weight in zip(known, weights, strict=True)):
                self._kept = collections.OrderedDict()
                self._generator = config, [weakref.ref(weight) for weight in weights]
            return functools.partial(self._read, self._kept, config, params["generator"], mib)

    def _read(self, kept: Passages, config: GeneratorConfig, params: Params, mib: int,
              rows: Sequence[Sequence[int]], padded: Sequence[int]) -> KeysValues:
        keys = [(length, np.array(row, np.int32).tobytes())
                for row, length in zip(rows, padded, strict=True)]
        with self._lock:
            found = {key: kept[key] for key in keys if key in kept}
        new = {key: _program(config)(params, *_padded(row, key[0]))
               for key, row in dict(zip(keys, rows, strict=True)).items() if key not in found}
        for (length, row), read in new.items():  # all of them are under way
            tokens = len(row) // 4
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
        return _side_by_side([found[key] for key in keys], max(padded))


def _bytes(kept: KeysValues) -> int:
    return sum(array.nbytes for array in kept)


def _padded(row: Sequence[int], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids int32[1, 1, S] of one passage, and their mask."""
    ids = np.zeros((1, 1, length), np.int32)
    ids[0, 0, : len(row)] = row
    return ids, np.arange(length)[None, None] < len(row)


def _side_by_side(kept: Sequence[KeysValues], length: int) -> KeysValues:
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
            {"params": in_dtype(params, config.dtype)})
        return tuple(jnp.stack([each[0] for each in every])
                     for every in zip(*source.layers, strict=True))

    return jax.jit(read)
