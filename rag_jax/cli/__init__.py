"""The command lines: `rag_jax NAME ...`, or `python -m rag_jax.NAME ...`.

Every command is a module of this room: it parses its flags, calls `rag_jax.api` and prints.
"""

import functools
import importlib
import sys

COMMANDS = {
    "train": "train a model on the questions and passages of a configuration",
    "evaluate": "score a trained model, or a file of answers",
    "generate": "answer questions with a trained model",
    "build_index": "index other passages for a trained model",
    "convert": "read and write checkpoints of Hugging Face",
    "reproduce": "work out the paper's tables and figures",
    "compile_report": "compile for devices that are not there, and tell what fits",
    "verify": "compare the files of a workdir or an index with their digests",
}


def run(name: str, argv: list[str] | None = None) -> None:
    """Runs a command and ends the process; `argv` without its name, None = the process's."""
    from rag_jax import flags

    command = importlib.import_module(f"rag_jax.cli.{name}")
    flags.run(functools.partial(command.main, argv))


def main() -> None:
    """Entry point of the console script, whose first argument is the command."""
    name, *argv = sys.argv[1:] or ["--help"]
    if name in COMMANDS:
        return run(name, argv)
    lines = [f"  {command:15s} {what}" for command, what in COMMANDS.items()]
    print("usage: rag_jax COMMAND ...\n", *lines, "\nrag_jax COMMAND --help tells its flags",
          sep="\n", file=sys.stdout if name in ("-h", "--help") else sys.stderr)
    sys.exit(name not in ("-h", "--help") and f"error: rag_jax {name}: no such command")
