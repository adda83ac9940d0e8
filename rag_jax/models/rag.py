"""The towers as one model, and the vectors and scales that its encoders give.

Parameters are a tree {"query_encoder", "document_encoder", "generator"}, with "null_document",
"classifier" and "fusion" where the model has them. Functions take the model first, then this tree
or the part of it that they need. Retrieval happens elsewhere: passages arrive in a `Batch`, as
token ids and embeddings or BM25 scores.
"""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from rag_jax import marginal
from rag_jax.config import BertConfig, GeneratorConfig
from rag_jax.fusion import Fusion
from rag_jax.models.bart import ClassificationHead
from rag_jax.models.dpr import DprEncoder
from rag_jax.models.generator import Generator, build
from rag_jax.models.null_document import NullDocument
from rag_jax.types import Params

TOWERS = ("query_encoder", "document_encoder", "generator")
NULL = "null_document"
CLASSIFIER = "classifier"
FUSION = "fusion"
SCALE = "scale"  # in the query encoder's parameters: log of the learned factor of `query_scale`


@dataclasses.dataclass(frozen=True)
class RagModel:
    """Architecture and special tokens; hashable, so that it can be a static jit argument.

    Attributes:
      kind: one of `marginal.MARGINALS`.
      start_id: the generator's first input token (BART's decoder_start_token_id, </s>).
      null_document: "none", or the kind of its score; see `NullDocument`.
      lexical: BM25 scores the passages, and there are no encoders.
      classes: the number of classes of a classifier, whose answers are class numbers; 0 = answers
        are texts.
      fusion: how BM25's scores of the passages are combined with the inner products; None = there
        are no such scores.
      reranked: a cross-encoder gives the logits of p(z | x); it is no part of this model.

    Raises:
      ValueError: there is no such kind.
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
        """Whether retrieval needs the questions' texts besides their vectors."""
        return not self.lexical and (self.fusion is not None or self.reranked)

    @property
    def towers(self) -> tuple[str, ...]:
        """The keys of this model's parameters; each is trained or frozen as a whole."""
        towers = ("generator",) if self.lexical else TOWERS
        towers += (NULL,) * (self.null_document != "none")
        towers += (CLASSIFIER,) * (self.classes > 0)
        return towers + (FUSION,) * (self.fusion is not None and self.fusion.learned)

    @property
    def fuses(self) -> bool:
        """Whether the decoder reads the K passages of a question as one document."""
        return self.kind == "fid"

    @property
    def encoder_module(self) -> DprEncoder:
        return DprEncoder(self.retriever)

    @property
    def generator_module(self) -> Generator:
        return build(self.generator)

    @property
    def packs(self) -> bool:
        """Whether the generator can read packed inputs (`Batch.source_places`)."""
        return getattr(self.generator_module, "packs", False)

    @property
    def embedding_width(self) -> int:
        return self.retriever.projection or self.retriever.width

    @property
    def classifier_module(self) -> ClassificationHead:
        return ClassificationHead(self.generator, self.classes)

    def init(self, key: jax.Array, towers: tuple[str, ...] | None = None) -> Params:
        """Initial parameters of `towers` (None = all), boxed with their logical axis names."""
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
        """The shapes of what `init` returns, boxed alike. The tree is cached: do not change it."""
        return _shapes(self, towers)


@functools.lru_cache(maxsize=256)  # tracing takes long
def _shapes(model: RagModel, towers: tuple[str, ...] | None) -> Params:
    return jax.eval_shape(lambda: model.init(jax.random.key(0), towers))


def embed(model: RagModel, encoder_params: Params, ids: jax.Array, mask: jax.Array,
          dropout_key: jax.Array | None = None) -> jax.Array:
    """Embeddings float32[R, E] of questions or passages, by the encoder with these parameters.

    Args:
      ids: int32[R, L].
      mask: bool[R, L], True where there are tokens.
      dropout_key: None = no dropout.
    """
    return model.encoder_module.apply(
        {"params": encoder_params}, ids, mask, deterministic=dropout_key is None,
        rngs=rngs(dropout_key),
    )


def query_scale(model: RagModel, query_encoder: Params) -> jax.Array | float:
    """The factor of query vectors that makes their inner products the logits of p(z | x)."""
    scale = model.retriever.logit_scale
    return scale * jnp.exp(query_encoder[SCALE]) if SCALE in query_encoder else scale


def word_weight(model: RagModel, params: Params) -> jax.Array | float:
    """The weight of BM25's scores in their convex combination with inner products, learned or
    fixed; 0 without fusion."""
    if FUSION in params:
        return jax.nn.sigmoid(params[FUSION]["logit"])
    return 0.0 if model.fusion is None else model.fusion.weight


def embed_queries(model: RagModel, query_encoder: Params, ids: jax.Array, mask: jax.Array,
                  dropout_key: jax.Array | None = None) -> jax.Array:
    """Query vectors float32[R, E]: embeddings times `query_scale`."""
    return embed(model, query_encoder, ids, mask, dropout_key) * query_scale(model, query_encoder)


def rngs(dropout_key: jax.Array | None) -> dict[str, jax.Array] | None:
    """What `nn.Module.apply` takes as `rngs`; None = no dropout."""
    return None if dropout_key is None else {"dropout": dropout_key}
