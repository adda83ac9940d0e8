"""Several tokens from one step of the generator, where an answer quotes what it has read.

Where reading the parameters takes longest, a step for a few tokens takes little longer than for
one. So the tokens that followed the answer's last ones in the passages, or earlier in the answer,
are computed together with the next token. As long as the answer goes on as guessed, its
distributions are there already; from the first token that differs, they are computed anew. Whoever
chooses the tokens, a search or a sampler, sees the same distributions as without guesses, up to the
rounding of products of more rows.

This is prompt lookup decoding (Saxena 2023; inference with reference, Yang et al. 2023, arXiv
2304.04487), here for the mixture of K documents: the guesses come from all of them. Hugging Face's
`prompt_lookup_num_tokens` is for one sequence at a time; here all hypotheses of a batch take a
step together, which is left out only where every one that has not ended goes on as guessed.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from rag_jax.decoding import documents
from rag_jax.decoding.documents import Documents, Past
from rag_jax.decoding.settings import Decoding
from rag_jax.models import rag
from rag_jax.types import Params

LONGEST = 3  # how many of an answer's last tokens are compared; the longest match is taken


class Guessed(NamedTuple):
    """The past of M hypotheses of each search, some of whose last tokens were guesses."""

    past: Past
    inputs: jax.Array  # int32[searches, M, T], the decoder's inputs so far
    guessed: jax.Array  # int32[searches, N, M], those of the last step: the first was none
    begin: jax.Array  # int32[], the position of the first of them
    log_p: jax.Array  # float32[searches, K, N, M, V], `documents.step` of them


def empty_past(model: rag.RagModel, found: Documents, searches: int, settings: Decoding
               ) -> Past | Guessed:
    """A past without tokens, for guesses if the settings ask for them."""
    count, length, more = settings.hypotheses, settings.max_length, settings.guesses(model)
    past = documents.empty_past(found, searches, count, length + more)
    if not more:
        return past
    steps, passages = 1 + more, found.mask.shape[0] // searches
    log_p = jnp.zeros((searches, passages, steps, count, model.generator.vocab_size), jnp.float32)
    return Guessed(past, jnp.zeros((searches, count, length), jnp.int32),
                   jnp.zeros((searches, steps, count), jnp.int32), jnp.int32(-steps), log_p)


def step(model: rag.RagModel, params: Params, found: Documents, tokens: jax.Array,
         position: jax.Array, past: Past | Guessed, running: jax.Array
         ) -> tuple[jax.Array, Past | Guessed]:
    """Log-probabilities of the next token of every hypothesis, given each document.

    Args:
      tokens: int32[searches, M], the decoder's inputs; a search reads R/searches = K documents.
      position: int32[], that of these inputs.
      past: of the positions before.
      running: bool[searches, M], False where the result decides nothing: with guesses it may then
        be that of other tokens.

    Returns:
      log p(next token | x, z, tokens so far) float32[searches, K, M, V], and the past with this
      position.
    """
    if isinstance(past, Past):
        log_p, past = documents.step(model, params, found, tokens[:, None], position, past)
        return log_p[:, :, 0], past
    past = past._replace(inputs=past.inputs.at[:, :, position].set(tokens))
    steps = past.guessed.shape[1]

    def unknown(past: Guessed) -> jax.Array:
        place = position - past.begin
        other = past.guessed[:, jnp.minimum(place, steps - 1)] != tokens
        return (place >= steps) | (other & running).any()

    def compute(past: Guessed) -> Guessed:
        ahead = guesses(found.ids, past.inputs, position, steps - 1)
        guessed = jnp.concatenate([tokens[:, None], ahead.swapaxes(1, 2)], axis=1)
        log_p, own = documents.step(model, params, found, guessed, position, past.past)
        return Guessed(own, past.inputs, guessed, position, log_p)

    # It runs once at most. A conditional would copy the past, whichever way it went.
    past = jax.lax.while_loop(unknown, compute, past)
    return past.log_p[:, :, position - past.begin], past


def guesses(ids: jax.Array, inputs: jax.Array, position: jax.Array, count: int) -> jax.Array:
    """The `count` tokens int32[searches, M, count] that may follow the inputs up to a position.

    They followed the longest match of at most `LONGEST` of the last inputs, the first in what was
    read, or else in the inputs. A match so near the end that fewer tokens follow it repeats them.

    Args:
      ids: int32[searches, L], what was read.
      inputs: int32[searches, M, T], known up to `position` int32[].
    """
    length, hypotheses = ids.shape[1], inputs.shape[1]
    read = jnp.broadcast_to(ids[:, None], (len(ids), hypotheses, length))
    text = jnp.concatenate([read, inputs], axis=2)  # -> [searches, M, L + T]
    place, end = jnp.arange(text.shape[2]), length + position
    before = jnp.where(place < length, place, place - length)  # tokens in what was read, or inputs
    alike = (place < end) & (place != length - 1)  # at least one token follows
    alike, matched = jnp.broadcast_to(alike[None, None], text.shape), 0
    for back in range(LONGEST):
        inside = (before >= back) & (position >= back)
        last = text[:, :, end - back, None]
        alike &= (jnp.roll(text, back, axis=2) == last) & inside[None, None]
        matched += alike.astype(jnp.int32)
    first = matched.argmax(axis=2)[..., None]
    period = jnp.where(first < length, count, end - first)
    following = first + 1 + jnp.arange(count)[None, None] % period
    return jnp.take_along_axis(text, following, axis=2, mode="clip")
