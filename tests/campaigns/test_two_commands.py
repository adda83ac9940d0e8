"""Two commands on one workdir: one works, the other says who holds it, and nothing is damaged."""

import json
import pathlib
import random
import shutil
import time

import pytest

from tests.campaigns import campaign, commands
from tests.end_to_end.commands import command, start


def begun(reference: pathlib.Path, work: pathlib.Path, rng: random.Random) -> None:
    """A workdir that does not exist yet, or one without its fine-tuning, or without its data."""
    shutil.rmtree(work, ignore_errors=True)
    lost = rng.choice([None, ["rag_token"], ["rag_token", "data/names.txt", "data/questions"]])
    if lost is None:
        return
    shutil.copytree(reference, work)
    for name in lost:
        path = work / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def both(first: list[str], second: list[str], delay: float) -> list[tuple[int, int, str]]:
    """Starts one command after the other; (pid, status, output) of each."""
    started = [start(*first[2:])]
    time.sleep(delay)  # which of the two is first is left to chance
    started.append(start(*second[2:]))
    return [(process.pid, process.wait(), printed) for process in started
            for printed in [process.stdout.read()]]


@pytest.mark.parametrize("count", campaign.counts(1, 50))
def test_two_commands(trained, tmp_path, count):
    reference, work = trained, tmp_path / "work"

    def case(rng):
        if count == 1:  # the short form: the workdir of a run about to be fine-tuned
            rng = random.Random(3)
        begun(reference, work, rng)
        results = both(command("train", work), command("train", work), rng.uniform(0, 2))
        commands.assert_same(work, reference)
        assert commands.leftovers(work) == []
        (pid, status, _), (_, refused, printed) = sorted(results, key=lambda found: found[1])
        if (status, refused) == (0, 0):
            return "one after the other"
        assert (status, refused) == (0, 1)
        assert f"error: {work}: process {pid} on " in printed and "is writing here" in printed
        return "one refused"

    outcomes = campaign.run("two-commands", count, case)
    assert outcomes["one refused"] > count // 2


@pytest.mark.campaign
def test_commands_beside_training(trained, tmp_path):
    """evaluate works beside it; build_index into the workdir is refused, or goes first."""
    reference, work = trained, tmp_path / "work"
    passages = tmp_path / "more.jsonl"
    passages.write_text(json.dumps({"id": "1", "title": "t", "text": "some words"}) + "\n")
    commands.finish(command("evaluate", reference, "--split=dev", f"--out={tmp_path / 'whole'}"),
                    "evaluate")

    def case(rng):
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(reference, work)
        out = tmp_path / "out"
        if rng.random() < 0.5:
            second = command("evaluate", work, "--split=dev", f"--out={out}")
        else:
            second = command("build_index", work, f"--passages={passages}",
                             f"--out={work / 'indexes' / 'more'}")
        (_, first, printed), (_, status, other) = both(
            command("train", work), second, rng.uniform(0, 2))
        shutil.rmtree(work / "indexes" / "more", ignore_errors=True)
        commands.assert_same(work, reference)
        if "evaluate" in second[2]:
            assert (first, status) == (0, 0), printed + other
            assert commands.contents(out) == commands.contents(tmp_path / "whole")
            return "evaluated beside it"
        assert {first, status} <= {0, 1} and 0 in (first, status), printed + other
        assert "is writing here" in printed + other or first == status == 0
        return "index built first" if first else "index refused" if status else "in turn"

    campaign.run("beside-training", 50, case)
