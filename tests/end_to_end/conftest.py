"""One uninterrupted run of the smallest configuration, shared by the tests of this folder."""

import os
import pathlib
from collections.abc import Iterator

import pytest

from tests.end_to_end.commands import finish


@pytest.fixture(scope="session", autouse=True)
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What one command has compiled, the next one reads, whichever worker of xdist runs it."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(folder / "compiled"))
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
        yield


@pytest.fixture(scope="session")
def uninterrupted(compiled_once: None, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    workdir = tmp_path_factory.mktemp("uninterrupted")
    finish("train", workdir)
    return workdir
