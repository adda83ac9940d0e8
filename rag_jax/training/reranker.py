"""The cross-encoder that `config.model.reranker` names, and the index whose passages it scores."""

import dataclasses
import functools
import pathlib
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from rag_jax import files, parallel
from rag_jax.config import BertConfig, ConfigError
from rag_jax.data.padding import by_length, pad_rows
from rag_jax.data.text import PairForm, Tokenizer
from rag_jax.hub import families
from rag_jax.hub import load as hub
from rag_jax.models.cross_encoder import CrossEncoder
from rag_jax.retrieval.protocol import Passage
from rag_jax.retrieval.reranked import RerankedIndex
from rag_jax.searching import search
from rag_jax.training import pretrained
from rag_jax.training.job import Index, Job
from rag_jax.types import Params

SHORTEST, LONGEST = 16, 512  # tokens that a pair may have; cross-encoders are trained with 512
PAIRS, STEP = 32, 64  # pairs in a batch, and tokens between the lengths of batches


@dataclasses.dataclass(frozen=True)
class Reranker:
    """A cross-encoder with its tokenizer.

    Attributes:
      config: its architecture.
      params: of a `CrossEncoder`, on the mesh.
      tokenizer: that of its checkpoint.
      longest: tokens that a pair may have, special tokens included.
      mesh: batches are split over it.
    """

    config: BertConfig
    params: Params
    tokenizer: Tokenizer
    longest: int
    mesh: Mesh

    @property
    def form(self) -> PairForm:
        """How pairs are written: as the tokenizer says, else as usual in the model's family:
        [CLS] question [SEP] passage [SEP] for BERT, with </s></s> between them for RoBERTa."""
        start, end = self.tokenizer.start, self.tokenizer.end
        count = 1 if self.config.model_type == "bert" else 2
        form = self.tokenizer.pair_form or PairForm(
            [start], [end] * count, [end], int(self.tokenizer.has_types))
        return form._replace(second_type=min(form.second_type, self.config.second_type))

    def logits(self, questions: Sequence[str], passages: Sequence[Passage]) -> np.ndarray:
        """The logits float32[R] of R questions, each with its passage; called by all processes
        alike."""
        rows, firsts = self.pairs(questions, passages)
        second_type = np.int32(self.form.second_type)
        size = parallel.filled_up(min(PAIRS, len(rows)), self.mesh)
        parts, logits = [], np.zeros(len(rows), np.float32)
        for some, filled, length in by_length(
                np.array([len(row) for row in rows]), size, STEP, self.longest):
            ids, mask = pad_rows([rows[i] for i in filled], length, self.tokenizer.pad)
            types = (np.arange(length) >= firsts[filled, None]) * second_type
            inputs = parallel.put_batch((ids, mask, types), self.mesh)
            parts.append((some, parallel.whole(_program(self.config)(self.params, *inputs))))
        for some, part in parts:
            logits[some] = np.asarray(part)[: len(some)]
        return logits

    def pairs(self, questions: Sequence[str], passages: Sequence[Passage]
              ) -> tuple[list[list[int]], np.ndarray]:
        """The token ids of R pairs in this `form`, and how many precede the passage, int[R].

        A question takes at most half of the room, and its passage takes what is left.
        """
        tokenizer, (before, between, after, _) = self.tokenizer, self.form
        different = list(dict.fromkeys(questions))
        room = self.longest // 2 - len(before) - len(between)
        asked = {question: [*before, *ids[:room], *between] for question, ids in zip(
            different, tokenizer.encode(different), strict=True)}
        texts = tokenizer.encode([f"{p.title} {p.text}" if p.title else p.text for p in passages])
        firsts = [asked[question] for question in questions]
        rows = [[*first, *text[: self.longest - len(first) - len(after)], *after]
                for first, text in zip(firsts, texts, strict=True)]
        return rows, np.array([len(first) for first in firsts])


@functools.cache
def _program(config: BertConfig) -> jax.stages.Wrapped:
    """(params, ids, mask, token types) -> logits."""
    return jax.jit(lambda params, *inputs: CrossEncoder(config).apply({"params": params}, *inputs))


def open_reranker(source: str, dtype: str, mesh: Mesh) -> Reranker:
    """Opens a cross-encoder of Hugging Face on a mesh; keeps the last one until its folder changes.

    Raises:
      ConfigError: the source is no cross-encoder, or has no tokenizer that fits it.
      HubError: it is damaged, or its parts do not fit together.
    """
    return _opened(source, files.stamp(pathlib.Path(source)), dtype, mesh)


@functools.lru_cache(maxsize=1)
def _opened(source: str, stamp: str, dtype: str, mesh: Mesh) -> Reranker:
    """stamp: of the folder, as for `pretrained.described`."""
    del stamp
    described, named = pretrained.reranker(source), f"config.model.reranker.pretrained={source!r}"
    if families.RERANKER not in described.tokenizers:
        raise ConfigError(f"{named}: there is no tokenizer beside it")
    folder, config = described.tokenizers[families.RERANKER], described.retriever
    tokenizer = Tokenizer.load(folder)
    if tokenizer.start is None or tokenizer.needed_rows > config.vocab_size:
        raise ConfigError(f"{named}: the tokenizer beside it has {tokenizer.needed_rows} tokens, "
                          f"and the model {config.vocab_size} rows; take those of one checkpoint")
    longest = min(described.longest or LONGEST, config.max_positions, LONGEST)
    if longest < SHORTEST:
        raise ConfigError(f"{named}: it reads {longest} tokens; a question and a passage need "
                          f"{SHORTEST} or more")
    loaded = hub.load(source, mesh=mesh, retriever={"dtype": dtype})
    return Reranker(loaded.retriever, loaded.params[families.RERANKER], tokenizer, longest, mesh)


def reranked(job: Job, index: Index | None) -> Index | RerankedIndex | None:
    """The index as the model retrieves from it: with the reranker around it, if there is one."""
    if index is None or not job.model.reranked:
        return index
    named = job.config.model.reranker
    reranker = open_reranker(named.pretrained, named.dtype, job.mesh)
    return RerankedIndex(index, functools.partial(search, index), reranker.logits,
                         job.config.retrieval.reranked)
