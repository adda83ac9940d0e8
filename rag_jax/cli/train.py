"""Trains a retrieval-augmented model: `python -m rag_jax.train [--config=FILE] [--workdir=DIR]`.

Runs the stages of a configuration one after the other: data, retriever warm-up, generator
warm-up, index, RAG fine-tuning, final report. The same command continues an interrupted run. On
SIGTERM, SIGHUP (the terminal was closed) or Ctrl-C, training saves after the current step and ends
with status 75.
"""

import argparse

from rag_jax.cli import flags


def main(argv: list[str] | None = None) -> None:
    """Entry point; `argv` without the program's name, None = the process's arguments."""
    parser = flags.make_parser("train", __doc__)
    parser.add_argument("--workdir", default=flags.DEFAULT_WORKDIR, type=flags.local_folder,
                        help=f"where everything is written (default: {flags.DEFAULT_WORKDIR})")
    parser.add_argument("--profile", type=_steps, metavar="START:STEPS", help="trace so many steps "
                        "of each run with jax.profiler, once START steps of this command are done, "
                        "into WORKDIR/RUN/profile (open it with TensorBoard or XProf)")
    options, config = flags.parse_with_config(parser, argv)

    flags.connect(options, config)

    from rag_jax import api

    api.train(config, options.workdir, options.profile)


def _steps(text: str) -> tuple[int, int]:
    """The type of --profile.

    Raises:
      argparse.ArgumentTypeError: it is no START:STEPS.
    """
    start, _, steps = text.partition(":")
    if not (start.isdecimal() and steps.isdecimal() and int(steps)):
        raise argparse.ArgumentTypeError(f"{text}: must be START:STEPS, such as 10:5, with at "
                                         "least one step")
    return int(start), int(steps)
