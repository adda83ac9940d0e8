"""The most probable answer, with a proof: best-first search over prefixes.

The probability of a prefix bounds that of every answer that begins with it. The search expands the
most probable prefixes first and drops those below the best answer found, until that answer is
proved best or the node budget is spent. The queue is on the host; the device expands several
prefixes at a time, as many as fit the memory budget. Questions are searched one after another, so
that the documents of only one are encoded at a time.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rag_jax import marginal
from rag_jax.decoding import documents as documents_module
from rag_jax.decoding.answer import decode
from rag_jax.decoding.constraints import make_rule
from rag_jax.decoding.documents import Documents
from rag_jax.decoding.memory import answers_that_fit
from rag_jax.decoding.mixture import weights
from rag_jax.decoding.results import NOT_FINITE, Decoded, Ranked, ScoreError, margin
from rag_jax.decoding.scoring import score
from rag_jax.decoding.settings import PROGRAMS, Decoding
from rag_jax.marginal import MASKED
from rag_jax.models import rag, teacher_forcing
from rag_jax.types import Batch, Params

NEEDS = ("exact decoding needs length_penalty=0, forced_eos=False, sample=False: only then does "
         "the answer's probability decide; and towers of dtype=float32, whose sums prove it, on "
         "accelerators with JAX_DEFAULT_MATMUL_PRECISION=highest")


@functools.lru_cache(PROGRAMS)
def _program(jit: Any, function: Callable, *static: Any, **settings: Any) -> Any:
    """`function`, jitted, with its first and its keyword arguments fixed."""
    return jit(functools.partial(function, *static, **settings))


def exact(model: rag.RagModel, settings: Decoding, params: Params, batch: Batch,
          node_budget: int = 1000, width: int = 16, start: Decoded | None = None,
          jit: Any = jax.jit) -> Decoded:
    """The most probable ended answer of at most max_length tokens to every question.

    Args:
      model, params, batch: as in `decode`; rows of weight 0 are not searched.
      settings: such that `settings.certifies(model)`; num_beams and strategy are those of the
        search for a first guess.
      node_budget: the most prefixes to expand for a question.
      width: prefixes that are expanded together, if they fit settings.memory_mib.
      start: the result of `decode` with these settings; None = it is computed first.
      jit: jax.jit, or a function like it.

    Returns:
      One answer to each question, in host arrays. Where the budget was spent first, it is the best
      one found so far and is not certified. The bound holds for all that neither search found.

    Raises:
      ValueError: under these settings the probability does not decide, or node_budget or width is
        too small.
      ScoreError: the model's scores are not finite.
    """
    if not settings.certifies(model):
        raise ValueError(NEEDS)
    if node_budget < 0 or width < 1:
        raise ValueError(f"node_budget={node_budget}, width={width}: at least 0 and 1")
    if start is None:
        start = _program(jit, decode, model, settings)(params, batch)
    start, batch = jax.device_get((start, batch))
    best = jax.tree.map(lambda leaf: np.array(leaf[:, :1]), start.ranked)
    certified, bound = np.array(start.certified), np.array(start.bound)
    expanded = np.zeros(len(certified), int)
    open_ones = ~certified & (start.prior > 0).any(axis=1) & (batch.weight > 0)
    open_ones &= np.isfinite(start.ranked.log_p[:, 0])  # `results.faults` names the others
    for question in np.flatnonzero(open_ones) if node_budget else ():
        row = slice(question, question + 1)
        search, answer = _search_one(
            model, settings, params, jax.tree.map(lambda leaf, row=row: leaf[row], batch),
            jax.tree.map(lambda leaf, row=row: leaf[row], best), node_budget, width, jit)
        for leaf, value in zip(best, answer, strict=True):
            leaf[row] = value
        certified[question], expanded[question] = search.proved, search.expanded
        bound[question] = min(bound[question], search.bound)
    return Decoded(best, start.prior, certified, bound, expanded)


def _search_one(model: rag.RagModel, settings: Decoding, params: Params, batch: Batch,
                guess: Ranked, node_budget: int, width: int, jit: Any) -> tuple["_Search", Ranked]:
    """The finished search for a batch of one question, and the best answer found."""
    documents = _program(jit, documents_module.read, model)(params, batch)

    def scored(tokens: np.ndarray) -> Ranked:
        scoring = _program(jit, score, model, memory_mib=settings.memory_mib)
        ranked = scoring(params, documents, tokens)
        return jax.device_get(ranked)

    if model.kind == "sequence" and settings.strategy == "fast" and guess.valid[0, 0]:
        guess = scored(guess.tokens)  # fast decoding sums over some documents only
    # Settings that only concern beams are set alike, so that one program serves all of them.
    grow = _program(jit, _expand, model, dataclasses.replace(
        settings, strategy="thorough", num_beams=1, num_return_sequences=1))
    width = answers_that_fit(model, settings.memory_mib, len(documents.mask), width,
                             settings.max_length, documents.mask.shape[1])
    search = _Search(model, settings, documents.log_prior.shape[1], width,
                     functools.partial(grow, params, documents))
    known = _known(guess, model, settings)
    search.run(node_budget, known)
    if search.answer is None or (known is not None and search.answer == known[1]):
        return search, guess
    tokens = np.full_like(guess.tokens, model.pad_id)
    tokens[0, 0, : len(search.answer)] = search.answer
    return search, scored(tokens)


def _known(guess: Ranked, model: rag.RagModel, settings: Decoding
           ) -> tuple[float, tuple[int, ...]] | None:
    """The score of a guess without its forced tokens, and its tokens; None if it has not ended, or
    there is none."""
    if not guess.finished[0, 0] or not guess.valid[0, 0]:
        return None
    row = guess.tokens[0, 0].tolist()
    score = float(guess.token_log_p[0, 0, settings.forced_first :].astype(np.float64).sum())
    return score, tuple(row[: row.index(model.end_id) + 1])


def _expand(model: rag.RagModel, settings: Decoding, params: Params, documents: Documents,
            prefixes: jax.Array, lengths: jax.Array, doc_scores: jax.Array
            ) -> tuple[jax.Array, jax.Array]:
    """The distributions of the next token after P prefixes, for the one question of `documents`.

    Args:
      prefixes: int32[P, T].
      lengths: int32[P], their numbers of tokens.
      doc_scores: float32[P, K], log p(prefix | x, z).

    Returns:
      log p(. | x, prefix) float32[P, V], MASKED where the rules forbid a token, and
      log p(. | x, z, prefix) float32[P, K, V].
    """
    passages = documents.log_prior.shape[1]
    inputs_PT = teacher_forcing.shift_right(prefixes, model.start_id)
    inputs_KPT = jnp.broadcast_to(inputs_PT[None], (passages, *inputs_PT.shape))
    states_RTD = documents_module.states(model, params, documents, inputs_KPT)
    states_KPTD = states_RTD.reshape(*inputs_KPT.shape, -1)
    last_KPD = jnp.take_along_axis(states_KPTD, lengths[None, :, None, None], axis=2)[:, :, 0]
    log_p_KPV = documents_module.log_probs(model, params, last_KPD)
    log_weights = weights(model.kind, documents.log_prior)(doc_scores[None])
    log_p_PV = marginal.mixture(log_weights, log_p_KPV[None])[0]
    rule = make_rule(settings, model.end_id)

    def allowed(tokens: jax.Array, position: jax.Array, log_p: jax.Array) -> jax.Array:
        return rule(tokens[None, None], position, log_p[None, None])[0, 0]

    return jax.vmap(allowed)(prefixes, lengths, log_p_PV), log_p_KPV.swapaxes(0, 1)


class _Search:
    """Best-first search for one question's answer."""

    def __init__(self, model: rag.RagModel, settings: Decoding, documents: int, width: int,
                 expand: Any):
        self.end, self.length, self.width = model.end_id, settings.max_length, width
        self.pad, self.expand = model.pad_id, expand
        # Prefixes, best first: (-score, tokens, log p(tokens | x, z) for every document).
        self.queue: list[tuple[float, tuple[int, ...], tuple[float, ...]]] = [
            (0.0, (), (0.0,) * documents)]
        self.left = -np.inf  # the best score of a prefix that was left out of the queue
        self.score, self.answer = -np.inf, None
        self.expanded = 0

    def run(self, budget: int, known: tuple[float, tuple[int, ...]] | None) -> None:
        """Searches from the score and tokens of a known answer, if any, until its answer is proved
        or `budget` prefixes are expanded."""
        if known is not None:
            self.score, self.answer = known
        while self.queue and not self.proved and self.expanded < budget:
            count = min(self.width, budget - self.expanded)
            picked, self.queue = self.queue[:count], self.queue[count:]
            hopeful = [node for node in picked if -node[0] > self.least]
            self.expanded += len(hopeful)
            self._grow(hopeful, budget - self.expanded)

    @property
    def bound(self) -> float:
        """An upper bound on the scores of all answers that were not found."""
        return max(self.left, -self.queue[0][0] if self.queue else -np.inf, self.least)

    @property
    def least(self) -> float:
        """What scores below this is surely less probable than the best answer found."""
        return self.score - margin(self.score, self.length)

    @property
    def proved(self) -> bool:
        """Whether no other answer can score above the one found."""
        return self.answer is not None and self.bound <= self.least

    def _grow(self, nodes: list, most: int) -> None:
        """Expands nodes and keeps the `most` best prefixes, as no more can ever be expanded."""
        prefixes = np.full((self.width, self.length), self.pad, np.int32)
        lengths = np.zeros(self.width, np.int32)
        doc_scores = np.zeros((self.width, len(nodes[0][2])))
        for row, (_, tokens, scores) in enumerate(nodes):
            prefixes[row, : len(tokens)] = tokens
            lengths[row], doc_scores[row] = len(tokens), scores
        log_p, doc_log_p = (np.asarray(x)[: len(nodes)] for x in self.expand(
            prefixes, lengths, doc_scores.astype(np.float32)))
        if not np.isfinite(doc_log_p[:, :, self.end]).all():
            raise ScoreError(f"exact search: the scores are not finite: {NOT_FINITE}")
        totals = log_p - np.array([node[0] for node in nodes])[:, None]
        for row in np.flatnonzero(log_p[:, self.end] > MASKED / 2):
            if totals[row, self.end] > self.score:
                self.score, self.answer = totals[row, self.end], (*nodes[row][1], self.end)
        hopeful = (totals > self.least) & (log_p > MASKED / 2)
        hopeful[:, self.end] = False
        hopeful[lengths[: len(nodes)] + 1 == self.length] = False  # its answers are too long
        rows, children = np.nonzero(hopeful)
        best_first = np.argsort(-totals[rows, children], kind="stable")
        self._leave_out(totals[rows, children][best_first[most:]])
        rows, children = rows[best_first[:most]], children[best_first[:most]]
        longer = doc_scores[rows] + doc_log_p[rows, :, children]
        new = zip(totals[rows, children].tolist(), rows.tolist(), children.tolist(),
                  longer.tolist(), strict=True)
        self.queue += [(-total, (*nodes[row][1], token), tuple(scores))
                       for total, row, token, scores in new]
        self.queue.sort()
        self._leave_out(-np.array([node[0] for node in self.queue[most:]]))
        del self.queue[most:]

    def _leave_out(self, scores: np.ndarray) -> None:
        """Notes the scores of prefixes that are dropped, which a proof has to consider."""
        self.left = max(self.left, scores.max(initial=-np.inf))
