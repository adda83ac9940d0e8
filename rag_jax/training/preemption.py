"""Notices that the machine is about to be taken away."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from rag_jax import hosts
from rag_jax.errors import Preempted


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
        _put_back(number, former.pop(number))

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            former[number] = signal.signal(number, note)
    try:
        yield lambda: bool(requested)
    finally:
        for number in list(former):
            restore(number)


@contextlib.contextmanager
def stopped_at_once() -> Iterator[None]:
    """SIGTERM and Ctrl-C end what runs here, as Preempted, unless `preemption_noticed` takes them:
    between the stages nothing is trained that could be lost.

    One of several processes would leave the others waiting, so there signals do what they did.

    Raises:
      Preempted: whatever error the signal became on its way through other libraries, and at the
        end where one of them swallowed it.
    """
    stopped: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        stopped.append(number)
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread() or hosts.count() > 1:
        yield
        return
    former = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    cause = None
    try:
        yield
    except BaseException as error:
        if not stopped or isinstance(error, Preempted):
            raise
        cause = error
    finally:
        for number, handler in former.items():
            _put_back(number, handler)
    if stopped:
        raise Preempted("stopped; all that was finished is kept") from cause


def _put_back(number: int, handler: Callable | int | None) -> None:
    # None stands for a handler that was not installed from Python and cannot be put back.
    signal.signal(number, signal.SIG_DFL if handler is None else handler)
