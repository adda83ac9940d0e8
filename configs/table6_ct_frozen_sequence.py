r"""Table 6, CuratedTREC, RAG-Sequence, frozen retriever: 52.6 EM on dev.

    python -m rag_jax.convert --from=runs/paper/nq --run=frozen_sequence \
        --to=runs/paper/nq/exported_frozen_sequence
    python -m rag_jax.train --config=configs/table6_ct_frozen_sequence.py \
        --workdir=runs/paper/ct_frozen_sequence

Hardware: a TPU v4-8 with a 500 GB disk (tpu_scripts/README.md). Time: 2,114 steps of
64 questions; at least 0.1 hours, a lower bound: the operations of the training
step alone, at the chips' peak speed; not measured.
"""

from recipe import full_size


def get_config():
    return full_size("ct", "frozen_sequence")
