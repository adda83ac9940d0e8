"""The methods that every family of generators has, and the table of families.

Marginals, searches and certificates use a generator only for log p(y_t | source, y_<t). It reads a
source once and then continues it token by token; what it keeps of earlier tokens is an explicit
pytree, passed in and returned. There are two kinds of generators:

  encoder-decoder: the encoder reads the source, and the keys and values of cross-attention in
    every layer of the decoder are kept.
  decoder-only: the source is a prompt, which targets continue, and the keys and values of
    self-attention in every layer are kept. Rows are padded on the right; `Source.begin` says where
    each one ends.

The decoder's inputs for a target are [start, y_1, ..., y_{T-1}] (`teacher_forcing.shift_right`).
For a decoder-only model, `start` is the last token of the prompt, which all prompts share; the
source is the prompt without it.

All hypotheses for a document share its source; they are side by side on the query axis of
attention. Their own past is side by side, too: the token that was in beam m at step t stays at
place t * M + m, and a mask says which places are in a hypothesis's own past. So a beam search moves
no keys and values (`rag_jax.decoding.documents`).

A family consists of a configuration (`config.GENERATORS`), a module (`FAMILIES` below) and its
names in checkpoints (`rag_jax/hub/names.toml`, `hub.names`, `hub.families`). In its parameters, the
table of the output layer is "output", or "embedding" where the two are the same, and the bias, if
any, "final_logits_bias" (`vocabulary.head`). A stack of layers is a `stack.Stack`, and every
parameter has logical axes of `parallel.RULES`. States are the input of the output layer: they come
after the last norm, and are scaled if the family scales them.

Shapes: R documents, P passages of each (K in Fusion-in-Decoder, otherwise 1), S tokens of a source,
M hypotheses or A answers for each document, T tokens of each of these.
"""

from typing import Any, Protocol

import flax.linen as nn
import jax
import jax.numpy as jnp

from rag_jax.config import GeneratorConfig
from rag_jax.models.attention import KeysValues, Source
from rag_jax.models.bart import Bart
from rag_jax.models.causal_lm import CausalLM
from rag_jax.models.t5 import T5
from rag_jax.types import Params


class Generator(Protocol):
    """The methods of a family's Linen module, which is made from its configuration alone.

    `states` runs both looped and scanned layers; `read`, `step` and `forced` only looped ones.
    """

    config: GeneratorConfig

    def states(self, ids: jax.Array, mask: jax.Array, inputs: jax.Array,
               deterministic: bool = True, places: jax.Array | None = None,
               target_places: jax.Array | None = None) -> jax.Array:
        """Teacher-forced states dtype[R, T, D], for training.

        Args:
          ids: int32[R, P, S], passages, each of which is read alone.
          mask: bool[R, P, S], True where they have tokens.
          inputs: int32[R, T], the decoder's.
          places: int32[B, N], `Packing.places` of the sources, so that no padding is computed; only
            for a family that `packs`.
          target_places: int32[G, N], those of the targets; the states are then dtype[G, N, D].
        """

    def read(self, ids: jax.Array, mask: jax.Array, before: Source | None = None) -> Source:
        """What is kept of passages int32[R, P, S], each of which is read alone.

        before: for decoder-only models, what was kept of the tokens before these: a source of R * P
          documents of one passage each, whose places come first in the result.
        """

    def step(self, source: Source, tokens: jax.Array, position: jax.Array,
             past: tuple[KeysValues, ...], own: jax.Array
             ) -> tuple[jax.Array, tuple[KeysValues, ...]]:
        """States dtype[R, N * M, D] of N more tokens of each hypothesis, and `past` with them.

        Args:
          tokens: int32[R, N, M], the inputs at N successive positions.
          position: int32[], the first of these, counted from 0 at the first input of the targets.
          past: for each layer, keys and values at T * M places, where those of these positions are
            still to be written (`KeysValues.with_tokens`).
          own: bool[R, 1, N * M, T * M], the places of the hypothesis's own tokens up to each one.
        """

    def forced(self, source: Source, inputs: jax.Array) -> jax.Array:
        """Teacher-forced states dtype[R * A, T, D] of inputs int32[R, A, T] for a source."""

    def __call__(self, ids: jax.Array, mask: jax.Array, inputs: jax.Array,
                 deterministic: bool = True) -> jax.Array:
        """Logits float32[R, T, V] from one passage int32[R, S] each; parameters are initialised by
        this method."""


FAMILIES: dict[str, type[nn.Module]] = {"bart": Bart, "t5": T5, "causal": CausalLM}


MATRICES = ("kernel", "embedding", "output")  # parameters that are used in `config.dtype`


def in_dtype(params: Params, dtype: str) -> Params:
    """A generator's parameters with its matrices in the dtype in which they are multiplied, so that
    they are converted once and not in every step."""
    def convert(path: Any, leaf: jax.Array) -> jax.Array:
        if path[-1].key not in MATRICES or leaf.dtype == dtype:
            return leaf
        return leaf.astype(jnp.dtype(dtype))

    return jax.tree_util.tree_map_with_path(convert, params)


def build(config: GeneratorConfig) -> Generator:
    """The module of a configuration."""
    return FAMILIES[config.family](config)
