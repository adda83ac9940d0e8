"""RAG-Sequence by a beam search for each document (section 2.5): thorough and fast decoding.

Thorough decoding scores every distinct hypothesis under every document of its question, except
where this cannot change the answers. A hypothesis in a document's own beam has its score already.
Under a document whose beam lacks it, it has at most the probability of that beam's bound, which
often proves that it is not among the answers.

Fast decoding needs no pass after the beams: a document whose beam lacks a hypothesis gives it
probability 0.

Both rank hypotheses by sum_z p(z | x) p(y | x, z), without the first tokens if these are forced,
since all hypotheses share them. As in the beam search, hypotheses that ended come before those that
are cut at max_length, whose probability is that of all their continuations together.
"""

import jax
import jax.numpy as jnp

from rag_jax.decoding.documents import Documents, target_log_probs
from rag_jax.decoding.mixture import search
from rag_jax.decoding.results import Decoded, certify, explain, margin, rank, until_end
from rag_jax.decoding.scoring import score_pairs
from rag_jax.decoding.settings import Decoding
from rag_jax.marginal import MASKED
from rag_jax.models import rag
from rag_jax.types import Params


def decode(model: rag.RagModel, params: Params, documents: Documents, settings: Decoding
           ) -> Decoded:
    """The best hypotheses of all beams, ranked by the probability under the whole model."""
    log_prior = documents.log_prior
    questions, passages = log_prior.shape
    width, count = settings.num_beams, settings.num_return_sequences
    beams = search(model, params, documents, settings)
    own = beams.hypotheses
    real = log_prior > MASKED / 2
    valid = (own.scores.reshape(questions, passages, width) > MASKED / 2) & real[..., None]
    valid = valid.reshape(questions, -1)  # -> [B, A], A = K*M
    candidates = own.tokens.reshape(questions, passages * width, -1)  # -> [B, A, T]
    mask = until_end(candidates, model.end_id)
    distinct, in_beam = _compare(candidates, valid)
    in_beam = in_beam.reshape(questions, -1, passages, width).swapaxes(1, 2)  # -> [B, K, A, M]
    known = in_beam.any(axis=-1)  # [B, K, A], whether the document's own beam has the candidate
    own_log_p = own.doc_log_p[..., 0].reshape(questions, passages, width, -1)  # -> [B, K, M, T]
    log_p = jnp.take_along_axis(own_log_p, in_beam.argmax(axis=-1)[..., None], axis=2)
    ends = (candidates == model.end_id).any(axis=-1)
    forced_log_p = jnp.zeros((questions, 1))
    if settings.length_penalty and settings.forced_first:  # a beam may be empty, and not know it
        forced = jnp.array(settings.prefix or [settings.forced_bos], jnp.int32)
        forced = jnp.broadcast_to(forced, (questions * passages, 1, len(forced)))
        each = target_log_probs(model, params, documents, forced).sum(axis=-1)  # -> [R, 1]
        forced_log_p = _total(log_prior, each.reshape(questions, passages, 1))

    def ranks(log_p: jax.Array) -> jax.Array:
        """Ranks [B, A] from log p(y | x, z) [B, K, A]."""
        return rank(_total(log_prior, log_p) - forced_log_p, candidates, settings, model.end_id)

    if settings.strategy == "fast":
        impossible = jnp.where(jnp.arange(log_p.shape[-1]) == 0, MASKED, 0.0)
        log_p = jnp.where(known[..., None], log_p, impossible[None, None, None])
    else:
        log_p = jnp.where(known[..., None], log_p, 0.0)
        bound = beams.bound.reshape(log_prior.shape)[..., None]
        most = jnp.where(ends[:, None], bound, 0.0)
        lower, upper = (ranks(jnp.where(known, log_p.sum(axis=-1), other))
                        for other in (MASKED, most))
        distinct &= _hopeful(lower, upper, distinct, ends, count, settings.max_length)
        needed = distinct[:, None] & real[..., None] & ~known
        log_p = score_pairs(model, params, documents, candidates, mask, needed, log_p,
                            settings.memory_mib)

    broken = (jnp.isnan(beams.bound).reshape(log_prior.shape) & real).any(axis=1)
    log_p = jnp.where(broken[:, None, None, None], jnp.nan, log_p)
    group = jnp.where(distinct, jnp.where(ends, 0, 1), 2)
    order = jnp.lexsort((-ranks(log_p.sum(axis=-1)), group), axis=-1)
    best = order[:, :count]
    row = jnp.arange(questions)[:, None]
    ranked = explain("sequence", log_prior, candidates[row, best], mask[row, best],
                     log_p.transpose(0, 2, 3, 1)[row, best], distinct[row, best], model.end_id)
    certified, bound = _certify(model, settings, documents, ranked.log_p[:, 0],
                                (group[row, best] == 0)[:, 0], beams.bound)
    return Decoded(ranked, documents.prior, certified, bound)


def _total(log_prior: jax.Array, log_p: jax.Array) -> jax.Array:
    """log p(y | x) float32[B, A] from log p(z | x) [B, K] and log p(y | x, z) [B, K, A]."""
    return jax.nn.logsumexp(log_prior[..., None] + log_p, axis=1)


def _hopeful(lower: jax.Array, upper: jax.Array, distinct: jax.Array, ends: jax.Array, count: int,
             tokens: int) -> jax.Array:
    """Whether candidates of up to so many tokens can be among the `count` best, bool[B, A], by
    bounds on their ranks."""
    ended = distinct & ends
    best = jax.lax.top_k(jnp.where(ended, lower, -jnp.inf), count)[0][:, -1:]
    # Candidates that ended come before those cut at max_length, whatever the scores are.
    least = best - margin(best, tokens)
    return jnp.where(ends, upper >= least, ended.sum(axis=1, keepdims=True) < count)


def _compare(candidates: jax.Array, valid: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Whether valid candidates are the first of their kind, bool[B, A], and whether two are equal,
    bool[B, A, A]."""
    same = (candidates[:, :, None] == candidates[:, None]).all(axis=-1)
    same &= valid[:, :, None] & valid[:, None]
    before = jnp.tril(jnp.ones(same.shape[1:], bool), -1)[None]
    return valid & ~(same & before).any(axis=-1), same


def _certify(model: rag.RagModel, settings: Decoding, documents: Documents, log_p: jax.Array,
             finished: jax.Array, bound: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`results.certify` with a bound on what no beam has found: its p(y | x, z) is at most that of
    the document's beam, so its p(y | x) is at most the mixture of these bounds.

    Fast decoding leaves out parts of the probabilities and certifies nothing.
    """
    if settings.strategy == "fast":
        return jnp.zeros(log_p.shape, bool), jnp.full(log_p.shape, jnp.inf)
    bound = bound.reshape(documents.log_prior.shape)
    outside = jax.nn.logsumexp(documents.log_prior + bound, axis=1)
    return certify(model, settings, log_p, finished, outside)
