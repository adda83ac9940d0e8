"""A batch whose fields do not fit each other or the model is refused, with the field's name."""

import dataclasses
from contextlib import nullcontext

import jax
import numpy as np
import pytest
import tiny
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from rag_jax.config import CausalConfig
from rag_jax.decoding.answer import decode
from rag_jax.decoding.settings import Decoding
from rag_jax.fusion import Fusion
from rag_jax.models import batch_check
from rag_jax.models.likelihood import log_likelihood

MODEL = tiny.rag_model()
BATCH = tiny.rag_batch()


def long(tokens):
    return np.zeros((3, tokens), np.int32), np.ones((3, tokens), bool)


@pytest.mark.parametrize("field, value, words", [
    # Each of the first four was repeated to the size of the others.
    ("doc_embeddings", BATCH.doc_embeddings[..., :1], r"doc_embeddings has shape \(3, 3, 1\)"),
    ("doc_embeddings", BATCH.doc_embeddings[:1], "with B = 3, as Batch.doc_mask says"),
    ("target_mask", BATCH.target_mask[:1], "Batch.target_mask has shape"),
    ("question_mask", BATCH.question_mask[:, :1],
     r"must be \[B, L\] with L = 6, as Batch.question_ids says"),
    ("source_mask", BATCH.source_mask[:, 0], r"source_mask .* must be \[B, K, S\]"),
    ("source_ids", BATCH.source_ids[:, :2], "with K = 3, as Batch.doc_mask says"),
    ("doc_mask", None, "Batch.doc_mask is None: this model reads it"),
    ("doc_mask", np.bool_(True), r"Batch.doc_mask has shape \(\): must be \[B, K\]"),
    ("source_ids", None, "Batch.source_ids is None"),
    ("source_mask", None, "Batch.source_mask is None"),
    ("question_ids", None, "Batch.question_ids is None"),
    ("question_mask", None, "Batch.question_mask is None"),
    ("doc_embeddings", None, "Batch.doc_embeddings is None"),
    ("doc_mask", BATCH.doc_mask.astype(np.int32), "Batch.doc_mask is int32: must be bool"),
    ("target_ids", None, "Batch.target_ids or target_mask is None"),
    ("question_ids", BATCH.question_ids.tolist(), "Batch.question_ids is a list: must be an array"),
    ("source_ids", BATCH.source_ids.astype(np.float32), "source_ids is float32: must be int32"),
    ("passage_ids", BATCH.source_ids, "passage_ids is there, and passage_mask is None: give both"),
    ("target_places", np.zeros((2, 4), np.int32), r"target_places has shape \(2, 4\): must be"),
    ("source_places", np.zeros(4, np.int32), r"source_places has shape \(4,\): must be"),
])
def test_a_field_that_does_not_fit_is_named(field, value, words):
    with pytest.raises(ValueError, match=words):
        log_likelihood(MODEL, {}, BATCH._replace(**{field: value}))


def test_a_batch_without_a_question_has_no_likelihood_and_no_answers():
    """It was a division by zero in a layer."""
    none = jax.tree.map(lambda x: x[:0], BATCH)
    with pytest.raises(ValueError, match="a likelihood is that of one question at least"):
        log_likelihood(MODEL, {}, none)
    found = decode(MODEL, Decoding(num_beams=2, max_length=3), tiny.rag_params(MODEL), none)
    assert found.ranked.tokens.shape == (0, 1, 3)


def test_a_question_without_a_passage_is_refused_but_with_a_null_document():
    none = BATCH._replace(**{name: getattr(BATCH, name)[:, :0] for name, axes
                             in batch_check.AXES.items()
                             if "K" in axes and getattr(BATCH, name) is not None})
    with pytest.raises(ValueError, match="a question has one passage at least"):
        batch_check.check(MODEL, none)
    batch_check.check(dataclasses.replace(MODEL, null_document="bias"), none._replace(
        source_ids=BATCH.source_ids[:, :1], source_mask=BATCH.source_mask[:, :1]))


def test_what_a_model_does_not_read_may_be_missing():
    bare = BATCH._replace(question_ids=None, question_mask=None, doc_embeddings=None)
    batch_check.check(dataclasses.replace(MODEL, lexical=True), bare)
    embedded = BATCH._replace(doc_embeddings=None, passage_ids=BATCH.source_ids,
                              passage_mask=BATCH.source_mask)
    batch_check.check(MODEL, embedded)
    reranks = dataclasses.replace(MODEL, reranked=True)
    with pytest.raises(ValueError, match="Batch.doc_scores is None"):
        batch_check.check(reranks, BATCH)
    scored = bare._replace(doc_scores=BATCH.doc_embeddings[..., 0])
    batch_check.check(reranks, scored)
    joins = dataclasses.replace(MODEL, fusion=Fusion("convex", 0.5))
    with pytest.raises(ValueError, match="Batch.doc_scores is None"):
        batch_check.check(joins, BATCH)
    batch_check.check(joins, BATCH._replace(doc_scores=scored.doc_scores))
    classifies = dataclasses.replace(MODEL, classes=3)
    with pytest.raises(ValueError, match="Batch.decoder_ids is None"):
        batch_check.check(classifies, BATCH)
    batch_check.check(classifies, BATCH._replace(
        decoder_ids=BATCH.question_ids, decoder_mask=BATCH.question_mask))


def test_a_batch_that_is_split_over_explicit_axes_is_refused():
    """The first embedding table failed, with an error of JAX about out_sharding; a whole copy on
    each device, or on the only one, has a likelihood."""
    for kind, axes, told in ((AxisType.Explicit, ("data",), "split over explicit axes"),
                             (AxisType.Auto, ("data",), None), (AxisType.Explicit, (), None)):
        mesh = jax.make_mesh((3,), ("data",), axis_types=(kind,), devices=jax.devices()[:3])
        placed = jax.device_put(BATCH, NamedSharding(mesh, PartitionSpec(*axes)))
        with pytest.raises(ValueError, match=told) if told else nullcontext():
            batch_check.check(MODEL, placed)
    given = tiny.rag_params(MODEL), BATCH
    copies = jax.device_put(given, NamedSharding(mesh, PartitionSpec()))
    log_p = tiny.jit(lambda params, batch: log_likelihood(MODEL, params, batch)["log_p"])
    np.testing.assert_allclose(log_p(*copies), log_p(*given), rtol=1e-5)


def test_a_null_document_is_one_more_source():
    with pytest.raises(ValueError, match="K = 4, as Batch.doc_mask with the null document says"):
        batch_check.check(dataclasses.replace(MODEL, null_document="bias"), BATCH)


def test_what_is_longer_than_the_model_has_positions_is_named():
    batch_check.check(MODEL, BATCH)
    limits = {"question": MODEL.retriever, "target": MODEL.generator}
    for name, tower in limits.items():
        ids, mask = long(tower.max_positions)
        batch = BATCH._replace(**{f"{name}_ids": ids, f"{name}_mask": mask})
        batch_check.check(MODEL, batch)
        ids, mask = long(tower.max_positions + 1)
        with pytest.raises(ValueError, match=f"Batch.{name}_ids: {tower.max_positions + 1} tokens"):
            batch_check.check(MODEL, batch._replace(**{f"{name}_ids": ids, f"{name}_mask": mask}))


def test_a_decoder_only_answer_continues_its_prompt():
    """Their positions are counted together; an answer still to be decoded, too."""
    model = tiny.rag_model(generator=CausalConfig(vocab_size=30, max_positions=12))
    batch_check.check(model, BATCH)
    batch_check.check(model, BATCH, 6)
    with pytest.raises(ValueError, match="continues them: 13 tokens, but the model has 12"):
        batch_check.check(model, BATCH, 7)


def test_a_decoder_only_classifier_reads_the_question_behind_its_prompt():
    model = tiny.rag_model(generator=CausalConfig(vocab_size=30, max_positions=12), classes=2)
    ids, mask = long(6)
    batch = BATCH._replace(decoder_ids=ids, decoder_mask=mask)
    batch_check.check(model, batch)
    ids, mask = long(7)
    with pytest.raises(ValueError, match="decoder_ids that continue them: 13 tokens, but the mod"):
        batch_check.check(model, batch._replace(decoder_ids=ids, decoder_mask=mask))


def test_in_batch_negatives_need_the_rows_of_the_passages():
    with pytest.raises(ValueError, match="Batch.doc_ids is None"):
        log_likelihood(MODEL, {}, BATCH._replace(doc_ids=None), in_batch_negatives=True)
