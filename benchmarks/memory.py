"""Peak memory of loading a decoder-only generator and answering with it, by how it is kept.

    python benchmarks/memory.py [--layers 24]

Writes a checkpoint of 0.5B random parameters (Qwen2.5-0.5B's form) into a temporary folder. Each
config.model.generator.param_dtype has a process of its own, which loads it, reads 5 prompts of 160
tokens in bfloat16 and decodes 4 tokens. It prints its peak resident memory and a digest of the
log-probabilities, which has to be the same.
"""

import argparse
import functools
import hashlib
import subprocess
import sys
import tempfile

import jax
import numpy as np
from kept_passages import PASSAGE, PASSAGES, batch, random_params
from measuring import peak_gib

from rag_jax.config import BertConfig, CausalConfig
from rag_jax.decoding.answer import decode
from rag_jax.decoding.settings import Decoding
from rag_jax.hub.config_json import Architecture, SpecialIds
from rag_jax.hub.load import load
from rag_jax.hub.save import save
from rag_jax.models import rag
from rag_jax.models.generator import in_dtype

END, TOKENS = 2, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=24, help="fewer take less time")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--keep", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.keep:
        answer(options.folder, options.keep)
    elif options.folder:
        write(options.folder, options.layers)
    else:  # a process begins with the peak of the one that starts it, which so has to stay small
        with tempfile.TemporaryDirectory() as folder:
            for keep in ("", "float32", "bfloat16"):
                subprocess.run([sys.executable, __file__, f"--folder={folder}/model",
                                f"--keep={keep}", f"--layers={options.layers}"], check=True)


def write(folder: str, layers: int) -> None:
    config = CausalConfig(decoder_layers=layers)
    params = random_params(rag.RagModel(BertConfig(), config, "token", 1, END, END))
    save(folder, "Qwen2ForCausalLM", {"generator": params},
         Architecture(generator=config, ids=SpecialIds(END, END, END, None)))


def answer(folder: str, keep: str) -> None:
    before = peak_gib()
    found = load(folder, generator={"dtype": "bfloat16", "param_dtype": keep})
    loaded = peak_gib()
    prompts = np.random.default_rng(0).integers(3, found.generator.vocab_size, (PASSAGES, PASSAGE))
    model = rag.RagModel(BertConfig(), found.generator, "token", 1, END, END, lexical=True)
    program = jax.jit(functools.partial(decode, model, Decoding(max_length=TOKENS)))
    params = {"generator": in_dtype(found.params["generator"], "bfloat16")}  # as an Answerer does
    decoded = jax.device_get(program(params, batch(prompts, PASSAGE)))
    peak = peak_gib()
    count = sum(leaf.size for leaf in jax.tree.leaves(found.params))
    print(f"param_dtype={keep}: {count / 1e6:.0f}M parameters; peak "
          f"{before:.2f} GiB before, {loaded:.2f} loaded, {peak:.2f} answering; "
          f"{hashlib.sha256(decoded.ranked.token_log_p.tobytes()).hexdigest()[:8]}", flush=True)


if __name__ == "__main__":
    main()
