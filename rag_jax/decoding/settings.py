"""The settings of decoding, one frozen dataclass that is static under jit."""

import dataclasses
from collections.abc import Iterator
from typing import Literal

import jax

from rag_jax.config import DataConfig, EvalConfig
from rag_jax.config.rules import problems_of_values
from rag_jax.models.rag import RagModel

Strategy = Literal["marginal", "thorough", "fast"]
PROGRAMS = 64  # how many compiled programs, of the settings used last, are kept
_EVAL = EvalConfig()  # its defaults are also the defaults here, but for those that are None


@dataclasses.dataclass(frozen=True)
class Decoding:
    """Settings of decoding, with the usual names and meanings.

    Lengths count the answer's tokens with </s> and without the decoder's start token.
    (Hugging Face's `max_length` counts the start token too: ours is theirs minus 1; `min_length`
    is the same number in both.)

    Attributes:
      strategy: for RAG-Sequence alone; RAG-Token and Fusion-in-Decoder ignore it.
        marginal: one beam on p(y_t | x, y_<t) with the documents summed out.
        thorough: a beam for each document, every hypothesis scored under every document.
        fast: the same, with probability 0 for the documents whose beam lacks the hypothesis.
      num_beams: beam width; 1 = greedy, which ignores the length penalty while it searches.
      max_length: longest answer.
      min_length: shortest answer.
      length_penalty: hypotheses are ranked by log p / length**length_penalty; 0 = by log p.
      no_repeat_ngram_size: no n-gram of this size occurs twice in an answer; 0 = no such rule.
      forced_bos: id of the first token; ranks do not count its log p, the reported log p does.
      forced_eos: the last token at max_length is </s>; the search does not count its log p, the
        reported log p does.
      bad_words: token sequences that no answer contains after its forced tokens.
      num_return_sequences: answers per question, best first, or independent samples; labels are
        all returned.
      prefix: the first tokens of every answer; ranks count neither their log p nor, for the length
        penalty, their number; the reported log p counts them.
      sample: draw from p(y | x) instead of searching; RAG-Sequence by its marginal recursion.
      temperature, top_k, top_p: of sampling, applied in this order; 1, 0 and 1 change nothing.
      prompt_lookup: of answers that grow (`grows`): how many tokens are guessed and computed
        together with each one; see `decoding.prompt_lookup`. 0 = none. Other ways ignore it.
      labels: token sequences that are the only answers, for classification, which searches nothing:
        as in training's targets, one output token each, or whole strings with </s>. A classifier's
        labels are the names of its classes, in their order. No other rule, nor the length penalty,
        applies to them. An end token is in none, but as the last token.
      memory_mib: the budget of every device for the decoder's arrays, in MiB; questions, and
        candidates of the thorough strategy, are computed in groups that fit. 0 = all at once.

    Raises:
      ValueError: a value is not allowed, or two contradict each other.
    """

    strategy: Strategy = _EVAL.strategy
    num_beams: int = 1
    max_length: int = DataConfig().max_target_length
    min_length: int = 0
    length_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    forced_bos: int | None = None
    forced_eos: bool = False
    bad_words: tuple[tuple[int, ...], ...] = ()
    num_return_sequences: int = _EVAL.num_return_sequences
    prefix: tuple[int, ...] | None = None
    sample: bool = _EVAL.sample
    temperature: float = _EVAL.temperature
    top_k: int = _EVAL.top_k
    top_p: float = _EVAL.top_p
    prompt_lookup: int = _EVAL.prompt_lookup
    labels: tuple[tuple[int, ...], ...] = ()
    memory_mib: int = _EVAL.memory_mib

    def __post_init__(self) -> None:
        problems = list(problems_of_values(self)) or list(self._problems())
        if problems:
            raise ValueError("\n".join(problems))

    def _problems(self) -> Iterator[str]:
        least = {"num_beams": 1, "max_length": 1, "min_length": 0, "no_repeat_ngram_size": 0,
                 "num_return_sequences": 1, "top_k": 0, "prompt_lookup": 0, "memory_mib": 0}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                yield f"{name}={getattr(self, name)}: must be at least {bound}"
        if not self.labels and self.min_length > self.max_length:
            yield (f"min_length={self.min_length}: must be at most max_length={self.max_length}; "
                   "both count </s>")
        if not self.temperature > 0:
            yield f"temperature={self.temperature}: must be above 0; num_beams=1 is greedy"
        if not 0 < self.top_p <= 1:
            yield f"top_p={self.top_p}: must be above 0 and at most 1"
        if not self.sample and (self.temperature, self.top_k, self.top_p) != (1.0, 0, 1.0):
            yield "temperature, top_k and top_p belong to sampling: set sample=True"
        if not (self.sample or self.labels) and self.num_return_sequences > self.num_beams:
            yield (f"num_return_sequences={self.num_return_sequences}: must be at most "
                   f"num_beams={self.num_beams}")
        if any(len(word) == 0 for word in self.bad_words):
            yield f"bad_words={self.bad_words}: a bad word needs at least one token"
        if self.labels and self.sample:
            yield "labels and sample: classes are ranked, not drawn"
        if not self.labels and self.forced_eos and self.max_length == 1 and (
                self.forced_bos is not None):
            yield ("forced_bos and forced_eos both set the only token of max_length=1: raise it, "
                   "or leave one out")
        for name in ("prefix", "bad_words"):
            if self.labels and getattr(self, name):
                yield f"labels and {name}: the labels are all the answers there are; leave one out"
        if not all(self.labels):
            yield f"labels={self.labels}: a label needs at least one token"
        if len(set(self.labels)) < len(self.labels):
            yield f"labels={self.labels}: two labels are equal"
        if self.labels and max(map(len, self.labels)) > self.max_length:
            yield (f"labels: one has {max(map(len, self.labels))} tokens, </s> included; must be "
                   f"at most max_length={self.max_length}")
        if self.prefix and self.forced_bos is not None:
            yield ("prefix and forced_bos both set the first token: leave out the prefix, or set "
                   "forced_bos=False")
        if self.prefix and len(self.prefix) >= self.max_length:
            yield (f"prefix has {len(self.prefix)} tokens: must be shorter than "
                   f"max_length={self.max_length}")

    def check(self, model: RagModel) -> None:
        """Raises ValueError where the model does not allow these settings."""
        if model.classes and len(self.labels) != model.classes:
            raise ValueError(f"labels={self.labels}: the classifier has {model.classes} classes")
        longest = model.generator.max_positions
        if self.max_length > longest:
            raise ValueError(f"max_length={self.max_length}: the generator has {longest} positions")
        ids = [*(self.prefix or ()), *(t for word in self.bad_words for t in word)]
        ids += [] if self.forced_bos is None else [self.forced_bos]
        ids += [t for label in self.labels for t in label]
        beyond = [i for i in ids if not 0 <= i < model.generator.vocab_size]
        if beyond:
            raise ValueError(f"token ids {beyond} of prefix, forced_bos, bad_words or labels: must "
                             f"be below vocab_size={model.generator.vocab_size}")
        if (model.end_id,) in self.bad_words:
            raise ValueError(f"bad_words holds ({model.end_id},), the end token: no answer could "
                             "end; min_length makes answers longer")
        ends = {model.end_id, *model.generator.end_tokens}
        if ending := ends & {*(self.prefix or ()), self.forced_bos}:
            raise ValueError(f"prefix or forced_bos holds the end token {min(ending)}: nothing "
                             "could follow it")
        within = {t for label in self.labels for t in label[:-1]}
        within |= {label[-1] for label in self.labels} - {model.end_id}
        if not model.classes and (ending := ends & within):
            raise ValueError(f"labels: one holds the end token {min(ending)}; only {model.end_id} "
                             "ends a label, as its last token")

    @property
    def hypotheses(self) -> int:
        """How many hypotheses of a question, or of one of its documents, grow at the same time."""
        return self.num_return_sequences if self.sample else self.num_beams

    def one_search(self, model: RagModel) -> bool:
        """Whether a question has one search over all of its documents, not one for each document.
        """
        return model.kind != "sequence" or self.strategy == "marginal"

    def grows(self, model: RagModel) -> bool:
        """Whether answers grow from left to right, and no token is ever revised.

        Samples do, and answers of greedy search. Several beams, or one for each document, may
        revise tokens, and labels are ranked as a whole.
        """
        if model.classes or self.labels:
            return False
        return self.sample or (self.num_beams == 1 and self.one_search(model))

    def guesses(self, model: RagModel) -> int:
        """How many tokens are guessed with each one."""
        return self.prompt_lookup if self.grows(model) else 0

    @property
    def prefix_length(self) -> int:
        return len(self.prefix or ())

    @property
    def forced_first(self) -> int:
        """How many tokens at the beginning are forced."""
        return self.prefix_length or int(self.forced_bos is not None)

    @property
    def has_rules(self) -> bool:
        """Whether some answers are not allowed; certificates then hold among the others."""
        return bool(self.forced_first or self.min_length > 1 or self.no_repeat_ngram_size
                    or self.bad_words or self.labels)

    @property
    def search_penalty(self) -> float:
        """The length penalty inside a beam; greedy search has none."""
        return self.length_penalty if self.num_beams > 1 else 0.0

    def certifies(self, model: RagModel) -> bool:
        """Whether these settings allow certificates: answers are ranked by probability alone, as
        labels always are, and probabilities are exact enough. In bfloat16, two computations for the
        same prefix differ by more than `results.MARGIN`."""
        exact = all(tower.dtype == "float32" for tower in (model.generator, model.retriever))
        # By default, GPUs and TPUs round the operands of float32 products.
        exact &= jax.default_backend() == "cpu" or (
            jax.config.jax_default_matmul_precision in ("highest", "float32"))
        ranks = self.length_penalty == 0 and not self.forced_eos and not self.sample
        return exact and (ranks or bool(self.labels))
