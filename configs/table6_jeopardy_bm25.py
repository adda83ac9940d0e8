r"""Table 6, Jeopardy, RAG-Token with BM25: 17.5 BLEU-1 and 22.3 Q-BLEU-1 on dev.

    python -m rag_jax.train --config=configs/table6_jeopardy_bm25.py \
        --workdir=runs/paper/jeopardy

Hardware: a TPU v4-8 with a 500 GB disk (tpu_scripts/README.md). Time: 15,217 steps of
64 questions; at least 0.6 hours, a lower bound: the operations of the training
step alone, at the chips' peak speed; not measured.
"""

from recipe import full_size


def get_config():
    return full_size("jeopardy", "bm25")
