"""A guard against retrieval collapse, the same passages for every question (paper, appendix H).

The generator then learns to ignore the passages, and the query encoder gets no gradient back.
"""

from collections.abc import Sequence
from typing import Literal

import jax
import numpy as np

from rag_jax import hosts
from rag_jax.metrics.retrieval import effective_passages

_IDS_AT_A_TIME = 100_000  # 10 bytes each, at most: a message must stay below gRPC's 4 MB


class CollapseGuard:
    """Compares how many passages each window of steps retrieves with the first window. A window in
    which the guard was switched on is not counted.

    Its decisions depend on the retrieved passages alone, and `state` is saved with a checkpoint.
    Retrieval that collapses before the first window ends is not noticed: keep that window within
    the warm-up of the learning rate. Every process makes the same calls; at the end of a window
    they exchange their rows.

    Args:
      action: what follows a collapse: a warning; training stops; the retriever is frozen as it is;
        or it is frozen as it was at the end of the last sound window (rollback).
      window: steps that are counted together.
      threshold: share of the first window's effective passages below which retrieval has collapsed.

    Attributes:
      collapsed_at: steps done when retrieval had collapsed; None = it has not.
    """

    def __init__(self, action: Literal["warn", "stop", "freeze", "rollback"], window: int,
                 threshold: float):
        self.action, self.window, self.threshold = action, window, threshold
        self.restore({"ids": [], "whole": False, "first": None, "last": None, "collapsed_at": None})

    def note(self, done: int, ids: jax.Array | np.ndarray) -> float | None:
        """Takes the rows int[B, K] that step `done` - 1 has retrieved, -1 where there is none; a
        device array may be split along B.

        Returns:
          The effective passages of the window that ends here; None = none ends or counts here.
        """
        self._whole = self._whole or self.due(done - 1)
        self._ungathered.append(ids)
        if self.due(done) or sum(ids.size for ids in self._ungathered) > _IDS_AT_A_TIME:
            self._gather()
        if not self.due(done):
            return None
        counted, self._ids = self._ids, []
        if not self._whole:  # with few steps, it would set a low standard for later windows
            return None
        self.last = effective_passages(np.array(counted))
        if self.first is None:
            self.first = self.last
        if self.collapsed_at is None and self.last < self.threshold * self.first:
            self.collapsed_at = done
        return self.last

    def due(self, done: int) -> bool:
        """Whether a window ends after `done` steps."""
        return done % self.window == 0

    @property
    def freezes(self) -> bool:
        """Whether the retriever trains no further, for it has collapsed."""
        return self.collapsed_at is not None and self.action in ("freeze", "rollback")

    def __str__(self) -> str:
        return (f"retrieval has collapsed at step {self.collapsed_at}: {self.window} steps "
                f"retrieved {self.last:.3g} effective passages, at the start {self.first:.3g}")

    def _gather(self) -> None:
        if self._ungathered:
            self._ids += gathered_rows(self._ungathered).ravel().tolist()
            self._ungathered = []

    def state(self) -> dict:
        """What `restore` needs, as JSON."""
        self._gather()
        return {"ids": self._ids, "whole": self._whole, "first": self.first, "last": self.last,
                "collapsed_at": self.collapsed_at}

    def restore(self, state: dict) -> None:
        """The inverse of `state`."""
        self._ungathered: list[jax.Array | np.ndarray] = []
        self._ids, self._whole = list(state["ids"]), state.get("whole", True)  # older ones lack it
        self.first = state["first"]
        self.last, self.collapsed_at = state["last"], state["collapsed_at"]


def gathered_rows(arrays: Sequence[jax.Array | np.ndarray]) -> np.ndarray:
    """The rows of all arrays [B, K], one array after the other, on every process.

    The hosts exchange arrays that are split along B in one message: a program on the devices would
    have to wait for later steps.
    """
    if all(isinstance(x, np.ndarray) or x.is_fully_addressable for x in arrays):
        return np.concatenate([np.asarray(x) for x in arrays])
    own = [[i, shard.index[0].start or 0, np.asarray(shard.data).tolist()]
           for i, x in enumerate(arrays) for shard in x.addressable_shards
           if shard.replica_id == 0]
    parts = sorted(part for parts in hosts.exchange(own) for part in parts)
    return np.concatenate([np.array(rows, arrays[0].dtype) for *_, rows in parts])
