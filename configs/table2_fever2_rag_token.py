r"""Table 2, FEVER 2-way, RAG-Token: 89.5 accuracy on test.

    python -m rag_jax.train --config=configs/table2_fever2_rag_token.py \
        --workdir=runs/paper/fever2

Hardware: a TPU v4-8 with a 500 GB disk (tpu_scripts/README.md). Time: 17,157 steps of
64 questions; at least 0.5 hours, a lower bound: the operations of the training
step alone, at the chips' peak speed; not measured.
"""

from recipe import full_size


def get_config():
    return full_size("fever2", "rag_token")
