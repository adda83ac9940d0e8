"""The most probable answer, with proof: best-first search over prefixes.

The probability of a prefix bounds that of everything that begins with it. Expanding the most
probable prefixes first, and dropping those below the best answer found, ends with that answer
proved best, or with the node budget spent. The heap lives on the host; prefixes are expanded some
at a time on the device.
"""

import dataclasses
import functools
import heapq
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rag_jax import marginal
from rag_jax.decoding import documents as documents_module
from rag_jax.decoding.answer import decode_by
from rag_jax.decoding.constraints import make_rule
from rag_jax.decoding.documents import Documents
from rag_jax.decoding.mixture import weights
from rag_jax.decoding.results import MARGIN, Decoded, Ranked
from rag_jax.decoding.scoring import score
from rag_jax.decoding.settings import Decoding
from rag_jax.models import rag
from rag_jax.models.layers import MASKED
from rag_jax.types import Batch, Params


class Exact(NamedTuple):
    """Host arrays."""

    ranked: Ranked  # one answer to each question
    prior: np.ndarray  # float32[B, K]
    certified: np.ndarray  # bool[B], no answer of max_length tokens is more probable
    expanded: np.ndarray  # int[B], prefixes that the best-first search has expanded


@functools.cache
def _decode(model: rag.RagModel, settings: Decoding, jit: Any) -> Any:
    return jit(functools.partial(decode_by, model, settings))


@functools.cache
def _read(model: rag.RagModel, jit: Any) -> Any:
    return jit(functools.partial(documents_module.read, model))


@functools.cache
def _grow(model: rag.RagModel, settings: Decoding, jit: Any) -> Any:
    return jit(functools.partial(_expand, model, settings))


@functools.cache
def _score(model: rag.RagModel, memory_mib: int, jit: Any) -> Any:
    return jit(functools.partial(score, model, memory_mib=memory_mib))


def exact(model: rag.RagModel, settings: Decoding, params: Params, batch: Batch,
          node_budget: int = 1000, width: int = 16, start: Decoded | None = None,
          jit: Any = jax.jit) -> Exact:
    """The most probable ended answer of at most max_length tokens to every question.

    Args:
      model, params, batch: as in `decode_by`.
      settings: rules and lengths, length_penalty 0, no forced </s>, no sampling; num_beams and
        strategy serve for the first guess.
      node_budget: prefixes to expand per question at most.
      width: prefixes that are expanded together.
      start: what `decode_by` found with these settings; None = found here.
      jit: jax.jit or the like.

    Returns:
      The answers; where the budget was spent first, the best one found so far, not certified.

    Raises:
      ValueError: settings under which probability does not decide.
    """
    if not settings.certifiable:
        raise ValueError("exact decoding needs length_penalty=0, forced_eos=False, sample=False: "
                         "only then does the answer's probability decide")
    if node_budget < 0 or width < 1:
        raise ValueError(f"node_budget={node_budget}, width={width}: at least 0 and 1")
    if start is None:
        start = _decode(model, settings, jit)(params, batch)
    start = jax.device_get(start)
    tokens, certified = np.array(start.tokens), np.array(start.certified)
    expanded = np.zeros(len(tokens), int)
    open_ones = np.flatnonzero(~certified & start.ranked.valid[:, 0])
    if len(open_ones) and node_budget:
        documents = _read(model, jit)(params, batch)
        # Beams play no part in the expansion: one program whatever their number.
        grow = _grow(model, dataclasses.replace(
            settings, strategy="thorough", num_beams=1, num_return_sequences=1), jit)
        prior = np.asarray(documents.log_prior)
        for question in open_ones:
            search = _Search(model, settings, prior[question], width, functools.partial(
                grow, params, documents, np.int32(question)))
            search.run(node_budget, _known(start, question, model, settings))
            certified[question], expanded[question] = search.proved, search.expanded
            if search.answer is not None:
                tokens[question] = model.pad_id
                tokens[question, : len(search.answer)] = search.answer
    ranked = jax.tree.map(lambda leaf: leaf[:, :1], start.ranked)
    if (tokens != start.tokens).any():
        rescored = _score(model, settings.memory_mib, jit)(params, documents, tokens[:, None])
        ranked = jax.device_get(rescored)._replace(valid=ranked.valid)
    return Exact(ranked, start.prior, certified, expanded)


def _known(start: Decoded, question: int, model: rag.RagModel, settings: Decoding
           ) -> tuple[float, tuple[int, ...]] | None:
    """The best ended answer found by the beam with its score, forced tokens at no cost."""
    if not (start.finished[question] and start.ranked.valid[question, 0]):
        return None
    row = start.tokens[question].tolist()
    free = settings.prefix_length or int(settings.forced_bos is not None)
    score = float(start.token_log_p[question][free:].astype(np.float64).sum())
    return score, tuple(row[: row.index(model.end_id) + 1])


def _expand(model: rag.RagModel, settings: Decoding, params: Params, documents: Documents,
            question: jax.Array, prefixes: jax.Array, lengths: jax.Array, said: jax.Array
            ) -> tuple[jax.Array, jax.Array]:
    """Next tokens of P prefixes of one question.

    Args:
      prefixes: int32[P, T], of `lengths` int32[P] tokens.
      said: float32[P, K], log p(prefix | x, z).

    Returns:
      log p(. | x, prefix) float32[P, V] under the rules, log p(. | x, z, prefix) float32[P, K, V].
    """
    passages = documents.log_prior.shape[1]
    layers, mask = jax.tree.map(
        lambda x: jax.lax.dynamic_slice_in_dim(x, question * passages, passages),
        (documents.layers, documents.mask))
    log_prior = jax.lax.dynamic_slice_in_dim(documents.log_prior, question, 1)
    own = documents._replace(log_prior=log_prior, layers=layers, mask=mask)
    inputs = rag.shift_right(prefixes, model.start_id)
    inputs = jnp.broadcast_to(inputs[None], (passages, *inputs.shape))
    states = documents_module.states(model, params, own, inputs).reshape(*inputs.shape, -1)
    last = jnp.take_along_axis(states, lengths[None, :, None, None], axis=2)[:, :, 0]
    log_p = documents_module.log_probs(model, params, last)  # -> [K, P, V]
    mixed = marginal.mixture(weights(model.kind, own.log_prior)(said[None]), log_p[None])[0]
    rule = make_rule(settings, model.end_id)
    allowed = jax.vmap(lambda *row: rule(row[0][None, None], row[1], row[2][None, None])[0, 0])
    return allowed(prefixes, lengths, mixed), log_p.swapaxes(0, 1)


class _Search:
    """Best-first search for one question's answer."""

    def __init__(self, model: rag.RagModel, settings: Decoding, prior: np.ndarray, width: int,
                 expand: Any):
        self.end, self.length, self.width = model.end_id, settings.max_length, width
        self.pad, self.expand = model.pad_id, expand
        # Entries: (-score, tokens, log p(tokens | x, z) of every document).
        self.heap: list[tuple[float, tuple[int, ...], tuple[float, ...]]] = [
            (0.0, (), (0.0,) * len(prior))]
        self.left = -np.inf  # best score of what was left out of the heap
        self.score, self.answer = -np.inf, None
        self.expanded = 0

    def run(self, budget: int, known: tuple[float, tuple[int, ...]] | None) -> None:
        if known is not None:
            self.score, self.answer = known
        while self.heap and not self.proved and self.expanded < budget:
            count = min(self.width, budget - self.expanded, len(self.heap))
            picked = [heapq.heappop(self.heap) for _ in range(count)]
            hopeful = [node for node in picked if -node[0] > self.score - MARGIN]
            self._grow(hopeful, budget - self.expanded)

    @property
    def proved(self) -> bool:
        """Nothing that is left can hold a more probable answer."""
        best = max(self.left, -self.heap[0][0] if self.heap else -np.inf)
        return self.answer is not None and best <= self.score - MARGIN

    def _grow(self, nodes: list, most: int) -> None:
        """Expands nodes; of each no more children are kept than can ever be expanded."""
        self.expanded += len(nodes)
        prefixes = np.full((self.width, self.length), self.pad, np.int32)
        lengths = np.zeros(self.width, np.int32)
        said = np.zeros((self.width, len(nodes[0][2])), np.float32)
        for row, (_, tokens, under) in enumerate(nodes):
            prefixes[row, : len(tokens)] = tokens
            lengths[row], said[row] = len(tokens), under
        log_p, doc_log_p = (np.asarray(x) for x in self.expand(prefixes, lengths, said))
        for row, (negative, tokens, under) in enumerate(nodes):
            totals = log_p[row].astype(np.float64) - negative
            if totals[self.end] > self.score and log_p[row, self.end] > MASKED / 2:
                self.score, self.answer = totals[self.end], (*tokens, self.end)
            if len(tokens) + 1 == self.length:
                continue  # what is longer is no answer
            hopeful = (totals > self.score - MARGIN) & (log_p[row] > MASKED / 2)
            hopeful[self.end] = False
            children = np.flatnonzero(hopeful)
            children = children[np.argsort(-totals[children], kind="stable")]
            self.left = max(self.left, totals[children[most:]].max(initial=-np.inf))
            for token in children[:most].tolist():
                said_now = tuple((np.array(under) + doc_log_p[row, :, token]).tolist())
                heapq.heappush(self.heap, (-totals[token], (*tokens, token), said_now))
