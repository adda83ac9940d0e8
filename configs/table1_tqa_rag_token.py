r"""Table 1, TriviaQA, RAG-Token: 55.2 EM on test.

    python -m rag_jax.train --config=configs/table1_tqa_rag_token.py \
        --workdir=runs/paper/tqa

Hardware: a TPU v4-8 with a 500 GB disk (tpu_scripts/README.md). Time: 123,101 steps of
64 questions; at least 4.4 hours, a lower bound: the operations of the training
step alone, at the chips' peak speed; not measured.
"""

from recipe import full_size


def get_config():
    return full_size("tqa", "rag_token")
