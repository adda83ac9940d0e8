"""One uninterrupted run of the smallest configuration, shared by the tests of this folder."""

import pathlib

import pytest

from tests.end_to_end.commands import finish


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    workdir = tmp_path_factory.mktemp("uninterrupted")
    finish("train", workdir)
    return workdir
