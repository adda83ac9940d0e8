"""The thread that uses the devices: requests that wait for one program of one index are joined into
batches."""

import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from rag_jax.errors import UserError
from rag_jax.serving.fields import Refused
from rag_jax.serving.indexes import WORDS_OF, Indexes, OpenIndex


class Task(NamedTuple):
    """One input of a program, and the future of its result."""

    index: OpenIndex
    program: str
    input: Any
    future: Future


class Worker:
    """Runs what is submitted, in batches of all that can run together when the devices are free.

    No request waits for a batch to fill up: the first runs alone, and those that arrive meanwhile
    are the next batch.

    Args:
      indexes: their programs are compiled first.
      max_batch: tasks in a batch, at most.
      max_waiting: as in `Settings`.
      compiled: called with the name of each program that has been compiled.
      started: called with None once all programs are compiled, and with the error that ended the
        thread, if one did.

    Attributes:
      compiled: how many programs are compiled.
      ready: whether all programs are compiled and the thread runs.
      running: how many tasks are in the batch that runs.
      failure: the error that ended the thread, if one did.
    """

    def __init__(self, indexes: Indexes, max_batch: int, max_waiting: int,
                 compiled: Callable[[str], None],
                 started: Callable[[Exception | None], None]):
        self._indexes, self._compiled, self._started = indexes, compiled, started
        self._max_batch, self._max_waiting = max_batch, max_waiting
        self._waiting: dict[Future, Task] = {}  # in the order in which they came
        self._changed = threading.Condition()
        self._closed, self.ready, self.running, self.failure = False, False, 0, None
        self.compiled = 0
        self._thread = threading.Thread(target=self._work, name="devices", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def compiling(self) -> bool:
        """Whether the thread compiles before the start is over; after `close`, it still may."""
        return self._thread.is_alive() and not self.ready and self.failure is None

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def check_ready(self) -> None:
        """Raises Refused, 503, where it is not ready or about to end."""
        if not self.ready or self._closed:
            raise Refused("the server is ending" if self._closed or self.failure else
                          "programs are being compiled: /ready tells when they are", 503)

    def submit(self, index: OpenIndex, program: str, inputs: Sequence[Any]) -> list[Future]:
        """The future results, one for each input; what is cancelled while it waits is not run.

        Raises:
          Refused: 429, too many wait; 503, not ready or about to end; 422, the model does not have
            the program.
        """
        self.check_ready()
        if program not in index.programs:
            wanted, *has = (WORDS_OF.get(name, name) for name in (program, *index.programs))
            raise Refused(f"this model cannot {wanted}: it can {', '.join(has)}")
        tasks = [Task(index, program, each, Future()) for each in inputs]
        with self._changed:
            if len(self._waiting) + len(tasks) > self._max_waiting:
                raise Refused(f"{len(self._waiting)} questions wait, and {self._max_waiting} may: "
                              "ask again in a moment", 429)
            self._waiting |= {task.future: task for task in tasks}
            self._changed.notify()
        for task in tasks:
            task.future.add_done_callback(self._forget)
        return [task.future for task in tasks]

    def close(self) -> None:
        """Cancels what waits, and returns when the batch that runs has ended; but it does not wait
        for a program that is being compiled before the start is over."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self.ready:
            self._thread.join()
        for future in list(self._waiting):
            future.cancel()

    def _forget(self, future: Future) -> None:
        """Removes a future that was cancelled while it waited."""
        with self._changed:
            self._waiting.pop(future, None)

    def _work(self) -> None:
        try:
            self._compile()
            self.ready = not self._closed
            if self.ready:
                self._started(None)
            while self._run_next():
                pass
        except Exception as error:  # the server then answers nothing any more, and says so
            self.failure, self.ready = error, False
            self._started(error)

    def _compile(self) -> None:
        for index in list(self._indexes.open.values()):  # a copy, as a swap may open another
            for what in index.compile():
                self.compiled += 1
                self._compiled(what)
                if self._closed:
                    return

    def _run_next(self) -> bool:
        """Waits for a task, and runs it with all others that have its index and program.

        Returns whether to go on. While this waits, no variable refers to the last batch: it would
        keep an index open that has been replaced.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if self._closed:
                return False
            first, *_ = self._waiting.values()
            alike = [task for task in self._waiting.values() if task[:2] == first[:2]]
            taken = alike[:self._max_batch]
            for task in taken:
                del self._waiting[task.future]
        taken = [task for task in taken if task.future.set_running_or_notify_cancel()]
        self.running = len(taken)
        if taken:
            _run(taken)
        self.running = 0
        return True


def _run(tasks: Sequence[Task]) -> None:
    """Runs a batch; if it fails, each task alone, as one question may be at fault."""
    first = tasks[0]
    try:
        results = first.index.run(first.program, [task.input for task in tasks])
        pairs = list(zip(tasks, results, strict=True))
    except Exception as error:
        if len(tasks) > 1:
            for task in tasks:
                _run([task])
            return
        if not isinstance(error, UserError):
            traceback.print_exc(file=sys.stderr)
        first.future.set_exception(error)
        return
    for task, result in pairs:
        task.future.set_result(result)
