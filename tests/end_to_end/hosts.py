"""The commands of a job of two processes with four virtual devices each, and of one with eight."""

import pathlib
import socket
import subprocess

from tests.end_to_end.commands import ROOT, command, environment

PROCESSES = 2
# Adam's epsilon is large: a gradient that is zero but for rounding would otherwise become a step of
# full size, and rounding is what differs between one process and two.
FLAGS = ["--config.train.steps=20", "--config.train.eval_every=20", "--config.train.save_every=7",
         "--config.mesh.data=2", "--config.mesh.fsdp=4", "--config.eval.batch_size=64",
         *(f"--config.{stage}.optimizer.eps=0.01"
           for stage in ("retriever_warmup", "generator_warmup", "train"))]


def start(module: str, workdir: pathlib.Path, *flags: str, processes: int = PROCESSES,
          heartbeat: int = 300) -> list[subprocess.Popen]:
    """Starts all processes of a job on this machine, over 8 devices together."""
    together: list[list[str]] = [[]]
    if processes > 1:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        together = [[f"--coordinator=127.0.0.1:{port}", f"--num_processes={processes}",
                     f"--process_id={i}", f"--heartbeat={heartbeat}"] for i in range(processes)]
    env = {**environment(), "JAX_NUM_CPU_DEVICES": str(8 // processes),
           "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
           "JAX_COMPILATION_CACHE_DIR": str(workdir.parent / "compiled"),  # for the next job
           "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2"}
    return [subprocess.Popen(command(module, workdir, *flags, *extra), stdout=subprocess.PIPE,
                             stderr=subprocess.STDOUT, text=True, env=env, cwd=ROOT)
            for extra in together]


def finish(module: str, workdir: pathlib.Path, *flags: str, processes: int = PROCESSES
           ) -> list[str]:
    """Runs a job that must succeed; what each process printed."""
    job = start(module, workdir, *flags, processes=processes)
    printed = [process.communicate()[0] for process in job]
    for process, text in zip(job, printed, strict=True):
        assert process.returncode == 0, text[-3000:]
    return printed
