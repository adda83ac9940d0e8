"""Which tests are quick, and which files begin first."""

import tiers


def test_every_long_file_is_there():
    """A file that was renamed would be quick without a word, and the last to begin."""
    assert [name for name in tiers.LONG if not (tiers.TESTS / name).exists()] == []


def test_a_quick_test_is_of_no_long_file(request):
    """A marker that all tests have would select the whole suite."""
    for item in request.session.items:
        assert tiers.is_quick(item.path) or not item.get_closest_marker("quick"), item.nodeid
    assert request.node.get_closest_marker("quick")
    assert not tiers.is_quick(tiers.TESTS / "decoding" / "test_answer.py")
