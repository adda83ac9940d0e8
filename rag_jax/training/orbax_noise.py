"""Keeps the output of Orbax's abandoned work off stderr, where the error that it raises is enough.

Orbax reads many arrays at once. When one fails, the coroutines of the others are abandoned: each
writes some fifty lines of TensorStore's specification when it is collected, and each thread of
TensorStore that finishes too late writes a traceback. Each thread of a failed save logs one, too.
Their times cannot be predicted, so the filters stay in place for good.
"""

import logging
import sys
import traceback
from collections.abc import Callable
from typing import Any


class _WithoutOrphans:
    """A sys.unraisablehook that passes on everything but the errors of abandoned reads."""

    def __init__(self, hook: Callable[[Any], None]):
        self._hook = hook

    def __call__(self, unraisable: Any) -> None:
        if not _is_orphan(unraisable.exc_value):
            self._hook(unraisable)


def drop_orphans() -> None:
    """Installs the filters; calling it again changes nothing."""
    if not isinstance(sys.unraisablehook, _WithoutOrphans):
        sys.unraisablehook = _WithoutOrphans(sys.unraisablehook)
    for name in ("asyncio", "absl"):
        logging.getLogger(name).addFilter(_keeps)


def _keeps(record: logging.LogRecord) -> bool:
    return not (record.exc_info and _is_orphan(record.exc_info[1]))


def _is_orphan(error: BaseException | None) -> bool:
    if error is None:
        return False
    if isinstance(error, RuntimeError) and "Event loop is closed" in str(error):
        return True
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any("/orbax/" in frame.f_code.co_filename.replace("\\", "/") for frame in frames)
