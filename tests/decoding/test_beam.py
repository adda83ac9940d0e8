"""Beam search over small random language models, against enumeration and a naive search."""

import itertools

import jax
import jax.numpy as jnp
import naive
import numpy as np
import pytest

from rag_jax.decoding.beam import beam_search, gather_beams

VOCAB, LONGEST, PAD, END, START = 4, 3, 1, 2, 0
EVERYTHING = 40  # as many as there are hypotheses: 1 + 3 + 9 ended ones and 27 cut ones


def table(rows, seed=0, end_bias=0.0):
    """log p(token | prefix) [rows, prefixes, V]; () is 0, (*prefix, t) is 4 prefix + t + 1."""
    logits = 2 * np.random.default_rng(seed).normal(size=(rows, 21, VOCAB))
    logits[:, :, END] += end_bias
    return naive.log_softmax(logits)


def conditional(log_p):
    """One row's table as a function of the prefix."""

    def of(prefix):
        code = 0
        for token in prefix:
            code = VOCAB * code + token + 1
        return log_p[code]

    return of


def search(log_p, width, calls=None):
    """The carry holds each hypothesis' whole prefix: forgetting to reorder it shows."""
    rows = len(log_p)
    tables = jnp.float32(log_p)

    def step(last, prefix):
        if calls is not None:
            jax.debug.callback(lambda: calls.append(1))
        prefix = jnp.where(prefix < 0, 0, VOCAB * prefix + last + 1)
        return jax.vmap(lambda rows_table, codes: rows_table[codes])(tables, prefix), prefix

    found = jax.jit(lambda: beam_search(
        step, jnp.full((rows, width), -1), gather_beams, searches=rows, num_beams=width,
        max_length=LONGEST, start_id=START, end_id=END, pad_id=PAD))()
    jax.effects_barrier()
    return np.asarray(found.tokens), np.asarray(found.log_probs)


def cut(tokens):
    """A row of tokens up to its END; what follows must be padding."""
    tokens = tuple(int(t) for t in tokens)
    length = tokens.index(END) + 1 if END in tokens else LONGEST
    assert all(t == PAD for t in tokens[length:])
    return tokens[:length]


def score(of, tokens):
    return sum(of(tokens[:t])[tokens[t]] for t in range(len(tokens)))


def test_full_width_finds_every_sequence_in_order():
    """Ended ones first, by probability, then the cut ones: the argmax is exact."""
    log_p = table(rows=4)
    tokens, scores = search(log_p, EVERYTHING)
    ended = [(*y, END) for n in range(LONGEST) for y in itertools.product((0, 1, 3), repeat=n)]
    unended = list(itertools.product((0, 1, 3), repeat=LONGEST))
    for row in range(4):
        of = conditional(log_p[row])
        expected = [y for group in (ended, unended)
                    for y in sorted(group, key=lambda y, of=of: -score(of, y))]
        assert [cut(y) for y in tokens[row]] == expected
        np.testing.assert_allclose(scores[row], [score(of, y) for y in expected], rtol=1e-5)


@pytest.mark.parametrize("width", [1, 2, 3])
def test_narrow_beams_match_a_naive_search(width):
    log_p = table(rows=30)
    tokens, scores = search(log_p, width)
    lengths = set()
    for row in range(30):
        expected = naive.beam_search(conditional(log_p[row]), width, LONGEST, END)
        assert [cut(y) for y in tokens[row]] == [y for _, y in expected]
        np.testing.assert_allclose(scores[row], [s for s, _ in expected], rtol=1e-5)
        lengths.add((len(expected[0][1]), expected[0][1][-1] == END))
    assert len(lengths) >= 3, "the rows should end everywhere"


def test_greedy_is_the_argmax_at_every_step():
    log_p = table(rows=30)
    tokens, _ = search(log_p, 1)
    for row in range(30):
        of, y = conditional(log_p[row]), ()
        while len(y) < LONGEST and END not in y:
            y += (int(of(y).argmax()),)
        assert cut(tokens[row, 0]) == y


def test_early_exit_saves_steps_and_changes_nothing():
    """A row that never ends keeps the loop going; the other rows' results stay the same."""
    quick, endless = table(rows=3, end_bias=9.0), table(rows=1, seed=1, end_bias=-90.0)
    calls, calls_beside = [], []
    alone = search(quick, 2, calls)
    beside = search(np.concatenate([quick, endless]), 2, calls_beside)
    assert len(calls) < LONGEST == len(calls_beside)
    for a, b in zip(alone, beside, strict=True):
        np.testing.assert_array_equal(a, b[:3])


def test_end_first_is_an_answer():
    tokens, scores = search(table(rows=2, end_bias=20.0), 2)
    assert (tokens[:, 0] == [END, PAD, PAD]).all()
    np.testing.assert_allclose(scores[:, 0], 0, atol=1e-4)


@pytest.mark.parametrize("width", [1, 2])
def test_without_any_ending_the_best_cut_hypotheses_come_back(width):
    log_p = table(rows=3, end_bias=-90.0)
    tokens, scores = search(log_p, width)
    for row in range(3):
        expected = naive.beam_search(conditional(log_p[row]), width, LONGEST, END)
        assert [tuple(y) for y in tokens[row].tolist()] == [y for _, y in expected]
        assert END not in tokens[row]
        np.testing.assert_allclose(scores[row], [s for s, _ in expected], rtol=1e-5)


def test_rows_do_not_depend_on_each_other():
    log_p = table(rows=4)
    together = search(log_p, 2)
    for row in range(4):
        alone = search(log_p[row : row + 1], 2)
        for a, b in zip(alone, together, strict=True):
            np.testing.assert_array_equal(a[0], b[row])
