"""Every test runs on eight virtual CPU devices, with strict rank promotion."""

import os
import pathlib
from collections.abc import Iterator

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import jax  # noqa: E402
import jax.monitoring  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def compilations():
    """A list that grows with every compilation while the test runs."""
    events = []

    def listen(event, secs, **_):
        if "backend_compile" in event:
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture(scope="session")
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
    """One uninterrupted run of the smallest configuration, shared by tests of whole commands."""
    from tests.end_to_end.commands import finish

    workdir = tmp_path_factory.mktemp("uninterrupted")
    finish("train", workdir)
    return workdir
