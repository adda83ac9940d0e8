"""The check that the fields of a batch fit each other and the model.

Sizes are known when a program is traced, so the check costs nothing when it runs. Without it, JAX
would repeat an axis of size 1, and cut off positions that a model does not have.
"""

import jax
import jax.numpy as jnp

from rag_jax.models.rag import RagModel
from rag_jax.types import Batch

# The axes of the fields of `Batch`. Questions and passages each have an L of their own; with a null
# document, sources have one K more.
AXES = {
    "doc_mask": "BK", "question_ids": "BL", "question_mask": "BL", "source_ids": "BKS",
    "source_mask": "BKS", "doc_embeddings": "BKE", "target_ids": "BT", "target_mask": "BT",
    "weight": "B", "doc_ids": "BK", "doc_scores": "BK", "passage_ids": "BKL",
    "passage_mask": "BKL", "passage_age": "BK", "decoder_ids": "BQ", "decoder_mask": "BQ",
}


def check(model: RagModel, batch: Batch, longest_answer: int = 0) -> None:
    """Raises a ValueError that names a field which does not fit the others or the model: by its
    shape or type, without the field that belongs to it, or with more tokens than the model has
    positions; or which is missing or empty, or is split over explicit axes of a mesh.

    longest_answer: tokens of an answer that is still to be decoded; 0 = the batch has the answers.
    """
    if not longest_answer and (batch.target_ids is None or batch.target_mask is None):
        raise ValueError("Batch.target_ids or target_mask is None: a likelihood is that of answers")
    for name in _needed(model, batch):
        if getattr(batch, name) is None:
            raise ValueError(f"Batch.{name} is None: this model reads it")
    sizes = _sizes(model, batch)
    if not (sizes["B"] or longest_answer):
        raise ValueError("Batch.doc_mask has no row: a likelihood is that of one question at least")
    if not sizes["sources"]:
        raise ValueError("Batch.doc_mask has no column: a question has one passage at least")
    placed = jax.typeof(batch.doc_mask).sharding
    if jax.sharding.AxisType.Explicit in placed.mesh.axis_types and any(placed.spec):
        raise ValueError("Batch.doc_mask is split over explicit axes of a mesh, as jax.make_mesh "
                         "makes them: give it axis_types=(jax.sharding.AxisType.Auto,) * AXES")
    for name in ("source_places", "target_places"):
        places = getattr(batch, name)
        if places is not None and (places.ndim != 2 or sizes["B"] % len(places)):
            raise ValueError(f"Batch.{name} has shape {places.shape}: must be [G, N], where the G "
                             f"groups divide {sizes['B']} questions")
    _check_lengths(model, sizes, longest_answer)


def _needed(model: RagModel, batch: Batch) -> list[str]:
    """The fields without which the model cannot read a batch, whatever is asked of it."""
    needed = ["doc_mask", "source_ids", "source_mask"]
    if not (model.lexical or model.reranked):
        needed += ["question_ids", "question_mask"]
        needed += ["doc_embeddings"] * (batch.passage_ids is None)
    if model.reranked or model.fusion is not None:
        needed.append("doc_scores")
    if model.classes:
        needed += ["decoder_ids", "decoder_mask"]
    return needed


def _sizes(model: RagModel, batch: Batch) -> dict[str, int]:
    """The sizes of all axes, of which "question" and "passage" are L, and "sources" is K; raises
    ValueError as `check`."""
    null = model.null_document != "none"
    sizes = {"E": (model.embedding_width, "the model"),
             "sources": (sum(jnp.shape(batch.doc_mask)[-1:]) + null,
                         "Batch.doc_mask" + " with the null document" * null)}
    for name, axes in AXES.items():
        value = getattr(batch, name)
        if value is None:
            continue
        if not hasattr(value, "dtype"):
            raise ValueError(f"Batch.{name} is a {type(value).__name__}: must be an array")
        wanted = f"Batch.{name} has shape {value.shape}: must be [{', '.join(axes)}]"
        if value.ndim != len(axes):
            raise ValueError(wanted)
        own = {"L": name.split("_")[0], "K": "sources" if "S" in axes else "K"}
        for axis, size in zip(axes, value.shape, strict=True):
            known, where = sizes.setdefault(own.get(axis, axis), (size, f"Batch.{name}"))
            if size != known:
                raise ValueError(f"{wanted} with {axis} = {known}, as {where} says")
        if name.endswith("_mask") and value.dtype != jnp.bool:
            raise ValueError(f"Batch.{name} is {value.dtype}: must be bool")
        if name.endswith("_ids") and not jnp.issubdtype(value.dtype, jnp.integer):
            raise ValueError(f"Batch.{name} is {value.dtype}: must be int32")
        beside = name.removesuffix("ids") + "mask"
        if name.endswith("_ids") and beside in AXES and getattr(batch, beside) is None:
            raise ValueError(f"Batch.{name} is there, and {beside} is None: give both, or neither")
    return {axis: size for axis, (size, _) in sizes.items()}


def _check_lengths(model: RagModel, sizes: dict[str, int], longest_answer: int) -> None:
    """Raises a ValueError where something is longer than the model has positions."""
    source, answer = sizes["S"], max(sizes.get("T", 0), longest_answer)
    question = sizes.get("Q", 0)  # of a classifier's decoder
    lengths = [("source_ids", source, model.generator), ("target_ids", answer, model.generator),
               ("decoder_ids", question, model.generator)]
    if model.generator.family == "causal":
        lengths = [("source_ids and the answer that continues them", source + answer,
                    model.generator),
                   ("source_ids and the decoder_ids that continue them", source + question,
                    model.generator)]
    if not model.lexical:
        lengths += [("question_ids", sizes.get("question", 0), model.retriever),
                    ("passage_ids", sizes.get("passage", 0), model.retriever)]
    for name, length, tower in lengths:
        if length > tower.max_positions:
            raise ValueError(f"Batch.{name}: {length} tokens, but the model has "
                             f"{tower.max_positions} positions (max_positions)")
