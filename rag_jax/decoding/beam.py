"""Beam search as one pure function over an explicit state; num_beams=1 is greedy search.

R independent searches run side by side, each with M live hypotheses (still growing) and M
finished ones (ended with end_id). A search reads K documents at once and mixes their
distributions of the next token; what each document said of every token is kept, so that
posteriors and exact scores need no further pass.

The loop stops early once no live hypothesis can overtake the finished ones, whatever the length
penalty: log-probabilities only fall as a hypothesis grows. Meanwhile the search notes the best
score among everything that it dropped, which bounds all that it has not seen.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rag_jax import marginal
from rag_jax.decoding.constraints import Rule
from rag_jax.decoding.settings import Decoding
from rag_jax.marginal import MASKED


class Hypotheses(NamedTuple):
    """M hypotheses of each search."""

    tokens: jax.Array  # int32[R, M, T], padded with pad_id after end_id
    scores: jax.Array  # float32[R, M], sum of log p (forced tokens 0); MASKED where there is none
    ranks: jax.Array  # float32[R, M], scores with the length penalty
    doc_log_p: jax.Array  # float32[R, M, T, K], log p(y_t | x, z, y_<t); 0 after end_id


class Found(NamedTuple):
    """The M best hypotheses: ended ones by rank, then live ones cut at max_length."""

    hypotheses: Hypotheses
    finished: jax.Array  # bool[R, M], ended with end_id
    # float32[R], no other ended answer of max_length tokens scores above this; NaN where the model
    # gave a NaN, and then all of doc_log_p is NaN: no hypothesis means anything.
    bound: jax.Array


class BeamState(NamedTuple):
    position: jax.Array  # int32[], tokens generated so far
    live: Hypotheses
    finished: Hypotheses
    stopped: jax.Array  # bool[R], no live hypothesis can overtake the finished ones any more
    bound: jax.Array  # float32[R], best score among what was dropped before the search stopped
    carry: Any  # what `step` keeps: caches, rows in the order of the live hypotheses


def gather_beams(tree: Any, beams: jax.Array) -> Any:
    """Picks hypotheses: leaves [R, M, ...] and beams int32[R, m] -> leaves [R, m, ...]."""
    return jax.tree.map(
        lambda x: jnp.take_along_axis(x, beams.reshape(*beams.shape, *[1] * (x.ndim - 2)), axis=1),
        tree)


BLOCK = 128  # scores in a block of `best_of_many`


def best_of_many(scores: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """jax.lax.top_k of float32[R, N], without sorting all N: (float32[R, count], int32[R, count]).

    The best `count` scores lie in the `count` blocks of highest maximum; among equals the first
    ones win in both steps, since the chosen blocks keep their order.
    """
    rows, size = scores.shape
    padding = jnp.full((rows, -size % BLOCK), -jnp.inf, scores.dtype)
    blocks = jnp.concatenate([scores, padding], axis=1).reshape(rows, -1, BLOCK)
    _, chosen = jax.lax.top_k(blocks.max(axis=2), min(count, blocks.shape[1]))
    chosen = jnp.sort(chosen, axis=1)
    few = jnp.take_along_axis(blocks, chosen[..., None], axis=1).reshape(rows, -1)
    best, places = jax.lax.top_k(few, count)
    block = jnp.take_along_axis(chosen, places // BLOCK, axis=1)
    return best, block * BLOCK + places % BLOCK


def beam_search(
    step: Callable[[jax.Array, jax.Array, Any], tuple[jax.Array, Any]],
    carry: Any,
    reorder: Callable[[Any, jax.Array], Any],
    weigh: Callable[[jax.Array], jax.Array],
    rule: Rule,
    settings: Decoding,
    *,
    searches: int,
    documents: int,
    start_id: int,
    end_id: int,
    pad_id: int,
) -> Found:
    """Finds sequences of high probability.

    Args:
      step: (last tokens int32[R, M], position int32[], carry) -> (log p(. | x, z, y_<t)
        float32[R, K, M, V], carry).
      carry: state before the first step, with rows for R x M hypotheses.
      reorder: (carry, beams int32[R, M]) -> carry whose hypothesis m is the former beams[:, m].
      weigh: log p(y_<t | x, z) float32[R, M, K] -> log of the documents' weights float32[R, M, K]
        in the next token's distribution.
      rule: which tokens may come next.
      settings: num_beams M, max_length T, length_penalty, prefix.
      searches: R.
      documents: K of a search.
      start_id: first input token; it is not part of a hypothesis.
      end_id: ends a hypothesis.
      pad_id: fills it up.
    """
    beams, length = settings.num_beams, settings.max_length
    shape = (searches, beams)

    def running(state: BeamState) -> jax.Array:
        return (state.position < length) & ~state.stopped.all()

    def overtaken(live: Hypotheses, finished: Hypotheses, position: jax.Array) -> jax.Array:
        # Scores are at most 0: the longest (or, for a reward of brevity, the next) length is best.
        at_best = length if settings.search_penalty > 0 else position + 1
        return _rank(live.scores[:, 0], at_best, settings) <= finished.ranks[:, -1]

    def advance(state: BeamState) -> BeamState:
        position, live = state.position, state.live
        last = jnp.where(position == 0, start_id, live.tokens[:, :, jnp.maximum(position - 1, 0)])
        doc_log_p, carry = step(last, position, state.carry)
        log_p = marginal.mixture(weigh(live.doc_log_p.sum(axis=2)), doc_log_p)  # -> [R, M, V]
        # A softmax with one NaN is NaN everywhere: any column shows it.
        broken = jnp.isnan(log_p[:, :, end_id]).any(axis=1)
        log_p = rule(live.tokens, position, log_p)
        vocab = log_p.shape[-1]
        totals = live.scores[:, :, None] + log_p
        # Each live hypothesis has one ending, so 2M candidates always hold M that go on.
        scores, flat = best_of_many(totals.reshape(searches, -1), 2 * beams + 1)
        beyond, scores, flat = scores[:, -1], scores[:, :-1], flat[:, :-1]
        origin, tokens = flat // vocab, flat % vocab
        grown = gather_beams(live, origin)
        rows = jnp.arange(searches)[:, None]
        grown = Hypotheses(
            grown.tokens.at[:, :, position].set(tokens.astype(jnp.int32)),
            scores, _rank(scores, position + 1, settings),
            grown.doc_log_p.at[:, :, position].set(doc_log_p[rows, :, origin, tokens]))
        ends = tokens == end_id
        # An ending counts only among the first M: it beat what the beam goes on with.
        accepted = ends & (jnp.arange(2 * beams) < beams)[None]
        finished, worse, _ = _best(_join(state.finished, _only(grown, accepted)), beams)
        going_on, dropped, chosen = _best(_only(grown, ~ends), beams)
        taken = accepted[:, None, :] & (origin[:, None, :] == jnp.arange(beams)[None, :, None])
        unaccepted = jnp.where(taken.any(axis=2), MASKED, totals[:, :, end_id]).max(axis=1)
        stopped = overtaken(going_on, finished, position + 1)
        unfinished = jnp.maximum(jnp.where(stopped, going_on.scores[:, 0], MASKED),
                                 jnp.maximum(dropped, beyond))
        # What does not end at max_length is no answer.
        unfinished = jnp.where(position + 1 < length, unfinished, MASKED)
        bound = jnp.stack([state.bound, worse, unaccepted, unfinished]).max(axis=0)
        bound = jnp.where(broken, jnp.nan, bound)  # NaN stays in a maximum
        # A search that has stopped waits for the others, and they do not change its bound.
        bound = jnp.where(state.stopped, state.bound, bound)
        return BeamState(position + 1, going_on, finished, state.stopped | stopped, bound,
                         reorder(carry, gather_beams(origin, chosen)))

    first_only = jnp.where(jnp.arange(beams) == 0, 0.0, MASKED).astype(jnp.float32)
    nothing = jnp.full(shape, MASKED, jnp.float32)
    none = Hypotheses(jnp.full((*shape, length), pad_id, jnp.int32), nothing, nothing,
                      jnp.zeros((*shape, length, documents), jnp.float32))
    start = jnp.broadcast_to(first_only, shape)
    initial = BeamState(jnp.zeros((), jnp.int32), none._replace(scores=start, ranks=start), none,
                        jnp.zeros(searches, bool), nothing[:, 0], carry)
    end = jax.lax.while_loop(running, advance, initial)
    both = _join(end.finished, end.live)
    # Both halves are sorted: ended, live, and places that were never filled.
    order = jnp.where(both.scores > MASKED / 2, (jnp.arange(2 * beams) >= beams)[None], 2)
    picked = jnp.argsort(order, axis=1, stable=True)[:, :beams]
    # What a NaN left of the scores may look like an answer of probability 1.
    both = both._replace(doc_log_p=jnp.where(
        jnp.isnan(end.bound)[:, None, None, None], jnp.nan, both.doc_log_p))
    return Found(gather_beams(both, picked), jnp.take_along_axis(order, picked, axis=1) == 0,
                 end.bound)


def _rank(scores: jax.Array, length: jax.Array | int, settings: Decoding) -> jax.Array:
    """Scores with the length penalty for `length` tokens; MASKED stays MASKED."""
    if not settings.search_penalty:
        return scores
    counted = jnp.maximum(length - settings.prefix_length, 1)
    return jnp.where(scores > MASKED / 2, scores / counted**settings.search_penalty, MASKED)


def _only(hypotheses: Hypotheses, kept: jax.Array) -> Hypotheses:
    return hypotheses._replace(scores=jnp.where(kept, hypotheses.scores, MASKED),
                               ranks=jnp.where(kept, hypotheses.ranks, MASKED))


def _join(first: Hypotheses, second: Hypotheses) -> Hypotheses:
    return Hypotheses(*(jnp.concatenate(pair, axis=1) for pair in zip(first, second, strict=True)))


def _best(hypotheses: Hypotheses, count: int) -> tuple[Hypotheses, jax.Array, jax.Array]:
    """The `count` of highest rank, the best score among the others, the places of the `count`."""
    _, order = jax.lax.top_k(hypotheses.ranks, hypotheses.ranks.shape[1])
    picked, others = order[:, :count], order[:, count:]
    return (gather_beams(hypotheses, picked),
            jnp.take_along_axis(hypotheses.scores, others, axis=1).max(axis=1), picked)
