"""The check that the fields of a batch fit each other and the model.

Sizes are known when a program is traced, so the check costs nothing when it runs. Without it, JAX
would repeat an axis of size 1, and cut off positions that a model does not have.
"""

import jax.numpy as jnp

from rag_jax.models.rag import RagModel
from rag_jax.types import Batch

# The axes of the fields of `Batch`: L, P, S, T and Q are tokens of a question, a passage, a source,
# a target and a classifier's input, Z documents: K, and one more with a null document.
AXES = {
    "doc_mask": "BK", "question_ids": "BL", "question_mask": "BL", "source_ids": "BZS",
    "source_mask": "BZS", "doc_embeddings": "BKE", "target_ids": "BT", "target_mask": "BT",
    "weight": "B", "doc_ids": "BK", "doc_scores": "BK", "passage_ids": "BKP",
    "passage_mask": "BKP", "passage_age": "BK", "decoder_ids": "BQ", "decoder_mask": "BQ",
}


def check(model: RagModel, batch: Batch, longest_answer: int = 0) -> None:
    """Raises a ValueError that names the field whose shape fits the others or the model not, whose
    mask is not bool, or which is longer than the model has positions.

    longest_answer: tokens of an answer that is still to be decoded.
    """
    sizes = {"E": (model.embedding_width, "the model"),
             "Z": (batch.doc_mask.shape[-1] + (model.null_document != "none"),
                   "Batch.doc_mask" + " and the null document" * (model.null_document != "none"))}
    for name, axes in AXES.items():
        value = getattr(batch, name)
        if value is None:
            continue
        wanted = f"Batch.{name} has shape {value.shape}: must be [{', '.join(axes)}]"
        if value.ndim != len(axes):
            raise ValueError(wanted)
        for axis, size in zip(axes, value.shape, strict=True):
            known, where = sizes.setdefault(axis, (size, f"Batch.{name}"))
            if size != known:
                raise ValueError(f"{wanted} with {axis} = {known}, as {where} says")
        if name.endswith("_mask") and value.dtype != jnp.bool:
            raise ValueError(f"Batch.{name} is {value.dtype}: must be bool")
    _check_lengths(model, {axis: size for axis, (size, _) in sizes.items()}, batch, longest_answer)


def _check_lengths(model: RagModel, sizes: dict[str, int], batch: Batch, longest_answer: int
                   ) -> None:
    """Raises a ValueError where something is longer than the model has positions."""
    answer = max(sizes.get("T", 0), longest_answer)
    source = sizes["S"] + (0 if batch.prefixes is None else batch.prefixes.keys.shape[-1])
    lengths = {"question_ids": sizes["L"], "passage_ids": sizes.get("P", 0)}
    limits = [] if model.lexical else [(lengths, model.retriever.max_positions)]
    lengths = {"source_ids": source, "target_ids": answer, "decoder_ids": sizes.get("Q", 0)}
    if model.generator.family == "causal":
        lengths = {"source_ids and the answer that continues them": source + answer}
    limits.append((lengths, model.generator.max_positions))
    for lengths, limit in limits:
        for name, length in lengths.items():
            if length > limit:
                raise ValueError(f"Batch.{name}: {length} tokens, but the model has {limit} "
                                 "positions (max_positions)")
