"""How many programs the batches of a run's training compile, by length_buckets.

    python benchmarks/shapes.py --workdir DIR [--batch_size 4 8] [--buckets 32 64 128]

of a workdir whose passages are indexed. The batches are those of the training questions in the
order of training, with the passages that the run finds for them, on one device. Prints the shapes
in the first 100, 300 and 1,000 steps, and the share of the generator's inputs that is padding.
"""

import argparse
import pathlib

import numpy as np

import rag_jax
from rag_jax.data import order
from rag_jax.data.batches import RagBatcher
from rag_jax.data.packed import Groups
from rag_jax.searching import search

MARKS = (100, 300, 1000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workdir", required=True, type=pathlib.Path)
    parser.add_argument("--batch_size", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--buckets", type=int, nargs="+", default=[32, 64, 128])
    options = parser.parse_args()
    rag = rag_jax.load(options.workdir)
    questions = rag.job.tokens("train")
    found = search(rag.index, rag.answerer().queries(rag.params, questions), rag.config.retrieval.k)
    for size in options.batch_size:
        for buckets in options.buckets:
            batcher = RagBatcher(questions, buckets, rag.job.model.embedding_width, groups=Groups())
            seen, counts, real, computed = set(), [], 0, 0
            for step in range(MARKS[-1]):
                rows = order.batch_indices(len(questions), size, rag.config.seed, step)
                batch = batcher.batch(rows, found[rows], rag.index,
                                      order.generator(rag.config.seed, 4, step))
                seen.add(tuple(np.shape(part) for part in batch))
                real += batch.source_mask.sum()
                computed += (batch.source_mask if batch.source_places is None
                             else batch.source_places).size
                if step + 1 in MARKS:
                    counts.append(len(seen))
            print(f"{size} questions, length_buckets={buckets}: {counts} shapes in {MARKS} steps, "
                  f"{100 * (1 - real / computed):.1f} % padding", flush=True)


if __name__ == "__main__":
    main()
