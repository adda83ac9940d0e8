"""Commands as forks of one process that has imported the libraries that all need.

`python -m rag_jax.X` imports libraries for two seconds before it begins. A server, started once,
has done that and forks for every command: each is still a process of its own, which imports the
package, parses its arguments, starts its devices and ends with its own status or by a signal.

Run as a program, reads one JSON order a line: arguments and files of a command, answered with the
number of its process, or such a number, answered with its exit status once it has ended.
"""

import atexit
import functools
import gc
import importlib
import json
import os
import pathlib
import runpy
import signal
import subprocess
import sys
import tempfile
import warnings

# What the package imports of others: it starts no thread that a fork would lose, and no device.
IMPORTED = ("jax", "flax.linen", "optax", "orbax.checkpoint", "tensorflow_datasets", "scipy.stats")


def run(arguments: list[str], environment: dict[str, str], cwd: pathlib.Path, stdin: str = ""
        ) -> subprocess.CompletedProcess:
    """`python -m ARGUMENTS` to its end, as subprocess.run with captured text."""
    with tempfile.TemporaryDirectory() as folder:
        files = [pathlib.Path(folder, name) for name in ("stdin", "stdout", "stderr")]
        files[0].write_text(stdin)
        server = _server_of(environment, cwd)
        order = {"arguments": arguments, "files": list(map(str, files))}
        status = _ask(server, _ask(server, order))
        return subprocess.CompletedProcess(
            arguments, status, files[1].read_text("utf-8"), files[2].read_text("utf-8"))


class Started:
    """`python -m ARGUMENTS` that has just begun; `stdout` reads what it prints, errors too."""

    def __init__(self, arguments: list[str], environment: dict[str, str], cwd: pathlib.Path):
        self._server = _server_of(environment, cwd)
        with tempfile.TemporaryDirectory() as folder:
            pipe = str(pathlib.Path(folder, "printed"))
            os.mkfifo(pipe)
            files = [os.devnull, pipe, pipe]
            self.pid = _ask(self._server, {"arguments": arguments, "files": files})
            self.stdout = open(pipe, encoding="utf-8")  # once the command has opened it as well

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)  # it has its number until `wait`

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self) -> int:
        status = _ask(self._server, self.pid)
        self.stdout.close()
        return status


def _ask(server: subprocess.Popen, order: dict | int) -> int:
    print(json.dumps(order), file=server.stdin, flush=True)
    return json.loads(server.stdout.readline())


def _server_of(environment: dict[str, str], cwd: pathlib.Path) -> subprocess.Popen:
    without = {k: v for k, v in environment.items() if k != "PYTEST_CURRENT_TEST"}
    return _server(tuple(sorted(without.items())), cwd)


@functools.cache
def _server(environment: tuple[tuple[str, str], ...], cwd: pathlib.Path) -> subprocess.Popen:
    """The server whose commands have this environment."""
    server = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, text=True,
                              stdout=subprocess.PIPE, env=dict(environment), cwd=cwd)
    atexit.register(server.kill)
    return server


def _orders() -> dict:
    """Serves until its input ends; returns in each fork, with the fork's order."""
    for line in sys.stdin:
        order = json.loads(line)
        if isinstance(order, int):
            answer = os.waitstatus_to_exitcode(os.waitpid(order, 0)[1])
        elif not (answer := os.fork()):
            return order
        print(json.dumps(answer), flush=True)
    raise SystemExit


if __name__ == "__main__":
    warnings.filterwarnings("ignore", r"os\.fork\(\) was called")  # no device has begun
    gc.disable()  # while modules are imported, a fifth of the time was its
    for name in IMPORTED:
        importlib.import_module(name)
    gc.enable()
    gc.freeze()  # what was imported is shared by all forks: none looks through it for garbage
    order = _orders()
    for number, (file, how) in enumerate(zip(order["files"], "rww", strict=True)):
        if number and file == order["files"][number - 1]:
            os.dup2(number - 1, number)
            continue
        with open(file, how) as stream:
            os.dup2(stream.fileno(), number)
    sys.stdin = open(0)  # the server's has read ahead
    module, *sys.argv[1:] = order["arguments"]
    sys.path[0] = ""  # as python -m has it
    runpy.run_module(module, run_name="__main__", alter_sys=True)
