"""Code whose warnings are ignored: the filters of warnings are those of the whole process."""

import contextlib
import threading
import warnings
from collections.abc import Iterator

_LOCK = threading.RLock()


@contextlib.contextmanager
def no_warnings() -> Iterator[None]:
    """`warnings.catch_warnings(action="ignore")`, in one thread at a time: of two at once, the last
    to end would put back the filters of the other, which ignore all warnings, for good."""
    with _LOCK, warnings.catch_warnings(action="ignore"):
        yield
