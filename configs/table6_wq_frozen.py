r"""Table 6, WebQuestions, RAG-Token, frozen retriever: 37.1 EM on dev.

    python -m rag_jax.convert --from=runs/paper/nq --run=frozen \
        --to=runs/paper/nq/exported_frozen
    python -m rag_jax.train --config=configs/table6_wq_frozen.py \
        --workdir=runs/paper/wq_frozen

Hardware: a TPU v4-8 with a 500 GB disk (tpu_scripts/README.md). Time: 5,339 steps of
64 questions; at least 0.2 hours, a lower bound: the operations of the training
step alone, at the chips' peak speed; not measured.
"""

from recipe import full_size


def get_config():
    return full_size("wq", "frozen")
