"""`task:NAME:SPLIT`: files found, fetched and unpacked; ORQA's division; counts that differ."""

import gzip
import io
import json
import tarfile
import warnings

import numpy as np
import pytest

from rag_jax.data import task_sources
from rag_jax.data.download import DownloadError
from rag_jax.data.question_files import Example
from rag_jax.data.question_sources import load_examples
from rag_jax.data.task_sources import TASKS, File, held_out, locate, task_of
from rag_jax.errors import DataError
from tests.data.official_files import (
    BIENCODER,
    CLUES,
    CURATED,
    FEVER,
    KILT,
    MARCO,
    NQ_CSV,
    NQ_OPEN,
    TRIVIA,
    WEB,
    compact,
    document,
    lines,
    zipped,
)

# Task, split, name of its file in the task's folder, content, ids that are read.
SOURCES = [
    ("natural_questions", "test", "NQ-open.dev.jsonl", lines(NQ_OPEN), "1 2 3"),
    ("natural_questions", "dpr_train", "biencoder-nq-train.json", document(BIENCODER),
     "1.0 2.0 2.1"),
    ("natural_questions", "dpr_dev", "biencoder-nq-dev.json.gz",
     gzip.compress(document(BIENCODER), mtime=0), "1 2"),
    ("natural_questions", "dpr_test", "nq-test.qa.csv", NQ_CSV.encode(), "1 2 3"),
    ("trivia_qa", "test", "unfiltered-web-dev.json", document(TRIVIA), "tc_2 tc_3"),
    ("trivia_qa", "wiki_dev", "qa/wikipedia-dev.json", document(TRIVIA), "tc_2 tc_3"),
    ("trivia_qa", "dpr_dev", "trivia-dev.qa.csv", NQ_CSV.encode(), "1 2 3"),
    ("web_questions", "test", "webquestions.examples.test.json", compact(WEB), "1 2 3"),
    ("curated_trec", "test", "CuratedTrec-test.txt", lines(CURATED), "1 2"),
    ("ms_marco", "dev", "dev_v2.1.json", compact(MARCO), "1185869 597651"),
    ("jeopardy", "dev", "val.zip", zipped(CLUES), "000000 000007"),
    ("fever3", "test", "paper_test.jsonl", lines(FEVER), "75397 33078 137637"),
    ("fever2", "test", "paper_test.jsonl", lines(FEVER), "75397 33078"),
]


def put(folder, task, name, data):
    path = folder / (TASKS[task].folder or task) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def load(source, folder, expect_count=False):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        examples = load_examples(source, data_dir=str(folder))
    assert bool(caught) is not expect_count
    return examples


@pytest.mark.parametrize("task, split, name, data, ids", SOURCES)
def test_a_task_is_read_from_its_folder(tmp_path, task, split, name, data, ids):
    put(tmp_path, task, name, data)
    examples = load(f"task:{task}:{split}", tmp_path)
    assert [example.id for example in examples] == ids.split()
    assert all(example.regex is (task == "curated_trec") for example in examples)


def test_a_file_without_a_question_is_named(tmp_path):
    """A download that had failed lay in a folder that the message did not tell."""
    path = put(tmp_path, "natural_questions", "NQ-open.dev.jsonl", b"")
    with pytest.raises(DataError, match=f"no examples in {path}: .*damaged, remove it"):
        load("task:natural_questions:test", tmp_path)


def test_a_sound_file_without_a_question_of_the_split_is_not_called_damaged(tmp_path):
    path = put(tmp_path, "natural_questions", "NQ-open.train.jsonl", lines([
        {"question": question, "answer": ["a"]} for question in ("who", "where")]))
    splits = {held_out(question) for question in ("who", "where")}
    assert splits == {False}
    with pytest.raises(DataError, match=f"none of the 2 questions in {path} is of this split"):
        load("task:natural_questions:dev", tmp_path)


def test_pages_of_one_output_of_kilt_are_one_evidence_set(tmp_path):
    """Pages that support an answer together must not count one by one."""
    path = tmp_path / "hotpot-dev-kilt.jsonl"
    pages = [{"wikipedia_id": "7", "title": "Lima"}, {"wikipedia_id": "9", "title": "Peru"},
             {"wikipedia_id": "7", "title": "\tLi\nma"}, {"wikipedia_id": "7", "title": "Li ma"}]
    path.write_bytes(lines([{"id": "1", "input": "q", "output": [
        {"answer": "a", "provenance": pages}, {"provenance": pages[1:2]}]}]))
    example, = load_examples(f"kilt:{path}")
    assert example.evidence == ("7\tLima\n9\tPeru\n7\tLi ma", "9\tPeru")
    assert example.titles == ("Lima", "Peru", "Li ma")


def test_a_blank_answer_of_kilt_is_none(tmp_path):
    """One refused a whole file that was exported from Hugging Face's copy."""
    path = tmp_path / "nq-dev-kilt.jsonl"
    pages = [{"wikipedia_id": "7", "title": "Lima"}]
    path.write_bytes(lines([{"id": "1", "input": "q", "output": [
        {"answer": "", "provenance": pages}, {"answer": " a ", "provenance": []},
        {"answer": None, "provenance": pages}]}]))
    example, = load_examples(f"kilt:{path}")
    assert example.answers == ("a",) and example.titles == ("Lima",)


def test_a_test_file_of_kilt_can_be_answered(tmp_path):
    """What its leaderboard asks for could not even be read."""
    path = tmp_path / "nq-test_without_answers-kilt.jsonl"
    path.write_bytes(lines([{"id": "1", "input": "q"}, {"id": "2", "input": "r", "output": []}]))
    assert load_examples(f"kilt:{path}", hidden=True) == [Example("1", "q", ()),
                                                         Example("2", "r", ())]
    with pytest.raises(ValueError, match=':1: no "output"'):
        load_examples(f"kilt:{path}")
    path.write_bytes(lines([*KILT, {"id": "3", "input": "q"}]))
    with pytest.raises(ValueError, match=":3: no answers"):  # all others would not be scored
        load_examples(f"kilt:{path}", hidden=True)


def test_kilt_is_read_from_a_file(tmp_path):
    path = tmp_path / "nq-dev-kilt.jsonl"
    path.write_bytes(lines(KILT))
    assert [e.id for e in load_examples(f"kilt:{path}")] == ["6915606477668963399", "2"]


def test_natural_questions_are_divided_as_orqa_does_and_train_by_pairs(tmp_path):
    rows = [{"question": f"who wrote book {n}", "answer": ["A", f"B{n}"]} for n in range(200)]
    put(tmp_path, "natural_questions", "NQ-open.train.jsonl", lines(rows))
    train = load("task:natural_questions:train", tmp_path)
    dev = load("task:natural_questions:dev", tmp_path)
    asked = [row["question"] for row in rows]
    assert [e.question for e in dev] == [q for q in asked if held_out(q)]
    assert [e.question for e in train[::2]] == [q for q in asked if not held_out(q)]
    assert 0 < len(dev) < 60 and all(not e.targets for e in dev)
    number = int(train[1].id.partition(".")[0])
    assert train[1] == Example(f"{number}.1", rows[number - 1]["question"],
                               ("A", f"B{number - 1}"), targets=(f"B{number - 1}",))


def test_a_count_that_differs_from_the_papers_is_told(tmp_path, monkeypatch):
    put(tmp_path, "web_questions", "webquestions.examples.test.json", compact(WEB))
    with pytest.warns(UserWarning, match="task:web_questions:test: 3 questions where 2032"):
        load_examples("task:web_questions:test", data_dir=str(tmp_path))
    rows = [{**WEB[n % 3], "utterance": f"question {n}?"} for n in range(2032)]
    put(tmp_path, "web_questions", "webquestions.examples.test.json", compact(rows))
    assert len(load("task:web_questions:test", tmp_path, expect_count=True)) == 2032


@pytest.mark.parametrize("source, message", [
    ("task:natural_question:test", "no task 'natural_question': .* one of natural_questions, tr"),
    ("task:natural_questions:validation", "no split 'validation' .*: it has train, dev, test, dpr"),
    ("task:natural_questions", "no split ''"),
])
def test_unknown_tasks_and_splits_list_those_there_are(source, message):
    with pytest.raises(ValueError, match=message):
        load_examples(source)


def test_what_names_no_task_is_none():
    assert task_of("train.jsonl") is None and task_of("tfds:web_questions") is None


def test_a_damaged_file_of_a_task_is_named_with_its_record(tmp_path):
    path = put(tmp_path, "fever3", "train.jsonl", lines([FEVER[0], {**FEVER[1], "label": "NO"}]))
    with pytest.raises(ValueError) as error:
        load_examples("task:fever3:train", data_dir=str(tmp_path))
    assert str(error.value).startswith(f'{path}:2: "label" is "NO": expected one of SUPPORTS, ')


# --- Fetching -------------------------------------------------------------------------------------


def packed(members):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, data in members.items():
            item = tarfile.TarInfo(name)
            item.size = len(data)
            tar.addfile(item, io.BytesIO(data))
    return out.getvalue()


def test_what_is_not_there_is_downloaded_and_unpacked_once(tmp_path, monkeypatch):
    asked = []

    def fetched(url, path, size, sha256):
        asked.append((url, size, sha256))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(packed({"qa/other.json": b"x", "./qa/file.json": b"content"}))

    monkeypatch.setattr(task_sources, "download", fetched)
    file = File("archive.tar.gz", "http://x/archive.tar.gz", 7, "ab", "qa/file.json")
    for _ in range(2):
        path = locate(tmp_path / "task", file, "http://home")
        assert path == tmp_path / "task" / "file.json" and path.read_bytes() == b"content"
    assert asked == [("http://x/archive.tar.gz", 7, "ab")]
    assert sorted(p.name for p in path.parent.iterdir()) == ["archive.tar.gz", "file.json"]


def test_an_archive_that_is_there_is_not_fetched(tmp_path, monkeypatch):
    monkeypatch.setattr(task_sources, "download", None)
    data = packed({"data/datasets/CuratedTrec-test.txt": lines(CURATED)})
    put(tmp_path, "curated_trec", "data.tar.gz", data)
    assert len(load("task:curated_trec:test", tmp_path)) == 2


@pytest.mark.parametrize("damage", ["cut", "flipped", "other"])
def test_a_damaged_archive_leaves_nothing_behind(tmp_path, damage):
    """What an archive with flipped bytes holds was read: tarfile compares no checksum."""
    content = np.random.default_rng(0).bytes(100_000)
    data = packed({"qa/file.json": content})
    flipped = bytearray(data)
    flipped[50_000] ^= 255
    archive = tmp_path / "archive.tar.gz"
    archive.write_bytes({"cut": data[:-200], "flipped": flipped,
                         "other": packed({"qa/other.json": b"x"})}[damage])
    file = File("archive.tar.gz", "http://x", member="qa/file.json")
    message = "no qa/file.json in it" if damage == "other" else "damaged archive"
    with pytest.raises(ValueError, match=f"archive.tar.gz: {message}.*remove it"):
        locate(tmp_path, file, "")
    assert not (tmp_path / "file.json").exists()


def test_without_a_network_the_error_names_url_place_and_remedy(tmp_path, monkeypatch):
    monkeypatch.setitem(TASKS["fever3"].splits, "test", TASKS["fever3"].splits["test"].__class__(
        File("paper_test.jsonl", "http://127.0.0.1:9/paper_test.jsonl"), "fever"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with pytest.raises(DownloadError) as error:
        load_examples("task:fever3:test", data_dir=str(tmp_path))
    for told in ("http://127.0.0.1:9/paper_test.jsonl", str(tmp_path / "fever/paper_test.jsonl"),
                 "fetch the file where there is a network"):
        assert told in str(error.value)


def test_a_file_that_has_no_url_is_asked_for(tmp_path):
    with pytest.raises(FileNotFoundError) as error:
        load_examples("task:jeopardy:train", data_dir=str(tmp_path))
    for told in (str(tmp_path / "jeopardy/train.zip"), TASKS["jeopardy"].homepage, "data_dir"):
        assert told in str(error.value)


@pytest.mark.parametrize("task, split, name, content, asked", [
    ("trivia_qa", "wiki_test", "qa/wikipedia-test-without-answers.json",
     {"Data": [{key: record[key] for key in ("Question", "QuestionId", "EntityPages")}
               for record in TRIVIA["Data"]]},
     [("tc_2", TRIVIA["Data"][0]["Question"]), ("tc_3", TRIVIA["Data"][1]["Question"])]),
    ("ms_marco", "eval", "eval_v2.1_public.json",
     {key: MARCO[key] for key in ("query", "query_id", "query_type", "passages")},
     [("1185869", MARCO["query"]["0"]), ("1185868", "unanswered"),
      ("597651", MARCO["query"]["2"])]),
])
@pytest.mark.filterwarnings("ignore:.*questions")
def test_questions_whose_answers_are_not_public_are_read_without(tmp_path, task, split, name,
                                                                 content, asked):
    put(tmp_path, task, name, compact(content))
    source, folder = f"task:{task}:{split}", str(tmp_path)
    examples = load_examples(source, data_dir=folder, hidden=True)
    assert [(e.id, e.question) for e in examples] == asked and {e.answers for e in examples} == {()}
    with pytest.raises(ValueError, match=f"{source}: its answers are not public.*evaluate --ques"):
        load_examples(source, data_dir=folder)
    broken = json.dumps(content).replace('"Question":', '"Qestion":').replace('"query":', '"qry":')
    put(tmp_path, task, name, broken.encode())
    with pytest.raises(ValueError, match=f"{name.split('/')[-1]}:1: .*(Question|query)"):
        load_examples(source, data_dir=folder, hidden=True)


def test_a_question_with_answers_must_have_some(tmp_path):
    (tmp_path / "q.jsonl").write_text('{"question": "q", "answers": []}')
    with pytest.raises(ValueError, match="q.jsonl:1: no answers"):
        load_examples(str(tmp_path / "q.jsonl"))


# --- The table ------------------------------------------------------------------------------------


def test_a_user_without_a_home_names_the_folder_of_the_data(monkeypatch):
    """In a container whose user has no entry, the usual folder was an error of ours."""
    def no_home(path):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr("pathlib.Path.expanduser", no_home)
    with pytest.raises(DataError, match="~/rag_jax_data: this user has no home.*data_dir"):
        load_examples("task:fever3:dev")


def test_the_table_is_complete():
    """Every result of the paper has its task, and every file a name and a place."""
    assert set(TASKS) == {"natural_questions", "trivia_qa", "web_questions", "curated_trec",
                          "ms_marco", "jeopardy", "fever3", "fever2"}
    for name, task in TASKS.items():
        assert {"train", "dev"} <= task.splits.keys() and task.homepage.startswith("http"), name
        assert ("test" in task.splits) is (name != "ms_marco"), "its labels are hidden"
        assert task.licence and task.tables
        for split in task.splits.values():
            assert split.count and bool(split.file.url) is (name != "jeopardy")
            assert split.file.sha256 is None or len(bytes.fromhex(split.file.sha256)) == 32
            assert split.half == "" or split.file.name == task.splits["train"].file.name
    assert {task.metrics for task in TASKS.values()} == {"qa", "regex", "ms_marco", "jeopardy",
                                                         "fever"}
    assert TASKS["natural_questions"].splits["train"].count == 79168
    json.dumps({name: task.tables for name, task in TASKS.items()})
