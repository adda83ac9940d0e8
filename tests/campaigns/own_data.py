"""Passages and questions of random words; `python -m tests.campaigns.own_data FOLDER WORKDIR`
prepares them."""

import json
import pathlib
import random
import sys

from rag_jax.config import Config, config_files, overrides
from rag_jax.data.prepare import prepare
from tests.end_to_end.commands import SMALLEST

WORDS = [f"word{number}" for number in range(500)]


def own_config(folder: pathlib.Path) -> Config:
    """Passages and questions of this folder."""
    return overrides.replace(config_files.load_file(str(SMALLEST)), {
        f"data.{name}": str(folder / f"{name}.jsonl") for name in ("passages", "train", "dev")})


def write_passages(file: pathlib.Path, rng: random.Random, count: int) -> None:
    lines = [{"id": str(number), "title": rng.choice(WORDS),
              "text": " ".join(rng.choices(WORDS, k=30))} for number in range(count)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_questions(folder: pathlib.Path, rng: random.Random, count: int) -> None:
    for split in ("train", "dev"):
        lines = [{"question": f"what is {rng.choice(WORDS)}?", "answers": ["x"],
                  "positive_ids": [str(rng.randrange(count))]} for _ in range(300)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    prepare(own_config(pathlib.Path(sys.argv[1])), pathlib.Path(sys.argv[2]))
