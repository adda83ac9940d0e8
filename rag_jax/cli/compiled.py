"""The folder in which jax keeps what commands have compiled, for the next command to read."""

import contextlib
import os
import pathlib
import platform

_PROGRAM, _TIME = "-cache", "-atime"  # ends of names: what jax compiled, and when it was last used


def keep() -> None:
    """Lets jax keep what it compiles in the user's cache folder.

    JAX_COMPILATION_CACHE_DIR names another folder, and with JAX_ENABLE_COMPILATION_CACHE=false
    nothing is kept. Each machine has a folder, as machines with other processors may share a home.
    """
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    try:
        home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
        folder = pathlib.Path(home) / "rag_jax" / "compiled" / platform.node()
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # a home that cannot be written to, or none at all
        return
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)
    os.environ.setdefault("JAX_COMPILATION_CACHE_MAX_SIZE", str(2**30))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    if os.environ["JAX_COMPILATION_CACHE_MAX_SIZE"] != "-1":  # with no limit jax writes no times
        with contextlib.suppress(OSError):
            _remove_torn(folder)


def _remove_torn(folder: pathlib.Path) -> None:
    """Removes programs that a full disk or a kill left half written, before jax reads them: it
    writes the time after the program, or when it reads it; it never writes over a program, and
    warns of a torn one at every reading."""
    if not _without_time(folder):
        return
    import filelock  # here, for most commands find none

    with filelock.FileLock(folder / ".lockfile", timeout=10):  # jax's own: nobody writes now
        for name in _without_time(folder):
            (folder / f"{name}{_PROGRAM}").unlink()


def _without_time(folder: pathlib.Path) -> set[str]:
    names = os.listdir(folder)
    programs, times = ({name.removesuffix(end) for name in names if name.endswith(end)}
                       for end in (_PROGRAM, _TIME))
    return programs - times
