"""Rows of different lengths as padded arrays, with few different shapes."""

from collections.abc import Iterator, Sequence

import numpy as np


def pad_rows(rows: Sequence[Sequence[int]], length: int, pad: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of ids to int32[R, length] and bool[R, length]; longer rows are cut at the right."""
    ids = np.full((len(rows), length), pad, np.int32)
    mask = np.zeros((len(rows), length), bool)
    for r, row in enumerate(rows):
        kept = row[:length]
        ids[r, : len(kept)] = kept
        mask[r, : len(kept)] = True
    return ids, mask


def bucket(length: int, step: int, longest: int) -> int:
    """`length` rounded up to a multiple of `step`, at most `longest`."""
    return min(longest, -(-max(length, 1) // step) * step)


def by_length(lengths: np.ndarray, size: int, step: int, longest: int
              ) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    """Rows in batches of about the same length, the shortest first.

    Args:
      lengths: int[R], of each row.
      size: of a batch.
      step, longest: as for `bucket`.

    Yields:
      The numbers of a batch's rows int64[at most size], the same repeated to fill int64[size], and
      the length to pad them to.
    """
    order = np.argsort(lengths, kind="stable")
    for rows in (order[first : first + size] for first in range(0, len(order), size)):
        yield rows, np.resize(rows, size), bucket(int(lengths[rows].max()), step, longest)


def halved(ids: np.ndarray, mask: np.ndarray, least: int) -> tuple[np.ndarray, np.ndarray]:
    """Padded rows [R, L] and their mask, cut to L / 2, L / 4, ... while all tokens fit in.

    least: rows are not cut below this length.
    """
    longest, length = int(mask.sum(axis=1).max()), mask.shape[1]
    while length // 2 >= max(longest, least, 1):
        length //= 2
    return ids[:, :length], mask[:, :length]
