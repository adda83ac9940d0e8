"""Decoding of both models against enumeration of every answer of a tiny vocabulary."""

import functools

import jax
import naive
import numpy as np
import plain
import pytest
import tiny
from enumerated import (
    ANSWERS,
    BATCH,
    DOCS,
    END,
    ENDED,
    EVERYTHING,
    LONGEST,
    PAD,
    QUESTIONS,
    VOCAB,
    World,
    answers,
    cut,
    params,
    ranked,
    run,
    strengthened,
    with_end_bias,
    world,
    world_of,
)
from enumerated import model as small

from rag_jax import parallel
from rag_jax.config import MeshConfig
from rag_jax.decoding.answer import decode
from rag_jax.decoding.results import faults
from rag_jax.decoding.settings import Decoding
from rag_jax.errors import NotFiniteError
from rag_jax.models.likelihood import log_likelihood, log_prior

KINDS = ["token", "sequence"]
WAYS = [("token", "thorough"), ("sequence", "thorough"), ("sequence", "fast"),
        ("sequence", "marginal")]


def naive_ranking(question, kind, strategy, width, penalty=0.0, forced=(), **rules):
    """The package's decoders in words: [(ended, score, answer)], best first; python, float64.

    forced: the first tokens that `rules` force.
    """
    settings = Decoding(num_beams=width, max_length=LONGEST, length_penalty=penalty, **rules)
    if kind == "token" or strategy == "marginal":
        found = plain.beam_search(world().mixed(question, kind), settings, END)
        return [(y[-1] == END, score, y) for score, y in found]
    beams = {z: dict((y, score) for score, y in plain.beam_search(
        lambda p, z=z: world().table[p][question, z], settings, END))
        for z in range(DOCS) if BATCH.doc_mask[question, z]}
    result = []
    for y in {y for beam in beams.values() for y in beam}:
        score = world().log_p(question, y, "sequence")
        if strategy == "fast":
            said = world().said(question, y).sum(axis=0)
            score = np.logaddexp.reduce([world().prior[question, z] + said[z]
                                         for z, beam in beams.items() if y in beam])
        result.append((y[-1] == END, score, y))

    free = world().log_p(question, forced, "sequence")

    def rank(found):
        ended, score, y = found
        return ended, (score - free) / max(len(y) - settings.prefix_length, 1) ** penalty

    return sorted(result, key=rank, reverse=True)


@pytest.mark.parametrize("kind", KINDS)
def test_enumerated_answers_have_total_probability_one(kind):
    for question in range(QUESTIONS):
        p = [np.exp(world().log_p(question, y, kind)) for y in ANSWERS]
        np.testing.assert_allclose(sum(p), 1, rtol=1e-5)


@pytest.mark.parametrize("kind, strategy", WAYS)
def test_full_width_finds_the_enumerated_argmax(kind, strategy):
    """The best answer that ends, certified where that is claimed; fast claims nothing."""
    found = run(params(), BATCH, kind, EVERYTHING, strategy=strategy)
    for question, y in enumerate(answers(found)):
        best = max(ENDED, key=lambda y, q=question: world().log_p(q, y, kind))
        assert y == best
        np.testing.assert_allclose(found.best.log_p[question], world().log_p(question, best, kind),
                                   rtol=1e-5)
    assert (found.certified == (strategy != "fast")).all() and found.best.finished.all()


@pytest.mark.parametrize("kind, strategy", [*WAYS, ("token", "sample"), ("sequence", "sample")])
def test_answers_of_one_token(kind, strategy):
    """And </s>: documents have one token alone to tell in which they differ."""
    settings = {"strategy": strategy, "min_length": 2, "max_length": 2}
    key = None
    if strategy == "sample":
        settings |= {"strategy": "marginal", "sample": True}
        key = jax.random.key(0)
    found = run(params(), BATCH, kind, 21, key, **settings)
    one_token = [(t, END) for t in range(VOCAB) if t != END]
    for question in range(QUESTIONS):
        best = max(one_token, key=lambda y, q=question: world().log_p(q, y, kind))
        assert strategy == "sample" or cut(found.best.tokens[question][:2]) == best
        shown = ranked(found, question)
        assert strategy == "sample" or set(one_token) <= set(shown)
        for place, y in enumerate(shown):
            np.testing.assert_allclose(found.ranked.log_p[question, place],
                                       world().log_p(question, y, kind), rtol=1e-5)


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("kind, strategy", WAYS)
def test_beams_match_the_naive_decoder_in_order_and_score(kind, strategy, width):
    """Duplicates across documents come once; too few answers are marked, not invented."""
    found = run(params(), BATCH, kind, width, strategy=strategy)
    for question in range(QUESTIONS):
        expected = naive_ranking(question, kind, strategy, width)[:width]
        assert ranked(found, question) == [y for *_, y in expected]
        np.testing.assert_allclose(found.ranked.log_p[question][: len(expected)],
                                   [score for _, score, _ in expected], rtol=1e-5)
        assert found.best.finished[question] == expected[0][0]
    assert len(set(answers(found))) >= 3, "answers that are all alike prove little"


@pytest.mark.parametrize("penalty", [-2.0, 3.0])
@pytest.mark.parametrize("strategy", ["thorough", "fast"])
def test_answers_of_all_documents_are_ranked_by_log_p_over_length_to_the_penalty(strategy, penalty):
    """Multiplying by the length's power ranks long answers last where they should come first."""
    found = run(params(), BATCH, "sequence", 3, strategy=strategy, length_penalty=penalty)
    moved = 0
    for question in range(QUESTIONS):
        expected = naive_ranking(question, "sequence", strategy, 3, penalty)[:3]
        assert ranked(found, question) == [y for *_, y in expected]
        np.testing.assert_allclose(found.ranked.log_p[question][: len(expected)],
                                   [score for _, score, _ in expected], rtol=1e-5)
        ended = [score for ended, score, _ in expected if ended]
        moved += ended != sorted(ended, reverse=True)
    assert moved, "the penalty changed no order"


@pytest.mark.parametrize("strategy, forced, rules", [
    ("thorough", (4,), {"prefix": (4,)}), ("fast", (4,), {"prefix": (4,)}),
    ("thorough", (0,), {"forced_bos": 0})])
def test_what_is_forced_first_costs_nothing_where_answers_are_ranked(strategy, forced, rules):
    """A prefix's log p was divided by the length of what follows it: long answers won by it."""
    found = run(params(), BATCH, "sequence", 3, strategy=strategy, length_penalty=1.0, **rules)
    moved = 0
    for question in range(QUESTIONS):
        expected = naive_ranking(question, "sequence", strategy, 3, 1.0, forced, **rules)[:3]
        assert ranked(found, question) == [y for *_, y in expected]
        np.testing.assert_allclose(found.ranked.log_p[question][: len(expected)],
                                   [score for _, score, _ in expected], rtol=1e-5)
        moved += expected != naive_ranking(question, "sequence", strategy, 3, 1.0, **rules)[:3]
    assert moved, "the forced tokens would have changed no order"


@pytest.mark.parametrize("kind, strategy", [w for w in WAYS if w[1] != "fast"])
def test_reported_numbers_are_those_of_the_equations(kind, strategy):
    """log p of answer and tokens, prior, and the posteriors of the answer and of each token."""
    found = run(params(), BATCH, kind, 3, strategy=strategy)
    np.testing.assert_allclose(found.prior, np.exp(world().prior), rtol=1e-5)
    for question in range(QUESTIONS):
        prior = np.exp(world().prior[question])
        for place, y in enumerate(ranked(found, question)):
            said, n = np.exp(world().said(question, y)), len(y)
            joint = prior * (said.cumprod(axis=0) if kind == "sequence" else said)  # [T, K]
            each = joint / joint.sum(axis=1, keepdims=True)
            whole = each[-1] if kind == "sequence" else each.mean(axis=0)
            of, step = world().mixed(question, kind), found.ranked.token_log_p[question, place]
            np.testing.assert_allclose(
                step[:n], [of(y[:t])[y[t]] for t in range(n)], rtol=1e-4, atol=1e-6)
            np.testing.assert_allclose(step.sum(), found.ranked.log_p[question, place], rtol=1e-5)
            by_token = found.ranked.token_posterior[question, place].T
            np.testing.assert_allclose(by_token[:n], each, rtol=1e-4, atol=1e-6)
            assert not step[n:].any() and not by_token[n:].any()
            np.testing.assert_allclose(found.ranked.posterior[question, place], whole, rtol=1e-4,
                                       atol=1e-6)


def test_fast_gives_no_share_to_documents_whose_beam_lacks_the_answer():
    found = run(params(), BATCH, "sequence", 1, strategy="fast")
    without = 0
    for question, y in enumerate(answers(found)):
        for z in np.flatnonzero(BATCH.doc_mask[question]):
            of = lambda p, z=z, q=question: world().table[p][q, z]  # noqa: E731
            greedy = plain.beam_search(of, Decoding(num_beams=1, max_length=LONGEST), END)[0][1]
            assert (found.best.posterior[question, z] == 0) == (greedy != y)
            without += greedy != y
    assert without


@pytest.mark.parametrize("kind, strategy", WAYS)
def test_end_first_and_never(kind, strategy):
    """The empty answer is an answer; one that never ends is cut at the length limit."""
    empty = run(with_end_bias(params(), 60.0), BATCH, kind, 3, strategy=strategy)
    assert answers(empty) == [(END,)] * QUESTIONS
    np.testing.assert_allclose(empty.best.log_p, 0, atol=1e-4)
    endless = run(with_end_bias(params(), -60.0), BATCH, kind, 3, strategy=strategy)
    assert all(END not in y and len(y) == LONGEST for y in answers(endless))
    assert np.isfinite(endless.best.log_p).all()
    assert not endless.best.finished.any() and not endless.certified.any()


@pytest.mark.parametrize("kind, strategy", WAYS)
def test_padding_documents_and_targets_are_not_read(kind, strategy):
    expected = run(params(), BATCH, kind, 3, strategy=strategy)
    padding = ~BATCH.doc_mask
    junk = BATCH._replace(
        source_ids=np.where(padding[..., None], (BATCH.source_ids + 1) % VOCAB, BATCH.source_ids),
        doc_embeddings=np.where(padding[..., None], np.float32(99), BATCH.doc_embeddings),
        target_ids=(BATCH.target_ids + 1) % VOCAB)
    found = run(params(), junk, kind, 3, strategy=strategy)
    np.testing.assert_array_equal(found.best.tokens, expected.best.tokens)
    np.testing.assert_allclose(found.best.log_p, expected.best.log_p, rtol=1e-6)
    np.testing.assert_array_equal(found.certified, expected.certified)
    assert not found.best.posterior[padding].any()


@pytest.mark.parametrize("strategy", ["thorough", "fast"])
def test_padding_documents_propose_no_answers(strategy):
    """Only the one real document's greedy answer counts, even where another would score higher."""
    alone = BATCH._replace(doc_mask=np.arange(DOCS)[None] == np.zeros((QUESTIONS, 1), int))
    found = answers(run(params(), alone, "sequence", 1, strategy=strategy))
    tempted, table = 0, world().table
    for question in range(QUESTIONS):
        greedy = [naive.beam_search(
            lambda p, q=question, z=z: table[p][q, z], 1, LONGEST, END)[0][1] for z in range(DOCS)]
        assert found[question] == greedy[0]
        under_first = [(y[-1] == END, sum(table[y[:t]][question, 0, y[t]] for t in range(len(y))))
                       for y in greedy]
        tempted += max(under_first) > under_first[0]
    assert tempted, "no padding document was tempting"


@pytest.mark.parametrize("kind, strategy", WAYS)
def test_an_answer_does_not_depend_on_the_rest_of_the_batch(kind, strategy):
    """Other order, other neighbours, one of them without any document."""
    expected = run(params(), BATCH, kind, 3, strategy=strategy)
    order = np.array([2, 5, 0, 3, 4, 1])
    moved = run(params(), jax.tree.map(lambda leaf: leaf[order], BATCH), kind, 3,
                strategy=strategy)
    np.testing.assert_array_equal(moved.best.tokens, expected.best.tokens[order])
    np.testing.assert_allclose(moved.best.log_p, expected.best.log_p[order], rtol=1e-6)
    other = BATCH._replace(doc_mask=BATCH.doc_mask & (np.arange(QUESTIONS) != 1)[:, None])
    found = run(params(), other, kind, 3, strategy=strategy)
    assert not any(np.isnan(leaf).any() for leaf in jax.tree.leaves(found))
    assert not found.certified[1]
    kept = np.array([0, 2, 3, 4, 5])
    np.testing.assert_array_equal(found.best.tokens[kept], expected.best.tokens[kept])


@pytest.mark.parametrize("kind, strategy", [*WAYS, ("token", "sample"), ("sequence", "sample")])
def test_the_memory_budget_changes_no_result(kind, strategy, monkeypatch):
    """Two questions at a time, and four candidates: the last group of them overlaps another.

    A question's samples are its own in whatever group it stands.
    """
    from rag_jax.decoding import answer, scoring
    settings, key = {"strategy": strategy}, None
    if strategy == "sample":
        settings, key = {"sample": True}, jax.random.key(3)
    expected = run(params(), BATCH, kind, 3, key, **settings)
    monkeypatch.setattr(answer, "questions_at_once", lambda *_: 2)
    monkeypatch.setattr(scoring, "candidates_at_once", lambda *_: 4)
    settings = Decoding(**settings, num_beams=3, num_return_sequences=3, max_length=LONGEST)
    found = jax.device_get(tiny.jit(functools.partial(decode, small(kind), settings))(
        params(), BATCH, key))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind, strategy", WAYS)
def test_devices_change_no_result(kind, strategy, monkeypatch):
    """Layers and their parameters split over four; each pair has three questions, one at a time."""
    from rag_jax.decoding import answer

    expected = run(params(), BATCH, kind, 3, strategy=strategy)
    mesh, model = parallel.make_mesh(MeshConfig(1, 2, 2), jax.devices()[:4]), small(kind)
    boxed = jax.eval_shape(model.init, jax.random.key(0))
    shardings = parallel.param_shardings({tower: boxed[tower] for tower in params()}, mesh)
    asked, count = [], answer.questions_at_once
    monkeypatch.setattr(answer, "questions_at_once",
                        lambda *given: asked.append((given[2], count(*given))) or 1)
    settings = Decoding(strategy=strategy, num_beams=3, num_return_sequences=3, max_length=LONGEST)
    found = jax.device_get(tiny.jit(functools.partial(decode, model, settings))(
        jax.device_put(params(), shardings), parallel.put_batch(BATCH, mesh), None))
    assert asked == [(QUESTIONS // 2, QUESTIONS // 2)], "the budget is that of a device"
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_thorough_scores_no_pair_twice_and_fast_none(monkeypatch):
    """Counted at every pass: (candidates of a pass) x passes, for each document."""
    from rag_jax.decoding import documents, scoring, sequence

    calls = tiny.counted(monkeypatch, documents, "target_log_probs")
    monkeypatch.setattr(scoring, "candidates_at_once", lambda *_: 2)
    monkeypatch.setattr(sequence, "_hopeful", lambda lower, upper, distinct, *_: distinct)
    programs = {strategy: tiny.jit(functools.partial(decode, small("sequence"), Decoding(
        strategy=strategy, num_beams=3, max_length=LONGEST))) for strategy in ("thorough", "fast")}

    def passes(strategy, batch):
        calls.clear()
        found = jax.block_until_ready(programs[strategy](params(), batch))
        jax.effects_barrier()
        assert not np.asarray(found.certified).any() or strategy == "thorough"
        return len(calls)

    alike = BATCH._replace(source_ids=np.repeat(BATCH.source_ids[:, :1], DOCS, axis=1),
                           source_mask=np.repeat(BATCH.source_mask[:, :1], DOCS, axis=1))
    beams = [[{y for _, y in plain.beam_search(
        lambda p, q=q, z=z: world().table[p][q, z], Decoding(num_beams=3, max_length=LONGEST), END)}
        for z in np.flatnonzero(BATCH.doc_mask[q])] for q in range(QUESTIONS)]
    needed = max(len(set().union(*found) - beam) for found in beams for beam in found)
    assert 1 < needed < 3 * DOCS
    assert passes("thorough", BATCH) == -(-needed // 2)
    assert passes("fast", BATCH) == 0
    assert passes("thorough", alike) == 0


@pytest.mark.parametrize("beams,answers,penalty", [
    (1, 1, 0.0), (2, 1, 0.0), (3, 2, 0.0), (3, 1, 1.0), (2, 1, -1.0)])
def test_what_is_not_scored_could_not_have_been_an_answer(monkeypatch, beams, answers, penalty):
    from rag_jax.decoding import sequence

    settings = Decoding(strategy="thorough", num_beams=beams, max_length=LONGEST,
                        num_return_sequences=answers, length_penalty=penalty)
    hopeful, kept = sequence._hopeful, []

    def noted(lower, upper, distinct, *others):
        found = hopeful(lower, upper, distinct, *others)
        jax.debug.callback(lambda *both: kept.append(both), (found & distinct).sum(),
                           distinct.sum())
        return found

    def answer(replacement):
        monkeypatch.setattr(sequence, "_hopeful", replacement)
        program = tiny.jit(functools.partial(decode, small("sequence"), settings))
        found = []
        for temperature in (0.5, 2.0, 8.0):  # the embedding is the output layer too
            generator = {**params()["generator"],
                         "embedding": temperature * params()["generator"]["embedding"]}
            found.append(jax.device_get(program({**params(), "generator": generator}, BATCH)))
        jax.effects_barrier()
        return found

    for every, few in zip(answer(lambda lower, upper, distinct, *_: distinct), answer(noted),
                          strict=True):
        np.testing.assert_array_equal(few.best.tokens, every.best.tokens)
        np.testing.assert_array_equal(few.ranked.valid, every.ranked.valid)
        np.testing.assert_array_equal(few.ranked.tokens, every.ranked.tokens)
        np.testing.assert_allclose(few.ranked.log_p, every.ranked.log_p, atol=1e-5)
        np.testing.assert_array_equal(few.certified, every.certified)
    left = sum(found for found, _ in kept) / sum(distinct for _, distinct in kept)
    assert left < 1, "nothing was left out: this shows nothing"


@pytest.mark.parametrize("strategy", ["thorough", "fast", "marginal"])
def test_equal_documents_and_one_document_make_all_ways_equal(strategy):
    """All documents equal: the mixture is each of them. One document: nothing to mix."""
    alike = BATCH._replace(source_ids=np.repeat(BATCH.source_ids[:, :1], DOCS, axis=1),
                           source_mask=np.repeat(BATCH.source_mask[:, :1], DOCS, axis=1))
    alone = BATCH._replace(
        source_ids=BATCH.source_ids[:, :1], source_mask=BATCH.source_mask[:, :1],
        doc_embeddings=BATCH.doc_embeddings[:, :1], doc_mask=np.ones((QUESTIONS, 1), bool),
        doc_ids=None)
    token = run(params(), alone, "token", 3)
    for batch in (alike, alone):
        found = run(params(), batch, "sequence", 3, strategy=strategy)
        np.testing.assert_array_equal(found.best.tokens, token.best.tokens)
        np.testing.assert_allclose(found.best.log_p, token.best.log_p, rtol=1e-5)
        np.testing.assert_allclose(found.best.posterior, found.prior, rtol=1e-4)


def test_settings_reach_both_models():
    """Rules and the length penalty, through the whole of `decode`."""
    for kind, strategy in WAYS[:2]:
        found = run(params(), BATCH, kind, 3, strategy=strategy, bad_words=((3,),), min_length=2,
                    prefix=(4,), forced_eos=True, length_penalty=1.0)
        for question, y in enumerate(answers(found)):
            assert y[0] == 4 and 3 not in y and y[-1] == END and len(y) >= 2
            np.testing.assert_allclose(found.best.log_p[question], world().log_p(question, y, kind),
                                       rtol=1e-5)
        # Forced </s> and a length penalty: nothing is claimed.
        assert np.isinf(found.bound).all() and not found.certified.any()


def test_what_the_model_does_not_allow_is_refused():
    for settings, word in (({"max_length": 9}, "8 positions"), ({"prefix": (5,)}, "vocab_size=5"),
                           ({"bad_words": ((END,),)}, "end token"),
                           ({"forced_bos": END}, "end token")):
        with pytest.raises(ValueError, match=word):
            decode(small("token"), Decoding(**{"max_length": 3, **settings}), {}, BATCH)
    chat = tiny.rag_model("token", generator={"vocab_size": VOCAB, "max_positions": 8,
                                              "end_tokens": (END, 3)})
    for settings in ({"forced_bos": 3}, {"prefix": (4, 3)}):
        with pytest.raises(ValueError, match="holds the end token 3: nothing could follow"):
            Decoding(max_length=3, **settings).check(chat)
    for labels in (((4, END, END), (4, END)), ((4, END), (0, 3)), ((3,), (4,))):
        with pytest.raises(ValueError, match="labels: one holds the end token [23]; only 2 ends"):
            Decoding(max_length=3, labels=labels).check(chat)
    Decoding(max_length=3, labels=((4, END), (0,), (END,))).check(chat)
    with pytest.raises(ValueError, match="key"):
        decode(small("token"), Decoding(max_length=3, sample=True), {}, BATCH)
    for sample, shape in ((False, (QUESTIONS,)), (True, ()), (True, (QUESTIONS + 1,))):
        with pytest.raises(ValueError, match="one number for each of"):
            decode(small("token"), Decoding(max_length=3, sample=sample), {}, BATCH,
                   jax.random.key(0) if sample else None, np.ones(shape, np.float32))


@pytest.mark.parametrize("kind, strategy", WAYS[:2])
def test_long_beams_follow_the_full_forward(kind, strategy):
    """Hypotheses that overtake each other for 7 tokens must take their caches with them."""
    model, width, length, questions = tiny.rag_model(kind), 4, 7, 6
    weights = strengthened(
        with_end_bias(tiny.rag_params(model, seed=3), 2.0), ("self_attention", "cross_attention"))
    batch = tiny.rag_batch(seed=1, questions=questions, passages=2, model=model)
    settings = Decoding(strategy=strategy, num_beams=width, max_length=length)
    decoded = tiny.jit(functools.partial(decode, model, settings))(weights, batch)
    prior = np.log(np.maximum(np.float64(decoded.prior), 1e-300))

    @tiny.jit
    def logits(decoder_ids):
        return model.generator_module.apply(
            {"params": weights["generator"]}, batch.source_ids.reshape(2 * questions, -1),
            batch.source_mask.reshape(2 * questions, -1), decoder_ids)

    @functools.cache
    def after(prefix):
        """log p(y_t | x, z, prefix) [B, K, V] of every document, by a whole forward."""
        ids = [END, *prefix, *[PAD] * (length - 1 - len(prefix))]
        rows = np.tile(np.int32(ids), (2 * questions, 1))
        log_p = naive.log_softmax(np.float64(logits(rows))[:, len(prefix)])
        return log_p.reshape(questions, 2, -1)

    def under(question, y):
        return np.array([sum(after(y[:t])[question, z, y[t]] for t in range(len(y)))
                         for z in range(2)])

    def mixed(prefix, question):
        weight = prior[question]
        if kind == "sequence":
            weight = naive.log_softmax(weight + under(question, prefix))
        return np.log((np.exp(weight)[:, None] * np.exp(after(prefix)[question])).sum(0))

    def joint(question, y):
        return np.log((np.exp(prior[question]) * np.exp(under(question, y))).sum())

    found = []
    for question in range(questions):
        if kind == "token" or strategy == "marginal":
            found.append(naive.beam_search(
                lambda p, q=question: mixed(p, q), width, length, END)[0][1])
        else:
            candidates = [y for z in np.flatnonzero(batch.doc_mask[question])
                          for _, y in naive.beam_search(
                              lambda p, q=question, z=z: after(p)[q, z], width, length, END)]
            found.append(max(candidates, key=lambda y, q=question: (y[-1] == END, joint(q, y))))
    assert answers(decoded) == found
    assert max(map(len, found)) > 3 and len(set(found)) > 3


@pytest.mark.parametrize("kind", KINDS)
def test_given_answers_are_scored_as_training_does(kind):
    """`score` shares caches with the beams; `likelihood.log_likelihood` shares nothing with it."""
    from rag_jax.decoding import documents
    from rag_jax.decoding.scoring import score
    found = run(params(), BATCH, kind, 3)
    mask = np.zeros((QUESTIONS, LONGEST), bool)
    for row, y in enumerate(answers(found)):
        mask[row, : len(y)] = True
    batch = BATCH._replace(target_ids=found.best.tokens, target_mask=mask)
    forced = tiny.jit(functools.partial(log_likelihood, small(kind)))(params(), batch)
    long = np.pad(found.best.tokens, ((0, 0), (0, LONGEST)), constant_values=PAD)
    read = tiny.jit(functools.partial(documents.read, small(kind)))(params(), BATCH)
    scorer = tiny.jit(functools.partial(score, small(kind)))
    # With room for six tokens only the first three are computed: none of these answers is longer.
    for scored in (scorer(params(), read, found.best.tokens[:, None]),
                   scorer(params(), read, long[:, None], mask=np.pad(
                       mask, ((0, 0), (0, LONGEST)))[:, None])):
        for name in ("log_p", "posterior"):
            for ours in (getattr(found.best, name), getattr(scored, name)[:, 0]):
                np.testing.assert_allclose(ours, forced[name], rtol=1e-5, atol=1e-6)


def with_nan(tower):
    """The parameters with one number that is none."""
    changed = jax.tree.map(np.array, params())
    jax.tree.leaves(changed[tower])[0].flat[0] = -np.nan  # x86's own; the last in a search's order
    return changed


@pytest.mark.parametrize("kind, strategy", [*WAYS, ("token", "sample"), ("token", "label")])
@pytest.mark.parametrize("tower", ["generator", "query_encoder"])
def test_a_nan_is_a_fault_of_every_question_and_never_an_answer(tower, kind, strategy):
    """A search whose scores are NaN was empty, which read as the empty answer, of probability 1."""
    settings, key = {"strategy": strategy}, None
    if strategy == "sample":
        settings, key = {"sample": True}, jax.random.key(0)
    elif strategy == "label":
        settings = {"labels": ((3,), (0,), (4,))}
    width = 1 if key is not None or strategy == "label" else 3
    found = run(with_nan(tower), BATCH, kind, width, key, **settings)
    seen = faults(found)
    assert set(seen) == set(range(QUESTIONS))
    assert all("not finite" in str(fault) and "learning rate" in str(fault)
               and isinstance(fault, NotFiniteError) for fault in seen.values())
    assert not faults(run(params(), BATCH, kind, width, key, **settings))


def test_rules_that_allow_nothing_are_a_fault_and_a_question_without_passages_is_none():
    """The first gave the empty answer with log p = 0; the second has no answer to be wrong."""
    everything = tuple((token,) for token in range(VOCAB) if token != END)
    found = run(params(), BATCH, "token", 1, bad_words=everything, min_length=2)
    assert set(faults(found)) == set(range(QUESTIONS))
    assert "bad_words" in str(faults(found)[0])
    assert not isinstance(faults(found)[0], NotFiniteError)
    alone = BATCH._replace(doc_mask=BATCH.doc_mask & (np.arange(QUESTIONS) != 1)[:, None])
    for kind in KINDS:
        assert not faults(run(params(), alone, kind, 3))


def test_forced_tokens_are_counted_for_a_document_whose_beam_is_empty():
    """Their log p was 0 there, as the document had no hypothesis to read it from, and with a length
    penalty another answer came first."""
    weights, prefix = with_end_bias(params(7), 1.5), (0,)
    told, rng, dead = world_of(small("token"), weights), np.random.default_rng(0), 0
    rules = {"strategy": "thorough", "length_penalty": 2.0, "prefix": prefix,
             "bad_words": tuple((4, token) for token in range(VOCAB))}
    settings = Decoding(num_beams=1, max_length=LONGEST, **rules)
    prior = tiny.jit(functools.partial(log_prior, small("token"), weights))
    for _ in range(150):
        batch = BATCH._replace(
            doc_embeddings=2 * rng.normal(size=BATCH.doc_embeddings.shape).astype(np.float32))
        truth = World(np.float64(prior(batch)), told.table)
        found = run(weights, batch, "sequence", 1, **rules)
        for question in range(QUESTIONS - 1):
            real = np.flatnonzero(truth.prior[question] > -1e20)
            beams = [plain.beam_search(lambda p, at=(question, z): told.table[tuple(p)][at],
                                       settings, END) for z in real]
            dead += not all(beams)
            shared = np.log(sum(np.exp(truth.prior[question, z] + truth.said(
                question, prefix).sum(axis=0)[z]) for z in real))

            def rank(y, question=question, shared=shared, truth=truth):
                log_p = truth.log_p(question, y, "sequence") - shared
                return log_p / max(len(y) - len(prefix), 1) ** 2.0

            candidates = {y for beam in beams for _, y in beam}
            best = min(candidates, key=lambda y: (y[-1] != END, -rank(y)))
            assert ranked(found, question)[0] == best
    assert dead
