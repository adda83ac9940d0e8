"""How a command's process keeps memory, and ends: its status, and one message for a mistake."""

import contextlib
import ctypes
import importlib.metadata
import os
import platform
import signal
import sys
import traceback
from collections.abc import Callable

import rag_jax
from rag_jax import hosts
from rag_jax.errors import Preempted, UserError
from rag_jax.visible import visible_lines

UNFINISHED = 75  # status of a run that a signal stopped: EX_TEMPFAIL, run the same command again
DEFECT = """
This is a defect of rag_jax, not a mistake of yours. Please report it with the command, the
traceback above and these versions: {}"""


def run(main: Callable[[], int | None]) -> None:
    """Calls main(); an error ends in status 1, one that the user can mend in one message alone."""
    keep_memory()
    for stream in (sys.stdout, sys.stderr):  # an answer may have what the terminal lacks
        with contextlib.suppress(AttributeError, OSError):  # somebody has put others in their place
            stream.reconfigure(errors="backslashreplace")
    code = _outcome(main)
    # What a signal stopped has stopped in all processes, which part as those that are done.
    if code and code != UNFINISHED and hosts.connected():
        hosts.leave(code)
    sys.exit(code)


def _outcome(main: Callable[[], int | None]) -> int | str | None:
    try:
        return main()
    except BrokenPipeError:  # whoever read what is printed, `head` for one, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (UserError, OSError) as error:
        return f"error: {visible_lines(str(error))}"
    except Preempted as reason:
        print(f"{reason}; the same command goes on from there", flush=True)
        return UNFINISHED
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        of_device = type(error).__name__ == "JaxRuntimeError"
        if of_device and "RESOURCE_EXHAUSTED" in str(error):
            return (f"error: a device has too little memory ({error}); lower batch_size or "
                    "length, or use more devices: python -m rag_jax.compile_report tells what "
                    "fits")
        print(visible_lines(traceback.format_exc()), file=sys.stderr)
        defect = DEFECT.format(", ".join(f"{name} {v}" for name, v in _versions().items()))
        if of_device and hosts.connected() and hosts.count() > 1:
            return (f"error: {error}\nWhere another process of the job is gone, or the network, "
                    f"{hosts.START_AGAIN}. Else:{defect}")
        return defect


def _versions() -> dict[str, str]:
    versions = {name: importlib.metadata.version(name) for name in ("jax", "flax", "numpy")}
    return {"rag_jax": rag_jax.__version__, "python": platform.python_version(), **versions,
            "platform": platform.platform()}


def keep_memory() -> None:
    """Tells glibc to keep freed memory: XLA's CPU buffers then cost no page faults every step.

    It is a setting of the whole process; benchmarks/RESULTS.md has what it saves. Elsewhere than on
    Linux with glibc it does nothing.
    """
    if (mallopt := _of_glibc("mallopt")) is not None:
        trim_threshold, mmap_max, arena_max = -1, -4, -8
        mallopt(trim_threshold, -1)  # as size_t the largest: a step of a base model frees 4 GB
        mallopt(mmap_max, 0)
        mallopt(arena_max, 1)


def give_back_memory() -> None:
    """Gives back what `keep_memory` keeps though it is free: in pieces, it has no room for a step's
    buffer."""
    if (malloc_trim := _of_glibc("malloc_trim")) is not None:
        malloc_trim(0)


def _of_glibc(name: str) -> Callable[..., int] | None:
    return getattr(ctypes.CDLL(None), name, None) if sys.platform.startswith("linux") else None
