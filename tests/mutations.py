"""Breaks the source in small ways, one at a time, and runs the tests that must notice each.

    python tests/mutations.py [ROOM | NUMBER ...]       # all of tests/mutations.toml without any

Works on copies of the checkout in temporary folders. First the named tests have to pass on the
source as it is. Then every mutation is KILLED (a test failed, or ran longer than the limit) or has
SURVIVED, which means that no test guards that line. Status 1 if any survived. A room is a folder
of rag_jax/ or a file beside the folders. All of it takes an hour on two cores.
"""

import argparse
import concurrent.futures
import importlib
import importlib.util
import json
import multiprocessing
import os
import pathlib
import shutil
import signal
import sys
import tempfile
import time
import tomllib
import warnings
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[1]
LEFT_OUT = (".git", ".venv", "__pycache__", ".ruff_cache", ".pytest_cache", "runs", "build", "dist")
FAILED = (1, 2)  # statuses of pytest: a test failed; a file of tests could not even be read


class Mutation(NamedTuple):
    file: str  # from the root of the checkout
    old: str  # occurs once in it
    new: str
    tests: tuple[str, ...]  # files or FILE::test

    @property
    def room(self) -> str:
        return pathlib.PurePath(self.file).parts[1].removesuffix(".py")

    def __str__(self) -> str:
        text = (ROOT / self.file).read_text("utf-8")
        line = text[: text.find(self.old)].count("\n") + 1
        return f"{self.file}:{line}: {self.old.strip()!r} -> {self.new.strip()!r}"


def read() -> list[Mutation]:
    """All of tests/mutations.toml, in its order."""
    groups = tomllib.loads((ROOT / "tests/mutations.toml").read_text("utf-8"))["mutate"]
    return [Mutation(group["file"], old, new, tuple(group["tests"]))
            for group in groups for old, new in group["changes"]]


def chosen(mutations: list[Mutation], which: list[str]) -> dict[int, Mutation]:
    """Those of the named rooms and numbers; all if none is named."""
    numbered = dict(enumerate(mutations, 1))
    unknown = set(which) - {m.room for m in mutations} - set(map(str, numbered))
    if unknown:
        sys.exit(f"{', '.join(sorted(unknown))}: neither a number from 1 to {len(mutations)} nor a "
                 f"room: {', '.join(sorted({m.room for m in mutations}))}")
    return {number: mutation for number, mutation in numbered.items()
            if not which or mutation.room in which or str(number) in which}


def begin(folder: str) -> None:
    """Makes this process a worker, in a copy of the checkout whose source may be broken.

    It imports what all tests need of others, so that each of its forks begins with that.
    """
    copy = pathlib.Path(folder) / str(os.getpid())
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*LEFT_OUT))
    os.chdir(copy)
    sys.path[:] = [str(copy), str(copy / "tests"), *sys.path[1:]]  # as pytest has it
    os.environ["PYTHONPATH"] = str(copy)
    warnings.filterwarnings("ignore", r"os\.fork\(\) was called")  # no device has begun
    for name in ("tests.conftest", *importlib.import_module("tests.end_to_end.forks").IMPORTED):
        importlib.import_module(name)
    assert "rag_jax" not in sys.modules, "the forks would not see it broken"


def run_tests(tests: tuple[str, ...], limit: float) -> tuple[int | None, str]:
    """Status of pytest in a fork, None if it was stopped after `limit` seconds, and what it printed
    last."""
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        child = os.fork()
        if not child:
            os.setsid()  # with all processes that its tests start
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            code = 3  # pytest's for an error inside it
            try:
                import pytest
                code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests]))
                sys.stdout.flush()
            finally:
                os._exit(code)
        end, status, done = time.monotonic() + limit, None, 0
        while not done and time.monotonic() < end:
            time.sleep(0.05)
            done, status = os.waitpid(child, os.WNOHANG)
        if not done:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
        output.seek(0)
        return os.waitstatus_to_exitcode(status) if done else None, output.read()[-2000:]


def run(order: tuple[int, Mutation, float]) -> tuple[int, str, str]:
    """Number and verdict of a mutation, and what its tests printed last."""
    number, mutation, limit = order
    source = pathlib.Path(mutation.file)
    original = source.read_text("utf-8")
    compiled = pathlib.Path(importlib.util.cache_from_source(str(source)))
    try:
        source.write_text(original.replace(mutation.old, mutation.new), "utf-8")
        compiled.unlink(missing_ok=True)  # Python compares whole seconds and sizes alone
        status, output = run_tests(mutation.tests, limit)
    finally:
        source.write_text(original, "utf-8")
        compiled.unlink(missing_ok=True)
    if status is None:
        return number, f"KILLED (ran longer than {limit:g} s)", output
    if status not in (0, *FAILED):
        return number, f"NOT RUN (pytest ended with status {status})", output
    return number, "KILLED" if status else "SURVIVED", output


def run_all(mutations: dict[int, Mutation], flags: argparse.Namespace) -> dict[int, str]:
    """The verdict on each, printed and logged as it comes."""
    verdicts = {}
    with (tempfile.TemporaryDirectory(prefix="mutations-") as folder,
          concurrent.futures.ProcessPoolExecutor(
              flags.j, multiprocessing.get_context("fork"), begin, (folder,)) as pool):
        if not flags.passing:
            everything = tuple(sorted({test for m in mutations.values() for test in m.tests}))
            status, output = pool.submit(run_tests, everything, 3600.0).result()
            if status != 0:
                sys.exit(f"{output}\nthe tests have to pass before the source is broken")
        orders = [(number, mutation, flags.limit) for number, mutation in mutations.items()]
        for number, verdict, output in pool.map(run, orders):
            verdicts[number], mutation = verdict, mutations[number]
            print(f"{number:3} {verdict} {mutation}", flush=True)
            if flags.log:
                line = {"change": mutation[:3], "verdict": verdict, "output": output}
                with flags.log.open("a", encoding="utf-8") as log:
                    print(json.dumps(line), file=log)
    return verdicts


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", nargs="*", metavar="ROOM | NUMBER")
    parser.add_argument("--list", action="store_true", help="print the mutations and run nothing")
    parser.add_argument("--passing", action="store_true",
                        help="the tests are known to pass on the source as it is")
    parser.add_argument("-j", type=int, default=1, metavar="N", help="how many at once")
    parser.add_argument("--limit", type=float, default=600, metavar="SECONDS",
                        help="the tests of one mutation are stopped then")
    parser.add_argument("--log", type=pathlib.Path, metavar="FILE",
                        help="add verdicts to this file; what it says was KILLED is not run again")
    flags = parser.parse_args()
    mutations = chosen(read(), flags.which)
    if flags.list:
        print(*(f"{number:3} {mutation}" for number, mutation in mutations.items()), sep="\n")
        return 0
    killed: set[tuple] = set()
    if flags.log and flags.log.exists():
        logged = map(json.loads, flags.log.read_text("utf-8").splitlines())
        killed = {tuple(line["change"]) for line in logged if line["verdict"].startswith("KILLED")}
    open_ones = {n: m for n, m in mutations.items() if m[:3] not in killed}
    verdicts = run_all(open_ones, flags) if open_ones else {}
    alive = {n: verdict for n, verdict in verdicts.items() if not verdict.startswith("KILLED")}
    print(f"{len(mutations) - len(alive)} of {len(mutations)} killed")
    for number, verdict in alive.items():
        print(f"{number:3} {verdict} {mutations[number]}\n    {' '.join(mutations[number].tests)}")
    return int(bool(alive))


if __name__ == "__main__":
    sys.exit(main())
