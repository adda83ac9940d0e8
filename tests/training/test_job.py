"""What names a document encoder, by which an index belongs to it."""

import dataclasses

import numpy as np

from rag_jax.config import BartConfig, BertConfig
from rag_jax.models import rag
from rag_jax.training import job


def test_the_fingerprint_of_an_encoder_does_not_depend_on_the_version():
    """Fields of a config in another order made every index there was one of another encoder."""
    encoder = BertConfig(vocab_size=7, width=4, heads=2, layers=1, dtype="bfloat16")
    model = rag.RagModel(encoder, BartConfig(), "token", 2, 2, 1, "none", False, 0)
    params = {"embedding": np.arange(6, dtype=np.float32).reshape(2, 3)}
    assert job.fingerprint(model, params) == "3625c0ad0f23f7f4"
    wider = dataclasses.replace(model, retriever=dataclasses.replace(encoder, mlp_width=8))
    assert job.fingerprint(wider, params) != job.fingerprint(model, params)
    assert set(job._ARCHITECTURE) == {field.name for field in dataclasses.fields(BertConfig)}
