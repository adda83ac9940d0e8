"""Answers questions: `python -m rag_jax.generate --workdir DIR "Who is the President of Peru?"`.

Prints the answer, its log-probability, and its passages with their prior and posterior.
--interactive asks for questions; --questions FILE --out FILE.jsonl answers a file; --index answers
from another index without retraining. Without --workdir, the pretrained models that
--config.model.generator.pretrained and --config.model.retriever.pretrained name answer untrained,
from the folder --index of an index that was built with that encoder. --heatmap shows which passage
gave which token; --exact searches until no other answer can have a higher probability under the
model. The fields of config.eval set the decoding: --config.eval.num_beams=4, ...
"""

import argparse
import json
import pathlib

from rag_jax import files, heatmap
from rag_jax.cli import flags
from rag_jax.config import Config, ConfigError, overrides
from rag_jax.data.question_files import checked_texts, read_asked
from rag_jax.documents.workdir import NO_GENERATOR

EXACT_NODES = 10_000


def main(argv: list[str] | None = None) -> None:
    """Entry point; `argv` without the program's name, None = the process's arguments."""
    parser = flags.make_parser("generate", __doc__)
    flags.add_workdir(parser)
    parser.add_argument("question", nargs="*",
                        help="questions to answer; after -- they may begin with a dash")
    parser.add_argument("--interactive", action="store_true", help="ask for questions")
    parser.add_argument("--questions", metavar="FILE",
                        help="questions of a file: .jsonl, .csv, .tsv, or one a line")
    parser.add_argument("--out", metavar="FILE.jsonl", type=pathlib.Path, help="write answers "
                        "there, lines of id and answer, as evaluate --predictions reads them")
    parser.add_argument("--heatmap", metavar="FILE",
                        help="document posterior per token: --heatmap alone in the terminal, "
                        "--heatmap=FILE as .html or .png; of several questions FILE-1, FILE-2, ...")
    parser.add_argument("--exact", action="store_true",
                        help="search on until no other answer can have a higher probability, "
                        f"over config.eval.exact_nodes prefixes at most (or {EXACT_NODES})")
    options, config = flags.parse_with_config(
        parser, flags.bare("--heatmap", "terminal", argv), flags.asked_config)
    if options.exact and not config.eval.exact_nodes:
        config = overrides.replace(config, {"eval.exact_nodes": EXACT_NODES})
    if not (options.question or options.questions or options.interactive):
        parser.error("name a question, --questions FILE or --interactive")
    if options.out and options.heatmap:
        parser.error("--heatmap shows what --out writes as token_posterior; leave one of them out")
    if options.heatmap not in (None, "terminal"):
        heatmap.check(pathlib.Path(options.heatmap))
    if options.out and options.interactive:
        parser.error("--interactive answers on the terminal; leave --out or it out")
    if options.out:
        files.check_place(options.out, source=options.questions)
    asked = [(f"asked-{n}", text) for n, text in enumerate(checked_texts(options.question), 1)]
    for _, text in asked:
        if options.heatmap and text.endswith((".html", ".png")):
            parser.error(f"{text!r} stands for a question; for a file write --heatmap={text}")
    of_file = read_asked(options.questions) if options.questions else []
    if twice := {name for name, _ in asked} & {name for name, _ in of_file}:
        raise ConfigError(f"{options.questions}: has the id {min(twice)!r}, which is that of a "
                          "question asked beside it; leave one out, or name it otherwise")
    asked += of_file
    _answer(options, config, asked)


def _answer(options: argparse.Namespace, config: Config, asked: list[tuple[str, str]]) -> None:
    """Answers the pairs of id and question, then what is typed."""
    flags.connect(options, config)

    from rag_jax import api, hosts
    from rag_jax.cli.display import show, show_passages, typed

    if options.interactive and hosts.count() > 1:
        raise ConfigError("--interactive: several processes have no one terminal; run one process")
    rag = api.load(options.workdir, options.run, step=options.step, index=options.index,
                   config=config)
    if not rag.answers:
        if options.out or options.heatmap or options.exact:
            raise ConfigError(f"--out, --heatmap and --exact are of answers. {NO_GENERATOR}")
        show_passages(rag, [text for _, text in asked], typed() if options.interactive else ())
        return
    answers, ruled = rag.ask_each([text for _, text in asked]), rag.answerer().decoding.has_rules
    maps = heatmap.names(options.heatmap, options.interactive or len(asked) > 1)
    if not hosts.leads():
        list(answers)  # every process computes its part of them
    elif options.out:
        files.remove_leftovers(options.out.parent)
        with files.replaced(options.out, keep=True, aside=True) as file:
            for (name, question), answer in zip(asked, answers, strict=True):
                record = {"id": name, "question": question, "answer": answer.text,
                          **answer.record()}
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
        print(f"{len(asked)} answers in {options.out}")
    else:
        for (_, question), answer in zip(asked, answers, strict=True):
            show(question, answer, next(maps), ruled, rag.matches(question))
    for question in typed() if options.interactive else ():
        show(question, rag.ask(question)[0], next(maps), ruled, rag.matches(question))
