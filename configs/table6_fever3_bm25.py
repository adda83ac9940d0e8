r"""Table 6, FEVER 3-way, RAG-Token with BM25: 75.1 accuracy on dev.

    python -m rag_jax.train --config=configs/table6_fever3_bm25.py \
        --workdir=runs/paper/fever3

Hardware: a TPU v4-8 with a 500 GB disk (tpu_scripts/README.md). Time: 22,726 steps of
64 questions; at least 0.7 hours, a lower bound: the operations of the training
step alone, at the chips' peak speed; not measured.
"""

from recipe import full_size


def get_config():
    return full_size("fever3", "bm25")
