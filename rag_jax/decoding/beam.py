"""Beam search as one pure function over an explicit state; num_beams=1 is greedy search.

R independent searches run side by side, each with M live hypotheses (still growing) and M
finished ones (ended with end_id). The loop stops early once no live hypothesis can overtake the
finished ones: log-probabilities only fall as a hypothesis grows.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rag_jax.models.layers import MASKED


class Hypotheses(NamedTuple):
    """M hypotheses of each search, best first."""

    tokens: jax.Array  # int32[R, M, T], padded with pad_id after end_id
    log_probs: jax.Array  # float32[R, M], sum of the tokens' log-probabilities, end_id included


class BeamState(NamedTuple):
    position: jax.Array  # int32[], tokens generated so far
    live: Hypotheses
    finished: Hypotheses  # log_probs MASKED where there is none
    carry: Any  # what `step` keeps: caches, rows in the order of the live hypotheses


def gather_beams(tree: Any, beams: jax.Array) -> Any:
    """Picks hypotheses: leaves [R, M, ...] and beams int32[R, m] -> leaves [R, m, ...]."""
    return jax.tree.map(
        lambda x: jnp.take_along_axis(x, beams.reshape(*beams.shape, *[1] * (x.ndim - 2)), axis=1),
        tree)


def beam_search(
    step: Callable[[jax.Array, Any], tuple[jax.Array, Any]],
    carry: Any,
    reorder: Callable[[Any, jax.Array], Any],
    *,
    searches: int,
    num_beams: int,
    max_length: int,
    start_id: int,
    end_id: int,
    pad_id: int,
) -> Hypotheses:
    """Finds sequences of high probability.

    Args:
      step: (last tokens int32[R, M], carry) -> (log-probabilities float32[R, M, V], carry).
      carry: state before the first step, with rows for R x M hypotheses.
      reorder: (carry, beams int32[R, M]) -> carry whose hypothesis m is the former beams[:, m].
      searches: R.
      num_beams: M.
      max_length: T, tokens of a hypothesis with end_id.
      start_id: first input token; it is not part of a hypothesis.
      end_id: ends a hypothesis.
      pad_id: fills it up.

    Returns:
      The M best hypotheses, best first: finished ones, then, where there are too few, live ones
      cut at max_length (recognisable by the missing end_id).
    """
    shape = (searches, num_beams)
    empty = jnp.full((*shape, max_length), pad_id, jnp.int32)
    first_only = jnp.where(jnp.arange(num_beams) == 0, 0.0, MASKED)
    initial = BeamState(
        position=jnp.zeros((), jnp.int32),
        live=Hypotheses(empty, jnp.broadcast_to(first_only, shape).astype(jnp.float32)),
        finished=Hypotheses(empty, jnp.full(shape, MASKED, jnp.float32)),
        carry=carry,
    )

    def running(state: BeamState) -> jax.Array:
        overtaken = state.live.log_probs[:, 0] <= state.finished.log_probs[:, -1]
        return (state.position < max_length) & ~jnp.all(overtaken)

    def advance(state: BeamState) -> BeamState:
        last = jnp.where(
            state.position == 0, start_id,
            state.live.tokens[:, :, jnp.maximum(state.position - 1, 0)])
        log_p, carry = step(last, state.carry)
        vocab = log_p.shape[-1]
        totals = (state.live.log_probs[:, :, None] + log_p).reshape(searches, -1)  # -> [R, M*V]
        # Each live hypothesis has one ending, so 2M candidates always hold M that go on.
        scores, flat = jax.lax.top_k(totals, 2 * num_beams)
        beams, tokens = flat // vocab, flat % vocab
        grown = gather_beams(state.live.tokens, beams)
        grown = jax.lax.dynamic_update_index_in_dim(
            grown, tokens.astype(jnp.int32), state.position, axis=2)
        ends = tokens == end_id
        # An ending counts only among the first M: it beat what the beam goes on with.
        among_first = (jnp.arange(2 * num_beams) < num_beams)[None]
        ended = jnp.where(ends & among_first, scores, MASKED)
        finished = _best(
            Hypotheses(jnp.concatenate([state.finished.tokens, grown], axis=1),
                       jnp.concatenate([state.finished.log_probs, ended], axis=1)), num_beams)
        live_scores, chosen = jax.lax.top_k(jnp.where(ends, MASKED, scores), num_beams)
        return BeamState(
            position=state.position + 1,
            live=Hypotheses(gather_beams(grown, chosen), live_scores),
            finished=finished,
            carry=reorder(carry, gather_beams(beams, chosen)),
        )

    last = jax.lax.while_loop(running, advance, initial)
    none_finished = last.finished.log_probs <= MASKED
    order = jnp.where(none_finished, MASKED, 0.0)  # live hypotheses come after finished ones
    both = Hypotheses(
        jnp.concatenate([last.finished.tokens, last.live.tokens], axis=1),
        jnp.concatenate([last.finished.log_probs, last.live.log_probs], axis=1))
    rank = jnp.concatenate([order, jnp.full(shape, MASKED / 2)], axis=1)
    _, picked = jax.lax.top_k(rank + both.log_probs * (rank > MASKED), num_beams)
    return Hypotheses(gather_beams(both.tokens, picked),
                      jnp.take_along_axis(both.log_probs, picked, axis=1))


def _best(hypotheses: Hypotheses, count: int) -> Hypotheses:
    scores, picked = jax.lax.top_k(hypotheses.log_probs, count)
    return Hypotheses(gather_beams(hypotheses.tokens, picked), scores)
