"""A reranker's order of nominated passages: that of brute force, whatever nominates them."""

from types import SimpleNamespace

import numpy as np
import pytest

from rag_jax.retrieval import reranked
from rag_jax.retrieval.hybrid import HybridIndex, hybrid_queries
from rag_jax.retrieval.protocol import Passage, RetrievalError
from rag_jax.retrieval.reranked import RerankedIndex

TEXTS = np.array(["Who?", "Where is it?", "When was it, and why?"], object)
QUERIES = hybrid_queries(np.zeros((3, 4), np.float32), TEXTS, 0.0)
PASSAGES = [Passage(str(row), "", "x" * row) for row in range(30)]


def logit(text, row):
    """Some number; passages of the same remainder are equal."""
    return float(np.float32((len(text) * (row % 13) ** 2) % 17 - 8.5))


class Nominating:
    """Around an index that nominates `count` rows, in a random order; what it and the reranker are
    asked for is noted."""

    def __init__(self, count=12, seed=0, kind=SimpleNamespace):
        self.asked, self.scored, draw = [], [], np.random.default_rng(seed)
        self.rows = np.random.default_rng(7).permutation(30)  # those nominated come first

        def nominate(queries, n):
            self.asked.append(queries)
            return np.array([draw.permutation(self.rows[:n]) for _ in range(len(queries))])

        def score(texts, passages):
            self.scored += [(text, int(p.id)) for text, p in zip(texts, passages, strict=True)]
            return np.array([logit(text, int(p.id)) for text, p in zip(
                texts, passages, strict=True)], np.float32)

        inner = object.__new__(HybridIndex) if kind is HybridIndex else kind()
        inner.__dict__.update(words=None, index=SimpleNamespace(passages=PASSAGES, size=30))
        if kind is SimpleNamespace:
            inner.passages, inner.size = PASSAGES, 30
        self.index = RerankedIndex(inner, nominate, score, count)


@pytest.mark.parametrize("k", [1, 5, 12, 20])
def test_the_best_are_those_of_all_that_are_nominated(k):
    """Of equal ones the first row, as everywhere; more are nominated where more are asked for."""
    found = Nominating(12)
    result = found.index.search(QUERIES, k)
    nominated = found.rows[: max(12, k)]
    for query, (ids, scores) in enumerate(zip(*map(np.ndarray.tolist, result), strict=True)):
        best = sorted((-logit(TEXTS[query], row), row) for row in nominated.tolist())[:k]
        assert list(zip(scores, ids, strict=True)) == [(-a, row) for a, row in best]


def test_the_order_in_which_passages_are_nominated_changes_nothing():
    results = [Nominating(seed=seed).index.search(QUERIES, 5) for seed in (0, 1)]
    np.testing.assert_array_equal(*[result.ids for result in results])
    np.testing.assert_array_equal(*[result.scores for result in results])


def test_each_index_is_asked_as_it_is_by_itself():
    """By vectors, by words, or by both."""
    dense, words, both = Nominating(), Nominating(), Nominating(kind=HybridIndex)
    dense.index.search(QUERIES, 2)
    words.index.search(TEXTS, 2)
    both.index.search(QUERIES, 2)
    assert dense.asked[0].dtype == np.float32 and dense.asked[0].shape == (3, 4)
    assert words.asked[0] is TEXTS and both.asked[0] is QUERIES
    assert dense.scored == words.scored == both.scored, "the reranker reads texts"


def test_questions_are_a_list_of_texts():
    """Of a single one, an array without an axis was made."""
    for queries in ("Peru", [b"Peru"]):
        with pytest.raises(RetrievalError, match="queries must be a list of texts, got"):
            Nominating().index.search(queries, 2)


def test_a_pair_is_read_once(monkeypatch):
    """Batches look up again what a search has found, with rows that only fill them up."""
    found = Nominating(12)
    ids = found.index.search(QUERIES, 5).ids
    assert len(found.scored) == len(set(found.scored)) == 36
    scores = found.index.scores(TEXTS[[2, 0, 2]], ids[[2, 0, 2]])
    assert len(found.scored) == 36
    np.testing.assert_array_equal(scores, [[logit(TEXTS[q], row) for row in ids[q].tolist()]
                                           for q in (2, 0, 2)])
    np.testing.assert_array_equal(found.index.logits(QUERIES, ids[:, :2]),
                                  found.index.scores(TEXTS, ids[:, :2]))
    other = [row for row in range(30) if row not in found.rows[:12].tolist()][:1]
    found.index.scores(TEXTS[:1], np.array([other]))
    assert found.scored[36:] == [("Who?", other[0])]
    monkeypatch.setattr(reranked, "KEPT", 10)
    found.index.scores(TEXTS[1:], ids[1:])  # leaves those made last
    found.index.scores(TEXTS[:1], np.array([other]))
    assert len(found.scored) == 37 and len(found.index._kept) == 10
    found.index.scores(TEXTS[:1], ids[:1])
    assert len(found.scored) == 42


def test_what_another_thread_drops_is_there_for_who_found_it(monkeypatch):
    """A search that reads passages meanwhile failed by a KeyError."""
    monkeypatch.setattr(reranked, "KEPT", 10)
    found = Nominating(12)
    ids = found.index.search(QUERIES[:1], 5).ids
    score = found.index.score

    def slowly(texts, passages):  # another thread searches, and fills what is kept
        found.index.score = score
        found.index.search(QUERIES[2:], 5)
        return score(texts, passages)

    found.index.score = slowly
    scores = found.index.scores(TEXTS[:2], np.concatenate([ids, ids]))
    assert scores.tolist() == [[logit(text, row) for row in ids[0].tolist()] for text in TEXTS[:2]]
    assert len(found.index._kept) == 10


def test_texts_may_be_a_list_as_of_every_index_of_words():
    found, other = Nominating(), Nominating()
    for one, two in zip(found.index.search(list(TEXTS), 5), other.index.search(TEXTS, 5),
                        strict=True):
        np.testing.assert_array_equal(one, two)


def test_what_cannot_be_searched_is_named():
    index = Nominating().index
    with pytest.raises(RetrievalError, match="k=31: an index of 30"):
        index.search(QUERIES, 31)
    assert index.search(QUERIES[:0], 3).ids.shape == (0, 3)
