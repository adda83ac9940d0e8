"""The generator's input from token arrays: `GeneratorFormat.join`, inside a jitted program."""

import jax
import jax.numpy as jnp

from rag_jax.data.text import GeneratorFormat


def compose(format: GeneratorFormat, passages: jax.Array, lengths: jax.Array,
            suffixes: jax.Array, suffix_mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """<s> passage question </s>, as `format` has it, for every passage of every question.

    Args:
      format: the layout of the generator's input.
      passages: int32[B, K, P], token rows, cut to no less than format.room.
      lengths: int32[B, K], tokens in them.
      suffixes: int32[B, Q], the question's tokens.
      suffix_mask: bool[B, Q], True for the first tokens of a row, which are real.

    Returns:
      ids int32[B, K, S] and mask bool[B, K, S] with S = format.max_length: shapes in a jitted
      program are fixed, so every input is padded to the longest.
    """
    tokenizer, room, begin = format.tokenizer, format.room, len(format.begin)
    asked = suffix_mask.sum(axis=-1, dtype=jnp.int32)[:, None]  # -> [B, 1]
    if format.like_hugging_face:
        read = jnp.minimum(lengths, room)
        asked = jnp.minimum(asked, room - read)
    else:
        asked = jnp.minimum(asked, room)
        read = jnp.minimum(lengths, room - asked)
        asked = jnp.broadcast_to(asked, read.shape)
    read, asked = read[..., None], asked[..., None]
    place = jnp.arange(format.max_length, dtype=jnp.int32)[None, None]  # [1, 1, S]

    def pick(rows: jax.Array, at: jax.Array) -> jax.Array:
        return jnp.take_along_axis(rows, jnp.clip(at, 0, rows.shape[-1] - 1), axis=-1)

    parts = [(passages, read), (suffixes[:, None], asked)]
    (first, length), (second, _) = reversed(parts) if format.question_first else parts
    end = begin + read + asked
    place = jnp.broadcast_to(place, (*read.shape[:2], format.max_length))
    ids = jnp.where(place < end, pick(second, place - begin - length), tokenizer.pad)
    ids = jnp.where(place < begin + length, pick(first, place - begin), ids)
    for at, around in ((place, format.begin), (place - end, format.foot)):
        if around:
            row = jnp.array(around, jnp.int32)[None, None]
            ids = jnp.where((at >= 0) & (at < len(around)), pick(row, at), ids)
    return ids.astype(jnp.int32), place < end + len(format.foot)
