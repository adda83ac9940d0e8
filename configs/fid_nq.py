r"""Fusion-in-Decoder on Natural Questions: 51.4 EM on test by T5-large, 48.2 by T5-base.

    python -m rag_jax.train --config=configs/fid_nq.py --workdir=runs/paper/fid_nq

Those are the published scores (Izacard & Grave 2021, table 1); with BART-large, as here, there is
none. The settings are theirs: 100 passages, 10,000 steps of 64 questions at a constant 1e-4, greedy
answers; the passages are those that DPR finds.

Hardware: a TPU v4-8 with a 500 GB disk (tpu_scripts/README.md). Time: 10,000 steps of
64 questions; at least 6.1 hours, a lower bound: the operations of the training
step alone, at the chips' peak speed; not measured.
"""

import dataclasses

from paper import full_size


def get_config():
    config = full_size("nq", "fid")
    optimizer = dataclasses.replace(config.train.optimizer, learning_rate=1e-4,
                                    schedule="constant", warmup_steps=0, weight_decay=0.0,
                                    clip_norm=1.0, accumulate=4)
    return dataclasses.replace(
        config,
        retrieval=dataclasses.replace(config.retrieval, k=100),
        train=dataclasses.replace(config.train, steps=10_000, eval_every=500, label_smoothing=0.0,
                                  optimizer=optimizer),
        eval=dataclasses.replace(config.eval, k=100, batch_size=8))
