"""Notices that the machine is about to be taken away."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def preemption_noticed() -> Iterator[Callable[[], bool]]:
    """Turns SIGTERM, and the first Ctrl-C, into an answer: whether this process is asked to stop.

    Between two steps the training loop asks, saves a checkpoint and leaves; the command ends with
    status 75. A second Ctrl-C interrupts at once, as if nobody had noticed the first. The former
    handlers return at the end. Outside the main thread, where Python allows no handlers, the
    answer stays False.

    It is this process's own. With several processes each may be asked at another step, and they
    must save the same one: the loop asks them all.
    """
    requested, former = [], {}

    def note(number: int, frame: FrameType | None) -> None:
        requested.append(number)
        if number == signal.SIGINT:
            restore(number)

    def restore(number: int) -> None:
        handler = former.pop(number)
        # None stands for a handler that was not installed from Python and cannot be put back.
        signal.signal(number, signal.SIG_DFL if handler is None else handler)

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            former[number] = signal.signal(number, note)
    try:
        yield lambda: bool(requested)
    finally:
        for number in list(former):
            restore(number)
