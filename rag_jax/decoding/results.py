"""The results of decoding: answers with their probabilities, posteriors and certificates."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rag_jax import marginal
from rag_jax.decoding.settings import Decoding
from rag_jax.errors import NotFiniteError, UserError
from rag_jax.marginal import MASKED
from rag_jax.models.rag import RagModel

NOT_FINITE = ("no probability follows from that. Checkpoints with NaN are refused when they are "
              "read, so the numbers have grown too large: take another checkpoint, train again "
              "with a lower learning rate, or compute in float32 (config.model.generator.dtype)")


class DecodingError(UserError):
    """There is no answer: the model's scores are not finite, or no answer is allowed."""


class ScoreError(DecodingError, NotFiniteError):
    """The model's scores are not finite."""


class Ranked(NamedTuple):
    """The A answers to each question of a batch, best first; samples in the order drawn.

    For Fusion-in-Decoder, where all passages are one document, K is 1 and posteriors are 1.
    """

    tokens: jax.Array  # int32[B, A, T], padded after </s>
    log_p: jax.Array  # float32[B, A], log p(y | x) in nats; "fast": its lower bound from the beams
    token_log_p: jax.Array  # float32[B, A, T], log p(y_t | x, y_<t), 0 after </s>; sums to log_p
    posterior: jax.Array  # float32[B, A, K], p(z | x, y); RAG-Token: its mean over the tokens
    # float32[B, A, K, T], p(z | x, y_<=t) of RAG-Sequence, p(z | x, y_t, y_<t) of RAG-Token; 0
    # after </s>.
    token_posterior: jax.Array
    # bool[B, A], whether the answer ended with </s> or is a class; others are cut at max_length.
    finished: jax.Array
    valid: jax.Array  # bool[B, A], False where there are fewer answers than asked for


class Decoded(NamedTuple):
    """Answers to a batch of questions."""

    ranked: Ranked
    prior: jax.Array  # float32[B, K], p(z | x)
    # bool[B], whether it is proved that no other allowed answer is more probable under the model in
    # float32: what was not found is less probable by `margin`, what was found ranks as computed.
    certified: jax.Array
    # float32[B], an upper bound on log p of every ended answer that was not found; inf = unknown.
    # All answers that ended in a beam are found, also those for which `ranked` has no room.
    bound: jax.Array
    # int[B], prefixes that a best-first search has expanded; None = there was no such search.
    expanded: np.ndarray | None = None

    @property
    def best(self) -> Ranked:
        """The best answer to each question: arrays without the axis A."""
        return jax.tree.map(lambda x: x[:, 0], self.ranked)


def faults(decoded: Decoded) -> dict[int, DecodingError]:
    """For rows of questions that cannot have an answer, the reason; `decoded` is in host memory.

    A question without any passage has no valid answer either, which is no fault.
    """
    ranked, errors = decoded.ranked, {}
    nothing = ~ranked.valid.any(axis=1) & (decoded.prior > 0).any(axis=1)
    for row in np.flatnonzero(nothing):
        complete = decoded.expanded is not None and decoded.bound[row] == -np.inf
        errors[int(row)] = DecodingError(
            "config.eval allows no answer: bad_words, min_length and no_repeat_ngram_size forbid "
            "all that could follow its forced tokens" if complete else
            "no answer was found: config.eval's bad_words, min_length and no_repeat_ngram_size "
            "forbid every token that could follow what the search kept; set fewer rules, more "
            "num_beams, or exact_nodes")
    finite = np.isfinite(decoded.prior).all(axis=1) & np.isfinite(ranked.log_p[:, 0])
    for row in np.flatnonzero(~finite | np.isnan(ranked.log_p).any(axis=1)):
        errors[int(row)] = ScoreError(f"the scores are not finite (log p = "
                                     f"{ranked.log_p[row, 0]}): {NOT_FINITE}")
    return errors


def until_end(tokens: jax.Array, end_id: int, count: jax.Array | None = None) -> jax.Array:
    """bool[..., T], True for `tokens` [..., T] up to the first end_id, with it.

    count: int32[], the number of tokens so far, as the padding behind them may equal end_id;
      None = T.
    """
    ends = (tokens == end_id).astype(jnp.int32)
    mask = jnp.cumsum(ends, axis=-1) - ends == 0
    if count is None:
        return mask
    return mask & jnp.broadcast_to(jnp.arange(tokens.shape[-1]) < count, mask.shape)


def explain(kind: str, log_prior: jax.Array, tokens: jax.Array, mask: jax.Array,
            doc_log_p: jax.Array, valid: jax.Array, end_id: int) -> Ranked:
    """Probabilities and posteriors of answers, from the log-probability of every token under each
    document.

    Args:
      kind: the model's.
      log_prior: float32[B, K], log p of the documents.
      tokens: int32[B, A, T].
      mask: bool[B, A, T], False in padding.
      doc_log_p: float32[B, A, T, K], log p(y_t | x, z, y_<t).
      valid: bool[B, A]; without any document, no answer is valid in any case.
      end_id: the token that ends an answer.
    """
    doc_log_p = jnp.where(mask[..., None], doc_log_p, 0.0)
    log_prior_B11K = log_prior[:, None, None, :]
    if kind == "sequence":
        joint_BATK = log_prior_B11K + jnp.cumsum(doc_log_p, axis=2)  # log p(z, y_<=t | x)
        log_p_BAT = jax.nn.logsumexp(joint_BATK, axis=-1)  # log p(y_<=t | x)
        token_log_p_BAT = jnp.where(mask, jnp.diff(log_p_BAT, axis=-1, prepend=0.0), 0.0)
        posterior_BAK = jax.nn.softmax(joint_BATK[:, :, -1], axis=-1)
    else:
        joint_BATK = log_prior_B11K + doc_log_p  # log p(z, y_t | x, y_<t)
        token_log_p_BAT = jnp.where(mask, jax.nn.logsumexp(joint_BATK, axis=-1), 0.0)
        ones_BAT = mask.astype(doc_log_p.dtype)
        weights_BAT = ones_BAT / jnp.maximum(ones_BAT.sum(axis=-1, keepdims=True), 1)
        posterior_BAK = jnp.einsum(
            "BATK,BAT->BAK", jax.nn.softmax(joint_BATK, axis=-1), weights_BAT)
    token_posterior_BATK = jnp.where(mask[..., None], jax.nn.softmax(joint_BATK, axis=-1), 0.0)
    log_p_BA = jax.vmap(marginal.MARGINALS[kind], in_axes=(None, 1, 1), out_axes=1)(
        log_prior, doc_log_p.swapaxes(2, 3), mask)
    return Ranked(tokens, log_p_BA, token_log_p_BAT, posterior_BAK,
                  token_posterior_BATK.swapaxes(2, 3),
                  (mask & (tokens == end_id)).any(axis=-1),
                  valid & (log_prior > MASKED / 2).any(axis=1, keepdims=True))


def rank(log_p: jax.Array, tokens: jax.Array, settings: Decoding, end_id: int) -> jax.Array:
    """log p / length**length_penalty float32[..., A] of answers int32[..., A, T].

    log_p: float32[..., A], without the log p of the first tokens if these are forced.
    """
    if not settings.length_penalty:
        return log_p
    length = until_end(tokens, end_id).sum(axis=-1) - settings.prefix_length
    return log_p / jnp.maximum(length, 1).astype(jnp.float32) ** settings.length_penalty


MARGIN = 1e-4  # nats; the rest of a comparison's rounding
_EPS = float(np.finfo(np.float32).eps)


def margin(log_p: Any, tokens: int) -> Any:
    """By how much the log p of another answer must be below `log_p`, in nats, so that it is less
    probable for certain: both are float32 sums over up to so many tokens, and each addition rounds
    by half a unit in the last place of a sum near `log_p`."""
    return MARGIN + tokens * _EPS * abs(log_p)


def certify(model: RagModel, settings: Decoding, scores: jax.Array, finished: jax.Array,
            bound: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Whether the best answers found are proved to be the best of all, bool[B], and a bound on the
    others, float32[B], or inf where `Decoding.certifies` does not allow one.

    The others are all ended answers of at most max_length tokens that the rules allow. As the
    probability of a prefix bounds that of its completions, the bound on what a search has dropped
    covers them.

    Args:
      scores: float32[B], of the best answers found.
      finished: bool[B], whether these have ended.
      bound: float32[B], the best score among what the search has dropped.
    """
    if not settings.certifies(model):
        return jnp.zeros(scores.shape, bool), jnp.full(scores.shape, jnp.inf)
    surely = scores - margin(scores, settings.max_length) > bound
    return finished & (scores > MASKED / 2) & surely, bound
