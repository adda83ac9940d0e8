"""Where the tokens of a batch are, for a generator that computes no padding (`models/packing.py`).

So that shapes are few, the tokens of a group of rows get a fixed number of places, its room: enough
for rows of usual lengths and a little more. A batch that does not fit is not packed.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rag_jax.data.padding import pad_rows

SAMPLE = 1024  # rows that usual lengths are computed from
SPARE = 4.0  # standard deviations that are kept free: about one batch in 30,000 does not fit
UNIT = 16  # a room is a multiple of it


class Groups(NamedTuple):
    """How a batch's rows are divided: what a device computes at a time is packed together."""

    devices: int = 1  # each has consecutive rows
    pieces: int = 1  # micro-batches: of a device's rows, piece p has p, p + pieces, ...

    @property
    def count(self) -> int:
        return self.devices * self.pieces

    def rows(self, mask: np.ndarray) -> np.ndarray:
        """bool[B, T] as [G, B / G * T]."""
        by_device = mask.reshape(self.devices, -1, self.pieces, mask.shape[1])
        return by_device.swapaxes(1, 2).reshape(self.count, -1)

    def own(self, places: np.ndarray, own: np.ndarray | slice, size: int) -> np.ndarray:
        """Those of places [G, N] whose devices have the rows `own` of a batch of `size` rows."""
        devices = np.unique(np.arange(size)[own] * self.devices // size)
        return places.reshape(self.devices, self.pieces, -1)[devices].reshape(
            -1, places.shape[1])


def sample(size: int, count: int = SAMPLE) -> np.ndarray:
    """At most `count` numbers of rows, int[...], evenly spread over `size` rows."""
    return np.unique(np.linspace(0, size - 1, count).astype(int))


def room(lengths: Sequence[int] | np.ndarray, rows: int) -> int:
    """Places for the tokens of a group of `rows` rows, from the lengths of a sample of rows."""
    usual = np.asarray(lengths, np.float64)
    needed = usual.mean() * rows + SPARE * usual.std() * rows**0.5
    return -(-int(np.ceil(needed)) // UNIT) * UNIT


def token_places(rows: np.ndarray, room: int) -> np.ndarray:
    """The places at which rows bool[G, P] have tokens, int32[G, room], filled up with P."""
    return pad_rows([np.flatnonzero(row) for row in rows], room, rows.shape[1])[0]


def places(mask: np.ndarray, groups: Groups, room: int) -> np.ndarray | None:
    """The places of each group's tokens, int32[G, room], filled up with the number of places; None
    where the tokens do not fit, or where packing would save nothing.

    mask: bool[B, T], True where there is a token; groups divide B.
    """
    rows = groups.rows(mask)
    if room >= rows.shape[1] or rows.sum(axis=1).max() > room:
        return None
    return token_places(rows, room)
