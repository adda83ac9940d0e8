"""Interrupted and resumed equals uninterrupted, bitwise: SIGTERM, and SIGKILL at random moments.

Every run is the command that a user types, in a process of its own.
"""

import json
import os
import pathlib
import random
import signal

import jax
import numpy as np
import pytest

from tests.end_to_end.commands import begin, command, finish, run, start


def interrupt(workdir: pathlib.Path, marker: str, number: signal.Signals, *flags: str) -> int:
    """Starts training, sends the signal once a line of the log has `marker`; the exit status."""
    process = start(*command("train", workdir, *flags)[2:])
    seen = []
    for line in process.stdout:
        seen.append(line)
        if marker in line:
            process.send_signal(number)
            break
    else:
        pytest.fail(f"training never printed {marker!r}:\n{''.join(seen)[-3000:]}")
    process.stdout.read()
    return process.wait()


def arrays(workdir: pathlib.Path, step: int = 10) -> dict[str, np.ndarray]:
    """Every array of a checkpoint of the run, the last by default: parameters, optimiser state."""
    import orbax.checkpoint as ocp

    found = {}
    for item in ("params", "opt_state"):
        folder = (workdir / "rag_token" / str(step) / item).absolute()
        with ocp.PyTreeCheckpointer() as checkpointer:  # as numpy, whatever devices it came from
            plain = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray),
                                 checkpointer.metadata(folder).item_metadata.tree)
            tree = checkpointer.restore(folder, restore_args=plain)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            found[item + jax.tree_util.keystr(path)] = np.asarray(leaf)
    return found


def assert_same(first: pathlib.Path, second: pathlib.Path) -> None:
    one, two = arrays(first), arrays(second)
    assert one.keys() == two.keys() and len(one) > 20
    for name, array in one.items():
        assert array.dtype == two[name].dtype
        assert array.tobytes() == two[name].tobytes(), name
    reports = [json.loads((w / "report.json").read_text()) for w in (first, second)]
    assert reports[0]["em"] == reports[1]["em"]
    assert reports[0]["metrics"] == reports[1]["metrics"]


WARMED_UP = ("retriever", "generator", "indexes")


def test_sigterm_saves_and_the_same_command_goes_on(trained, tmp_path):
    begin(tmp_path, trained, *WARMED_UP)
    status = interrupt(tmp_path, "rag_token 5/10", signal.SIGTERM)
    assert status == 75, "a job scheduler must not take it for finished"
    steps = [int(p.name) for p in (tmp_path / "rag_token").iterdir() if p.name.isdigit()]
    assert steps and max(steps) < 10, "SIGTERM must leave a checkpoint of an unfinished run"
    finish("train", tmp_path)
    assert_same(trained, tmp_path)


def test_sigkill_at_random_moments_of_every_stage(trained, tmp_path):
    rng = random.Random(os.environ.get("RAG_JAX_TEST_SEED", "3"))
    for stage, steps in (("retriever", 6), ("generator", 6), ("rag_token", 10)):
        step = rng.randint(1, steps - 1)
        assert interrupt(tmp_path, f"{stage} {step}/{steps}", signal.SIGKILL) == -signal.SIGKILL
    finish("train", tmp_path)
    assert_same(trained, tmp_path)


def test_sigkill_with_stale_retrieval_keeps_what_was_pending(trained, tmp_path):
    """Where the weight of words is learned, it is part of what a search is begun with."""
    stale = ("--config.retrieval.staleness=1", "--config.retrieval.retriever=hybrid",
             "--config.train.bm25_weight_rate=50", "--config.train.full_information=0")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for workdir in (whole, killed):
        begin(workdir, trained, *WARMED_UP)
    finish("train", whole, *stale)
    interrupt(killed, "rag_token 5/10", signal.SIGKILL, *stale)
    finish("train", killed, *stale)
    assert_same(whole, killed)
    assert abs(arrays(whole)["params['fusion']['logit']"]) > 0.01


def test_a_finished_run_is_not_trained_again(uninterrupted):
    before = arrays(uninterrupted)
    output = finish("train", uninterrupted)
    assert "rag_token 10/10" not in output
    after = arrays(uninterrupted)
    assert all(before[name].tobytes() == after[name].tobytes() for name in before)


def test_another_configuration_on_the_same_workdir_is_refused(uninterrupted):
    done = run("train", uninterrupted, "--config.train.batch_size=4")
    assert done.returncode == 1
    assert "config.train.batch_size: 8 there, 4 now" in done.stderr
