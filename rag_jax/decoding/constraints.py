"""Rules on which token may come next, applied to its log-probabilities.

A rule takes (tokens int32[R, M, T], position int32[], log_p float32[R, M, V]) and returns log_p
with MASKED for the tokens that it forbids; the others are not renormalised. A forced token gets
log-probability 0, so that forcing it does not change ranks.

Differs from Hugging Face: n-grams are those of the answer, without the decoder's start token. This
matters only for no_repeat_ngram_size=1, where BART's start token </s> could never end an answer.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from rag_jax.decoding.settings import Decoding
from rag_jax.marginal import MASKED

Rule = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def make_rule(settings: Decoding, end_id: int) -> Rule:
    """All rules of `settings` as one; forced tokens override the others."""
    return functools.partial(_allowed, settings, end_id)


def _allowed(settings: Decoding, end_id: int, tokens: jax.Array, position: jax.Array,
             log_p: jax.Array) -> jax.Array:
    vocab = jnp.arange(log_p.shape[-1])
    if settings.no_repeat_ngram_size:
        log_p = _no_repeat_ngram(settings.no_repeat_ngram_size, tokens, position, log_p)
    if settings.bad_words:
        log_p = _no_bad_words(settings.bad_words, tokens, position, log_p)
    if settings.min_length > 1:  # which counts end_id
        early = (vocab == end_id) & (position + 1 < settings.min_length)
        log_p = jnp.where(early[None, None], MASKED, log_p)
    forced = dict(enumerate(settings.prefix or ()))  # position -> the only token there
    if settings.forced_bos is not None:
        forced[0] = settings.forced_bos
    if settings.forced_eos:
        forced[settings.max_length - 1] = end_id
    for place, token in forced.items():
        only = jnp.where(vocab == token, 0.0, MASKED)
        log_p = jnp.where(position == place, only[None, None], log_p)
    return log_p


def _no_bad_words(words: tuple[tuple[int, ...], ...], tokens: jax.Array, position: jax.Array,
                  log_p: jax.Array) -> jax.Array:
    """Forbids the last token of each word after the word's other tokens."""
    if single := [word[0] for word in words if len(word) == 1]:
        log_p = log_p.at[:, :, jnp.array(single)].set(MASKED)
    for word in words:
        if len(word) > 1:
            before = jnp.array(word[:-1])
            last = _last(tokens, position, len(before))  # -> [R, M, n]
            begun = (last == before[None, None]).all(axis=-1) & (position >= len(before))
            log_p = log_p.at[:, :, word[-1]].min(jnp.where(begun, MASKED, jnp.inf))
    return log_p


def _no_repeat_ngram(size: int, tokens: jax.Array, position: jax.Array, log_p: jax.Array
                     ) -> jax.Array:
    """Forbids every token that would repeat an n-gram of `size` tokens."""
    searches, beams, length = tokens.shape
    starts = max(length - size + 1, 0)
    if not starts:
        return log_p
    last = _last(tokens, position, size - 1)
    same = jnp.arange(starts) + size <= position  # the earlier n-gram is complete
    same = jnp.broadcast_to(same[None, None], (searches, beams, starts))
    for offset in range(size - 1):
        same &= tokens[:, :, offset : offset + starts] == last[:, :, offset, None]
    completing = tokens[:, :, size - 1 : size - 1 + starts]
    rows = jnp.arange(searches)[:, None, None], jnp.arange(beams)[None, :, None]
    return log_p.at[*rows, completing].min(jnp.where(same, MASKED, jnp.inf))


def _last(tokens: jax.Array, position: jax.Array, count: int) -> jax.Array:
    """The `count` tokens before `position`, [R, M, count]; undefined if there are fewer."""
    places = jnp.maximum(position - count + jnp.arange(count), 0)
    return tokens[:, :, places]
