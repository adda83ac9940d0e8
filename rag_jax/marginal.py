"""The paper's marginal likelihoods (arXiv 2005.11401, section 2.1), and the objectives for the
retriever that came after (at the end).

Shapes: B questions, K passages each, T target tokens. Results are in nats, and float32 where the
arguments are; `log_prior` and `target_log_probs` give float32 for arguments of any dtype. Where log
p(z | x), log p(y_t | x, z, y_<t) and a mask come together, arrays that do not fit each other are a
ValueError, as JAX would repeat an axis of size 1 without a word.
A masked passage (padding, or a short result list) has log prior `MASKED`, hence probability 0
in every sum, and gets no gradient. A masked target position contributes nothing.

Differs from Hugging Face: the document prior enters once per sequence (or once per token),
whatever the target's length; there it is added at the second target position and so is lost for
targets of one token. Label smoothing is applied to p(y_t | x, z, y_<t), before the documents are
summed out, so that it is a proper objective for both models.
"""

import functools

import jax
import jax.numpy as jnp

MASKED = -1e30  # finite stand-in for log 0: exp(MASKED) is exactly 0 and gradients stay finite


def log_prior(doc_scores: jax.Array, doc_mask: jax.Array) -> jax.Array:
    """log p(z | x): softmax of the inner products over the K retrieved passages (section 2.2).

    Args:
      doc_scores: float32[B, K], d(z) . q(x).
      doc_mask: bool[B, K], True for passages that were really retrieved.

    Returns:
      float32[B, K]; MASKED where doc_mask is False or the score is -inf. A row without any passage
      is all MASKED.
    """
    _check_shape("doc_mask", doc_mask, "doc_scores", doc_scores.shape)
    scores_BK = doc_scores.astype(jnp.float32)
    doc_mask = doc_mask & ~(scores_BK <= MASKED)  # NaN stays NaN
    scores_BK = jnp.where(doc_mask, scores_BK, MASKED)
    return jnp.where(doc_mask, jax.nn.log_softmax(scores_BK, axis=-1), MASKED)


def target_log_probs(logits: jax.Array, targets: jax.Array, label_smoothing: float = 0.0
                     ) -> jax.Array:
    """log p(y_t | x, z, y_<t) of the target tokens only.

    Args:
      logits: [..., V]; reductions over V run in float32 without a [..., V] result.
      targets: int32[...].
      label_smoothing: eps; the result is (1 - eps) log p(y_t) + eps * mean_v log p(v).

    Returns:
      float32[...].
    """
    logits = logits.astype(jnp.float32)
    log_normaliser = jax.nn.logsumexp(logits, axis=-1)
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    if label_smoothing:
        picked = (1 - label_smoothing) * picked + label_smoothing * logits.mean(axis=-1)
    return picked - log_normaliser


def _check_shape(name: str, array: jax.Array, other: str, shape: tuple[int, ...]) -> None:
    """Raises a ValueError where an array has not the shape that another one asks for."""
    if jnp.shape(array) != shape:
        raise ValueError(f"{name} has shape {jnp.shape(array)}: must be {shape}, as {other} says")


def _check_rank(log_p_BKT: jax.Array) -> None:
    """Raises a ValueError where log p of the target's tokens has not its three axes."""
    if jnp.ndim(log_p_BKT) != 3:
        raise ValueError(f"log_p has shape {jnp.shape(log_p_BKT)}: must be [B, K, T]")


def _real(log_p_BKT: jax.Array, target_mask: jax.Array) -> jax.Array:
    """log p with 0 in masked positions, whose values, -inf among them, then reach no gradient."""
    _check_rank(log_p_BKT)
    batch, _, length = log_p_BKT.shape
    _check_shape("target_mask", target_mask, "log_p [B, K, T]", (batch, length))
    return jnp.where(target_mask[:, None], log_p_BKT, 0.0)


def answer_log_probs(log_p_BKT: jax.Array, target_mask: jax.Array) -> jax.Array:
    """log p(y | x, z) = sum_t log p(y_t | x, z, y_<t), float32[B, K]."""
    return _real(log_p_BKT, target_mask).sum(axis=-1)


def sequence_joint(log_prior_BK: jax.Array, log_p_BKT: jax.Array, target_mask: jax.Array
                   ) -> jax.Array:
    """log p(z, y | x) = log p(z | x) + sum_t log p(y_t | x, z, y_<t), float32[B, K]."""
    answer_BK = answer_log_probs(log_p_BKT, target_mask)
    _check_shape("log_prior", log_prior_BK, "log_p [B, K, T]", answer_BK.shape)
    joint_BK = log_prior_BK + answer_BK
    return jnp.where(log_prior_BK <= MASKED, MASKED, joint_BK)  # NaN stays NaN


def token_joint(log_prior_BK: jax.Array, log_p_BKT: jax.Array) -> jax.Array:
    """log p(z, y_t | x, y_<t) = log p(z | x) + log p(y_t | x, z, y_<t), float32[B, K, T]."""
    _check_rank(log_p_BKT)
    _check_shape("log_prior", log_prior_BK, "log_p [B, K, T]", log_p_BKT.shape[:2])
    log_prior_BK1 = log_prior_BK[:, :, None]
    return jnp.where(log_prior_BK1 <= MASKED, MASKED, log_prior_BK1 + log_p_BKT)


def rag_sequence(log_prior_BK: jax.Array, log_p_BKT: jax.Array, target_mask: jax.Array
                 ) -> jax.Array:
    """log p_RAG-Sequence(y | x) = log sum_z p(z | x) prod_t p(y_t | x, z, y_<t), float32[B].

    Args:
      log_prior_BK: float32[B, K] from `log_prior`.
      log_p_BKT: float32[B, K, T] from `target_log_probs`.
      target_mask: bool[B, T].
    """
    return jax.nn.logsumexp(sequence_joint(log_prior_BK, log_p_BKT, target_mask), axis=1)


def rag_token(log_prior_BK: jax.Array, log_p_BKT: jax.Array, target_mask: jax.Array) -> jax.Array:
    """log p_RAG-Token(y | x) = sum_t log sum_z p(z | x) p(y_t | x, z, y_<t), float32[B].

    Arguments as in `rag_sequence`.
    """
    joint_BKT = token_joint(log_prior_BK, _real(log_p_BKT, target_mask))
    return jnp.where(target_mask, jax.nn.logsumexp(joint_BKT, axis=1), 0.0).sum(axis=-1)


def log_share(doc_scores_BK: jax.Array, batch_scores_BP: jax.Array, doc_mask: jax.Array,
              doc_ids: jax.Array, null_scores_B: jax.Array | None = None) -> jax.Array:
    """log of the share that a question's own passages have in p(z | x), where z is any passage that
    was retrieved for a question of the batch, float32[B]; 0 without own passages.

    Added to log p(y | x), it normalises p(z | x) over the P = B K passages of the batch instead of
    K: log sum over P of p(z | x) p(y | x, z), where the passages of other questions explain nothing
    of y. These are in-batch negatives, as DPR has them (arXiv 2004.04906, section 3.2).

    Args:
      doc_scores_BK: float32[B, K], as for `log_prior`.
      batch_scores_BP: float32[B, P], the inner products with the passages of all questions in turn.
      doc_mask: bool[B, K], as for `log_prior`.
      doc_ids: int32[B, K], the passages' rows of the index: one that was retrieved for several
        questions counts once.
      null_scores_B: float32[B], the score of the null document, which is every question's own.

    Raises:
      ValueError: arrays do not fit each other.
    """
    batch, count = doc_scores_BK.shape
    _check_shape("batch_scores", batch_scores_BP, "doc_scores [B, K]", (batch, batch * count))
    _check_shape("doc_mask", doc_mask, "doc_scores [B, K]", (batch, count))
    _check_shape("doc_ids", doc_ids, "doc_scores [B, K]", (batch, count))
    doc_mask = doc_mask & ~(doc_scores_BK <= MASKED)  # as in `log_prior`
    ids_P, mask_P = doc_ids.reshape(-1), doc_mask.reshape(-1)
    times_P = ((ids_P[:, None] == ids_P[None]) & mask_P[None]).sum(axis=-1)
    dtype = jnp.result_type(batch_scores_BP, jnp.float32)
    log_times_P = jnp.log(jnp.maximum(times_P, 1).astype(dtype))
    once_BP = jnp.asarray(batch_scores_BP, dtype) - log_times_P[None]
    all_BP = jnp.where(mask_P[None], once_BP, MASKED)
    own_BK = jnp.where(doc_mask, doc_scores_BK, MASKED)
    if null_scores_B is not None:
        own_BK, all_BP = (jnp.concatenate([scores, null_scores_B[:, None]], axis=1)
                          for scores in (own_BK, all_BP))
    share_B = jax.nn.logsumexp(own_BK, axis=-1) - jax.nn.logsumexp(all_BP, axis=-1)
    return jnp.where(doc_mask.any(axis=-1), share_B, 0.0)


def explained(log_p_B: jax.Array, target_mask: jax.Array) -> jax.Array:
    """How well answers are explained, p(y | x) ** (1 / T) float32[B]: the geometric mean of the
    probabilities of T tokens, from log p(y | x)."""
    return jnp.exp(log_p_B / jnp.maximum(target_mask.sum(axis=-1), 1).astype(log_p_B.dtype))


def divergence(p: jax.Array, q: jax.Array) -> jax.Array:
    """KL(p || q) float32[...] in nats, of probabilities over the last axis of float32[..., K].

    It is computed from p / q - 1, and the sum of q - p, which is 0, is added: the difference of the
    logarithms of two nearly equal distributions would be mostly rounding.
    """
    q = jnp.maximum(q, 1e-30)
    x = (p - q) / q
    return (q * (jax.scipy.special.xlog1py(1 + x, x) - x)).sum(axis=-1)


def mixture(log_weights: jax.Array, doc_log_p: jax.Array) -> jax.Array:
    """log sum_z w(z) p(. | z) of M distributions per document, float32[B, M, V].

    Document by document instead of by a reduction over their axis: one pass over the vocabulary,
    which XLA's CPU backend runs four times faster.

    Args:
      log_weights: float32[B, M, K], log w(z).
      doc_log_p: float32[B, K, M, V], log p(. | z); of one document at least not -inf.
    """
    joint_BMV = [log_weights[:, :, z, None] + doc_log_p[:, z] for z in range(doc_log_p.shape[1])]
    if len(joint_BMV) == 1:
        return joint_BMV[0]
    largest_BMV = functools.reduce(jnp.maximum, joint_BMV)
    return largest_BMV + jnp.log(sum(jnp.exp(each - largest_BMV) for each in joint_BMV))


def sequence_posterior(log_prior_BK: jax.Array, log_p_BKT: jax.Array, target_mask: jax.Array
                       ) -> jax.Array:
    """p(z | x, y) under RAG-Sequence, float32[B, K]; masked passages are 0, the others of a row sum
    to 1."""
    joint_BK = sequence_joint(log_prior_BK, log_p_BKT, target_mask)
    return jnp.where(log_prior_BK > MASKED, jax.nn.softmax(joint_BK, axis=1), 0.0)


def token_posterior(log_prior_BK: jax.Array, log_p_BKT: jax.Array) -> jax.Array:
    """p(z | x, y_t, y_<t) for every t under RAG-Token (figure 2), float32[B, K, T].

    Proportional to p(z | x) p(y_t | x, z, y_<t): RAG-Token draws a document anew for each token.
    Sums to 1 over K, or to 0 without any passage; masked passages are 0.
    """
    joint_BKT = token_joint(log_prior_BK, log_p_BKT)
    return jnp.where(log_prior_BK[:, :, None] > MASKED, jax.nn.softmax(joint_BKT, axis=1), 0.0)


def mean_token_posterior(log_prior_BK: jax.Array, log_p_BKT: jax.Array, target_mask: jax.Array
                         ) -> jax.Array:
    """The token posteriors averaged over the target's tokens, float32[B, K]; rows sum to
    1, or to 0 without any passage or token."""
    ones_BT = target_mask.astype(log_p_BKT.dtype)
    weights_BT = ones_BT / jnp.maximum(ones_BT.sum(axis=-1, keepdims=True), 1)
    posterior_BKT = token_posterior(log_prior_BK, _real(log_p_BKT, target_mask))
    return jnp.einsum("BKT,BT->BK", posterior_BKT, weights_BT)


# By the model's kind. Fusion-in-Decoder has one document to sum over, with probability 1.
MARGINALS = {"sequence": rag_sequence, "token": rag_token, "fid": rag_token}
POSTERIORS = {"sequence": sequence_posterior, "token": mean_token_posterior}
LEARNT_FROM = ("emdr2", "pdist", "adist", "loop")  # objectives of `learn_from`


# Objectives of the retriever in place of the marginal likelihood (train.retriever_objective). Each
# is maximised, in nats, one number per question, and has a gradient to log p(z | x) alone: the
# generator's evidence for the passages is constant here, and the generator trains by its own
# likelihood with p(z | x) constant. No temperatures; label smoothing is only for the generator.


def leave_one_out(kind: str, log_prior_BK: jax.Array, log_p_BKT: jax.Array,
                  target_mask: jax.Array) -> jax.Array:
    """log p(y | x, all passages but z) float32[B, K] of RAG: its marginal likelihood with p(z | x)
    over the other passages; very small (MASKED or less) where there are none."""
    places = jnp.arange(log_prior_BK.shape[1])[None]

    def without(z: jax.Array) -> jax.Array:
        others = log_prior(log_prior_BK, (log_prior_BK > MASKED) & (places != z))
        return MARGINALS[kind](others, log_p_BKT, target_mask)

    return jax.vmap(without, out_axes=1)(places[0])


def learn_from(evidence_BK: jax.Array, objective: str, log_prior_BK: jax.Array
               ) -> tuple[jax.Array, jax.Array]:
    """An objective of the retriever, float32[B], and its target float32[B, K]: the generator's
    weights of the passages. A row of the target sums to 1, or to 0 without any passage.

    Args:
      evidence_BK: the generator's evidence for each passage, which is constant:
        emdr2, pdist: log p(y | x, z);  loop: - log p(y | x, all passages but z);
        adist: log of the passage's share in the cross-attention.
      objective: emdr2: log sum_z p(z | x) SG[p(y | x, z)], the retriever's part of Sachan et al.
          2021 (arXiv 2106.05346), of whole answers. Its gradient is that of the others with
          p(z | x, y) for a target. Adapted: their generator reads all passages at once, as
          Fusion-in-Decoder does; RAG keeps its own likelihood. For RAG-Sequence both gradients
          are then those of `rag_sequence`.
        pdist, loop, adist: - KL(SG[target] || p(z | x)), target = softmax of the evidence.
          pdist, loop: Izacard et al. 2022 (Atlas, arXiv 2208.03299), section 2.2. Shi et al. 2023
          (REPLUG, arXiv 2301.12652) is pdist with a frozen generator, and temperatures.
          adist: Izacard & Grave 2021 (arXiv 2012.04584) and Atlas, section 2.2. Differs: Atlas
          takes the softmax of mean attention, which needs a temperature (0.01 in its code), and
          Izacard & Grave that of mean scores before attention's softmax.
      log_prior_BK: from `log_prior`.

    Raises:
      ValueError: there is no such objective.
    """
    if objective not in LEARNT_FROM:
        raise ValueError(f"objective={objective!r}: one of {', '.join(LEARNT_FROM)}")
    _check_shape("evidence", evidence_BK, "log_prior", log_prior_BK.shape)
    there = ~(log_prior_BK <= MASKED)  # NaN stays NaN
    evidence_BK = jax.lax.stop_gradient(jnp.where(there, evidence_BK, MASKED))
    if objective == "emdr2":
        joint_BK = log_prior_BK + evidence_BK
        target_BK = jnp.where(there, jax.nn.softmax(joint_BK, axis=-1), 0.0)
        return jax.nn.logsumexp(joint_BK, axis=-1), jax.lax.stop_gradient(target_BK)
    target_BK = jnp.where(there, jax.nn.softmax(evidence_BK, axis=-1), 0.0)
    log_target_BK = jnp.log(jnp.maximum(target_BK, 1e-30))  # 0 log 0 is 0
    log_ratio_BK = jnp.where(there, log_prior_BK, 0.0) - log_target_BK
    return (target_BK * log_ratio_BK).sum(axis=-1), target_BK
