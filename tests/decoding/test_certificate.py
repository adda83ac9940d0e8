"""Certificates and best-first search against enumeration."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from enumerated import (
    BATCH,
    ENDED,
    LONGEST,
    PAD,
    QUESTIONS,
    answers,
    cut,
    model,
    params,
    run,
    with_end_bias,
    world,
)
from tables import END as tables_end
from tables import Tables, every_answer, valid
from tables import cut as table_cut

from rag_jax.decoding import certificate, sequence
from rag_jax.decoding.answer import decode
from rag_jax.decoding.certificate import _Search, exact
from rag_jax.decoding.results import MARGIN, DecodingError, certify, faults, margin
from rag_jax.decoding.settings import PROGRAMS, Decoding

WAYS = [("token", "thorough"), ("sequence", "thorough"), ("sequence", "marginal")]
SEEDS = (7, 8, 9)


def best(question, kind, seed, allowed=ENDED):
    return max(allowed, key=lambda y: world(seed).log_p(question, y, kind))


def find(kind, seed=7, batch=BATCH, weights=None, budget=1000, **settings):
    weights = params(seed) if weights is None else weights
    start = run(weights, batch, kind, 1) if not settings else None
    settings = Decoding(**{"max_length": LONGEST, "num_beams": 1, **settings})
    return exact(model(kind), settings, weights, batch, budget, 4, start, jit=tiny.jit)


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("kind, strategy", WAYS)
def test_a_certified_answer_is_the_argmax(kind, strategy, width):
    """And an uncertified one may not be; the bound covers whatever was not returned."""
    certified, wrong = 0, 0
    for seed in SEEDS:
        found = run(params(seed), BATCH, kind, width, strategy=strategy)
        for question, y in enumerate(answers(found)):
            right = y == best(question, kind, seed)
            assert right or not found.certified[question]
            certified += found.certified[question]
            wrong += not right
    assert certified > 3 and (wrong or width > 1)


@pytest.mark.parametrize("kind", ["token", "sequence"])
def test_exact_search_finds_and_proves_the_argmax_from_a_greedy_guess(kind):
    changed = 0
    for seed in SEEDS:
        found = find(kind, seed)
        assert found.certified.all()
        guess = answers(run(params(seed), BATCH, kind, 1))
        for question in range(QUESTIONS):
            y = best(question, kind, seed)
            row = found.ranked.tokens[question, 0].tolist()
            assert row == [*y, *[PAD] * (LONGEST - len(y))]
            np.testing.assert_allclose(found.ranked.log_p[question, 0],
                                       world(seed).log_p(question, y, kind), rtol=1e-5)
            changed += guess[question] != y
    assert changed, "greedy was always right"


@pytest.mark.parametrize("kind", ["sequence"])
def test_exact_search_keeps_to_the_rules(kind):
    found = find(kind, min_length=3, bad_words=((0,),), prefix=(4,))
    allowed = [y for y in ENDED if len(y) >= 3 and 0 not in y and y[0] == 4]
    assert found.certified.all()
    for question in range(QUESTIONS):
        y = best(question, kind, 7, allowed)
        assert found.ranked.tokens[question, 0].tolist()[: len(y)] == list(y)


def test_a_spent_budget_certifies_nothing_more_and_keeps_the_guess():
    guess = run(params(), BATCH, "token", 1)
    assert not guess.certified.all()
    found = find("token", budget=0)
    np.testing.assert_array_equal(found.ranked.tokens[:, 0], guess.best.tokens)
    np.testing.assert_array_equal(found.certified, guess.certified)
    assert not found.expanded.any()
    partly = find("token", budget=2)
    assert (partly.expanded <= 2).all() and partly.expanded.any()
    for question in np.flatnonzero(partly.certified):
        y = best(question, "token", 7)
        assert partly.ranked.tokens[question, 0].tolist()[: len(y)] == list(y)


def test_a_certified_start_is_not_searched_again():
    start = run(params(), BATCH, "token", 85)
    found = exact(model("token"), Decoding(max_length=LONGEST), params(), BATCH, start=start)
    assert found.certified.all() and not found.expanded.any()
    np.testing.assert_array_equal(found.ranked.tokens[:, 0], start.best.tokens)


def test_where_nothing_likely_ends_the_search_still_finds_the_best_that_does():
    """The greedy guess is cut at the limit: there is no incumbent to prune with."""
    weights = with_end_bias(params(), -8.0)
    guess = run(weights, BATCH, "token", 1)
    assert not guess.best.finished.all()
    found = find("token", weights=weights)
    assert found.certified.all() and found.ranked.finished.all()
    full = run(weights, BATCH, "token", 85)
    np.testing.assert_array_equal(found.ranked.tokens[:, 0], full.best.tokens)


def test_questions_without_documents_are_left_alone():
    batch = BATCH._replace(doc_mask=BATCH.doc_mask & (np.arange(QUESTIONS) != 1)[:, None])
    found = find("sequence", batch=batch)
    assert found.certified.tolist() == [q != 1 for q in range(QUESTIONS)]
    assert not any(np.isnan(leaf).any() for leaf in jax.tree.leaves(found))


@pytest.mark.parametrize("settings", [
    {"length_penalty": 1.0, "num_beams": 2}, {"forced_eos": True}, {"sample": True}])
def test_settings_under_which_probability_does_not_decide_are_refused(settings):
    with pytest.raises(ValueError, match="length_penalty=0"):
        find("token", **settings)


def test_rows_that_fill_up_a_batch_are_not_searched():
    filled = BATCH._replace(weight=np.array([1, 1, 1, 0, 0, 0], np.float32))
    everywhere, real = find("token").expanded, find("token", batch=filled).expanded
    assert everywhere[3:].any(), "nothing to search there: this shows nothing"
    np.testing.assert_array_equal(real, np.where(filled.weight > 0, everywhere, 0))


def test_exact_search_keeps_to_the_memory_budget(monkeypatch):
    """One question's documents at once, and with no room no more than one prefix."""
    from rag_jax.decoding import documents

    read, expand, seen = documents.read, certificate._expand, []

    def reading(model, params, batch):
        seen.append(("questions", len(batch.question_ids)))
        return read(model, params, batch)

    def expanding(model, settings, params, documents, prefixes, *others):
        seen.append(("prefixes", len(prefixes)))
        return expand(model, settings, params, documents, prefixes, *others)

    monkeypatch.setattr(documents, "read", reading)
    monkeypatch.setattr(certificate, "_expand", expanding)
    expected, start = find("sequence"), run(params(), BATCH, "sequence", 1)
    monkeypatch.setattr(certificate, "answers_that_fit",
                        lambda model, mib, rows, width, *_: 1 if mib else width)
    for budget, together in ((0, 4), (1, 1)):
        seen.clear()
        settings = Decoding(max_length=LONGEST, num_beams=1, memory_mib=budget)
        found = exact(model("sequence"), settings, params(), BATCH, 1000, 4, start,
                      jit=lambda function: tiny.jit(function))
        assert set(seen) == {("questions", 1), ("prefixes", together)}
        np.testing.assert_array_equal(found.ranked.tokens, expected.ranked.tokens)
        np.testing.assert_allclose(found.ranked.log_p, expected.ranked.log_p, rtol=1e-5)
        assert found.certified.all()


@pytest.mark.parametrize("prefix", [None, (4,)])
def test_after_fast_decoding_the_exact_probability_is_told(prefix):
    """Also of an answer that stays; fast itself tells what some documents give of it."""
    settings = Decoding(max_length=LONGEST, num_beams=1, strategy="fast", prefix=prefix)
    start = run(params(), BATCH, "sequence", 1, strategy="fast", prefix=prefix)
    found = exact(model("sequence"), settings, params(), BATCH, 1000, 4, start, jit=tiny.jit)
    assert found.certified.all() and not start.certified.any()
    stayed = 0
    for question, row in enumerate(found.ranked.tokens[:, 0]):
        y = cut(row)
        assert y == best(question, "sequence", 7, [a for a in ENDED
                                                   if prefix is None or a[:1] == prefix])
        log_p = world().log_p(question, y, "sequence")
        np.testing.assert_allclose(found.ranked.log_p[question, 0], log_p, rtol=1e-5)
        guess = start.best
        stayed += y == cut(guess.tokens[question]) and guess.log_p[question] < log_p - 1e-3
    assert stayed


@pytest.mark.parametrize("budget", [2, 1000])
def test_the_bound_is_that_of_what_neither_search_has_found(budget):
    """Between the best answer and what is left; `Decoded`'s own was of the beam alone."""
    found, start = find("token", budget=budget), run(params(), BATCH, "token", 1)
    assert (found.bound <= start.bound).all() and (found.bound < start.bound).any()
    for question in range(QUESTIONS):
        score = world().log_p(question, best(question, "token", 7), "token")
        answer = found.ranked.log_p[question, 0]
        assert score <= max(found.bound[question], answer) + 1e-5
        assert found.certified[question] == (answer > found.bound[question] + MARGIN / 2)


def test_an_accelerator_proves_nothing_unless_its_products_are_float32(monkeypatch):
    """By default GPUs and TPUs round what they multiply, and were certified all the same."""
    model, settings = tiny.rag_model("token"), Decoding(max_length=4)
    assert settings.certifies(model)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert not settings.certifies(model)
    with jax.default_matmul_precision("highest"):
        assert settings.certifies(model)


@pytest.mark.parametrize("tower", ["generator", "retriever"])
def test_nothing_is_proved_of_bfloat16(tower):
    """Its sums over an answer differ by more than the margin of the proof."""
    rounded = model("token")
    rounded = dataclasses.replace(rounded, **{
        tower: dataclasses.replace(getattr(rounded, tower), dtype="bfloat16")})
    settings = Decoding(max_length=LONGEST, num_beams=85)
    found = tiny.jit(functools.partial(decode, rounded, settings))(params(), BATCH)
    assert found.best.finished.all() and not found.certified.any() and np.isinf(found.bound).all()
    with pytest.raises(ValueError, match="dtype=float32"):
        exact(rounded, settings, params(), BATCH)


@pytest.mark.parametrize("kind", ["token", "sequence"])
def test_best_first_search_over_hundreds_of_random_models(kind):
    """The argmax, proved, from no guess at all; with few nodes, nothing wrong is proved."""
    tables = Tables(rows=300, documents=2, seed=11, end_bias=-1.0)
    ended = [y for y in every_answer(3) if y[-1] == tables_end]
    settings, proved = Decoding(max_length=3), 0
    names = SimpleNamespace(end_id=tables_end, pad_id=0)
    for row in range(300):
        mixed = tables.mixed(kind, row)

        def expand(prefixes, lengths, said, row=row, mixed=mixed):
            rows = [tuple(p[:n].tolist()) for p, n in zip(prefixes, lengths, strict=True)]
            return (np.float32([mixed(p) for p in rows]),
                    np.float32([tables.under(row, p) for p in rows]))

        y = max(ended, key=lambda y, row=row: tables.score(kind, row, y))
        whole = _Search(names, settings, 2, 2, expand)
        whole.run(100, None)
        assert whole.proved and whole.answer == y
        np.testing.assert_allclose(whole.score, tables.score(kind, row, y), rtol=1e-5)
        short = _Search(names, settings, 2, 2, expand)
        short.run(3, None)
        assert short.expanded <= 3 and (not short.proved or short.answer == y)
        proved += short.proved
        others = [tables.score(kind, row, y) for y in ended if y != short.answer]
        assert max(others) <= max(short.bound, short.score) + 1e-5
    assert 30 < proved < 290


def test_no_more_prefixes_are_kept_than_can_be_expanded():
    """With each its children, what was kept grew with the square of the budget: to 20 GiB.

    What is left out bounds the answers that are not found all the same.
    """
    tables, budget, kept = Tables(rows=100, longest=4, seed=3, end_bias=-1.0), 7, []
    ended = [y for y in every_answer(4) if y[-1] == tables_end]

    def searched(row):
        def expand(prefixes, lengths, said):
            kept.append(len(search.queue) <= budget - search.expanded)
            log_p = [tables.under(row, p[:n].tolist())
                     for p, n in zip(prefixes, lengths, strict=True)]
            return np.float32(log_p)[:, 0], np.float32(log_p)

        search = _Search(SimpleNamespace(end_id=tables_end, pad_id=0), Decoding(max_length=4), 1, 2,
                         expand)
        search.run(budget, None)
        return search

    for row in range(100):
        search = searched(row)
        assert search.proved or search.expanded == budget and not search.queue
        missed = max(tables.score("token", row, y) for y in ended if y != search.answer)
        assert missed <= search.bound + 1e-5
    assert all(kept)


@pytest.mark.parametrize("width", [1, 2])
def test_thorough_certifies_no_other_than_the_argmax_of_hundreds_of_random_models(
        width, monkeypatch):
    """`sequence.decode` over tables instead of a network."""
    rows, documents = 400, 2
    tables = Tables(rows, documents, seed=20 + width, spread=2.5)
    alone = Tables(1)
    alone.log_p = tables.log_p.reshape(rows * documents, 1, *tables.log_p.shape[2:])
    alone.log_prior, beams = np.zeros((rows * documents, 1)), []

    def search(*_):
        beams.append(alone.search(num_beams=width))
        return jax.tree.map(jnp.asarray, beams[-1])

    def score_pairs(model, params, read, candidates, mask, needed, known, memory_mib):
        code, said = jnp.zeros(candidates.shape[:2], int), []
        for t in range(candidates.shape[2]):
            token = candidates[:, :, t]
            under = jnp.float32(tables.log_p)[
                jnp.arange(rows)[:, None, None], jnp.arange(documents)[None, :, None],
                jnp.minimum(code, tables.log_p.shape[2] - 1)[:, None], token[:, None]]
            said.append(jnp.where(mask[:, None, :, t], under, 0.0))
            code = 4 * code + token + 1
        return jnp.where(needed[..., None], jnp.stack(said, axis=-1), known)

    monkeypatch.setattr(sequence, "search", search)
    monkeypatch.setattr(sequence, "score_pairs", score_pairs)
    towers = SimpleNamespace(dtype="float32")
    names = SimpleNamespace(kind="sequence", end_id=tables_end, pad_id=PAD, generator=towers,
                            retriever=towers)
    read = SimpleNamespace(log_prior=jnp.float32(tables.log_prior),
                           prior=jnp.exp(jnp.float32(tables.log_prior)))
    settings = Decoding(strategy="thorough", num_beams=width, max_length=3)
    found = jax.device_get(sequence.decode(names, {}, read, settings))
    ended, wrong = [y for y in every_answer(3) if y[-1] == tables_end], 0
    for row in range(rows):
        scores = {y: tables.score("sequence", row, y) for y in ended}
        held = {y for z in range(documents) for _, y in valid(beams[0], documents * row + z)}
        missed = max((s for y, s in scores.items() if y not in held), default=-np.inf)
        assert missed <= found.bound[row] + 1e-5
        right = table_cut(found.best.tokens[row]) == max(ended, key=scores.get)
        assert right or not found.certified[row]
        wrong += not right
    assert found.certified.sum() > rows / 4 and (wrong or width > 1)


def test_programs_of_exact_search_are_dropped_after_the_last_ones():
    """A server kept those of every prefix and bad word that it was ever asked with."""
    assert certificate._program.cache_info().maxsize == PROGRAMS


def test_a_nan_that_only_the_exact_search_meets_is_an_error():
    """Its comparisons with NaN are false: it would drop the prefix and prove another answer."""
    weights = jax.tree.map(np.array, params(7))
    start = run(params(7), BATCH, "token", 1)
    weights["generator"]["final_logits_bias"][0] = np.nan
    with pytest.raises(DecodingError, match="exact search: the scores are not finite"):
        exact(model("token"), Decoding(max_length=LONGEST, num_beams=1), weights, BATCH, 1000, 4,
              start, jit=tiny.jit)


def test_a_question_whose_guess_has_no_finite_score_is_left_as_it_is():
    """It ended in an IndexError, where decoding without exact search names the question."""
    start = jax.tree.map(np.array, run(params(7), BATCH, "token", 1))
    start.ranked.log_p[0] = np.nan
    start.certified[0] = False
    found = exact(model("token"), Decoding(max_length=LONGEST, num_beams=1), params(7), BATCH,
                  start=start)
    assert np.isnan(found.ranked.log_p[0]).all() and not found.expanded[0]
    assert 0 in faults(found) and 1 not in faults(found)


def test_a_certificate_of_a_long_answer_allows_for_the_rounding_of_its_sum():
    """Near -180 a sum of float32 loses what is below 7.6e-6: of two answers of 100 tokens, in a
    beam search of such numbers, the less probable one was certified by 1.5e-4 nats."""
    score, bound = jnp.float32([-180.69306945]), jnp.float32([-180.69322204])
    ended = jnp.ones(1, bool)
    for tokens, certified in ((100, False), (1, True)):
        settings = Decoding(max_length=tokens)
        assert certify(model("token"), settings, score, ended, bound)[0] == certified
    rng = np.random.default_rng(0)
    for tokens in (10, 100, 512):
        terms = -rng.exponential(2.0, (300, tokens)).astype(np.float32)
        summed = functools.reduce(np.add, terms.T)
        assert summed.dtype == np.float32
        wrong = np.abs(summed - terms.astype(np.float64).sum(axis=1))
        assert (2 * wrong <= margin(summed, tokens)).all()


@pytest.mark.parametrize("kind, strategy", [("token", "thorough"), ("sequence", "marginal")])
def test_an_answer_is_searched_for_where_the_beam_has_found_none(kind, strategy):
    """The error was that no answer is allowed, and nothing was searched for."""
    rules = {"strategy": strategy, "bad_words": tuple((0, token) for token in range(5))}
    start = run(params(7), BATCH, kind, 1, **rules)
    found = find(kind, 7, **rules)
    allowed = [y for y in ENDED if 0 not in y[:-1]]
    dead = 0
    for question in range(QUESTIONS - 1):  # the last has no passage
        dead += not start.ranked.valid[question, 0]
        assert found.certified[question] and found.ranked.valid[question, 0]
        assert answers(found)[question] == best(question, kind, 7, allowed)
    assert dead and "no answer was found" in str(faults(start).popitem()[1])
    assert not faults(found)
    none = find(kind, 7, strategy=strategy, prefix=(3,), bad_words=tuple(
        (3, token) for token in range(5)))
    assert "config.eval allows no answer" in str(faults(none).popitem()[1])
