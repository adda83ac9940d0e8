"""Commands as forks of one process that has imported the libraries that all need.

`python -m rag_jax.X` imports libraries for two seconds before it begins. A server, started once,
has done that and forks for every command: each is still a process of its own, which imports the
package, parses its arguments, starts its devices and ends with its own status.

Run as a program, reads one JSON order a line and answers each with its exit status.
"""

import atexit
import functools
import gc
import importlib
import json
import os
import pathlib
import runpy
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
        environment = {k: v for k, v in environment.items() if k != "PYTEST_CURRENT_TEST"}
        server = _server(tuple(sorted(environment.items())), cwd)
        order = {"arguments": arguments, "files": list(map(str, files))}
        print(json.dumps(order), file=server.stdin, flush=True)
        status = json.loads(server.stdout.readline())
        return subprocess.CompletedProcess(
            arguments, status, files[1].read_text("utf-8"), files[2].read_text("utf-8"))


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
        child = os.fork()
        if not child:
            return order
        _, status = os.waitpid(child, 0)
        print(json.dumps(os.waitstatus_to_exitcode(status)), flush=True)
    raise SystemExit


if __name__ == "__main__":
    warnings.filterwarnings("ignore", r"os\.fork\(\) was called")  # no device has begun
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()  # what was imported is shared by all forks: none looks through it for garbage
    order = _orders()
    for number, (file, how) in enumerate(zip(order["files"], "rww", strict=True)):
        with open(file, how) as stream:
            os.dup2(stream.fileno(), number)
    sys.stdin = open(0)  # the server's has read ahead
    module, *sys.argv[1:] = order["arguments"]
    sys.path[0] = ""  # as python -m has it
    runpy.run_module(module, run_name="__main__", alter_sys=True)
