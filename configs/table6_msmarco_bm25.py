r"""Table 6, MS-MARCO, RAG-Token with BM25: 55.5 ROUGE-L and 48.4 BLEU-1 on dev.

    python -m rag_jax.train --config=configs/table6_msmarco_bm25.py \
        --workdir=runs/paper/msmarco

Hardware: a TPU v4-8 with a 500 GB disk (tpu_scripts/README.md). Time: 24,019 steps of
64 questions; at least 1.1 hours, a lower bound: the operations of the training
step alone, at the chips' peak speed; not measured.
"""

from recipe import full_size


def get_config():
    return full_size("msmarco", "bm25")
