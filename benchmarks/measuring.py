"""What several benchmarks share: turns, processes that hold a model, memory and the CPU's name.

Nothing here imports jax before it is called: a side that is not ours has to be measured without it.
"""

import json
import pathlib
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")
# facebook/bart-base, as fields of transformers' BartConfig.
BART_BASE = {"d_model": 768, "encoder_layers": 6, "decoder_layers": 6,
             "encoder_attention_heads": 12, "decoder_attention_heads": 12,
             "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072}


def cpu_name() -> str:
    """How many cores, and of which model."""
    info = pathlib.Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in info.read_text().splitlines()
             if line.startswith("model name")] if info.exists() else [platform.processor()]
    return f"{len(names)} cores of {names[0]}"


def peak_gib(children: bool = False) -> float:
    """The most memory that this process has had (with `children`, or any that it waited for)."""
    whose = (resource.RUSAGE_SELF, *[resource.RUSAGE_CHILDREN] * children)
    return max(resource.getrusage(who).ru_maxrss for who in whose) / 2**20


def compilations() -> list[str]:
    """A list to which every compilation of this process from now on adds one entry."""
    import jax.monitoring

    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, secs, **_: compiled.append(event) if "backend_compile" in event else None)
    return compiled


def in_turns(sides: Mapping[str, Callable[[], T]], repeats: int
             ) -> tuple[dict[str, T], dict[str, list[float]]]:
    """Calls the sides one after the other, again and again, so that all see the same machine.

    Args:
      sides: each returns when its result is on the host.
      repeats: timed turns of each side; one before them, which compiles, is not timed.

    Returns:
      The last result of each side, and the seconds of its timed turns.
    """
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    results = {}
    for turn in range(repeats + 1):
        for name, side in sides.items():
            began = time.perf_counter()
            results[name] = side()
            if turn:
                seconds[name].append(time.perf_counter() - began)
    return results, seconds


class SideProcesses:
    """One process for each side of a benchmark, which holds its model and waits to be asked.

    A process is `python SCRIPT --side SIDE --folder FOLDER`, and calls `answer_requests`.
    """

    def __init__(self, script: str, sides: Iterable[str], folder: str | pathlib.Path):
        self._processes = {side: subprocess.Popen(
            [sys.executable, script, "--side", side, "--folder", str(folder)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for side in sides}

    def take_turns(self, request: str, repeats: int) -> dict[str, list[dict[str, Any]]]:
        """What each side's `answer_requests` writes for a request of one line: first for one that
        compiles and warms up, then for `repeats` more."""
        turns: dict[str, list[dict[str, Any]]] = {side: [] for side in self._processes}
        for _ in range(repeats + 1):
            for side, process in self._processes.items():
                process.stdin.write(request + "\n")
                process.stdin.flush()
                turns[side].append(json.loads(process.stdout.readline()))
        return turns

    def __enter__(self) -> "SideProcesses":
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes.values():
            process.stdin.close()
            process.wait()


def answer_requests(run: Callable[[str], T], record: Callable[[T], dict[str, Any]]) -> None:
    """Calls `run` with each line of standard input, and writes a line of JSON for it: "secs" of the
    call, "peak_gib" of the process, and what `record` makes of the result, which is not timed."""
    for line in sys.stdin:
        began = time.monotonic()
        result = run(line.strip())
        secs = time.monotonic() - began
        print(json.dumps({"secs": secs, **record(result), "peak_gib": peak_gib()}), flush=True)
