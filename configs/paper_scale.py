"""The paper's main experiment: BERT-base and BART-large over Wikipedia, on a TPU slice.

    python -m rag_jax.compile_report --config=configs/paper_scale.py --topology=v5e:2x4

Both models of Natural Questions by the recipe of table 1 (configs/paper.py), split over a slice:
what each program needs there. tpu_scripts/natural_questions.sh trains the two, each by its own
cell (configs/paper.py:table1/nq/rag_token and .../rag_sequence), as they answer differently, and so
choose their best checkpoints.

Hardware: a v4-8 or v5e-8 slice, or larger; tpu_scripts/README.md has memory, time and cost.
"""

import dataclasses

from paper import full_size

from rag_jax.config import MeshConfig


def get_config():
    config = full_size("nq", "rag_token")
    return dataclasses.replace(
        config, runs=("rag_token", "rag_sequence"), mesh=MeshConfig(fsdp=4),
        eval=dataclasses.replace(config.eval, batch_size=16))
