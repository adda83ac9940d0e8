"""Every test runs on eight virtual CPU devices, with strict rank promotion."""

import gc
import importlib.metadata
import os
import pathlib
import shutil
import time
from collections.abc import Iterator

gc.disable()  # of the imports and the collection of tests it would take a fifth of the time
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
# The tests' programs run for milliseconds and compile for seconds, so they and their commands are
# compiled with a sixth of the usual effort; a test that needs the usual code takes this away.
QUICK_TO_COMPILE = ("--xla_backend_optimization_level=0 "
                    "--xla_cpu_parallel_codegen_split_count=1")
if importlib.metadata.version("jaxlib").startswith("0.10."):  # XLA ends a process at unknown flags
    QUICK_TO_COMPILE += " --xla_cpu_use_fusion_emitters=false"
if QUICK_TO_COMPILE not in os.environ.get("XLA_FLAGS", ""):  # a worker has its master's
    os.environ["XLA_FLAGS"] = f"{QUICK_TO_COMPILE} {os.environ.get('XLA_FLAGS', '')}".strip()
# What was compiled once is read by every worker and command, and by the next run of the tests.
CACHES = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
COMPILED = CACHES / "rag_jax-tests" / f"jax-{importlib.metadata.version('jax')}"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(COMPILED))
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import filelock  # noqa: E402
import jax  # noqa: E402
import jax.monitoring  # noqa: E402
import pytest  # noqa: E402
import tiers  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_sessionstart(session: pytest.Session) -> None:
    """The cache of compiled programs keeps what two weeks have written."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        for file in COMPILED.glob("*"):
            if time.time() - file.stat().st_mtime > 14 * 24 * 3600:
                file.unlink(missing_ok=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        known = {mark.name for mark in item.iter_markers()}
        if tiers.is_quick(item.path) and not known & {"slow", "campaign", "multihost"}:
            item.add_marker(pytest.mark.quick)
    items.sort(key=lambda item: tiers.place_in_long(item.path))


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    gc.freeze()  # modules and thousands of tests: no collection of garbage looks through them
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def few_programs() -> Iterator[None]:
    """Linux allows a process 65,530 maps of memory, of which a program compiled by jax 0.12 takes
    dozens, so that some thousand tests in one process ended it."""
    yield
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 40_000:
        jax.clear_caches()
        gc.collect()


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


@pytest.fixture(scope="module")
def one_device() -> Iterator[None]:
    """What runs in this process has one device, as the commands: less is compiled."""
    first = jax.devices()[:1]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(jax, "devices", lambda *_: first)
        yield


@pytest.fixture(scope="module")
def compiled_with_less_effort(one_device: None) -> Iterator[None]:
    """Commands in this process compile as little as they can: their programs run for moments."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """One uninterrupted run of the smallest configuration, into which no test writes.

    Whichever worker of xdist comes first trains it.
    """
    from tests.end_to_end.commands import finish

    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    with filelock.FileLock(folder / "trained.lock"):
        if not (folder / "trained").exists():
            finish("train", folder / "training")
            (folder / "training").rename(folder / "trained")
    return folder / "trained"


@pytest.fixture(scope="session")
def uninterrupted(trained: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A copy of it, to which tests of whole commands may add, evaluations for example."""
    return shutil.copytree(trained, tmp_path_factory.mktemp("uninterrupted"), dirs_exist_ok=True)
