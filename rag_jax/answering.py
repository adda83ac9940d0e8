"""Questions to answers: retrieve, decode, and say where the answer came from."""

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from rag_jax import hosts, parallel
from rag_jax.citation import Citation
from rag_jax.config import ConfigError
from rag_jax.data.batches import PASSAGE_TABLE, RagBatcher, Searchable
from rag_jax.data.padding import bucket, by_length
from rag_jax.data.questions import QuestionTokens
from rag_jax.data.text import Cuts
from rag_jax.decoding.answer import begin, decode, go_on, grows
from rag_jax.decoding.certificate import NEEDS, exact
from rag_jax.decoding.prefixes import KeptPrefixes, Reader
from rag_jax.decoding.results import NOT_FINITE, Decoded, ScoreError, faults
from rag_jax.decoding.settings import PROGRAMS, Decoding
from rag_jax.models import rag
from rag_jax.models.generator import in_dtype
from rag_jax.models.likelihood import log_likelihood
from rag_jax.retrieval.hybrid import hybrid_queries
from rag_jax.retrieval.passages import PassageStore
from rag_jax.retrieval.protocol import Passage, RetrievalError
from rag_jax.searching import jit_embed, search
from rag_jax.types import Answer, Array, Batch, Evidence, Params

Program = jax.stages.Wrapped  # a jitted function
SORTED, ALIKE = 64, 4  # batches sorted by length at a time, and batches in a row of one shape


@functools.lru_cache(PROGRAMS)
def jit_decode(model: rag.RagModel, settings: Decoding) -> Program:
    """(params, batch, key or None, temperature or None) -> Decoded."""
    return jax.jit(functools.partial(decode, model, settings))


@functools.lru_cache(PROGRAMS)
def jit_growing(model: rag.RagModel, settings: Decoding) -> tuple[Program, Program]:
    """Two programs that decode the first `until` tokens: (params, batch, key or None, temperature
    or None, until) -> (Decoded, Growing), and (params, Growing, until) -> the same with more
    tokens, which donates the Growing that it is given."""
    return (jax.jit(functools.partial(begin, model, settings)),
            jax.jit(functools.partial(go_on, model, settings), donate_argnums=1))


@functools.lru_cache(PROGRAMS)
def jit_log_likelihood(model: rag.RagModel) -> Program:
    """(params, batch) -> dict of float32[B] in nats, as `likelihood.log_likelihood`."""
    return jax.jit(lambda params, batch: log_likelihood(model, params, batch))


class Draws(NamedTuple):
    """How each of Q questions is sampled; its answer does not depend on the rest of the list."""

    keys: jax.Array  # [Q], as of `keys_of`
    temperature: jax.Array | np.ndarray  # float32[Q]


def keys_of(seeds: int | np.ndarray, numbers: np.ndarray) -> jax.Array:
    """Keys [Q] of the questions at places int[Q] of a list.

    seeds: of the list, or uint32[Q] where the questions come from lists with seeds of their own.
    """
    # Explicit transfers, which jax.transfer_guard allows.
    return _keys(*jax.device_put((np.asarray(seeds, np.uint32), numbers)))


@jax.jit
def _keys(seeds: jax.Array, numbers: jax.Array) -> jax.Array:
    # By other generators, such as rbg, what is drawn depends on the rest of the batch.
    key = functools.partial(jax.random.key, impl="threefry2x32")
    roots = jax.vmap(key)(seeds) if seeds.ndim else key(seeds)
    return jax.vmap(jax.random.fold_in, (0 if roots.ndim else None, 0))(roots, numbers)


class Beginning(NamedTuple):
    """The first tokens of an answer that is still being decoded; they will not change."""

    token_ids: list[int]
    token_log_probs: list[float]


class Watch(NamedTuple):
    """Who sees answers while they are decoded, where they can be seen (`decoding.answer.grows`)."""

    tokens: int  # decoded between two calls of `tell`
    # Is called with the beginnings of a batch's answers, by the numbers of their questions; returns
    # whether anybody waits for the rest. The last tokens come with the answers alone.
    tell: Callable[[dict[int, Beginning]], bool]


@dataclasses.dataclass(frozen=True)
class Settings:
    """How questions are answered.

    Attributes:
      k: passages per question.
      batch_size: questions at a time; the last batch is filled up.
      length_step: generator inputs are padded to multiples of this many tokens; see
        `QuestionTokens.batch`.
      decoding: every choice of decoding.
      seed: of samples, which depend on nothing else but the question's place in the list.
      labels: the texts of decoding.labels.
      node_budget: prefixes that exact decoding may expand for a question whose answer the beam
        has not certified; 0 = no such search.
      prefix_mib: MiB in which keys and values of passages are kept between questions, which are
        then read without their question; 0 = nothing is kept.

    Raises:
      ConfigError: a batch size or length step that is no number of at least 1.
    """

    k: int
    batch_size: int
    length_step: int
    decoding: Decoding
    seed: int = 0
    labels: Sequence[str] = ()
    node_budget: int = 0
    prefix_mib: int = 0

    def __post_init__(self) -> None:
        for name in ("batch_size", "length_step"):
            value = getattr(self, name)
            try:  # an integer of numpy becomes one of Python
                whole = 0 if isinstance(value, bool) else operator.index(value)
            except TypeError:
                whole = 0
            if whole < 1:
                raise ConfigError(f"{name}={value!r}: expected a whole number of at least 1")
            object.__setattr__(self, name, whole)


def check_processes(exact_nodes: int, prefix_mib: int) -> None:
    """Raises ConfigError where several processes would search exactly, or keep what was read."""
    for name, number in (("exact_nodes", exact_nodes), ("prefix_mib", prefix_mib)):
        if number and hosts.count() > 1:
            raise ConfigError(f"config.eval.{name}={number}: is for one process, and there are "
                              f"{hosts.count()}; set 0, or start one")


class Answerer:
    """Answers tokenized questions in batches of a fixed size, which compile once per length.

    Args:
      model: the architecture, with looped layers.
      mesh: batches are split over its data and fsdp axes.
      index: the passages; None = closed book.
      settings: how questions are answered.
      prefixes: the keys and values of passages that are kept already; None = there are none.
    """

    def __init__(self, model: rag.RagModel, mesh: Mesh, index: Searchable | None,
                 settings: Settings, prefixes: KeptPrefixes | None = None):
        budget, self.decoding = settings.node_budget, settings.decoding
        check_processes(budget, settings.prefix_mib)
        if budget and not self.decoding.certifies(model):
            raise ConfigError(f"config.eval.exact_nodes={budget}: {NEEDS}; set 0 otherwise")
        self.prefixes = KeptPrefixes() if prefixes is None else prefixes
        self.model, self.mesh, self.index = model, mesh, index
        self.settings, self.k = settings, settings.k
        self.batch_size = parallel.filled_up(settings.batch_size, mesh)
        # The temperature comes with the keys, so that another one is not compiled anew.
        compiled = dataclasses.replace(self.decoding, temperature=1.0)
        self._embed = jit_embed(model)
        self._decode = jit_decode(model, compiled)
        self._begin, self._go_on = jit_growing(model, compiled)
        self._log_likelihood = jit_log_likelihood(model)
        self._labels = dict(zip(self.decoding.labels, settings.labels, strict=True))

    def embed(self, encoder: Params, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """An encoder's vectors float32[N, E] of texts, given as token ids and mask [N, L]."""
        parts, longest = [], ids.shape[1]
        # Few texts come in one shape, so that the next ones find it compiled.
        step = max(4, longest // 16) if self.settings.length_step < longest else longest
        for rows, filled, length in by_length(mask.sum(axis=1), self.batch_size, step, longest):
            inputs = ids[filled, :length], mask[filled, :length]
            parts.append((rows, self._embed(encoder, *parallel.put_batch(inputs, self.mesh))))
        vectors = np.zeros((len(ids), self.model.embedding_width), np.float32)
        for rows, part in parts:
            vectors[rows] = np.asarray(part)[:len(rows)]
        return vectors

    def embed_questions(self, params: Params, questions: QuestionTokens) -> np.ndarray:
        """Query vectors float32[Q, E], whose products with passages are the logits of p(z | x)."""
        encoder = params["query_encoder"]
        queries = self.embed(encoder, questions.ids, questions.mask)
        queries *= np.float32(rag.query_scale(self.model, encoder))
        _require(questions, np.isfinite(queries).all(axis=1), "the query vector is not finite")
        return queries

    def queries(self, params: Params, questions: QuestionTokens) -> np.ndarray:
        """What searches the index: query embeddings float32[Q, E], for BM25 texts object[Q], for a
        hybrid index or a reranker both."""
        if self.model.lexical:
            return questions.texts
        vectors = self.embed_questions(params, questions)
        if not self.model.asks_with_texts:
            return vectors
        return hybrid_queries(vectors, questions.texts, rag.word_weight(self.model, params))

    def logits(self, queries: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """The logits float32[Q, K] of p(z | x) of passages in rows int[Q, K]."""
        if self.model.lexical:
            return self.index.scores(queries, rows)
        if self.model.asks_with_texts:
            return self.index.logits(queries, rows)
        return np.einsum("BE,BKE->BK", queries, self.index.embeddings(rows))

    def evidence(self, queries: np.ndarray, rows: np.ndarray) -> list[list[Evidence]]:
        """The passages in rows int[Q, K], with p(z | x) over those K."""
        scores = self.logits(queries, rows)
        p_BK = np.exp(scores - scores.max(axis=1, keepdims=True))
        p_BK /= p_BK.sum(axis=1, keepdims=True)
        store = self.index.passages
        return [[Evidence(*store[row], p, source=store.source(row))
                 for row, p in zip(*pair, strict=True)]
                for pair in zip(rows.tolist(), p_BK.tolist(), strict=True)]

    def retrieve(self, params: Params, questions: QuestionTokens) -> np.ndarray | None:
        """Rows int32[Q, K] of the best passages for every question; None for a closed book."""
        if self.index is None:
            return None
        return search(self.index, self.queries(params, questions), self.k)

    def batches(self, questions: QuestionTokens, retrieved: np.ndarray | None,
                answers: bool = True, read: Reader | None = None
                ) -> Iterator[tuple[np.ndarray, Batch]]:
        """Yields (numbers of its questions, device batch) of all batches.

        Questions with inputs of about the same length share a batch, so that there are few shapes.

        Args:
          questions: with reference answers, where `answers`.
          retrieved: int[Q, K], the passages to read.
          answers: whether the batches have targets, which decoding does not read.
          read: reads passages without their question; None = they are read with it.
        """
        batcher = RagBatcher(questions, self.settings.length_step, self.model.embedding_width,
                             self.model.null_document != "none", read=read)
        everyone, size = np.arange(len(questions)), self.batch_size
        own = parallel.own_rows(size, self.mesh)
        found = None if retrieved is None else self.index.passages
        # np.lexsort sorts by the last key first.
        keys = [batcher.lengths(everyone, retrieved, self.index).max(axis=1)]
        if answers:
            targets = questions.targets(everyone, None)[1].sum(axis=1)
            keys.append(-(-targets // max(1, self.settings.length_step // 4)))
        for window in _parts(everyone, SORTED * size):
            order = window[np.lexsort([key[window] for key in keys])]
            for alike in _parts(order, ALIKE * size):
                rows = np.resize(alike, -(-len(alike) // size) * size)
                weight = (np.arange(len(rows)) < len(alike)).astype(np.float32)
                picked = None if retrieved is None else retrieved[rows]
                for first in range(0, len(rows), size):
                    if picked is not None and self._renumbered(found, picked):
                        raise RetrievalError(
                            f"{self.index.path}: its passages on the devices were numbered anew "
                            "after these questions had found theirs, and before all were read: ask "
                            "them again")
                    batch = batcher.batch(rows, picked, self.index, weight=weight, own=first + own)
                    if not answers:
                        batch = batch._replace(target_ids=None, target_mask=None)
                    yield alike[first : first + size], parallel.put_rows(batch, self.mesh)

    def _renumbered(self, found: PassageStore, rows: np.ndarray) -> bool:
        """Whether rows of the passages as they were found are other passages now."""
        now = self.index.passages
        return now is not found and any(row >= len(now) or now[row] != found[row]
                                        for row in np.unique(rows).tolist())

    def compile(self, params: Params, questions: QuestionTokens, draws: Draws | None = None
                ) -> None:
        """Answers a batch with inputs of every padded length, so that none is compiled later for
        `decode` with a `Watch`.

        Args:
          questions: one batch of them.
          draws: as for `decode`.
        """
        limit, retrieved = questions.format.max_length, self.retrieve(params, questions)
        params = self._in_dtype(params)
        (numbers, batch), = self.batches(questions, retrieved, answers=False)
        for length in _padded_lengths(self.settings.length_step, limit):
            shape = (*batch.source_ids.shape[:2], length)
            source = parallel.put_batch(
                (np.zeros(shape, np.int32), np.ones(shape, bool)), self.mesh)
            padded = batch._replace(source_ids=source[0], source_mask=source[1])
            drawn = self._drawn(numbers, draws)
            if not self._grows(padded):
                self._decode_batch(params, padded, drawn)
                continue
            _, growing = self._begin(params, padded, *drawn, np.int32(1))
            for until in (2, 3):  # on several devices, the layout may change after the first call
                _, growing = self._go_on(params, growing, np.int32(until))

    def decode(self, params: Params, questions: QuestionTokens, retrieved: np.ndarray | None,
               draws: Draws | None = None, watch: Watch | None = None) -> list[Answer]:
        """Answers all questions from the given passages.

        Args:
          draws: how each is sampled; None = as the settings say, by its place.
          watch: who sees the answers while they are decoded; None = nobody. Where nobody waits any
            more, answers are cut where they are.
        """
        return list(self.decode_each(params, questions, retrieved, draws, watch))

    def decode_each(self, params: Params, questions: QuestionTokens, retrieved: np.ndarray | None,
                    draws: Draws | None = None, watch: Watch | None = None) -> Iterator[Answer]:
        """`decode`, but each answer comes as soon as it and those before it are there."""
        done, waiting, read = 0, {}, None
        found = None if retrieved is None else self.index.passages
        params, given = self._in_dtype(params), params
        if budget := self.settings.prefix_mib:
            read = self.prefixes.reader(self.model, given, params, budget)
        for numbers, batch in self.batches(questions, retrieved, answers=False, read=read):
            drawn = self._drawn(numbers, draws)
            if watch is not None and self._grows(batch):
                decoded = self._watched(params, batch, drawn, numbers, watch)
            else:
                decoded = self._decode_batch(params, batch, drawn)
            for row, fault in faults(decoded).items():
                if row < len(numbers):
                    raise type(fault)(f"{_named(questions, numbers[row])}: {fault}")
            for row, number in enumerate(numbers):
                passages = [] if retrieved is None else [
                    (found[i], found.source(i)) for i in retrieved[number].tolist()]
                waiting[number] = self._answer(questions, decoded, row, passages)
            while done in waiting:
                yield waiting.pop(done)
                done += 1

    def _in_dtype(self, params: Params) -> Params:
        """Parameters with the generator's matrices in the dtype in which they are multiplied.

        If the programs that answer converted them, their layout, and with it the rounding of sums,
        could differ from that of matrices which are kept in this dtype.
        """
        return {**params, "generator": in_dtype(params["generator"], self.model.generator.dtype)}

    def _drawn(self, numbers: np.ndarray, draws: Draws | None) -> tuple[Array | None, Array | None]:
        """Keys and temperatures of a batch that has these questions in its first rows."""
        if not self.decoding.sample:
            return None, None
        places = np.resize(numbers, self.batch_size)
        if draws is not None:
            return jax.tree.map(lambda each: each[places], tuple(draws))
        temperature = np.full(self.batch_size, self.decoding.temperature, np.float32)
        return keys_of(self.settings.seed, places), jax.device_put(temperature)

    def _grows(self, batch: Batch) -> bool:
        """Whether the answers of a batch can be seen while they are decoded."""
        return not self.settings.node_budget and grows(self.model, self.decoding, batch)

    def _watched(self, params: Params, batch: Batch, drawn: tuple[Array | None, Array | None],
                 numbers: np.ndarray, watch: Watch) -> Decoded:
        """`_decode_batch`, with calls of `watch.tell` on the way; stops where nobody waits."""
        longest = self.decoding.max_length
        until = min(watch.tokens, longest)
        decoded, growing = self._begin(params, batch, *drawn, np.int32(until))
        decoded = parallel.fetch(decoded)
        while until < longest and not decoded.ranked.finished.all() and not faults(decoded):
            begun, best = {}, decoded.best
            for row, number in enumerate(numbers.tolist()):
                tokens = self._until_end(best.tokens[row, :until])
                log_p = best.token_log_p[row, : len(tokens)]
                begun[number] = Beginning(tokens, log_p.tolist())
            if not watch.tell(begun):
                break
            until = min(until + watch.tokens, longest)
            decoded, growing = self._go_on(params, growing, np.int32(until))
            decoded = parallel.fetch(decoded)
        return decoded

    def _decode_batch(self, params: Params, batch: Batch,
                      drawn: tuple[Array | None, Array | None]) -> Decoded:
        """The answers of a batch as host arrays, with `drawn`, the keys and temperatures."""
        decoded = parallel.fetch(self._decode(params, batch, *drawn))
        if not self.settings.node_budget:
            return decoded
        proved = exact(self.model, self.decoding, params, batch, self.settings.node_budget,
                       start=decoded)
        return proved._replace(ranked=jax.tree.map(
            lambda best, others: np.concatenate([best, others], axis=1),
            proved.ranked, decoded.ranked))

    def reads(self, questions: QuestionTokens, retrieved: np.ndarray
              ) -> tuple[list[list[Passage]], Cuts]:
        """The passages, int[Q, K] of them, as the generator reads them: cut to fit its input.

        Returns:
          Passages whose text is what is read of it, and how much of them is cut.
        """
        store, layout = self.index.passages, questions.format
        table = store.tokens(PASSAGE_TABLE)
        lengths = table.lengths_of(retrieved)
        suffixes = np.array([len(suffix) for suffix in questions.suffixes], np.int64)
        kept = layout.kept(lengths, suffixes[:, None])
        cuts = Cuts()
        cuts.count(lengths, kept)

        def read(row: int, length: int, keep: int) -> Passage:
            passage = store[row]
            if keep == length:
                return passage
            return passage._replace(text=layout.text_of(passage.title, table.row(row)[:keep]))

        return [[read(*map(int, each)) for each in zip(*rows, strict=True)]
                for rows in zip(retrieved, lengths, kept, strict=True)], cuts

    def log_likelihoods(self, params: Params, questions: QuestionTokens,
                        retrieved: np.ndarray | None) -> dict[str, np.ndarray]:
        """The likelihood of the first answer of each question, in nats.

        Returns:
          float32[Q]: log_p = log p(answer | question) and, with a null document, log_p_null =
          log p(answer | question, no document).
        """
        result, params = {}, self._in_dtype(params)
        for numbers, batch in self.batches(questions, retrieved):
            for name, value in parallel.fetch(self._log_likelihood(params, batch)).items():
                if name.startswith("log_p"):
                    every = result.setdefault(name, np.zeros(len(questions), np.float32))
                    every[numbers] = value[: len(numbers)]
        for name, value in result.items():
            _require(questions, np.isfinite(value), f"{name} of its reference is not finite")
        return result

    def _answer(self, questions: QuestionTokens, decoded: Decoded, row: int,
                passages: list[tuple[Passage, Citation | None]]) -> Answer:
        """The answer in a row of a batch; of the passages that were read, with their sources."""
        if self.model.null_document != "none":
            passages = [*passages, (Passage("", "", ""), None)]
        best, *others = self._ranked(questions, decoded, row, passages)
        return best._replace(
            certified=bool(decoded.certified[row]), alternatives=others,
            expanded=0 if decoded.expanded is None else int(decoded.expanded[row]))

    def _ranked(self, questions: QuestionTokens, decoded: Decoded, row: int,
                passages: list[tuple[Passage, Citation | None]]) -> list[Answer]:
        """The answers to return, best first, each once: exact decoding may put first what the beam
        has found too.

        passages: those that were read, and the null document, if there is one; with their sources.
        """
        ranked, best_first, tokenizer = decoded.ranked, [], questions.format.tokenizer
        returned = len(self.decoding.labels) or self.decoding.num_return_sequences
        explained = passages and not self.model.fuses
        prior = decoded.prior[row, : len(passages)]
        for n, valid in enumerate(ranked.valid[row]):
            tokens = self._until_end(ranked.tokens[row, n])
            known = not self.decoding.sample and any(a.token_ids == tokens for a in best_first)
            if known or not valid and (n or ranked.valid[row].any()):
                continue
            posterior = ranked.posterior[row, n] if explained else prior
            token_posterior = ranked.token_posterior[row, n, :, : len(tokens)].T  # -> [T, K]
            best_first.append(Answer(
                text=self._labels.get(tuple(tokens)) or tokenizer.decode(tokens),
                token_ids=tokens,
                log_prob=float(ranked.log_p[row, n]),
                passages=[Evidence(*passage, *p, source) for (passage, source), *p in zip(
                    passages, prior.tolist(), posterior.tolist(), strict=True)],
                token_log_probs=ranked.token_log_p[row, n, : len(tokens)].tolist(),
                token_posterior=token_posterior.tolist() if explained else [],
                finished=bool(ranked.finished[row, n]),
                tokens=[tokenizer.piece(i) for i in tokens],
            ))
        return best_first[:returned]

    def _until_end(self, row: np.ndarray) -> list[int]:
        tokens, end = row.tolist(), self.model.end_id
        return tokens[: tokens.index(end) + 1] if end in tokens else tokens


def _padded_lengths(step: int, limit: int) -> list[int]:
    """The padded lengths of inputs of up to `limit` tokens."""
    return sorted({bucket(length, step, limit) for length in range(1, limit + 1)})


def _parts(rows: np.ndarray, size: int) -> list[np.ndarray]:
    """`rows` in parts of `size`; the last part may be smaller."""
    return [rows[first : first + size] for first in range(0, len(rows), size)]


def _require(questions: QuestionTokens, finite: np.ndarray, what: str) -> None:
    """Raises ScoreError for the first question where bool[Q] is False."""
    if not finite.all():
        raise ScoreError(f"{_named(questions, int(finite.argmin()))}: {what}: {NOT_FINITE}")


def _named(questions: QuestionTokens, number: int) -> str:
    example = questions.examples[number]
    return f"question {example.id!r} ({example.question[:80]!r})"
