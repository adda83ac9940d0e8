"""Exact search against a stable full sort, and the guards that every index shares."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from rag_jax.retrieval import exact
from rag_jax.retrieval.exact import ExactIndex, RecallSample, inner_products
from rag_jax.retrieval.joined import JoinedRows
from rag_jax.retrieval.protocol import RetrievalError


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def full_sort(queries, embeddings, k):
    """All scores in float64, rounded once, sorted stably."""
    scores = queries.astype(np.float64) @ embeddings.astype(np.float64).T
    ids = np.argsort(-scores.astype(np.float32), axis=1, kind="stable")[:, :k]
    return ids, np.take_along_axis(scores, ids, axis=1).astype(np.float32)


@pytest.mark.parametrize("k", [1, 7, 100, 1000])
@pytest.mark.parametrize("block_rows", [64, 333, 8192])
def test_ids_scores_and_order_equal_a_stable_full_sort(monkeypatch, k, block_rows):
    monkeypatch.setattr(exact, "BLOCK_ROWS", block_rows)
    monkeypatch.setattr(exact, "BLOCK_QUERIES", 5)
    queries, embeddings = normal(13, 24), normal(1000, 24, seed=1)
    found = ExactIndex(embeddings).search(queries, k)
    ids, scores = full_sort(queries, embeddings, k)
    np.testing.assert_array_equal(found.ids, ids)
    np.testing.assert_array_equal(found.scores, scores)
    assert found.ids.dtype == np.int32 and found.scores.dtype == np.float32


@pytest.mark.parametrize("k", [1, 7, 100, 500])
@pytest.mark.parametrize("block_rows", [64, 8192])
def test_rows_that_are_not_valid_are_never_found(monkeypatch, k, block_rows):
    """Half of the rows, all of some blocks and all but one of another; they score best."""
    monkeypatch.setattr(exact, "BLOCK_ROWS", block_rows)
    queries, embeddings = normal(13, 24), normal(1000, 24, seed=1)
    valid = np.zeros(1000, bool)
    valid[np.r_[70, 200:699]] = True
    embeddings[~valid] *= 9
    index = ExactIndex(JoinedRows([embeddings[:650], embeddings[650:]]), valid)
    ids, scores = full_sort(queries, embeddings[valid], k)
    found = index.search(queries, k)
    np.testing.assert_array_equal(found.ids, np.flatnonzero(valid)[ids])
    np.testing.assert_array_equal(found.scores, scores)
    assert index.size == 500
    recall = RecallSample(embeddings, None, 10, 0, valid).measure(index)
    assert recall["recall"] == 1.0
    with pytest.raises(RetrievalError, match="allows 1 to 500"):
        index.search(queries, 501)


@pytest.mark.parametrize("different", [1, 3, 40])
@pytest.mark.parametrize("k", [1, 10, 500])
def test_ties_go_to_the_lower_id_wherever_the_copies_are(monkeypatch, different, k):
    monkeypatch.setattr(exact, "BLOCK_ROWS", 96)
    draw = np.random.default_rng(different)
    embeddings = normal(different, 48)[draw.integers(0, different, 500)]
    found = ExactIndex(embeddings).search(normal(9, 48, seed=2), k)
    ids, _ = full_sort(normal(9, 48, seed=2), embeddings, k)
    np.testing.assert_array_equal(found.ids, ids)


def test_scores_whose_difference_float32_sums_would_lose_are_ordered(monkeypatch):
    monkeypatch.setattr(exact, "BLOCK_ROWS", 50)
    common = normal(64) * 1000  # large parts that cancel leave differences below float32 noise
    embeddings = np.tile(common, (200, 1)) + normal(200, 64) * np.float32(3e-4)
    query = normal(60, 64)
    query -= np.outer(query @ common / (common @ common), common).astype(np.float32)
    found = ExactIndex(embeddings).search(query, 20)
    ids, scores = full_sort(query, embeddings, 20)
    np.testing.assert_array_equal(found.ids, ids)
    # Parts a million times the sum: float64 sums in another order, as processors have them, are
    # rounded to neighbouring float32 numbers one time in a thousand. float32 sums lose every digit.
    np.testing.assert_array_max_ulp(found.scores, scores, maxulp=1)


def test_a_row_scores_the_same_in_every_batch_and_position():
    queries, embeddings = normal(40, 96), normal(300, 96, seed=1)
    together = ExactIndex(embeddings).search(queries, 30)
    for row in range(0, 40, 7):
        alone = ExactIndex(embeddings).search(queries[row : row + 1], 30)
        np.testing.assert_array_equal(alone.ids[0], together.ids[row])
        np.testing.assert_array_equal(alone.scores[0], together.scores[row])
    picked = inner_products(queries[:, None], embeddings[together.ids])
    np.testing.assert_array_equal(picked, together.scores)


def test_memory_mapped_embeddings_serve_as_they_are(tmp_path):
    normal(50, 8).tofile(tmp_path / "x")
    mapped = np.memmap(tmp_path / "x", np.float32, "r", shape=(50, 8))
    found = ExactIndex(mapped).search(normal(3, 8, seed=1), 50)
    np.testing.assert_array_equal(np.sort(found.ids), np.tile(np.arange(50), (3, 1)))


@pytest.mark.parametrize(
    "queries, k, says",
    [
        (normal(2, 5), 3, r"shape \(2, 5\).*\[batch, 4\]"),
        (normal(4), 3, "batch axis"),
        (normal(1, 1, 4), 3, "batch axis"),
        (normal(2, 4), 0, "1 to 10"),
        (normal(2, 4), -1, "1 to 10"),
        (normal(2, 4), 11, "1 to 10"),
        (normal(2, 4), 2.0, "integer"),
        (normal(2, 4), None, "integer"),
        (np.array([[0, 0, 0, 0], [0, np.nan, 0, 0]]), 3, "query 1 .* nan at coordinate 1"),
        (np.array([[0, 0, 0, -np.inf]]), 3, "query 0 .* -inf"),
        (np.array([[0, 0, 0, 1e300]]), 3, "query 0"),
        (np.array([[0, 0, 0, 1e30]], np.float32), 3, "1e\\+30|1.0"),
        (np.array([["a", "b", "c", "d"]]), 3, "real numbers"),
        (np.zeros((0, 3)), 3, "shape"),
        (np.zeros((0, 4)), 11, "1 to 10"),
    ],
)
def test_a_bad_query_or_k_is_a_clear_error(queries, k, says):
    with pytest.raises(RetrievalError, match=says):
        ExactIndex(normal(10, 4)).search(queries, k)


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.uint64, np.array, jnp.asarray])
def test_k_may_be_any_kind_of_integer(kind):
    """Those of 8 bits overflowed; ScaNN then looked at too few passages."""
    index, seen = ExactIndex(normal(300, 4)), []
    found = index.search(normal(2, 4), kind(100))
    np.testing.assert_array_equal(found.ids, index.search(normal(2, 4), 100).ids)
    assert index.search(np.zeros((0, 4)), kind(100)).ids.shape == (0, 100)
    index._search = lambda queries, k: seen.append(k)
    index.search(normal(2, 4), kind(100))
    assert type(seen[0]) is int


@pytest.mark.parametrize("valid", [np.ones(10, int), [True] * 9, np.arange(3)])
def test_valid_rows_are_told_by_a_mask(valid):
    """With ones that are integers, all but the last row but one could be found."""
    with pytest.raises(RetrievalError, match=r"must be bool\[10\], one for each embedding"):
        ExactIndex(normal(10, 4), valid)


def test_an_empty_batch_gives_empty_results():
    found = ExactIndex(normal(10, 4)).search(np.zeros((0, 4)), 3)
    assert found.ids.shape == found.scores.shape == (0, 3)
    assert found.ids.dtype == np.int32 and found.scores.dtype == np.float32


@pytest.mark.parametrize("dtype", [np.float64, np.float16, np.int32, ml_dtypes.bfloat16])
def test_other_dtypes_and_strides_of_queries_are_converted(dtype):
    index, queries = ExactIndex(normal(30, 4)), np.round(normal(3, 4) * 4)
    expected = index.search(queries, 5)
    np.testing.assert_array_equal(index.search(queries.astype(dtype), 5).ids, expected.ids)
    strided = np.asfortranarray(np.repeat(queries, 2, axis=0))[::2]
    np.testing.assert_array_equal(index.search(strided, 5).ids, expected.ids)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (4,)])
def test_an_index_of_nothing_is_refused(shape):
    with pytest.raises(RetrievalError, match="at least 1"):
        ExactIndex(np.zeros(shape, np.float32))


def test_recall_counts_ties_as_found_and_misses_as_missed():
    class Shifted(ExactIndex):
        """Answers the best k passages but the first."""

        def search(self, queries, k):
            found = super().search(queries, k + 1)
            return type(found)(found.ids[:, 1:], found.scores[:, 1:])

    embeddings = normal(100, 8)
    assert RecallSample(embeddings, None, 5, 0).measure(ExactIndex(embeddings))["recall"] == 1.0
    missed = RecallSample(embeddings, normal(20, 8), 5, 0).measure(Shifted(embeddings))
    assert missed == {"k": 5, "queries": 20, "source": "given", "recall": pytest.approx(0.8)}
    copies = np.repeat(embeddings[:1], 100, axis=0)
    assert RecallSample(copies, None, 5, 0).measure(Shifted(copies))["recall"] == 1.0
    with pytest.raises(RetrievalError, match="no queries"):
        RecallSample(embeddings, np.zeros((0, 8)), 5, 0).measure(ExactIndex(embeddings))


@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38])
def test_embeddings_that_cannot_be_compared_are_the_users_error(value):
    """Of an index that was handed over, whose digests fit: it ended as a defect of ours."""
    embeddings = normal(20, 4)
    embeddings[7, 1] = value
    with pytest.raises(RetrievalError, match="rows 0 to 19 are NaN, infinite or too large"):
        ExactIndex(embeddings).search(normal(2, 4), 3)
