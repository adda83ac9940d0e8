"""Answers questions: `python -m rag_jax.generate --workdir DIR "Who is the President of Peru?"`.

Prints the answer, its log-probability, and the passages that it came from with their prior and
posterior. --interactive asks for questions; --questions FILE --out FILE.jsonl answers a file;
--index swaps the memory, with nothing retrained.
"""

import json
import pathlib
import sys
import textwrap
from collections.abc import Iterator

from rag_jax import files, flags


def main(argv: list[str] | None = None) -> None:
    """Entry point; `argv` without the program's name, None = the process's arguments."""
    parser = flags.make_parser("generate", __doc__)
    flags.add_workdir(parser)
    parser.add_argument("question", nargs="*", help="questions to answer")
    parser.add_argument("--interactive", action="store_true", help="ask for questions")
    parser.add_argument("--questions", metavar="FILE",
                        help="a file of questions, one a line, or .jsonl with a field question")
    parser.add_argument("--out", metavar="FILE.jsonl", help="write answers there, one a line")
    options, config = flags.parse_with_config(parser, argv, flags.workdir_config)
    if not (options.question or options.questions or options.interactive):
        parser.error("name a question, --questions FILE or --interactive")

    from rag_jax.trained import open_trained, read_questions

    path = pathlib.Path(options.workdir)
    asked = list(options.question)
    if options.questions:
        asked += read_questions(pathlib.Path(options.questions))
    trained = open_trained(config, path, options.run, options.step, options.index)
    if options.out:
        out = pathlib.Path(options.out)
        with files.replaced(out) as file:
            for question, answer in zip(asked, trained.answer(asked), strict=True):
                record = {"question": question, **answer._asdict()}
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
        print(f"{len(asked)} answers in {out}")
    else:
        for question, answer in zip(asked, trained.answer(asked), strict=True):
            print(_shown(trained, question, answer), flush=True)
    if options.interactive:
        for question in _typed():
            print(_shown(trained, question, trained.answer([question])[0]), flush=True)


def _typed() -> Iterator[str]:
    while True:
        if sys.stdin.isatty():
            print("question (empty line ends): ", end="", flush=True)
        line = sys.stdin.readline().strip()
        if not line:
            return
        yield line


def _shown(trained, question: str, answer) -> str:
    lines = [f"\n{question}", f"  {answer.text or '(empty)'}    log p = {answer.log_prob:.3f}"]
    if answer.passage_ids:
        lines.append("  p(z|x)  p(z|x,y)  passage")
    store = trained.index.passages if trained.index is not None else None
    for passage_id, prior, posterior in zip(
            answer.passage_ids, answer.prior, answer.posterior, strict=True):
        passage = store[store.row_of(passage_id)]
        text = textwrap.shorten(passage.text, 100, placeholder=" ...")
        lines.append(f"  {prior:6.3f}  {posterior:8.3f}  {passage_id}  {text}")
    return "\n".join(lines)


if __name__ == "__main__":
    flags.run(main)
