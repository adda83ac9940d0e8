"""DPR's towers and the whole RAG model: oracle, invariances, gradients, memory."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import naive
import numpy as np
import pytest
import tiny

from rag_jax import parallel
from rag_jax.config import MeshConfig
from rag_jax.data import packed
from rag_jax.models import rag, teacher_forcing
from rag_jax.models.likelihood import log_likelihood, token_log_probs
from rag_jax.training.step import rag_loss, seq2seq_loss
from rag_jax.types import Seq2SeqBatch

KINDS = ["token", "sequence"]
SMOOTHING = 0.1
MODEL = tiny.rag_model(retriever={"projection": 12})
BATCH = tiny.rag_batch(model=MODEL)


@pytest.fixture(scope="module")
def params():
    return tiny.rag_params(MODEL)


@functools.partial(tiny.jit, static_argnames=("kind", "smoothing"))
def likelihood(params, batch, kind="token", smoothing=0.0):
    model = tiny.rag_model(kind, retriever={"projection": 12})
    return log_likelihood(model, params, batch, smoothing)


@functools.partial(tiny.jit, static_argnames="kind")
def loss_and_gradient(params, batch, kind):
    """Of the parameters and of the index's embeddings."""
    model = tiny.rag_model(kind, retriever={"projection": 12})

    def value(params, embeddings):
        batch_with = batch._replace(doc_embeddings=embeddings)
        return rag_loss(model, SMOOTHING)(params, batch_with, None)[0]

    return jax.value_and_grad(value, argnums=(0, 1))(params, batch.doc_embeddings)


log_probs = tiny.jit(lambda *given: token_log_probs(MODEL, *given)[0])


def test_dpr_is_the_projected_cls_state(params):
    """[CLS] is the first position whatever the mask; no pooler; float32 out."""
    tower = params["query_encoder"]
    embed = tiny.jit(functools.partial(rag.embed, MODEL))
    found = embed(tower, BATCH.question_ids, BATCH.question_mask)
    zeros = np.zeros_like(BATCH.question_ids[0])
    expected = [
        naive.linear(naive.bert(tower["bert"], ids, mask, zeros, heads=2)[0], tower["projection"])
        for ids, mask in zip(BATCH.question_ids, BATCH.question_mask, strict=True)]
    assert found.shape == (3, 12) and found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-5)
    other = embed(params["document_encoder"], BATCH.question_ids, BATCH.question_mask)
    assert np.abs(found - other).max() > 0.1


@pytest.mark.parametrize("tanh", [False, True])
def test_a_sentence_encoder_is_the_projected_mean_of_length_1(params, tanh):
    """Padding is no part of the mean, how much of it there is changes nothing."""
    tower = params["query_encoder"]
    model = tiny.rag_model(retriever={"projection": 12, "pooling": "mean", "normalize": True,
                                      "projection_tanh": tanh})
    embed = tiny.jit(functools.partial(rag.embed, model))
    found = embed(tower, BATCH.question_ids, BATCH.question_mask)
    zeros = np.zeros_like(BATCH.question_ids[0])
    for row, ids, mask in zip(found, BATCH.question_ids, BATCH.question_mask, strict=True):
        states = naive.bert(tower["bert"], ids, mask, zeros, heads=2)
        vector = naive.linear(states[mask].mean(axis=0), tower["projection"])
        vector = np.tanh(vector) if tanh else vector
        np.testing.assert_allclose(row, vector / np.linalg.norm(vector), rtol=1e-4, atol=2e-5)
    wider = embed(tower, np.pad(BATCH.question_ids, ((0, 0), (0, 3)), constant_values=7),
                  np.pad(BATCH.question_mask, ((0, 0), (0, 3))))
    np.testing.assert_allclose(wider, found, atol=1e-6)


@pytest.mark.parametrize("model_type", ["roberta", "modernbert"])
def test_one_device_equals_eight_for_sentence_encoders(model_type):
    """A mean over tokens, or a product of queries, keys and values at once, split wrongly."""
    model = tiny.rag_model(retriever={
        "pooling": "mean", "normalize": True, "model_type": model_type, "layers": 2})
    boxed = model.init(jax.random.key(0), ("query_encoder",))
    params, mesh = tiny.perturbed(boxed), parallel.make_mesh(MeshConfig(2, 2, 2))
    batch = tiny.rag_batch(model=model, questions=8)
    rows = batch.question_ids, batch.question_mask
    weights = np.random.default_rng(0).normal(size=(8, model.embedding_width))

    def value(params, ids, mask):
        vectors = rag.embed(model, params["query_encoder"], ids, mask)
        return (vectors * weights).sum(), vectors

    run = tiny.jit(jax.value_and_grad(value, has_aux=True))
    alone = run(params, *rows)
    placed = jax.device_put(params, parallel.param_shardings(boxed, mesh))
    split = run(placed, *parallel.put_batch(rows, mesh))
    tiny.assert_trees_close(split, alone, rtol=1e-4, atol=1e-5)


def test_a_kind_of_model_that_does_not_exist_is_told_the_others():
    with pytest.raises(ValueError, match="kind='tokens': one of sequence, token, fid"):
        tiny.rag_model("tokens")


def test_the_scale_multiplies_the_logits_and_learns(params):
    """Five cosines have a nearly flat softmax; its gradient is that of finite differences."""
    plain = tiny.rag_model(retriever={"normalize": True, "scale": 1.0})
    fixed = tiny.rag_model(retriever={"normalize": True})
    learned = tiny.rag_model(retriever={"normalize": True, "learn_scale": True})
    assert fixed.retriever.logit_scale == 20
    given = tiny.rag_params(plain)
    assert "scale" not in given["query_encoder"]
    assert tiny.rag_params(learned)["query_encoder"]["scale"].shape == ()
    batch = tiny.rag_batch(model=plain)
    unit = np.asarray(rag.embed(plain, given["query_encoder"], batch.question_ids,
                                batch.question_mask))
    cosines = np.einsum("BE,BKE->BK", unit, batch.doc_embeddings)

    def value(scale):
        encoder = {**given["query_encoder"], "scale": scale}
        return log_likelihood(learned, {**given, "query_encoder": encoder}, batch)

    expected = jax.nn.log_softmax(jnp.where(batch.doc_mask, 20 * cosines, -1e9))
    found = jnp.log(log_likelihood(fixed, given, batch)["prior"])
    some = batch.doc_mask
    np.testing.assert_allclose(found[some], expected[some], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(value(0.0)["prior"], jnp.exp(found), rtol=1e-5)
    total = tiny.jit(jax.value_and_grad(lambda scale: value(scale)["log_p"].sum()))
    slope = (total(0.01)[0] - total(-0.01)[0]) / 0.02
    np.testing.assert_allclose(total(0.0)[1], slope, rtol=0.02)
    assert abs(slope) > 0.01



def naive_likelihood(params, kind, smoothing):
    """log p(y | x) and p(z | x, y) of the batch: numpy float64 from token ids to marginal."""
    results, posteriors = [], np.zeros((3, 3))
    for b in range(3):
        zeros = np.zeros_like(BATCH.question_ids[b])
        query = naive.linear(
            naive.bert(params["query_encoder"]["bert"], BATCH.question_ids[b],
                       BATCH.question_mask[b], zeros, heads=2)[0],
            params["query_encoder"]["projection"])
        real = BATCH.doc_mask[b]
        prior = naive.log_softmax(naive.f64(BATCH.doc_embeddings[b][real]) @ query)
        length = int(BATCH.target_mask[b].sum())
        targets = BATCH.target_ids[b][:length]
        rows = []
        for k in np.flatnonzero(real):
            log_p = naive.log_softmax(naive.bart_logits(
                params["generator"], BATCH.source_ids[b, k], BATCH.source_mask[b, k],
                np.concatenate([[tiny.END], targets[:-1]]).astype(int), heads=2))
            picked = log_p[np.arange(length), targets]
            rows.append((1 - smoothing) * picked + smoothing * log_p.mean(axis=1))
        p = np.exp(np.array(rows))
        if kind == "sequence":
            joint = np.exp(prior) * p.prod(axis=1)
            results.append(np.log(joint.sum()))
            posteriors[b, real] = joint / joint.sum()
        else:
            joint = np.exp(prior)[:, None] * p
            results.append(np.log(joint.sum(axis=0)).sum())
            posteriors[b, real] = (joint / joint.sum(axis=0)).mean(axis=1)
    return results, posteriors


@pytest.mark.parametrize("kind", KINDS)
def test_log_likelihood_matches_float64_from_end_to_end(params, kind):
    """shift_right, the repeat over documents, prior, smoothing and masks fit together."""
    found = likelihood(params, BATCH, kind, SMOOTHING)
    log_p, posterior = naive_likelihood(params, kind, 0.0)
    np.testing.assert_allclose(found["log_p"], log_p, rtol=2e-5)
    np.testing.assert_allclose(found["posterior"], posterior, rtol=1e-4, atol=1e-6)
    smoothed, _ = naive_likelihood(params, kind, SMOOTHING)
    np.testing.assert_allclose(found["objective"], smoothed, rtol=2e-5)
    assert np.abs(found["objective"] - found["log_p"]).max() > 1e-3
    for name in ("prior", "posterior"):
        np.testing.assert_allclose(np.sum(found[name], axis=1), 1, rtol=1e-6)
        assert not np.asarray(found[name])[~BATCH.doc_mask].any()


def test_one_document_is_plain_seq2seq(params):
    alone = BATCH._replace(source_ids=BATCH.source_ids[:, :1], source_mask=BATCH.source_mask[:, :1],
                           doc_embeddings=BATCH.doc_embeddings[:, :1],
                           doc_mask=np.ones((3, 1), bool), doc_ids=None)
    plain = tiny.jit(functools.partial(teacher_forcing.seq2seq_log_probs, MODEL))(
        params["generator"], BATCH.source_ids[:, 0], BATCH.source_mask[:, 0], BATCH.target_ids)
    expected = np.where(BATCH.target_mask, plain, 0).sum(axis=1)
    for kind in KINDS:
        np.testing.assert_allclose(likelihood(params, alone, kind)["log_p"], expected, rtol=1e-5)


def reordered(batch, order):
    """The batch with the documents of every question in another order."""
    parts = ("source_ids", "source_mask", "doc_embeddings", "doc_mask", "doc_ids")
    return batch._replace(**{name: getattr(batch, name)[:, order] for name in parts})


@pytest.mark.parametrize("kind", KINDS)
def test_order_of_documents_is_irrelevant(params, kind):
    order = [2, 0, 1]
    found = likelihood(params, reordered(BATCH, order), kind)
    expected = likelihood(params, BATCH, kind)
    np.testing.assert_allclose(found["log_p"], expected["log_p"], rtol=1e-6)
    np.testing.assert_allclose(found["posterior"], expected["posterior"][:, np.array(order)],
                               rtol=1e-5, atol=1e-7)


def junk_in_padding(batch):
    """Other content wherever a mask is False."""
    padding = ~batch.doc_mask
    source = np.where(batch.source_mask & ~padding[..., None], batch.source_ids,
                      (batch.source_ids + 11) % 38)
    return batch._replace(
        question_ids=np.where(batch.question_mask, batch.question_ids,
                              (batch.question_ids + 7) % 30),
        source_ids=source,
        doc_embeddings=np.where(padding[..., None], np.float32(9), batch.doc_embeddings),
        target_ids=np.where(batch.target_mask, batch.target_ids, tiny.PAD))


@pytest.mark.parametrize("kind", KINDS)
def test_padding_of_any_kind_changes_neither_loss_nor_gradient(params, kind):
    """Padding documents, source, question and target tokens: any junk gives the same numbers."""
    junk = junk_in_padding(BATCH)
    assert any((a != b).any() for a, b in zip(junk, BATCH, strict=True))
    loss, (grads, by_embedding) = loss_and_gradient(params, BATCH, kind)
    junk_loss, (junk_grads, junk_by_embedding) = loss_and_gradient(params, junk, kind)
    np.testing.assert_allclose(junk_loss, loss, rtol=1e-6)
    tiny.assert_trees_close(junk_grads, grads, rtol=1e-5, atol=1e-6)
    for gradient in (by_embedding, junk_by_embedding):
        assert not np.asarray(gradient)[~BATCH.doc_mask].any()
        assert np.asarray(gradient)[:2].any(axis=2).all()


@pytest.mark.parametrize("kind, family, settings", [
    ("token", tiny.BART, {}), ("fid", tiny.BART, {}),
    # At 0.3 its unscaled attention is so sharp that roundings alone reach 5e-4 of the gradient.
    ("token", tiny.T5, {"init_std": 0.15}),
    ("sequence", tiny.BART, {"scan_layers": True, "remat": "narrow"})])
def test_packed_tokens_give_the_loss_and_gradient_of_padded_inputs(kind, family, settings):
    """A token looked up at another's place, or a gradient that is lost on the way back.

    A passage that is missing has tokens, too; Fusion-in-Decoder masks them.
    """
    doc_mask = BATCH.doc_mask.copy()
    doc_mask[0, 1] = False
    batch = BATCH._replace(doc_mask=doc_mask)
    generator = dataclasses.replace(family, encoder_layers=2, decoder_layers=2, **settings)
    model = tiny.rag_model(kind, retriever={"projection": 12}, generator=generator)
    longest = int(batch.source_mask.sum(axis=(1, 2)).max())
    assert longest + 2 < batch.source_mask[0].size

    @tiny.jit
    def run(params, batch):
        return jax.value_and_grad(lambda p: rag_loss(model)(p, batch, None)[0])(params)

    params = tiny.rag_params(model)
    loss, grads = run(params, batch)
    forms = [tiny.packed(batch, longest + 2),
             tiny.packed_targets(tiny.packed(batch, longest), spare=2)]
    if (kind, family) == ("token", tiny.BART):  # each of the two alone, with no place to spare
        forms += [tiny.packed(batch, longest), tiny.packed_targets(batch)]
    for same in forms:
        packed_loss, packed_grads = run(params, same)
        np.testing.assert_allclose(packed_loss, loss, rtol=1e-6)
        tiny.assert_trees_close(packed_grads, grads, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("chunk", [2, 64])
def test_packed_texts_give_the_loss_and_gradient_of_padded_ones(chunk):
    """Denoising, whose sources of several texts share a row; with logits in chunks and at once."""
    model = tiny.rag_model(generator={"logit_chunk": chunk})
    batch = Seq2SeqBatch(BATCH.source_ids[:, 0], BATCH.source_mask[:, 0], BATCH.target_ids,
                         BATCH.target_mask)
    params = {"generator": tiny.rag_params(model)["generator"]}

    @tiny.jit
    def run(params, batch):
        return jax.value_and_grad(lambda p: seq2seq_loss(model)(p, batch, None)[0])(params)

    places = [packed.places(mask, packed.Groups(), int(mask.sum()) + 1)
              for mask in (batch.source_mask, batch.target_mask)]
    found, expected = run(params, batch._replace(
        source_places=places[0], target_places=places[1])), run(params, batch)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
    tiny.assert_trees_close(found[1], expected[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", [tiny.BART, tiny.T5])
def test_bfloat16_parameters_have_bfloat16_gradients(family):
    """Nearly those of the same numbers in float32, from the layers' own backward passes."""
    model = tiny.rag_model(retriever={"projection": 12}, generator=family)
    narrow = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), tiny.rag_params(model))
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), narrow)
    run = tiny.jit(jax.grad(lambda params: rag_loss(model)(params, BATCH, None)[0]))
    found, expected = run(narrow), run(wide)
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {jnp.dtype(jnp.bfloat16)}
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        one, other = np.float32(one), np.asarray(other)
        assert np.linalg.norm(one - other) <= 1e-5 + 0.05 * np.linalg.norm(other)


def test_what_stands_in_the_place_of_a_missing_passage_reaches_no_gradient(params):
    """Not even NaN."""
    holes = np.where(BATCH.doc_mask[..., None], BATCH.doc_embeddings, np.nan)
    loss, (grads, _) = loss_and_gradient(params, BATCH._replace(doc_embeddings=holes), "token")
    expected, (expected_grads, _) = loss_and_gradient(params, BATCH, "token")
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    tiny.assert_trees_close(grads, expected_grads, rtol=1e-5, atol=1e-6)


def test_appended_padding_documents_change_nothing(params):
    """A short result list padded to any K is the same question."""
    def pad(x, value=0):
        return np.concatenate([x, np.full_like(x[:, :2], value)], axis=1)

    wider = BATCH._replace(
        source_ids=pad(BATCH.source_ids, 3), source_mask=pad(BATCH.source_mask, True),
        doc_embeddings=pad(BATCH.doc_embeddings, 5.0), doc_mask=pad(BATCH.doc_mask),
        doc_ids=pad(BATCH.doc_ids, -1))
    np.testing.assert_allclose(likelihood(params, wider)["log_p"],
                               likelihood(params, BATCH)["log_p"], rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_reaches_the_query_encoder_and_never_the_document_encoder(params, kind):
    _, (grads, _) = loss_and_gradient(params, BATCH, kind)
    assert tiny.is_zero(grads["document_encoder"])
    for tower in ("query_encoder", "generator"):
        for path, leaf in jax.tree_util.tree_leaves_with_path(grads[tower]):
            assert np.asarray(leaf).any(), f"{tower}{jax.tree_util.keystr(path)}"


@pytest.mark.parametrize("kind", KINDS)
def test_filler_rows_have_no_influence(params, kind):
    """Weight 0: the other rows' loss alone, finite even where a filler has no document at all."""
    filler = BATCH._replace(weight=np.float32([1, 1, 0]))
    empty = jax.tree.map(np.copy, filler)
    for name in ("doc_mask", "source_mask", "question_mask", "target_mask"):
        getattr(empty, name)[2] = False
    loss, grads = loss_and_gradient(params, filler, kind)
    expected = -likelihood(params, BATCH, kind, SMOOTHING)["objective"][:2].sum()
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    empty_loss, empty_grads = loss_and_gradient(params, empty, kind)
    np.testing.assert_allclose(empty_loss, loss, rtol=1e-6)
    tiny.assert_trees_close(empty_grads, grads, rtol=1e-5, atol=1e-6)
    assert not np.asarray(grads[1])[2].any()


def test_documents_and_questions_are_scored_independently(params):
    """A changed source of document (0, 1) changes log p of (0, 1) and of nothing else."""
    expected = np.asarray(log_probs(params, BATCH))
    changed = BATCH.source_ids.copy()
    changed[0, 1] = (changed[0, 1] + 5) % 38
    found = np.asarray(log_probs(params, BATCH._replace(source_ids=changed)))
    same = np.ones((3, 3), bool)
    same[0, 1] = False
    np.testing.assert_array_equal(found[same], expected[same])
    assert (found[0, 1] != expected[0, 1]).all()


def test_questions_are_independent_by_gradient(params):
    """Row b's likelihood has no gradient at the embeddings of another row."""
    def by_row(embeddings):
        batch = BATCH._replace(doc_embeddings=embeddings)
        return log_likelihood(MODEL, params, batch)["log_p"]

    seen = np.asarray(tiny.jit(jax.jacrev(by_row))(BATCH.doc_embeddings)).any(axis=(2, 3))
    assert not seen[~np.eye(3, dtype=bool)].any() and seen[[0, 1], [0, 1]].all()


def test_later_target_tokens_do_not_touch_earlier_log_probs(params):
    expected = np.asarray(log_probs(params, BATCH))
    for t in range(5):
        changed = BATCH.target_ids.copy()
        changed[:, t] = (changed[:, t] + 3) % 38
        found = np.asarray(log_probs(params, BATCH._replace(target_ids=changed)))
        np.testing.assert_array_equal(found[..., :t], expected[..., :t])
        assert (found[..., t] != expected[..., t]).all()


@pytest.mark.parametrize("chunk,ends", [(1, ()), (2, (2, 7, 30)), (5, ()), (16, ())])
def test_chunked_scoring_is_the_whole_log_softmax(params, chunk, ends):
    """Also where the chunk does not divide T, and where several tokens are one end; value and
    gradient."""
    rng = np.random.default_rng(0)
    states = jnp.float32(rng.normal(size=(2, 5, 16)))
    targets = jnp.asarray(rng.integers(0, 38, (2, 5)), jnp.int32).at[0, 1].set(2)
    head = {k: params["generator"][k] for k in ("embedding", "final_logits_bias")}

    def whole(head, states):
        logits = jnp.einsum("RTD,VD->RTV", states, head["embedding"])
        log_p = jax.nn.log_softmax(logits + head["final_logits_bias"][None, None])
        smooth = SMOOTHING * log_p.mean(axis=-1)
        of_target = jnp.take_along_axis(log_p, targets[..., None], -1)[..., 0]
        if ends:
            all_ends = jnp.log(sum(jnp.exp(log_p[..., end]) for end in ends))
            of_target = jnp.where(targets == ends[0], all_ends, of_target)
        return (1 - SMOOTHING) * of_target + smooth

    def chunked(head, states):
        return teacher_forcing.score_targets(
            head, states, targets, dataclasses.replace(
                MODEL.generator, logit_chunk=chunk, end_tokens=ends), SMOOTHING)[1]

    def run(score):
        value = lambda *a: jnp.sin(score(*a)).sum()  # noqa: E731
        return tiny.jit(jax.value_and_grad(value, (0, 1)))(head, states)

    tiny.assert_trees_close(run(chunked), run(whole), rtol=1e-5, atol=1e-5)


def test_nothing_over_the_vocabulary_is_kept_for_the_backward_pass(params):
    """Residuals of the loss with a vocabulary axis: parameters only, no [B, K, T, V]."""
    vocab = MODEL.generator.vocab_size
    kept = jax.tree.leaves(jax.eval_shape(
        lambda params: jax.vjp(lambda p: rag_loss(MODEL, SMOOTHING)(p, BATCH, None)[0], params)[1],
        params))
    shapes = [leaf.shape for leaf in kept]
    assert len(shapes) > 20, "the residuals were not found"
    assert {s for s in shapes if vocab in s} <= {(vocab, 16), (16, vocab), (vocab,)}


def test_bfloat16_model_stays_close_and_reports_float32(params):
    half = {"dtype": "bfloat16"}
    model = tiny.rag_model(retriever={"projection": 12, **half}, generator=half)
    found = tiny.jit(functools.partial(log_likelihood, model))(params, BATCH)
    expected = likelihood(params, BATCH)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(found))
    np.testing.assert_allclose(found["log_p"], expected["log_p"], rtol=0.03)
    np.testing.assert_allclose(found["prior"], expected["prior"], atol=0.05)
    assert np.abs(found["log_p"] - expected["log_p"]).max() > 1e-4, "bfloat16 was ignored"


def test_dropout_draws_other_masks_for_other_documents(params):
    """Two equal documents of one question differ under dropout, and agree without."""
    model = tiny.rag_model(retriever={"projection": 12}, generator={"dropout": 0.3})
    twins = reordered(BATCH, [0, 0, 1])
    run = tiny.jit(lambda key: token_log_probs(model, params, twins, dropout_key=key)[0])
    one = np.asarray(run(jax.random.key(0)))
    assert np.abs(one[:, 0] - one[:, 1]).min() > 1e-5
    np.testing.assert_array_equal(one, run(jax.random.key(0)))
    assert np.abs(one - run(jax.random.key(1))).min() > 1e-5, "the same masks in every step"
    still = np.asarray(log_probs(params, twins))
    np.testing.assert_array_equal(still[:, 0], still[:, 1])
