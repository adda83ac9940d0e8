"""The commands of a job of two processes with four virtual devices each, and of one with eight."""

import pathlib
import socket
import subprocess
from collections.abc import Sequence

from tests.end_to_end.commands import ROOT, command, environment

PROCESSES = 2
# Adam's epsilon is large: a gradient that is zero but for rounding would otherwise become a step of
# full size, and rounding is what differs between one process and two.
FLAGS = ["--config.train.steps=20", "--config.train.eval_every=20", "--config.train.save_every=7",
         "--config.mesh.data=2", "--config.mesh.fsdp=4", "--config.eval.batch_size=64",
         "--config.train.collapse_window=5",
         *(f"--config.{stage}.optimizer.eps=0.01"
           for stage in ("retriever_warmup", "generator_warmup", "train"))]


def start(module: str, workdir: pathlib.Path, *flags: str, processes: int = PROCESSES,
          heartbeat: int = 300, slurm: bool = False, devices: Sequence[int] = ()
          ) -> list[subprocess.Popen]:
    """Starts all processes of a job on this machine, over 8 devices together.

    slurm: they are told of each other as srun tells its tasks, not by flags.
    devices: how many each process has; empty = all as many.
    """
    together: list[list[str]] = [[]]
    tasks: list[dict[str, str]] = [{}]
    if processes > 1 and slurm:
        together, tasks = [[]] * processes, srun(processes)
    elif processes > 1:
        port = free_port()
        together = [[f"--coordinator=127.0.0.1:{port}", f"--num_processes={processes}",
                     f"--process_id={i}", f"--heartbeat={heartbeat}"] for i in range(processes)]
        tasks *= processes
    env = {**environment(), "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo"}
    devices = devices or [8 // processes] * processes
    return [subprocess.Popen(command(module, workdir, *flags, *extra), stdout=subprocess.PIPE,
                             stderr=subprocess.STDOUT, text=True, cwd=ROOT,
                             env=env | task | {"JAX_NUM_CPU_DEVICES": str(mine)})
            for extra, task, mine in zip(together, tasks, devices, strict=True)]


def free_port(first: int = 0) -> int:
    """A port that nobody listens at; with `first`, the next free one from there on."""
    for port in range(first, 2**16) if first else (0,):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return probe.getsockname()[1]
    raise OSError(f"no port is free from {first} on")


def srun(tasks: int) -> list[dict[str, str]]:
    """What srun sets for one task on each of so many nodes, all of which are this machine."""
    first = 2**16 - 2**12  # jax's ports for Slurm: this and the job's number, modulo 2^12
    return [{"SLURM_JOB_ID": str(2**12 + free_port(first) - first),
             "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": str(tasks),
             "SLURM_STEP_TASKS_PER_NODE": f"1(x{tasks})", "SLURM_PROCID": str(task),
             "SLURM_LOCALID": "0"} for task in range(tasks)]


def finish(module: str, workdir: pathlib.Path, *flags: str, processes: int = PROCESSES,
           slurm: bool = False) -> list[str]:
    """Runs a job that must succeed; what each process printed."""
    job = start(module, workdir, *flags, processes=processes, slurm=slurm)
    printed = [process.communicate()[0] for process in job]
    for process, text in zip(job, printed, strict=True):
        assert process.returncode == 0, text[-3000:]
    return printed
