"""What hypotheses may go on with: rules on the next token's log-probabilities.

A rule takes (tokens int32[R, M, T], position int32[], log_p float32[R, M, V]) and returns log_p
with MASKED for the tokens that it forbids; forbidden tokens' probability is not given to the
others. A forced token gets log-probability 0, so that forcing does not change ranks.

Differs from Hugging Face: n-grams are those of the answer, without the decoder's start token. That
matters for no_repeat_ngram_size=1 only, where BART's start token </s> could never end an answer.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from rag_jax.decoding.settings import Decoding
from rag_jax.marginal import MASKED

Rule = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def make_rule(settings: Decoding, end_id: int) -> Rule:
    """All rules of `settings`, one after the other; forced tokens override the rest."""
    rules: list[Rule] = []
    if settings.no_repeat_ngram_size:
        rules.append(no_repeat_ngram(settings.no_repeat_ngram_size))
    if settings.bad_words:
        rules.append(no_bad_words(settings.bad_words))
    if settings.min_length > 1:
        rules.append(min_length(settings.min_length, end_id))
    first = settings.prefix or ()
    if settings.forced_bos is not None:
        first = (settings.forced_bos,)
    rules += [forced(token, place) for place, token in enumerate(first)]
    if settings.forced_eos:
        rules.append(forced(end_id, settings.max_length - 1))

    def rule(tokens: jax.Array, position: jax.Array, log_p: jax.Array) -> jax.Array:
        for each in rules:
            log_p = each(tokens, position, log_p)
        return log_p

    return rule


def min_length(length: int, end_id: int) -> Rule:
    """No answer of fewer than `length` tokens, end_id included."""

    def rule(tokens: jax.Array, position: jax.Array, log_p: jax.Array) -> jax.Array:
        ends = jnp.arange(log_p.shape[-1]) == end_id
        return jnp.where((ends & (position + 1 < length))[None, None], MASKED, log_p)

    return rule


def forced(token: int, place: int) -> Rule:
    """`token` and no other at position `place`."""

    def rule(tokens: jax.Array, position: jax.Array, log_p: jax.Array) -> jax.Array:
        only = jnp.where(jnp.arange(log_p.shape[-1]) == token, 0.0, MASKED)
        return jnp.where(position == place, only[None, None], log_p)

    return rule


def no_bad_words(words: tuple[tuple[int, ...], ...]) -> Rule:
    """The last token of a word is forbidden after the word's other tokens."""
    single = [word[0] for word in words if len(word) == 1]
    longer = [word for word in words if len(word) > 1]

    def rule(tokens: jax.Array, position: jax.Array, log_p: jax.Array) -> jax.Array:
        if single:
            log_p = log_p.at[:, :, jnp.array(single)].set(MASKED)
        for word in longer:
            before = jnp.array(word[:-1])
            last = _last(tokens, position, len(before))  # -> [R, M, n]
            begun = (last == before[None, None]).all(axis=-1) & (position >= len(before))
            log_p = log_p.at[:, :, word[-1]].min(jnp.where(begun, MASKED, jnp.inf))
        return log_p

    return rule


def no_repeat_ngram(size: int) -> Rule:
    """Forbids every token that would complete an n-gram of `size` for the second time."""

    def rule(tokens: jax.Array, position: jax.Array, log_p: jax.Array) -> jax.Array:
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

    return rule


def _last(tokens: jax.Array, position: jax.Array, count: int) -> jax.Array:
    """The `count` tokens before `position`, [R, M, count]; junk where there are fewer."""
    places = jnp.maximum(position - count + jnp.arange(count), 0)
    return tokens[:, :, places]
