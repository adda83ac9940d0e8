"""Beam search as one pure function over an explicit state; num_beams=1 is greedy search.

R independent searches run side by side, each with M live hypotheses, which still grow, and M
finished ones, which ended with end_id. A search reads K documents at once and mixes their
distributions of the next token. It keeps the log-probability of every token under each document, so
that posteriors and exact scores need no further pass.

Log-probabilities only fall as a hypothesis grows, so the loop can stop as soon as no live
hypothesis can overtake the finished ones under the length penalty. For the same reason, the best
score among all that a search has dropped is a bound on every answer that it has not seen.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rag_jax import marginal
from rag_jax.decoding.constraints import Rule
from rag_jax.decoding.settings import Decoding
from rag_jax.marginal import MASKED


class TokenIds(NamedTuple):
    """The special tokens of a generator."""

    start: int  # the decoder's first input, which is no part of a hypothesis
    end: int  # the last token of a finished hypothesis
    pad: int  # follows the end


@dataclasses.dataclass(frozen=True)
class Recursion:
    """The model as R searches of K documents each see it: a distribution of the next token.

    Attributes:
      step: (last tokens int32[R, M], position int32[], carry, running bool[R, M]) -> (log p(. | x,
        z, y_<t) float32[R, K, M, V], which decides nothing where not `running`, carry).
      carry: the state of `step` before the first token, for R x M hypotheses.
      reorder: (carry, beams int32[R, M]) -> carry whose hypothesis m is the former beams[:, m].
      weigh: log p(y_<t | x, z) float32[R, M, K] -> the documents' log weights float32[R, M, K] in
        the distribution of the next token.
      rule: which tokens may come next.
      searches: R.
      documents: K.
    """

    step: Callable[[jax.Array, jax.Array, Any, jax.Array], tuple[jax.Array, Any]]
    carry: Any
    reorder: Callable[[Any, jax.Array], Any]
    weigh: Callable[[jax.Array], jax.Array]
    rule: Rule
    searches: int
    documents: int


class Hypotheses(NamedTuple):
    """M hypotheses of each search."""

    tokens: jax.Array  # int32[R, M, T], padded with pad_id after end_id
    # float32[R, M], the sum of log p, to which forced tokens add 0; MASKED for no hypothesis.
    scores: jax.Array
    ranks: jax.Array  # float32[R, M], the scores with the length penalty
    doc_log_p: jax.Array  # float32[R, M, T, K], log p(y_t | x, z, y_<t); 0 after end_id


class Beams(NamedTuple):
    """The M best hypotheses: finished ones by rank, then live ones, cut at max_length."""

    hypotheses: Hypotheses
    finished: jax.Array  # bool[R, M], whether they ended with end_id
    # float32[R]: no other ended answer of at most max_length tokens scores above this. Where the
    # model returned a NaN, this is NaN, and so is all of doc_log_p: no hypothesis has a meaning.
    bound: jax.Array


class BeamState(NamedTuple):
    """A search between two steps."""

    position: jax.Array  # int32[], the number of tokens so far
    live: Hypotheses
    finished: Hypotheses
    stopped: jax.Array  # bool[R], whether no live hypothesis can overtake the finished ones
    bound: jax.Array  # float32[R], the best score among all that was dropped before it stopped
    carry: Any  # the state of `Recursion.step`, in the order of the live hypotheses


def gather_beams(tree: Any, beams: jax.Array) -> Any:
    """Selects hypotheses: leaves [R, M, ...] and beams int32[R, m] -> leaves [R, m, ...]."""
    return jax.tree.map(
        lambda x: jnp.take_along_axis(x, beams.reshape(*beams.shape, *[1] * (x.ndim - 2)), axis=1),
        tree)


BLOCK = 128  # scores in a block of `best_of_many`


def best_of_many(scores: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The `count` best scores of each row, as jax.lax.top_k finds them, but without sorting all.

    They are in the `count` blocks with the highest maxima. Among equal scores the first ones win,
    as the chosen blocks keep their order. The last block of V scores may be short, because padding
    it would copy all scores.

    Args:
      scores: float32[R, ..., V].

    Returns:
      The scores float32[R, count], and their places int32[R, count] in the row as one axis.
    """
    rows, size = scores.shape[0], scores.shape[-1]
    whole = size // BLOCK
    filled = scores[..., : whole * BLOCK].reshape(*scores.shape[:-1], whole, BLOCK)
    rest = scores[..., whole * BLOCK :].max(axis=-1, keepdims=True, initial=-jnp.inf)
    maxima = jnp.concatenate([filled.max(axis=-1), rest], axis=-1)
    blocks, maxima = maxima.shape[-1], maxima.reshape(rows, -1)
    _, chosen = jax.lax.top_k(maxima, min(count, maxima.shape[1]))
    # `row` counts the rows of V scores that a row of `scores` [..., V] has.
    row, block = jnp.divmod(jnp.sort(chosen, axis=1), blocks)
    inside = block[..., None] * BLOCK + jnp.arange(BLOCK)[None, None]
    places = row[..., None] * size + jnp.minimum(inside, size - 1)
    places, real = places.reshape(rows, -1), (inside < size).reshape(rows, -1)
    candidates = jnp.take_along_axis(scores.reshape(rows, -1), places, axis=1)
    best, order = jax.lax.top_k(jnp.where(real, candidates, -jnp.inf), count)
    return best, jnp.take_along_axis(places, order, axis=1)


def beam_search(recursion: Recursion, settings: Decoding, ids: TokenIds) -> Beams:
    """The best answers that a search with `settings.num_beams` = M beams finds.

    Args:
      recursion: the model.
      settings: num_beams, max_length T, length_penalty and prefix are used; rules are in
        `recursion.rule`.
      ids: the model's special tokens.
    """
    return best_beams(advance(recursion, settings, ids, first_state(recursion, settings, ids.pad),
                              settings.max_length))


def advance(recursion: Recursion, settings: Decoding, ids: TokenIds, state: BeamState,
            until: jax.Array | int) -> BeamState:
    """Continues a search to its end, or until hypotheses have `until` tokens."""
    def running(state: BeamState) -> jax.Array:
        return (state.position < until) & ~state.stopped.all()

    return jax.lax.while_loop(
        running, functools.partial(_grown, recursion, settings, ids), state)


def best_beams(end: BeamState) -> Beams:
    """The best hypotheses of a search, at its end or before."""
    both, beams = _join(end.finished, end.live), end.live.scores.shape[1]
    # Both halves are sorted by rank: 0 = finished, 1 = live, 2 = no hypothesis.
    lives = jnp.int32(jnp.arange(2 * beams) >= beams)
    group = jnp.where(both.scores > MASKED / 2, lives[None], 2)
    picked = jnp.argsort(group, axis=1, stable=True)[:, :beams]
    # After a NaN, a hypothesis may look like an answer of probability 1.
    both = both._replace(doc_log_p=jnp.where(
        jnp.isnan(end.bound)[:, None, None, None], jnp.nan, both.doc_log_p))
    return Beams(gather_beams(both, picked), jnp.take_along_axis(group, picked, axis=1) == 0,
                 end.bound)


def first_state(recursion: Recursion, settings: Decoding, pad_id: int) -> BeamState:
    """The state of searches with one live hypothesis each, which has no tokens."""
    searches, beams, length = recursion.searches, settings.num_beams, settings.max_length
    shape = (searches, beams)
    first_only = jnp.where(jnp.arange(beams) == 0, 0.0, MASKED).astype(jnp.float32)
    nothing = jnp.full(shape, MASKED, jnp.float32)
    none = Hypotheses(jnp.full((*shape, length), pad_id, jnp.int32), nothing, nothing,
                      jnp.zeros((*shape, length, recursion.documents), jnp.float32))
    start = jnp.broadcast_to(first_only, shape)
    return BeamState(jnp.zeros((), jnp.int32), none._replace(scores=start, ranks=start), none,
                     jnp.zeros(searches, bool), nothing[:, 0], recursion.carry)


def _grown(recursion: Recursion, settings: Decoding, ids: TokenIds, state: BeamState
           ) -> BeamState:
    """The next state, by one step of the model: the M best finished and live hypotheses among the
    2M best continuations by one token, and the bound on all others."""
    position, live, length = state.position, state.live, settings.max_length
    last = jnp.where(position == 0, ids.start, live.tokens[:, :, jnp.maximum(position - 1, 0)])
    running = jnp.broadcast_to(~state.stopped[:, None], last.shape)
    doc_log_p_RKMV, carry = recursion.step(last, position, state.carry, running)
    log_p_RMV = marginal.mixture(recursion.weigh(live.doc_log_p.sum(axis=2)), doc_log_p_RKMV)
    # A softmax with one NaN is NaN everywhere, so one column is enough to find it.
    broken = jnp.isnan(log_p_RMV[:, :, ids.end]).any(axis=1)
    log_p_RMV = recursion.rule(live.tokens, position, log_p_RMV)
    searches, beams, vocab = log_p_RMV.shape
    totals_RMV = live.scores[:, :, None] + log_p_RMV
    # Each of M live hypotheses has one continuation that ends, so M of 2M candidates do not end.
    scores, flat = best_of_many(totals_RMV, 2 * beams + 1)
    beyond, scores, flat = scores[:, -1], scores[:, :-1], flat[:, :-1]  # -> [R, 2M]
    origin, tokens = flat // vocab, flat % vocab  # of each, the live hypothesis and the new token
    grown = gather_beams(live, origin)
    rows = jnp.arange(searches)[:, None]
    grown = Hypotheses(
        grown.tokens.at[:, :, position].set(tokens.astype(jnp.int32)),
        scores, _rank(scores, position + 1, settings),
        grown.doc_log_p.at[:, :, position].set(
            doc_log_p_RKMV[rows, :, origin, tokens]))  # [R, 2M, K]
    # An ending is accepted only among the first M candidates: it then scores above the worst live
    # hypothesis that the beam keeps.
    ends = tokens == ids.end
    accepted = ends & (jnp.arange(2 * beams) < beams)[None]
    finished, worse, _ = _best(_join(state.finished, _only(grown, accepted)), beams)
    live, dropped, chosen = _best(_only(grown, ~ends), beams)
    # bool[R, M, 2M]: whether the candidate is an accepted ending of live hypothesis m.
    taken = accepted[:, None, :] & (origin[:, None, :] == jnp.arange(beams)[None, :, None])
    unaccepted = jnp.where(taken.any(axis=2), MASKED, totals_RMV[:, :, ids.end]).max(axis=1)
    # As scores are at most 0, a rank is best at the greatest length, or, if the penalty is not
    # above 0, at the next one.
    at_best = length if settings.search_penalty > 0 else position + 2
    stopped = _rank(live.scores[:, 0], at_best, settings) <= finished.ranks[:, -1]
    unfinished = jnp.maximum(jnp.where(stopped, live.scores[:, 0], MASKED),
                             jnp.maximum(dropped, beyond))
    # At max_length, what has not ended can no longer become an answer.
    unfinished = jnp.where(position + 1 < length, unfinished, MASKED)
    bound = jnp.stack([state.bound, worse, unaccepted, unfinished]).max(axis=0)
    bound = jnp.where(broken, jnp.nan, bound)  # NaN stays in a maximum
    # A search that has stopped waits for the others; its bound no longer changes.
    bound = jnp.where(state.stopped, state.bound, bound)
    return BeamState(position + 1, live, finished, state.stopped | stopped, bound,
                     recursion.reorder(carry, gather_beams(origin, chosen)))


def _rank(scores: jax.Array, length: jax.Array | int, settings: Decoding) -> jax.Array:
    """Scores with the length penalty for `length` tokens; MASKED stays MASKED."""
    if not settings.search_penalty:
        return scores
    counted = jnp.maximum(length - settings.prefix_length, 1).astype(jnp.float32)
    return jnp.where(scores > MASKED / 2, scores / counted**settings.search_penalty, MASKED)


def _only(hypotheses: Hypotheses, kept: jax.Array) -> Hypotheses:
    """The hypotheses where `kept`; elsewhere there is none."""
    return hypotheses._replace(scores=jnp.where(kept, hypotheses.scores, MASKED),
                               ranks=jnp.where(kept, hypotheses.ranks, MASKED))


def _join(first: Hypotheses, second: Hypotheses) -> Hypotheses:
    """The hypotheses of both, along the axis M."""
    return Hypotheses(*(jnp.concatenate(pair, axis=1) for pair in zip(first, second, strict=True)))


def _best(hypotheses: Hypotheses, count: int) -> tuple[Hypotheses, jax.Array, jax.Array]:
    """The `count` hypotheses of highest rank, the best score of the others, and the places of the
    former."""
    _, order = jax.lax.top_k(hypotheses.ranks, hypotheses.ranks.shape[1])
    picked, others = order[:, :count], order[:, count:]
    return (gather_beams(hypotheses, picked),
            jnp.take_along_axis(hypotheses.scores, others, axis=1).max(axis=1), picked)
