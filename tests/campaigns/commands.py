"""Commands that are killed at random moments, and what of a workdir must be equal afterwards."""

import json
import math
import pathlib
import random
import re
import signal
import threading
import time
from collections.abc import Sequence

from rag_jax.data.question_sources import load_examples
from tests.end_to_end.commands import start
from tests.end_to_end.test_resume import arrays

TIMES = ("step_secs", "tokens_per_sec")  # metrics that differ from run to run
# What a process has that is writing; of Orbax too.
TEMPORARY = (".rag_jax-", ".orbax-checkpoint-tmp", ".tmp", ".partial", ".replaced", ".copying",
             ".lock.json")
# Times, paths and checksums of TFDS, which differ from run to run.
OWN_OF_A_RUN = ("inputs.json", "weights.json", "dataset_info.json", "digests.json",
                "seconds.json", "report.json", ".lock")
_secs: dict[str, float] = {}  # how long a command takes at least, by its kind


def finish(command: Sequence[str], kind: str) -> str:
    """Runs a command that must succeed; its output."""
    began = time.monotonic()
    process = start(*command[2:])
    printed = process.stdout.read()
    assert process.wait() == 0, printed[-3000:]
    _secs[kind] = min(time.monotonic() - began, _secs.get(kind, math.inf))
    return printed


def killed(command: Sequence[str], kind: str, rng: random.Random, idle: float = 0) -> bool:
    """Starts a command and kills it at a random moment; whether that came before its end.

    idle: the share of its time in which it only begins.
    """
    moment = rng.uniform(idle, 1) * _secs[kind]
    process = start(*command[2:])
    timer = threading.Timer(moment, process.kill)
    timer.start()
    printed = process.stdout.read()
    timer.cancel()
    timer.join()  # its process still has its number
    status = process.wait()
    assert status in (0, -signal.SIGKILL), printed[-3000:]
    return status != 0


def leftovers(folder: pathlib.Path) -> list[str]:
    """Whatever a process that ended has not taken away."""
    return [str(path.relative_to(folder)) for path in folder.rglob("*")
            if any(part in path.name for part in TEMPORARY)]


def contents(folder: pathlib.Path) -> dict[str, bytes]:
    """Files by their names, without those that are a run's own, and without checkpoints."""
    return {name: _content(path) for path in sorted(folder.rglob("*")) if path.is_file()
            and path.name not in OWN_OF_A_RUN
            and not _in_checkpoint(name := path.relative_to(folder).as_posix())}


def _content(path: pathlib.Path) -> bytes:
    if path.name == "metrics.jsonl":  # how long a step took is each process's own
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        return repr([{name: value for name, value in line.items() if not name.endswith(TIMES)}
                     for line in lines]).encode()
    split, is_record, _ = path.name.partition(".array_record")
    if not is_record:
        return path.read_bytes()
    # array_record's threads write the same examples as other bytes from one time to the next.
    return repr(load_examples(f"tfds-dir:{path.parent}:{split.partition('-')[2]}")).encode()


def _in_checkpoint(name: str) -> bool:
    return bool(re.match(r"(retriever|generator|rag_token|rag_token/document_encoder)/\d+/", name))


def assert_same(found: pathlib.Path, expected: pathlib.Path) -> None:
    """Two trained workdirs: data, indexes, metrics, predictions, arrays and report."""
    one, two = contents(found), contents(expected)
    assert sorted(one.keys() ^ two.keys()) == [] and len(one) > 20
    assert [name for name in one if one[name] != two[name]] == []
    trained, reference = arrays(found), arrays(expected)
    assert trained.keys() == reference.keys() and len(trained) > 20
    for name, array in trained.items():
        assert array.dtype == reference[name].dtype
        assert array.tobytes() == reference[name].tobytes(), name
    reports = [json.loads((path / "report.json").read_text()) for path in (found, expected)]
    for key in ("em", "metrics", "index", "hot_swap"):
        assert reports[0].get(key) == reports[1].get(key)
