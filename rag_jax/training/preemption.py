"""Notices that the machine is about to be taken away."""

import signal
import threading
from types import FrameType


class PreemptionGuard:
    """Turns SIGTERM, and the first Ctrl-C, into a flag for the training loop to read.

    Between two steps the loop looks at `requested`, saves a checkpoint and leaves; the command
    ends with status 75. A second Ctrl-C interrupts at once, as if there were no guard. The former
    handlers return on exit. Outside the main thread, where Python allows no handlers, the guard
    does nothing and `requested` stays False.

    The flag is this process's own. With several processes each may see it at another step, and
    they must save the same one: the loop asks them all.
    """

    def __init__(self):
        self._requested = False
        self._former = {}

    @property
    def requested(self) -> bool:
        """Whether a signal has asked this process to stop."""
        return self._requested

    def __enter__(self) -> "PreemptionGuard":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._former[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exc_info) -> None:
        while self._former:
            self._restore(next(iter(self._former)))

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        self._requested = True
        if number == signal.SIGINT:
            self._restore(number)

    def _restore(self, number: int) -> None:
        former = self._former.pop(number)
        # None stands for a handler that was not installed from Python and cannot be put back.
        signal.signal(number, signal.SIG_DFL if former is None else former)
