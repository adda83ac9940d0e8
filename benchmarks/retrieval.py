"""Retrieval on one's own data: BM25, exact search and ScaNN with the same trained encoders.

    python benchmarks/retrieval.py --workdir runs/mine --split test

Prints answer recall@1, 5 and 20 of BM25 (bm25s: Snowball stemmer, English stop words, k1 0.9,
b 0.4, title and text), of exact search and of ScaNN at its default settings; ScaNN's recall@10
against exact search; and queries per second of each, interleaved on this machine.
"""

import argparse
import pathlib
import statistics
import tempfile
import time

import numpy as np

from rag_jax import flags, process
from rag_jax.api import load
from rag_jax.metrics.retrieval import answer_recall
from rag_jax.retrieval.bm25 import build_bm25
from rag_jax.retrieval.exact import ExactIndex
from rag_jax.retrieval.scann import ScannIndex, ScannSettings, build_scann


def rate(search, queries: np.ndarray) -> float:
    began = time.perf_counter()
    search(queries)
    return len(queries) / (time.perf_counter() - began)


def main() -> None:
    process.keep_memory()
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_workdir(parser)
    parser.add_argument("--split", default="test")
    options = parser.parse_args()
    trained = load(options.workdir, options.run, step=options.step, index=options.index)
    store = trained.index.passages
    questions = trained.job.tokens(options.split)
    queries = trained.answerer().embed_questions(trained.params, questions)
    embeddings = np.array(trained.index.embeddings(np.arange(len(store))))
    exact = ExactIndex(embeddings)
    settings = ScannSettings()
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder)
        embeddings.astype("<f4").tofile(path / "embeddings.f32")
        build_scann(embeddings, path / "embeddings.f32", settings, path / "scann")
        scann = ScannIndex(path / "scann", embeddings, settings)
        found = {
            "BM25": build_bm25(store, path / "bm25").search(questions.texts, 20).ids,
            "exact": exact.search(queries, 20).ids,
            "ScaNN": scann.search(queries, 20).ids,
        }
        answers = [e.answers for e in questions.examples]
        for name, ids in found.items():
            texts = [[store[int(i)].text for i in row] for row in ids]
            recall = answer_recall(texts, answers, (1, 5, 20))
            shown = ", ".join(f"@{k} {value:.1f}" for k, value in recall.items())
            print(f"{name:6s} answer recall {shown}")
        pairs = zip(exact.search(queries, 10).ids, scann.search(queries, 10).ids, strict=True)
        overlap = np.mean([len(set(a) & set(b)) / 10 for a, b in pairs])
        parts, searched = settings.leaves(len(store))
        print(f"ScaNN recall@10 against exact search {overlap:.4f} ({len(store)} passages, "
              f"{len(queries)} questions, {searched} of {parts} leaves)")
        rates = [(rate(lambda q: exact.search(q, 10), queries),
                  rate(lambda q: scann.search(q, 10), queries)) for _ in range(7)]
        medians = [statistics.median(r) for r in zip(*rates, strict=True)]
        print(f"queries per second: exact {medians[0]:.0f}, ScaNN {medians[1]:.0f}")


if __name__ == "__main__":
    main()
