"""The main job on a smaller scale: it learns to read, and shuffled passages hurt."""

import json
import subprocess
import sys

from tests.end_to_end.commands import ROOT, environment

REDUCED = [
    "--config.runs=rag_token,rag_sequence",
    "--config.data.fictional_countries=300",
    "--config.retriever_warmup.steps=150",
    "--config.retriever_warmup.batch_size=64",
    "--config.generator_warmup.steps=200",
    "--config.train.steps=60",
    "--config.train.eval_every=60",
    "--config.tensorboard=false",
]


def test_reduced_quickstart_learns_and_shuffled_passages_hurt(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "rag_jax.train", f"--workdir={tmp_path}", *REDUCED],
        capture_output=True, text=True, env=environment(), cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads((tmp_path / "report.json").read_text())
    em = report["em"]
    assert em["rag_token"] >= em["shuffled"] + 5, em
    assert em["rag_sequence"] >= em["shuffled"] + 5, em
    assert report["recall_at_5"]["trained"] > 50
    swap = report["hot_swap"]
    assert set(swap) == {f"index{a}_leaders{b}" for a in ("2016", "2018") for b in ("2016", "2018")}
    for name in ("wall_secs", "peak_rss_gib", "seed", "versions"):
        assert name in report
    for line in ("EM, rag_token", "hot-swap, 2018 index, 2016 leaders", "peak memory"):
        assert line in done.stdout
    for run in ("rag_token", "rag_sequence"):
        lines = (tmp_path / run / "metrics.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        first, last = records[0][f"{run}/nll"], records[-2][f"{run}/nll"]
        assert last < first
        assert records[-1]["dev/em"] >= 0
