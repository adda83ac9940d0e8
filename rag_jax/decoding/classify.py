"""Classification with a generator (the paper's FEVER): p(class | x) over a set of labels."""

import jax
import jax.numpy as jnp

from rag_jax.decoding.documents import Documents
from rag_jax.decoding.results import Decoded
from rag_jax.decoding.scoring import score
from rag_jax.decoding.settings import Decoding
from rag_jax.models import rag
from rag_jax.types import Params


def decode(model: rag.RagModel, params: Params, documents: Documents, settings: Decoding
           ) -> Decoded:
    """All of settings.labels, the most probable first, documents summed out as in the model's kind.

    The answers' log_p is log p(class | x), normalised over the labels; their token_log_p are the
    model's own and sum to log p(label's tokens | x). Labels of one token give the same result for
    RAG-Token and RAG-Sequence (section 2.1).
    """
    labels = settings.labels
    length = max(map(len, labels))
    rows = [[*label, *[model.pad_id] * (length - len(label))] for label in labels]
    shape = (documents.log_prior.shape[0], len(rows), length)
    tokens = jnp.broadcast_to(jnp.array(rows, jnp.int32)[None], shape)
    lengths = jnp.array([len(label) for label in labels])
    mask = jnp.broadcast_to((jnp.arange(length)[None] < lengths[:, None])[None], shape)
    given = score(model, params, documents, tokens, mask, settings.memory_mib)
    given = given._replace(log_p=jax.nn.log_softmax(given.log_p, axis=-1))
    order = jnp.argsort(-given.log_p, axis=1)
    row = jnp.arange(shape[0])[:, None]
    ranked = jax.tree.map(lambda x: x[row, order], given)
    everything = jnp.ones(shape[0], bool)  # no class is left out
    return Decoded(ranked, jnp.exp(documents.log_prior), everything,
                   jnp.full(shape[0], -jnp.inf))
