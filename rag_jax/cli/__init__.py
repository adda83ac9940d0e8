"""The command lines: `rag_jax NAME ...`, or `python -m rag_jax.NAME ...`.

Every command is a module of this room: it parses its flags, calls the package and prints.
"""

import gc
import importlib
import logging
import sys

import rag_jax
from rag_jax.cli import compiled
from rag_jax.errors import near_matches

COMMANDS = {
    "ingest": "index the documents of a folder for questions",
    "train": "train a model on the questions and passages of a configuration",
    "evaluate": "score a trained model, or a file of answers",
    "generate": "answer questions with a trained model",
    "serve": "serve a model by OpenAI's API",
    "build_index": "index other passages for a trained model",
    "convert": "read and write checkpoints of Hugging Face",
    "reproduce": "reproduce the paper's tables and figures",
    "compile_report": "compile for devices that this machine lacks, and say what fits",
    "verify": "compare the files of a workdir or an index with their digests",
}


def enter(name: str, module: str) -> None:
    """What a module rag_jax.NAME does: run by `python -m`, it is the command NAME; imported, the
    function of that name in `rag_jax`, if there is one.

    Args:
      name: its `__name__`.
      module: its full name.
    """
    command = module.rpartition(".")[2]
    if name == "__main__":
        run(command)
    elif name == module and command in rag_jax.__all__:
        sys.modules[module] = getattr(rag_jax, command)


def run(name: str, argv: list[str] | None = None) -> None:
    """Runs a command and ends the process.

    argv: the arguments without the command's name; None = those of the process.
    """
    from rag_jax import process

    if name != "compile_report":  # whose programs no later command runs
        compiled.keep()
    # Imports and traces create millions of objects that stay. Looking through them for garbage as
    # often as usual, and once more at the end, took a quarter of the time to a first answer.
    gc.set_threshold(100_000, 50, 100)
    logging.getLogger("jax").setLevel(logging.ERROR)
    try:
        process.run(lambda: importlib.import_module(f"rag_jax.cli.{name}").main(argv))
    finally:
        gc.freeze()


def main() -> None:
    """Entry point of the console script, whose first argument is the command."""
    name, *argv = sys.argv[1:] or ["--help"]
    if name in COMMANDS:
        return run(name, argv)
    lines = [f"  {command:15s} {what}" for command, what in COMMANDS.items()]
    print("usage: rag_jax COMMAND ...\n", *lines, "\nrag_jax COMMAND --help tells its flags",
          sep="\n", file=sys.stdout if name in ("-h", "--help") else sys.stderr)
    sys.exit(name not in ("-h", "--help") and (
        f"error: rag_jax {name}: no such command; {near_matches(name, COMMANDS)}"))
