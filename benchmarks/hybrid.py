"""Retrieval by embeddings, by words, and by both: recall of answers and ranks of gold passages.

    python benchmarks/hybrid.py --workdir DIR [--run RUN] [--split test] [--json FILE]

of a workdir whose passages have been indexed. The weight of words is chosen on the dev questions.
"""

import argparse
import pathlib

import rag_jax
from rag_jax import files, scoring
from rag_jax.metrics.retrieval import gold_metrics, recall_at
from rag_jax.searching import search
from rag_jax.training.opened import Rag

WEIGHTS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
DEPTHS = (1, 5, 20)


def measured(rag: Rag, split: str) -> dict[str, float]:
    """Percent: answer recall at DEPTHS, and gold_mrr and gold_ndcg@5."""
    examples, answerer = rag.questions(split), rag.answerer({"k": max(DEPTHS)})
    rows = search(rag.index, answerer.queries(rag.params, rag.job.tokens(split)), max(DEPTHS))
    passages = [[rag.index.passages[int(row)] for row in each] for each in rows]
    recalls = recall_at(scoring.answer_ranks(examples, passages), DEPTHS)
    gold = gold_metrics([[p.id for p in each] for each in passages],
                        [example.positive_ids for example in examples], [5])
    return {**{f"answer_recall@{k}": value for k, value in recalls.items()},
            **{name: gold[name] for name in ("gold_mrr", "gold_ndcg@5")}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workdir", required=True, type=pathlib.Path)
    parser.add_argument("--run")
    parser.add_argument("--split", default="test")
    parser.add_argument("--json", metavar="FILE", type=pathlib.Path)
    options = parser.parse_args()

    def opened(**fields: object) -> Rag:
        return rag_jax.load(options.workdir, options.run, config={
            "retrieval.retriever": "hybrid",
            **{f"retrieval.{name}": value for name, value in fields.items()}})

    record = {"embeddings": measured(opened(bm25_weight=0.0), options.split),
              "words": measured(opened(bm25_weight=1.0), options.split)}
    rag = opened()
    weight = rag.choose_weight(WEIGHTS)["bm25_weight"]
    record[f"convex, weight {weight:g}"] = measured(rag, options.split)
    record["reciprocal ranks"] = measured(opened(fusion="reciprocal_rank"), options.split)
    for name, values in record.items():
        print(f"{name:22s}", ", ".join(f"{metric} {value:.1f}" for metric, value in values.items()))
    if options.json:
        files.write_json(options.json, record)


if __name__ == "__main__":
    main()
