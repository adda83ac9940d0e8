"""Evaluates a trained model: `python -m rag_jax.evaluate --workdir DIR [--split test]`.

Prints EM, F1, answer recall, marginal NLL and the retrieval monitors, and writes
metrics.json and predictions.jsonl to WORKDIR/RUN/evaluation/SPLIT/.
"""

import pathlib

from rag_jax import flags


def main(argv: list[str] | None = None) -> None:
    """Entry point; `argv` without the program's name, None = the process's arguments."""
    parser = flags.make_parser("evaluate", __doc__)
    flags.add_workdir(parser)
    parser.add_argument("--split", help="which questions (default: test, or dev without a test)")
    parser.add_argument("--questions", metavar="FILE", help="questions of a file instead")
    options, config = flags.parse_with_config(parser, argv, flags.workdir_config)

    flags.connect(options)

    from rag_jax import evaluation, hosts
    from rag_jax.config import ConfigError
    from rag_jax.data.tasks import load_examples
    from rag_jax.trained import open_trained
    from rag_jax.training.writers import print_table

    path = pathlib.Path(options.workdir)
    trained = open_trained(config, path, options.run, options.step, options.index)
    splits = trained.job.prepared.splits
    split = options.split or ("test" if "test" in splits else "dev")
    if options.questions:
        split, examples = pathlib.Path(options.questions).stem, load_examples(options.questions)
    elif split in splits:
        examples = splits[split]
    else:
        raise ConfigError(f"--split={split}: the workdir has {', '.join(splits)}")
    questions = trained.job.tokenize(examples)
    result = evaluation.evaluate(trained.answerer(), trained.params, questions)

    folder = path / trained.run / "evaluation" / split
    if not hosts.leads():
        return
    evaluation.write_evaluation(folder, questions, result)
    print(print_table([[name, f"{value:.4g}"] for name, value in result.metrics.items()],
                      [f"{trained.run} on {split}", "value"]))
    print(f"\n{folder}: metrics.json, predictions.jsonl")


if __name__ == "__main__":
    flags.run(main)
