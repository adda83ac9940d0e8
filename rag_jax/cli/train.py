"""Trains a retrieval-augmented model: `python -m rag_jax.train [--config=FILE] [--workdir=DIR]`.

Runs the stages of a configuration one after the other: data, retriever warm-up, generator
warm-up, index, RAG fine-tuning, final report. The same command takes an interrupted run up again;
one that SIGTERM or Ctrl-C stopped between two steps has saved first, and ends with status 75.
"""

from rag_jax import flags


def main(argv: list[str] | None = None) -> int | None:
    """Entry point; `argv` without the program's name, None = the process's arguments."""
    parser = flags.make_parser("train", __doc__)
    parser.add_argument("--workdir", default=flags.DEFAULT_WORKDIR, type=flags.local_folder,
                        help=f"where everything is written (default: {flags.DEFAULT_WORKDIR})")
    options, config = flags.parse_with_config(parser, argv)

    flags.connect(options)

    from rag_jax import api
    from rag_jax.training.loop import Preempted

    try:
        api.train(config, options.workdir)
    except Preempted as reason:
        print(f"{reason}; the same command goes on from there", flush=True)
        return flags.UNFINISHED
    return None
