r"""Table 2, Jeopardy, BART without passages: 15.1 BLEU-1 and 19.7 Q-BLEU-1 on test.

    python -m rag_jax.train --config=configs/table2_jeopardy_closed_book.py \
        --workdir=runs/paper/jeopardy

Hardware: a TPU v4-8 with a 500 GB disk (tpu_scripts/README.md). Time: 15,217 steps of
64 questions; at least 0.1 hours, a lower bound: the operations of the training
step alone, at the chips' peak speed; not measured.
"""

from recipe import full_size


def get_config():
    return full_size("jeopardy", "closed_book")
