r"""Table 2, MS-MARCO, BART without passages: 38.2 ROUGE-L and 41.6 BLEU-1 on test.

    python -m rag_jax.train --config=configs/table2_msmarco_closed_book.py \
        --workdir=runs/paper/msmarco

Hardware: a TPU v4-8 with a 500 GB disk (tpu_scripts/README.md). Time: 24,019 steps of
64 questions; at least 0.2 hours, a lower bound: the operations of the training
step alone, at the chips' peak speed; not measured.

The answers of MS-MARCO's test set are hidden: dev alone can be measured.
"""

from recipe import full_size


def get_config():
    return full_size("msmarco", "closed_book")
