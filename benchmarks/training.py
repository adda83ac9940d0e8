"""One training step beside transformers' RAG: the same architecture, the same real passages.

    python benchmarks/training.py --passages FILE.tsv [--rounds 2] [--steps 3] [--kinds rag_token]
        [--sides ours theirs] [--questions 4] [--documents 5] [--json FILE]

Needs the [parity] extra (torch). FILE is in DPR's format: a header, then id, text and title with
tabs between. bert-base as query encoder and bart-base, random weights, dropout, AdamW with
clipping; a question is a piece of a passage of 100 words. Ours goes the way of a command:
configuration, RagBatcher, the jitted step of the stage. Retrieval itself is on neither side. Every
side is a process of its own; they take turns, round by round:

    float32, bfloat16                    ours
    as_shipped, bfloat16_as_shipped      transformers, sources padded to 300 as its retriever does
    float32_longest, bfloat16_longest    transformers, padded to the longest

transformers' bfloat16 is autocast. Prints medians of seconds, the peak memory of the process, and
GFLOP/s of the tokens that are no padding, beside what XLA's product of two matrices reaches in the
same process. --json writes {"ratios": {"as_shipped/bfloat16": theirs / ours, ...}, "sides": ...,
"cpu": ...}; ratios of other kinds than the first stand under "KIND/as_shipped/bfloat16".
"""

import argparse
import csv
import itertools
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from measuring import BART_BASE, cpu_name, peak_gib

from rag_jax import files

OURS = ("float32", "bfloat16")
THEIRS = ("as_shipped", "float32_longest", "bfloat16_as_shipped", "bfloat16_longest")
KINDS = {"rag_token": "RagTokenForGeneration", "rag_sequence": "RagSequenceForGeneration"}
PADDED, WORDS = 300, 100
LEARNING_RATE, CLIP, DECAY = 1e-5, 1.0, 0.01
Step = Callable[[int], float]  # number -> loss
GENERATOR_VOCAB = 16_384  # trained on a few thousand passages: as many tokens a word as BART's


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passages", required=True, metavar="FILE.tsv", help="id, text, title")
    parser.add_argument("--rounds", type=int, default=2, help="processes of each side")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of each process")
    parser.add_argument("--kinds", choices=KINDS, nargs="+", default=["rag_token"])
    parser.add_argument("--sides", choices=("ours", "theirs", *OURS, *THEIRS), nargs="+",
                        default=["ours", "theirs"])
    parser.add_argument("--questions", type=int, default=4)
    parser.add_argument("--documents", type=int, default=5, help="passages of each question")
    parser.add_argument("--json", metavar="FILE", type=pathlib.Path,
                        help="write the figures there too")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        take_steps(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        report = compare(options, pathlib.Path(folder))
    if options.json:
        files.write_json(options.json, report)


def compare(options: argparse.Namespace, folder: pathlib.Path) -> dict:
    from accelerator import useful_flops  # imports jax, which is no part of the rivals' memory

    write_data(options, folder)
    job, make = our_job(options, folder, options.kinds[0], "float32")
    batch = make()
    np.savez(folder / "batch.npz", **{
        name: value for name, value in batch._asdict().items() if value is not None})
    real = {name: int(getattr(batch, f"{name}_mask").sum())
            for name in ("question", "source", "target")}
    computed = batch.source_mask if batch.source_places is None else batch.source_places
    report = {"cpu": cpu_name(), "source": list(computed.shape), "real_tokens": real,
              "source_padding": 1 - real["source"] / computed.size,
              "gflop": useful_flops(job.model.retriever, job.model.generator, batch) / 1e9,
              "ratios": {}, "sides": {}}
    print(f"{report['cpu']}; sources {report['source']}, {100 * report['source_padding']:.0f} % "
          f"padding; real tokens {real}; they need {report['gflop']:.0f} GFLOP")
    groups = {"ours": OURS, "theirs": THEIRS}
    sides = [side for name in options.sides for side in groups.get(name, (name,))]
    for kind in options.kinds:
        of = "" if kind == options.kinds[0] else f"{kind}/"
        rounds = {side: [] for side in sides}
        for _ in range(options.rounds):
            for side in sides:
                rounds[side].append(one_process(options, folder, side, kind))
        print(kind)
        for side, found in rounds.items():
            report["sides"][of + side] = summary(found, report["gflop"])
            print(f"  {side:20} " + ", ".join(
                f"{key} {value:.3g}" for key, value in report["sides"][of + side].items()),
                flush=True)
        secs = {side: report["sides"][of + side]["secs"] for side in sides}
        for theirs in set(THEIRS) & set(sides):
            for ours in set(OURS) & set(sides):
                report["ratios"][f"{of}{theirs}/{ours}"] = secs[theirs] / secs[ours]
    for name, ratio in sorted(report["ratios"].items()):
        print(f"  {name}: {ratio:.2f}")
    return report


def one_process(options: argparse.Namespace, folder: pathlib.Path, side: str, kind: str) -> dict:
    command = [sys.executable, __file__, "--side", side, "--folder", folder, "--kinds", kind]
    for name in ("passages", "steps", "questions", "documents"):
        command += [f"--{name}", str(getattr(options, name))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def summary(found: list[dict], gflop: float) -> dict[str, float]:
    """Medians over the rounds."""
    result = {"secs": statistics.median(s for one in found for s in one["secs"])}
    for key in found[0].keys() - {"secs"}:
        result[key] = statistics.median(one[key] for one in found)
    result["gflops"] = gflop / result["secs"]
    if "matrix_peak" in result:
        result["share_of_peak"] = result["gflops"] / result["matrix_peak"]
    return result


def take_steps(options: argparse.Namespace) -> None:
    """One process: the first step compiles and warms up, the others are timed."""
    folder, (kind,) = pathlib.Path(options.folder), options.kinds
    make = our_step if options.side in OURS else their_step
    step = make(options, folder, kind, options.side)
    secs = []
    for number in range(options.steps + 1):
        began = time.perf_counter()
        loss = step(number)
        secs.append(time.perf_counter() - began)
        if not np.isfinite(loss):
            raise SystemExit(f"{options.side}: loss {loss}")
    found = {"secs": secs[1:], "first_secs": secs[0], "peak_gb": peak_gib() * 2**30 / 1e9}
    if options.side in OURS:
        found["matrix_peak"] = matrix_peak(options.side)
    print(json.dumps(found))


class Found(NamedTuple):
    """What RagBatcher reads of an index: the passages, and embeddings that are drawn."""

    passages: Any
    division: str = "none"

    def embeddings(self, rows: np.ndarray) -> np.ndarray:
        return np.random.default_rng(0).normal(size=(*rows.shape, 768)).astype(np.float32)


def write_data(options: argparse.Namespace, folder: pathlib.Path) -> None:
    """Tokenizers and passages, for the processes of all sides."""
    from rag_jax.data.batches import PASSAGE_TABLE
    from rag_jax.data.text import GeneratorFormat
    from rag_jax.data.tokenizer_training import train_bart_tokenizer, train_bert_tokenizer
    from rag_jax.retrieval.protocol import Passage
    from rag_jax.retrieval.store_writing import write_store

    with open(options.passages, encoding="utf-8", newline="") as file:
        rows = list(itertools.islice(csv.DictReader(file, delimiter="\t"), 10_000))
    of_length = [row for row in rows if 0.95 * WORDS <= len(row["text"].split()) <= WORDS]
    chosen = of_length[:: max(1, len(of_length) // (options.questions * options.documents))]
    if len(chosen) < options.questions * options.documents:
        raise SystemExit(f"{options.passages}: too few passages of {WORDS} words")
    texts = [row["text"] for row in rows]
    train_bert_tokenizer(texts, 8192).save(folder / "retriever")
    tokenizer = train_bart_tokenizer(texts, GENERATOR_VOCAB)
    tokenizer.save(folder / "generator")
    form = GeneratorFormat(tokenizer, PADDED)
    write_store(folder / "store", (Passage(row["id"], row["title"], row["text"]) for row in chosen),
                {PASSAGE_TABLE: lambda ps: form.passages(
                    [p.title for p in ps], [p.text for p in ps])})


def our_job(options: argparse.Namespace, folder: pathlib.Path, kind: str, dtype: str):
    """The job of one run, and how the host makes the batch of its step."""
    from rag_jax import parallel
    from rag_jax.config import Config, overrides
    from rag_jax.data.batches import RagBatcher
    from rag_jax.data.packed import Groups
    from rag_jax.data.prepared import Prepared, generator_format
    from rag_jax.data.question_files import Example
    from rag_jax.data.text import Tokenizer
    from rag_jax.retrieval.passages import PassageStore
    from rag_jax.training.job import Job

    config = overrides.for_run(overrides.replace(Config(), {
        "model.retriever.dtype": dtype, "model.generator.dtype": dtype,
        "train.batch_size": options.questions, "retrieval.k": options.documents,
        "train.optimizer.learning_rate": LEARNING_RATE, "train.optimizer.clip_norm": CLIP,
        "train.optimizer.weight_decay": DECAY, "train.optimizer.schedule": "constant"}), kind)
    tokenizers = [Tokenizer.load(folder / name) for name in ("retriever", "generator")]
    store = PassageStore.open(folder / "store")
    retrieved = np.arange(options.questions * options.documents).reshape(options.questions, -1)
    examples = []
    for number, first in enumerate(retrieved[:, 0]):
        words = store[int(first)].text.split()
        answer = " ".join(words[40 : 43 + number % 3])
        examples.append(Example(str(number), " ".join(words[20:31]) + "?", (answer,)))
    prepared = Prepared(*tokenizers, generator_format(config, tokenizers[1]),
                        {"passages": store}, {"train": examples})
    job = Job(config, folder, prepared, parallel.make_mesh(config.mesh))
    batcher = RagBatcher(job.tokens("train"), config.data.length_step,
                         job.model.embedding_width, groups=Groups())
    return job, lambda: batcher.batch(np.arange(options.questions), retrieved, Found(store))


def our_step(options: argparse.Namespace, folder: pathlib.Path, kind: str, dtype: str) -> Step:
    import jax

    from rag_jax import parallel, process
    from rag_jax.training.fine_tuning import rag_stage

    process.keep_memory()  # as every command does
    job, batch = our_job(options, folder, kind, dtype)
    stage = rag_stage(job, kind, None, None, meta={})
    state = stage.make_state()

    def step(number: int) -> float:
        nonlocal state
        state, metrics = stage.train_step(state, parallel.put_rows(batch(), job.mesh), number)
        jax.block_until_ready((state, metrics))
        return float(metrics["loss"])

    return step


def matrix_peak(dtype: str) -> float:
    """GFLOP/s of XLA's product of two matrices."""
    import jax
    import jax.numpy as jnp

    size = 2048
    matrix = jnp.ones((size, size), dtype)
    product = jax.jit(lambda x, y: jnp.matmul(x, y, preferred_element_type=jnp.float32))
    secs = []
    for _ in range(12):
        began = time.perf_counter()
        product(matrix, matrix).block_until_ready()
        secs.append(time.perf_counter() - began)
    return 2 * size**3 / min(secs) / 1e9


def their_step(options: argparse.Namespace, folder: pathlib.Path, kind: str, side: str) -> Step:
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.RagConfig.from_question_encoder_generator_configs(
        transformers.DPRConfig(), transformers.BartConfig(**BART_BASE), n_docs=options.documents)
    model = getattr(transformers, KINDS[kind])(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=DECAY, fused=True)
    with np.load(folder / "batch.npz") as file:
        x = {name: torch.from_numpy(file[name]) for name in (
            "question_ids", "question_mask", "source_ids", "source_mask", "target_ids",
            "target_mask", "doc_embeddings")}

    def trimmed(name: str) -> tuple[torch.Tensor, torch.Tensor]:
        ids, mask = x[f"{name}_ids"].long(), x[f"{name}_mask"].long()
        longest = int(mask.sum(-1).max())
        return ids[..., :longest].flatten(0, -2), mask[..., :longest].flatten(0, -2)

    question, question_mask = trimmed("question")
    source, source_mask = trimmed("source")
    labels = torch.nn.functional.pad(trimmed("target")[0], (1, 0), value=0)  # <s>
    if side.endswith("as_shipped"):
        rest = (0, PADDED - source.shape[1])
        source = torch.nn.functional.pad(source, rest, value=1)
        source_mask = torch.nn.functional.pad(source_mask, rest)
    half = side.startswith("bfloat16")

    def step(number: int) -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            query = model.rag.question_encoder(question, question_mask)[0]
            scores = torch.einsum("be,bke->bk", query.float(), x["doc_embeddings"])
            loss = model(context_input_ids=source, context_attention_mask=source_mask,
                         doc_scores=scores, labels=labels, reduce_loss=True,
                         n_docs=options.documents).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


if __name__ == "__main__":
    main()
