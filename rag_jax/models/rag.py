"""The towers as one model, and pure functions over their parameters.

Parameters are {"query_encoder", "document_encoder", "generator"} and, where there is one,
"null_document", "classifier" and "fusion"; every function takes the tree (or the part that it
needs) first. Retrieval itself happens elsewhere: passages arrive as token rows and embeddings, or
BM25 scores, in a `Batch`.

What a kind of model makes of K passages is what its decoder tells apart: RAG-Token and
RAG-Sequence have K documents with p(z | x), and sum them out. Fusion-in-Decoder (Izacard & Grave
2021, arXiv 2007.01282) encodes each passage alone, too, but its decoder attends to all of them at
once: one document, K times as long, with probability 1.
"""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from rag_jax import marginal
from rag_jax.config import BertConfig, GeneratorConfig
from rag_jax.fusion import Fusion
from rag_jax.marginal import MASKED
from rag_jax.models import vocabulary
from rag_jax.models.attention import ATTENDED
from rag_jax.models.bart import ClassificationHead
from rag_jax.models.dpr import DprEncoder
from rag_jax.models.generator import Generator, build
from rag_jax.models.null_document import NullDocument
from rag_jax.models.packing import Packing
from rag_jax.types import Batch, Params

TOWERS = ("query_encoder", "document_encoder", "generator")
NULL = "null_document"
CLASSIFIER = "classifier"
FUSION = "fusion"
SCALE = "scale"  # of the query encoder's parameters: log of what config.scale is multiplied by


@dataclasses.dataclass(frozen=True)
class RagModel:
    """Architecture and special tokens; hashable, so that it can be a static jit argument.

    kind: one of `marginal.MARGINALS`.
    start_id: the generator's first input token (BART's decoder_start_token_id, </s>).
    null_document: "none", or the kind of its score; see `NullDocument`.
    lexical: BM25 scores the passages, and there are no encoders.
    classes: how many a classifier tells apart, its answers being their numbers; 0 = answers are
      texts.
    fusion: how BM25's scores of the passages are joined to the inner products; None = they are not.
    reranked: a cross-encoder, which is no part of it, gives the logits of p(z | x).
    """

    retriever: BertConfig
    generator: GeneratorConfig
    kind: str
    start_id: int
    end_id: int
    pad_id: int
    null_document: str = "none"
    lexical: bool = False
    classes: int = 0
    fusion: Fusion | None = None
    reranked: bool = False

    def __post_init__(self):
        if self.kind not in marginal.MARGINALS:
            raise ValueError(f"kind={self.kind!r}: one of {', '.join(marginal.MARGINALS)}")

    @property
    def asks_with_texts(self) -> bool:
        """An index is asked with vectors and with the questions' texts."""
        return not self.lexical and (self.fusion is not None or self.reranked)

    @property
    def towers(self) -> tuple[str, ...]:
        """The towers of this model: parts of its parameters that train or not."""
        towers = ("generator",) if self.lexical else TOWERS
        towers += (NULL,) * (self.null_document != "none")
        towers += (CLASSIFIER,) * (self.classes > 0)
        return towers + (FUSION,) * (self.fusion is not None and self.fusion.learned)

    @property
    def fuses(self) -> bool:
        """The decoder reads the K passages of a question as one document."""
        return self.kind == "fid"

    @property
    def encoder_module(self) -> DprEncoder:
        return DprEncoder(self.retriever)

    @property
    def generator_module(self) -> Generator:
        return build(self.generator)

    @property
    def packs(self) -> bool:
        """The generator can read what `Batch.source_places` names, without padding."""
        return getattr(self.generator_module, "packs", False)

    @property
    def embedding_width(self) -> int:
        return self.retriever.projection or self.retriever.width

    @property
    def classifier_module(self) -> ClassificationHead:
        return ClassificationHead(self.generator, self.classes)

    def init(self, key: jax.Array, towers: tuple[str, ...] | None = None) -> Params:
        """Fresh parameters of `towers` (all by default), boxed with their logical axis names."""
        ids, mask = jnp.zeros((1, 4), jnp.int32), jnp.ones((1, 4), bool)
        modules = {
            "query_encoder": (self.encoder_module, ids, mask),
            "document_encoder": (self.encoder_module, ids, mask),
            "generator": (self.generator_module, ids, mask, ids),
            NULL: (NullDocument(self.null_document), jnp.zeros((1, self.embedding_width))),
            CLASSIFIER: (self.classifier_module, jnp.zeros((1, self.generator.width))),
        }
        params = {}
        for tower in self.towers if towers is None else towers:
            if tower == FUSION:  # w = sigmoid(logit)
                logit = jax.scipy.special.logit(jnp.float32(self.fusion.weight))
                params[FUSION] = {"logit": nn.LogicallyPartitioned(logit, ())}
                continue
            module, *inputs = modules[tower]
            tower_key = jax.random.fold_in(key, list(modules).index(tower))
            params[tower] = module.init(tower_key, *inputs)["params"]
        if self.retriever.learn_scale and "query_encoder" in params:
            params["query_encoder"][SCALE] = nn.LogicallyPartitioned(jnp.zeros(()), ())
        return params

    def shapes(self, towers: tuple[str, ...] | None = None) -> Params:
        """Shapes of what `init` makes, boxed likewise; not to be changed."""
        return _shapes(self, towers)


@functools.lru_cache(maxsize=256)  # a job asks for those of few models, and tracing takes long
def _shapes(model: RagModel, towers: tuple[str, ...] | None) -> Params:
    return jax.eval_shape(lambda: model.init(jax.random.key(0), towers))


def embed(model: RagModel, encoder_params: Params, ids: jax.Array, mask: jax.Array,
          dropout_key: jax.Array | None = None) -> jax.Array:
    """Embeddings float32[R, E] of questions or passages by one encoder's parameters."""
    return model.encoder_module.apply(
        {"params": encoder_params}, ids, mask, deterministic=dropout_key is None,
        rngs=_rngs(dropout_key),
    )


def query_scale(model: RagModel, query_encoder: Params) -> jax.Array | float:
    """What query vectors are multiplied by, so that their products are the logits of p(z | x)."""
    scale = model.retriever.logit_scale
    return scale * jnp.exp(query_encoder[SCALE]) if SCALE in query_encoder else scale


def word_weight(model: RagModel, params: Params) -> jax.Array | float:
    """w, the weight of words in a convex combination with inner products: learned, or fixed; 0
    where there is none."""
    if FUSION in params:
        return jax.nn.sigmoid(params[FUSION]["logit"])
    return 0.0 if model.fusion is None else model.fusion.weight


def embed_queries(model: RagModel, query_encoder: Params, ids: jax.Array, mask: jax.Array,
                  dropout_key: jax.Array | None = None) -> jax.Array:
    """Query vectors float32[R, E]: embeddings times the scale of their inner products."""
    return embed(model, query_encoder, ids, mask, dropout_key) * query_scale(model, query_encoder)


def _rngs(key: jax.Array | None) -> dict[str, jax.Array] | None:
    return None if key is None else {"dropout": key}


def shift_right(target_ids: jax.Array, start_id: int) -> jax.Array:
    """Decoder input of a target: start_id, y_1, ..., y_{T-1}."""
    return jnp.concatenate(
        [jnp.full_like(target_ids[:, :1], start_id), target_ids[:, :-1]], axis=1)


def score_targets(params: Params, states: jax.Array, targets: jax.Array, config: GeneratorConfig,
                  label_smoothing: float = 0.0, together: int = 1) -> tuple[jax.Array, jax.Array]:
    """log p of the target tokens from decoder states, without keeping logits over V.

    Works on `config.logit_chunk` target positions at a time and, where there are more, recomputes
    their logits in the backward pass: no more than [R, chunk, V] live at a time.

    Args:
      params: the generator's.
      states: dtype[R, T, D];  targets: int32[R, T].
      config: the generator's.
      together: how many targets a row has, side by side: it may have so many times the positions.

    Returns:
      log p and what trains in its place under label smoothing, float32[R, T] each.
    """
    def score(states: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
        found = vocabulary.log_probs(
            *vocabulary.head(params), states.reshape(-1, states.shape[-1]), targets.reshape(-1),
            label_smoothing, length > chunk, config.logit_cap, config.end_tokens)
        return tuple(each.reshape(targets.shape) for each in found)

    length = targets.shape[1]
    chunk = -(-length // -(-length // (config.logit_chunk * together)))  # of about the same size
    pieces = [score(states[:, t : t + chunk], targets[:, t : t + chunk])
              for t in range(0, length, chunk)]
    log_p, smoothed = (jnp.concatenate(of, axis=1) for of in zip(*pieces, strict=True))
    return log_p, smoothed


def _decoder_states(model: RagModel, params: Params, ids: jax.Array, mask: jax.Array,
                    targets: jax.Array, dropout_key: jax.Array | None,
                    mutable: str | bool = False, **packed: jax.Array | None) -> Any:
    """Decoder states dtype[R, T, D] where targets int32[R, T] are forced, about sources [R, P, S];
    with the variables of a collection that is `mutable`.

    packed: places as for `Generator.states`, of which not every family knows; None = not packed.
    """
    packed = {name: places for name, places in packed.items() if places is not None}
    return model.generator_module.apply(
        {"params": params}, ids, mask, shift_right(targets, model.start_id), dropout_key is None,
        rngs=_rngs(dropout_key), mutable=mutable, method="states", **packed)


def _target_log_probs(model: RagModel, params: Params, ids: jax.Array, mask: jax.Array,
                      targets: jax.Array, dropout_key: jax.Array | None,
                      label_smoothing: float = 0.0, **packed: jax.Array | None
                      ) -> tuple[jax.Array, jax.Array]:
    """log p of targets int32[R, T] about sources [R, P, S], and what trains in its place under
    label smoothing, float32[R, T]; of packed targets, 0 where there is padding."""
    states = _decoder_states(model, params, ids, mask, targets, dropout_key, **packed)
    if packed.get("target_places") is None:
        return score_targets(params, states, targets, model.generator, label_smoothing)
    packing = Packing.of(packed["target_places"], *targets.shape)
    found = score_targets(params, states, packing.ids(targets), model.generator, label_smoothing,
                          len(targets) // len(states))
    return tuple(map(packing.padded, found))


def seq2seq_log_probs(model: RagModel, params: Params, source_ids: jax.Array,
                      source_mask: jax.Array, target_ids: jax.Array,
                      dropout_key: jax.Array | None = None, **packed: jax.Array | None
                      ) -> jax.Array:
    """log p(y_t | source, y_<t) of one generator, float32[R, T].

    packed: `places` of the sources and `target_places`, as for `Generator.states`, or None.
    """
    return _target_log_probs(model, params, source_ids[:, None], source_mask[:, None], target_ids,
                             dropout_key, **packed)[0]


def as_documents(model: RagModel, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """The batch's documents: ids int32[B*K, 1, S], question-major, of one passage each, and their
    mask; Fusion-in-Decoder: int32[B, K, S], and missing passages are masked.
    """
    if model.fuses:
        return batch.source_ids, batch.source_mask & batch.doc_mask[..., None]
    rows = (-1, 1, batch.source_ids.shape[-1])
    return batch.source_ids.reshape(rows), batch.source_mask.reshape(rows)


def document_prior(model: RagModel, log_prior: jax.Array) -> jax.Array:
    """log p of the documents that the decoder tells apart, from log p(z | x) float32[B, K].

    The same; or, for Fusion-in-Decoder, float32[B, 1]: 0, or MASKED without any passage.
    """
    if not model.fuses:
        return log_prior
    some = (log_prior > MASKED / 2).any(axis=-1, keepdims=True)
    return jnp.where(some, 0.0, MASKED)


def log_prior(model: RagModel, params: Params, batch: Batch,
              dropout_key: jax.Array | None = None) -> jax.Array:
    """log p(z | x) float32[B, K] with the gradient of the query encoder.

    With a null document it is float32[B, K + 1], and that is the last.
    """
    if model.reranked:
        return marginal.log_prior(batch.doc_scores, batch.doc_mask)
    if model.lexical:
        scores_BK = batch.doc_scores
        if scores_BK is None:  # a closed book
            scores_BK = jnp.zeros(batch.doc_mask.shape, jnp.float32)
        queries_BE = jnp.zeros((len(scores_BK), model.embedding_width))
        return _log_prior(model, params, batch, scores_BK,
                          _null_scores(model, params, queries_BE))
    queries_BE, passages_BKE = _vectors(model, params, batch, dropout_key)
    return _log_prior(model, params, batch, jnp.einsum("BE,BKE->BK", queries_BE, passages_BKE),
                      _null_scores(model, params, queries_BE))


def _log_prior(model: RagModel, params: Params, batch: Batch, doc_scores_BK: jax.Array,
               null_B: jax.Array | None) -> jax.Array:
    """`log_prior` from the inner products float32[B, K], or BM25's scores, and `_null_scores`."""
    doc_mask = batch.doc_mask
    if model.fusion is not None:
        doc_scores_BK = model.fusion.logits(
            doc_scores_BK, batch.doc_scores, word_weight(model, params), jnp)
    if null_B is not None:
        doc_scores_BK = jnp.concatenate([doc_scores_BK, null_B[:, None]], axis=1)  # -> [B, K + 1]
        doc_mask = jnp.pad(doc_mask, ((0, 0), (0, 1)), constant_values=True)
    return marginal.log_prior(doc_scores_BK, doc_mask)


def _null_scores(model: RagModel, params: Params, queries_BE: jax.Array) -> jax.Array | None:
    """float32[B], the null document's score beside the inner products of passages, if there is
    one."""
    if model.null_document == "none":
        return None
    return NullDocument(model.null_document).apply({"params": params[NULL]}, queries_BE)


def _log_prior_and_share(model: RagModel, params: Params, batch: Batch,
                         dropout_key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """`log_prior`, and `marginal.log_share` float32[B] of the question's own passages."""
    queries_BE, passages_BKE = _vectors(model, params, batch, dropout_key)
    doc_scores_BK = jnp.einsum("BE,BKE->BK", queries_BE, passages_BKE)
    batch_scores_BP = queries_BE @ passages_BKE.reshape(-1, passages_BKE.shape[-1]).T
    null_B = _null_scores(model, params, queries_BE)
    counted_BK = batch.doc_mask & (batch.weight > 0)[:, None]  # no row is others' negative else
    share_B = marginal.log_share(doc_scores_BK, batch_scores_BP, counted_BK, batch.doc_ids, null_B)
    return _log_prior(model, params, batch, doc_scores_BK, null_B), share_B


def _vectors(model: RagModel, params: Params, batch: Batch,
             dropout_key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Query vectors float32[B, E], and those of their passages float32[B, K, E].

    Where the batch has the passages' tokens, they are embedded here, with the gradient of the
    document encoder, in place of their embeddings of the index.
    """
    keys = (None, None) if dropout_key is None else (
        dropout_key, jax.random.fold_in(dropout_key, 1))
    queries_BE = embed_queries(model, params["query_encoder"], batch.question_ids,
                               batch.question_mask, keys[0])
    passages_BKE = batch.doc_embeddings
    if batch.passage_ids is not None:
        length = batch.passage_ids.shape[-1]
        fresh_RE = embed(model, params["document_encoder"], batch.passage_ids.reshape(-1, length),
                         batch.passage_mask.reshape(-1, length), keys[1])
        passages_BKE = fresh_RE.reshape(passages_BKE.shape)  # -> [B, K, E]
    return queries_BE, passages_BKE


def _documents(model: RagModel, batch: Batch) -> int:
    """How many documents of a question the decoder tells apart: K; 1 for Fusion-in-Decoder."""
    return 1 if model.fuses else batch.source_ids.shape[1]


def _of_documents(places: jax.Array, targets: int, length: int, documents: int) -> jax.Array:
    """Places int32[G, N * K] of the targets of K documents a question, question-major, from those
    int32[G, N] of so many targets in each group, of T tokens."""
    target, token = places[..., None] // length, places[..., None] % length
    document = target * documents + jnp.arange(documents)[None, None]  # -> [G, N, K]
    every, none = document * length + token, targets * documents * length
    return jnp.sort(jnp.minimum(every, none).reshape(len(places), -1), axis=1)


def class_logits(model: RagModel, params: Params, batch: Batch,
                 dropout_key: jax.Array | None = None) -> jax.Array:
    """Logits float32[B, K, Y] of the classes under each passage (Fusion-in-Decoder: [B, 1, Y]).

    As BART classifies sentences: the decoder reads </s> <s> question, and the head its last state.
    The encoder has read the passage with the question, as for an answer (appendix E).
    """
    documents = _documents(model, batch)
    states_RTD = _decoder_states(
        model, params["generator"], *as_documents(model, batch),
        jnp.repeat(batch.decoder_ids, documents, axis=0), dropout_key,
        places=batch.source_places)
    states_BKTD = states_RTD.reshape(-1, documents, *states_RTD.shape[1:])
    last_BT = batch.decoder_mask & ~jnp.pad(batch.decoder_mask[:, 1:], ((0, 0), (0, 1)))
    # A sum, not a look-up: it communicates nothing where the questions are split over devices.
    state_BKD = jnp.einsum("BKTD,BT->BKD", states_BKTD, last_BT.astype(states_BKTD.dtype))
    key = None if dropout_key is None else jax.random.fold_in(dropout_key, 1)
    return model.classifier_module.apply(
        {"params": params[CLASSIFIER]}, state_BKD, key is None, rngs=_rngs(key))


def token_log_probs(model: RagModel, params: Params, batch: Batch, label_smoothing: float = 0.0,
                    dropout_key: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """log p(y_t | x, z, y_<t) float32[B, K, T] of the batch's targets under each passage, and what
    trains in its place under label smoothing.

    Fusion-in-Decoder: [B, 1, T], under all of them. A classifier's one token is the class.
    """
    if model.classes:
        logits_BKTY = class_logits(model, params, batch, dropout_key)[:, :, None]  # T = 1
        classes = jnp.broadcast_to(batch.target_ids[:, None], logits_BKTY.shape[:3])
        log_p_BKT = smoothed_BKT = marginal.target_log_probs(logits_BKTY, classes)
        if label_smoothing:
            smoothed_BKT = marginal.target_log_probs(logits_BKTY, classes, label_smoothing)
        return log_p_BKT, smoothed_BKT
    count, length = batch.target_ids.shape
    documents, places = _documents(model, batch), batch.target_places
    if places is not None:
        places = _of_documents(places, count // len(places), length, documents)
    found = _target_log_probs(
        model, params["generator"], *as_documents(model, batch),
        jnp.repeat(batch.target_ids, documents, axis=0), dropout_key, label_smoothing,
        places=batch.source_places, target_places=places)
    return tuple(each.reshape(count, documents, length) for each in found)  # -> [B, K, T]


def attention_shares(model: RagModel, params: Params, batch: Batch) -> jax.Array:
    """Share of each passage in what Fusion-in-Decoder's decoder attends to, float32[B, K].

    Of weight times norm of the value (`attention.attended`), over all layers, heads, tokens of the
    answer and tokens of the passage, the question's among them. Without dropout and gradient.
    """
    ids, mask = ((batch.decoder_ids, batch.decoder_mask) if model.classes
                 else (batch.target_ids, batch.target_mask))
    _, found = _decoder_states(
        model, jax.lax.stop_gradient(params["generator"]), *as_documents(model, batch), ids, None,
        ATTENDED)
    layers = [leaf.reshape(-1, *ids.shape, *batch.source_ids.shape[1:]) for path, leaf
              in jax.tree_util.tree_leaves_with_path(found) if "'cross_attention'" in str(path)]
    attended_BK = sum(jnp.einsum("LBTKS,BT->BK", layer, mask.astype(layer.dtype))
                      for layer in layers)
    return attended_BK / jnp.maximum(attended_BK.sum(axis=-1, keepdims=True), 1e-30)


def _evidence(model: RagModel, params: Params, batch: Batch, objective: str,
              log_prior_BK: jax.Array, log_p_BKT: jax.Array) -> jax.Array:
    """What the generator says of each passage, float32[B, K], for `marginal.learn_from`.

    RAG's is from its likelihoods log_p_BKT; Fusion-in-Decoder reads once more, without dropout:
    each passage alone, or all but one, K times.
    """
    mask = batch.target_mask
    if objective == "adist":
        return jnp.log(jnp.maximum(attention_shares(model, params, batch), 1e-30))
    if objective == "loop" and not model.fuses:
        return -marginal.leave_one_out(model.kind, log_prior_BK, log_p_BKT, mask)
    if not model.fuses:
        return marginal.answer_log_probs(log_p_BKT, mask)
    params = jax.lax.stop_gradient(params)
    if objective != "loop":
        alone = dataclasses.replace(model, kind="token")
        return marginal.answer_log_probs(token_log_probs(alone, params, batch)[0], mask)
    places = jnp.arange(batch.doc_mask.shape[1])[None]

    def without(z: jax.Array) -> jax.Array:
        others = batch._replace(doc_mask=batch.doc_mask & (places != z))
        return -marginal.answer_log_probs(token_log_probs(model, params, others)[0], mask)[:, 0]

    return jax.lax.map(without, places[0]).T  # one after another: each reads K passages


def log_likelihood(model: RagModel, params: Params, batch: Batch, label_smoothing: float = 0.0,
                   dropout_key: jax.Array | None = None, retriever_objective: str = "marginal",
                   weigh_explained: bool = False, in_batch_negatives: bool = False
                   ) -> dict[str, jax.Array]:
    """The marginal log-likelihood and what explains it.

    retriever_objective: what else than the likelihood the retriever learns from, one of
      `marginal.learn_from`; prior and null document have its gradient alone, the others none of it.
    weigh_explained: the gradient to log p(z | x) is weighted, question by question, with how well
      the answer is explained. What a generator says of passages without the answer is noise, and
      most questions have no other passages where the retriever has much to learn.
    in_batch_negatives: the objective has p(z|x) over the passages of the whole batch
      (`marginal.log_share`); prior and posterior stay those over a question's own. Not where BM25
      or a reranker has a part in p(z|x): scores of other questions' passages are not known.

    Returns:
      log_p float32[B] = log p(y | x) in nats; prior float32[B, K] = p(z | x);
      posterior float32[B, K] = p(z | x, y), for RAG-Token the mean of the tokens' posteriors;
      Fusion-in-Decoder has none, and gives the objective's target, or the prior again.
      objective float32[B]: log_p of the smoothed targets, which is what training raises; the
      others are of the likelihood itself. An objective of the retriever is added to it, and is
      there as retriever_objective float32[B], too.
      explained float32[B], from `marginal.explained`.
      information float32[B], in nats: KL(p(z|x,y) || p(z|x)) of the whole answer's posterior,
      RAG-Sequence's, also for RAG-Token, whose tokens have one each; Fusion-in-Decoder's is that of
      its posterior above.
      With a null document these are [B, K + 1], and log_p_null float32[B] = log p(y | x, null).
    """
    keys = (None, None) if dropout_key is None else jax.random.split(dropout_key)
    share_B = jnp.zeros(len(batch.doc_mask))
    if in_batch_negatives and not (model.lexical or model.fusion or model.reranked):
        log_prior_BK, share_B = _log_prior_and_share(model, params, batch, keys[0])
    else:
        log_prior_BK = log_prior(model, params, batch, keys[0])
    log_p_BKT, smoothed_BKT = token_log_probs(model, params, batch, label_smoothing, keys[1])
    marginalise, mask = marginal.MARGINALS[model.kind], batch.target_mask
    log_p_B = marginalise(document_prior(model, log_prior_BK), log_p_BKT, mask)
    explained_B = jax.lax.stop_gradient(marginal.explained(log_p_B, mask))
    if weigh_explained:
        constant_BK = jax.lax.stop_gradient(log_prior_BK)
        log_prior_BK = constant_BK + explained_B[:, None] * (log_prior_BK - constant_BK)
        share_B = explained_B * share_B
    log_documents_BK = document_prior(model, log_prior_BK)
    result = {
        "log_p": log_p_B,
        "explained": explained_B,
        "objective": marginalise(log_documents_BK, smoothed_BKT, mask),
        "prior": jnp.exp(log_prior_BK),
        "posterior": (jnp.exp(log_prior_BK) if model.fuses else marginal.POSTERIORS[model.kind](
            log_documents_BK, log_p_BKT, mask)),
    }
    if retriever_objective != "marginal":
        evidence_BK = _evidence(model, params, batch, retriever_objective, log_prior_BK, log_p_BKT)
        learned_B, target_BK = marginal.learn_from(evidence_BK, retriever_objective, log_prior_BK)
        constant_BK = jax.lax.stop_gradient(log_documents_BK)
        result["objective"] = marginalise(constant_BK, smoothed_BKT, mask) + learned_B
        result["retriever_objective"] = learned_B
        if model.fuses:
            result["posterior"] = target_BK
    told_BK = result["posterior"] if model.fuses else marginal.sequence_posterior(
        log_prior_BK, log_p_BKT, mask)
    result["information"] = marginal.divergence(told_BK, result["prior"])
    result["objective"] += share_B
    if model.null_document != "none":
        result["log_p_null"] = jnp.where(mask, log_p_BKT[:, -1], 0.0).sum(axis=-1)
    return result
