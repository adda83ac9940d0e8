"""The null document (the paper's appendix F): a candidate for answering without any passage."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from rag_jax.models.layers import embedding_init
from rag_jax.models.parameters import parameter
from rag_jax.models.products import Linear


class NullDocument(nn.Module):
    """The null document's score float32[B] from query vectors float32[B, E].

    Appendix F names three kinds, without sizes or initial values: "embedding" = the inner product
    of the query with a learned document embedding; "bias" = a learned number; "mlp" = a network
    with one hidden layer, of width E here, on the query.
    """

    kind: str

    @nn.compact
    def __call__(self, queries: jax.Array) -> jax.Array:
        width = queries.shape[-1]
        if self.kind == "embedding":
            return queries @ parameter(
                self, "embedding", (width,), ("retrieval",), embedding_init)
        if self.kind == "bias":
            bias = parameter(self, "bias", (), (), nn.initializers.zeros)
            return jnp.broadcast_to(bias, queries.shape[:1])
        hidden = jnp.tanh(Linear(width, ("retrieval", "mlp"), name="hidden")(queries))
        return Linear(1, ("mlp", "retrieval"), name="score")(hidden)[:, 0]
