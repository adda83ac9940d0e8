"""From a batch of questions with passages to answers, whichever way of decoding is chosen.

`decode` returns whole answers. Where no token is ever revised (`grows`), `begin` and `go_on` return
the same answers while they are still growing.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from rag_jax import parallel
from rag_jax.decoding import classify, documents, mixture, sampling, sequence
from rag_jax.decoding.beam import BeamState
from rag_jax.decoding.documents import Documents
from rag_jax.decoding.memory import questions_at_once
from rag_jax.decoding.results import Decoded
from rag_jax.decoding.settings import Decoding
from rag_jax.models import batch_check, rag
from rag_jax.models.generator import in_dtype
from rag_jax.types import Batch, Params


def decode(model: rag.RagModel, settings: Decoding, params: Params, batch: Batch,
           key: jax.Array | None = None, temperature: jax.Array | None = None) -> Decoded:
    """Answers to every question; a pure function, to be jitted by the caller.

    Args:
      model: any kind, or a classifier; static under jit.
      settings: static under jit.
      params: all that the model needs; stacks of layers must be looped (`stack.unstack_layers`).
      batch: questions with passages; the targets are not read.
      key: for sampling: one for the batch, or an array of one for each question, so that samples
        do not depend on the question's place in the batch.
      temperature: of sampling, float32[B], for each question; None = that of the settings.

    Raises:
      ValueError: settings that the model does not allow; a key is missing or not needed, or the
        temperature is; the batch does not fit the model (`batch_check.check`).
    """
    params, key = _checked(model, settings, params, batch, key, temperature)
    questions = len(batch.source_ids)
    at_once = _at_once(model, settings, batch)

    def run(rows: tuple[Batch, jax.Array | None, jax.Array | None]) -> Decoded:
        batch, keys, temperature = rows
        if model.classes:
            return classify.decode_by_head(model, params, batch, settings)
        read = documents.read(model, params, batch)
        if settings.labels:
            return classify.decode(model, params, read, settings)
        if not (settings.sample or settings.one_search(model)):
            return sequence.decode(model, params, read, settings)
        begun = _begun(model, settings, params, read, keys, temperature)
        return _until(model, settings, params, begun, settings.max_length)[0]

    if at_once == questions:
        return run((batch, key, temperature))
    # A group takes its questions at equal distances from the whole batch, so that where the batch
    # is split over devices, every device has a share of every group.
    groups = jax.tree.map(
        lambda x: x.reshape(at_once, -1, *x.shape[1:]).swapaxes(0, 1), (batch, key, temperature))
    decoded = jax.lax.map(run, groups)
    return jax.tree.map(
        lambda x: x.swapaxes(0, 1).reshape(questions, *x.shape[2:]), decoded)


class Growing(NamedTuple):
    """The state of a batch's answers between two tokens."""

    documents: Documents
    state: BeamState | sampling.State


def grows(model: rag.RagModel, settings: Decoding, batch: Batch) -> bool:
    """Whether a batch's answers grow (`Decoding.grows`), all at the same time."""
    return settings.grows(model) and _at_once(model, settings, batch) == len(batch.source_ids)


def begin(model: rag.RagModel, settings: Decoding, params: Params, batch: Batch,
          key: jax.Array | None, temperature: jax.Array | None, until: jax.Array
          ) -> tuple[Decoded, Growing]:
    """The first `until` int32[] tokens of the answers of `decode`, and the state for `go_on`.

    The arguments and errors are those of `decode`. From `until` = settings.max_length on, the
    answers are whole.
    """
    params, key = _checked(model, settings, params, batch, key, temperature)
    read = documents.read(model, params, batch)
    begun = _begun(model, settings, params, read, key, temperature)
    return _until(model, settings, params, begun, until)


def go_on(model: rag.RagModel, settings: Decoding, params: Params, growing: Growing,
          until: jax.Array) -> tuple[Decoded, Growing]:
    """The same answers up to `until` tokens."""
    return _until(model, settings, _gathered(model, params), growing, until)


def _begun(model: rag.RagModel, settings: Decoding, params: Params, read: Documents,
           keys: jax.Array | None, temperature: jax.Array | None) -> Growing:
    """The state before the first token."""
    return Growing(read, sampling.begin(model, read, settings, keys, temperature)
                   if settings.sample else mixture.begin(model, params, read, settings))


def _until(model: rag.RagModel, settings: Decoding, params: Params, growing: Growing,
           until: jax.Array | int) -> tuple[Decoded, Growing]:
    """The answers up to `until` tokens, and their state."""
    way, read = sampling if settings.sample else mixture, growing.documents
    state = way.advance(model, params, read, settings, growing.state, until)
    return way.answers(model, read, settings, state), Growing(read, state)


def _checked(model: rag.RagModel, settings: Decoding, params: Params, batch: Batch,
             key: jax.Array | None, temperature: jax.Array | None
             ) -> tuple[Params, jax.Array | None]:
    """The parameters as `_gathered`, and a key for each question; ValueError as `decode` says."""
    settings.check(model)
    batch_check.check(model, batch, settings.max_length)
    if settings.sample != (key is not None):
        raise ValueError("sample=True needs a key, and nothing else takes one")
    if temperature is not None and not (
            settings.sample and jnp.shape(temperature) == (len(batch.source_ids),)):
        raise ValueError(f"temperature has shape {jnp.shape(temperature)}: it is of sampling, and "
                         f"needs one number for each of {len(batch.source_ids)} questions")
    if key is not None and not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(key)  # of jax.random.PRNGKey
    if key is not None and key.ndim == 0:
        key = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(len(batch.source_ids)))
    return _gathered(model, params), key


def _gathered(model: rag.RagModel, params: Params) -> Params:
    """The parameters, with the generator's converted and gathered once, before the loops."""
    generator = parallel.gathered(in_dtype(params["generator"], model.generator.dtype),
                                  model.shapes(("generator",))["generator"])
    return {**params, "generator": generator}


def _at_once(model: rag.RagModel, settings: Decoding, batch: Batch) -> int:
    """How many questions of the batch are decoded at once, by the memory budget."""
    questions, passages, source = batch.source_ids.shape
    if batch.prefixes is not None:
        source += batch.prefixes.keys.shape[-1]
    parts = parallel.row_parts(batch.source_ids)
    return parts * questions_at_once(model, settings, questions // parts, passages, source)
