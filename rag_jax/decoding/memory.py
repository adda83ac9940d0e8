"""How much is computed at once: estimates of memory from shapes, in bytes."""

import jax.numpy as jnp

from rag_jax.decoding.settings import Decoding
from rag_jax.models.rag import RagModel

FLOAT = 4
MIB = 2**20
CACHED = 16 * MIB  # feed-forward states of as many bytes are encoded fastest on a CPU
BUSY = 1024  # tokens in a pass that keep a device busy


def question_bytes(model: RagModel, settings: Decoding, passages: int, source: int) -> int:
    """Bytes to encode K passages of S tokens and to search them with M hypotheses of T tokens for
    each passage or, in Fusion-in-Decoder, for all of them."""
    c, length = model.generator, settings.max_length
    beams, guesses = settings.hypotheses, settings.guesses(model)
    stored = jnp.dtype(c.dtype).itemsize
    encoding = source * (8 * c.width + 2 * c.mlp_width) + c.heads * source * source
    cross = 2 * c.decoder_layers * source * c.cached_width
    past = 2 * c.decoder_layers * beams * (length + guesses) * c.cached_width
    own = c.decoder_sizes[0] * beams * (1 + guesses) * beams * length  # each with all, masked
    logits = 2 * beams * (1 + guesses) * c.vocab_size
    documents = 1 if model.fuses else passages
    return (passages * (FLOAT * encoding + stored * cross)
            + documents * (FLOAT * (own + logits) + stored * 2 * past))


def candidate_bytes(model: RagModel, length: int, source: int) -> int:
    """Bytes to score one answer of T tokens given one passage of S tokens."""
    c = model.generator
    heads, mlp_width = c.decoder_sizes
    hidden = length * (8 * c.width + 2 * mlp_width) + heads * length * source
    return FLOAT * (hidden + 2 * min(c.logit_chunk, length) * c.vocab_size)


def questions_at_once(model: RagModel, settings: Decoding, questions: int, passages: int,
                      source: int) -> int:
    """How many questions are decoded at once: the largest divisor of `questions` that fits half the
    budget, or 1 if none does."""
    if not settings.memory_mib:
        return questions
    room = settings.memory_mib * MIB // 2
    return _divisor(questions, room // question_bytes(model, settings, passages, source))


def documents_at_once(model: RagModel, documents: int, passages: int, source: int) -> int:
    """How many documents, of so many passages of S tokens each, a CPU encodes at once: a divisor
    of `documents`.

    One product of 6,400 rows takes it a third longer than ten products of 640 rows, whose operands
    stay in its cache.
    """
    return _divisor(documents, CACHED // (FLOAT * passages * source * model.generator.mlp_width))


def _divisor(number: int, most: int) -> int:
    """The largest divisor of `number` that is at most `most`, and at least 1."""
    return max((n for n in range(1, number + 1) if number % n == 0 and n <= most), default=1)


def candidates_at_once(model: RagModel, memory_mib: int, rows: int, candidates: int, length: int,
                       source: int) -> int:
    """How many answers to score in one pass for each of `rows` passages; at least 1.

    They fit half the budget, and are no more than keep the device busy: after the last answer that
    is needed there are no more passes, so that small passes score fewer answers in vain.
    """
    enough = min(candidates, -(-BUSY // (rows * length)))
    return answers_that_fit(model, memory_mib, rows, enough, length, source)


def answers_that_fit(model: RagModel, memory_mib: int, rows: int, answers: int, length: int,
                     source: int) -> int:
    """How many of `answers` for each of `rows` passages fit half the budget; at least 1."""
    if not memory_mib:
        return answers
    room = memory_mib * MIB // 2
    return max(1, min(answers, room // (rows * candidate_bytes(model, length, source))))
