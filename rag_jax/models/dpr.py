"""DPR towers (Karpukhin et al. 2020, arXiv 2004.04906): BERT, its [CLS] state, a projection."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from rag_jax.config import BertConfig
from rag_jax.models.bert import Bert
from rag_jax.models.layers import Linear


class DprEncoder(nn.Module):
    """Query or document tower: float32[R, E] = projection([CLS] state of BERT).

    E is `config.projection`, or D without a projection (0). The query and document encoder are
    two instances with parameters of their own. There is no pooler (dense + tanh), as in the
    released DPR checkpoints.
    """

    config: BertConfig

    @nn.compact
    def __call__(self, ids: jax.Array, mask: jax.Array, token_types: jax.Array | None = None,
                 deterministic: bool = True) -> jax.Array:
        states = Bert(self.config, name="bert")(ids, mask, token_types, deterministic, rows=1)
        cls = states[:, 0]
        if self.config.projection:
            cls = Linear(
                self.config.projection, ("embed", "retrieval"), jnp.dtype(self.config.dtype),
                self.config.init_std, name="projection",
            )(cls)
        return cls.astype(jnp.float32)
