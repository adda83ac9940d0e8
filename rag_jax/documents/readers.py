"""Reading files in child processes, with limited time and memory."""

import concurrent.futures
import contextlib
import json
import os
import pathlib
import queue
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator

import rag_jax
from rag_jax.documents.document import Document, ReaderLost, Unreadable

SECONDS = 120.0  # at most, for a file
MEMORY_BYTES = 4 * 2**30  # at most, of a process


class Readers:
    """Child processes that read documents. A context manager: they end with the `with` block.

    Args:
      count: of processes; None = one per core, four at most.
      seconds: at most, for a file.
      memory: bytes at most, of a process.
    """

    def __init__(self, count: int | None = None, seconds: float = SECONDS,
                 memory: int = MEMORY_BYTES):
        self._count = count or min(4, os.cpu_count() or 1)
        self._seconds, self._memory = seconds, memory
        self._idle: queue.SimpleQueue[subprocess.Popen | None] = queue.SimpleQueue()
        self._processes: set[subprocess.Popen] = set()
        self._closed = False
        for _ in range(self._count):
            self._idle.put(None)
        self._threads = concurrent.futures.ThreadPoolExecutor(self._count)

    def __enter__(self) -> "Readers":
        return self

    def __exit__(self, *error) -> None:
        self._closed = True  # first, so that no process is started in place of those killed here
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in list(self._processes):
            process.kill()  # nobody waits for what it reads
        self._threads.shutdown()
        for process in list(self._processes):
            self._end(process)

    def read_each(self, contents: Iterable[tuple[str, bytes]]
                  ) -> Iterator[Document | Unreadable]:
        """What `read` returns or raises for each (name, content), in their order.

        Only a few contents are in memory at a time.
        """
        ahead: list[concurrent.futures.Future] = []
        for name, content in contents:
            ahead.append(self._threads.submit(self._outcome, name, content))
            if len(ahead) > 2 * self._count:
                yield ahead.pop(0).result()
        for future in ahead:
            yield future.result()

    def _outcome(self, name: str, content: bytes) -> Document | Unreadable:
        try:
            return self.read(name, content)
        except Unreadable as error:
            return error

    def read(self, name: str, content: bytes) -> Document:
        """`read.read_content` in one of the processes.

        Raises:
          Unreadable: as `read_content`.
          ReaderLost: it took too long, or the process crashed.
          OSError: no process can be started.
        """
        process = self._idle.get()
        new = process is None
        if new:
            try:
                process = self._start()
            except BaseException:
                self._idle.put(None)  # else the next reader would wait for ever
                raise
        late = threading.Event()
        timer = threading.Timer(self._seconds, lambda: (late.set(), process.kill()))
        answer = b""
        try:
            timer.start()
            with contextlib.suppress(OSError):
                head = {"name": name, "bytes": len(content)}
                process.stdin.write(json.dumps(head).encode() + b"\n" + content)
                process.stdin.flush()
                answer = process.stdout.readline()
        finally:
            timer.cancel()
            whole = answer.endswith(b"\n")
            if not whole:
                self._end(process)
            self._idle.put(process if whole else None)
        if not whole and late.is_set():
            raise ReaderLost(f"to read it took more than {self._seconds:g} seconds")
        if not (whole or new or self._closed):  # it may have ended before this file
            return self.read(name, content)
        if not whole:
            raise ReaderLost("its reader has crashed: it is damaged, or worse")
        record = json.loads(answer)
        if "unreadable" in record:
            raise Unreadable(record["unreadable"])
        return Document.of_record(record)

    def _start(self) -> subprocess.Popen:
        paths = [str(pathlib.Path(rag_jax.__file__).parents[1]), os.environ.get("PYTHONPATH")]
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "rag_jax.documents.worker", str(self._memory),
             str(self._seconds)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self._processes.add(process)
        if self._closed:  # while the process was started
            process.kill()
        return process

    def _end(self, process: subprocess.Popen) -> None:
        self._processes.discard(process)
        process.kill()
        process.wait()
        with contextlib.suppress(OSError):
            process.stdin.close()
        process.stdout.close()
