"""A cross-encoder: BERT reads a question and a passage together and scores how well they match.

Source: Nogueira & Cho 2019, "Passage Re-ranking with BERT" (arXiv 1901.04085), with one output, as
in sentence-transformers' cross-encoders and BGE's rerankers.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from rag_jax.config import BertConfig
from rag_jax.models.bert import Bert
from rag_jax.models.products import Linear


class CrossEncoder(nn.Module):
    """Logits float32[R] of R pairs: out(tanh(dense(state of [CLS]))).

    __call__(ids int32[R, L], mask bool[R, L], token_types int32[R, L] | None). The dense layer is
    BERT's pooler; RoBERTa has the same as a part of its classification head.
    """

    config: BertConfig

    @nn.compact
    def __call__(self, ids: jax.Array, mask: jax.Array, token_types: jax.Array | None = None
                 ) -> jax.Array:
        c = self.config
        states = Bert(c, name="bert")(ids, mask, token_types, rows=1)[:, 0]
        hidden = jnp.tanh(Linear(c.width, ("embed", "retrieval"), jnp.dtype(c.dtype), c.init_std,
                                 name="dense")(states))
        return Linear(1, ("embed", "retrieval"), init_std=c.init_std, name="out")(hidden)[:, 0]
