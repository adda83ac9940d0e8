"""Classification with a generator (the paper's FEVER): p(class | x) over a set of labels."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rag_jax.decoding.scoring import score
from rag_jax.models import rag
from rag_jax.types import Batch, Params


class Classified(NamedTuple):
    """For L labels; the class of a question is p.argmax(axis=1)."""

    p: jax.Array  # float32[B, L], p(label | x), normalised over the labels
    log_p: jax.Array  # float32[B, L], log p(label's tokens | x)
    posterior: jax.Array  # float32[B, L, K], p(z | x, label)


def classify(model: rag.RagModel, params: Params, batch: Batch,
             labels: Sequence[Sequence[int]], memory_mib: int = 4096) -> Classified:
    """Probabilities of labels, documents summed out as the model's kind says.

    Args:
      labels: token ids of each label, as in the targets that the model was trained on: one output
        token each, or whole strings with </s> (and <s>, where targets begin with it). Labels of
        one token give the same result for RAG-Token and RAG-Sequence (section 2.1).

    Raises:
      ValueError: no labels, an empty label, two equal ones, or ids outside the vocabulary.
    """
    check_labels(model, labels)
    length = max(map(len, labels))
    rows = [[*label, *[model.pad_id] * (length - len(label))] for label in labels]
    shape = (batch.question_ids.shape[0], len(rows), length)
    tokens = jnp.broadcast_to(jnp.array(rows, jnp.int32)[None], shape)
    lengths = jnp.array([len(label) for label in labels])
    mask = jnp.broadcast_to((jnp.arange(length)[None] < lengths[:, None])[None], shape)
    ranked = score(model, params, batch, tokens, mask, memory_mib)
    return Classified(jax.nn.softmax(ranked.log_p, axis=-1), ranked.log_p, ranked.posterior)


def check_labels(model: rag.RagModel, labels: Sequence[Sequence[int]]) -> None:
    """Raises ValueError where `labels` cannot be told apart or read."""
    if not labels or not all(len(label) for label in labels):
        raise ValueError(f"labels={labels}: at least one label, of at least one token each")
    if len({tuple(label) for label in labels}) < len(labels):
        raise ValueError(f"labels={labels}: two labels are equal")
    vocab = model.generator.vocab_size
    beyond = [t for label in labels for t in label if not 0 <= t < vocab]
    if beyond:
        raise ValueError(f"labels hold token ids {beyond}: must be below vocab_size={vocab}")
    longest = max(map(len, labels))
    if longest > model.generator.max_positions:
        raise ValueError(f"a label has {longest} tokens: the generator has "
                         f"{model.generator.max_positions} positions")
