r"""Table 6, TriviaQA, RAG-Sequence with BM25: 44.1 EM on dev.

    python -m rag_jax.train --config=configs/table6_tqa_bm25_sequence.py \
        --workdir=runs/paper/tqa

Hardware: a TPU v4-8 with a 500 GB disk (tpu_scripts/README.md). Time: 123,101 steps of
64 questions; at least 4.3 hours, a lower bound: the operations of the training
step alone, at the chips' peak speed; not measured.
"""

from recipe import full_size


def get_config():
    return full_size("tqa", "bm25_sequence")
