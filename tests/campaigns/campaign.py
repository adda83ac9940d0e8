"""Many random cases of one kind, each made from (name, seed, number) alone.

A test has a short form in the suite and a whole one under the marker `campaign`:

    @pytest.mark.parametrize("count", campaign.counts(5, 100))
    def test_flips(count):
        outcomes = campaign.run("flips", count, one_case)      # one_case(rng: random.Random) -> str
        assert set(outcomes) <= {"detected", "harmless"}

With the environment variable RAG_JAX_CAMPAIGNS=FOLDER a whole campaign writes a line per case to
FOLDER/NAME.jsonl, and the same command goes on after the last line. RAG_JAX_CAMPAIGN_SEED=N draws
other cases.
"""

import collections
import json
import os
import pathlib
import random
from collections.abc import Callable

import pytest


def counts(short: int, whole: int) -> list:
    """The parameters of a test that is a campaign: in the suite, and with -m campaign."""
    return [short, pytest.param(whole, marks=pytest.mark.campaign)]


def run(name: str, count: int, case: Callable[[random.Random], str]) -> collections.Counter:
    """Runs cases 0 to count - 1 and counts their outcomes.

    A case that raises stops the campaign with its seed and number, which make it again.
    """
    seed = int(os.environ.get("RAG_JAX_CAMPAIGN_SEED", 0))
    folder = os.environ.get("RAG_JAX_CAMPAIGNS")
    log = folder and pathlib.Path(folder, f"{name}-{seed}.jsonl")
    done = {}
    if log and log.exists():
        for line in log.read_text("utf-8").split("\n"):
            if line.endswith("}"):  # not a line that a kill cut short
                record = json.loads(line)
                done[record["case"]] = record["outcome"]
    outcomes: collections.Counter = collections.Counter()
    for number in range(count):
        if number not in done:
            try:
                done[number] = case(random.Random(f"{name} {seed} {number}"))
            except BaseException:
                print(f"campaign {name}: case {number} of seed {seed}")
                raise
            if log:
                log.parent.mkdir(parents=True, exist_ok=True)
                with log.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"case": number, "outcome": done[number]}) + "\n")
        outcomes[done[number]] += 1
    print(f"campaign {name}, seed {seed}: {dict(outcomes)}")
    return outcomes
