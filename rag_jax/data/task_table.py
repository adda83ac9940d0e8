"""The tasks of the paper: which files they are, where they are published, what they are scored by.

Sizes and checksums are those that TensorFlow Datasets and Hugging Face's data sets record for the
same URLs; None where neither does. Counts are those of ORQA, DPR and the data sets' own papers:
table 7 of the RAG paper is one higher in most cells.
"""

import dataclasses
from collections.abc import Callable
from typing import Literal

from rag_jax.data import task_files
from rag_jax.data.question_files import read_jsonl, read_tsv

MetricFamily = Literal["qa", "regex", "ms_marco", "jeopardy", "fever", "kilt"]


@dataclasses.dataclass(frozen=True)
class File:
    """A published file.

    Attributes:
      name: its name in the folder DATA_DIR/TASK.
      url: where it can be downloaded; empty = by hand only, from the task's homepage.
      size: bytes; None = not known.
      sha256: hex; None = not known.
      member: the file meant inside of `name`, a .tar.gz; empty = `name` itself. It may also lie
        unpacked in the folder.
    """

    name: str
    url: str
    size: int | None = None
    sha256: str | None = None
    member: str = ""


@dataclasses.dataclass(frozen=True)
class Split:
    """Some questions of a file.

    Attributes:
      file: where they are.
      read: reader of its format.
      count: how many there should be, before answers are handled; None = not known.
      half: "train" or "dev" for ORQA's division of a training file, by a hash of the question.
      hidden: the answers are not public; the split can be answered, not scored.
    """

    file: File
    read: Callable[[str], task_files.Rows]
    count: int | None = None
    half: Literal["", "train", "dev"] = ""
    hidden: bool = False


@dataclasses.dataclass(frozen=True)
class Task:
    """A task of the paper.

    Attributes:
      homepage: where the data are described.
      licence: of the data.
      metrics: the family of metrics that scores it.
      tables: of the paper, where its results are.
      trains_on: how answers become training targets (the paper's appendix D): any of the "answers";
        "pairs", one example per question and answer; "retrieved", the answers that occur in the
        first 1000 passages found; "matches", the string that most often matches the regular
        expressions there.
      splits: by name; those named train or *_train are handled as `trains_on` says.
      folder: of its files in DATA_DIR; empty = the task's name.
    """

    homepage: str
    licence: str
    metrics: MetricFamily
    tables: tuple[str, ...]
    trains_on: Literal["answers", "pairs", "retrieved", "matches"]
    splits: dict[str, Split]
    folder: str = ""


def _dpr(name: str) -> File:
    return File(name, f"https://dl.fbaipublicfiles.com/dpr/data/retriever/{name}")


def _nq_open(name: str, size: int, sha256: str) -> File:
    return File(name, "https://raw.githubusercontent.com/google-research-datasets/natural-questions"
                f"/a7a113c9fdc2d9986d624bd43b8a18d6d5779eaa/nq_open/{name}", size, sha256)


def _trivia(kind: str, member: str, size: int, sha256: str) -> File:
    name = f"triviaqa-{kind}.tar.gz"
    return File(name, f"http://nlp.cs.washington.edu/triviaqa/data/{name}", size, sha256, member)


def _unfiltered(member: str) -> File:
    return _trivia("unfiltered", f"triviaqa-unfiltered/{member}", 632549060,
                   "7f0c94207fd0a1eb7bba3d52cdfe0735c98de850b9e5aa4e75f2776ef9a531d0")


def _wiki(member: str) -> File:
    return _trivia("rc", f"qa/{member}", 2665779500,
                   "ef94fac6db0541e5bb5b27020d067a8b13b1c1ffc52717e836832e02aaed87b9")


def _web_questions(split: str, bundle: str, size: int, sha256: str) -> File:
    return File(f"webquestions.examples.{split}.json",
                f"https://worksheets.codalab.org/rest/bundles/{bundle}/contents/blob/", size,
                sha256)


def _drqa(member: str) -> File:
    return File("data.tar.gz", "https://dl.fbaipublicfiles.com/drqa/data.tar.gz",
                member=f"data/datasets/{member}")


def _ms_marco(name: str, size: int | None, sha256: str | None) -> File:
    return File(name, f"https://msmarco.blob.core.windows.net/msmarco/{name}", size, sha256)


def _fever(name: str, size: int, sha256: str) -> File:
    return File(name, f"https://fever.ai/download/fever/{name}", size, sha256)


_NQ_TRAIN = _nq_open("NQ-open.train.jsonl", 8522298,
                     "0c93aaf13b12f855628489665e4ef85ffb8573ad444646f11f4fabdc57a0aabf")
_NQ_DEV = _nq_open("NQ-open.dev.jsonl", 391316,
                   "f15567f38099f3615f5b8a685c0aef449c11ad90d3da3735e8d1b98115b40616")
_TRIVIA_TRAIN = _unfiltered("unfiltered-web-train.json")
_WEB_TRAIN = _web_questions("train", "0x4a763f8cde224c2da592b75f29e2f5c2", 825320,
                            "fb1797e4554a1b1be642388367de1379f8c0d5afc609ac171492c67f7b70cb1e")
_WEB_TEST = _web_questions("test", "0xe7bac352fce7448c9ef238fb0a297ec2", 447645,
                           "e3d4550e90660aaabe18458ba34b59f2624857273f375af7353273ce8b84ce6e")
_CURATED_TRAIN = _drqa("CuratedTrec-train.txt")
_FEVER_FILES = {
    "train": _fever("train.jsonl", 33024303,
                    "eba7e8f87076753f8494718b9a857827af7bf73e76c9e4b75420207d26e588b6"),
    "dev": _fever("paper_dev.jsonl", 2168767,
                  "41158707810008747946bf23471e82df53e77a513524b9e3ec1c2e674ef5ef8c"),
    "test": _fever("paper_test.jsonl", 2181168,
                   "fb7b0280a0adc2302bbb29bfb7af37274fa585de3171bcf908f180642d11d88e"),
}


def _fever_task(read: Callable, counts: tuple[int, int, int]) -> Task:
    return Task("https://fever.ai/dataset/fever.html", "CC BY-SA 3.0", "fever",
                ("table2", "table6", "fever_overlap"), "answers",
                {name: Split(file, read, count)
                 for (name, file), count in zip(_FEVER_FILES.items(), counts, strict=True)},
                folder="fever")


TASKS: dict[str, Task] = {
    # Training and development set as ORQA divides NQ-open's training file; its development file is
    # the test set. DPR's files hold the same questions with passages of psgs_w100.tsv, where DPR
    # found any.
    "natural_questions": Task(
        "https://github.com/google-research-datasets/natural-questions/tree/master/nq_open",
        "CC BY-SA 3.0", "qa", ("table1", "table6", "figure3", "hot_swap"), "pairs",
        {"train": Split(_NQ_TRAIN, read_jsonl, 79168, "train"),
         "dev": Split(_NQ_TRAIN, read_jsonl, 8757, "dev"),
         "test": Split(_NQ_DEV, read_jsonl, 3610),
         "dpr_train": Split(_dpr("biencoder-nq-train.json.gz"), task_files.read_dpr_json, 58880),
         "dpr_dev": Split(_dpr("biencoder-nq-dev.json.gz"), task_files.read_dpr_json, 6515),
         "dpr_test": Split(_dpr("nq-test.qa.csv"), read_tsv, 3610)}),
    # The standard test set is the development set of the unfiltered questions. Labels of the
    # Wikipedia test set (table 1's second column) are hidden: its development set stands in.
    "trivia_qa": Task(
        "http://nlp.cs.washington.edu/triviaqa/", "not stated by the authors", "qa",
        ("table1", "table6"), "retrieved",
        {"train": Split(_TRIVIA_TRAIN, task_files.read_trivia_qa, 78785, "train"),
         "dev": Split(_TRIVIA_TRAIN, task_files.read_trivia_qa, 8837, "dev"),
         "test": Split(_unfiltered("unfiltered-web-dev.json"), task_files.read_trivia_qa, 11313),
         "wiki_train": Split(_wiki("wikipedia-train.json"), task_files.read_trivia_qa, 61888),
         "wiki_dev": Split(_wiki("wikipedia-dev.json"), task_files.read_trivia_qa, 7993),
         "wiki_test": Split(_wiki("wikipedia-test-without-answers.json"),
                            task_files.read_trivia_qa_questions, 7701, hidden=True),
         "dpr_train": Split(_dpr("trivia-train.qa.csv.gz"), read_tsv, 78785),
         "dpr_dev": Split(_dpr("trivia-dev.qa.csv.gz"), read_tsv, 8837),
         "dpr_test": Split(_dpr("trivia-test.qa.csv.gz"), read_tsv, 11313)}),
    "web_questions": Task(
        "https://worksheets.codalab.org/worksheets/0xba659fe363cb46e7a505c5b6a774dc8a", "CC BY 4.0",
        "qa", ("table1", "table6"), "pairs",
        {"train": Split(_WEB_TRAIN, task_files.read_web_questions, 3417, "train"),
         "dev": Split(_WEB_TRAIN, task_files.read_web_questions, 361, "dev"),
         "test": Split(_WEB_TEST, task_files.read_web_questions, 2032)}),
    # Table 7's 635 for train and test cannot be explained: these are ORQA's and DPR's counts.
    "curated_trec": Task(
        "https://github.com/facebookresearch/DrQA", "not stated", "regex", ("table1", "table6"),
        "matches",
        {"train": Split(_CURATED_TRAIN, task_files.read_regex_jsonl, 1353, "train"),
         "dev": Split(_CURATED_TRAIN, task_files.read_regex_jsonl, 133, "dev"),
         "test": Split(_drqa("CuratedTrec-test.txt"), task_files.read_regex_jsonl, 694)}),
    # Answers of the test set are hidden, and its leaderboard is closed: dev alone can be compared.
    "ms_marco": Task(
        "https://microsoft.github.io/msmarco/", "non-commercial research only", "ms_marco",
        ("table2", "table3", "table5", "table6", "figure3"), "answers",
        {"train": Split(_ms_marco(
            "train_v2.1.json.gz", 1112116929,
            "e91745411ca81e441a3bb75deb71ce000dc2fc31334085b7d499982f14218fe2"),
            task_files.read_ms_marco, 153725),
         "dev": Split(_ms_marco(
             "dev_v2.1.json.gz", 138303699,
             "5b3c9c20d1808ee199a930941b0d96f79e397e9234f77a1496890b138df7cb3c"),
             task_files.read_ms_marco, 12467),
         "eval": Split(_ms_marco("eval_v2.1_public.json.gz", None, None),
                       task_files.read_ms_marco_questions, 101092, hidden=True)}),
    # Of SearchQA's data_json folder. How the paper chose its clues from it is not published.
    "jeopardy": Task(
        "https://github.com/nyu-dl/dl4ir-searchQA", "not stated", "jeopardy",
        ("table2", "table3", "table4", "table5", "table6", "figure2"), "answers",
        {"train": Split(File("train.zip", ""), task_files.read_search_qa, 97391),
         "dev": Split(File("val.zip", ""), task_files.read_search_qa, 13713),
         "test": Split(File("test.zip", ""), task_files.read_search_qa, 26848)}),
    "fever3": _fever_task(task_files.read_fever, (145449, 9999, 9999)),
    # Table 7's 96,966 for train is two thirds of all claims; so many support or refute theirs.
    "fever2": _fever_task(task_files.read_fever2, (109810, 6666, 6666)),
}
