"""From a batch of questions with passages to answers, by every way of decoding."""

import jax
import jax.numpy as jnp

from rag_jax import parallel
from rag_jax.decoding import classify, documents, mixture, sampling, sequence
from rag_jax.decoding.memory import questions_at_once
from rag_jax.decoding.results import Decoded
from rag_jax.decoding.settings import Decoding
from rag_jax.models import rag
from rag_jax.models.generator import in_dtype
from rag_jax.types import Batch, Params


def decode(model: rag.RagModel, settings: Decoding, params: Params, batch: Batch,
           key: jax.Array | None = None, temperature: jax.Array | None = None) -> Decoded:
    """Answers to every question; a pure function, to be jitted by the caller.

    Args:
      model: any kind, or a classifier; scanned layers must be unstacked.
      settings: how; static under jit.
      params: query encoder and generator.
      batch: questions with passages; the targets are not read.
      key: for sampling: one for the batch, or an array of one for each question, with which
        samples do not depend on the question's place.
      temperature: of sampling, float32[B], for each question; None = that of the settings.

    Raises:
      ValueError: settings that the model does not allow; a key is missing or not needed.
    """
    settings.check(model)
    if settings.sample != (key is not None):
        raise ValueError("sample=True needs a key, and nothing else takes one")
    questions, passages, source = batch.source_ids.shape
    if batch.prefixes is not None:
        source += batch.prefixes.keys.shape[-1]
    if key is not None and key.ndim == 0:
        key = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(questions))

    generator = parallel.gathered(in_dtype(params["generator"], model.generator.dtype),
                                  model.shapes(("generator",))["generator"])
    params = {**params, "generator": generator}

    def run(rows: tuple[Batch, jax.Array | None, jax.Array | None]) -> Decoded:
        batch, keys, temperature = rows
        if model.classes:
            return classify.decode_by_head(model, params, batch, settings)
        read = documents.read(model, params, batch)
        if settings.labels:
            return classify.decode(model, params, read, settings)
        if settings.sample:
            return sampling.decode(model, params, read, settings, keys, temperature)
        if model.kind == "sequence" and settings.strategy != "marginal":
            return sequence.decode(model, params, read, settings)
        return mixture.decode(model, params, read, settings)

    parts = parallel.row_parts(batch.source_ids)
    at_once = parts * questions_at_once(model, settings, questions // parts, passages, source)
    if at_once == questions:
        return run((batch, key, temperature))
    # Each group takes questions from all over the batch: where the batch is split over devices,
    # every device has its share of every group.
    groups = jax.tree.map(
        lambda x: x.reshape(at_once, -1, *x.shape[1:]).swapaxes(0, 1), (batch, key, temperature))
    decoded = jax.lax.map(run, groups)
    return jax.tree.map(
        lambda x: x.swapaxes(0, 1).reshape(questions, *x.shape[2:]), decoded)
