"""Answers questions: `python -m rag_jax.generate --workdir DIR "Who is the President of Peru?"`.

Prints the answer, its log-probability, and the passages that it came from with their prior and
posterior. --interactive asks for questions; --questions FILE --out FILE.jsonl answers a file;
--index swaps the memory, with nothing retrained; --heatmap shows which passage gave which token;
--exact searches on until the answer is certainly the most probable one. How to decode is
config.eval: --config.eval.num_beams=4, --config.eval.strategy=marginal, ...
"""

import itertools
import json
import pathlib
import sys
from collections.abc import Iterator

from rag_jax import files, flags, overrides

EXACT_NODES = 10_000


def main(argv: list[str] | None = None) -> None:
    """Entry point; `argv` without the program's name, None = the process's arguments."""
    parser = flags.make_parser("generate", __doc__)
    flags.add_workdir(parser)
    parser.add_argument("question", nargs="*", help="questions to answer")
    parser.add_argument("--interactive", action="store_true", help="ask for questions")
    parser.add_argument("--questions", metavar="FILE",
                        help="a file of questions, one a line, or .jsonl with a field question")
    parser.add_argument("--out", metavar="FILE.jsonl", help="write answers there, one a line")
    parser.add_argument("--heatmap", nargs="?", const="terminal", metavar="FILE",
                        help="document posterior per token, in the terminal or as .html or .png; "
                        "of several questions FILE-1, FILE-2, ...")
    parser.add_argument("--exact", action="store_true",
                        help="search on until the answer is certified as the most probable one, "
                        f"over config.eval.exact_nodes prefixes at most (or {EXACT_NODES})")
    options, config = flags.parse_with_config(parser, argv, flags.workdir_config)
    if options.exact and not config.eval.exact_nodes:
        config = overrides.replace(config, {"eval.exact_nodes": EXACT_NODES})
    if not (options.question or options.questions or options.interactive):
        parser.error("name a question, --questions FILE or --interactive")
    if options.out and options.heatmap:
        parser.error("--heatmap shows what --out writes as token_posterior; leave one of them out")

    flags.connect(options)

    from rag_jax import hosts
    from rag_jax.config import ConfigError
    from rag_jax.display import show
    from rag_jax.trained import open_trained, read_questions

    if options.interactive and hosts.count() > 1:
        raise ConfigError("--interactive: several processes have no one terminal; run one process")
    path = pathlib.Path(options.workdir)
    asked = list(options.question)
    if options.questions:
        asked += read_questions(pathlib.Path(options.questions))
    trained = open_trained(config, path, options.run, options.step, options.index)
    answers = trained.answer(asked)
    maps = _maps(options.heatmap, options.interactive or len(asked) > 1)
    if not hosts.leads():
        return
    if options.out:
        out = pathlib.Path(options.out)
        with files.replaced(out) as file:
            for question, answer in zip(asked, answers, strict=True):
                record = {"question": question, **answer.record()}
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
        print(f"{len(asked)} answers in {out}")
    else:
        for question, answer in zip(asked, answers, strict=True):
            show(trained, question, answer, next(maps))
    if options.interactive:
        for question in _typed():
            show(trained, question, trained.answer([question])[0], next(maps))


def _maps(named: str | None, several: bool) -> Iterator[str | None]:
    """Where the heat map of one question after the other goes."""
    if not several or named in (None, "terminal"):
        yield from itertools.repeat(named)
    path = pathlib.Path(named)
    for number in itertools.count(1):
        yield str(path.with_stem(f"{path.stem}-{number}"))


def _typed() -> Iterator[str]:
    while True:
        if sys.stdin.isatty():
            print("question (empty line ends): ", end="", flush=True)
        line = sys.stdin.readline().strip()
        if not line:
            return
        yield line


if __name__ == "__main__":
    flags.run(main)
