"""How a command ends: one message for a mistake, a report of a defect, its status."""

import ctypes
import errno
import os
import subprocess
import sys
import types

import jax.monitoring
import pytest

from rag_jax import cli, errors, hosts, process
from rag_jax import config as configs


@pytest.mark.parametrize("error, told", [
    (configs.ConfigError("config.x is wrong"), "error: config.x is wrong"),
    (FileNotFoundError("no file f"), "error: no file f"),
    (errors.DataError("f.jsonl:3: no"), "error: f.jsonl:3: no"),
    (PermissionError(errno.EACCES, "Permission denied", "w/.lock"),
     "error: w/.lock: Permission denied"),
    (OSError(errno.EXDEV, "Invalid cross-device link", "a", None, "b"),
     "error: a -> b: Invalid cross-device link"),
    (OSError(errno.ENOSPC, "No space left on device"),
     "error: standard output, or a file without a name: No space left on device"),
    (OSError(errno.EFBIG, "File too large"),
     "error: standard output, or a file without a name: File too large"),
    (OSError(errno.EINTR, "Interrupted"), "error: [Errno 4] Interrupted"),
    (errors.UserError(f"save to /w/.x.y.rag_jax-{'ab' * 6}-7-0123abcd/content/z, .u.rag_jax-work"),
     "error: save to /w/x.y/z, .u.rag_jax-work"),
])
def test_a_mistake_of_the_user_ends_in_one_message(error, told):
    def main():
        raise error

    with pytest.raises(SystemExit) as stop:
        process.run(main)
    assert stop.value.code == told


def test_a_command_that_does_not_exist_has_a_near_one(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["rag_jax", "ingst"])
    with pytest.raises(SystemExit, match="rag_jax ingst: no such command; did you mean ingest"):
        cli.main()


def test_a_command_may_be_interrupted_while_it_is_imported(monkeypatch):
    def interrupted(name):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.importlib, "import_module", interrupted)
    with pytest.raises(SystemExit) as stop:
        cli.run("compile_report", [])
    assert stop.value.code == 130


@pytest.mark.parametrize("error", [ValueError, RuntimeError, KeyError, TypeError])
def test_an_error_of_the_program_is_told_as_its_defect(error, capsys):
    """A ValueError of numpy looked like a mistake of the user, without place or versions."""
    def main():
        raise error("a bug")

    with pytest.raises(SystemExit) as stop:
        process.run(main)
    assert "defect of rag_jax" in stop.value.code
    assert all(name in stop.value.code for name in ("rag_jax 0", "python 3", "jax 0", "numpy 2"))
    trace = capsys.readouterr().err
    assert "Traceback" in trace and "a bug" in trace and "in main" in trace


def test_too_little_device_memory_is_no_defect():
    class JaxRuntimeError(RuntimeError):
        pass

    def main():
        raise JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.")

    with pytest.raises(SystemExit) as stop:
        process.run(main)
    assert "lower batch_size" in stop.value.code and "defect" not in stop.value.code


@pytest.mark.parametrize("processes", [1, 2])
def test_an_error_of_a_device_is_not_taken_for_that_of_another_process(
        monkeypatch, capsys, processes):
    """A broken kernel was told as a process that is gone, also in a job of one."""
    class JaxRuntimeError(RuntimeError):
        pass

    def main():
        raise JaxRuntimeError("INTERNAL: broken kernel")

    monkeypatch.setattr(process.hosts, "connected", lambda: True)
    monkeypatch.setattr(process.hosts, "count", lambda: processes)
    told = process._outcome(main)
    assert "defect" in told and "in main" in capsys.readouterr().err
    assert ("another process of the job is gone" in told) == (processes == 2)


def test_data_that_an_error_quotes_cannot_steer_the_terminal(capsys):
    """A passage id with an escape sequence in a message would clear the screen."""
    def main():
        raise configs.ConfigError("id \x1b[2J\u202e is\ntwo lines")

    with pytest.raises(SystemExit) as stop:
        process.run(main)
    assert stop.value.code == "error: id \\x1b[2J\\u202e is\ntwo lines"

    def defect():
        raise KeyError("x") from ValueError("id \x1b[2J")

    with pytest.raises(SystemExit):
        process.run(defect)
    assert "ValueError: id \\x1b[2J\n" in capsys.readouterr().err


def test_who_has_read_enough_gets_no_error():
    """`python -m rag_jax.reproduce table1 --scale paper | head -1` ended in "Broken pipe"."""
    program = "from rag_jax import process\nprocess.run(lambda: print('x\\n' * 100_000))"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE) as running:
        running.stdout.close()
        assert running.stderr.read() == b""
    assert running.returncode == 141


def test_the_status_of_main_is_the_status_of_the_process():
    for code in (None, 3):
        with pytest.raises(SystemExit) as stop:
            process.run(lambda code=code: code)
        assert stop.value.code == code


def test_signals_that_come_while_a_stopped_command_ends_do_not_change_its_status():
    """A scheduler that sent SIGTERM again while the interpreter ended got status -15."""
    code = """
import atexit, os, signal
from rag_jax import errors, process

def main():
    raise errors.Preempted("stopped")

for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
    atexit.register(os.kill, os.getpid(), number)
process.run(main)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (process.UNFINISHED, "")
    assert done.stdout == "stopped; the same command goes on from there\n"


@pytest.mark.parametrize("status, left", [(1, [1]), (process.UNFINISHED, [])])
def test_a_stopped_job_parts_in_order_and_a_failed_one_at_once(monkeypatch, status, left):
    """A process that left without the others would end them with another status than 75."""
    codes = []
    monkeypatch.setattr(hosts, "connected", lambda: True)
    monkeypatch.setattr(hosts, "leave", codes.append)
    with pytest.raises(SystemExit) as stop:
        process.run(lambda: status)
    assert stop.value.code == status and codes == left


def test_no_amount_of_freed_memory_is_given_back(monkeypatch):
    """A threshold of 2 GiB gave back what a step of a base model frees, 4 GB, and faulted it in
    again: more than half of every step."""
    calls = {}
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(process.ctypes, "CDLL", lambda name: types.SimpleNamespace(
        mallopt=lambda parameter, value: calls.update({parameter: value})))
    process.keep_memory()
    trim_threshold, mmap_max = -1, -4
    assert ctypes.c_size_t(calls[trim_threshold]).value > 2**40
    assert calls[mmap_max] == 0


@pytest.mark.parametrize("installed, flags, expected", [
    ("jax_cuda13_plugin", None, "--xla_gpu_enable_triton_gemm=false"),
    ("jax_cuda12_plugin", "--xla_a=1", "--xla_a=1 --xla_gpu_enable_triton_gemm=false"),
    ("jax_cuda13_plugin", "--xla_gpu_enable_triton_gemm=true", "--xla_gpu_enable_triton_gemm=true"),
    ("jax_cuda13_plugin", "/tmp/flags.txt", "/tmp/flags.txt"),
    ("libtpu", "--xla_a=1", "--xla_a=1")])
def test_products_for_gpus_are_those_of_the_library(monkeypatch, installed, flags, expected):
    """Where no GPU can be, and where the user says otherwise or names a file, nothing is set."""
    monkeypatch.setattr(process.importlib.util, "find_spec", lambda name: name == installed or None)
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    if flags is not None:
        monkeypatch.setenv("XLA_FLAGS", flags)
    process.take_library_products()
    assert os.environ["XLA_FLAGS"] == expected
    process.take_library_products()
    assert os.environ["XLA_FLAGS"] == expected, "once"


def test_xla_knows_the_flag_of_the_library_products():
    """It ends a process at a flag that it does not know."""
    flags = {**os.environ, "XLA_FLAGS": "--xla_gpu_enable_triton_gemm=false"}
    subprocess.run([sys.executable, "-c", "import jax; jax.devices()"], env=flags, check=True)


def test_what_compiling_leaves_is_given_back_before_the_program_runs(monkeypatch):
    """It lay in pieces beside the step's buffers for the whole run, half a GB of a base model's."""
    given = []
    monkeypatch.setattr(process, "give_back_memory", lambda: given.append("back"))
    process.give_back_after_compiling()
    process.give_back_after_compiling()
    compiled = "/jax/core/compile/backend_compile_duration"
    for event, secs in ((compiled, 0.5), ("/jax/core/compile/jaxpr_trace_duration", 9.0)):
        jax.monitoring.record_event_duration_secs(event, secs)
    assert not given, "a small program, and one that is not compiled yet"
    jax.monitoring.record_event_duration_secs(compiled, 9.0, fun_name="step")
    assert given == ["back"]


@pytest.mark.skipif(not sys.platform.startswith("linux"),
                    reason="memory is kept with glibc alone, and /proc says how much")
def test_memory_that_was_freed_in_pieces_is_given_back():
    code = """
import numpy, pathlib
from rag_jax import process

def resident():
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * 4096

process.keep_memory()
pieces = [numpy.ones(2**17) for _ in range(200)]  # 210 MB
last = numpy.ones(2**17)
del pieces
kept = resident()
process.give_back_memory()
print(kept - resident(), last.sum())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout.split()[0]) > 150 * 2**20


def test_a_daemon_has_no_streams():
    """It ended with "'NoneType' object has no attribute 'isatty'", as a defect."""
    code = ("import sys; from rag_jax import process\n"
            "process.run(lambda: print(sys.stdin.read(), sys.stderr.isatty(), file=sys.stderr))")
    done = subprocess.run(["sh", "-c", 'exec "$0" -c "$1" <&- >&- 2>&-', sys.executable, code])
    assert done.returncode == 0


def test_what_the_terminal_cannot_show_is_escaped():
    """An answer with a letter beyond ASCII ended in a traceback, as a defect of rag_jax."""
    code = "from rag_jax import process; process.run(lambda: print('Per\\u00fa'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stdout) == (0, "Per\\xfa\n")
