"""The main job on a smaller scale: it learns to read, and shuffled passages hurt."""

import json
import subprocess
import sys

from rag_jax.api import load
from tests.end_to_end.commands import ROOT, environment

# So few steps teach to read only from a start with gold passages.
REDUCED = [
    "--config.retriever_warmup.pairs=gold",
    "--config.retriever_warmup.hard_negatives=3",
    "--config.data.world_cards=gold",
    "--config.runs=rag_token",
    "--config.data.fictional_countries=200",
    "--config.data.generator_vocab=1024",
    "--config.model.generator.width=128",
    "--config.model.generator.heads=4",
    "--config.model.generator.mlp_width=256",
    "--config.retriever_warmup.steps=180",
    "--config.retriever_warmup.batch_size=64",
    "--config.generator_warmup.steps=350",
    "--config.train.steps=150",
    "--config.train.eval_every=150",
    "--config.train.batch_size=32",
    "--config.tensorboard=false",
]


def test_reduced_quickstart_learns_and_shuffled_passages_hurt(tmp_path):
    usual = {**environment(), "XLA_FLAGS": ""}  # hundreds of steps: as a user compiles them
    done = subprocess.run(
        [sys.executable, "-m", "rag_jax.train", f"--workdir={tmp_path}", *REDUCED],
        capture_output=True, text=True, env=usual, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads((tmp_path / "report.json").read_text())
    own, shuffled = report["metrics"]["rag_token"], report["metrics"]["shuffled"]
    assert own["nll"] < shuffled["nll"] - 2, "the passages must matter to the likelihood"
    assert own["em"] > shuffled["em"] + 1, "and to the answers"
    assert report["recall_at_5"]["trained"] > 50
    swap = report["hot_swap"]
    assert set(swap) == {f"index{a}_leaders{b}" for a in ("2016", "2018") for b in ("2016", "2018")}
    for name in ("wall_secs", "peak_rss_gib", "seed", "versions"):
        assert name in report
    for line in ("EM, rag_token", "hot-swap, 2018 index, 2016 leaders", "peak memory"):
        assert line in done.stdout
    lines = (tmp_path / "rag_token" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    nll = [r["rag_token/nll"] for r in records if "rag_token/nll" in r]
    assert nll[-1] < nll[0] - 5
    assert records[-1]["dev/em"] >= 0
    likelihood = swapped_likelihoods(tmp_path)
    for year, other in (("2016", "2018"), ("2018", "2016")):
        assert likelihood[year, year] > likelihood[other, year] + 5, "the index must matter"


def swapped_likelihoods(path):
    """Mean log p of the leaders' names by (year of the index, year of the leaders); so short a
    training writes none of the names in full, so exact match would be 0 everywhere."""
    found = {}
    for index in ("2016", "2018"):
        trained = load(path, "rag_token", index=index)
        answerer = trained.answerer()
        for year in ("2016", "2018"):
            questions = trained.job.tokens(f"leaders_{year}")
            rows = answerer.retrieve(trained.params, questions)
            scores = answerer.log_likelihoods(trained.params, questions, rows)
            found[index, year] = scores["log_p"].mean()
    return found
