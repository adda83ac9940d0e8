"""Seconds until `import rag_jax` and `--help` of every entry point answer, and what they import.

    python benchmarks/startup.py
    python benchmarks/startup.py --config configs/paper.py:table1/nq/rag_sequence

With a configuration: until its programs that evaluate and answer a question could run, in a process
that finds them compiled: to trace them, to lower them, to read them from the cache.
"""

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time

PROGRAMS = {
    "import rag_jax": [sys.executable, "-c", "import rag_jax"],
    **{f"rag_jax.{name} --help": [sys.executable, "-m", f"rag_jax.{name}", "--help"]
       for name in ("ingest", "train", "evaluate", "generate", "build_index", "convert")},
}
HEAVY = ("torch", "tensorflow", "jax", "transformers")


def seconds(command: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - began


def imported(command: list[str]) -> list[str]:
    """Heavy libraries that the command imports."""
    traced = [command[0], "-X", "importtime", *command[1:]]
    log = subprocess.run(traced, check=True, capture_output=True, text=True).stderr
    names = {line.rpartition("|")[2].strip() for line in log.splitlines()}
    return [name for name in HEAVY if name in names]


def prepared(name: str, cache: str) -> dict[str, list[float]]:
    """Seconds for each program of a configuration: traced, lowered, and compiled or read."""
    import jax

    from rag_jax import parallel
    from rag_jax.aot.programs import programs
    from rag_jax.config import MeshConfig, config_files, overrides, rules

    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    config = dataclasses.replace(overrides.replace(
        rules.validate(config_files.load_file(name)), {"eval.batch_size": 1}), mesh=MeshConfig())
    found = {}
    for program in programs(config, parallel.make_mesh(config.mesh), passages=20_000,
                            kinds=["decode", "evaluate"]):
        times = [time.perf_counter()]
        traced = program.jitted.trace(*program.arguments)
        times.append(time.perf_counter())
        lowered = traced.lower()
        times.append(time.perf_counter())
        lowered.compile()
        times.append(time.perf_counter())
        found[program.name] = [after - before for before, after in zip(
            times, times[1:], strict=False)]
    return found


def of_config(name: str) -> None:
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, __file__, "--config", name, "--cache", cache]
        runs = [json.loads(subprocess.run(command, check=True, capture_output=True, text=True
                                          ).stdout) for _ in range(4)][1:]
    for program in runs[0]:
        traced, lowered, read = (statistics.median(each) for each in zip(
            *(run[program] for run in runs), strict=True))
        print(f"{program:30s} {traced:.2f} s traced, {lowered:.2f} lowered, {read:.2f} read")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--config", help="FILE, or FILE:CELL, of configs/")
    parser.add_argument("--cache", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cache:
        print(json.dumps(prepared(options.config, options.cache)))
        return
    if options.config:
        of_config(options.config)
        return
    for name, command in PROGRAMS.items():
        seconds(command)
        median = statistics.median(seconds(command) for _ in range(5))
        print(f"{name:30s} {median:.2f} s, heavy imports: {imported(command) or 'none'}")


if __name__ == "__main__":
    main()
