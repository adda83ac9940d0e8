"""Every field of the configuration, with its default, its meaning and its bounds.

Those of encoders and generators are in towers.py.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from rag_jax.config.towers import (
    BART_PRESETS,
    BERT_PRESETS,
    SOURCE,
    BartConfig,
    BertConfig,
    GeneratorConfig,
    field,
    section,
)
from rag_jax.errors import UserError

Kind = Literal["token", "sequence", "fid"]
MetricFamily = Literal["qa", "regex", "ms_marco", "jeopardy", "fever", "kilt"]


class ConfigError(UserError, ValueError):
    """A field, file or combination that cannot be run; the message names it and the remedy."""


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Where passages, questions and tokenizers come from, and how long things may be."""

    passages: str = field("", "passages: .tsv or .jsonl (.gz), .parquet, .arrow, with id, title, "
                          "text; a Wikipedia dump (.xml.bz2); a folder of tables or of "
                          "wikiextractor's; empty = the world of countries that is shipped with "
                          "the package")
    train: str = field("", "training questions: .jsonl, .csv, .tsv, task:NAME:SPLIT, kilt:FILE, "
                       "tfds:NAME:SPLIT or tfds-dir:DIR:SPLIT")
    dev: str = field("", "development questions, which choose the best checkpoint")
    test: str = field("", "test questions; empty = evaluate on dev")
    data_dir: str = field("", "folder with a folder per task, or of prepared TFDS data sets; empty "
                          "= ~/rag_jax_data, or the TFDS default")
    chunk_words: int = field(0, "split passages into disjoint chunks of so many words (paper: "
                             "100); 0 = take them as they are", at_least=0)
    generator_tokenizer: str = field(
        "", "folder or Hugging Face name; empty = train a byte-level BPE on the passages")
    retriever_tokenizer: str = field(
        "", "folder or Hugging Face name; empty = train an uncased WordPiece on the passages")
    generator_vocab: int = field(8192, "size of a trained BPE", at_least=300, at_most=10**7)
    retriever_vocab: int = field(8192, "size of a trained WordPiece", at_least=100, at_most=10**7)
    source_format: Literal["auto", "question_kept", "hugging_face", "question_first", "prompt",
                           "chat"] = field(
        "auto", "title / text // question, where a long input loses the end of its passage; or "
        "joined and cut as Hugging Face's RAG does, where it loses the question; or question: ... "
        "title: ... context: ... as Fusion-in-Decoder's (question_first); or config.data.prompt, "
        "as it is (prompt) or in the tokenizer's chat template (chat); auto = as the "
        "generator's checkpoint says or, where it does not, hugging_face for RAG, question_first "
        "for T5's, chat or prompt for decoder-only models, else question_kept")
    prompt: str = field("", "source_format=prompt or chat: a text with {passage}, then {question}, "
                        "then words that the answer continues; empty = what the generator's "
                        "checkpoint says, or {passage} Question: {question} Answer:, each in a "
                        "line of its own (chat: Answer with as few words as possible.)")
    question_text: Literal["auto", "raw", "uncased_roundtrip"] = field(
        "auto", "the question as the generator reads it: as written, or through the retriever's "
        "tokenizer and back (lower case) as Hugging Face's released RAG was trained; auto = as "
        "source_format's, else raw")
    max_question_length: int = field(64, "question tokens for the query encoder", at_least=4)
    max_passage_length: int = field(256, "passage tokens for the document encoder", at_least=8)
    max_source_length: int = field(256, "generator input: passage and question", at_least=16)
    max_target_length: int = field(
        32, "answer tokens with </s>; 32 gives way to the checkpoint's own length where it answers "
        "as it is (train.steps=0)", at_least=2)
    length_buckets: int = field(
        0, "generator inputs and passages are padded to multiples of this many tokens, questions "
        "and answers to halves of their longest; less is less padding and more shapes to compile; "
        "0 = an eighth of max_source_length", at_least=0)
    fictional_countries: int = field(1000, "countries only: fictional ones to learn from",
                                     at_least=0)
    world_task: Literal["questions", "claims", "sentences", "clues"] = field(
        "questions", "countries only: short answers, claims to verify (as FEVER), answers that "
        "are sentences (as MS-MARCO), or sentences about a named thing (as Jeopardy)")
    world_cards: Literal["gold", "cloze"] = field(
        "gold", "countries only: the texts of the generator's warm-up: a passage with a training "
        "question and its answer (gold), or with one of its own sentences and a span that was "
        "taken out of it, without any question (cloze)")
    world_seed: int | None = field(None, "countries only: seed of the fictional countries and of "
                                   "what is asked; none = config.seed", at_least=0)

    @property
    def length_step(self) -> int:
        """Tokens between the lengths of generator inputs: length_buckets, or what 0 stands for.

        Measured in benchmarks/RESULTS.md: a base model that trains for hundreds of steps on a CPU
        compiles eight lengths sooner than it computes the padding of four or compiles sixteen.
        """
        return self.length_buckets or max(16, 8 * -(-self.max_source_length // 64))


@dataclasses.dataclass(frozen=True)
class RagSource:
    """A RAG checkpoint."""

    pretrained: str = field("", "RAG whose query encoder and generator to start from: " + SOURCE)


@dataclasses.dataclass(frozen=True)
class EncoderSource:
    """An encoder of one side."""

    pretrained: str = field("", "DPR or sentence encoder to start from: " + SOURCE)


@dataclasses.dataclass(frozen=True)
class RerankerSource:
    """A cross-encoder, which stays as it is."""

    pretrained: str = field(
        "", "cross-encoder (BERT, RoBERTa or XLM-R with one label: Hugging Face name or checkpoint "
        "folder) that reads each passage with its question: its logits are those of p(z|x), of "
        "the first retrieval.reranked passages, and no encoder trains; empty = none")
    dtype: Literal["float32", "bfloat16"] = field("float32", "type of matrix products")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The three towers; a section can be set to a preset: --config.model.generator=bart-base."""

    retriever: BertConfig = section(BertConfig)
    generator: GeneratorConfig = section(BartConfig)
    rag: RagSource = section(RagSource)
    query_encoder: EncoderSource = section(EncoderSource)
    document_encoder: EncoderSource = section(EncoderSource)
    reranker: RerankerSource = section(RerankerSource)
    head: Literal["none", "label_token", "classification"] = field(
        "none", "answers are the classes eval.labels. label_token: the generator says one token of "
        "a label, the first by which all differ (the paper's FEVER); classification: by BART's "
        "classification head on the generator, new and trained at optimizer.learning_rate. "
        "Documents are summed out")
    null_document: Literal["none", "embedding", "bias", "mlp"] = field(
        "none", "one more candidate, no document: the generator reads the question alone (the "
        "paper's appendix F); its score is the query times a learned embedding, a learned number, "
        "or an MLP of the query, trained at optimizer.learning_rate")

    @property
    def sources(self) -> dict[str, str]:
        """Where the weights of each tower come from; towers from scratch are left out."""
        sources = {
            "query_encoder": (self.query_encoder.pretrained or self.rag.pretrained
                              or self.retriever.pretrained),
            "document_encoder": self.document_encoder.pretrained or self.retriever.pretrained,
            "generator": self.generator.pretrained or self.rag.pretrained,
        }
        return {tower: source for tower, source in sources.items() if source}


@dataclasses.dataclass(frozen=True)
class RetrievalConfig:
    """The passage index and how it is searched."""

    k: int = field(5, "passages per question (paper: 5 or 10 in training)", at_least=0)
    retriever: Literal["dpr", "bm25", "hybrid"] = field(
        "dpr", "dpr = inner products of embeddings; bm25 = words, whose raw scores are the logits "
        "of p(z|x), and no encoders (the runs bm25 and bm25_sequence); hybrid = both, joined by "
        "fusion")
    fusion: Literal["convex", "reciprocal_rank"] = field(
        "convex", "hybrid: logits of p(z|x) are (1 - bm25_weight) inner product + bm25_weight BM25 "
        "score; or p(z|x) is as the sum of 1 / (60 + rank) of both, and no encoder trains")
    bm25_weight: float = field(0.5, "hybrid, convex: weight of words; evaluate --choose-weight "
                               "says what dev asks for, train.bm25_weight_rate learns it",
                               at_least=0, at_most=1)
    bm25_k1: float = field(0.9, "BM25: how soon more occurrences of a word count no more",
                           at_least=0, at_most=1e6)
    bm25_b: float = field(0.4, "BM25: how much longer passages are discounted", at_least=0,
                          at_most=1)
    bm25_language: Literal[
        "english", "danish", "dutch", "french", "german", "italian", "norwegian", "portuguese",
        "russian", "spanish", "swedish", "turkish", "none"] = field(
        "english", "BM25: language of stems and stop words; none = all words as they are")
    reranked: int = field(20, "model.reranker: how many passages it reads of what retriever finds, "
                          "of which it chooses the best k; never fewer than k. Its time grows with "
                          "them, and among hundreds it finds more that mislead it", at_least=1)
    where: Literal["host", "device"] = field(
        "host", "host = the index is searched beside the devices; device = embeddings and tokens "
        "of all passages lie on the devices, and retrieval is part of the jitted training step")
    device_dtype: Literal["bfloat16", "int8", "float32"] = field(
        "bfloat16", "where=device: type of the embeddings; int8 = searched in int8 and scored in "
        "bfloat16, which is kept too")
    capacity: int = field(0, "where=device: passages that there is room for, to add more or swap "
                          "in a larger index without compiling; never fewer than there are; "
                          "rounded up",
                          at_least=0)
    recall_target: float = field(1.0, "where=device: 1 = exact; less = approximate top-k with "
                                 "this expected recall", at_least=0.01, at_most=1)
    index: Literal["auto", "exact", "scann"] = field(
        "auto", "auto = ScaNN above brute_force_below passages, else, and where=device, exact "
        "search. With where=device, what scann builds is searched once the index is opened with "
        "where=host")
    brute_force_below: int = field(4000, "auto: exact search below so many passages", at_least=0)
    num_leaves: int | None = field(None, "ScaNN partitions; none = by the number of passages",
                                   at_least=1, at_most=2**31 - 1)
    leaves_to_search: int | None = field(
        None, "ScaNN partitions searched; none = as few as reach scann_recall", at_least=1,
        at_most=2**31 - 1)
    scann_recall: float = field(
        0.99, "ScaNN: recall@10 that its search is tuned to when the index is built, measured "
        "against exact search with questions of the dev split", at_least=0.01, at_most=1)
    reorder: int | None = field(
        None, "ScaNN candidates scored again in bfloat16, the best of which are scored exactly; "
        "none = the default", at_least=1, at_most=2**31 - 1)
    scann_parts: int = field(
        1, "ScaNN: consecutive parts of the passages with an index each; with at least as many as "
        "processes, each process holds and searches its share of them alone", at_least=1)
    embed_batch_size: int = field(
        64, "passages embedded at a time; a CPU takes at most 8, but all of them where "
        "train.document_encoder=refresh embeds the index again", at_least=1)
    staleness: int = field(
        0, "0 = batch t is retrieved with the parameters of step t; 1 = with those of step t-1, so "
        "that the host's search for the next batch overlaps the device's work", at_least=0)


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with warm-up, decay and clipping by global norm."""

    learning_rate: float = field(1e-3, "peak learning rate", at_least=0)
    schedule: Literal["constant", "linear", "cosine", "polynomial"] = field(
        "linear", "decay after the warm-up, to end_fraction of the peak one step after the last")
    end_fraction: float = field(0.0, "what the decay leads to, as a fraction of the peak",
                                at_least=0, at_most=1)
    power: float = field(1.0, "power of the polynomial decay", at_least=0)
    warmup_steps: int = field(100, "steps of linear warm-up", at_least=0)
    weight_decay: float = field(0.01, "decoupled decay; not on biases and norms", at_least=0)
    clip_norm: float = field(1.0, "clipping by global norm; 0 = off", at_least=0)
    b1: float = field(0.9, "Adam's first decay rate", at_least=0, at_most=0.999999)
    b2: float = field(0.98, "Adam's second decay rate", at_least=0, at_most=0.999999)
    eps: float = field(1e-8, "Adam's epsilon", at_least=1e-30)
    accumulate: int = field(1, "gradient accumulation: micro-batches per step", at_least=1)
    update_ratios: bool = field(True, "measure how far each tower moves in logged steps, for the "
                                "metrics; false = a step that compiles faster")


@dataclasses.dataclass(frozen=True)
class WarmupConfig:
    """The fields of both warm-up stages."""

    steps: int = field(1000, "optimiser steps; 0 = no warm-up", at_least=0)
    batch_size: int = field(64, "examples per step", at_least=1)
    log_every: int = field(50, "steps between log lines", at_least=1)
    save_every: int = field(500, "steps between checkpoints", at_least=1)
    optimizer: OptimizerConfig = section(OptimizerConfig)


@dataclasses.dataclass(frozen=True)
class RetrieverWarmupConfig(WarmupConfig):
    """DPR: both encoders learn to find passages, each beside those of the other questions."""

    pairs: Literal["gold", "cloze", "crops", "words"] = field(
        "gold", "what finds which passage: gold = a training question those that it names; or, "
        "without a question or a label, cloze = a sentence the passage that it was taken out of "
        "(nine times in ten: Lee et al. 2019), crops = a span of a passage another of its spans "
        "(Izacard et al. 2021), words = half of them as cloze, half a title, a few common words "
        "of its passage and a few that hardly any has")
    hard_negatives: int = field(1, "pairs=gold: hard negatives per question", at_least=0,
                                at_most=1000)


@dataclasses.dataclass(frozen=True)
class GeneratorWarmupConfig(WarmupConfig):
    """BART's denoising: the generator learns to write the passages out of masked ones."""

    mask_ratio: float = field(0.3, "share of tokens in masked spans", at_least=0, at_most=1)
    span_length: float = field(3.0, "mean span length (Poisson)", at_least=0,
                               at_most=1e6)
    permute_sentences: float = field(1.0, "share of texts with sentences permuted",
                                     at_least=0, at_most=1)


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """RAG fine-tuning: query encoder and generator by the marginal likelihood."""

    steps: int = field(1000, "optimiser steps; 0 = use the weights as they are", at_least=0)
    batch_size: int = field(16, "questions per step, over all devices", at_least=1)
    label_smoothing: float = field(0.0, "share of the target spread over the vocabulary",
                                   at_least=0, at_most=1)
    query_encoder_rate: float | None = field(
        0.1, "learning rate of the query encoder relative to optimizer.learning_rate; none = "
        "frozen. Batches of few questions need a small one", at_least=0)
    full_information: float = field(
        0.25, "each question's gradient to p(z|x) is weighted with how well its answer is "
        "explained, p(y|x)^(1/tokens); and the encoders, and a learned weight of words, move by "
        "less, in proportion, where a batch's answers resolve less than this share of the entropy "
        "of p(z|x). They resolve KL(p(z|x,y) || p(z|x)) times that weight. 0 = all answers teach "
        "alike, as in the paper", at_least=0, at_most=1)
    bm25_weight_rate: float | None = field(
        None, "retriever=hybrid, fusion=convex: the weight of words is learned too, from "
        "retrieval.bm25_weight on, and this is the learning rate of its logit relative to "
        "optimizer.learning_rate, with which each step moves it by about their product, or by less "
        "as full_information has it; none = fixed", at_least=0)
    generator_rate: float | None = field(
        1.0, "learning rate of the generator relative to optimizer.learning_rate; none = frozen",
        at_least=0)
    retriever_objective: Literal["marginal", "emdr2", "pdist", "adist", "loop"] = field(
        "marginal", "what the retriever learns from: the marginal likelihood, as in the paper; or "
        "the answer's likelihood under each passage (emdr2: weighted by p(z|x), pdist: alone) or "
        "without it (loop), or Fusion-in-Decoder's attention to it (adist). The generator learns "
        "from its own likelihood")
    in_batch_negatives: bool = field(
        True, "p(z|x) is learned over the passages that were retrieved for all questions of the "
        "batch, or of each of optimizer.accumulate's parts of it, not for one alone: far quicker "
        "where the retriever has much to learn. Answers and their probabilities still depend on a "
        "question's own passages alone; hybrid retrieval and rerankers learn over these, too")
    document_encoder: Literal["frozen", "refresh"] = field(
        "frozen", "as in the paper; or refresh = train it too: the passages found are embedded "
        "again inside the step, and all of them on a schedule (needs retrieval.where=device)")
    document_encoder_rate: float = field(
        1.0, "refresh: its learning rate relative to optimizer.learning_rate", at_least=0)
    refresh_every: int = field(100, "refresh: steps between two refreshes", at_least=1)
    refresh_passages: int = field(
        0, "refresh: passages embedded again each time, the next ones in turn; 0 = all. All of "
        "them are, too, after every evaluation and checkpoint", at_least=0)
    collapse_guard: Literal["off", "warn", "stop", "freeze", "rollback"] = field(
        "rollback", "when training retrieves the same few passages for every question (the "
        "paper's appendix H): say so, stop with the checkpoint kept, freeze the retriever and go "
        "on, or do so with the retriever as the last sound window left it")
    collapse_window: int = field(
        50, "steps over which the retrieved passages are counted; keep them within "
        "optimizer.warmup_steps, so that the first window is a sound one", at_least=1)
    collapse_threshold: float = field(
        0.25, "the guard acts when the effective number of passages (exp of the entropy of what a "
        "window retrieves) is below this share of the first window's", at_least=0, at_most=1)
    optimizer: OptimizerConfig = section(OptimizerConfig)
    log_every: int = field(20, "steps between log lines", at_least=1)
    eval_every: int = field(500, "steps between evaluations on dev; the last step always is one",
                            at_least=1)
    save_every: int = field(500, "steps between checkpoints", at_least=1)
    keep: int = field(2, "checkpoints kept besides the best by dev score", at_least=1)


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """Evaluation and answering; the longest answer is data.max_target_length."""

    k: int = field(0, "passages per question; 0 = retrieval.k, or all of an index that "
                   "has fewer", at_least=0)
    batch_size: int = field(32, "questions at a time", at_least=1)
    max_examples: int = field(0, "while training, evaluate on this many first dev questions; 0 = "
                              "all; the command evaluate uses it only where it is given again",
                              at_least=0)
    metrics: tuple[MetricFamily, ...] = field(
        ("qa",), "families of metrics, each that of a task: qa, regex (answers are regular "
        "expressions), ms_marco, jeopardy, fever, kilt; the first one's headline (EM, EM, "
        "ROUGE-L, Q-BLEU-1, accuracy, EM) chooses the best checkpoint")
    strategy: Literal["marginal", "thorough", "fast"] = field(
        "marginal", "of RAG-Sequence: one beam on the marginal probabilities; or as in the paper "
        "(thorough) a beam per document, every hypothesis scored under every document, or (fast) "
        "the same without that pass")
    num_beams: int | None = field(
        None, "beam width, which samples have none of; 1 = greedy; none = as the checkpoint says "
        "where it answers as it is (train.steps=0), else 1", at_least=1, at_most=10_000)
    min_length: int | None = field(
        None, "tokens of the shortest answer, </s> included; none = as num_beams, else 0",
        at_least=0)
    length_penalty: float | None = field(
        None, "answers of a search are ranked by log p / length**penalty, 0 = by log p; none = as "
        "num_beams with strategy=marginal, else 0", at_least=-5, at_most=5)
    no_repeat_ngram_size: int | None = field(
        None, "no n-gram of this size twice in an answer, 0 = no rule; none = as num_beams, else 0",
        at_least=0)
    forced_bos: bool | None = field(
        None, "every answer begins with <s>; none = as num_beams, else false")
    forced_eos: bool | None = field(
        None, "the last token of a longest answer is </s>; none = as num_beams, else false")
    bad_words: tuple[str, ...] = field(
        (), "texts that no answer contains after its prefix: the sequences of their tokens, at the "
        "start of a word or within it, are excluded")
    prefix: str = field("", "how every answer begins")
    labels: tuple[str, ...] = field((), "classification: the answers to choose from, with p(class) "
                                    "over them, as the generator says or model.head")
    num_return_sequences: int = field(1, "answers per question, best first; or samples, as drawn",
                                      at_least=1)
    sample: bool = field(False, "draw answers instead of searching")
    temperature: float = field(1.0, "of samples: log-probabilities are divided by it", at_least=0)
    top_k: int = field(0, "of samples: only this many most probable tokens are drawn, and those as "
                       "probable as the last of them; 0 = all", at_least=0)
    top_p: float = field(1.0, "of samples: only the fewest tokens that have this probability "
                         "together are drawn, and those as probable as the last of them",
                         at_least=0, at_most=1)
    prompt_lookup: int = field(
        0, "greedy answers and samples: this many tokens that followed the last ones in a passage "
        "are computed with the next one, so that answers that quote passages take fewer steps; "
        "pays for one question at a time, where reading the parameters takes longest; 0 = none",
        at_least=0, at_most=64)
    exact_nodes: int = field(0, "prefixes that the search for the most probable answer may expand "
                             "per question; 0 = no such search", at_least=0)
    nfd: bool = field(False, "exact match, F1 and overlaps with training after Unicode's canonical "
                      "decomposition (NFD), as ORQA and DrQA score; false = as SQuAD, DPR and KILT")
    kilt_pages: Literal["title", "id"] = field(
        "title", "metrics=kilt: pages are compared by their title, or by Wikipedia's id, where the "
        "ids of passages are ID, or ID.N after their division into chunks")
    prefix_mib: int = field(
        0, "decoder-only generators: host memory in which keys and values of passages are kept "
        "between questions, the last used ones. A kept passage is not read again; a new one is "
        "read without its question, which takes longer, so this pays where many questions find the "
        "same passages; those of a whole batch are on the device at once, beyond memory_mib; 0 = "
        "nothing is kept", at_least=0)
    memory_mib: int = field(4096, "budget of the decoder's arrays on a device; groups of questions "
                            "and candidates are made to fit; 0 = all at once", at_least=0)


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Device mesh; -1 = all devices that the other axes leave. Batches split over data x fsdp."""

    data: int = field(-1, "groups of devices, each with all parameters", at_least=-1)
    fsdp: int = field(1, "devices over which a group splits its parameters and the optimiser's "
                      "state; each layer's are gathered while it runs", at_least=-1)
    model: int = field(1, "devices over which a layer is split", at_least=-1)


@dataclasses.dataclass(frozen=True)
class Run:
    """A model that can be fine-tuned, and the fields by which it differs from other runs.

    Attributes:
      kind: RAG-Token, RAG-Sequence, or Fusion-in-Decoder, which reads all passages at once; its
        likelihood trains the generator alone.
      sets: values of fields that this run sets, whatever the configuration says.
    """

    kind: Kind
    sets: Mapping[str, Any] = dataclasses.field(default_factory=dict)


_NO_RETRIEVER_TRAINS = {"train.query_encoder_rate": None, "train.document_encoder": "frozen",
                        "train.bm25_weight_rate": None, "train.retriever_objective": "marginal",
                        "train.in_batch_negatives": False}
_BM25 = {**_NO_RETRIEVER_TRAINS, "retrieval.retriever": "bm25", "retrieval.where": "host"}
RUNS = {
    "rag_token": Run("token"),
    "rag_sequence": Run("sequence"),
    "fid": Run("fid", {"model.null_document": "none", **_NO_RETRIEVER_TRAINS}),
    "fid_joint": Run("fid", {"model.null_document": "none"}),
    "frozen": Run("token", _NO_RETRIEVER_TRAINS),
    "frozen_sequence": Run("sequence", _NO_RETRIEVER_TRAINS),
    "bm25": Run("token", _BM25),
    "bm25_sequence": Run("sequence", _BM25),
    "closed_book": Run("token", {"retrieval.k": 0, "model.null_document": "none",
                                 **_NO_RETRIEVER_TRAINS}),
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything that decides what `python -m rag_jax.train` does, down to the seed."""

    seed: int = field(0, "of initial parameters, dropout, noise and batch order", at_least=0)
    runs: tuple[str, ...] = field(
        ("rag_token",), f"models to fine-tune: {', '.join(RUNS)}; also for closed_book alone, a "
        "retriever is warmed up (set retriever_warmup.steps=0) and the passages are embedded")
    dropout_keys: Literal["auto", "threefry2x32", "unsafe_rbg"] = field(
        "auto", "generator that draws dropout masks from the seed: threefry2x32, or a TPU's own, "
        "unsafe_rbg, whose masks also depend on the mesh; auto = the latter on TPUs, else the "
        "former")
    tensorboard: bool = field(True, "write TensorBoard files beside metrics.jsonl")
    data: DataConfig = section(DataConfig)
    model: ModelConfig = section(ModelConfig)
    retrieval: RetrievalConfig = section(RetrievalConfig)
    retriever_warmup: RetrieverWarmupConfig = section(RetrieverWarmupConfig)
    generator_warmup: GeneratorWarmupConfig = section(GeneratorWarmupConfig)
    train: TrainConfig = section(TrainConfig)
    eval: EvalConfig = section(EvalConfig)
    mesh: MeshConfig = section(MeshConfig)

    @property
    def kind(self) -> Kind:
        """The kind of the model that the configuration of one run trains (`overrides.for_run`).

        The stages before fine-tuning do not depend on it; theirs is the first run's.
        """
        return RUNS[self.runs[0]].kind

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes among which either head chooses; () = answers are texts."""
        return self.eval.labels if self.model.head != "none" else ()

    @property
    def prompted(self) -> bool:
        """Whether the generator reads prompts, or may: a pretrained generator's folder decides."""
        form = self.data.source_format
        return form in ("prompt", "chat") or form == "auto" and (
            self.model.generator.family == "causal" or "generator" in self.model.sources)

    @property
    def head_classes(self) -> int:
        """The number of classes of a classification head; 0 = there is no such head."""
        return len(self.classes) if self.model.head == "classification" else 0


# The paper's decoding (appendix A): open-domain QA by either model, and the generation tasks.
_PLAIN = {"min_length": 0, "length_penalty": 0.0, "no_repeat_ngram_size": 0}
EVAL_PRESETS = {
    "paper-qa-token": EvalConfig(k=15, num_beams=1, strategy="thorough", **_PLAIN),
    "paper-qa-sequence": EvalConfig(k=50, num_beams=1, strategy="thorough", **_PLAIN),
    "paper-generation": EvalConfig(k=10, num_beams=4, strategy="fast", **_PLAIN),
}
PRESETS: dict[type, dict[str, Any]] = {
    BertConfig: BERT_PRESETS, GeneratorConfig: BART_PRESETS, EvalConfig: EVAL_PRESETS}
