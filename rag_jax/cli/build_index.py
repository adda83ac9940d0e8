"""Builds an index for a trained model: `python -m rag_jax.build_index --passages FILE --out DIR`.

Embeds the passages with the model's document encoder (a run that retrieves by BM25 counts their
words) and publishes an index folder for --index of rag_jax.generate and rag_jax.evaluate. Without
--workdir, --config.model.retriever.pretrained names the encoder, and
--config.model.generator.pretrained the generator that will read the passages. The same command
continues a build that was killed.

`--update --out DIR --add FILE --delete ID ...` publishes a new version of the index in DIR and
embeds only the added passages. An id that is both deleted and added is replaced.
"""

from rag_jax.cli import flags


def main(argv: list[str] | None = None) -> None:
    """Entry point; `argv` without the program's name, None = the process's arguments."""
    parser = flags.make_parser("build_index", __doc__)
    parser.add_argument("--workdir", type=flags.local_folder,
                        help=f"workdir of rag_jax.train (default: {flags.DEFAULT_WORKDIR})")
    parser.add_argument("--passages", metavar="FILE", help="as config.data.passages")
    parser.add_argument("--out", required=True, type=flags.local_folder, metavar="DIR",
                        help="folder of the new index")
    parser.add_argument("--update", action="store_true", help="edit the index at DIR")
    parser.add_argument("--add", metavar="FILE", help="with --update: more passages, as --passages")
    parser.add_argument("--delete", nargs="+", default=[], metavar="ID",
                        help="with --update: passages to remove")
    parser.add_argument("--compact", action="store_true", default=None,
                        help="with --update: rebuild the index from its embeddings")
    parser.add_argument("--queries", metavar="FILE",
                        help="questions on which recall is measured (default: dev questions)")
    parser.add_argument("--overwrite", action="store_true", help="replace another index at DIR")
    parser.add_argument("--run", help="for which of the workdir's runs (default: the first "
                        "that began)")
    options, config = flags.parse_with_config(parser, argv, flags.asked_config)
    edits = [name for name in ("add", "delete", "compact") if getattr(options, name)]
    if options.update and (options.passages or options.overwrite or not edits):
        parser.error("--update goes with --add, --delete or --compact, and without --passages and "
                     "--overwrite")
    if not options.update and (edits or not options.passages):
        parser.error(f"--{edits[0]} goes with --update" if edits else "name --passages, or say "
                     "--update")

    flags.connect(options, config)

    from rag_jax import api, hosts
    from rag_jax.training.indexing import describe

    if options.update:
        index = api.update_index(options.out, options.workdir, add=options.add or (),
                                 delete=options.delete, run=options.run, queries=options.queries,
                                 compact=options.compact, config=config)
    else:
        index = api.build_index(options.passages, options.out, options.workdir, run=options.run,
                                queries=options.queries, overwrite=options.overwrite, config=config)
    hosts.say(f"{options.out}: {describe(index)}")
