"""Decoding of both models against enumeration of every answer of a tiny vocabulary."""

import functools
import itertools

import jax
import naive
import numpy as np
import pytest
import tiny

from rag_jax.decoding.answer import decode
from rag_jax.models import rag

KINDS = ["token", "sequence"]
VOCAB, LONGEST, QUESTIONS, DOCS, END, PAD = 5, 3, 6, 3, tiny.END, tiny.PAD
EVERYTHING = 85  # 1 + 4 + 16 answers that end, 64 that are cut
SMALL = {"vocab_size": VOCAB, "max_positions": 8}


def small(kind):
    return tiny.rag_model(kind, generator=SMALL)


MODEL = small("token")
BATCH = tiny.rag_batch(seed=5, questions=QUESTIONS, passages=DOCS, target=LONGEST, model=MODEL)
PATHS = list(itertools.product(range(VOCAB), repeat=LONGEST))
ANSWERS = [y for n in range(1, LONGEST + 1) for y in itertools.product(range(VOCAB), repeat=n)
           if END not in y[:-1] and (y[-1] == END or n == LONGEST)]


def strengthened(params, parts=("cross_attention",)):
    """Strong positions and attention: small random models otherwise repeat one token for ever."""
    def scale(path, leaf):
        name = jax.tree_util.keystr(path)
        if "decoder_positions" in name:
            return leaf * 4
        return leaf * 3 if any(p in name for p in parts) and "query" not in name else leaf

    return {**params, "generator": jax.tree_util.tree_map_with_path(scale, params["generator"])}


@pytest.fixture(scope="module")
def params():
    return strengthened(tiny.rag_params(MODEL, seed=7))


@functools.partial(tiny.jit, static_argnames=("kind", "width"))
def run(params, batch, kind, width):
    return decode(small(kind), params, batch, width, LONGEST)


@pytest.fixture(scope="module")
def world(params):
    """(log p(z | x) [B, K], {prefix: log p(y_t | x, z, prefix) [B, K, V]}) by full forwards."""
    score = tiny.jit(lambda params, batch: (rag.log_prior(MODEL, params, batch),
                                            rag.token_log_probs(MODEL, params, batch)))
    table = {p: np.zeros((QUESTIONS, DOCS, VOCAB)) for n in range(LONGEST)
             for p in itertools.product(range(VOCAB), repeat=n)}
    for question in range(QUESTIONS):
        rows = [np.repeat(leaf[question : question + 1], len(PATHS), axis=0) for leaf in BATCH]
        batch = BATCH._make(rows)._replace(target_ids=np.array(PATHS, np.int32))
        log_p = np.float64(score(params, batch)[1])
        for path, under_docs in zip(PATHS, log_p, strict=True):
            for t in range(LONGEST):
                table[path[:t]][question, :, path[t]] = under_docs[:, t]
    return np.float64(score(params, BATCH)[0]), table


def log_marginal(world, question, y, kind):
    """log p(y | x) in float64."""
    prior, table = world
    p = np.exp([table[y[:t]][question, :, y[t]] for t in range(len(y))])  # -> [T, K]
    prior = np.exp(prior[question])
    if kind == "sequence":
        return np.log((prior * p.prod(axis=0)).sum())
    return np.log((prior[None] * p).sum(axis=1)).sum()


def naive_decode(world, question, kind, width):
    """The package's decoders in words: python lists, float64."""
    prior, table = world

    def marginal(prefix):
        mixed = np.exp(prior[question])[:, None] * np.exp(table[prefix][question])
        return np.log(mixed.sum(axis=0))

    if kind == "token":
        return naive.beam_search(marginal, width, LONGEST, END)[0][1]
    candidates = [
        y for z in range(DOCS) if BATCH.doc_mask[question, z]
        for _, y in naive.beam_search(lambda p, z=z: table[p][question, z], width, LONGEST, END)]
    return max(candidates, key=lambda y: (
        y[-1] == END, log_marginal(world, question, y, "sequence")))


def answers(decoded):
    """Tokens up to END; what follows must be padding."""
    result = []
    for row in np.asarray(decoded.tokens).tolist():
        length = row.index(END) + 1 if END in row else len(row)
        assert all(t == PAD for t in row[length:])
        result.append(tuple(row[:length]))
    return result


@pytest.mark.parametrize("kind", KINDS)
def test_enumerated_answers_have_total_probability_one(world, kind):
    for question in range(QUESTIONS):
        p = [np.exp(log_marginal(world, question, y, kind)) for y in ANSWERS]
        np.testing.assert_allclose(sum(p), 1, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_full_width_finds_the_enumerated_argmax(params, world, kind):
    """The best answer that ends."""
    decoded = run(params, BATCH, kind, EVERYTHING)
    allowed = [y for y in ANSWERS if y[-1] == END]
    for question, found in enumerate(answers(decoded)):
        best = max(allowed, key=lambda y: log_marginal(world, question, y, kind))  # noqa: B023
        assert found == best
        np.testing.assert_allclose(decoded.log_p[question],
                                   log_marginal(world, question, best, kind), rtol=1e-5)


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_and_narrow_beams_match_the_naive_decoder(params, world, kind, width):
    found = answers(run(params, BATCH, kind, width))
    assert found == [naive_decode(world, q, kind, width) for q in range(QUESTIONS)]
    assert len(set(found)) >= 3, "answers that are all alike prove little"


@pytest.mark.parametrize("kind", KINDS)
def test_reported_numbers_are_the_teacher_forced_ones(params, kind):
    """log p(y | x), prior and posterior of the answer, over its own length."""
    decoded = run(params, BATCH, kind, 3)
    mask = np.zeros((QUESTIONS, LONGEST), bool)
    for row, y in enumerate(answers(decoded)):
        mask[row, : len(y)] = True
    batch = BATCH._replace(target_ids=np.asarray(decoded.tokens), target_mask=mask)
    forced = tiny.jit(functools.partial(rag.log_likelihood, small(kind)))(params, batch)
    for name in ("log_p", "prior", "posterior"):
        np.testing.assert_allclose(getattr(decoded, name), forced[name], rtol=1e-5, atol=1e-6)


def with_end_bias(params, bias):
    generator = dict(params["generator"])
    generator["final_logits_bias"] = generator["final_logits_bias"].at[END].add(bias)
    return {**params, "generator": generator}


@pytest.mark.parametrize("kind", KINDS)
def test_end_first_and_never(params, kind):
    """The empty answer is an answer; one that never ends is cut at the length limit."""
    empty = run(with_end_bias(params, 60.0), BATCH, kind, 3)
    assert answers(empty) == [(END,)] * QUESTIONS
    np.testing.assert_allclose(empty.log_p, 0, atol=1e-4)
    endless = run(with_end_bias(params, -60.0), BATCH, kind, 3)
    assert all(END not in y and len(y) == LONGEST for y in answers(endless))
    assert np.isfinite(endless.log_p).all()


@pytest.mark.parametrize("kind", KINDS)
def test_padding_documents_and_targets_are_not_read(params, kind):
    expected = run(params, BATCH, kind, 3)
    padding = ~BATCH.doc_mask
    junk = BATCH._replace(
        source_ids=np.where(padding[..., None], (BATCH.source_ids + 1) % VOCAB, BATCH.source_ids),
        doc_embeddings=np.where(padding[..., None], np.float32(99), BATCH.doc_embeddings),
        target_ids=(BATCH.target_ids + 1) % VOCAB)
    found = run(params, junk, kind, 3)
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_allclose(found.log_p, expected.log_p, rtol=1e-6)
    assert not np.asarray(found.posterior)[padding].any()


def test_padding_documents_propose_no_answers(params, world):
    """Only the one real document's greedy answer counts, even where another would score higher."""
    alone = BATCH._replace(doc_mask=np.arange(DOCS)[None] == np.zeros((QUESTIONS, 1), int))
    found = answers(run(params, alone, "sequence", 1))
    _, table = world
    tempted = 0
    for question in range(QUESTIONS):
        greedy = [naive.beam_search(
            lambda p, q=question, z=z: table[p][q, z], 1, LONGEST, END)[0][1] for z in range(DOCS)]
        assert found[question] == greedy[0]
        under_first = [(y[-1] == END, sum(table[y[:t]][question, 0, y[t]] for t in range(len(y))))
                       for y in greedy]
        tempted += max(under_first) > under_first[0]
    assert tempted, "no padding document was tempting"


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_does_not_depend_on_the_rest_of_the_batch(params, kind):
    """Other order, other neighbours, one of them without any document."""
    expected = run(params, BATCH, kind, 3)
    order = np.array([2, 5, 0, 3, 4, 1])
    moved = run(params, BATCH._make([leaf[order] for leaf in BATCH]), kind, 3)
    np.testing.assert_array_equal(moved.tokens, np.asarray(expected.tokens)[order])
    np.testing.assert_allclose(moved.log_p, np.asarray(expected.log_p)[order], rtol=1e-6)
    other = BATCH._replace(doc_mask=BATCH.doc_mask & (np.arange(QUESTIONS) != 1)[:, None])
    found = run(params, other, kind, 3)
    assert not any(np.isnan(leaf).any() for leaf in found)
    kept = np.array([0, 2, 3, 4, 5])
    np.testing.assert_array_equal(np.asarray(found.tokens)[kept], np.asarray(expected.tokens)[kept])


def test_one_document_makes_the_models_equal(params):
    alone = BATCH._replace(
        source_ids=BATCH.source_ids[:, :1], source_mask=BATCH.source_mask[:, :1],
        doc_embeddings=BATCH.doc_embeddings[:, :1], doc_mask=np.ones((QUESTIONS, 1), bool))
    token, sequence = (run(params, alone, kind, 1) for kind in KINDS)
    np.testing.assert_array_equal(token.tokens, sequence.tokens)
    np.testing.assert_allclose(token.log_p, sequence.log_p, rtol=1e-6)
    np.testing.assert_allclose(token.posterior, 1, rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_long_beams_follow_the_full_forward(kind):
    """Hypotheses that overtake each other for 7 tokens must take their caches with them."""
    model, width, length, questions = tiny.rag_model(kind), 4, 7, 6
    params = strengthened(
        with_end_bias(tiny.rag_params(model, seed=3), 2.0), ("self_attention", "cross_attention"))
    batch = tiny.rag_batch(seed=1, questions=questions, passages=2, model=model)
    decoded = tiny.jit(lambda p, b: decode(model, p, b, width, length))(params, batch)
    prior = np.log(np.maximum(np.float64(decoded.prior), 1e-300))

    @tiny.jit
    def logits(decoder_ids):
        return model.generator_module.apply(
            {"params": params["generator"]}, batch.source_ids.reshape(2 * questions, -1),
            batch.source_mask.reshape(2 * questions, -1), decoder_ids)

    @functools.cache
    def after(prefix):
        """log p(y_t | x, z, prefix) [B, K, V] of every document, by a whole forward."""
        ids = [END, *prefix, *[PAD] * (length - 1 - len(prefix))]
        rows = np.tile(np.int32(ids), (2 * questions, 1))
        log_p = naive.log_softmax(np.float64(logits(rows))[:, len(prefix)])
        return log_p.reshape(questions, 2, -1)

    def mixed(prefix, question):
        return np.log((np.exp(prior[question])[:, None] * np.exp(after(prefix)[question])).sum(0))

    def joint(question, y):
        under = [sum(after(y[:t])[question, z, y[t]] for t in range(len(y))) for z in range(2)]
        return np.log((np.exp(prior[question]) * np.exp(under)).sum())

    found = []
    for question in range(questions):
        if kind == "token":
            found.append(naive.beam_search(
                lambda p, q=question: mixed(p, q), width, length, END)[0][1])
        else:
            candidates = [y for z in np.flatnonzero(batch.doc_mask[question])
                          for _, y in naive.beam_search(
                              lambda p, q=question, z=z: after(p)[q, z], width, length, END)]
            found.append(max(candidates, key=lambda y, q=question: (y[-1] == END, joint(q, y))))
    assert answers(decoded) == found
    assert max(map(len, found)) > 3 and len(set(found)) > 3
