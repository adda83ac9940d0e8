"""The paper's tables and figures: `python -m rag_jax.reproduce NAME [--scale toy|paper]`.

NAME is one of table1, table2, table3, pairwise (table 4), table5, table6, figure2, figure3,
partial_decoding (section 4.2), hot_swap, fever_overlap, or all of these. Two experiments are beyond
the paper, not part of all, and of the toy scale only: objectives (what the retriever learns from)
and learned_retrieval (how much retrievers of different quality learn from answers). What is missing
below --workdir is trained and measured, each model once; an interrupted command continues.
WORKDIR/report.md and report.html have our numbers beside the paper's. --scale toy is the world of
countries, in minutes on two cores. --scale paper prints the recipe and reports what was measured;
with --execute it also runs the recipe.
"""

import pathlib

from rag_jax.cli import flags

NAMES = ("table1", "table2", "table3", "pairwise", "table5", "table6", "figure2", "figure3",
         "partial_decoding", "hot_swap", "fever_overlap")
BEYOND = ("objectives", "learned_retrieval")  # experiments that the paper does not have


def main(argv: list[str] | None = None) -> None:
    """Entry point; `argv` without the program's name, None = the process's arguments."""
    parser = flags.make_parser("reproduce", __doc__)
    parser.add_argument("name", choices=[*NAMES, *BEYOND, "all"],
                        metavar="NAME", help=f"{', '.join((*NAMES, *BEYOND))}, all")
    parser.add_argument("--scale", choices=["toy", "paper"], default="toy",
                        help="of data and models (default: toy)")
    parser.add_argument("--workdir", type=flags.local_folder, metavar="DIR",
                        help="folder of everything (default: runs/reproduce-toy, "
                        "runs/reproduce-toy-reduced for --reduced, runs/paper for paper)")
    parser.add_argument("--seeds", type=int, metavar="N",
                        help="toy: seeds of fine-tuning on the questions (default: 3)")
    parser.add_argument("--reduced", action="store_true",
                        help="toy: a few steps of the smallest models, to try the commands")
    parser.add_argument("--execute", action="store_true",
                        help="paper: train and measure what is missing on this machine")
    parser.add_argument("--data_dir", metavar="DIR", default="",
                        help="paper: folder with the official files, a folder per task, and one, "
                        "hot_swap, for the leaders and Wikipedia of 2016 (default: "
                        "~/rag_jax_data)")
    parser.add_argument("--tally", nargs="+", type=pathlib.Path, metavar="FILE.csv",
                        help="pairwise: count the filled-in sheets of judges")
    options = parser.parse_intermixed_args(argv)
    toy = options.scale == "toy"
    for wrong, why in (
            (options.seeds is not None and not toy, "--seeds belongs to --scale toy"),
            (options.seeds is not None and options.seeds < 1,
             f"--seeds={options.seeds}: must be at least 1"),
            (options.tally and options.name != "pairwise", "--tally belongs to pairwise"),
            (options.name in BEYOND and not toy, f"{options.name} is of --scale toy"),
            (options.reduced and not toy, "--reduced belongs to --scale toy"),
            (options.execute and toy,
             "--execute belongs to --scale paper; the toy scale always runs"),
            (options.data_dir and toy,
             "--data_dir belongs to --scale paper; the toy scale makes its data")):
        if wrong:
            parser.error(why)

    from rag_jax.reproduction import run
    from rag_jax.reproduction.full import Full
    from rag_jax.reproduction.toy import Toy

    default = f"runs/reproduce-toy{'-reduced' * options.reduced}" if toy else "runs/paper"
    root = pathlib.Path(options.workdir or default).absolute()
    names = NAMES if options.name == "all" else (options.name,)
    scale = Toy(root, options.seeds or 3, options.reduced) if toy else Full(root, options.data_dir)
    if options.tally:
        run.tally(root, scale, options.tally)
    if not toy:
        print(scale.recipe(*run.lacking(names, root, scale)))
    run.reproduce(names, root, scale, work=toy or options.execute)
