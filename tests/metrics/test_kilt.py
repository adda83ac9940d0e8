"""KILT's provenance scores on cases worked out by hand."""

import pytest

from rag_jax.metrics.kilt import page_recall, r_precision, supported


@pytest.mark.parametrize(("pages", "sets", "expected"), [
    (["a", "b"], [{"a"}], 1.0),
    (["b", "a"], [{"a"}], 0.0),  # one gold page: the first place alone counts
    (["b", "a"], [{"a"}, {"b"}], 1.0),  # the best of the sets
    (["a", "x", "b"], [{"a", "b"}], 0.5),  # two gold pages: the first two places
    (["a", "a", "b"], [{"a", "b"}], 1.0),  # two passages of a page are one page
    ([], [{"a"}], 0.0),
    (["a"], [], 0.0),
    (["a"], [set()], 0.0),
])
def test_r_precision(pages, sets, expected):
    assert r_precision(pages, sets) == expected


@pytest.mark.parametrize(("pages", "sets", "k", "expected"), [
    (["x", "a"], [{"a"}], 1, 0.0),
    (["x", "a"], [{"a"}], 2, 1.0),
    (["x", "x", "a"], [{"a"}], 2, 1.0),  # a page takes one place
    (["a", "x", "b"], [{"a"}, {"b"}], 2, 0.5),
    # an evidence set takes one place, that of its last page: x, {a, b}
    (["a", "x", "b"], [{"a", "b"}], 1, 0.0),
    (["a", "x", "b"], [{"a", "b"}], 2, 1.0),
    (["a", "x"], [{"a", "b"}], 5, 0.0),  # incomplete
    (["a"], [{"a"}, {"a"}], 1, 1.0),  # equal sets are one
    (["a", "b"], [{"a"}, {"a", "b"}], 2, 1.0),  # a page may belong to two
    (["a"], [], 1, 0.0),
])
def test_page_recall(pages, sets, k, expected):
    assert page_recall(pages, sets, k) == expected


def test_answers_count_only_with_their_page_in_front():
    assert supported("The Lima", ["Lima"], 1.0) == (0.0, 1.0, 1.0)
    assert supported("Lima ", ["Lima"], 1.0) == (1.0, 1.0, 1.0)
    assert supported("Lima", ["Lima"], 0.5) == (0.0, 0.0, 0.0)
    assert supported("  ", ["the"], 1.0) == (0.0, 0.0, 0.0)  # no answer is never right
