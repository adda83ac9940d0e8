"""Beam search as one pure function over an explicit state; num_beams=1 is greedy search.

R independent searches run side by side, each with M live hypotheses (still growing) and M finished
ones (ended with end_id). A search reads K documents at once and mixes their distributions of the
next token; the log-probability of every token under each document is kept, so that posteriors and
exact scores need no further pass.

The loop stops early once no live hypothesis can overtake the finished ones, whatever the length
penalty: log-probabilities only fall as a hypothesis grows. Meanwhile the search notes the best
score among everything that it dropped, which bounds all that it has not seen.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rag_jax import marginal
from rag_jax.decoding.constraints import Rule
from rag_jax.decoding.settings import Decoding
from rag_jax.marginal import MASKED


class TokenIds(NamedTuple):
    """Tokens with a meaning of their own."""

    start: int  # first input of the decoder; no part of a hypothesis
    end: int  # ends a hypothesis
    pad: int  # fills it up


@dataclasses.dataclass(frozen=True)
class Recursion:
    """What gives the next token's distribution in R searches of K documents each.

    Attributes:
      step: (last tokens int32[R, M], position int32[], carry) -> (log p(. | x, z, y_<t)
        float32[R, K, M, V], carry).
      carry: state before the first step, with rows for R x M hypotheses.
      reorder: (carry, beams int32[R, M]) -> carry whose hypothesis m is the former beams[:, m].
      weigh: log p(y_<t | x, z) float32[R, M, K] -> log of the documents' weights float32[R, M, K]
        in the next token's distribution.
      rule: which tokens may come next.
      searches: R.
      documents: K.
    """

    step: Callable[[jax.Array, jax.Array, Any], tuple[jax.Array, Any]]
    carry: Any
    reorder: Callable[[Any, jax.Array], Any]
    weigh: Callable[[jax.Array], jax.Array]
    rule: Rule
    searches: int
    documents: int


class Hypotheses(NamedTuple):
    """M hypotheses of each search."""

    tokens: jax.Array  # int32[R, M, T], padded with pad_id after end_id
    scores: jax.Array  # float32[R, M], sum of log p (forced tokens 0); MASKED where there is none
    ranks: jax.Array  # float32[R, M], scores with the length penalty
    doc_log_p: jax.Array  # float32[R, M, T, K], log p(y_t | x, z, y_<t); 0 after end_id


class Beams(NamedTuple):
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


class Candidates(NamedTuple):
    """The 2M best continuations of the live hypotheses by one token."""

    grown: Hypotheses  # 2M of each search
    origin: jax.Array  # int32[R, 2M], the live hypothesis that each continues
    ends: jax.Array  # bool[R, 2M], by end_id
    totals: jax.Array  # float32[R, M, V], scores of all continuations
    beyond: jax.Array  # float32[R], the best score that is not among the 2M
    broken: jax.Array  # bool[R], the model gave a NaN
    carry: Any


def gather_beams(tree: Any, beams: jax.Array) -> Any:
    """Picks hypotheses: leaves [R, M, ...] and beams int32[R, m] -> leaves [R, m, ...]."""
    return jax.tree.map(
        lambda x: jnp.take_along_axis(x, beams.reshape(*beams.shape, *[1] * (x.ndim - 2)), axis=1),
        tree)


BLOCK = 128  # scores in a block of `best_of_many`


def best_of_many(scores: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The best of each row's scores, without sorting all.

    The best `count` scores lie in the `count` blocks of highest maximum; among equals the first
    ones win in both steps, since the chosen blocks keep their order. The last block of V scores may
    be short: filling it up would copy all.

    Args:
      scores: float32[R, ..., V].

    Returns:
      float32[R, count] and their places int32[R, count] in a row as one axis, as jax.lax.top_k.
    """
    rows, size = scores.shape[0], scores.shape[-1]
    whole = size // BLOCK
    filled = scores[..., : whole * BLOCK].reshape(*scores.shape[:-1], whole, BLOCK)
    rest = scores[..., whole * BLOCK :].max(axis=-1, keepdims=True, initial=-jnp.inf)
    maxima = jnp.concatenate([filled.max(axis=-1), rest], axis=-1)
    blocks, maxima = maxima.shape[-1], maxima.reshape(rows, -1)
    _, chosen = jax.lax.top_k(maxima, min(count, maxima.shape[1]))
    row, block = jnp.divmod(jnp.sort(chosen, axis=1), blocks)  # of [..., V] in the row of `scores`
    inside = block[..., None] * BLOCK + jnp.arange(BLOCK)[None, None]
    places = row[..., None] * size + jnp.minimum(inside, size - 1)
    places, real = places.reshape(rows, -1), (inside < size).reshape(rows, -1)
    few = jnp.take_along_axis(scores.reshape(rows, -1), places, axis=1)
    best, among = jax.lax.top_k(jnp.where(real, few, -jnp.inf), count)
    return best, jnp.take_along_axis(places, among, axis=1)


def beam_search(recursion: Recursion, settings: Decoding, ids: TokenIds) -> Beams:
    """The sequences of highest probability that a beam of `settings.num_beams` meets.

    Args:
      recursion: the model.
      settings: num_beams M, max_length T, length_penalty, prefix.
      ids: the model's special tokens.
    """
    return best_beams(advance(recursion, settings, ids, first_state(recursion, settings, ids.pad),
                              settings.max_length))


def advance(recursion: Recursion, settings: Decoding, ids: TokenIds, state: BeamState,
            until: jax.Array | int) -> BeamState:
    """The search from this state on, to its end or until hypotheses have so many tokens."""
    def running(state: BeamState) -> jax.Array:
        return (state.position < until) & ~state.stopped.all()

    def grow(state: BeamState) -> BeamState:
        return _keep_best(state, _candidates(recursion, settings, ids, state), settings,
                          recursion.reorder, ids.end)

    return jax.lax.while_loop(running, grow, state)


def best_beams(end: BeamState) -> Beams:
    """What a search has found, or has got so far."""
    both, beams = _join(end.finished, end.live), end.live.scores.shape[1]
    # Both halves are sorted: ended, live, and places that were never filled.
    lives = jnp.int32(jnp.arange(2 * beams) >= beams)
    order = jnp.where(both.scores > MASKED / 2, lives[None], 2)
    picked = jnp.argsort(order, axis=1, stable=True)[:, :beams]
    # What a NaN left of the scores may look like an answer of probability 1.
    both = both._replace(doc_log_p=jnp.where(
        jnp.isnan(end.bound)[:, None, None, None], jnp.nan, both.doc_log_p))
    return Beams(gather_beams(both, picked), jnp.take_along_axis(order, picked, axis=1) == 0,
                 end.bound)


def first_state(recursion: Recursion, settings: Decoding, pad_id: int) -> BeamState:
    """One live hypothesis without tokens in each search."""
    searches, beams, length = recursion.searches, settings.num_beams, settings.max_length
    shape = (searches, beams)
    first_only = jnp.where(jnp.arange(beams) == 0, 0.0, MASKED).astype(jnp.float32)
    nothing = jnp.full(shape, MASKED, jnp.float32)
    none = Hypotheses(jnp.full((*shape, length), pad_id, jnp.int32), nothing, nothing,
                      jnp.zeros((*shape, length, recursion.documents), jnp.float32))
    start = jnp.broadcast_to(first_only, shape)
    return BeamState(jnp.zeros((), jnp.int32), none._replace(scores=start, ranks=start), none,
                     jnp.zeros(searches, bool), nothing[:, 0], recursion.carry)


def _candidates(recursion: Recursion, settings: Decoding, ids: TokenIds, state: BeamState
                ) -> Candidates:
    position, live = state.position, state.live
    last = jnp.where(position == 0, ids.start, live.tokens[:, :, jnp.maximum(position - 1, 0)])
    doc_log_p_RKMV, carry = recursion.step(last, position, state.carry)
    log_p_RMV = marginal.mixture(recursion.weigh(live.doc_log_p.sum(axis=2)), doc_log_p_RKMV)
    # A softmax with one NaN is NaN everywhere: any column shows it.
    broken = jnp.isnan(log_p_RMV[:, :, ids.end]).any(axis=1)
    log_p_RMV = recursion.rule(live.tokens, position, log_p_RMV)
    searches, beams, vocab = log_p_RMV.shape
    totals_RMV = live.scores[:, :, None] + log_p_RMV
    # Each live hypothesis has one ending, so 2M candidates always hold M that go on.
    scores, flat = best_of_many(totals_RMV, 2 * beams + 1)
    beyond, scores, flat = scores[:, -1], scores[:, :-1], flat[:, :-1]  # -> [R, 2M]
    origin, tokens = flat // vocab, flat % vocab
    grown = gather_beams(live, origin)
    rows = jnp.arange(searches)[:, None]
    grown = Hypotheses(
        grown.tokens.at[:, :, position].set(tokens.astype(jnp.int32)),
        scores, _rank(scores, position + 1, settings),
        grown.doc_log_p.at[:, :, position].set(
            doc_log_p_RKMV[rows, :, origin, tokens]))  # [R, 2M, K]
    return Candidates(grown, origin, tokens == ids.end, totals_RMV, beyond, broken, carry)


def _keep_best(state: BeamState, candidates: Candidates, settings: Decoding,
               reorder: Callable[[Any, jax.Array], Any], end_id: int) -> BeamState:
    """The M best of the ended and of the live candidates, and the bound on all that is dropped."""
    grown, origin, ends = candidates.grown, candidates.origin, candidates.ends
    position, beams, length = state.position, settings.num_beams, settings.max_length
    # An ending counts only among the first M: it beat what the beam goes on with.
    accepted = ends & (jnp.arange(2 * beams) < beams)[None]
    finished, worse, _ = _best(_join(state.finished, _only(grown, accepted)), beams)
    live, dropped, chosen = _best(_only(grown, ~ends), beams)
    # -> bool[R, M, 2M], whether an accepted ending is that of live hypothesis m
    taken = accepted[:, None, :] & (origin[:, None, :] == jnp.arange(beams)[None, :, None])
    unaccepted = jnp.where(taken.any(axis=2), MASKED, candidates.totals[:, :, end_id]).max(axis=1)
    # Scores are at most 0: the longest (or, for a reward of brevity, the next) length is best.
    at_best = length if settings.search_penalty > 0 else position + 2
    stopped = _rank(live.scores[:, 0], at_best, settings) <= finished.ranks[:, -1]
    unfinished = jnp.maximum(jnp.where(stopped, live.scores[:, 0], MASKED),
                             jnp.maximum(dropped, candidates.beyond))
    # What does not end at max_length is no answer.
    unfinished = jnp.where(position + 1 < length, unfinished, MASKED)
    bound = jnp.stack([state.bound, worse, unaccepted, unfinished]).max(axis=0)
    bound = jnp.where(candidates.broken, jnp.nan, bound)  # NaN stays in a maximum
    # A search that has stopped waits for the others, and they do not change its bound.
    bound = jnp.where(state.stopped, state.bound, bound)
    return BeamState(position + 1, live, finished, state.stopped | stopped, bound,
                     reorder(candidates.carry, gather_beams(origin, chosen)))


def _rank(scores: jax.Array, length: jax.Array | int, settings: Decoding) -> jax.Array:
    """Scores with the length penalty for `length` tokens; MASKED stays MASKED."""
    if not settings.search_penalty:
        return scores
    counted = jnp.maximum(length - settings.prefix_length, 1).astype(jnp.float32)
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
