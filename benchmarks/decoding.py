"""Decoding beside transformers' RAG: the same random bert-base + bart-base, the same passages.

    python benchmarks/decoding.py [--repeats 3] [--only rag_token_greedy] [--sides ours theirs]
        [--json FILE]

Needs the [parity] extra (torch). Every side is a process of its own that holds its model; they take
turns, so that all see the same machine, and every answer has 32 new tokens. Prints medians and
tokens per second of

    ours, ours_bfloat16          passages of 160 tokens
    theirs, theirs_bfloat16      transformers, given exactly those 160 tokens
    theirs_padded                transformers as its own RagRetriever feeds it: padded to 300 tokens

--json writes {"ratios": theirs_padded / ours, both float32, what users of either wait for;
"ratios_unpadded": theirs / ours; "ratios_bfloat16": theirs_bfloat16 / ours_bfloat16; "secs",
"tokens_per_sec": of every side; "paper_qa": secs and peak_gib}.
RAG-Sequence gets two questions, since transformers loops over them. The case paper_qa is the
paper's QA setting of RAG-Sequence, 50 passages: ours alone, with its peak memory.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

import measuring
import numpy as np
from measuring import BART_BASE, SideProcesses

from rag_jax import files

SOURCE, PADDED, TOKENS = 160, 300, 32
SIDES = ("ours", "ours_bfloat16", "theirs", "theirs_padded", "theirs_bfloat16")
RATIOS = {"ratios": ("theirs_padded", "ours"), "ratios_unpadded": ("theirs", "ours"),
          "ratios_bfloat16": ("theirs_bfloat16", "ours_bfloat16")}
CASES = {  # name: questions, passages, beams, class of transformers
    "rag_token_greedy": (8, 5, 1, "RagTokenForGeneration"),
    "rag_token_beam4": (8, 5, 4, "RagTokenForGeneration"),
    "rag_sequence_thorough": (2, 5, 4, "RagSequenceForGeneration"),
}
PAPER_QA = (4, 50, 1, "RagSequenceForGeneration")  # ours alone, with its peak memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3, help="timed turns of each side")
    parser.add_argument("--only", choices=(*CASES, "paper_qa"), action="append",
                        help="some cases only")
    parser.add_argument("--sides", choices=SIDES, nargs="+", default=SIDES,
                        help="some sides only; ratios of the others are left out")
    parser.add_argument("--json", metavar="FILE", type=pathlib.Path,
                        help="write the figures there too")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        answer_requests(options.side, pathlib.Path(options.folder))
        return
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(folder)
        chosen = options.only or [*CASES, "paper_qa"]
        report = compare(folder, [case for case in chosen if case in CASES], options.sides,
                         options.repeats)
        if "paper_qa" in chosen:
            report["paper_qa"] = paper_qa(folder)
    if options.json:
        files.write_json(options.json, report)


def compare(folder: str, cases: list[str], chosen: list[str], repeats: int) -> dict:
    report: dict = {"secs": {}, "tokens_per_sec": {}, **{name: {} for name in RATIOS}}
    if not cases:
        return report
    with SideProcesses(__file__, chosen, folder) as processes:
        for case in cases:
            turns = processes.take_turns(case, repeats)
            compare_case(case, turns, report)
    return report


def compare_case(case: str, turns: dict[str, list[dict]], report: dict) -> None:
    """Prints a case, of which every side had `turns`, and adds it to the report."""
    first = {side: each[0] for side, each in turns.items()}
    median = {side: statistics.median(turn["secs"] for turn in each[1:])
              for side, each in turns.items()}
    report["secs"][case] = median
    tokens = CASES[case][0] * TOKENS
    report["tokens_per_sec"][case] = {side: tokens / secs for side, secs in median.items()}
    print(case)
    if {"ours", "theirs"} <= set(first):
        same = np.mean([a == b for a, b in zip(
            first["ours"]["tokens"], first["theirs"]["tokens"], strict=True)])
        print(f"  same answers {100 * same:.0f} %")
    for side, each in median.items():
        print(f"  {side:16} {each:7.2f} s  {tokens / each:6.1f} tokens/s; first call "
              f"{first[side]['secs']:.1f} s")
    for name, (slow, fast) in RATIOS.items():
        if not {slow, fast} <= set(median):
            continue
        report[name][case] = median[slow] / median[fast]
        print(f"  {slow} / {fast}: {report[name][case]:.1f}", flush=True)


def write_checkpoint(folder: str) -> None:
    code = """
import json, sys, torch, transformers
torch.manual_seed(0)
config = transformers.RagConfig.from_question_encoder_generator_configs(
    transformers.DPRConfig(), transformers.BartConfig(**json.loads(sys.argv[2]), init_std=0.06),
    n_docs=5)
transformers.RagTokenForGeneration(config).save_pretrained(sys.argv[1])
"""
    subprocess.run([sys.executable, "-c", code, folder, json.dumps(BART_BASE)], check=True)


def paper_qa(folder: str) -> dict:
    done = subprocess.run([sys.executable, __file__, "--side", "ours", "--folder", folder],
                          input="paper_qa\npaper_qa\n", stdout=subprocess.PIPE, text=True,
                          check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    questions, passages, *_ = PAPER_QA
    print(f"paper's QA setting, RAG-Sequence, thorough, greedy: {questions} questions x {passages} "
          f"passages in {found['secs']:.1f} s, peak memory {found['peak_gib']:.2f} GiB")
    return {"secs": found["secs"], "peak_gib": found["peak_gib"]}


def inputs(questions: int, passages: int, vocab: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(questions)
    return {"source": rng.integers(5, vocab, (questions, passages, SOURCE)),
            "doc_scores": rng.normal(size=(questions, passages)).astype(np.float32)}


def answer_requests(side: str, folder: pathlib.Path) -> None:
    make = ours if side.startswith("ours") else theirs
    dtype = "bfloat16" if side.endswith("bfloat16") else "float32"
    run = make(folder, dtype, PADDED if side.endswith("padded") else SOURCE)
    measuring.answer_requests(run, lambda tokens: {"tokens": tokens})


def theirs(folder: pathlib.Path, dtype: str, length: int):
    import torch
    import transformers

    models = {}

    def run(case: str) -> list[list[int]]:
        questions, passages, beams, name = CASES[case]
        if name not in models:
            models.clear()
            models[name] = getattr(transformers, name).from_pretrained(
                folder, dtype=getattr(torch, dtype)).eval()
        model = models[name]
        x = {k: torch.from_numpy(v) for k, v in inputs(
            questions, passages, model.config.generator.vocab_size).items()}
        rest = (0, length - SOURCE)
        ids = torch.nn.functional.pad(x["source"].flatten(0, 1), rest, value=1)
        mask = torch.nn.functional.pad(torch.ones_like(x["source"].flatten(0, 1)), rest)
        given = {"context_input_ids": ids, "context_attention_mask": mask,
                 "doc_scores": x["doc_scores"].to(model.dtype),
                 "n_docs": passages, "num_beams": beams, "do_sample": False,
                 "max_length": TOKENS + 1, "min_length": TOKENS + 1, "length_penalty": 0.0}
        if beams > 1:
            given["early_stopping"] = "never"
        settings = getattr(model, "generation_config", None) or model.generator.generation_config
        settings.forced_eos_token_id = None
        model.generator.generation_config.forced_eos_token_id = None
        with torch.no_grad():
            return [row[1:] for row in model.generate(**given).tolist()]

    return run


def ours(folder: pathlib.Path, dtype: str, length: int):
    del length  # nothing is padded
    import jax

    from rag_jax import process
    from rag_jax.decoding.answer import decode
    from rag_jax.decoding.settings import Decoding
    from rag_jax.hub.load import load
    from rag_jax.models import rag
    from rag_jax.types import Batch

    process.keep_memory()
    how = {"dtype": dtype}
    found = load(folder, towers=["query_encoder", "generator"], retriever=how, generator=how)
    compiled = {}
    query = np.asarray(rag.embed(
        rag.RagModel(found.retriever, found.generator, "token", 2, 2, 1),
        found.params["query_encoder"], np.ones((1, 8), np.int32), np.ones((1, 8), bool)))[0]
    direction = query / (query @ query)  # its inner product with the query is 1

    def run(case: str) -> list[list[int]]:
        questions, passages, beams, name = {**CASES, "paper_qa": PAPER_QA}[case]
        x = inputs(questions, passages, found.generator.vocab_size)
        if case not in compiled:
            kind = "token" if name.startswith("RagToken") else "sequence"
            model = rag.RagModel(found.retriever, found.generator, kind, 2, 2, 1)
            settings = Decoding(strategy="thorough", num_beams=beams, max_length=TOKENS,
                                min_length=TOKENS)
            compiled[case] = jax.jit(
                lambda params, batch: decode(model, settings, params, batch).best.tokens)
        ids, mask = np.ones((questions, 8), np.int32), np.ones((questions, 8), bool)
        batch = Batch(
            ids, mask, x["source"].astype(np.int32), np.ones(x["source"].shape, bool),
            x["doc_scores"][:, :, None] * direction,
            np.ones((questions, passages), bool), np.zeros((questions, 2), np.int32),
            np.ones((questions, 2), bool), np.ones(questions, np.float32))
        return np.asarray(compiled[case](found.params, batch)).tolist()

    return run


if __name__ == "__main__":
    main()
