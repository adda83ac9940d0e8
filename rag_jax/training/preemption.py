"""Signals during training: SIGTERM, by which a machine announces that it is taken away, SIGHUP of a
terminal that is closed, and Ctrl-C."""

import contextlib
import os
import signal
import stat
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from rag_jax import hosts, signals
from rag_jax.errors import Preempted

_STOPPING = b"\nstopping after this step, with a checkpoint; Ctrl-C again ends at once\n"
_HANG_UP = getattr(signal, "SIGHUP", None)  # Windows has none


@contextlib.contextmanager
def preemption_noticed() -> Iterator[Callable[[], bool]]:
    """Turns SIGTERM, SIGHUP and the first Ctrl-C into an answer: whether this process is asked to
    stop.

    Between two steps the training loop asks, saves a checkpoint and leaves; the command ends with
    status 75. A second Ctrl-C interrupts at once, as if the first had not been noticed. The former
    handlers are restored at the end. Outside the main thread, where Python allows no handlers, the
    answer stays False. A signal that is ignored, as SIGHUP is under nohup, stays so.

    The answer is of this process alone. Several processes may be asked at different steps but must
    save the same one, so the loop exchanges their answers.
    """
    requested: list[int] = []
    former: dict[int, Callable | int] = {}

    def note(number: int, frame: FrameType | None) -> None:
        requested.append(number)
        _leave_terminal(number)
        if number == signal.SIGINT:
            restore(number)
            with contextlib.suppress(OSError):  # not by print, which may be at work
                os.write(2, _STOPPING)

    def restore(number: int) -> None:
        handler = former.pop(number, None)
        if handler is not None:  # a Ctrl-C that came meanwhile may have put it back
            signal.signal(number, handler)

    try:
        if threading.current_thread() is threading.main_thread():
            _install(note, former)
        yield lambda: bool(requested)
    finally:
        for number in list(former):
            restore(number)


@contextlib.contextmanager
def stopped_at_once() -> Iterator[None]:
    """SIGTERM, SIGHUP and Ctrl-C end the body at once, as Preempted: between the training stages,
    where `preemption_noticed` does not handle them, no training is lost.

    With several processes, where the others would wait for this one, signals are left as they are.

    Raises:
      Preempted: a signal came. Other libraries may have turned it into another error, or have
        swallowed it; then this is raised at the end.
    """
    stopped: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        stopped.append(number)
        _leave_terminal(number)
        if number == signal.SIGINT or len(stopped) == 1:  # others may come twice, within a clean-up
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread() or hosts.count() > 1:
        yield
        return
    former: dict[int, Callable | int] = {}
    cause = None
    try:
        _install(stop, former)
        yield
    except BaseException as error:
        if not stopped or isinstance(error, Preempted):
            raise
        cause = error
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
    if stopped:
        raise Preempted("stopped; all that was finished is kept") from cause


def _leave_terminal(number: int) -> None:
    """After SIGHUP, what is printed to a terminal that is gone, or to a pipe, whose reader ends
    too, goes nowhere: to write there would fail."""
    if number != _HANG_UP:
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        with contextlib.suppress(OSError):
            mode = os.fstat(stream).st_mode
            if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode) and not os.isatty(stream):
                os.dup2(nowhere, stream)
    os.close(nowhere)


def _install(handler: Callable, former: dict[int, Callable | int]) -> None:
    """Installs a handler of the signals, but of none that is ignored, as SIGHUP is under nohup.

    former: gets the handler before, of each before it is replaced, as a signal may come at once.
    """
    for number in signals.ALL:  # Ctrl-C is the last: it may interrupt what is done here
        before = signal.getsignal(number)
        if before is not signal.SIG_IGN:
            # None stands for a handler that was not installed from Python and cannot be put back.
            former[number] = signal.SIG_DFL if before is None else before
            signal.signal(number, handler)
