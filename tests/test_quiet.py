"""Code whose warnings are ignored."""

import concurrent.futures
import warnings

from rag_jax import quiet
from rag_jax.metrics import patterns


def test_filters_of_warnings_are_as_before_whatever_other_threads_do():
    """Two threads that read questions with regular expressions at once left a process that ignored
    all warnings, those that its user had made errors, too."""
    before = list(warnings.filters)
    with concurrent.futures.ThreadPoolExecutor() as threads:
        with quiet.no_warnings():
            warnings.warn("ignored", stacklevel=1)
            assert not threads.submit(quiet._LOCK.acquire, blocking=False).result(), "one at a time"
            reading = threads.submit(patterns.all_matches, "[b ab", "[[a]b")
        assert reading.result() == ["[b", "ab"]
    assert warnings.filters == before
