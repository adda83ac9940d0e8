"""The ways of decoding beside each other, on the test questions of a trained workdir.

    python benchmarks/decoding_ways.py --workdir runs/quickstart [--repeats 3]

Prints, for RAG-Token (run rag_token) and RAG-Sequence (run rag_sequence): EM, mean log p(y | x) in
nats of the answers given, the share certified as the most probable of all, and seconds for all
questions (median of interleaved turns, compiled before); then what exact search adds; and how many
programs 100 questions of mixed length compile.
"""

import argparse
import functools
import statistics

import numpy as np
from measuring import compilations, in_turns

from rag_jax import process
from rag_jax.api import load
from rag_jax.cli import flags
from rag_jax.config import overrides
from rag_jax.metrics.answers import exact_match

WAYS = {
    "rag_token": {"greedy": {}, "beam 4": {"num_beams": 4}},
    "rag_sequence": {
        **{f"thorough {n}": {"strategy": "thorough", "num_beams": n} for n in (1, 4)},
        "fast 4": {"strategy": "fast", "num_beams": 4},
        **{f"marginal {n}": {"strategy": "marginal", "num_beams": n} for n in (1, 2, 4, 8, 16)}},
}
EXACT = {"rag_token": {"num_beams": 4}, "rag_sequence": {"num_beams": 4}}


def main() -> None:
    process.keep_memory()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_workdir(parser)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--nodes", type=int, default=10_000, help="budget of exact search")
    options = parser.parse_args()
    for run, ways in WAYS.items():
        options.run = run
        base = flags.workdir_config(options)
        trained = load(options.workdir, run)
        splits = trained.job.prepared.splits
        questions = trained.job.tokens("test" if "test" in splits else "dev")
        print(f"{run}: {len(questions)} questions, {trained.answerer().k} passages each")
        measure(trained, questions, {name: changed(base, way) for name, way in ways.items()},
                options.repeats)
        measure(trained, questions, {"exact": changed(
            base, {**EXACT[run], "exact_nodes": options.nodes})}, options.repeats)
    count_compilations(trained, [e.question for e in questions.examples[:100]])


def changed(base, way):
    return overrides.replace(base, {f"eval.{name}": value for name, value in way.items()})


def measure(trained, questions, ways: dict, repeats: int) -> None:
    from rag_jax.training.answer_settings import decoding_settings

    answerers = {name: trained.answerer(
        decoding=decoding_settings(config, trained.job.prepared.generator_tokenizer),
        node_budget=config.eval.exact_nodes) for name, config in ways.items()}
    retrieved = next(iter(answerers.values())).retrieve(trained.params, questions)
    results, seconds = in_turns({
        name: functools.partial(answerer.decode, trained.params, questions, retrieved)
        for name, answerer in answerers.items()}, repeats)
    for name, answers in results.items():
        em = np.mean([exact_match(a.text, e.answers)
                      for a, e in zip(answers, questions.examples, strict=True)])
        log_p = np.mean([a.log_prob for a in answers])
        print(f"  {name:12} EM {100 * em:5.1f}  mean log p {log_p:7.4f}"
              f"  certified {100 * np.mean([a.certified for a in answers]):5.1f} %"
              f"  {statistics.median(seconds[name]):6.2f} s", flush=True)


def count_compilations(trained, texts: list[str]) -> None:
    compiled = compilations()
    for text in texts:
        trained.ask([text])
    print(f"{len(texts)} questions one by one: {len(compiled)} compilations")


if __name__ == "__main__":
    main()
