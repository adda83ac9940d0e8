"""Embeddings and words joined: the best passages are those of brute force over both scores."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rag_jax.fusion import Fusion
from rag_jax.retrieval import hybrid, joined
from rag_jax.retrieval.bm25 import Bm25Index, build_bm25
from rag_jax.retrieval.editing import edit_index
from rag_jax.retrieval.hybrid import HybridIndex, hybrid_queries
from rag_jax.retrieval.index import PassageIndex
from rag_jax.retrieval.joined import copy_rows, kept_rows
from rag_jax.retrieval.passages import PassageStore
from rag_jax.retrieval.protocol import RetrievalError
from tests.retrieval.indexing import build_index
from tests.retrieval.test_bm25 import QUESTIONS, random_passages, write
from tests.retrieval.test_build import TABLE
from tests.retrieval.test_editing import embedder

VECTORS = np.random.default_rng(3).standard_normal((len(QUESTIONS), 16), np.float32)
TEXTS = np.array(QUESTIONS, object)
FUSIONS = [Fusion("convex", weight) for weight in (0.0, 0.3, 1.0)] + [Fusion("reciprocal_rank")]


def embed(ids, mask):
    return TABLE[ids[:, 0]]


def numbered(path, passages):
    """Passages whose only token is their number."""
    from rag_jax.retrieval.store_writing import write_store
    return write_store(path, passages, {"row": lambda ps: [[int(p.id)] for p in ps]})


INPUTS = {"token_table": "row", "max_length": 1, "batch_size": 4, "length_buckets": (1,),
          "encoder_fingerprint": "e"}


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    path = tmp_path_factory.mktemp("hybrid")
    store = numbered(path / "store", random_passages())
    dense = build_index(store, embed, path / "dense", kind="exact", progress=False, **INPUTS)
    return dense, build_bm25(store, path / "words")


def naive(dense, words, fusion):
    """Logits of scores float[N] each, one passage after the other."""
    if fusion.kind == "convex":
        return [(1 - fusion.weight) * a + fusion.weight * b
                for a, b in zip(dense, words, strict=True)]
    ranks = [[1 + sum(other > one for other in scores) + sum(
        other == one for other in scores[:place]) for place, one in enumerate(scores)]
        for scores in (dense, words)]
    return [np.log(1 / (60 + a) + (1 / (60 + b) if word else 0))
            for a, b, word in zip(*ranks, words, strict=True)]


def naive_of_all(dense, words, fusion):
    """`naive` where equal scores rank as the other index has them."""
    order = sorted(range(len(dense)), key=lambda row: (-dense[row], -words[row], row))
    logits = naive([dense[row] for row in order], [words[row] for row in order], fusion)
    return [logits[order.index(row)] for row in range(len(dense))]


@pytest.mark.parametrize("fusion", FUSIONS, ids=str)
def test_logits_are_those_of_the_formula_on_the_host_and_in_a_program(fusion):
    draw = np.random.default_rng(0)
    dense, words = draw.standard_normal((2, 4, 9)).astype(np.float32)
    words = np.abs(words)
    words[:, 3:5] = 0  # passages without a word of the question are equal
    expected = [naive(*pair, fusion) for pair in zip(dense, words, strict=True)]
    np.testing.assert_allclose(fusion.logits(dense, words, fusion.weight), expected, rtol=1e-5,
                               atol=1e-6)
    found = jax.jit(lambda a, b, w: fusion.logits(a, b, w, jnp))(dense, words, fusion.weight)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    gradient = jax.grad(lambda a: fusion.logits(a, words, fusion.weight, jnp).sum())(dense)
    np.testing.assert_allclose(
        gradient, np.full(dense.shape, 1 - fusion.weight if fusion.kind == "convex" else 0.0))


@pytest.mark.parametrize("fusion", FUSIONS, ids=str)
@pytest.mark.parametrize("k", [1, 7, 60])
def test_the_best_are_those_of_all_passages_where_all_are_nominated(parts, fusion, k):
    """Each passage once, also where both parts nominate it."""
    index, queries = HybridIndex(*parts, fusion), hybrid_queries(VECTORS, TEXTS, fusion.weight)
    found = index.search(queries, k)
    everyone = np.tile(np.arange(60), (len(QUESTIONS), 1))
    words = index.words.scores(QUESTIONS, everyone)
    dense = VECTORS @ np.asarray(index.index.table).T
    expected = np.array([naive_of_all(*pair, fusion) for pair in zip(dense, words, strict=True)])
    best = -np.sort(-expected, axis=1)[:, :k]
    assert all(len(set(row)) == k for row in found.ids.tolist())
    of_found = np.take_along_axis(expected, found.ids, axis=1)
    np.testing.assert_allclose(-np.sort(-of_found, axis=1), best, rtol=1e-4, atol=1e-5)
    if fusion.kind == "convex":
        np.testing.assert_allclose(of_found, best, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found.scores, best, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fusion", FUSIONS, ids=str)
@pytest.mark.parametrize("k", [1, 7, 60])
def test_what_is_found_is_in_the_order_of_its_prior(parts, fusion, k):
    """By reciprocal ranks it came in the order of its ranks among all that were nominated, and the
    third passage of "best first" was the likeliest."""
    index, queries = HybridIndex(*parts, fusion), hybrid_queries(VECTORS, TEXTS, fusion.weight)
    found = index.search(queries, k)
    assert (np.diff(found.scores, axis=1) <= 0).all()
    np.testing.assert_array_equal(index.logits(queries, found.ids), found.scores)
    dense, words = index.index.scores(VECTORS, found.ids), index.scores(TEXTS, found.ids)
    np.testing.assert_allclose(found.scores, [naive(*pair, fusion) for pair in zip(
        dense, words, strict=True)], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fusion", [Fusion(), Fusion("reciprocal_rank")], ids=str)
@pytest.mark.parametrize("nominated", [100, 7])
def test_what_no_word_tells_apart_embeddings_tell_apart(parts, fusion, nominated, monkeypatch):
    """All scores of words were equal, and ranked by the numbers of rows: the first passages of the
    index were found for every question."""
    monkeypatch.setattr(hybrid, "NOMINATED", nominated)
    index = HybridIndex(*parts, fusion)
    texts = np.array(["zzz"] * len(VECTORS), object)
    assert not index.words.scores(texts, np.tile(np.arange(60), (len(texts), 1))).any()
    found = index.search(hybrid_queries(VECTORS, texts, 0.5), 5)
    np.testing.assert_array_equal(found.ids, index.index.search(VECTORS, 5).ids)


@pytest.mark.parametrize("fusion", [Fusion(), Fusion("reciprocal_rank")], ids=str)
def test_passages_of_the_same_words_are_ranked_by_embeddings(fusion, tmp_path):
    same = [p._replace(title="", text="The river.") for p in random_passages(40)]
    store = numbered(tmp_path / "store", same)
    dense = build_index(store, embed, tmp_path / "dense", kind="exact", progress=False, **INPUTS)
    index = HybridIndex(dense, build_bm25(store, tmp_path / "words"), fusion)
    texts = np.array(["river"] * len(VECTORS), object)
    found = index.search(hybrid_queries(VECTORS, texts, 0.5), 5)
    np.testing.assert_array_equal(found.ids, dense.search(VECTORS, 5).ids)


def test_of_equal_ranks_the_better_embedding_is_found(tmp_path):
    """The lower number of a row was."""
    pair = [p._replace(title="", text=text) for p, text in zip(
        random_passages(2), ("The river. River.", "The long river."), strict=True)]
    store = numbered(tmp_path / "store", pair)
    dense = build_index(store, embed, tmp_path / "dense", kind="exact", progress=False, **INPUTS)
    index = HybridIndex(dense, build_bm25(store, tmp_path / "words"), Fusion("reciprocal_rank"))
    vector = np.float32(TABLE[1:2] - TABLE[:1])
    assert dense.search(vector, 1).ids == 1 and index.words.search(["river"], 1).ids == 0
    query = hybrid_queries(vector, np.array(["river"], object), 0.5)
    assert [index.search(query, k).ids.tolist() for k in (1, 2)] == [[[1]], [[1, 0]]]


def test_few_nominations_are_scored_by_both_parts(parts, monkeypatch):
    """A passage that only words nominate has its inner product, and the other way round."""
    monkeypatch.setattr(hybrid, "NOMINATED", 3)
    index = HybridIndex(*parts, Fusion())
    weights = np.linspace(0.2, 0.8, len(TEXTS))  # each query has its own
    queries = hybrid_queries(VECTORS, TEXTS, weights)
    found = index.search(queries, 2)  # 8 of each part
    nominated = [set(row) for row in np.concatenate(
        [index.index.search(VECTORS, 8).ids, index.words.search(QUESTIONS, 8).ids], axis=1)]
    for query, rows in enumerate(found.ids.tolist()):
        some = np.array(sorted(nominated[query]))
        scores = (1 - queries["weight"][query]) * index.index.scores(
            VECTORS[query : query + 1], some[None])[0] + queries["weight"][query] * (
                index.scores(TEXTS[query : query + 1], some[None])[0])
        assert set(rows) == set(some[np.argsort(-scores, kind="stable")[:2]].tolist())
    assert index.search(queries[:0], 2).ids.shape == (0, 2)
    with pytest.raises(RetrievalError, match="k=61: an index of 60"):
        index.search(queries, 61)


def test_queries_are_vectors_and_texts_with_finite_weights(parts):
    """By a weight that is no number, all passages were equal."""
    index = HybridIndex(*parts, Fusion("convex", 0.5))
    for queries in (VECTORS, QUESTIONS, TEXTS):
        with pytest.raises(RetrievalError, match="are what hybrid_queries returns"):
            index.search(queries, 3)
    weights = np.full(len(TEXTS), 0.5)
    weights[1] = np.nan
    with pytest.raises(RetrievalError, match="query 1 .* its weight of words is nan"):
        index.search(hybrid_queries(VECTORS, TEXTS, weights), 3)


def test_rows_are_scored_for_each_query(parts):
    """One query was repeated for all rows."""
    dense, _ = parts
    assert dense.scores(VECTORS, np.zeros((len(VECTORS), 0), int)).shape == (len(VECTORS), 0)
    np.testing.assert_array_equal(dense.scores(VECTORS[:1], [[3, 1]]), dense.scores(
        VECTORS[:1], np.array([[3, 1]])))
    for queries, rows, told in (
            (VECTORS[:1], np.zeros((2, 3), int), r"rows have shape \[2, 3\]: must be \[1, K\]"),
            (VECTORS[:3], np.zeros(3, int), r"rows have shape \[3\]: must be \[3, K\]"),
            (VECTORS[:1] * np.nan, np.zeros((1, 3), int), "query 0 of the batch holds nan"),
            (VECTORS[0], np.zeros((1, 3), int), "add a batch axis to a single query")):
        with pytest.raises(RetrievalError, match=told):
            dense.scores(queries, rows)


def test_rows_of_an_edited_index_are_matched_by_what_they_hold(parts, tmp_path):
    out = tmp_path / "dense"
    build_index(parts[0].passages, embed, out, kind="exact", progress=False, **INPUTS)
    new = [p._replace(id=str(100 + i)) for i, p in enumerate(random_passages(3, seed=5))]
    edit_index(out, embedder(embed, **INPUTS), numbered(tmp_path / "new", new), ["4", "59"])
    dense = PassageIndex.open(out)
    with pytest.raises(RetrievalError, match="its passages are not those of"):
        HybridIndex(dense, parts[1], Fusion())
    store = copy_rows(tmp_path / "left", kept_rows(dense.passages, dense.valid))
    assert [p.id for p in store] == [str(i) for i in range(60) if i not in (4, 59)] + [
        "100", "101", "102"]
    index = HybridIndex(dense, build_bm25(store, tmp_path / "words"), Fusion())
    queries = hybrid_queries(VECTORS, TEXTS, 0.4)
    found = index.search(queries, 61)
    assert [sorted(row) for row in found.ids.tolist()] == [
        sorted({*range(63)} - {4, 59})] * len(QUESTIONS)
    plain = numbered(tmp_path / "plain", list(store))
    rebuilt = HybridIndex(
        build_index(plain, embed, tmp_path / "d", kind="exact", progress=False, **INPUTS),
        build_bm25(plain, tmp_path / "w"), Fusion()).search(queries, 61)
    np.testing.assert_allclose(found.scores, rebuilt.scores, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("run", [1, 2, 2**14])
def test_passages_are_compared_many_at_a_time(parts, tmp_path, monkeypatch, run):
    """One by one, those of a large index that was edited took minutes at every opening."""
    out, passages = tmp_path / "dense", list(parts[0].passages)
    build_index(parts[0].passages, embed, out, kind="exact", progress=False, **INPUTS)
    edit_index(out, embedder(embed, **INPUTS), None, ["4", "5", "57"])
    dense = PassageIndex.open(out)
    left = [p for p in passages if p.id not in ("4", "5", "57")]
    moved = left[30]._replace(title=left[30].title + left[30].text[:1], text=left[30].text[1:])
    words = [build_bm25(numbered(tmp_path / f"store{n}", some), tmp_path / f"words{n}")
             for n, some in enumerate((left, [*left[:-1], passages[57]],
                                       [*left[:30], moved, *left[31:]], left[::-1]))]
    monkeypatch.setattr(joined, "RUN", run)
    monkeypatch.delattr(PassageStore, "__getitem__")
    index = HybridIndex(dense, words[0], Fusion())
    assert index.to_words.tolist() == [
        -1 if row in (4, 5, 57) else row - sum(gone < row for gone in (4, 5, 57))
        for row in range(60)]
    for other in words[1:]:
        with pytest.raises(RetrievalError, match="its passages are not those of"):
            HybridIndex(dense, other, Fusion())


def test_words_of_other_passages_are_refused(parts, tmp_path):
    other = build_bm25(write(tmp_path / "s", random_passages(seed=9)), tmp_path / "w")
    assert isinstance(other, Bm25Index)
    with pytest.raises(RetrievalError, match="its passages are not those of"):
        HybridIndex(parts[0], other, Fusion())
