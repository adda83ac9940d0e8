"""Retrieval on one's own data: BM25, exact search and ScaNN with the same trained encoders.

    python benchmarks/retrieval.py --workdir runs/mine --split test

Prints answer recall@1, 5 and 20 of BM25 (bm25s: Snowball stemmer, English stop words, k1 0.9,
b 0.4, title and text), of exact search and of ScaNN, tuned on the same questions to a recall@10 of
0.99 against exact search; and what that took. benchmarks/search.py measures queries per second.
"""

import argparse
import pathlib
import tempfile

import numpy as np
from device_index import open_vectors

from rag_jax import process
from rag_jax.api import load
from rag_jax.cli import flags
from rag_jax.metrics.retrieval import answer_rank, recall_at
from rag_jax.retrieval.bm25 import build_bm25
from rag_jax.retrieval.build import RecallSettings
from rag_jax.retrieval.exact import ExactIndex
from rag_jax.training.indexing import describe


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
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder)
        scann = open_vectors(embeddings, path, "scann", RecallSettings(queries))
        found = {
            "BM25": build_bm25(store, path / "bm25").search(questions.texts, 20).ids,
            "exact": exact.search(queries, 20).ids,
            "ScaNN": scann.search(queries, 20).ids,
        }
        answers = [e.answers for e in questions.examples]
        for name, ids in found.items():
            ranks = [answer_rank([store[int(i)].text for i in row], accepted)
                     for row, accepted in zip(ids, answers, strict=True)]
            recall = recall_at(ranks, (1, 5, 20))
            shown = ", ".join(f"@{k} {value:.1f}" for k, value in recall.items())
            print(f"{name:6s} answer recall {shown}")
        print(f"ScaNN: {describe(scann)}")


if __name__ == "__main__":
    main()
