"""The commands that a user types, each in a process of its own."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

from tests.end_to_end import forks

ROOT = pathlib.Path(__file__).parents[2]
SMALLEST = pathlib.Path(__file__).with_name("smallest.py")


def command(module: str, workdir: pathlib.Path, *flags: str) -> list[str]:
    """`python -m rag_jax.MODULE` on the smallest configuration."""
    config = [f"--config={SMALLEST}"] if module == "train" else []
    return [sys.executable, "-m", f"rag_jax.{module}", *config, f"--workdir={workdir}", *flags]


def begin(workdir: pathlib.Path, trained: pathlib.Path, *folders: str) -> None:
    """Gives a new workdir the data of another, and stages of it: `train` goes on from there."""
    for name in ("data", *folders):
        shutil.copytree(trained / name, workdir / name)


def write_sources(folder: pathlib.Path, passages: list[tuple[str, str]],
                  questions: list[tuple[str, str]]) -> dict[str, pathlib.Path]:
    """Files of passages (title, text) and of questions (question, answer), by data's fields."""
    files = {"passages": folder / "passages.tsv",
             **{name: folder / f"{name}.jsonl" for name in ("train", "dev")}}
    rows = [f"{i}\t{title}\t{text}" for i, (title, text) in enumerate(passages)]
    files["passages"].write_text("\n".join(["id\ttitle\ttext", *rows, ""]))
    for name in ("train", "dev"):
        files[name].write_text("".join(json.dumps(
            {"id": f"{name}{i}", "question": question, "answers": [answer]}) + "\n"
            for i, (question, answer) in enumerate(questions)))
    return files


def data_flags(files: dict[str, pathlib.Path]) -> list[str]:
    return [f"--config.data.{name}={file}" for name, file in files.items()]


def environment() -> dict[str, str]:
    return {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}


def run(module: str, workdir: pathlib.Path, *flags: str, stdin: str = ""
        ) -> subprocess.CompletedProcess:
    """Runs a command to its end."""
    return module_to_its_end(*command(module, workdir, *flags)[2:], stdin=stdin)


def module_to_its_end(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess:
    """`python -m ARGUMENTS`, without its imports where the system can fork."""
    if hasattr(os, "fork"):
        return forks.run(arguments, environment(), ROOT, stdin)
    return subprocess.run([sys.executable, "-m", *arguments], capture_output=True, text=True,
                          env=environment(), cwd=ROOT, input=stdin)


def start(*arguments: str) -> forks.Started | subprocess.Popen:
    """`python -m ARGUMENTS`, of which `stdout` reads all that it prints, begun likewise."""
    if hasattr(os, "fork"):
        return forks.Started(arguments, environment(), ROOT)
    return subprocess.Popen([sys.executable, "-m", *arguments], stdout=subprocess.PIPE, text=True,
                            stderr=subprocess.STDOUT, env=environment(), cwd=ROOT)


def finish(module: str, workdir: pathlib.Path, *flags: str, stdin: str = "") -> str:
    """Runs a command that must succeed; its standard output."""
    done = run(module, workdir, *flags, stdin=stdin)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
