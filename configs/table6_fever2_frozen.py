r"""Table 6, FEVER 2-way, RAG-Token, frozen retriever: 89.4 accuracy on dev.

    python -m rag_jax.train --config=configs/table6_fever2_frozen.py \
        --workdir=runs/paper/fever2

Hardware: a TPU v4-8 with a 500 GB disk (tpu_scripts/README.md). Time: 17,157 steps of
64 questions; at least 0.5 hours, a lower bound: the operations of the training
step alone, at the chips' peak speed; not measured.
"""

from recipe import full_size


def get_config():
    return full_size("fever2", "frozen")
