r"""Table 6, Natural Questions, RAG-Sequence, frozen retriever: 41.2 EM on dev.

    python -m rag_jax.train --config=configs/table6_nq_frozen_sequence.py \
        --workdir=runs/paper/nq

Hardware: a TPU v4-8 with a 500 GB disk (tpu_scripts/README.md). Time: 123,700 steps of
64 questions; at least 4.4 hours, a lower bound: the operations of the training
step alone, at the chips' peak speed; not measured.
"""

from recipe import full_size


def get_config():
    return full_size("nq", "frozen_sequence")
