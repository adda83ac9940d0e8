"""Decoding Fusion-in-Decoder against python lists over states concatenated by hand (float64)."""

import functools
import itertools

import jax
import naive
import numpy as np
import plain
import pytest
import tiny
from enumerated import (
    BATCH,
    DOCS,
    END,
    ENDED,
    EVERYTHING,
    LONGEST,
    QUESTIONS,
    VOCAB,
    answers,
    cut,
    model,
    params,
    ranked,
    run,
    world,
)

from rag_jax.decoding.answer import decode
from rag_jax.decoding.certificate import exact
from rag_jax.decoding.settings import Decoding

MODEL = model("fid")


@functools.cache
def table():
    """{prefix: log p(. | x, prefix) [B, V]}, a whole forward for each."""
    generator = params()["generator"]
    found = {p: np.zeros((QUESTIONS, VOCAB)) for n in range(LONGEST)
             for p in itertools.product(range(VOCAB), repeat=n)}
    for b in range(QUESTIONS):
        real = BATCH.doc_mask[b]
        read = naive.fused(generator, BATCH.source_ids[b][real], BATCH.source_mask[b][real], 2)
        for prefix, log_p in found.items():
            state = naive.bart_decode(generator, *read, [END, *prefix], heads=2)[-1]
            log_p[b] = naive.log_softmax(naive.bart_output(generator, state))
    return found


def log_p(question, y):
    return sum(table()[y[:t]][question, y[t]] for t in range(len(y)))


RULES = {"bad_words": ((3,),), "min_length": 2, "prefix": (4,)}


@pytest.mark.parametrize("width, rules", [(1, {}), (3, {}), (3, RULES)])
def test_greedy_and_beams_are_those_of_the_naive_decoder(width, rules):
    found = run(params(), BATCH, "fid", width, **rules)
    for question in range(QUESTIONS):
        settings = Decoding(num_beams=width, max_length=LONGEST, **rules)
        expected = [y for _, y in plain.beam_search(
            lambda p, q=question: table()[p][q], settings, END)]
        assert ranked(found, question) == expected
        np.testing.assert_allclose(found.ranked.log_p[question, : len(expected)],
                                   [log_p(question, y) for y in expected], rtol=1e-5)
        steps = [table()[y[:t]][question, y[t]] for y in expected[:1] for t in range(len(y))]
        np.testing.assert_allclose(found.best.token_log_p[question, : len(steps)], steps, rtol=1e-4,
                                   atol=1e-6)
    assert rules or len(set(answers(found))) >= 3, "answers that are all alike prove little"
    np.testing.assert_allclose(found.prior, np.exp(world().prior), rtol=1e-5)


def test_what_is_certified_is_the_enumerated_argmax():
    """By a beam of everything, and by the best-first search from a greedy answer."""
    best = [max(ENDED, key=lambda y, q=q: log_p(q, y)) for q in range(QUESTIONS)]
    wide = run(params(), BATCH, "fid", EVERYTHING)
    assert answers(wide) == best and wide.certified.all()
    settings = Decoding(num_beams=1, max_length=LONGEST)
    greedy = run(params(), BATCH, "fid", 1)
    assert not greedy.certified.all()
    for question in np.flatnonzero(greedy.certified):
        assert answers(greedy)[question] == best[question]
    found = exact(MODEL, settings, params(), BATCH, start=greedy, jit=tiny.jit)
    assert [cut(row) for row in found.ranked.tokens[:, 0]] == best
    assert found.certified.all()
    np.testing.assert_allclose(found.ranked.log_p[:, 0],
                               [log_p(q, y) for q, y in enumerate(best)], rtol=1e-5)


def test_samples_report_their_probability_and_labels_are_ranked_by_it():
    drawn = run(params(), BATCH, "fid", 3, sample=True, key=jax.random.key(0))
    for question in range(QUESTIONS):
        np.testing.assert_allclose(
            drawn.ranked.log_p[question],
            [log_p(question, y) for y in ranked(drawn, question)], rtol=1e-5)
    labels = ((0, END), (3, 4, END), (3, END))
    found = run(params(), BATCH, "fid", 3, labels=labels)
    for question in range(QUESTIONS):
        expected = np.array([log_p(question, y) for y in labels])
        order = np.argsort(-expected)
        assert ranked(found, question) == [labels[n] for n in order]
        np.testing.assert_allclose(found.ranked.log_p[question],
                                   naive.log_softmax(expected)[order], rtol=1e-5)


def test_missing_passages_are_not_read_and_the_order_does_not_matter():
    expected = run(params(), BATCH, "fid", 3)
    missing = ~BATCH.doc_mask[..., None]
    junk = BATCH._replace(
        source_ids=np.where(missing, (BATCH.source_ids + 1) % VOCAB, BATCH.source_ids),
        source_mask=BATCH.source_mask | missing)
    parts = ("source_ids", "source_mask", "doc_embeddings", "doc_mask")
    moved = junk._replace(**{name: getattr(junk, name)[:, [1, 2, 0]] for name in parts})
    for batch in (junk, moved):
        found = run(params(), batch, "fid", 3)
        np.testing.assert_array_equal(found.best.tokens, expected.best.tokens)
        np.testing.assert_allclose(found.best.log_p, expected.best.log_p, rtol=1e-5)


def test_a_question_without_passages_gets_no_certified_answer_and_disturbs_no_other():
    expected = run(params(), BATCH, "fid", 3)
    found = run(params(), BATCH._replace(
        doc_mask=BATCH.doc_mask & (np.arange(QUESTIONS) != 1)[:, None]), "fid", 3)
    assert not any(np.isnan(leaf).any() for leaf in jax.tree.leaves(found))
    assert not found.certified[1] and not found.ranked.valid[1].any()
    kept = np.arange(QUESTIONS) != 1
    np.testing.assert_array_equal(found.best.tokens[kept], expected.best.tokens[kept])


def test_the_memory_budget_changes_no_result(monkeypatch):
    from rag_jax.decoding import answer
    expected = run(params(), BATCH, "fid", 3)
    monkeypatch.setattr(answer, "questions_at_once", lambda *_: 2)
    settings = Decoding(num_beams=3, num_return_sequences=3, max_length=LONGEST)
    found = jax.device_get(tiny.jit(functools.partial(decode, MODEL, settings))(
        params(), BATCH))
    tiny.assert_trees_close(found, expected, rtol=1e-5, atol=1e-6)


def test_one_passage_is_rag_with_one_passage():
    alone = BATCH._replace(doc_mask=np.arange(DOCS)[None] == np.zeros((QUESTIONS, 1), int))
    found, expected = run(params(), alone, "fid", 3), run(params(), alone, "token", 3)
    np.testing.assert_array_equal(found.ranked.tokens, expected.ranked.tokens)
    np.testing.assert_allclose(found.best.log_p, expected.best.log_p, rtol=1e-5)
