"""Seconds until `import rag_jax` and `--help` of every entry point answer, and what they import.

    python benchmarks/startup.py
"""

import statistics
import subprocess
import sys
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


def main() -> None:
    for name, command in PROGRAMS.items():
        seconds(command)
        median = statistics.median(seconds(command) for _ in range(5))
        print(f"{name:30s} {median:.2f} s, heavy imports: {imported(command) or 'none'}")


if __name__ == "__main__":
    main()
