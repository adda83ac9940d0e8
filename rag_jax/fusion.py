"""Scores of embeddings and of words for the same passages, joined into the logits of p(z|x).

By a convex combination (1 - w) s_dense + w s_words: p(z|x) is proportional to
p_dense(z|x)^(1 - w) p_words(z|x)^w, each the softmax of its scores over the passages. Or by
reciprocal ranks: p(z|x) is proportional to 1 / (60 + rank) by embeddings plus the same by words,
where passages rank among those that p(z|x) is of; one without a word of the question has no rank by
words, which then add nothing.

Source: Bruch, Gai and Ingber 2023, "An Analysis of Fusion Functions for Hybrid Retrieval", with
softmax in the place of its linear normalisations, which have no meaning as logits; Cormack, Clarke
and Buettcher 2009 for reciprocal ranks.
"""

import dataclasses
from typing import Any, Literal

import numpy as np

RANK = 60  # added to every rank, as Cormack et al. do


@dataclasses.dataclass(frozen=True)
class Fusion:
    """How scores are joined.

    Attributes:
        kind: see the module.
        weight: w, of words; read by "convex".
        learned: w is a parameter, whose initial value is `weight`.
    """

    kind: Literal["convex", "reciprocal_rank"] = "convex"
    weight: float = 0.5
    learned: bool = False

    def logits(self, dense: Any, words: Any, weight: Any, xp: Any = np) -> Any:
        """Logits float32[B, K] from scores float32[B, K] of both. By reciprocal ranks, equal scores
        rank in their order, and nothing has a gradient.

        weight: the current w, a number or float32[B, 1].
        xp: numpy, or jax.numpy in a jitted program.
        """
        if self.kind == "convex":
            return (1 - weight) * dense + weight * words
        by_words = xp.where(words > 0, reciprocal_ranks(words, xp), 0)
        return xp.log(reciprocal_ranks(dense, xp) + by_words)


def reciprocal_ranks(scores: Any, xp: Any) -> Any:
    """1 / (60 + rank) float32[B, K] of scores float32[B, K], the best of a row of rank 1."""
    order = xp.argsort(-scores, axis=1, stable=True)
    ranks = xp.argsort(order, axis=1, stable=True) + 1
    return 1 / (RANK + ranks).astype(np.float32)
