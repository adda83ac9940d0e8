"""log p of given answers by teacher forcing, in groups that fit the memory budget."""

import functools

import jax
import jax.numpy as jnp

from rag_jax import parallel
from rag_jax.decoding import documents as documents_module
from rag_jax.decoding.documents import Documents
from rag_jax.decoding.memory import candidates_at_once
from rag_jax.decoding.results import Ranked, explain, until_end
from rag_jax.models import rag
from rag_jax.types import Params

SHORTEST = 3  # tokens of the shortest cut for which scoring has a branch of its own


def score_pairs(model: rag.RagModel, params: Params, documents: Documents, candidates: jax.Array,
                mask: jax.Array, needed: jax.Array, known: jax.Array, memory_mib: int
                ) -> jax.Array:
    """Scores candidates under those documents for which this is needed.

    Each pass scores, under every document, the next group of the candidates that it needs. The loop
    ends when no document needs more; where none needs any, there is no pass.

    Args:
      candidates: int32[B, A, T].
      mask: bool[B, A, T], False in padding.
      needed: bool[B, K, A], the pairs of document and candidate to score.
      known: float32[B, K, A, T], the result for the other pairs.
      memory_mib: the memory budget, as in `Decoding`.

    Returns:
      log p(y_t | x, z, y_<t) float32[B, K, A, T], 0 in padding.
    """
    questions, passages, count = needed.shape
    rows, source = documents.mask.shape
    length = candidates.shape[-1]
    rows_per_device = rows // parallel.row_parts(documents.log_prior)
    group = candidates_at_once(model, memory_mib, rows_per_device, count, length, source)
    order = jnp.argsort(~needed, axis=2, stable=True)  # [B, K, A], needed ones first
    most = needed.sum(axis=2).max()  # needed by one document
    longest = jnp.where(needed.any(axis=1), mask.sum(axis=2), 0).max()

    def advance(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        done, log_p = state
        # The last group may overlap the one before, and then writes the same numbers again.
        places = jax.lax.dynamic_slice_in_dim(order, jnp.minimum(done, count - group), group, 2)
        tokens = _pick(candidates[:, None], places)  # -> [B, K, G, T]
        scored = _target_log_probs(
            model, params, documents, tokens.reshape(rows, group, length), longest)
        scored = scored.reshape(tokens.shape)
        scored = jnp.where(_pick(mask[:, None], places), scored, 0.0)
        wanted = jnp.take_along_axis(needed, places, axis=2)[..., None]
        scored = jnp.where(wanted, scored, _pick(log_p, places))
        row, column = jnp.arange(questions)[:, None, None], jnp.arange(passages)[None, :, None]
        return done + group, log_p.at[row, column, places].set(scored)

    start = (jnp.zeros((), jnp.int32), known)
    return jax.lax.while_loop(lambda state: state[0] < most, advance, start)[1]


def _target_log_probs(model: rag.RagModel, params: Params, documents: Documents,
                      tokens: jax.Array, longest: jax.Array) -> jax.Array:
    """As `documents.target_log_probs`, but of a half or a quarter of the T positions if `longest`
    are no more; the others are 0."""
    length = tokens.shape[-1]
    lengths = [n for n in (length // 4, length // 2) if n >= SHORTEST] + [length]

    def of_first(cut: int, tokens: jax.Array) -> jax.Array:
        log_p = documents_module.target_log_probs(model, params, documents, tokens[..., :cut])
        return jnp.pad(log_p, ((0, 0), (0, 0), (0, length - cut)))

    shortest = (longest > jnp.array(lengths[:-1], jnp.int32)).sum()
    return jax.lax.switch(shortest, [functools.partial(of_first, n) for n in lengths], tokens)


def score(model: rag.RagModel, params: Params, documents: Documents, tokens: jax.Array,
          mask: jax.Array | None = None, memory_mib: int = 4096) -> Ranked:
    """Probabilities and posteriors of given answers int32[B, A, T], in the given order.

    The probability of an answer without </s> is that of all answers that begin with it.
    mask: bool[B, A, T], False in padding; None = the padding begins after </s>.
    """
    if mask is None:
        mask = until_end(tokens, model.end_id)
    questions, passages = documents.log_prior.shape
    count, length = tokens.shape[1:]
    everything = jnp.ones((questions, passages, count), bool)
    nothing = jnp.zeros((questions, passages, count, length), jnp.float32)
    log_p = score_pairs(model, params, documents, tokens, mask, everything, nothing, memory_mib)
    valid = jnp.ones(tokens.shape[:2], bool)
    return explain(model.kind, documents.log_prior, tokens, mask, log_p.transpose(0, 2, 3, 1),
                   valid, model.end_id)


def _pick(rows: jax.Array, places: jax.Array) -> jax.Array:
    """Rows [B, K or 1, A, T] at places int32[B, K, G] of the axis A, [B, K, G, T]."""
    return jnp.take_along_axis(rows, places[..., None], axis=2)
