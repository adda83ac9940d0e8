"""Evaluates a trained model: `python -m rag_jax.evaluate --workdir DIR [--split test]`.

Prints EM with its confidence interval, what config.eval.metrics names, answer recall, marginal NLL
and the retrieval monitors. Writes metrics.json and predictions.jsonl to --out, where files of an
earlier evaluation become earlier-NAME, or to WORKDIR/RUN/evaluation/SPLIT/ (or
questions-NAME-DIGEST/; then -index-NAME-DIGEST, -step-STEP, and settings: -FIELD_VALUE-DIGEST).

`--predictions FILE --questions FILE` scores answers of any system, JSON lines of "id" and "answer".
"""

import argparse
import pathlib

from rag_jax import files
from rag_jax.cli import flags
from rag_jax.config import Config, ConfigError


def main(argv: list[str] | None = None) -> None:
    """Entry point; `argv` without the program's name, None = the process's arguments."""
    parser = flags.make_parser("evaluate", __doc__)
    flags.add_workdir(parser)
    parser.add_argument("--split", help="which questions (default: test, or dev without a test)")
    parser.add_argument("--questions", metavar="FILE",
                        help="questions of a file, or of another source of config.data, instead")
    parser.add_argument("--out", metavar="DIR", type=flags.local_folder,
                        help="where to write (default: in WORKDIR/RUN/evaluation)")
    parser.add_argument("--choose-k", metavar="K,K,...", type=flags.counts, default=(),
                        help="choose the number of passages by the score on dev, and answer so")
    parser.add_argument("--choose-weight", metavar="W,W,...", type=flags.numbers, default=(),
                        help="hybrid: likewise the weight of words, by the ranks of answers")
    parser.add_argument("--predictions", metavar="FILE", type=pathlib.Path,
                        help="score the answers of this file; needs --questions, no workdir")
    options, config = flags.parse_with_config(parser, argv, lambda options: (
        Config() if options.predictions else flags.workdir_config(options)))
    if options.questions and options.split:
        raise ConfigError("--questions and --split: give one of them")
    (_score_file if options.predictions else _evaluate)(options, config)


def _score_file(options: argparse.Namespace, config: Config) -> None:
    from rag_jax import scoring
    from rag_jax.data.question_sources import load_examples

    unread = ("choose_k", "choose_weight", "workdir", "run", "step", "index", "split", "out")
    if not options.questions or any(getattr(options, name) not in (None, ()) for name in unread):
        raise ConfigError("--predictions prints a table, for the answers to --questions: name "
                          "those, and no model or folder")
    scoring.check_read(options.changed_fields)
    examples = load_examples(options.questions, data_dir=config.data.data_dir)
    predictions = scoring.read_predictions(options.predictions, examples)
    _show(f"{options.predictions} on {options.questions}",
          scoring.score(predictions, examples, config.eval.metrics, how=config.eval))


def _evaluate(options: argparse.Namespace, config: Config) -> None:
    place = pathlib.Path(options.out or options.workdir)
    files.check_place(place / "metrics.json", make_parents=True)
    if options.out:
        files.check_own(place, ("metrics.json", "predictions.jsonl"))
    flags.connect(options, config)

    from rag_jax import api, evaluation, hosts
    from rag_jax.data.question_sources import load_examples

    rag = api.load(options.workdir, options.run, step=options.step, index=options.index,
                   config=config)
    splits, chooses = rag.job.prepared.splits, bool(options.choose_k or options.choose_weight)
    split = options.split or ("test" if "test" in splits else "dev")
    if options.questions:
        examples = load_examples(options.questions, data_dir=config.data.data_dir, hidden=True)
    elif split in splits and not (chooses and split == "dev"):
        examples = splits[split]
    else:
        raise ConfigError(f"--split={split}: " * bool(options.split) + "the workdir has "
                          + (", ".join(splits) or "no questions") + "; name a file by --questions"
                          + ", as what is chosen on dev is for other questions" * chooses)
    chosen = rag.choose_weight(options.choose_weight) if options.choose_weight else {}
    chosen |= rag.choose_k(options.choose_k) if options.choose_k else {}
    # Only where this command sets it: the workdir's value limits the evaluations of its training.
    first = config.eval.max_examples if "eval.max_examples" in options.changed_fields else 0
    result = rag.evaluate(examples, max_examples=first,
                          **({"k": chosen["k"]} if options.choose_k else {}))
    result.metrics.update(chosen)
    settings = options.settings | {n: chosen[n] for n in ("k", "bm25_weight") if n in chosen}
    settings |= {"eval.max_examples": first} if first else {}
    name = evaluation.folder_name(split, options.questions, options.index, options.step, settings)
    if not hosts.leads():
        return
    folder = place if options.out else place / rag.run / "evaluation" / name
    _show(f"{rag.run} on {name}", result.metrics)
    evaluation.write_evaluation(folder, result, bool(options.out))
    print(f"\n{folder}: metrics.json, predictions.jsonl",
          *evaluation.remarks(result, rag.config.data), sep="\n")


def _show(title: str, metrics: dict[str, float]) -> None:
    from rag_jax.text_table import print_table
    print(print_table([[name, f"{value:{'.4g' if value % 1 else '.0f'}}"]
                       for name, value in metrics.items()], [title, "value"]))
