"""python -m rag_jax.compile_report for a small variant of configs/paper_scale.py on eight devices.

The bounds are what was measured, rounded up: a sharding that gets lost costs much more.
"""

import itertools
import json

import jax
import pytest

from rag_jax import compile_report, parallel
from rag_jax.aot import programs
from rag_jax.config import ConfigError
from rag_jax.flags import ROOT, make_parser, parse_with_config

PAPER = f"--config={ROOT}/configs/paper_scale.py"
# No size of a state is one of a parameter here, whole or split.
B, K, S, T, L, D, F, V = 24, 3, 56, 10, 18, 32, 80, 88
SMALL = [
    PAPER, "--config.mesh.data=4", "--config.mesh.fsdp=2", f"--config.train.batch_size={B}",
    f"--config.retrieval.k={K}", f"--config.data.max_question_length={L}",
    f"--config.data.max_source_length={S}", f"--config.data.max_target_length={T}",
    "--config.data.max_passage_length=40", "--config.retrieval.embed_batch_size=8",
    "--config.eval.batch_size=8", "--config.retrieval.device_dtype=bfloat16",
    *(f"--config.model.{tower}.{field}={value}" for tower, fields in {
        "retriever": {"vocab_size": 64, "layers": 3},
        "generator": {"vocab_size": V, "encoder_layers": 3, "decoder_layers": 3},
    }.items() for field, value in {**fields, "width": D, "heads": 2, "mlp_width": F,
                                   "max_positions": 64}.items())]
