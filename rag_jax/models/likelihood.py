"""The marginal log-likelihood of a batch's answers (section 2.1 of the paper), and its parts.

A document is what a decoder reads at once. In RAG-Token and RAG-Sequence each of the K passages is
a document with probability p(z | x), and the documents are summed out. Fusion-in-Decoder (Izacard &
Grave 2021, arXiv 2007.01282) also encodes each passage alone, but its decoder attends to all of
them at once: they are one document, K times as long, with probability 1.
"""

import dataclasses

import jax
import jax.numpy as jnp

from rag_jax import marginal
from rag_jax.marginal import MASKED
from rag_jax.models import batch_check, rag
from rag_jax.models.attention import ATTENDED
from rag_jax.models.null_document import NullDocument
from rag_jax.models.rag import CLASSIFIER, NULL, RagModel, embed, embed_queries, word_weight
from rag_jax.models.teacher_forcing import decoder_states, forced_log_probs
from rag_jax.types import Batch, Params


def as_documents(model: RagModel, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """The batch's documents: ids int32[B*K, 1, S], of one passage each, the K of a question one
    after another, and their mask. For Fusion-in-Decoder they are int32[B, K, S], and missing
    passages are masked.
    """
    if model.fuses:
        return batch.source_ids, batch.source_mask & batch.doc_mask[..., None]
    rows = (-1, 1, batch.source_ids.shape[-1])
    return batch.source_ids.reshape(rows), batch.source_mask.reshape(rows)


def document_prior(model: RagModel, log_prior: jax.Array) -> jax.Array:
    """log p of the documents, from log p(z | x) float32[B, K] of the passages.

    This is the same, but for Fusion-in-Decoder float32[B, 1]: 0, or MASKED without any passage.
    """
    if not model.fuses:
        return log_prior
    some = (log_prior > MASKED / 2).any(axis=-1, keepdims=True)
    return jnp.where(some, 0.0, MASKED)


def log_prior(model: RagModel, params: Params, batch: Batch,
              dropout_key: jax.Array | None = None) -> jax.Array:
    """log p(z | x) float32[B, K] in nats, with the gradient of the query encoder.

    With a null document, which is then the last, it is float32[B, K + 1].
    """
    if model.reranked:
        return marginal.log_prior(batch.doc_scores, batch.doc_mask)
    if model.lexical:
        scores_BK = batch.doc_scores
        if scores_BK is None:  # nothing was retrieved
            scores_BK = jnp.zeros(batch.doc_mask.shape, jnp.float32)
        queries_BE = jnp.zeros((len(scores_BK), model.embedding_width))
        return _log_prior(model, params, batch, scores_BK,
                          _null_scores(model, params, queries_BE))
    queries_BE, passages_BKE = _vectors(model, params, batch, dropout_key)
    return _log_prior(model, params, batch, jnp.einsum("BE,BKE->BK", queries_BE, passages_BKE),
                      _null_scores(model, params, queries_BE))


def _log_prior(model: RagModel, params: Params, batch: Batch, doc_scores_BK: jax.Array,
               null_B: jax.Array | None) -> jax.Array:
    """`log_prior` from inner products or BM25's scores float32[B, K], and from `_null_scores`."""
    doc_mask = batch.doc_mask
    if model.fusion is not None:
        both = (jnp.where(doc_mask, scores, MASKED)  # what is missing takes no rank
                for scores in (doc_scores_BK, batch.doc_scores))
        doc_scores_BK = model.fusion.logits(*both, word_weight(model, params), jnp)
    if null_B is not None:
        doc_scores_BK = jnp.concatenate([doc_scores_BK, null_B[:, None]], axis=1)  # -> [B, K + 1]
        doc_mask = jnp.pad(doc_mask, ((0, 0), (0, 1)), constant_values=True)
    return marginal.log_prior(doc_scores_BK, doc_mask)


def _null_scores(model: RagModel, params: Params, queries_BE: jax.Array) -> jax.Array | None:
    """The null document's scores float32[B], comparable to inner products; None without one."""
    if model.null_document == "none":
        return None
    return NullDocument(model.null_document).apply({"params": params[NULL]}, queries_BE)


def _log_prior_and_share(model: RagModel, params: Params, batch: Batch,
                         dropout_key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """`log_prior`, and `marginal.log_share` float32[B] of the question's own passages."""
    queries_BE, passages_BKE = _vectors(model, params, batch, dropout_key)
    doc_scores_BK = jnp.einsum("BE,BKE->BK", queries_BE, passages_BKE)
    batch_scores_BP = queries_BE @ passages_BKE.reshape(-1, passages_BKE.shape[-1]).T
    null_B = _null_scores(model, params, queries_BE)
    counted_BK = batch.doc_mask & (batch.weight > 0)[:, None]  # rows of weight 0 are padding
    share_B = marginal.log_share(doc_scores_BK, batch_scores_BP, counted_BK, batch.doc_ids, null_B)
    return _log_prior(model, params, batch, doc_scores_BK, null_B), share_B


def _vectors(model: RagModel, params: Params, batch: Batch,
             dropout_key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Query vectors float32[B, E], and embeddings of their passages float32[B, K, E].

    Passages whose tokens are in the batch are embedded here, with the gradient of the document
    encoder; otherwise their embeddings are those of the index.
    """
    keys = (None, None) if dropout_key is None else (
        dropout_key, jax.random.fold_in(dropout_key, 1))
    queries_BE = embed_queries(model, params["query_encoder"], batch.question_ids,
                               batch.question_mask, keys[0])
    passages_BKE = batch.doc_embeddings
    if batch.passage_ids is not None:
        length = batch.passage_ids.shape[-1]
        fresh_RE = embed(model, params["document_encoder"], batch.passage_ids.reshape(-1, length),
                         batch.passage_mask.reshape(-1, length), keys[1])
        passages_BKE = fresh_RE.reshape(*batch.doc_mask.shape, -1)
    # Where there is no passage, even NaN reaches no gradient.
    return queries_BE, jnp.where(batch.doc_mask[..., None], passages_BKE, 0.0)


def _documents(model: RagModel, batch: Batch) -> int:
    """The number of documents of a question: K, or 1 for Fusion-in-Decoder."""
    return 1 if model.fuses else batch.source_ids.shape[1]


def _of_documents(places: jax.Array, targets: int, length: int, documents: int) -> jax.Array:
    """Places int32[G, N * K] of packed targets, one for each of a question's K documents.

    Args:
      places: int32[G, N], those of one target for each question.
      targets: questions in each of the G groups.
      length: T, tokens of a target.
      documents: K.
    """
    target, token = places[..., None] // length, places[..., None] % length
    document = target * documents + jnp.arange(documents)[None, None]  # -> [G, N, K]
    copies, absent = document * length + token, targets * documents * length
    return jnp.sort(jnp.minimum(copies, absent).reshape(len(places), -1), axis=1)


def class_logits(model: RagModel, params: Params, batch: Batch,
                 dropout_key: jax.Array | None = None) -> jax.Array:
    """Logits float32[B, K, Y] of the classes given each passage; Fusion-in-Decoder: [B, 1, Y].

    As in BART's classification of sentences, the decoder reads </s> <s> question, and the head its
    last state (appendix E). The encoder reads the passage with the question, as for an answer.
    """
    documents = _documents(model, batch)
    states_RTD = decoder_states(
        model, params["generator"], *as_documents(model, batch),
        jnp.repeat(batch.decoder_ids, documents, axis=0), dropout_key,
        places=batch.source_places)
    states_BKTD = states_RTD.reshape(-1, documents, *states_RTD.shape[1:])
    last_BT = batch.decoder_mask & ~jnp.pad(batch.decoder_mask[:, 1:], ((0, 0), (0, 1)))
    # Unlike a gather, a sum needs no communication where the questions are split over devices.
    state_BKD = jnp.einsum("BKTD,BT->BKD", states_BKTD, last_BT.astype(states_BKTD.dtype))
    key = None if dropout_key is None else jax.random.fold_in(dropout_key, 1)
    return model.classifier_module.apply(
        {"params": params[CLASSIFIER]}, state_BKD, key is None, rngs=rag.rngs(key))


def token_log_probs(model: RagModel, params: Params, batch: Batch, label_smoothing: float = 0.0,
                    dropout_key: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """log p(y_t | x, z, y_<t) float32[B, K, T] in nats of the batch's targets given each passage,
    and its label-smoothed form, which is trained.

    Fusion-in-Decoder: [B, 1, T], given all passages. A classifier's only token is the class.
    """
    if model.classes:
        logits_BKTY = class_logits(model, params, batch, dropout_key)[:, :, None]  # T = 1
        classes = jnp.broadcast_to(batch.target_ids[:, None], logits_BKTY.shape[:3])
        log_p_BKT = smoothed_BKT = marginal.target_log_probs(logits_BKTY, classes)
        if label_smoothing:
            smoothed_BKT = marginal.target_log_probs(logits_BKTY, classes, label_smoothing)
        return log_p_BKT, smoothed_BKT
    count, length = batch.target_ids.shape
    documents, places = _documents(model, batch), batch.target_places
    if places is not None:
        places = _of_documents(places, count // len(places), length, documents)
    found = forced_log_probs(
        model, params["generator"], *as_documents(model, batch),
        jnp.repeat(batch.target_ids, documents, axis=0), dropout_key, label_smoothing,
        places=batch.source_places, target_places=places)
    return tuple(each.reshape(count, documents, length) for each in found)  # -> [B, K, T]


def attention_shares(model: RagModel, params: Params, batch: Batch) -> jax.Array:
    """The share of each passage in Fusion-in-Decoder's cross-attention, float32[B, K].

    It is the share in the sum of attention weights times norms of values (`attention.attended`)
    over all layers, heads, tokens of the answer and tokens of the passage's input, with the
    question. There is no dropout and no gradient.
    """
    ids, mask = ((batch.decoder_ids, batch.decoder_mask) if model.classes
                 else (batch.target_ids, batch.target_mask))
    _, found = decoder_states(
        model, jax.lax.stop_gradient(params["generator"]), *as_documents(model, batch), ids, None,
        ATTENDED)
    layers = [leaf.reshape(-1, *ids.shape, *batch.source_ids.shape[1:]) for path, leaf
              in jax.tree_util.tree_leaves_with_path(found) if "'cross_attention'" in str(path)]
    attended_BK = sum(jnp.einsum("LBTKS,BT->BK", layer, mask.astype(layer.dtype))
                      for layer in layers)
    return attended_BK / jnp.maximum(attended_BK.sum(axis=-1, keepdims=True), 1e-30)


def _evidence(model: RagModel, params: Params, batch: Batch, objective: str,
              log_prior_BK: jax.Array, log_p_BKT: jax.Array) -> jax.Array:
    """The generator's evidence for each passage, float32[B, K], for `marginal.learn_from`.

    RAG has it in its likelihoods log_p_BKT. Fusion-in-Decoder decodes again, without dropout and
    gradient: each passage alone, or, for "loop", all passages but one, K times.
    """
    mask = batch.target_mask
    if not model.fuses:
        if objective == "adist":
            raise ValueError("adist is of Fusion-in-Decoder alone, whose decoder attends to all "
                             "passages at once; use emdr2, pdist or loop")
        if objective == "loop":
            return -marginal.leave_one_out(model.kind, log_prior_BK, log_p_BKT, mask)
        return marginal.answer_log_probs(log_p_BKT, mask)
    if objective == "adist":
        return jnp.log(jnp.maximum(attention_shares(model, params, batch), 1e-30))
    params = jax.lax.stop_gradient(params)
    if objective != "loop":
        alone = dataclasses.replace(model, kind="token")
        return marginal.answer_log_probs(token_log_probs(alone, params, batch)[0], mask)
    places = jnp.arange(batch.doc_mask.shape[1])[None]

    def without(z: jax.Array) -> jax.Array:
        others = batch._replace(doc_mask=batch.doc_mask & (places != z))
        return -marginal.answer_log_probs(token_log_probs(model, params, others)[0], mask)[:, 0]

    return jax.lax.map(without, places[0]).T  # one at a time: each reads K passages


def log_likelihood(model: RagModel, params: Params, batch: Batch, label_smoothing: float = 0.0,
                   dropout_key: jax.Array | None = None, retriever_objective: str = "marginal",
                   weigh_explained: bool = False, in_batch_negatives: bool = False
                   ) -> dict[str, jax.Array]:
    """The marginal log-likelihood (section 2.1), the training objective, and figures about them.

    Args:
      label_smoothing: of the objective alone, as in `marginal.target_log_probs`.
      dropout_key: None = no dropout.
      retriever_objective: "marginal", or one that `marginal.learn_from` names. Then the prior and
        the null document get the gradient of that one alone, and everything else none of it.
      weigh_explained: the gradient of log p(z | x) is multiplied, for each question, by how well
        its answer is explained. What a generator says of passages without the answer is noise, and
        while the retriever has much to learn, most questions have only such passages.
      in_batch_negatives: the objective's p(z | x) is over the passages of the whole batch
        (`marginal.log_share`); prior and posterior stay those over the question's own passages.
        With weigh_explained, what this adds to the objective is multiplied itself, so that its
        value depends on how well the answers are explained. It has no effect where BM25 or a
        reranker takes part in p(z | x), whose scores of other questions' passages are not known.

    Returns:
      log_p: float32[B], log p(y | x) in nats.
      prior: float32[B, K], p(z | x).
      posterior: float32[B, K], p(z | x, y); for RAG-Token, the mean of the tokens' posteriors. For
        Fusion-in-Decoder, which has none, the target of the retriever's objective, or the prior.
      objective: float32[B], what training maximises: log_p with label smoothing, plus the
        retriever's objective, if any. All else in the result is without label smoothing.
      retriever_objective: float32[B]; only if it is not "marginal".
      explained: float32[B], from `marginal.explained`.
      information: float32[B], KL(p(z | x, y) || p(z | x)) in nats, with the posterior of the whole
        answer as in RAG-Sequence, for RAG-Token too; Fusion-in-Decoder: with `posterior`.
      log_p_null: float32[B], log p(y | x, null); only with a null document, whose prior and
        posterior are [B, K + 1].

    Raises:
      ValueError: there is no such objective, or the model's kind cannot have it; as
        `batch_check.check`.
    """
    batch_check.check(model, batch)
    keys = (None, None) if dropout_key is None else jax.random.split(dropout_key)
    share_B = jnp.zeros(len(batch.doc_mask), jnp.float32)
    if in_batch_negatives and not (model.lexical or model.fusion or model.reranked):
        if batch.doc_ids is None:
            raise ValueError("Batch.doc_ids is None: in_batch_negatives needs the passages' rows, "
                             "to count once what several questions found")
        log_prior_BK, share_B = _log_prior_and_share(model, params, batch, keys[0])
    else:
        log_prior_BK = log_prior(model, params, batch, keys[0])
    log_p_BKT, smoothed_BKT = token_log_probs(model, params, batch, label_smoothing, keys[1])
    marginalise, mask = marginal.MARGINALS[model.kind], batch.target_mask
    log_p_B = marginalise(document_prior(model, log_prior_BK), log_p_BKT, mask)
    explained_B = jax.lax.stop_gradient(marginal.explained(log_p_B, mask))
    if weigh_explained:
        constant_BK = jax.lax.stop_gradient(log_prior_BK)
        log_prior_BK = constant_BK + explained_B[:, None] * (log_prior_BK - constant_BK)
        share_B = explained_B * share_B
    log_documents_BK = document_prior(model, log_prior_BK)
    result = {
        "log_p": log_p_B,
        "explained": explained_B,
        "objective": marginalise(log_documents_BK, smoothed_BKT, mask),
        "prior": jnp.exp(log_prior_BK),
        "posterior": (jnp.exp(log_prior_BK) if model.fuses else marginal.POSTERIORS[model.kind](
            log_documents_BK, log_p_BKT, mask)),
    }
    if retriever_objective != "marginal":
        evidence_BK = _evidence(model, params, batch, retriever_objective, log_prior_BK, log_p_BKT)
        learned_B, target_BK = marginal.learn_from(evidence_BK, retriever_objective, log_prior_BK)
        constant_BK = jax.lax.stop_gradient(log_documents_BK)
        result["objective"] = marginalise(constant_BK, smoothed_BKT, mask) + learned_B
        result["retriever_objective"] = learned_B
        if model.fuses:
            result["posterior"] = target_BK
    whole_answer_BK = result["posterior"] if model.fuses else marginal.sequence_posterior(
        log_prior_BK, log_p_BKT, mask)
    result["information"] = marginal.divergence(whole_answer_BK, result["prior"])
    result["objective"] += share_B
    if model.null_document != "none":
        result["log_p_null"] = marginal.answer_log_probs(log_p_BKT, mask)[:, -1]
    return result
