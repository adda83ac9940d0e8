"""One search with the documents summed out: for RAG-Token, and for RAG-Sequence as a recursion.

Both models are autoregressive, with p(y_t | x, y_<t) = sum_z w_t(z) p(y_t | x, z, y_<t).

  RAG-Token (section 2.1): w_t(z) = p(z | x).
  RAG-Sequence: w_t(z) = p(z | x, y_<t), which is proportional to p(z | x) p(y_<t | x, z). The
    product over t is then sum_z p(z | x) prod_t p(y_t | x, z, y_<t), so scores are exact at every
    step.
  Fusion-in-Decoder: there is one document, with weight 1.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from rag_jax.decoding import beam
from rag_jax.decoding.beam import Beams, BeamState, Recursion, TokenIds, gather_beams
from rag_jax.decoding.constraints import make_rule
from rag_jax.decoding.documents import Documents, Past
from rag_jax.decoding.prompt_lookup import Guessed, empty_past, step
from rag_jax.decoding.results import Decoded, certify, explain, until_end
from rag_jax.decoding.settings import Decoding
from rag_jax.marginal import MASKED
from rag_jax.models import rag
from rag_jax.types import Params


def weights(kind: str, log_prior: jax.Array) -> Callable[[jax.Array], jax.Array]:
    """The function log p(y_<t | x, z) float32[B, M, K] -> log w_t(z) float32[B, M, K], for a kind
    of model with log p(z | x) float32[B, K]."""
    if kind == "sequence":
        real = log_prior[:, None] > MASKED / 2  # or else masked documents alone would have weights
        return lambda log_p: jnp.where(
            real, jax.nn.log_softmax(log_prior[:, None] + log_p, axis=-1), MASKED)
    return lambda log_p: jnp.broadcast_to(log_prior[:, None], log_p.shape)


def search(model: rag.RagModel, params: Params, documents: Documents, settings: Decoding
           ) -> Beams:
    """A beam search for each of the R documents alone."""
    recursion = _recursion(
        model, params, documents, settings, documents.mask.shape[0], jnp.zeros_like)
    return beam.beam_search(recursion, settings, _ids(model))


def _recursion(model: rag.RagModel, params: Params, documents: Documents, settings: Decoding,
               searches: int, weigh: Callable[[jax.Array], jax.Array]) -> Recursion:
    """The model as these searches see it, before their first token."""
    past = empty_past(model, documents, searches, settings)

    def reorder(past: Past | Guessed, beams: jax.Array) -> Past | Guessed:
        if settings.num_beams == 1:
            return past
        return past._replace(lineage=gather_beams(past.lineage, beams))

    return Recursion(
        functools.partial(step, model, params, documents), past, reorder, weigh,
        make_rule(settings, model.end_id), searches, documents.mask.shape[0] // searches)


def _ids(model: rag.RagModel) -> TokenIds:
    return TokenIds(model.start_id, model.end_id, model.pad_id)


def _marginal(model: rag.RagModel, params: Params, documents: Documents, settings: Decoding
              ) -> Recursion:
    """`_recursion` of one search for each question, with its documents summed out."""
    return _recursion(model, params, documents, settings, documents.log_prior.shape[0],
                      weights(model.kind, documents.log_prior))


def begin(model: rag.RagModel, params: Params, documents: Documents, settings: Decoding
          ) -> BeamState:
    """The state of one search for each question, before its first token."""
    return beam.first_state(
        _marginal(model, params, documents, settings), settings, model.pad_id)


def advance(model: rag.RagModel, params: Params, documents: Documents, settings: Decoding,
            state: BeamState, until: jax.Array | int) -> BeamState:
    """Continues the searches, as `beam.advance`."""
    return beam.advance(
        _marginal(model, params, documents, settings), settings, _ids(model), state, until)


def answers(model: rag.RagModel, documents: Documents, settings: Decoding, state: BeamState
            ) -> Decoded:
    """The best answers of the searches, at their end or before."""
    beams = beam.best_beams(state)
    best, count = beams.hypotheses, settings.num_return_sequences
    certified, bound = certify(model, settings, best.scores[:, 0], beams.finished[:, 0],
                               beams.bound)
    tokens = best.tokens[:, :count]
    mask = until_end(tokens, model.end_id, state.position)
    ranked = explain(model.kind, documents.log_prior, tokens, mask,
                     best.doc_log_p[:, :count], best.scores[:, :count] > MASKED / 2, model.end_id)
    return Decoded(ranked, documents.prior, certified, bound)
