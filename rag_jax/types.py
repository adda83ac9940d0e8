"""The pytrees and records that several rooms of the package exchange."""

from typing import Any, NamedTuple

import jax
import numpy as np

from rag_jax.citation import Citation

Array = jax.Array | np.ndarray
Params = dict[str, Any]


class Prefixes(NamedTuple):
    """The keys and values of a decoder-only generator that are kept of the passages of a `Batch`:
    of P tokens, for each layer and its G heads; keys are rotated to their positions."""

    keys: Array  # dtype[B, K, layers, G, C, P]
    values: Array  # dtype[B, K, layers, G, P, C]
    lengths: Array  # int32[B, K], how many of the P tokens are part of an input
    ids: Array  # int32[B, K, P], the tokens


class Batch(NamedTuple):
    """One global batch of RAG training or evaluation; the leading axis is split over `data`.

    Rows of weight 0 fill up the batch; their numbers have no influence, but must be finite.
    """

    question_ids: Array  # int32[B, L], for the query encoder
    question_mask: Array  # bool[B, L]
    # Passage and question for the generator; with a null document, the question alone comes last,
    # and there are K + 1.
    source_ids: Array  # int32[B, K, S]
    source_mask: Array  # bool[B, K, S]
    doc_embeddings: Array | None  # float32[B, K, E], from the index; None where BM25 retrieves
    doc_mask: Array  # bool[B, K], False for padding passages
    target_ids: Array | None  # int32[B, T], the answer and </s>; None where it is asked for
    target_mask: Array | None  # bool[B, T]
    weight: Array  # float32[B]
    doc_ids: Array | None = None  # int32[B, K], rows of the index, -1 for padding
    # float32[B, K], BM25's, beside inner products or without any; or a reranker's logits of p(z|x).
    doc_scores: Array | None = None
    # For a document encoder that trains: scores are computed from these, with gradients.
    passage_ids: Array | None = None  # int32[B, K, L], for the document encoder
    passage_mask: Array | None = None  # bool[B, K, L]
    passage_age: Array | None = None  # float32[B, K], steps since doc_embeddings were made
    # For a classifier, whose target is the number of a class: the input of its decoder.
    decoder_ids: Array | None = None  # int32[B, Q], <s> question </s>
    decoder_mask: Array | None = None  # bool[B, Q]
    # For each of G groups of B / G questions: the places of the tokens among the B / G * K * S
    # places of its inputs, in order, and that number for the rest. With them, the generator's
    # encoder computes only these N places, not the padding, which is at the end of such inputs.
    source_places: Array | None = None  # int32[G, N]
    # Likewise of targets: the places of the tokens among the B / G * T places of each group. The
    # decoder then computes these N places for each passage.
    target_places: Array | None = None  # int32[G, N]
    # For a generator that keeps passages; `source_ids` has the tokens that follow them.
    prefixes: Prefixes | None = None


class QuestionBatch(NamedTuple):
    """The part of a `Batch` that is known before its passages are found on the devices."""

    question_ids: Array  # int32[B, L], for the query encoder
    question_mask: Array  # bool[B, L]
    # The question as it follows a passage in the generator's input; None where the two are joined.
    suffix_ids: Array | None  # int32[B, Q]
    suffix_mask: Array | None  # bool[B, Q]
    target_ids: Array  # int32[B, T], the answer and </s>
    target_mask: Array  # bool[B, T]
    weight: Array  # float32[B]
    decoder_ids: Array | None = None  # as in `Batch`
    decoder_mask: Array | None = None
    target_places: Array | None = None


class RetrieverBatch(NamedTuple):
    """One global batch of DPR training: B questions, P = B * (1 + hard negatives) passages.

    Passage i < B is the positive of question i. `same_passage` marks repetitions of the positive
    at other places, which are no negatives.
    """

    question_ids: Array  # int32[B, L]
    question_mask: Array  # bool[B, L]
    passage_ids: Array  # int32[P, L]
    passage_mask: Array  # bool[P, L]
    same_passage: Array  # bool[B, P], True at repetitions of the positive


class Seq2SeqBatch(NamedTuple):
    """One global batch of plain sequence-to-sequence training (BART denoising)."""

    source_ids: Array  # int32[B, S]
    source_mask: Array  # bool[B, S]
    target_ids: Array  # int32[B, T]
    target_mask: Array  # bool[B, T]
    # Where tokens are, in G groups of B / G rows; see `Batch.target_places`.
    source_places: Array | None = None  # int32[G, N]
    target_places: Array | None = None  # int32[G, N]


class Evidence(NamedTuple):
    """A passage that was retrieved for a question; the null document has no id, title and text."""

    id: str
    title: str
    text: str
    prior: float  # p(z | x)
    # p(z | x, y); for RAG-Token the mean over the answer's tokens; for Fusion-in-Decoder, which has
    # no such posterior, p(z | x) again. None: there is no answer yet.
    posterior: float | None = None
    source: Citation | None = None  # where it stands in the document that it was read from


class Answer(NamedTuple):
    """A decoded answer with its evidence."""

    text: str
    token_ids: list[int]  # without padding; the last is </s>, unless cut or of a class
    log_prob: float  # log p(y | x) in nats, </s> included; of a class: normalised over the labels
    passages: list[Evidence]  # best first; with a null document, the last stands for it
    token_log_probs: list[float] = []  # log p(y_t | x, y_<t) in nats, of every token of token_ids
    # One row per token: RAG-Token p(z | x, y_t, y_<t), RAG-Sequence p(z | x, y_<=t); of a class,
    # decided at its first token, p(z | x, class) in each. Empty for Fusion-in-Decoder.
    token_posterior: list[list[float]] = []
    finished: bool = True  # ended with </s>, or a class; False = cut at the length limit
    certified: bool = False  # no other answer that the settings allow is more probable
    alternatives: list["Answer"] = []  # the other returned answers, best first; samples as drawn
    # Prefixes that exact decoding has expanded for this question; if the answer is not certified,
    # it has spent its node budget.
    expanded: int = 0
    tokens: list[str] = []  # token_ids as texts

    @property
    def passage_ids(self) -> list[str]:
        return [passage.id for passage in self.passages]

    @property
    def prior(self) -> list[float]:
        return [passage.prior for passage in self.passages]

    @property
    def posterior(self) -> list[float]:
        return [passage.posterior for passage in self.passages]

    def record(self) -> dict[str, Any]:
        """As JSON has it: passages by their ids alone, and their places in documents, if any."""
        passages = {name: getattr(self, name) for name in ("passage_ids", "prior", "posterior")}
        if any(passage.source for passage in self.passages):
            passages["sources"] = [passage.source and passage.source.record()
                                   for passage in self.passages]
        first = {name: getattr(self, name) for name in ("text", "token_ids", "log_prob")}
        others = {name: value for name, value in self._asdict().items()
                  if name not in (*first, "passages", "tokens")}
        return {**first, **passages, **others,
                "alternatives": [other.alternative() for other in self.alternatives]}

    def alternative(self) -> dict[str, Any]:
        """As JSON has it among the alternatives to another answer."""
        return {name: getattr(self, name) for name in (
            "text", "token_ids", "log_prob", "posterior", "token_log_probs", "token_posterior",
            "finished")}
