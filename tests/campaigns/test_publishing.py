"""Indexes published onto a path that others open, and publishers that are killed."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests.campaigns import campaign

ROOT = pathlib.Path(__file__).parents[2]


def finish(*arguments):
    command = [sys.executable, "-m", "tests.campaigns.publishing", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT,
                          env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.mark.parametrize("count", campaign.counts(1, 10))
def test_opens_during_publications_see_one_version_whole(count, tmp_path):
    """6 of 2,429 opens mixed two versions, and 5,105 failed. Ten publications by two processes and
    at least a hundred opens by four, a case."""
    def case(rng):
        folder = tmp_path / str(rng.random())
        folder.mkdir()
        found, errors = finish("opens", folder, 10, 100)
        assert found["whole"] >= 100 and found["published"] >= 10
        print(found)
        bad = {name: found.get(name, 0) for name in ("mixed", "failed", "died")}
        assert not any(bad.values()) and found["versions"] == 1, (found, errors)
        return "whole"

    assert campaign.run("opens-during-publications", count, case) == {"whole": count}


@pytest.mark.parametrize("count", campaign.counts(4, 50))
def test_an_edit_that_is_killed_leaves_the_old_index_or_the_new(count, tmp_path):
    """At any change of a name, or of a link. The same edit then gives what it gives undisturbed."""
    def case(rng):
        folder = tmp_path / str(rng.random())
        folder.mkdir()
        found, _ = finish("kill", folder, rng.random(), 2)
        assert found["after"] == "same" and found["seen"] in ("old", "new"), found
        return found["seen"]

    assert campaign.run("killed-edits", count, case).total() == count


@pytest.mark.parametrize("count", campaign.counts(4, 50))
def test_a_publisher_that_is_killed_leaves_the_old_index_or_the_new(count, tmp_path):
    """At any change of a name. The same command then gives what it gives undisturbed, bit by bit,
    and nothing of the killed one remains."""
    def case(rng):
        folder = tmp_path / str(rng.random())
        folder.mkdir()
        replaces = rng.randrange(2)
        found, _ = finish("kill", folder, rng.random(), replaces)
        assert found["after"] == "same", found
        assert found["seen"] in (["none", "1 store 0"][replaces], "2 store 1"), found
        return found["seen"]

    assert campaign.run("killed-publishers", count, case).total() == count
