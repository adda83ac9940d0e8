"""Time to the first token of an answer from passages that were met before, and from new ones.

    python benchmarks/kept_passages.py [--dtype bfloat16] [--layers 24] [--repeats 3]

A decoder-only generator of 0.5B parameters (Qwen2.5-0.5B's form, random weights) reads 5 passages
of 160 random tokens with a question of 24, and gives RAG-Token's first token. Three sides take
turns: passages and question are read together (config.eval.prefix_mib=0); passages by themselves,
none of them kept; and all of them kept. Prints the seconds of each turn and the ratios of medians.
The last two have to give the same bits.
"""

import argparse
import functools
import statistics
from collections.abc import Mapping, Sequence

import jax
import ml_dtypes
import numpy as np
from measuring import in_turns

from rag_jax.config import BertConfig, CausalConfig
from rag_jax.decoding.answer import decode
from rag_jax.decoding.prefixes import KeptPrefixes
from rag_jax.decoding.results import Decoded
from rag_jax.decoding.settings import Decoding
from rag_jax.models import rag
from rag_jax.types import Batch, Prefixes

PASSAGES, PASSAGE, QUESTION, PADDED = 5, 160, 24, 32
ENOUGH = 1024  # MiB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--layers", type=int, default=24, help="fewer take less time")
    parser.add_argument("--repeats", type=int, default=3, help="timed turns of each side")
    options = parser.parse_args()
    config = CausalConfig(decoder_layers=options.layers, dtype=options.dtype)
    model = rag.RagModel(BertConfig(), config, "token", 1, 2, 2, lexical=True)
    params = {"generator": random_params(model)}
    rng = np.random.default_rng(0)
    passages = rng.integers(3, config.vocab_size, (PASSAGES, PASSAGE))
    question = rng.integers(3, config.vocab_size, QUESTION)
    program = jax.jit(functools.partial(decode, model, Decoding(max_length=1)))

    def together() -> Decoded:
        ids = np.array([[*passage, *question] for passage in passages])
        return jax.device_get(program(params, batch(ids, PASSAGE + PADDED)))

    def in_two_parts(kept: KeptPrefixes) -> Decoded:
        read = kept.reader(model, params, ENOUGH)
        keys, values = read(passages.tolist(), [PASSAGE] * PASSAGES)
        prefixes = Prefixes(keys[None], values[None], np.full((1, PASSAGES), PASSAGE, np.int32),
                            np.array(passages[None], np.int32))
        ids = np.tile(question, (PASSAGES, 1))
        return jax.device_get(program(params, batch(ids, PADDED)._replace(prefixes=prefixes)))

    kept = KeptPrefixes()
    sides = {"together": together, "new": lambda: in_two_parts(KeptPrefixes()),
             "kept": lambda: in_two_parts(kept)}
    results, seconds = in_turns(sides, options.repeats)
    median = shown_medians(seconds)
    same = jax.tree.map(np.array_equal, results["kept"], results["new"])
    print(f"{options.dtype}, {options.layers} layers: kept / together "
          f"{median['kept'] / median['together']:.2f}, kept / new "
          f"{median['kept'] / median['new']:.2f}, new / together "
          f"{median['new'] / median['together']:.2f}; kept and new give the same bits: "
          f"{all(jax.tree.leaves(same))}")


def shown_medians(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The median of each side's turns; prints all of them."""
    for name, each in seconds.items():
        print(f"{name}: {', '.join(f'{value:.3f}' for value in each)} s")
    return {name: statistics.median(each) for name, each in seconds.items()}


def random_params(model: rag.RagModel) -> dict:
    """The generator's, with matrices in its dtype."""
    pool = np.random.default_rng(0).normal(0, 0.02, 2**20).astype(np.float32)
    dtype = ml_dtypes.bfloat16 if model.generator.dtype == "bfloat16" else np.float32

    def fill(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        values = np.resize(pool, leaf.shape) if len(leaf.shape) > 1 else np.ones(leaf.shape)
        return jax.device_put(values.astype(dtype if len(leaf.shape) > 1 else np.float32))

    boxed = jax.eval_shape(lambda: model.init(jax.random.key(0), ("generator",)))["generator"]
    return jax.tree.map(lambda box: fill(box.value), boxed,
                        is_leaf=lambda leaf: hasattr(leaf, "value"))


def batch(ids: np.ndarray, length: int) -> Batch:
    """One question with these inputs, padded."""
    ones = np.ones((1, 4), bool)
    source = np.zeros((1, len(ids), length), np.int32)
    source[0, :, : ids.shape[1]] = ids
    mask = np.broadcast_to(np.arange(length) < ids.shape[1], source.shape)
    return Batch(ones.astype(np.int32), ones, source, mask, None, np.ones((1, len(ids)), bool),
                 None, None, np.ones(1, np.float32),
                 doc_scores=np.zeros((1, len(ids)), np.float32))


if __name__ == "__main__":
    main()
