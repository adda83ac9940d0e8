"""A ScaNN index in parts: built and searched by several hosts, each its share, with one answer."""

import numpy as np
import pytest

from rag_jax import hosts, searching
from rag_jax.retrieval.exact import ExactIndex
from rag_jax.retrieval.index import PassageIndex
from rag_jax.retrieval.protocol import Hosts, RetrievalError, SearchResult, merge
from rag_jax.retrieval.scann import ScannSettings, part_rows
from rag_jax.retrieval.versions import current
from tests.retrieval.indexing import build_by_hosts, build_index
from tests.retrieval.test_build import INPUTS, Embedder, content, make_store

SIZE, PARTS, HOSTS = 100, 3, 2
SETTINGS = {"kind": "scann", "settings": ScannSettings(parts=PARTS)}
QUERIES = np.random.default_rng(5).standard_normal((7, 16), np.float32)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("store") / "s", size=SIZE)


@pytest.fixture(scope="module")
def built(store, tmp_path_factory):
    out = tmp_path_factory.mktemp("one") / "index"
    build_index(store, Embedder(), out, **{**INPUTS, **SETTINGS})
    return out


def test_parts_cover_all_rows_once():
    for size, parts in [(100, 3), (7, 7), (21_015_324, 64)]:
        rows = part_rows(size, parts)
        assert rows[0].start == 0 and rows[-1].stop == size and len(rows) == parts
        assert all(a.stop == b.start for a, b in zip(rows, rows[1:], strict=False))
        lengths = [r.stop - r.start for r in rows]
        assert max(lengths) - min(lengths) <= 1


def test_merged_parts_answer_as_one_index_also_among_ties():
    table = np.random.default_rng(1).integers(-2, 3, (90, 6)).astype(np.float32)
    queries = np.random.default_rng(2).integers(-2, 3, (20, 6)).astype(np.float32)
    expected = ExactIndex(table).search(queries, 40)
    found = []
    for rows in part_rows(90, 4):
        part = ExactIndex(table[rows]).search(queries, min(40, rows.stop - rows.start))
        found.append(SearchResult(part.ids + rows.start, part.scores))
    for order in (found, found[::-1]):
        merged = merge(order, 40)
        np.testing.assert_array_equal(merged.ids, expected.ids)
        np.testing.assert_array_equal(merged.scores, expected.scores)


def test_hosts_build_the_parts_that_one_builds(store, built, tmp_path):
    embedders = [Embedder() for _ in range(HOSTS)]
    shares = build_by_hosts(store, tmp_path / "index", embedders, **{**INPUTS, **SETTINGS})
    assert [share.division for share in shares] == ["passages"] * HOSTS
    assert content(tmp_path / "index") == content(built)
    assert {f"scann.{part}" if part else "scann" for part in range(PARTS)} == {
        path.name for path in current(built).glob("scann*")}


def shares_of(path):
    return [PassageIndex.open(path, hosts=Hosts(host, HOSTS)) for host in range(HOSTS)]


@pytest.mark.parametrize("k", [1, 5, 60])  # 60: more than a host's share of 34 or 66 has
def test_shares_find_together_what_the_whole_index_finds(built, k):
    whole = PassageIndex.open(built)
    assert whole.division == "queries" and whole.manifest["recall"]["recall"] > 0.95
    expected = whole.search(QUERIES, k)
    assert expected.ids.shape == (7, k)
    shares = shares_of(built)
    found = [share.search(QUERIES, k) for share in shares]
    rows = part_rows(SIZE, PARTS)
    assert found[1].ids.min() >= rows[1].start and found[1].ids.max() < rows[1].stop
    merged = merge(found, k)
    np.testing.assert_array_equal(merged.ids, expected.ids)
    np.testing.assert_array_equal(merged.scores, expected.scores)


def test_processes_exchange_what_their_shares_find(built, monkeypatch):
    """searching.search, as each of two processes sees it, over several messages."""
    shares, expected = shares_of(built), PassageIndex.open(built).search(QUERIES, 5).ids
    monkeypatch.setattr(hosts, "_FOUND_AT_A_TIME", 3 * 5)
    for me in range(HOSTS):
        said = []

        def exchange(mine, me=me, said=said):
            begin = sum(said)
            said.append(len(mine[0]))
            other = shares[1 - me].search(QUERIES[begin : sum(said)], 5)
            found = [mine, [other.ids.tolist(), other.scores.tolist()]]
            return found if me == 0 else found[::-1]

        monkeypatch.setattr(hosts, "exchange", exchange)
        found = searching.search(shares[me], QUERIES, 5)
        np.testing.assert_array_equal(found, expected)
        assert found.dtype == np.int32 and said == [3, 3, 1]


def test_more_hosts_than_parts_open_the_whole_index(built):
    index = PassageIndex.open(built, hosts=Hosts(3, PARTS + 1))
    assert index.division == "queries"
    np.testing.assert_array_equal(index.search(QUERIES, 9).ids,
                                  PassageIndex.open(built).search(QUERIES, 9).ids)


def test_a_part_that_is_too_small_is_an_error(store, tmp_path):
    with pytest.raises(RetrievalError, match="16 passages or more in each of 10 parts, got 10"):
        build_index(store, Embedder(), tmp_path / "index", **{
            **INPUTS, "kind": "scann", "settings": ScannSettings(parts=10)})
