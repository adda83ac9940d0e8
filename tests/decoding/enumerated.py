"""A tiny RAG model whose every answer is enumerated in float64."""

import functools
import itertools
from typing import NamedTuple

import jax
import numpy as np
import tiny

from rag_jax.decoding.answer import decode
from rag_jax.decoding.settings import Decoding
from rag_jax.models import likelihood

VOCAB, LONGEST, QUESTIONS, DOCS, END, PAD = 5, 3, 6, 3, tiny.END, tiny.PAD
EVERYTHING = 85  # 1 + 4 + 16 answers that end, 64 that are cut


def model(kind):
    return tiny.rag_model(kind, generator={"vocab_size": VOCAB, "max_positions": 8})


BATCH = tiny.rag_batch(seed=5, questions=QUESTIONS, passages=DOCS, target=LONGEST,
                       model=model("token"))
PATHS = list(itertools.product(range(VOCAB), repeat=LONGEST))
ANSWERS = [y for n in range(1, LONGEST + 1) for y in itertools.product(range(VOCAB), repeat=n)
           if END not in y[:-1] and (y[-1] == END or n == LONGEST)]
ENDED = [y for y in ANSWERS if y[-1] == END]


def strengthened(params, parts=("cross_attention",)):
    """Strong positions and attention: small random models otherwise repeat one token for ever."""
    def scale(path, leaf):
        name = jax.tree_util.keystr(path)
        if "decoder_positions" in name:
            return leaf * 4
        return leaf * 3 if any(p in name for p in parts) and "query" not in name else leaf

    return {**params, "generator": jax.tree_util.tree_map_with_path(scale, params["generator"])}


@functools.cache
def params(seed=7):
    return strengthened(tiny.rag_params(model("token"), seed=seed))


def with_end_bias(params, bias):
    generator = dict(params["generator"])
    generator["final_logits_bias"] = generator["final_logits_bias"].at[END].add(bias)
    return {**params, "generator": generator}


@functools.cache
def _decode(kind, settings):
    return tiny.jit(functools.partial(decode, model(kind), settings))


def run(params, batch, kind, width, key=None, **settings):
    """Host arrays; compiled once for the same settings. All of the beam is returned."""
    settings = Decoding(**{"num_return_sequences": width, "max_length": LONGEST, **settings},
                        num_beams=width)
    return jax.device_get(_decode(kind, settings)(params, batch, key))


@functools.cache
def _forced(model):
    return tiny.jit(lambda params, batch: (likelihood.log_prior(model, params, batch),
                                           likelihood.token_log_probs(model, params, batch)[0]))


class World(NamedTuple):
    """log p(z | x) [B, K] and {prefix: log p(y_t | x, z, prefix) [B, K, V]} by full forwards."""

    prior: np.ndarray
    table: dict

    def said(self, question, y):
        """log p(y_t | x, z, y_<t) [T, K]."""
        return np.array([self.table[y[:t]][question, :, y[t]] for t in range(len(y))])

    def log_p(self, question, y, kind):
        """log p(y | x)."""
        p, prior = np.exp(self.said(question, y)), np.exp(self.prior[question])
        if kind == "sequence":
            return np.log((prior * p.prod(axis=0)).sum())
        return np.log((prior[None] * p).sum(axis=1)).sum()

    def mixed(self, question, kind):
        """The function prefix -> log p(. | x, prefix) [V] with the documents summed out."""
        def of(prefix):
            weights = np.exp(self.prior[question])
            if kind == "sequence" and prefix:
                weights = weights * np.exp(self.said(question, prefix).sum(axis=0))
                weights = weights / weights.sum()
            return np.log(weights @ np.exp(self.table[prefix][question]))
        return of


@functools.cache
def world(seed=7):
    return world_of(model("token"), params(seed))


def world_of(model, params):
    """The world of any generator with VOCAB tokens."""
    table = {p: np.zeros((QUESTIONS, DOCS, VOCAB)) for n in range(LONGEST)
             for p in itertools.product(range(VOCAB), repeat=n)}
    for question in range(QUESTIONS):
        batch = jax.tree.map(
            lambda leaf, q=question: np.repeat(leaf[q : q + 1], len(PATHS), axis=0), BATCH)
        batch = batch._replace(target_ids=np.array(PATHS, np.int32))
        log_p = np.float64(_forced(model)(params, batch)[1])
        for path, under_docs in zip(PATHS, log_p, strict=True):
            for t in range(LONGEST):
                table[path[:t]][question, :, path[t]] = under_docs[:, t]
    prior = np.float64(_forced(model)(params, BATCH)[0])
    return World(prior, table)


def cut(row):
    """A row of tokens up to END; what follows must be padding."""
    row = np.asarray(row).tolist()
    length = row.index(END) + 1 if END in row else len(row)
    assert all(t == PAD for t in row[length:])
    return tuple(row[:length])


def answers(decoded):
    return [cut(row) for row in decoded.best.tokens]


def ranked(decoded, question):
    """The valid answers of one question."""
    return [cut(row) for row, valid in zip(decoded.ranked.tokens[question],
                                           decoded.ranked.valid[question], strict=True) if valid]
