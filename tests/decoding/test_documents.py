"""The decoder token by token against the teacher-forced forward of the whole answer."""

import dataclasses

import jax
import jax.numpy as jnp
import naive
import numpy as np
import pytest
import tiny

from rag_jax.decoding import documents, memory
from rag_jax.models import teacher_forcing
from rag_jax.models.likelihood import as_documents
from rag_jax.types import Prefixes

TARGET = 5
MODEL = tiny.rag_model(generator={"decoder_layers": 2})
BATCH = tiny.rag_batch(seed=2, target=TARGET, model=MODEL)
QUESTIONS, PASSAGES, _ = BATCH.source_ids.shape
HEADS = MODEL.generator.heads


@pytest.fixture(scope="module")
def params():
    return tiny.rag_params(MODEL)


def with_generator(**changes):
    return dataclasses.replace(MODEL, generator=dataclasses.replace(MODEL.generator, **changes))


@pytest.mark.parametrize("generator", [MODEL.generator, tiny.T5, dataclasses.replace(
    tiny.T5, activation="relu", gated=False, tied=True, scale_output=True)])
@pytest.mark.parametrize("dtype,tolerance", [("float32", 2e-5), ("bfloat16", 0.15)])
def test_cached_decoding_is_the_full_forward_at_every_position(generator, dtype, tolerance):
    """Guards against a position, a bias or a norm of training that decoding lacks."""
    model = tiny.rag_model(generator=dataclasses.replace(generator, dtype=dtype))
    params = tiny.rag_params(model)
    inputs = teacher_forcing.shift_right(jnp.asarray(BATCH.target_ids), model.start_id)
    inputs = jnp.repeat(inputs, PASSAGES, axis=0)  # -> [R, T]
    logits = tiny.jit(lambda params: model.generator_module.apply(
        {"params": params["generator"]}, BATCH.source_ids.reshape(len(inputs), -1),
        BATCH.source_mask.reshape(len(inputs), -1), inputs))(params)
    expected = jax.nn.log_softmax(logits, axis=-1)
    read = tiny.jit(lambda params: documents.read(model, params, BATCH))(params)
    room = TARGET + 2  # more room than positions: the empty places must not be seen
    past = documents.empty_past(read, len(inputs), 1, room)
    step = tiny.jit(lambda tokens, t, past: documents.step(model, params, read, tokens, t, past))
    tokens = inputs[..., None]  # -> [R, T, M], M = 1
    for t in range(TARGET):
        log_p, past = step(tokens[:, t : t + 1], np.int32(t), past)
        assert log_p.dtype == jnp.float32
        np.testing.assert_allclose(
            log_p[:, 0, 0, 0], expected[:, t], rtol=tolerance, atol=tolerance)
    several, _ = step(tokens[:, TARGET - 3 :], np.int32(TARGET - 3), past)
    np.testing.assert_allclose(
        several[:, 0, :, 0], expected[:, TARGET - 3 :], rtol=tolerance, atol=tolerance)


def test_several_tokens_at_once_are_those_tokens_one_after_another(params):
    """Also of hypotheses that have changed their places before."""
    read = tiny.jit(lambda params: documents.read(MODEL, params, BATCH))(params)
    searches, beams = len(BATCH.weight), 2
    tokens = np.random.default_rng(1).integers(3, 38, (searches, 4, beams)).astype(np.int32)
    step = tiny.jit(lambda tokens, t, past: documents.step(MODEL, params, read, tokens, t, past))
    _, past = step(tokens[:, :1], np.int32(0), documents.empty_past(read, searches, beams, 6))
    past = past._replace(lineage=past.lineage[:, ::-1])
    together, _ = step(tokens[:, 1:], np.int32(1), past)
    for t in range(1, 4):
        log_p, past = step(tokens[:, t : t + 1], np.int32(t), past)
        np.testing.assert_allclose(together[:, :, t - 1], log_p[:, :, 0], rtol=2e-5, atol=2e-6)


def test_several_ends_are_one_outcome(params):
    """Two ways to end would be two answers of one text, and neither's probability that of the text;
    left as they are, the others would be words inside an answer."""
    states = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 16)), jnp.float32)
    ends = (tiny.END, 7, 30)
    plain = np.exp(documents.log_probs(MODEL, params, states))
    model = with_generator(end_tokens=ends)
    found = np.exp(documents.log_probs(model, params, states))
    np.testing.assert_allclose(found.sum(axis=-1), 1, rtol=1e-5)
    np.testing.assert_allclose(found[..., tiny.END], plain[..., ends].sum(axis=-1), rtol=1e-5)
    assert not found[..., [7, 30]].any()
    others = [i for i in range(plain.shape[-1]) if i not in ends]
    np.testing.assert_allclose(found[..., others], plain[..., others], rtol=1e-5)
    scored, _ = teacher_forcing.score_targets(
        params["generator"], states, jnp.full((2, 3), tiny.END), model.generator)
    np.testing.assert_allclose(np.exp(scored), found[..., tiny.END], rtol=1e-5)


@pytest.mark.parametrize("kind,seen", [("fid", [[2, 0], [3, 1]]), ("token", [[2, 3], [3, 1]])])
def test_nothing_is_kept_of_passages_that_are_missing(kind, seen):
    """Fusion-in-Decoder would attend to them; RAG gives them no probability, whatever they say."""
    keys = np.arange(2 * 2 * 3 * 1 * 4 * 5, dtype=np.float32).reshape(2, 2, 3, 1, 4, 5)
    batch = BATCH._replace(
        doc_mask=np.array([[True, False], [True, True]]),
        prefixes=Prefixes(keys, keys.swapaxes(4, 5), np.array([[2, 3], [3, 1]], np.int32),
                          np.zeros((2, 2, 5), np.int32)))
    before = documents._before(tiny.rag_model(kind), batch)
    assert before.begin.tolist() == before.mask.sum(axis=1).tolist() == sum(seen, [])
    for number, layer in enumerate(before.layers):
        np.testing.assert_array_equal(layer.keys, keys[:, :, number].reshape(4, 1, 4, 5))
        np.testing.assert_array_equal(layer.values, layer.keys.swapaxes(2, 3))


def test_what_was_kept_of_passages_is_among_what_guesses_are_looked_up_in():
    ids = np.arange(2 * 3 * 5, dtype=np.int32).reshape(2, 3, 5)
    kept = BATCH._replace(source_ids=ids[..., 3:], prefixes=Prefixes(
        None, None, None, ids[..., :3]))
    for batch in (kept, BATCH._replace(source_ids=ids)):
        assert documents._tokens(batch).tolist() == ids.reshape(2, 15).tolist()


def test_a_scanned_decoder_is_refused():
    model = with_generator(scan_layers=True)
    with pytest.raises(ValueError, match="unstack_layers"):
        documents.read(model, tiny.rag_params(model), BATCH)


@pytest.mark.parametrize("kind", ["token", "fid"])
def test_documents_encoded_in_groups_are_those_encoded_at_once(params, monkeypatch, kind):
    """Guards against keys, values or masks of one document in the place of another's; both are
    held against keys and values in float64."""
    model = dataclasses.replace(MODEL, kind=kind)
    ids, mask = map(np.asarray, as_documents(model, BATCH))

    def read():
        return tiny.jit(lambda params: documents.read(model, params, BATCH))(params)

    assert memory.documents_at_once(model, *ids.shape) == len(ids)
    at_once = read()
    monkeypatch.setattr(memory, "CACHED", 0)
    assert memory.documents_at_once(model, *ids.shape) == 1
    in_groups = read()
    for name in ("prior", "log_prior", "ids", "mask"):
        np.testing.assert_array_equal(getattr(in_groups, name), getattr(at_once, name))

    present = mask.any(axis=-1)  # [R, P]
    encoded = np.concatenate([naive.bart_encode(params["generator"], *passage, HEADS)[passage[1]]
                              for passage in zip(ids[present], mask[present], strict=True)])
    for number, layer in enumerate(naive.layers(params["generator"]["decoder"])):
        for read_so in (at_once, in_groups):
            keys, values = read_so.source.layers[number]
            for name, found in (("key", np.moveaxis(keys, 3, 1)), ("value", values.swapaxes(1, 2))):
                assert np.isfinite(found).all()
                np.testing.assert_allclose(
                    found.reshape(*mask.shape, -1)[mask],
                    naive.linear(encoded, layer["cross_attention"][name]), rtol=1e-5, atol=1e-6)
