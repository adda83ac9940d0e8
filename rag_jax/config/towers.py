"""The configuration of encoders and generators: their architecture, and where weights come from."""

import dataclasses
from typing import Any, Literal


def field(default: Any, doc: str, *, at_least: float | None = None,
          at_most: float | None = None) -> Any:
    """A dataclass field with its help text and its bounds, which do not hold for None."""
    return dataclasses.field(default=default, metadata={
        "doc": doc, "at_least": at_least, "at_most": at_most})


def section(cls: type) -> Any:
    return dataclasses.field(default_factory=cls)


TRAINED_SCALE = 20.0  # of cosines in the loss that sentence-transformers trains with by default
SOURCE = ("Hugging Face name, checkpoint folder, or workdir (its tower from before its runs "
          "trained); it sets the architecture and, unless others are named, the tokenizer; empty = "
          "from scratch")


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """The fields of every tower; the defaults are those of BERT's and BART's base models."""

    pretrained: str = field("", SOURCE)
    width: int = field(768, "model width D", at_least=1)
    heads: int = field(12, "attention heads; must divide width", at_least=1)
    mlp_width: int = field(3072, "feed-forward width F", at_least=1)
    activation: Literal["gelu", "relu"] = field("gelu", "feed-forward activation (exact GELU)")
    dropout: float = field(0.1, "dropout of hidden states", at_least=0, at_most=1)
    position_init: Literal["normal", "sinusoidal"] = field(
        "normal", "initial position table of a BERT or a BART, trained from scratch")
    dtype: Literal["float32", "bfloat16"] = field(
        "float32", "type of matrix products; softmax and norms stay float32")
    remat: Literal["none", "dots", "narrow", "full"] = field(
        "none", "recompute in the backward pass: nothing; all but products (dots); these too where "
        "they are wider than their input (narrow); all. python -m rag_jax.compile_report --remat "
        "tells what fits")
    fused_attention: bool = field(True, "bfloat16 on GPUs and TPUs: attention as one kernel, where "
                                  "there is one and no attention weights are dropped")
    scan_layers: bool = field(False, "one scan over stacked layer parameters (compiles faster)")
    init_std: float = field(0.02, "initial std of kernels, when trained from scratch", at_least=0)


@dataclasses.dataclass(frozen=True)
class BertConfig(TransformerConfig):
    """BERT and its relatives, and the encoders built on them; the defaults are bert-base-uncased,
    as DPR has it. Where a field is auto or none, a sentence encoder's folder decides."""

    pretrained: str = field("", "sentence encoder, BERT or its kin, or workdir, that both encoders "
                           "start from: " + SOURCE)
    vocab_size: int = field(30522, "rows of the token table; 0 = the tokenizer's size", at_least=0)
    max_positions: int = field(512, "longest input in tokens", at_least=1)
    model_type: Literal["bert", "roberta", "xlm-roberta", "modernbert"] = field(
        "bert", "Hugging Face's name of the architecture; RoBERTa's are BERT's with positions that "
        "count from 2; local_attention to rope_local_theta are fields of ModernBERT")
    local_attention: int = field(128, "tokens that a local layer sees around each", at_least=2)
    global_every: int = field(3, "layers from one global layer to the next", at_least=1)
    rope_theta: float = field(160_000.0, "base of the rotary positions of global layers",
                              at_least=1)
    rope_local_theta: float = field(10_000.0, "the same of local layers", at_least=1)
    type_vocab_size: int = field(2, "rows of the token type table", at_least=1)
    layers: int = field(12, "transformer layers", at_least=1)
    attention_dropout: float = field(0.1, "dropout of attention weights", at_least=0, at_most=1)
    layer_norm_eps: float = field(1e-12, "epsilon of LayerNorm", at_least=0)
    projection: int = field(0, "width E of a projection of [CLS] or the mean; 0 = none, E = D",
                            at_least=0)
    projection_tanh: bool = field(False, "tanh of what is projected")
    pooling: Literal["auto", "cls", "mean"] = field(
        "auto", "what becomes a text's vector: the last state of [CLS], or the mean of the last "
        "states of all tokens; auto = as the encoder's folder says (sentence-transformers), else "
        "cls")
    normalize: bool | None = field(None, "vectors of length 1; none = as its folder says, else "
                                   "false")
    scale: float | None = field(
        None, "inner products times this are the logits of p(z|x); none = as its folder says, else "
        f"{TRAINED_SCALE:g} for vectors of length 1, whose softmax would be flat otherwise, and 1 "
        "for others", at_least=1e-6)
    learn_scale: bool = field(False, "the scale trains with the query encoder")
    query_prefix: str | None = field(None, "stands before every question that is encoded; none = "
                                     "as its folder says, else nothing")
    passage_prefix: str | None = field(None, "the same of passages")
    titles: Literal["auto", "separate", "joined"] = field(
        "auto", "passages are encoded as [CLS] title [SEP] text [SEP], as DPR does; or joined, as "
        "one text; auto = joined where its folder is of sentence-transformers, else separate")

    @property
    def first_position(self) -> int:
        """The row of the position table that a text's first token reads; in RoBERTa's, <pad> = 1
        has row 1, and words follow it."""
        return 2 if self.model_type in ("roberta", "xlm-roberta") else 0

    @property
    def second_type(self) -> int:
        """The token type of the second of two texts that are read together."""
        return int(self.model_type == "bert" and self.type_vocab_size > 1)

    @property
    def logit_scale(self) -> float:
        """`scale`, or the value that None stands for."""
        usual = TRAINED_SCALE if self.normalize else 1.0
        return usual if self.scale is None else self.scale

    @property
    def beyond_dpr(self) -> dict[str, Any]:
        """The fields in which this encoder differs from DPR's, with their values."""
        fields = {"projection_tanh": self.projection_tanh, "pooling": self.pooling == "mean",
                  "normalize": self.normalize, "query_prefix": self.query_prefix,
                  "passage_prefix": self.passage_prefix, "titles": self.titles == "joined"}
        scale = {"scale": self.logit_scale} if self.logit_scale != 1 else {}
        return {name: value for name, value in fields.items() if value} | scale


Family = Literal["bart", "t5", "causal"]  # of generators; GENERATORS has their configurations


@dataclasses.dataclass(frozen=True)
class GeneratorConfig(TransformerConfig):
    """The fields of generators of every family; the defaults are bart-base's."""

    pretrained: str = field("", "generator or workdir that the generator starts from: " + SOURCE)
    family: Family = field("bart", "architecture, where no checkpoint decides it; each family has "
                           "fields of its own")
    vocab_size: int = field(50265, "rows of the token table; 0 = the tokenizer's size", at_least=0)
    max_positions: int = field(1024, "longest source or target in tokens", at_least=1)
    decoder_layers: int = field(6, "decoder layers", at_least=1)
    attention_dropout: float | None = field(
        None, "dropout of attention weights; none = 0, or 0.1 where `pretrained` is a T5",
        at_least=0, at_most=1)
    layer_norm_eps: float = field(1e-5, "epsilon of LayerNorm", at_least=0)
    param_dtype: Literal["float32", "bfloat16"] = field(
        "float32", "type in which matrices are kept while a model answers (rag_jax.load, generate, "
        "evaluate); bfloat16 takes half the memory, and with dtype=bfloat16, which it needs, the "
        "answers are the same. Training keeps float32")
    logit_chunk: int = field(16, "target positions whose logits exist at a time", at_least=1)
    start_token: int = field(
        -1, "token id that the decoder reads first, in the loss and in decoding; -1 = as the "
        "checkpoint says (decoder_start_token_id), else </s>; of prompts, the last token is read "
        "first, whatever this says", at_least=-1)
    end_tokens: tuple[int, ...] = field(
        (), "token ids, each of which ends an answer, with the sum of their probabilities, as the "
        "checkpoint says (eos_token_id); empty = </s>; in a chat, the end of its template, too")

    @property
    def decoder_sizes(self) -> tuple[int, int]:
        """(attention heads, feed-forward width) of the decoder."""
        return self.heads, self.mlp_width

    @property
    def cached_width(self) -> int:
        """Numbers in the keys (or the values) of one token in one layer of the decoder."""
        return self.width

    @property
    def logit_cap(self) -> float:
        """Logits are cap * tanh(logits / cap); 0 = as they are."""
        return 0.0


@dataclasses.dataclass(frozen=True)
class BartConfig(GeneratorConfig):
    """BART; the defaults are bart-base."""

    encoder_layers: int = field(6, "encoder layers", at_least=1)
    activation_dropout: float | None = field(
        None, "dropout inside the feed-forward; none = as attention_dropout's none", at_least=0,
        at_most=1)
    scale_embedding: bool = field(False, "multiply token embeddings by sqrt(width)")
    decoder_heads: int = field(0, "attention heads of the decoder; 0 = heads", at_least=0)
    decoder_mlp_width: int = field(0, "feed-forward width of the decoder; 0 = mlp_width",
                                   at_least=0)

    @property
    def decoder_sizes(self) -> tuple[int, int]:
        return self.decoder_heads or self.heads, self.decoder_mlp_width or self.mlp_width


@dataclasses.dataclass(frozen=True)
class T5Config(GeneratorConfig):
    """T5 and models of its form; the defaults are the base models of Flan-T5 and T5 v1.1."""

    family: Family = field("t5", "architecture")
    vocab_size: int = field(32128, "rows of the token table; 0 = the tokenizer's size", at_least=0)
    max_positions: int = field(2**20, "longest source or target in tokens; relative positions "
                               "have no limit", at_least=1)
    heads: int = field(12, "attention heads, each of head_size", at_least=1)
    encoder_layers: int = field(12, "encoder layers", at_least=1)
    decoder_layers: int = field(12, "decoder layers", at_least=1)
    head_size: int = field(64, "width of an attention head", at_least=1)
    mlp_width: int = field(2048, "feed-forward width F", at_least=1)
    activation: Literal["relu", "gelu_new"] = field("gelu_new", "feed-forward activation")
    gated: bool = field(True, "the activation multiplies another product of the same input")
    tied: bool = field(False, "the output layer is the token table")
    scale_output: bool = field(False, "states are divided by sqrt(width) before the output layer")
    attention_dropout: float = field(0.1, "dropout of attention weights", at_least=0, at_most=1)
    activation_dropout: float = field(0.1, "dropout inside the feed-forward", at_least=0, at_most=1)
    layer_norm_eps: float = field(1e-6, "epsilon of RMSNorm", at_least=0)
    relative_buckets: int = field(32, "distances that attention tells apart", at_least=4,
                                  at_most=256)
    relative_distance: int = field(128, "distance from which on all are the same to attention; "
                                   "more than half of relative_buckets", at_least=8, at_most=4096)

    @property
    def cached_width(self) -> int:
        return self.heads * self.head_size


@dataclasses.dataclass(frozen=True)
class CausalConfig(GeneratorConfig):
    """Decoder-only language models; the defaults are those of Qwen2.5-0.5B."""

    family: Family = field("causal", "architecture")
    variant: Literal["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "olmo2"] = field(
        "qwen2", "what its layers have beside what all have: VARIANTS in models/causal_lm.py")
    vocab_size: int = field(151936, "rows of the token table; 0 = the tokenizer's size", at_least=0)
    max_positions: int = field(32768, "longest prompt and answer together", at_least=1)
    width: int = field(896, "model width D", at_least=1)
    decoder_layers: int = field(24, "layers", at_least=1)
    heads: int = field(14, "attention heads of queries", at_least=1)
    kv_heads: int = field(2, "attention heads of keys and values; must divide heads", at_least=1)
    head_size: int = field(64, "width of a head; even", at_least=2)
    mlp_width: int = field(4864, "feed-forward width F", at_least=1)
    activation: Literal["silu", "gelu_new", "gelu"] = field("silu", "of the feed-forward's gate")
    dropout: float = field(0.0, "these models have none", at_least=0, at_most=0)
    attention_dropout: float = field(0.0, "these models have none", at_least=0, at_most=0)
    layer_norm_eps: float = field(1e-6, "epsilon of RMSNorm", at_least=0)
    tied: bool = field(True, "the output layer is the token table")
    query_size: int = field(0, "queries are divided by its square root; 0 = head_size", at_least=0)
    attention_cap: float = field(0.0, "attention scores are cap * tanh(scores / cap); 0 = as they "
                                 "are", at_least=0)
    final_cap: float = field(0.0, "logits likewise", at_least=0)
    window: int = field(0, "a token of a local layer attends to this many last tokens, itself "
                        "included; 0 = there are no local layers", at_least=0)
    global_every: int = field(0, "of this many layers, the last one is global; 0 = all are local",
                              at_least=0)
    rope_theta: float = field(1e6, "base of the wavelengths of rotary positions", at_least=1)
    rope_local_theta: float = field(0.0, "the same of local layers, which are never scaled; 0 = "
                                    "as global ones", at_least=0)
    rope_type: Literal["default", "linear", "llama3", "yarn"] = field(
        "default", "how rotary positions are scaled to longer texts")
    rope_factor: float = field(1.0, "scaled by this", at_least=0)
    rope_low: float = field(1.0, "llama3, yarn: a wavelength with fewer turns than this within "
                            "rope_positions is scaled in full", at_least=0)
    rope_high: float = field(4.0, "the same: with more turns than this, it is not scaled",
                             at_least=0)
    rope_positions: int = field(8192, "llama3, yarn: longest text before", at_least=1)

    @property
    def cached_width(self) -> int:
        return self.kv_heads * self.head_size

    @property
    def logit_cap(self) -> float:
        return self.final_cap

    @property
    def finite_rotary_angles(self) -> bool:
        """Whether the angles of rotary positions are finite: their scales never divide by 0."""
        return (self.rope_theta > 1 and (not self.rope_local_theta or self.rope_local_theta > 1)
                and self.rope_factor > 0 and 0 < self.rope_low < self.rope_high)

    @property
    def local_layers(self) -> tuple[bool, ...]:
        """Which layers attend to the last `window` tokens alone."""
        every = self.global_every
        return tuple(bool(self.window) and not (every and (i + 1) % every == 0)
                     for i in range(self.decoder_layers))


GENERATORS: dict[Family, type[GeneratorConfig]] = {"bart": BartConfig, "t5": T5Config,
                                                     "causal": CausalConfig}


BERT_PRESETS = {
    "tiny": BertConfig(vocab_size=0, width=128, layers=2, heads=4, mlp_width=512,
                       position_init="sinusoidal", init_std=0.09),
    "bert-base": BertConfig(),
}
BART_PRESETS = {
    "tiny": BartConfig(vocab_size=0, max_positions=512, width=128, encoder_layers=2,
                       decoder_layers=2, heads=4, mlp_width=512, position_init="sinusoidal",
                       init_std=0.09),
    "bart-base": BartConfig(),
    "bart-large": BartConfig(width=1024, encoder_layers=12, decoder_layers=12, heads=16,
                             mlp_width=4096),
}
