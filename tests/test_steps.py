"""Steps of checkpoints, as the names of their folders say them."""

import errno
import os

import pytest

from rag_jax.steps import stages_in, steps_in


def test_steps_are_folders_that_are_named_as_we_name_them(tmp_path, monkeypatch):
    for name in ("10", "2", "07", "3x", "damaged-4", "indexes"):
        (tmp_path / "run" / name).mkdir(parents=True)
    (tmp_path / "run" / "5").touch()
    (tmp_path / "indexes" / "2018").mkdir(parents=True)
    assert steps_in(tmp_path / "run") == [2, 10]
    assert steps_in(tmp_path / "none") == steps_in(tmp_path / "run" / "5") == []
    assert stages_in(tmp_path) == {"run"} and stages_in(tmp_path / "none") == set()

    def refused(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(PermissionError):  # for training that would begin again
        steps_in(tmp_path / "run")
