"""The processes of one job, usually one a host: how they meet, who writes, what they exchange.

Messages go from host to host through jax.distributed's coordination service, so that no device has
to finish its work first. A process alone leads, and `exchange` returns its own value.
"""

import contextlib
import glob
import hashlib
import importlib.util
import itertools
import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from rag_jax.config import ConfigError
from rag_jax.errors import UserError, first_of
from rag_jax.visible import visible_lines

HEARTBEAT_SECS = 100
_START_SECS = 300  # how long the others wait for a process, which may have been refused and ended
_LEAVE_SECS = 5  # how long process 0, which carries all messages, waits for others that fail, too
_LONGEST_WAIT_MS = 7 * 24 * 3600 * 1000  # the heartbeat notices a dead process much earlier
_FOUND_AT_A_TIME = 100_000  # ids and scores, 34 bytes a pair: gRPC's messages have 4 MB at most
# What jax reads of Slurm; a batch script outside of srun has all of it but the nodes of its step.
_SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
# The advice where another process does not answer any more.
START_AGAIN = "start all again with the same command: they go on from the last checkpoint"
_rounds = itertools.count()
T = TypeVar("T")


def is_slurm(environment: Mapping[str, str]) -> bool:
    """Whether this is one of several tasks that srun has started."""
    if any(name not in environment for name in _SLURM):
        return False
    # The shell of salloc is one task, although its SLURM_NTASKS counts those of the allocation.
    tasks = environment.get("SLURM_STEP_NUM_TASKS", environment["SLURM_NTASKS"])
    return tasks.isdecimal() and int(tasks) > 1


def has_tpus(environment: Mapping[str, str]) -> bool:
    """Whether jax will use TPU chips of this machine, which may be one host of a slice."""
    platforms = environment.get("JAX_PLATFORMS") or "tpu"
    chips = glob.glob("/dev/accel[0-9]*") + glob.glob("/dev/vfio/[0-9]*")
    return "tpu" in platforms and bool(chips) and importlib.util.find_spec("libtpu") is not None


def _local_devices(environment: Mapping[str, str]) -> list[int] | None:
    """[] = all GPUs of the node, where Slurm runs one task on it; None = as jax decides.

    jax gives each of Slurm's tasks only the GPU of the task's number on the node.
    """
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE", environment.get("SLURM_TASKS_PER_NODE"))
    if "JAX_LOCAL_DEVICE_IDS" in environment or not re.fullmatch(r"1(\(x\d+\))?", tasks or ""):
        return None
    return []


def _port_of_step(environment: Mapping[str, str]) -> str:
    """The port at which the processes of a step of a Slurm job meet.

    jax uses the same port for the whole job: a second step on the same node stopped the first.
    """
    step = environment.get("SLURM_STEP_ID", "0")
    number = int(environment["SLURM_JOB_ID"]) + 97 * (int(step) if step.isdecimal() else 0)
    return str(2**16 - 2**12 + number % 2**12)


def connect(coordinator: str | None, num_processes: int | None, process_id: int | None,
            heartbeat: int = HEARTBEAT_SECS) -> None:
    """Joins the other processes of the job; to be called before anything touches a device.

    Args:
      coordinator: HOST:PORT of process 0; None = as Slurm or a TPU slice says, or alone.
      num_processes, process_id: given with a coordinator; num_processes=1 by itself = alone,
        whatever the environment says.
      heartbeat: seconds of silence after which a process is taken for dead and all others end.

    Raises:
      ConfigError: some of the three are given but not all, they do not fit, process 0 cannot listen
        at the port, the TPU's metadata do not say which hosts belong together, or the processes
        have different numbers of devices, over which no batch can be split.
    """
    devices = os.environ.get("JAX_NUM_CPU_DEVICES", "1")
    if not devices.isdecimal():
        raise ConfigError(f"JAX_NUM_CPU_DEVICES={devices} in the environment: expected a number")
    if int(devices) > 1:
        # With few threads for the virtual devices, collectives can wait for ever (jaxlib 0.10).
        os.environ.setdefault("PJRT_NPROC", str(max(4 * int(devices), os.cpu_count())))
    given = [coordinator, num_processes, process_id]
    if given == [None, 1, None]:
        return
    if given.count(None) not in (0, 3):
        raise ConfigError("--coordinator, --num_processes and --process_id belong together: give "
                          "all three to every process, or none (or --num_processes=1 alone)")
    if heartbeat < 1:
        raise ConfigError(f"--heartbeat={heartbeat}: must be at least 1 second")
    local = _local_devices(os.environ)
    if coordinator is not None:
        _check_place(coordinator, num_processes, process_id)
        print(f"process {process_id} of {num_processes}: waits for the others at {coordinator}, "
              f"{_START_SECS} s at most", flush=True)
    elif is_slurm(os.environ):
        os.environ.setdefault("JAX_COORDINATOR_PORT", _port_of_step(os.environ))
        print(f"process {os.environ['SLURM_PROCID']} of {os.environ['SLURM_NTASKS']}: waits for "
              f"Slurm's other tasks, {_START_SECS} s at most; a command by itself has "
              "--num_processes=1", flush=True)
    elif not has_tpus(os.environ):
        return
    import jax

    # jax's own handler would swallow a SIGTERM that comes outside of training.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(coordinator, num_processes, process_id, local,
                                   initialization_timeout=_START_SECS,
                                   heartbeat_timeout_seconds=heartbeat)
    except Exception as error:  # of several types, also of the library that asks for metadata
        if coordinator is not None or is_slurm(os.environ):
            raise
        raise ConfigError(
            f"this machine has TPU chips, but not the metadata of a TPU slice ({error}); where it "
            "is the only host, as in a hosted notebook, give --num_processes=1") from error
    if count() > 1:
        devices = exchange(str(jax.local_device_count()))
        if len({*devices}) > 1:
            raise ConfigError("the processes have different numbers of devices, "
                              f"{first_of(devices, 16)}: start all with as many, or see which host "
                              "has lost one")
        print(f"process {index()} of {count()}: if one of them dies, the others end within "
              f"{heartbeat} s or so; start all with the same command again to go on", flush=True)


def _check_place(coordinator: str, num_processes: int, process_id: int) -> None:
    """Raises ConfigError for a process that has no place in the job."""
    host, _, port = coordinator.rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) < 2**16):
        raise ConfigError(f"--coordinator={coordinator}: expected HOST:PORT of process 0, with a "
                          "port from 1 to 65535")
    if num_processes < 1:
        raise ConfigError(f"--num_processes={num_processes}: must be at least 1")
    if not 0 <= process_id < num_processes:
        raise ConfigError(f"--process_id={process_id}: must be 0 to {num_processes - 1}, below "
                          f"--num_processes={num_processes}")
    if process_id == 0:
        _check_free(coordinator, int(port))


def _check_free(coordinator: str, port: int) -> None:
    """Raises ConfigError where the port of a coordinator on this machine is in use: jax would
    crash, or share it with the process 0 of another job, and mix their processes."""
    dual = socket.has_dualstack_ipv6()
    try:
        with socket.socket(socket.AF_INET6 if dual else socket.AF_INET) as probe:
            if dual:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that ended
            probe.bind(("", port))
    except OSError as error:
        raise ConfigError(f"--coordinator={coordinator}: process 0 cannot listen at this port "
                          f"({error}); end what does, or name another port") from None


def connected() -> bool:
    """Whether this process has joined others; does not import jax."""
    jax = sys.modules.get("jax")
    return jax is not None and jax.distributed.is_initialized()


def count() -> int:
    """Number of processes."""
    import jax

    return jax.process_count()


def index() -> int:
    """Which of the processes this is."""
    import jax

    return jax.process_index()


def leads() -> bool:
    """Whether this is the process that writes and prints."""
    return index() == 0


def say(text: str) -> None:
    """Prints a text that all processes have, once."""
    if leads():
        print(visible_lines(text), flush=True)


def warn(text: str) -> None:
    """Prints a warning that all processes have, once, on standard error, as other programs may read
    standard output."""
    if leads():
        print(f"warning: {visible_lines(text)}", file=sys.stderr, flush=True)


def exchange(value: Any) -> list[Any]:
    """The values (JSON) of all processes, in their order; every process must make the same calls.

    It is a barrier, too: no process returns before all have called it.
    """
    if count() == 1:
        return [value]
    client, turn, me = _key_value_store(), next(_rounds), index()
    client.key_value_set(f"rag_jax/{turn}/{me}", json.dumps(value))
    values = [json.loads(client.blocking_key_value_get(f"rag_jax/{turn}/{i}", _LONGEST_WAIT_MS))
              for i in range(count())]
    if turn:  # every process has sent this turn's value, so it has read those of the last turn
        client.key_value_delete(f"rag_jax/{turn - 1}/{me}")
    return values


def check_same(values: Mapping[str, str]) -> None:
    """Refuses processes that were started with different values, by the values' names: they would
    wait for each other for ever, or mix results of different settings.

    Raises:
      ConfigError: in all processes.
    """
    if not connected():
        return
    first, *others = exchange(dict(values))
    names = sorted({name for other in others for name in {*first, *other}
                    if first.get(name) != other.get(name)})
    if names:
        raise ConfigError(f"the processes have different values of {first_of(names, 5)}; start all "
                          "of them with the same command and files")


def check_same_content(name: str, content: Any) -> None:
    """`check_same` of JSON of any size, such as the content of a file that each process reads."""
    if connected():
        text = json.dumps(content, sort_keys=True)
        check_same({name: hashlib.sha256(text.encode()).hexdigest()})


def _key_value_store() -> Any:
    """The key-value store of jax.distributed; jax's public collectives wait for the devices' work.

    Raises:
      RuntimeError: this version of jax has it in another place.
    """
    import jax

    try:
        from jax._src import distributed  # it has no public name; jax 0.10 has it here

        return distributed.global_state.client
    except (ImportError, AttributeError) as error:
        raise RuntimeError(f"jax {jax.__version__} has another key-value store of jax.distributed "
                           f"than jax 0.10 ({error}); install the version in setup.py, or run "
                           "one process") from None


def each(make: Callable[[], T]) -> T:
    """make() of every process, at the same time; returns once all have done it.

    Raises:
      UserError: make() failed in another process; where it failed, its own error is raised.
    """
    try:
        made = make()
    except Exception as error:  # not stored: the frame of its traceback would refer back to it
        # Without an answer, the others would wait for ever.
        exchange(f"process {index()}: {type(error).__name__}: {error}")
        raise
    failed = [message for message in exchange(None) if message]
    if failed:
        raise UserError(failed[0])
    return made


def lead(make: Callable[[], T]) -> T | None:
    """make() of process 0, None in the others; returns once it is done.

    Raises: as `first`.
    """
    return each(make if leads() else lambda: None)


def first(make: Callable[[], T]) -> T:
    """make() of process 0, and then of the others: what needs to be done only once is then done.

    Raises:
      UserError: make() failed in process 0, whose own error is raised there.
    """
    made = lead(make)
    return made if leads() else make()


def share(size: int) -> slice:
    """This process's part of `size` items; the parts of all processes cover them."""
    return slice(size * index() // count(), size * (index() + 1) // count())


def together(compute: Callable[[Any], Any], rows: Any, width: int) -> Any:
    """compute(rows), int32[N, width]; every process computes its share of the rows."""
    if count() == 1:
        return compute(rows)
    import numpy as np

    def shared(piece: np.ndarray) -> np.ndarray:
        mine = piece[share(len(piece))]
        parts = exchange(compute(mine).tolist() if len(mine) else [])
        return np.concatenate([np.array(part, np.int32) for part in parts if part])

    return in_messages(shared, rows, width)


def in_messages(compute: Callable[[Any], Any], rows: Any, width: int) -> Any:
    """compute(rows), which exchanges `width` ids and scores a row, in parts that fit into a message
    each."""
    import numpy as np

    rows, size = np.asarray(rows), max(1, _FOUND_AT_A_TIME // width)
    return np.concatenate([compute(rows[begin : begin + size])
                           for begin in range(0, max(1, len(rows)), size)])


def leave(code: int | str) -> None:
    """sys.exit(code) of a process that failed, without waiting for the other processes to end.

    Process 0 gives those that fail for the same reason time to say so: else they are aborted.
    """
    if isinstance(code, str):
        print(code, file=sys.stderr, flush=True)
    sys.stdout.flush()
    with contextlib.suppress(Exception):  # jaxlib's, of several types: others go on, or are gone
        client, until = _key_value_store(), time.monotonic() + _LEAVE_SECS
        client.key_value_set(f"rag_jax/left/{index()}", "")
        for other in range(1, count()) if leads() else ():
            left_ms = max(1, round(1000 * (until - time.monotonic())))
            client.blocking_key_value_get(f"rag_jax/left/{other}", left_ms)
    os._exit(1 if isinstance(code, str) else code)
