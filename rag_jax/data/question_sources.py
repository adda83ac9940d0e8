"""`load_examples`: questions with their answers from files, the paper's tasks or TFDS."""

import os

from rag_jax.data.question_files import Example, collect, read_jsonl, read_tsv
from rag_jax.data.task_files import read_kilt
from rag_jax.data.task_sources import read_task
from rag_jax.data.tfds_data import load_tfds, load_tfds_directory
from rag_jax.errors import DataError

_JSONL_SUFFIXES = (".jsonl", ".jsonl.gz")
_TSV_SUFFIXES = (".tsv", ".tsv.gz", ".csv", ".csv.gz")


def load_examples(source: str | os.PathLike[str], *, data_dir: str = "", hidden: bool = False
                  ) -> list[Example]:
    """Reads all examples of a source, in its order.

    Args:
        source: one of
            `FILE.jsonl[.gz]`: per line an object with "question", and "answers" (list of strings)
                or "answer" (string or list of strings); optional "id" (else the line number),
                "positive_ids", "hard_negative_ids" or "negative_ids", "targets" (what trains,
                where that is not the answers), "titles" (of the gold pages) and "regex" (true:
                the answers are regular expressions). Other keys are ignored.
            `FILE.csv[.gz]` whose first line names its columns, with commas or semicolons between
                them, as spreadsheets write it: question, answer (or answers, or several such as
                answer 1, answer 2), and perhaps id.
            `FILE.tsv[.gz]`, other `FILE.csv[.gz]`: DPR's form, tab separated in spite of ".csv":
                question<TAB>list of strings as a JSON or Python literal, or
                question<TAB>answer<TAB>answer... A field that is quoted as in CSV is unquoted; if
                the first line with content is "question<TAB>answers", it is skipped; the id is the
                line number.
            `tfds:NAME[/CONFIG][:SPLIT]`: a TFDS data set, downloaded and prepared if it is not
                yet: natural_questions_open, trivia_qa/unfiltered.nocontext, web_questions, squad,
                or any other whose "question" and "answer(s)" are texts. SPLIT ("train" if not
                given) may be a slice such as `train[:10%]`. Without ids of its own, the position
                is the id.
            `tfds-dir:DIRECTORY[:SPLIT]`: a directory that `prepare_dataset` wrote.
            `task:NAME:SPLIT`: a task of the paper, of its official files (`tasks.toml`), which are
                downloaded if they are not there yet.
            `kilt:FILE.jsonl[.gz]`: KILT's form.
        data_dir: for `tfds:` sources TFDS's data directory, for `task:` sources the folder with a
            folder per task; "" = ~/tensorflow_datasets and ~/rag_jax_data.
        hidden: also of a task's split, or KILT's file, whose answers are not public: they come
            without.

    Raises:
        DataError: no name; unknown kind of source; damaged line (named with file, line and field);
            no examples; duplicate id; empty question; no answers; unknown data set or split.
        FileNotFoundError: no such file or directory.
        DownloadError: the data can be neither found nor downloaded.
    """
    if not isinstance(source, str | os.PathLike):
        raise DataError(f"questions: {source!r:.60} names no file and no data set")
    source = os.fspath(source)
    if source.startswith("task:"):
        return collect(source, read_task(source, data_dir, hidden), hidden)
    if source.startswith("kilt:"):
        rows = list(read_kilt(source.removeprefix("kilt:"), hidden))
        return collect(source, rows, hidden and not any(example.answers for _, example in rows))
    if source.startswith("tfds-dir:"):
        return load_tfds_directory(source)
    if source.startswith("tfds:"):
        return load_tfds(source, data_dir)
    if source.endswith(_JSONL_SUFFIXES):
        return collect(source, read_jsonl(source))
    if source.lower().endswith(_TSV_SUFFIXES):
        return collect(source, read_tsv(source))
    raise DataError(
        f"cannot tell the format of the question source {source!r}: expected a file ending in "
        f"{', '.join(_JSONL_SUFFIXES + _TSV_SUFFIXES)}, or task:NAME:SPLIT, kilt:FILE, "
        "tfds:NAME[/CONFIG][:SPLIT], or tfds-dir:DIRECTORY[:SPLIT]"
    )
