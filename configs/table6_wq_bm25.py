r"""Table 6, WebQuestions, RAG-Token with BM25: 32.1 EM on dev.

    python -m rag_jax.convert --from=runs/paper/nq --run=bm25 \
        --to=runs/paper/nq/exported_bm25
    python -m rag_jax.train --config=configs/table6_wq_bm25.py \
        --workdir=runs/paper/wq_bm25

Hardware: a TPU v4-8 with a 500 GB disk (tpu_scripts/README.md). Time: 5,339 steps of
64 questions; at least 0.2 hours, a lower bound: the operations of the training
step alone, at the chips' peak speed; not measured.
"""

from recipe import full_size


def get_config():
    return full_size("wq", "bm25")
