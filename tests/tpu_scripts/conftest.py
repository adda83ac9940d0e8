import sys

import pytest

from tests.tpu_scripts.cloud import Cloud


@pytest.fixture(scope="session")
def committed(tmp_path_factory):
    """A checkout with the scripts, one commit and no changes."""
    if sys.platform != "linux":
        pytest.skip("the workers' part of the scripts runs on Linux alone")
    return Cloud(tmp_path_factory.mktemp("cloud")).checkout


@pytest.fixture
def cloud(tmp_path, committed):
    return Cloud(tmp_path, committed)
