"""Memory of a whole training command on a CPU: bert-base twice and bart-base, stage by stage.

    python benchmarks/command_memory.py --passages FILE.tsv --train FILE.jsonl [--steps 4]
        [--root ANOTHER_CHECKOUT]

Runs `python -m rag_jax.train` of this checkout, or of another one, in a process of its own: one
step of each warm-up, then RAG-Token on the first 16 questions and 200 passages, with a checkpoint
after every second step. Prints what the process has in memory, and the most that it has had (Linux:
VmRSS and VmHWM), at each line that it prints. Compiled programs are read where they are kept.
"""

import argparse
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

CONFIG = """
from rag_jax.config import *

def get_config():
    optimizer = OptimizerConfig(learning_rate=1e-5, warmup_steps=2)
    once = {{"steps": 1, "save_every": 1, "batch_size": 4, "optimizer": optimizer}}
    return Config(
        runs=("rag_token",),
        data=DataConfig(passages={passages!r}, train={train!r}, dev={train!r},
                        generator_vocab=16384, retriever_vocab=8192),
        model=ModelConfig(retriever=BertConfig(), generator=BartConfig()),
        retrieval=RetrievalConfig(k=5),
        retriever_warmup=RetrieverWarmupConfig(pairs="words", **once),
        generator_warmup=GeneratorWarmupConfig(**once),
        train=TrainConfig(steps={steps}, batch_size=4, eval_every={steps}, save_every=2,
                          log_every=1, optimizer=optimizer),
        eval=EvalConfig(batch_size=8, max_examples=8))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passages", required=True, help="TSV: id, text, title")
    parser.add_argument("--train", required=True, help="JSON lines: id, question, answers")
    parser.add_argument("--steps", type=int, default=4, help="of RAG-Token")
    parser.add_argument("--root", default=pathlib.Path(__file__).parents[1], help="a checkout")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        passages, train = (pathlib.Path(folder) / name for name in ("passages.tsv", "train.jsonl"))
        passages.write_text("".join(head(options.passages, 201)), "utf-8")
        asked = [json.loads(line) for line in head(options.train, 16)]  # without what they name
        train.write_text("".join(json.dumps({name: question[name] for name in (
            "id", "question", "answers")}) + "\n" for question in asked), "utf-8")
        config = pathlib.Path(folder) / "base.py"
        config.write_text(CONFIG.format(
            passages=str(passages), train=str(train), steps=options.steps))
        follow([sys.executable, "-m", "rag_jax.train", f"--config={config}",
                f"--workdir={folder}/workdir"], options.root)


def head(file: str, lines: int) -> list[str]:
    """The first lines of a file."""
    with open(file, encoding="utf-8") as opened:
        return list(itertools.islice(opened, lines))


def follow(command: list[str], root: str) -> None:
    """Runs a command, and prints its lines with its memory at that moment."""
    began = time.monotonic()
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(root)}, cwd=root,
                               text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    for line in process.stdout:
        status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
        now, most = (int(found[1]) / 1e6 if (found := re.search(rf"{name}:\s+(\d+) kB", status))
                     else float("nan") for name in ("VmRSS", "VmHWM"))  # gone where it has ended
        print(f"{time.monotonic() - began:6.0f} s  {now:5.2f} GB, at most {most:5.2f}  {line}",
              end="", flush=True)
    if process.wait():
        raise SystemExit(process.returncode)


if __name__ == "__main__":
    main()
