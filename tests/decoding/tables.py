"""Random language models over a tiny vocabulary as tables, to search without a neural network."""

import functools
import itertools

import jax
import jax.numpy as jnp
import naive
import numpy as np
import tiny

from rag_jax.decoding.beam import Recursion, TokenIds, beam_search, gather_beams
from rag_jax.decoding.constraints import make_rule
from rag_jax.decoding.mixture import weights
from rag_jax.decoding.settings import Decoding

VOCAB, PAD, END, START = 4, 1, 2, 0


def every_answer(longest):
    """All that can be found: ended sequences, and those cut at `longest`."""
    return [y for n in range(1, longest + 1) for y in itertools.product(range(VOCAB), repeat=n)
            if END not in y[:-1] and (y[-1] == END or n == longest)]


class Tables:
    """log p(token | document, prefix) [rows, K, prefixes, V]; log prior [rows, K].

    Prefix () has number 0 and (*prefix, t) has 4 prefix + t + 1. A step's carry is the number of
    each hypothesis' whole prefix: forgetting to reorder it shows.
    """

    def __init__(self, rows, documents=1, longest=3, seed=0, end_bias=0.0, spread=2.0):
        rng = np.random.default_rng(seed)
        prefixes = (VOCAB**longest - 1) // (VOCAB - 1)
        logits = spread * rng.normal(size=(rows, documents, prefixes, VOCAB))
        logits[..., END] += end_bias
        self.log_p, self.longest = naive.log_softmax(logits), longest
        self.log_prior = naive.log_softmax(rng.normal(size=(rows, documents)))

    def row(self, number):
        """One row alone."""
        one = object.__new__(Tables)
        one.log_p, one.longest = self.log_p[number : number + 1], self.longest
        one.log_prior = self.log_prior[number : number + 1]
        return one

    def beside(self, other):
        """Both sets of rows in one."""
        both = object.__new__(Tables)
        both.log_p = np.concatenate([self.log_p, other.log_p])
        both.log_prior = np.concatenate([self.log_prior, other.log_prior])
        both.longest = self.longest
        return both

    def search(self, kind="token", calls=None, **settings):
        """What `beam_search` finds, as host arrays."""
        settings = Decoding(max_length=self.longest, **settings)
        if calls is None:
            run = _search(self.log_p.shape, kind, settings)
            return jax.device_get(run(jnp.float32(self.log_p), jnp.float32(self.log_prior)))
        found = jax.device_get(tiny.jit(functools.partial(_run, kind, settings, calls))(
            jnp.float32(self.log_p), jnp.float32(self.log_prior)))
        jax.effects_barrier()
        return found

    def under(self, row, prefix):
        """log p(. | document, prefix) [K, V]."""
        code = 0
        for token in prefix:
            code = VOCAB * code + token + 1
        return self.log_p[row, :, code]

    def said(self, row, tokens):
        """log p(token | document, tokens before) [T, K]."""
        return np.array([self.under(row, tokens[:t])[:, y] for t, y in enumerate(tokens)])

    def mixed(self, kind, row):
        """The function prefix -> log p(. | prefix) [V] with the documents summed out."""
        prior = np.exp(self.log_prior[row])

        def of(prefix):
            mix = prior
            if kind == "sequence" and prefix:
                mix = prior * np.exp(self.said(row, prefix).sum(axis=0))
                mix = mix / mix.sum()
            return np.log(mix @ np.exp(self.under(row, prefix)))

        return of

    def score(self, kind, row, tokens):
        """log p(tokens) by the paper's equations."""
        prior, p = np.exp(self.log_prior[row]), np.exp(self.said(row, tokens))
        if kind == "sequence":
            return np.log((prior * p.prod(axis=0)).sum())
        return np.log(p @ prior).sum()


def _run(kind, settings, calls, tables, log_prior):
    rows, documents = log_prior.shape

    def step(last, position, prefix, running):
        if calls is not None:
            jax.debug.callback(lambda: calls.append(1))
        prefix = jnp.where(position == 0, 0, VOCAB * prefix + last + 1)
        under = jax.vmap(lambda table, codes: table[:, codes])(tables, prefix)  # -> [R, K, M, V]
        return under, prefix

    recursion = Recursion(
        step, jnp.zeros((rows, settings.num_beams), jnp.int32), gather_beams,
        weights(kind, log_prior), make_rule(settings, END), rows, documents)
    return beam_search(recursion, settings, TokenIds(START, END, PAD))


@functools.cache
def _search(shape, kind, settings):
    return tiny.jit(functools.partial(_run, kind, settings, None))


def cut(tokens, end=END, pad=PAD):
    """A row of tokens up to its end; what follows must be padding."""
    tokens = tuple(int(t) for t in tokens)
    length = tokens.index(end) + 1 if end in tokens else len(tokens)
    assert all(t == pad for t in tokens[length:])
    return tokens[:length]


def valid(found, row):
    """[(score, tokens)] of the hypotheses that were found."""
    hypotheses = found.hypotheses
    return [(float(score), cut(tokens)) for score, tokens in
            zip(hypotheses.scores[row], hypotheses.tokens[row], strict=True) if score > -1e20]
