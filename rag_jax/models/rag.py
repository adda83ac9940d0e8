"""The three towers as one model, and pure functions over their parameters.

Parameters are {"query_encoder", "document_encoder", "generator"} and, where there is one,
"null_document"; every function takes the tree (or the part that it needs) first. Retrieval itself
happens elsewhere: passages arrive as token rows and embeddings, or BM25 scores, in a `Batch`.
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from rag_jax import marginal
from rag_jax.config import BartConfig, BertConfig
from rag_jax.models.bart import Bart, tied_logits
from rag_jax.models.dpr import DprEncoder
from rag_jax.models.null_document import NullDocument
from rag_jax.types import Batch, Params

TOWERS = ("query_encoder", "document_encoder", "generator")
NULL = "null_document"


@dataclasses.dataclass(frozen=True)
class RagModel:
    """Architecture and special tokens; hashable, so that it can be a static jit argument.

    start_id: the generator's first input token (BART's decoder_start_token_id, </s>).
    null_document: "none", or the kind of its score; see `NullDocument`.
    lexical: BM25 scores the passages, and there are no encoders.
    """

    retriever: BertConfig
    generator: BartConfig
    kind: str
    start_id: int
    end_id: int
    pad_id: int
    null_document: str = "none"
    lexical: bool = False

    @property
    def towers(self) -> tuple[str, ...]:
        """The towers of this model: parts of its parameters that train or not."""
        towers = ("generator",) if self.lexical else TOWERS
        return towers if self.null_document == "none" else (*towers, NULL)

    @property
    def encoder_module(self) -> DprEncoder:
        return DprEncoder(self.retriever)

    @property
    def generator_module(self) -> Bart:
        return Bart(self.generator)

    @property
    def embedding_width(self) -> int:
        return self.retriever.projection or self.retriever.width

    def init(self, key: jax.Array, towers: tuple[str, ...] | None = None) -> Params:
        """Fresh parameters of `towers` (all by default), boxed with their logical axis names."""
        ids, mask = jnp.zeros((1, 4), jnp.int32), jnp.ones((1, 4), bool)
        params = {}
        for tower in self.towers if towers is None else towers:
            tower_key = jax.random.fold_in(key, (*TOWERS, NULL).index(tower))
            if tower == "generator":
                variables = self.generator_module.init(tower_key, ids, mask, ids)
            elif tower == NULL:
                queries = jnp.zeros((1, self.embedding_width))
                variables = NullDocument(self.null_document).init(tower_key, queries)
            else:
                variables = self.encoder_module.init(tower_key, ids, mask)
            params[tower] = variables["params"]
        return params


def embed(model: RagModel, encoder_params: Params, ids: jax.Array, mask: jax.Array,
          dropout_key: jax.Array | None = None) -> jax.Array:
    """Embeddings float32[R, E] of questions or passages by one encoder's parameters."""
    return model.encoder_module.apply(
        {"params": encoder_params}, ids, mask, deterministic=dropout_key is None,
        rngs=_rngs(dropout_key),
    )


def _rngs(key: jax.Array | None) -> dict[str, jax.Array] | None:
    return None if key is None else {"dropout": key}


def shift_right(target_ids: jax.Array, start_id: int) -> jax.Array:
    """Decoder input of a target: start_id, y_1, ..., y_{T-1}."""
    return jnp.concatenate(
        [jnp.full_like(target_ids[:, :1], start_id), target_ids[:, :-1]], axis=1)


def score_targets(params: Params, states: jax.Array, targets: jax.Array, chunk: int,
                  label_smoothing: float = 0.0) -> jax.Array:
    """log p of the target tokens from decoder states, without keeping logits over V.

    Works on `chunk` target positions at a time and recomputes their logits in the
    backward pass, so that no [R, T, V] array lives between forward and backward.

    Args:
      params: the generator's.
      states: dtype[R, T, D];  targets: int32[R, T].

    Returns:
      float32[R, T].
    """

    @jax.checkpoint
    def score(embedding: jax.Array, bias: jax.Array, states: jax.Array, targets: jax.Array):
        logits = tied_logits(embedding, bias, states)
        return marginal.target_log_probs(logits, targets, label_smoothing)

    head = (params["embedding"], params["final_logits_bias"])
    pieces = [score(*head, states[:, t : t + chunk], targets[:, t : t + chunk])
              for t in range(0, targets.shape[1], chunk)]
    return jnp.concatenate(pieces, axis=1)


def seq2seq_log_probs(model: RagModel, params: Params, source_ids: jax.Array,
                      source_mask: jax.Array, target_ids: jax.Array,
                      label_smoothing: float = 0.0, dropout_key: jax.Array | None = None
                      ) -> jax.Array:
    """log p(y_t | source, y_<t) of one generator, float32[R, T]."""
    module, deterministic = model.generator_module, dropout_key is None

    def states(bart: Bart, *arguments: Any) -> jax.Array:
        ids, mask, decoder_ids = arguments
        encoded = bart.encode(ids, mask, deterministic)
        return bart.decode(encoded, mask, decoder_ids, deterministic)

    hidden = nn.apply(states, module)(
        {"params": params}, source_ids, source_mask, shift_right(target_ids, model.start_id),
        rngs=_rngs(dropout_key),
    )
    return score_targets(params, hidden, target_ids, model.generator.logit_chunk, label_smoothing)


def log_prior(model: RagModel, params: Params, batch: Batch,
              dropout_key: jax.Array | None = None) -> jax.Array:
    """log p(z | x) float32[B, K] with the gradient of the query encoder.

    With a null document it is float32[B, K + 1], and that is the last.
    """
    if model.lexical:
        queries = jnp.zeros((len(batch.doc_scores), model.embedding_width))
        doc_scores = batch.doc_scores
    else:
        queries, doc_scores = _inner_products(model, params, batch, dropout_key)
    doc_mask = batch.doc_mask
    if model.null_document != "none":
        null = NullDocument(model.null_document).apply(
            {"params": params[NULL]}, queries)
        doc_scores = jnp.concatenate([doc_scores, null[:, None]], axis=1)
        doc_mask = jnp.pad(doc_mask, ((0, 0), (0, 1)), constant_values=True)
    return marginal.log_prior(doc_scores, doc_mask)


def _inner_products(model: RagModel, params: Params, batch: Batch,
                    dropout_key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Query vectors float32[B, E], and their products with the passages float32[B, K].

    Where the batch has the passages' tokens, their embeddings of now, with the gradient of the
    document encoder, replace those of the index.
    """
    keys = (None, None) if dropout_key is None else (
        dropout_key, jax.random.fold_in(dropout_key, 1))
    queries = embed(model, params["query_encoder"], batch.question_ids, batch.question_mask,
                    keys[0])
    embeddings = batch.doc_embeddings
    if batch.passage_ids is not None:
        length = batch.passage_ids.shape[-1]
        fresh = embed(model, params["document_encoder"], batch.passage_ids.reshape(-1, length),
                      batch.passage_mask.reshape(-1, length), keys[1])
        embeddings = fresh.reshape(embeddings.shape)  # -> [B, K, E]
    return queries, jnp.einsum("BE,BKE->BK", queries, embeddings)


def token_log_probs(model: RagModel, params: Params, batch: Batch, label_smoothing: float = 0.0,
                    dropout_key: jax.Array | None = None) -> jax.Array:
    """log p(y_t | x, z, y_<t) float32[B, K, T] of the batch's targets under each passage."""
    questions, passages, _ = batch.source_ids.shape
    log_p = seq2seq_log_probs(
        model, params["generator"],
        batch.source_ids.reshape(questions * passages, -1),  # -> [B*K, S]
        batch.source_mask.reshape(questions * passages, -1),
        jnp.repeat(batch.target_ids, passages, axis=0),
        label_smoothing, dropout_key,
    )
    return log_p.reshape(questions, passages, -1)  # -> [B, K, T]


def log_likelihood(model: RagModel, params: Params, batch: Batch, label_smoothing: float = 0.0,
                   dropout_key: jax.Array | None = None) -> dict[str, jax.Array]:
    """The marginal log-likelihood and what explains it.

    Returns:
      log_p float32[B] = log p(y | x) in nats; prior float32[B, K] = p(z | x);
      posterior float32[B, K] = p(z | x, y), for RAG-Token the mean of the tokens' posteriors.
      With a null document these are [B, K + 1], and log_p_null float32[B] = log p(y | x, null).
    """
    keys = (None, None) if dropout_key is None else jax.random.split(dropout_key)
    prior = log_prior(model, params, batch, keys[0])
    log_p = token_log_probs(model, params, batch, label_smoothing, keys[1])
    if model.kind == "sequence":
        posterior = marginal.sequence_posterior(prior, log_p, batch.target_mask)
    else:
        posterior = marginal.mean_token_posterior(prior, log_p, batch.target_mask)
    found = {
        "log_p": marginal.MARGINALS[model.kind](prior, log_p, batch.target_mask),
        "prior": jnp.exp(prior),
        "posterior": posterior,
    }
    if model.null_document != "none":
        found["log_p_null"] = jnp.where(batch.target_mask, log_p[:, -1], 0.0).sum(axis=-1)
    return found
