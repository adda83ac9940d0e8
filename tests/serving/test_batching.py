"""What waits is joined, cancelled and refused, whatever the model is."""

import threading
from concurrent.futures import CancelledError

import pytest

from rag_jax.serving.batching import Worker
from rag_jax.serving.fields import Refused


class Index:
    """Doubles numbers, once `gate` is open; 13 is a fault."""

    def __init__(self):
        self.batches, self.entered, self.gate = [], threading.Event(), threading.Event()
        self.programs = ("double", "other")

    def compile(self):
        yield "double"

    def run(self, program, given):
        self.entered.set()
        self.gate.wait(60)
        self.batches.append(list(given))
        if 13 in given:
            raise ValueError("13")
        return [2 * each for each in given]


class Indexes:
    def __init__(self, *indexes):
        self.open = dict(enumerate(indexes))


@pytest.fixture
def index():
    return Index()


@pytest.fixture
def worker(index):
    started = threading.Event()
    worker = Worker(Indexes(index), 3, 6, lambda what: None, lambda failure: started.set())
    with pytest.raises(Refused, match="being compiled") as error:
        worker.submit(index, "double", [1])
    assert error.value.status == 503
    worker.start()
    assert started.wait(60) and worker.ready
    yield worker
    index.gate.set()
    worker.close()


def busy(worker, index):
    """A place that is being computed, until the gate opens."""
    first, = worker.submit(index, "double", [0])
    assert index.entered.wait(60)
    return first


def test_what_waits_is_joined_by_program_and_index(worker, index):
    first, other = busy(worker, index), Index()
    other.gate.set()
    waits = [*worker.submit(index, "double", [1, 2]), *worker.submit(other, "double", [5]),
             *worker.submit(index, "other", [6]), *worker.submit(index, "double", [3, 4])]
    index.gate.set()
    assert [each.result(60) for each in waits] == [2, 4, 10, 12, 6, 8] and first.result() == 0
    assert index.batches == [[0], [1, 2, 3], [6], [4]] and other.batches == [[5]]


def test_what_is_cancelled_does_not_run_and_leaves_its_place(worker, index):
    """Clients that had gone were answered, and kept others out of the queue."""
    busy(worker, index)
    one, *others = worker.submit(index, "double", [1, 2, 3, 4, 5, 6])
    with pytest.raises(Refused, match="6 may") as error:
        worker.submit(index, "double", [7])
    assert error.value.status == 429
    assert one.cancel() and worker.waiting == 5
    last, = worker.submit(index, "double", [7])
    index.gate.set()
    assert [each.result(60) for each in (*others, last)] == [4, 6, 8, 10, 12, 14]
    assert 1 not in sum(index.batches, [])


def test_a_fault_is_that_of_one_question(worker, index, capfd):
    """One question without a finite score took the answers of a whole batch with it."""
    busy(worker, index)
    waits = worker.submit(index, "double", [1, 13, 2])
    index.gate.set()
    assert [waits[0].result(60), waits[2].result(60)] == [2, 4]
    with pytest.raises(ValueError, match="13"):
        waits[1].result(60)
    assert worker.submit(index, "double", [3])[0].result(60) == 6  # the thread lives
    with pytest.raises(Refused, match="cannot triple: it can double, other"):
        worker.submit(index, "triple", [1])
    with pytest.raises(Refused, match="cannot answer questions: it can double, other"):
        worker.submit(index, "search", [1])


def test_a_result_that_is_missing_is_a_fault_and_the_thread_lives(worker, index, capfd):
    """The thread died, and the server said that it was well."""
    first, run = busy(worker, index), index.run
    waits = worker.submit(index, "double", [1, 2])
    index.run = lambda program, given: run(program, given)[:-1]
    index.gate.set()
    for each in waits:
        with pytest.raises(ValueError, match="shorter"):
            each.result(60)
    index.run = run
    assert first.result(60) == 0 and worker.submit(index, "double", [3])[0].result(60) == 6


def test_the_end_answers_what_runs_and_cancels_what_waits(worker, index):
    """Requests that waited hung for ever."""
    first = busy(worker, index)
    waits = worker.submit(index, "double", [1])
    closing = threading.Thread(target=worker.close)
    closing.start()
    index.gate.set()
    closing.join(60)
    assert first.result(60) == 0
    with pytest.raises(CancelledError):
        waits[0].result(60)
    with pytest.raises(Refused, match="ending"):
        worker.submit(index, "double", [1])


def test_the_end_does_not_wait_for_what_is_compiled_at_the_start(index):
    """Ctrl-C was answered when the program of a large model was compiled."""
    entered = threading.Event()
    index.compile = lambda: (index.run("double", [entered.set() or each]) for each in (1, 2))
    worker = Worker(Indexes(index), 3, 6, lambda what: None, lambda failure: None)
    worker.start()
    assert entered.wait(60)
    worker.close()
    assert worker.compiling and not index.gate.is_set()
    index.gate.set()
    worker._thread.join(60)
    assert not worker.compiling and index.batches == [[1]] and not worker.ready


def test_a_start_that_fails_is_told(index):
    told = []
    index.compile = lambda: (_ for _ in ()).throw(MemoryError("too large"))
    worker = Worker(Indexes(index), 3, 6, lambda what: None, told.append)
    worker.start()
    worker._thread.join(60)
    assert told == [worker.failure] and "too large" in str(told[0]) and not worker.ready


def test_a_thread_that_ends_is_not_ready(index):
    """Where "ready" could not be printed, the server said for ever that it was ready."""
    told = []

    def started(failure):
        told.append(failure)
        if failure is None:
            raise BrokenPipeError("nobody reads")

    worker = Worker(Indexes(index), 3, 6, lambda what: None, started)
    worker.start()
    worker._thread.join(60)
    assert told == [None, worker.failure] and isinstance(worker.failure, BrokenPipeError)
    assert not worker.ready
    with pytest.raises(Refused, match="ending"):
        worker.submit(index, "double", [1])
