"""The process of a command: its memory, its exit status, and one message for a user's mistake."""

import contextlib
import ctypes
import functools
import importlib.metadata
import importlib.util
import os
import platform
import signal
import sys
import threading
import traceback
from collections.abc import Callable

import rag_jax
from rag_jax import files, hosts, signals
from rag_jax.errors import Preempted, UserError
from rag_jax.visible import visible_lines

CUDA_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
UNFINISHED = 75  # status of a run that a signal stopped: EX_TEMPFAIL, run the same command again
DEFECT = """
This is a defect of rag_jax, not a mistake of yours. Please report it with the command, the
traceback above and these versions: {}"""


def run(main: Callable[[], int | None]) -> None:
    """Calls main(), and exits: with status 1 after an error, of which the user sees one message, or
    a traceback too if it is a defect."""
    open_streams()
    keep_memory()
    take_library_products()
    for stream in (sys.stdout, sys.stderr):  # an answer may have letters that the terminal lacks
        with contextlib.suppress(AttributeError, OSError):  # the streams may have been replaced
            stream.reconfigure(errors="backslashreplace")
    code = _outcome(main)
    # A signal stops all processes of a job together, so they end as after a success.
    if code and code != UNFINISHED and hosts.connected():
        hosts.leave(code)
    sys.exit(code)


def leave(code: int) -> None:
    """Ends the process at once, whatever its other threads do."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


def open_streams() -> None:
    """Opens the standard streams that the process was started without, as a daemon is."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))
            os.set_inheritable(getattr(sys, name).fileno(), True)


def _outcome(main: Callable[[], int | None]) -> int | str | None:
    try:
        return main()
    except BrokenPipeError:  # the reader of stdout, such as `head`, has ended
        _leave_stdout()
        return 128 + signal.SIGPIPE
    except (UserError, OSError) as error:
        return f"error: {visible_lines(files.as_published(_message(error)))}"
    except Preempted as reason:
        _ignore_signals()
        try:
            print(f"{reason}; the same command goes on from there", flush=True)
        except OSError:  # whoever read it has been stopped, too
            _leave_stdout()
        return UNFINISHED
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        of_device = type(error).__name__ == "JaxRuntimeError"
        if of_device and "RESOURCE_EXHAUSTED" in str(error):
            return (f"error: a device has too little memory ({error}); lower batch_size (of an "
                    "index, retrieval.embed_batch_size), length or retrieval.capacity, or use more "
                    "devices: python -m rag_jax.compile_report tells what fits")
        print(visible_lines(traceback.format_exc()), file=sys.stderr)
        defect = DEFECT.format(", ".join(f"{name} {v}" for name, v in _versions().items()))
        if of_device and hosts.connected() and hosts.count() > 1:
            return (f"error: {error}\nWhere another process of the job is gone, or the network, "
                    f"{hosts.START_AGAIN}. Else:{defect}")
        return defect


def _message(error: Exception) -> str:
    """What an error says; one of the operating system names the file first, and has no number."""
    if isinstance(error, UserError) or error.strerror is None:
        return str(error)
    names = [str(name) for name in (error.filename, error.filename2) if name]
    if not names and error.errno in files.OF_WRITING:
        names = ["standard output, or a file without a name"]
    return f"{' -> '.join(names)}: {error.strerror}" if names else str(error)


def _ignore_signals() -> None:
    """Ignores what would stop the process, until it ends by itself."""
    # The interpreter takes seconds to end. A scheduler that repeats its signal meanwhile, or a user
    # who does, would see another status than that of a run to go on with.
    if threading.current_thread() is threading.main_thread():
        for number in signals.ALL:
            signal.signal(number, signal.SIG_IGN)


def _leave_stdout() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _versions() -> dict[str, str]:
    versions = {name: importlib.metadata.version(name) for name in ("jax", "flax", "numpy")}
    return {"rag_jax": rag_jax.__version__, "python": platform.python_version(), **versions,
            "platform": platform.platform()}


def keep_memory() -> None:
    """Tells glibc to keep freed memory: XLA's CPU buffers then cost no page faults every step.

    It is a setting of the whole process; benchmarks/RESULTS.md says what it saves. Without glibc on
    Linux it does nothing.
    """
    if (mallopt := _of_glibc("mallopt")) is not None:
        trim_threshold, mmap_max, arena_max = -1, -4, -8
        mallopt(trim_threshold, -1)  # the largest size_t: a step of a base model frees 4 GB
        mallopt(mmap_max, 0)
        mallopt(arena_max, 1)


def take_library_products() -> None:
    """Tells XLA to take the matrix products of NVIDIA's library and to try none of Triton's, which
    takes minutes where a large program is compiled for GPUs; benchmarks/RESULTS.md has the figures.

    It is an environment variable of the whole process, read when jax first looks for devices. Where
    that names the flag, or a file of flags, it stays.
    """
    flags, name = os.environ.get("XLA_FLAGS", "").strip(), "xla_gpu_enable_triton_gemm"
    of_file = flags and not flags.startswith("-")
    if name not in flags and not of_file and any(map(importlib.util.find_spec, CUDA_PLUGINS)):
        os.environ["XLA_FLAGS"] = f"{flags} --{name}=false".strip()


def give_back_memory() -> None:
    """Returns to the system the freed memory that `keep_memory` keeps: in pieces too small for the
    buffers of a step."""
    if (malloc_trim := _of_glibc("malloc_trim")) is not None:
        malloc_trim(0)


@functools.cache
def give_back_after_compiling() -> None:
    """From now on, gives back what compiling a large program has freed, before the program runs:
    its buffers would not fit there."""
    import jax.monitoring  # here, as commands that need no jax keep their memory too

    def compiled(event: str, secs: float, **_: str) -> None:
        if event.endswith("backend_compile_duration") and secs > 1:
            give_back_memory()

    jax.monitoring.register_event_duration_secs_listener(compiled)


def _of_glibc(name: str) -> Callable[..., int] | None:
    return getattr(ctypes.CDLL(None), name, None) if sys.platform.startswith("linux") else None
