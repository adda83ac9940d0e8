"""RAG-Token over a decoder-only generator of 0.5B parameters beside transformers, mixed by hand.

    python benchmarks/decoder_only.py [--dtype bfloat16] [--prompt-lookup 0] [--repeats 2]

Needs the [parity] extra (torch). One question, 5 prompts of 160 random tokens, 32 greedy tokens.
transformers reads the prompts as a batch, keeps its cache, and the five distributions of every next
token are summed by a few lines here. Both have the same random weights of Qwen2.5-0.5B's form; they
take turns. Prints the seconds of each turn, the ratio of their medians, how many of the first
tokens are the same (all in float32; in bfloat16 roundings part them sooner or later), and how many
steps ours took, which are fewer with --prompt-lookup.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from kept_passages import shown_medians
from measuring import in_turns
from prompt_lookup import counted

from rag_jax.config import BertConfig, CausalConfig
from rag_jax.decoding.answer import decode
from rag_jax.decoding.settings import Decoding
from rag_jax.hub import names
from rag_jax.models import rag
from rag_jax.types import Batch

PASSAGES, SOURCE, TOKENS, END = 5, 160, 32, 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--layers", type=int, default=24, help="fewer take less time")
    parser.add_argument("--prompt-lookup", type=int, default=0, help="eval.prompt_lookup of ours")
    parser.add_argument("--repeats", type=int, default=2, help="timed turns of each side")
    options = parser.parse_args()
    config = CausalConfig(decoder_layers=options.layers, dtype=options.dtype, vocab_size=151936)
    torch.manual_seed(0)
    theirs = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(
        vocab_size=config.vocab_size, hidden_size=config.width, num_hidden_layers=options.layers,
        num_attention_heads=config.heads, num_key_value_heads=config.kv_heads,
        intermediate_size=config.mlp_width, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=END, dtype=options.dtype,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta}))
    theirs = theirs.to(getattr(torch, options.dtype)).eval()
    params: dict = {}
    for weight in names.causal_weights("generator", config, names.Place("", "model.")):
        value = theirs.state_dict()[weight.names[0]].float().numpy()
        branch = params
        for key in weight.path[:-1]:
            branch = branch.setdefault(key, {})
        branch[weight.path[-1]] = jnp.asarray(names.to_ours(value, weight.form), options.dtype)
    prompts = np.random.default_rng(0).integers(1, config.vocab_size, (PASSAGES, SOURCE))
    prompts[:, -1] = prompts[0, -1]  # as the end of a template
    sides = {"theirs": lambda: np.array(by_hand(theirs, torch.from_numpy(prompts))),
             "ours": ours(config, params, prompts, options.prompt_lookup)}
    steps = counted()
    results, seconds = in_turns(sides, options.repeats)
    jax.effects_barrier()
    median = shown_medians(seconds)
    same = np.cumprod(results["theirs"] == results["ours"]).sum()
    print(f"theirs / ours, {options.dtype}, {options.layers} layers: "
          f"{median['theirs'] / median['ours']:.2f}; "
          f"the first {same} of {TOKENS} tokens are the same; ours took "
          f"{len(steps) // (options.repeats + 1)} steps")


@torch.no_grad()
def by_hand(model: transformers.Qwen2ForCausalLM, prompts: torch.Tensor) -> list[int]:
    """Greedy tokens of the mean of the prompts' distributions; </s> is never chosen."""
    ids, cache, tokens = prompts, None, []
    while len(tokens) < TOKENS:
        result = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = result.past_key_values
        p = torch.softmax(result.logits[:, -1].float(), dim=-1).mean(dim=0)
        p[END] = 0
        tokens.append(int(p.argmax()))
        ids = torch.full((PASSAGES, 1), tokens[-1])
    return tokens


def ours(config: CausalConfig, params: dict, prompts: np.ndarray, prompt_lookup: int):
    """The same by `decode`: a prompt's last token is the decoder's first input."""
    last = int(prompts[0, -1])
    model = rag.RagModel(BertConfig(), config, "token", last, END, END, lexical=True)
    ones = np.ones((1, 4), bool)
    batch = Batch(ones.astype(np.int32), ones, prompts[None, :, :-1].astype(np.int32),
                  np.ones((1, PASSAGES, SOURCE - 1), bool), None, np.ones((1, PASSAGES), bool),
                  None, None, np.ones(1, np.float32),
                  doc_scores=np.zeros((1, PASSAGES), np.float32))
    settings = Decoding(max_length=TOKENS, min_length=TOKENS, prompt_lookup=prompt_lookup)
    run = jax.jit(lambda params, batch: decode(model, settings, params, batch).best.tokens[0])
    return lambda: np.asarray(run(params, batch))


if __name__ == "__main__":
    main()
