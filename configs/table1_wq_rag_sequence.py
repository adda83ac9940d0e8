r"""Table 1, WebQuestions, RAG-Sequence: 45.2 EM on test.

    python -m rag_jax.convert --from=runs/paper/nq --run=rag_sequence \
        --to=runs/paper/nq/exported_rag_sequence
    python -m rag_jax.train --config=configs/table1_wq_rag_sequence.py \
        --workdir=runs/paper/wq_rag_sequence

Hardware: a TPU v4-8 with a 500 GB disk (tpu_scripts/README.md). Time: 5,339 steps of
64 questions; at least 0.2 hours, a lower bound: the operations of the training
step alone, at the chips' peak speed; not measured.
"""

from recipe import full_size


def get_config():
    return full_size("wq", "rag_sequence")
