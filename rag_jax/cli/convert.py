"""Converts checkpoints: `python -m rag_jax.convert --from SOURCE --to DEST`.

From a Hugging Face name or folder (encoder, generator, RAG or Atlas) to a workdir that a
configuration can name, or from a workdir to folders for `from_pretrained` of transformers.
"""

from rag_jax.cli import flags


def main(argv: list[str] | None = None) -> None:
    """Entry point; `argv` without the program's name, None = the process's arguments."""
    parser = flags.make_parser("convert", __doc__)
    parser.add_argument("--from", dest="source", required=True, metavar="SOURCE",
                        help="name on the Hugging Face hub, checkpoint folder, or workdir")
    parser.add_argument("--to", dest="target", required=True, metavar="DEST",
                        type=flags.local_folder,
                        help="new folder; it appears when it is complete")
    parser.add_argument("--run", help="of a trained workdir (default: its first)")
    parser.add_argument("--family", metavar="CLASS",
                        help="class of transformers to write (default: as the source needs)")
    options = parser.parse_intermixed_args(argv)

    from rag_jax.conversion import convert

    print(convert(options.source, options.target, options.run, options.family))
