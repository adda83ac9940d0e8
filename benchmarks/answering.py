"""Milliseconds of the second question to a warm process, and what it compiles.

    python benchmarks/answering.py --workdir runs/quickstart

Asks through the same function as `rag_jax.generate --interactive`; the first question compiles,
the others (of other lengths) must not.
"""

import argparse
import statistics
import time

from measuring import compilations

from rag_jax import process
from rag_jax.api import load
from rag_jax.cli import flags

QUESTIONS = (
    "Who is the President of Peru?",
    "What is the capital of the Netherlands?",
    "In which part of the world is Nepal?",
    "Which currency is used in Japan?",
    "When did South Sudan join the United Nations?",
    "How high is the highest point of Switzerland?",
)


def main() -> None:
    process.keep_memory()
    parser = argparse.ArgumentParser(description=__doc__)
    flags.add_workdir(parser)
    options = parser.parse_args()
    compiled = compilations()
    trained = load(options.workdir, options.run, step=options.step, index=options.index)
    began = time.perf_counter()
    trained.ask(QUESTIONS[:1])
    print(f"first question {time.perf_counter() - began:.2f} s, {len(compiled)} compilations")
    compiled.clear()
    times = []
    for question in QUESTIONS[1:] * 4:
        began = time.perf_counter()
        trained.ask([question])
        times.append(1e3 * (time.perf_counter() - began))
    print(f"later questions: median {statistics.median(times):.1f} ms, longest {max(times):.1f} ms,"
          f" {len(compiled)} compilations")


if __name__ == "__main__":
    main()
