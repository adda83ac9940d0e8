r"""Table 1, WebQuestions, RAG-Token: 45.5 EM on test.

    python -m rag_jax.convert --from=runs/paper/nq --run=rag_token \
        --to=runs/paper/nq/exported_rag_token
    python -m rag_jax.train --config=configs/table1_wq_rag_token.py \
        --workdir=runs/paper/wq_rag_token

Hardware: a TPU v4-8 with a 500 GB disk (tpu_scripts/README.md). Time: 5,339 steps of
64 questions; at least 0.2 hours, a lower bound: the operations of the training
step alone, at the chips' peak speed; not measured.
"""

from recipe import full_size


def get_config():
    return full_size("wq", "rag_token")
