"""Indexes the documents of a folder: `python -m rag_jax.ingest FOLDER --workdir DIR`.

Reads PDF, DOCX, HTML, Markdown, text, CSV, TSV and JSONL, and divides them into passages that keep
file, page, heading and span; `python -m rag_jax.generate --workdir DIR "..."` then answers and
cites them. --config.model.retriever.pretrained names the encoder that finds passages (without one,
BM25 finds their words), --config.model.generator.pretrained the generator that answers (without
one, passages are shown). The same command, repeated, reads what has changed in the folder.
"""

import argparse
from collections import Counter

from rag_jax.cli import flags
from rag_jax.config import Config
from rag_jax.documents.workdir import NO_ENCODER, NO_GENERATOR
from rag_jax.errors import first_of
from rag_jax.visible import command, visible

SHOWN = 20  # files listed by name for each reason, at most


def main(argv: list[str] | None = None) -> None:
    """Entry point; `argv` without the program's name, None = the process's arguments."""
    parser = flags.make_parser("ingest", __doc__)
    parser.add_argument("folder", type=flags.local_folder, help="of documents; or a single file")
    parser.add_argument("--workdir", required=True, type=flags.local_folder, metavar="DIR",
                        help="where everything is written")
    parser.add_argument("--words", type=int, metavar="N", help="words of a passage, at most; it "
                        "ends where a sentence does (default: 100, or as before)")
    parser.add_argument("--tokens", type=int, metavar="N", help="in place of --words: tokens of a "
                        "passage as the encoder reads it")
    parser.add_argument("--overlap", type=int, metavar="N", help="words (tokens) of whole "
                        "sentences that a passage repeats of the one before, at most (default: 0)")
    parser.add_argument("--train", metavar="FILE", help="then train on questions about the "
                        "documents, as config.data.train; needs --dev and a generator")
    parser.add_argument("--dev", metavar="FILE", help="questions that choose the best checkpoint")
    options, config = flags.parse_with_config(parser, argv, _base, several=False,
                                              with_runs=_with_runs)
    if bool(options.train) != bool(options.dev):
        parser.error("--train and --dev: name both, files of other questions each")

    from rag_jax import ingestion

    if options.train:
        ingestion.check_training(options.workdir, config, options.train, options.dev)
    given = {name: value for name in ("words", "tokens", "overlap")
             if (value := getattr(options, name)) is not None}
    done = ingestion.ingest(options.folder, options.workdir, config=config, chunking=given)
    for line in _lines(options, done):
        print(line, flush=True)
    if options.train:
        steps = {"steps": config.train.steps} if "train.steps" in options.changed_fields else {}
        ingestion.fine_tune(options.workdir, options.train, options.dev, config=config, **steps)


def _base(options: argparse.Namespace) -> Config:
    from rag_jax.ingest_config import base_config

    return base_config(options.workdir)


def _with_runs(config: Config, named: bool) -> Config:
    from rag_jax.ingest_config import with_runs

    return with_runs(config, named)


def _lines(options: argparse.Namespace, done) -> list[str]:
    """What was done and what was not, as lines for the terminal."""
    lines = [f"{options.workdir}: {_count(done.passages, 'passage')} of "
             f"{_count(done.files, 'file')}; {_count(len(done.read), 'file')} read, "
             f"{len(done.removed)} removed, {_count(done.embedded, 'passage')} embedded"]
    for name, remarks in sorted(done.remarks.items()):
        if name in done.read:
            lines += [f"  {visible(name)}: {visible(remark)}" for remark in remarks]
    before = [name for name in sorted(done.remarks) if name not in done.read]
    if before:
        what = "file that was read before has" if len(before) == 1 else (
            "files that were read before have")
        lines += [f"{len(before)} {what} remarks (in Python, rag_jax.ingest(...).remarks):",
                  f"  {visible(first_of(before, SHOWN))}"]
    for what, found in (("not read", done.skipped),
                        ("not read now, so that their passages of before stay", done.stay)):
        for reason, _ in Counter(found.values()).most_common():
            names = [name for name, own in found.items() if own == reason]
            lines += [f"{what}, {visible(reason)}:", f"  {visible(first_of(names, SHOWN))}"]
    ask = f'Ask: {command("rag_jax.generate", "--workdir", options.workdir)} "..."'
    return [*lines, *[NO_ENCODER] * done.lexical, *[NO_GENERATOR] * (not done.answers),
            *[ask] * (not options.train)]  # after training comes another one


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
