"""Independent samples from p(y | x), token by token with the documents summed out.

Temperature, top_k and top_p change the distribution of each next token, in this order; what is
reported is the probability under the model itself.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from rag_jax import marginal
from rag_jax.decoding.constraints import make_rule
from rag_jax.decoding.documents import Documents, Past
from rag_jax.decoding.mixture import weights
from rag_jax.decoding.prompt_lookup import Guessed, empty_past, step
from rag_jax.decoding.results import Decoded, explain, until_end
from rag_jax.decoding.settings import Decoding
from rag_jax.marginal import MASKED
from rag_jax.models import rag
from rag_jax.types import Params


class State(NamedTuple):
    """The samples, A for each of B questions, between two of their tokens."""

    position: jax.Array  # int32[], the number of tokens so far
    tokens: jax.Array  # int32[B, A, T]
    doc_log_p: jax.Array  # float32[B, A, T, K], log p(y_t | x, z, y_<t)
    ended: jax.Array  # bool[B, A], True also where no token was left
    valid: jax.Array  # bool[B, A], False once the rules have left no token
    past: Past | Guessed
    keys: jax.Array  # [B], one for each question
    temperature: jax.Array | None  # float32[B], one for each question; None = that of the settings


def begin(model: rag.RagModel, documents: Documents, settings: Decoding, keys: jax.Array,
          temperature: jax.Array | None = None) -> State:
    """The state of num_return_sequences samples for each question, before their first token.

    keys, temperature: as in `State`.
    """
    questions, passages = documents.log_prior.shape
    count, length = settings.num_return_sequences, settings.max_length
    return State(jnp.zeros((), jnp.int32),
                 jnp.full((questions, count, length), model.pad_id, jnp.int32),
                 jnp.zeros((questions, count, length, passages), jnp.float32),
                 jnp.zeros((questions, count), bool),
                 jnp.ones((questions, count), bool),
                 empty_past(model, documents, questions, settings), keys, temperature)


def advance(model: rag.RagModel, params: Params, documents: Documents, settings: Decoding,
            state: State, until: jax.Array | int) -> State:
    """Draws tokens until all samples have ended, or have `until` tokens."""
    keys, temperature = state.keys, state.temperature
    if temperature is not None:
        temperature = temperature[:, None, None]
    count = settings.num_return_sequences
    weigh = weights(model.kind, documents.log_prior)
    rule = make_rule(settings, model.end_id)

    def draw(key: jax.Array, sample: jax.Array, position: jax.Array, logits: jax.Array):
        key = jax.random.fold_in(jax.random.fold_in(key, sample), position)
        return jax.random.categorical(key, logits)

    draw_all = jax.vmap(jax.vmap(draw, (None, 0, None, 0)), (0, None, None, 0))

    def grow(state: State) -> State:
        position = state.position
        last = jnp.where(position == 0, model.start_id,
                         state.tokens[:, :, jnp.maximum(position - 1, 0)])
        doc_log_p_BKAV, past = step(
            model, params, documents, last, position, state.past, ~state.ended)
        log_p_BAV = marginal.mixture(weigh(state.doc_log_p.sum(axis=2)), doc_log_p_BKAV)
        log_p_BAV = rule(state.tokens, position, log_p_BAV)
        possible = log_p_BAV.max(axis=-1) > MASKED / 2
        drawn = draw_all(keys, jnp.arange(count), position,
                         truncate(log_p_BAV, settings, temperature))
        drawn_log_p = jnp.take_along_axis(
            doc_log_p_BKAV, drawn[:, None, :, None], axis=3)[..., 0].swapaxes(1, 2)  # -> [B, A, K]
        # Also where no token is left: scores that are not finite stay so, for `results.faults`.
        drawn_log_p = jnp.where(state.ended[..., None], 0.0, drawn_log_p)
        ended = state.ended | ~possible
        drawn = jnp.where(ended, model.pad_id, drawn).astype(state.tokens.dtype)
        return state._replace(
            position=position + 1, tokens=state.tokens.at[:, :, position].set(drawn),
            doc_log_p=state.doc_log_p.at[:, :, position].set(drawn_log_p),
            ended=ended | (drawn == model.end_id),
            valid=state.valid & (state.ended | possible), past=past)

    return jax.lax.while_loop(
        lambda state: (state.position < until) & ~state.ended.all(), grow, state)


def answers(model: rag.RagModel, documents: Documents, settings: Decoding, state: State
            ) -> Decoded:
    """The samples, at their end or before."""
    questions = len(state.ended)
    mask = until_end(state.tokens, model.end_id, state.position)
    ranked = explain(model.kind, documents.log_prior, state.tokens, mask, state.doc_log_p,
                     state.valid, model.end_id)
    return Decoded(ranked, documents.prior, jnp.zeros(questions, bool),
                   jnp.full(questions, jnp.inf))


def truncate(log_p: jax.Array, settings: Decoding, temperature: jax.Array | None = None
             ) -> jax.Array:
    """Logits float32[..., V] to sample from: by temperature, then top_k, then top_p.

    Tokens as probable as the last one that stays also stay. log_p: float32[..., V]. temperature:
    float32[..., 1]; None = that of the settings.
    """
    temperature = settings.temperature if temperature is None else temperature
    # What the rules forbid stays below everything else at any temperature.
    logits = jnp.where(log_p > MASKED / 2, log_p / jnp.maximum(temperature, 1e-20), MASKED)
    vocab = logits.shape[-1]
    if 0 < settings.top_k < vocab:
        least = jax.lax.top_k(logits, settings.top_k)[0][..., -1:]
        logits = jnp.where(logits < least, MASKED, logits)
    if settings.top_p < 1:
        descending = -jnp.sort(-logits, axis=-1)
        p = jax.nn.softmax(descending, axis=-1)
        before = jnp.cumsum(p, axis=-1) - p
        # The fewest tokens that together have top_p; the first always stays.
        kept = (before < settings.top_p) | (jnp.arange(vocab) == 0)[(None,) * (before.ndim - 1)]
        least = jnp.where(kept, descending, jnp.inf).min(axis=-1, keepdims=True)
        logits = jnp.where(logits < least, MASKED, logits)
    return logits
