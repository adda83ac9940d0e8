"""What every family of generators gives, and the table of them.

A generator is asked for log p(y_t | source, y_<t), and that is all that marginals, searches and
certificates see of it. It reads a source once and then goes token by token, with what it keeps of
the tokens before as an explicit pytree that goes in and comes out. There are two kinds:

  encoder-decoder: a source is what the encoder reads; of it, keys and values of every layer of the
    decoder's cross-attention are kept.
  decoder-only: a source is a prompt, and of it keys and values of every layer's self-attention;
    targets continue the prompt. Rows are padded at the right, and `begin` says where each ends.

The decoder's inputs of a target are [start, y_1, ..., y_{T-1}] (`rag.shift_right`). Of a
decoder-only model, `start` is the last token of the prompt, the same for all; the source is the
prompt without it.

The hypotheses about a document stand side by side on the query axis of the attention and share its
source. Their own past lies side by side, too, with place t * M + m for the token that stood at
place m in step t, and a mask says which places are a hypothesis's own: a beam search moves no keys
and values (`rag_jax.decoding.documents`).

A family is: a configuration (`config.GENERATORS`), a module (`FAMILIES` below), and its names in
checkpoints (`rag_jax/hub/names.toml`, `hub.names`, `hub.families`). Its parameters have the table
of the output layer as "output", or "embedding" where that is the same, and a bias as
"final_logits_bias", if any (`vocabulary.head`); a stack of layers is a `stack.Stack`; every
parameter has logical axes that `parallel.RULES` knows. States are as the output layer reads them:
after the last norm, and scaled if the family does so.

Sizes: R documents, P passages of each (K in Fusion-in-Decoder, else 1), S tokens of a source, M
hypotheses or A answers about each document, T tokens of them.
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

    `states` runs layers looped or scanned; `read`, `step` and `forced` the looped ones.
    """

    config: GeneratorConfig

    def states(self, ids: jax.Array, mask: jax.Array, inputs: jax.Array,
               deterministic: bool = True, places: jax.Array | None = None,
               target_places: jax.Array | None = None) -> jax.Array:
        """Training: states dtype[R, T, D] where inputs int32[R, T] are forced, about passages
        int32[R, P, S], each read by itself, whose tokens are where mask bool[R, P, S] is True.

        Both of these are given to a family that `packs` alone, which then computes no padding:
        places: int32[B, N], `Packing.places` of the sources.
        target_places: int32[G, N], those of the targets; the states are dtype[G, N, D] then.
        """

    def read(self, ids: jax.Array, mask: jax.Array, before: Source | None = None) -> Source:
        """What is kept of passages int32[R, P, S], each read by itself.

        before: of a decoder-only model, what it has kept of the tokens before these: a source of
          R * P documents of one passage each, whose S comes first in what is returned.
        """

    def step(self, source: Source, tokens: jax.Array, position: jax.Array,
             past: tuple[KeysValues, ...], own: jax.Array
             ) -> tuple[jax.Array, tuple[KeysValues, ...]]:
        """States dtype[R, M, D] of one token more of each hypothesis, and `past` with it.

        Args:
          tokens: int32[R, M], inputs at position int32[].
          past: for each layer, keys and values at T * M places; those of this position are not
            there yet (`KeysValues.with_tokens` puts them in).
          own: bool[R, 1, M, T * M], the places that a hypothesis may see, its own at this position
            among them.
        """

    def forced(self, source: Source, inputs: jax.Array) -> jax.Array:
        """States dtype[R * A, T, D] where inputs int32[R, A, T] are forced about what was read."""

    def __call__(self, ids: jax.Array, mask: jax.Array, inputs: jax.Array,
                 deterministic: bool = True) -> jax.Array:
        """Logits float32[R, T, V] about one passage [R, S] each; initialisation goes through here.
        """


FAMILIES: dict[str, type[nn.Module]] = {"bart": Bart, "t5": T5, "causal": CausalLM}


MATRICES = ("kernel", "embedding", "output")  # parameters that are read in `config.dtype`


def in_dtype(params: Params, dtype: str) -> Params:
    """A generator's matrices in the dtype in which they are multiplied, converted once instead of
    every step."""
    def convert(path: Any, leaf: jax.Array) -> jax.Array:
        if path[-1].key not in MATRICES or leaf.dtype == dtype:
            return leaf
        return leaf.astype(jnp.dtype(dtype))

    return jax.tree_util.tree_map_with_path(convert, params)


def build(config: GeneratorConfig) -> Generator:
    """The module of a configuration."""
    return FAMILIES[config.family](config)
