"""Classification, as in the paper's FEVER experiments: p(class | x) over a set of labels.

It is computed by the generator, from the probability of each label as an answer (section 3.4), or
by a classification head (appendix E).
"""

import jax
import jax.numpy as jnp

from rag_jax.decoding.documents import Documents
from rag_jax.decoding.results import Decoded, Ranked, explain
from rag_jax.decoding.scoring import score
from rag_jax.decoding.settings import Decoding
from rag_jax.models import likelihood, rag
from rag_jax.types import Batch, Params


def decode(model: rag.RagModel, params: Params, documents: Documents, settings: Decoding
           ) -> Decoded:
    """All of settings.labels as answers, the most probable first.

    Documents are summed out as in the model's kind. log_p is log p(class | x), normalised over the
    labels; token_log_p are not normalised and sum to log p(label's tokens | x). Labels of one token
    have the same log_p in RAG-Token and RAG-Sequence (section 2.1).
    """
    tokens, mask = _tokens(model, settings, documents.log_prior.shape[0])
    given = score(model, params, documents, tokens, mask, settings.memory_mib)
    given = given._replace(log_p=jax.nn.log_softmax(given.log_p, axis=-1))
    return _ranked(given, documents.prior, settings.certifies(model))


def decode_by_head(model: rag.RagModel, params: Params, batch: Batch, settings: Decoding
                   ) -> Decoded:
    """As `decode`, with p(class | x) = sum_z p(z | x) p(class | x, z) of the classification head.

    As the head scores a class as a whole, the first token of its label has all of log p, and the
    others have 0.
    """
    log_prior = likelihood.log_prior(model, params, batch)
    logits_BKY = likelihood.class_logits(model, params, batch)
    log_p = jax.nn.log_softmax(logits_BKY, axis=-1).swapaxes(1, 2)
    tokens, mask = _tokens(model, settings, log_prior.shape[0])
    first = (jnp.arange(tokens.shape[2]) == 0)[None, None, :, None]
    doc_log_p = jnp.where(first, log_p[:, :, None], 0.0)  # -> [B, A, T, K]
    given = explain("sequence", likelihood.document_prior(model, log_prior), tokens, mask,
                    doc_log_p, jnp.ones(tokens.shape[:2], bool), model.end_id)
    return _ranked(given, jnp.exp(log_prior), settings.certifies(model))


def _tokens(model: rag.RagModel, settings: Decoding, questions: int
            ) -> tuple[jax.Array, jax.Array]:
    """The labels as answers to every question, int32[B, A, T], and the mask of their tokens."""
    length = max(map(len, settings.labels))
    rows = [[*label, *[model.pad_id] * (length - len(label))] for label in settings.labels]
    real = [[place < len(label) for place in range(length)] for label in settings.labels]
    shape = (questions, len(rows), length)
    return (jnp.broadcast_to(jnp.array(rows, jnp.int32)[None], shape),
            jnp.broadcast_to(jnp.array(real)[None], shape))


def _ranked(given: Ranked, prior: jax.Array, exact: bool) -> Decoded:
    """The given labels by their probability; exact: whether this order is certain."""
    questions = prior.shape[0]
    given = given._replace(finished=jnp.ones_like(given.finished))  # even a label without </s>
    order = jnp.argsort(-given.log_p, axis=1)
    ranked = jax.tree.map(lambda x: x[jnp.arange(questions)[:, None], order], given)
    certified = ranked.valid[:, 0] & exact  # as every class was scored
    return Decoded(ranked, prior, certified, jnp.full(questions, -jnp.inf))
