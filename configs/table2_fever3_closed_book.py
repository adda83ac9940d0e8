r"""Table 2, FEVER 3-way, BART without passages: 64.0 accuracy on test.

    python -m rag_jax.train --config=configs/table2_fever3_closed_book.py \
        --workdir=runs/paper/fever3

Hardware: a TPU v4-8 with a 500 GB disk (tpu_scripts/README.md). Time: 22,726 steps of
64 questions; at least 0.1 hours, a lower bound: the operations of the training
step alone, at the chips' peak speed; not measured.
"""

from recipe import full_size


def get_config():
    return full_size("fever3", "closed_book")
