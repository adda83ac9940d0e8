"""SIGKILL at random moments, again and again: the end is bitwise that of an uninterrupted run.

The whole run, evaluate, build_index and the preparation of data, each in processes of its own.
"""

import pathlib
import random
import shutil
import sys

import pytest

from rag_jax.data.prepare import prepare
from tests.campaigns import campaign, commands
from tests.campaigns.own_data import own_config, write_passages, write_questions
from tests.end_to_end.commands import command


def chain(rng: random.Random, words: list[str], kind: str, idle: float) -> str:
    """Kills a command up to three times, then lets it finish; the outcome, if all is well."""
    kills = sum([commands.killed(words, kind, rng, idle) for _ in range(rng.randint(1, 3))])
    commands.finish(words, kind)
    return f"equal after {kills} kills"


@pytest.fixture(scope="module")
def reference(trained, tmp_path_factory) -> pathlib.Path:
    """A trained workdir that nobody else writes into."""
    copy = tmp_path_factory.mktemp("campaign") / "reference"
    shutil.copytree(trained, copy)
    return copy


@pytest.mark.campaign
def test_whole_runs(reference, tmp_path):
    """In the suite, end_to_end/test_resume.py kills every stage once."""
    commands.finish(command("train", tmp_path / "timed"), "train")

    def case(rng):
        work = tmp_path / "work"
        shutil.rmtree(work, ignore_errors=True)
        outcome = chain(rng, command("train", work), "train", idle=0.1)
        commands.assert_same(work, reference)
        assert commands.leftovers(work) == []
        return outcome

    assert all(o.startswith("equal") for o in campaign.run("kills-train", 50, case))


@pytest.mark.parametrize("count", campaign.counts(1, 50))
def test_evaluations(reference, tmp_path, count):
    """Killed while it writes, and never touching what is the workdir's."""
    def evaluate(out):
        return command("evaluate", reference, "--split=dev", f"--out={out}")

    before = commands.contents(reference)
    commands.finish(evaluate(tmp_path / "whole"), "evaluate")

    def case(rng):
        out = tmp_path / "out"
        shutil.rmtree(out, ignore_errors=True)
        outcome = chain(rng, evaluate(out), "evaluate", idle=0.2)
        assert commands.contents(out) == commands.contents(tmp_path / "whole")
        assert commands.leftovers(out) == commands.leftovers(reference) == []
        assert commands.contents(reference) == before
        return outcome

    assert all(o.startswith("equal") for o in campaign.run("kills-evaluate", count, case))


@pytest.mark.parametrize("count", campaign.counts(1, 50))
def test_index_builds(reference, tmp_path, count):
    """Inside the workdir and elsewhere; the embedding goes on where it was."""
    write_passages(tmp_path / "more.jsonl", random.Random(1), 400)

    def build(out):
        return command("build_index", reference, f"--passages={tmp_path / 'more.jsonl'}",
                       f"--out={out}")

    commands.finish(build(tmp_path / "whole"), "build_index")

    def case(rng):
        out = rng.choice([tmp_path, reference / "indexes"]) / "more"
        shutil.rmtree(out, ignore_errors=True)
        outcome = chain(rng, build(out), "build_index", idle=0.2)
        assert commands.contents(out) == commands.contents(tmp_path / "whole")
        assert commands.leftovers(tmp_path) == commands.leftovers(reference) == []
        shutil.rmtree(out)
        return outcome

    assert all(o.startswith("equal") for o in campaign.run("kills-build_index", count, case))


@pytest.mark.parametrize("count", campaign.counts(1, 50))
def test_preparations(tmp_path, count):
    """Files that change between two kills are read again: what is equal is the last of them."""
    work, whole = tmp_path / "work", tmp_path / "whole"
    words = [sys.executable, "-m", "tests.campaigns.own_data", str(tmp_path), str(work)]
    write_passages(tmp_path / "passages.jsonl", random.Random(1), 1000)
    write_questions(tmp_path, random.Random(1), 1000)
    commands.finish(words, "prepare")

    def case(rng):
        for folder in (work, whole):
            shutil.rmtree(folder, ignore_errors=True)
        kills = 0
        for _ in range(rng.randint(1, 3)):
            kills += commands.killed(words, "prepare", rng, idle=0.1)
            if rng.random() < 0.3:
                write_passages(tmp_path / "passages.jsonl", rng, 1000)
            if rng.random() < 0.3:
                write_questions(tmp_path, rng, 1000)
        commands.finish(words, "prepare")
        prepare(own_config(tmp_path), whole)
        one, two = commands.contents(work), commands.contents(whole)
        assert one.keys() == two.keys() and [n for n in one if one[n] != two[n]] == []
        assert commands.leftovers(work) == []
        return f"equal after {kills} kills"

    assert all(o.startswith("equal") for o in campaign.run("kills-prepare", count, case))
