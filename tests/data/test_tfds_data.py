"""Question sets through TFDS: round trip, built-in sets, errors, and no need of TensorFlow."""

import builtins
import concurrent.futures
import http.server
import io
import json
import os
import pathlib
import re
import subprocess
import sys
import tarfile
import tempfile
import threading

import numpy as np
import pytest

from rag_jax.data import tfds_data
from rag_jax.data.question_files import Example
from rag_jax.data.question_sources import load_examples
from rag_jax.data.tfds_data import prepare_dataset
from rag_jax.errors import DataError

EXAMPLES = [
    Example("q2", "¿Cuál es la capital del Perú?", ("Lima", "Ciudad de los Reyes"), ("7",), ("3",)),
    Example("q10", "東京はどこの首都ですか", ("日本",), (), ("1", "2", "3")),
    Example("q1", " a line\nbreak, a tab\t and e\u0301 ", ("\U0001f600", '"quoted"')),
    Example("q3", "r", ("a|b", "c"), targets=("b",), regex=True, titles=("Ü (film)", "T")),
]


def write(path, text):
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8"))
    return str(path)


def message_of(source, kind=ValueError, **options):
    with pytest.raises(kind) as error:
        load_examples(source, **options)
    return str(error.value)


def test_round_trip_through_tfds(tmp_path):
    """Text, order and empty lists survive; many examples guard the order against shuffling."""
    many = [Example(f"é{i}", f"question {i}", (str(-i),)) for i in range(3000)]
    directory = tmp_path / "new" / "world"
    prepare_dataset("world", {"train": many, "dev": iter(EXAMPLES)}, directory)
    assert load_examples(f"tfds-dir:{directory}:dev") == EXAMPLES
    assert load_examples(f"tfds-dir:{directory}") == many
    assert load_examples(f"tfds-dir:{directory}:train[10:20]") == many[10:20]
    assert list(directory.glob("*array_record*"))
    assert os.listdir(directory.parent) == ["world"]  # nothing temporary is left


def test_a_folder_may_have_any_name():
    """A workdir in whose path a line ends could be trained once, and never read."""
    for name in ("a\nb", "a:b", "a b[1]", "a\n:b"):
        assert tfds_data.directory_and_split(f"tfds-dir:/{name}/q:dev") == (
            pathlib.Path(f"/{name}/q"), "dev")


def test_a_dataset_is_replaced_by_the_one_of_other_content(tmp_path):
    directory = tmp_path / "world"
    for splits in ({"train": EXAMPLES}, {"train": EXAMPLES[:2]}, {"train": EXAMPLES[1::-1]},
                   {"dev": EXAMPLES[1::-1]}):
        prepare_dataset("world", splits, directory)
        ((split, examples),) = splits.items()
        assert load_examples(f"tfds-dir:{directory}:{split}") == examples


def test_failed_preparation_leaves_the_old_dataset_and_no_rubbish(tmp_path, monkeypatch):
    directory = tmp_path / "world"
    prepare_dataset("world", {"train": EXAMPLES}, directory)
    import tensorflow_datasets as tfds

    def fail(*args, **options):
        raise OSError("disk full")

    monkeypatch.setattr(tfds.core.DatasetInfo, "write_to_directory", fail)
    with pytest.raises(OSError, match="disk full"):
        prepare_dataset("world", {"train": EXAMPLES[:1]}, directory)
    assert os.listdir(tmp_path) == ["world"]
    assert load_examples(f"tfds-dir:{directory}:train") == EXAMPLES


def test_a_full_disk_is_told_and_nothing_is_left_in_tmp(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    prepare_dataset("world", {"train": EXAMPLES}, tmp_path / "world")
    assert os.listdir(tmp_path) == ["world"]

    def full(*args, **options):
        raise RuntimeError("write() failed: No space left on device")

    monkeypatch.setattr(tfds_data, "_download_and_prepare", full)
    with pytest.raises(DataError, match="could not be written .*No space left"):
        prepare_dataset("world", {"train": EXAMPLES[:1]}, tmp_path / "world")


def test_prepare_refuses_bad_input(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    good = {"train": EXAMPLES}
    for name, splits, where, message in [
        ("World 2018", good, "d", "'World 2018' is not snake case"),
        ("world", {"Train": EXAMPLES}, "d", "'Train' is not snake case"),
        ("world", {}, "d", "no splits"),
        ("world", {"train": []}, "d", "world:train: no examples"),
        ("world", {"train": [EXAMPLES[0]] * 2}, "d", "example 1: id 'q2' was already used"),
        ("world", {"train": [Example("1", "q", ())]}, "d", "world:train example 0: no answers"),
        ("world", {"train": [Example("1", "q", (7,))]}, "d", r"answers\[0\] is 7"),
        ("world", {"train": [Example("1", " ", ("a",))]}, "d", "question is empty"),
        ("world", good, "mine", "not a data set written by rag_jax"),
    ]:
        with pytest.raises(ValueError, match=message):
            prepare_dataset(name, splits, tmp_path / where)
    assert os.listdir(tmp_path) == ["mine"]
    assert os.listdir(tmp_path / "mine") == ["thesis.txt"]


def test_errors_of_prepared_directories(tmp_path):
    assert "no prepared TFDS" in message_of(f"tfds-dir:{tmp_path}:train", FileNotFoundError)
    directory = tmp_path / "world"
    prepare_dataset("world", {"train": EXAMPLES}, directory)
    assert "no split 'test': it has train" in message_of(f"tfds-dir:{directory}:test")
    (records,) = directory.glob("*array_record*")
    records.write_bytes(records.read_bytes()[:100])
    assert "prepare it again" in message_of(f"tfds-dir:{directory}:train")


@pytest.mark.parametrize("part", ["[:foo]", "[:200%]", "[99:]", "[1:1]", "[]", "[0]"])
def test_a_part_of_a_split_without_examples_is_no_damage(tmp_path, part):
    """The error said to prepare the data set again."""
    prepare_dataset("world", {"train": EXAMPLES}, tmp_path / "world")
    error = message_of(f"tfds-dir:{tmp_path / 'world'}:train{part}")
    assert f"no examples in 'train{part}': train has {len(EXAMPLES)}; expected a part" in error


def test_unknown_tfds_names_list_near_ones(tmp_path):
    error = message_of("tfds:natural_question_open", data_dir=str(tmp_path))
    assert "natural_questions_open" in error
    error = message_of("tfds:trivia_qa/unfilterd.nocontext", data_dir=str(tmp_path))
    assert "unfiltered.nocontext" in error


@pytest.fixture
def web(tmp_path, monkeypatch):
    """Serves the folder that it returns on this machine; returns (folder, its URL)."""
    folder = tmp_path / "web"
    folder.mkdir()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=str(folder))

        def log_message(self, *args):
            pass

    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield folder, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_natural_questions_open(tmp_path, web, monkeypatch):
    from tensorflow_datasets.datasets.natural_questions_open import (
        natural_questions_open_dataset_builder as module,
    )

    folder, url = web
    monkeypatch.setattr(module, "_DOWNLOAD_URL_FMT", url + "/{split}.jsonl")
    rows = [{"question": f"where is é{i}", "answer": [f"a{i}", "b"]} for i in range(5)]
    for split in ("train", "dev"):
        write(folder / f"{split}.jsonl", "\n".join(map(json.dumps, rows)))
    source = "tfds:natural_questions_open:validation"
    examples = load_examples(source, data_dir=str(tmp_path / "tfds"))
    assert [example.id for example in examples] == list("01234")
    assert {(e.question, e.answers) for e in examples} == {
        (row["question"], tuple(row["answer"])) for row in rows
    }
    for file in folder.iterdir():  # now it is prepared, and needs no download any more
        file.unlink()
    assert load_examples(source, data_dir=str(tmp_path / "tfds")) == examples
    error = message_of("tfds:natural_questions_open:test", data_dir=str(tmp_path / "tfds"))
    assert "it has train, validation" in error


def test_failed_download_says_where_the_dataset_was_expected(tmp_path, monkeypatch):
    def no_network(builder, messages):
        raise OSError("no network")

    monkeypatch.setattr(tfds_data, "_download_and_prepare", no_network)
    error = message_of("tfds:natural_questions_open", RuntimeError, data_dir=str(tmp_path))
    assert str(tmp_path / "natural_questions_open") in error
    assert "could not be downloaded (no network)" in error


LIMA = {"Aliases": ["Lima", "Limá "], "NormalizedAliases": ["lima"], "Value": "Lima city",
        "NormalizedValue": "lima city", "Type": "WikipediaEntity"}
WHERE = {"Question": "Where?", "QuestionId": "tc_1", "QuestionSource": "http://x"}


def trivia_qa_archive(path, files):
    """Writes a .tar.gz of TriviaQA's files: {name: records}."""
    with tarfile.open(path, "w:gz") as archive:
        for name, rows in files.items():
            text = json.dumps({"Data": rows}, indent=4).encode()
            member = tarfile.TarInfo(f"{name}.json")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text))


def test_trivia_qa(tmp_path, web, monkeypatch):
    """TFDS unpacks this archive and lists its files through TensorFlow, unless told otherwise."""
    from tensorflow_datasets.datasets.trivia_qa import trivia_qa_dataset_builder as module

    folder, url = web
    monkeypatch.setattr(tfds_data, "_TRIVIA_QA_URL", url + "/{}.tar.gz")
    trivia_qa_archive(folder / "unfiltered.tar.gz", {
        "triviaqa-unfiltered/unfiltered-web-train": [WHERE | {"Answer": LIMA}],
        "triviaqa-unfiltered/unfiltered-web-dev": [WHERE | {"Answer": LIMA, "QuestionId": "tc_2"}],
        "triviaqa-unfiltered/unfiltered-web-test-without-answers": [WHERE]})
    source = "tfds:trivia_qa/unfiltered.nocontext"
    before = module.tf
    train = load_examples(source, data_dir=str(tmp_path / "tfds"))
    assert train == [Example("tc_1", "Where?", ("Lima city", "Lima", "Limá"))]
    assert module.tf is before
    dev = load_examples(source + ":validation", data_dir=str(tmp_path / "tfds"))
    assert [example.id for example in dev] == ["tc_2"]
    assert "no answers" in message_of(source + ":test", data_dir=str(tmp_path / "tfds"))
    error = message_of("tfds:trivia_qa/unfiltered", data_dir=str(tmp_path / "tfds"))
    assert "name trivia_qa/unfiltered.nocontext, which has the same questions" in error


def test_other_threads_import_as_ever_while_tfds_is_imported():
    """A question that was asked while an edit read the dev questions died within jax, of a lazy
    module in place of a class."""
    from etils import epy

    tfds_data._import_tfds()
    inside, done, imported = threading.Event(), threading.Event(), []

    def another():
        inside.wait(60)
        from rag_jax.data.question_files import Example as Another

        imported.append(Another)
        done.set()

    thread, before = threading.Thread(target=another), builtins.__import__
    thread.start()
    with epy.lazy_imports():
        from rag_jax.data.question_files import Example as Lazy
        inside.set()
        assert done.wait(60)
    thread.join()
    assert imported == [Example] and Lazy is not Example
    assert builtins.__import__ is before


def test_what_tfds_prints_is_redirected_for_its_thread_alone(capsys):
    """Other threads' lines were lost, and after two at once all that followed."""
    def in_another(what):
        with concurrent.futures.ThreadPoolExecutor() as threads:
            return threads.submit(what).result()

    own, before = io.StringIO(), sys.stdout
    with tfds_data._prints_to(own):
        print("of TFDS")
        in_another(lambda: print("another's"))
        assert not in_another(lambda: tfds_data._PRINTING.acquire(blocking=False))
    assert own.getvalue() == "of TFDS\n" and capsys.readouterr().out == "another's\n"
    assert sys.stdout is before


def other_tfds(folder, features, row):
    """The source of a TFDS data set of one row that somebody else's builder made."""
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core.dataset_builders import adhoc_builder

    class Other(adhoc_builder.AdhocBuilder, skip_registration=True):
        def _split_generators(self, dl_manager):
            return {"train": iter([(0, row)])}

    builder = Other(name="other", version="1.0.0", split_datasets={}, data_dir=folder,
                      features=tfds.features.FeaturesDict(features), file_format="array_record")
    tfds_data._download_and_prepare(builder, io.StringIO())
    return f"tfds-dir:{builder.data_dir}"


@pytest.mark.parametrize("form, given, answers", [
    ("text", "Limá", ("Limá",)),  # DROP's
    ("texts", ["Lima", "Limá", "Lima"], ("Lima", "Limá", "Lima")),  # as they are
    ("places", {"text": ["Lima", "Limá", "Lima"], "at": [3, 9, 3]}, ("Lima", "Limá")),  # SQuAD's
])
def test_answers_of_tfds_are_read_in_the_forms_that_they_have(tmp_path, form, given, answers):
    """Of one text, every letter's number was an answer; SQuAD's were called damaged."""
    from tensorflow_datasets import features as f

    feature = {"text": f.Text(), "texts": f.Sequence(f.Text()),
               "places": f.Sequence({"text": f.Text(), "at": np.int32})}[form]
    source = other_tfds(tmp_path, {"question": f.Text(), "answers": feature},
                        {"question": "Where?", "answers": given})
    assert load_examples(source) == [Example("0", "Where?", answers)]


def test_features_of_tfds_that_have_our_names_and_another_form_are_passed(tmp_path):
    """A text named "targets" would have trained as the numbers of its letters."""
    from tensorflow_datasets import features as f

    source = other_tfds(tmp_path, {"question": f.Text(), "answer": f.Text(), "targets": f.Text(),
                                   "evidence": f.Sequence({"at": np.int32})},
                        {"question": "Where?", "answer": "Lima", "targets": "Quito",
                         "evidence": {"at": [3]}})
    assert load_examples(source) == [Example("0", "Where?", ("Lima",))]


def test_other_features_of_tfds_are_named(tmp_path):
    """They were questions such as "{'text': ...}", or a damaged file."""
    from tensorflow_datasets import features as f

    for name, feature, given in (
            ("answer", np.bool_, True), ("answers", {"at": np.int32}, {"at": 1}),
            ("question", {"text": f.Text()}, {"text": "Where?"})):
        row = {"question": "Where?", "answer": "Lima"} | {name: given}
        features = {"question": f.Text(), "answer": f.Text()} | {name: feature}
        message = message_of(other_tfds(tmp_path / name, features, row))
        assert re.search("example 0: features .*'question'.*: expected a text as 'ques", message)


def test_a_question_of_several_files_of_trivia_qa_is_one(tmp_path, web, monkeypatch):
    """No rc set could be read: its ids are there once for the web's pages, once for Wikipedia's."""
    folder, url = web
    monkeypatch.setattr(tfds_data, "_TRIVIA_QA_URL", url + "/{}.tar.gz")
    one, other = WHERE | {"Answer": LIMA}, WHERE | {"Answer": LIMA, "QuestionId": "tc_2"}
    changed = WHERE | {"Answer": LIMA | {"Aliases": ["Lima"]}}
    trivia_qa_archive(folder / "rc.tar.gz", {
        "qa/web-train": [one, other], "qa/wikipedia-train": [one],
        "qa/web-dev": [one], "qa/verified-web-dev": [changed],
        "qa/web-test-without-answers": [WHERE]})
    source, data_dir = "tfds:trivia_qa/rc.nocontext", str(tmp_path / "tfds")
    assert sorted(e.id for e in load_examples(source, data_dir=data_dir)) == ["tc_1", "tc_2"]
    assert "id 'tc_1' was already used" in message_of(f"{source}:validation", data_dir=data_dir)


def test_web_questions(tmp_path, web, monkeypatch):
    """`tfds.builder` does not know this data set before its module has been imported."""
    from tensorflow_datasets.question_answering import web_questions as module

    folder, url = web
    monkeypatch.setattr(module, "_SPLIT_DOWNLOAD_URL", {"train": f"{url}/train.json"})
    target = '(list (description "Lima city") (description Peru))'
    row = {"url": "u", "utterance": "where?", "targetValue": target}
    write(folder / "train.json", json.dumps([row]))
    examples = load_examples("tfds:web_questions", data_dir=str(tmp_path / "tfds"))
    assert examples == [Example("0", "where?", ("Lima city", "Peru"))]


PROGRAM = """
import sys
from rag_jax.data import question_sources, tfds_data

heavy = {"jax", "tensorflow", "tensorflow_datasets"}
file, directory, data_dir = sys.argv[1:]
examples = question_sources.load_examples(file)
assert not heavy & sys.modules.keys()  # files are read without TFDS

tfds_data.prepare_dataset("world", {"train": examples}, directory)
assert question_sources.load_examples(f"tfds-dir:{directory}:train") == examples

def no_network(builder, messages):
    raise OSError("no network")

tfds_data._download_and_prepare = no_network
try:
    question_sources.load_examples("tfds:web_questions", data_dir=data_dir)
except RuntimeError as error:  # found, although nothing in this process had imported it
    assert "no network" in str(error)
else:
    raise AssertionError("web_questions was not to be prepared")
assert "tensorflow" not in sys.modules
"""


def test_nothing_imports_tensorflow_even_where_it_is_installed(tmp_path):
    """In a new process, and with a TensorFlow on the path that fails when it is imported."""
    fake = tmp_path / "site" / "tensorflow"
    fake.mkdir(parents=True)
    write(fake / "__init__.py", "raise AssertionError('tensorflow was imported')")
    path = os.pathsep.join([str(fake.parent), os.getcwd(), *filter(None, sys.path)])
    arguments = [write(tmp_path / "a.tsv", "q\ta\n"), str(tmp_path / "w"), str(tmp_path / "d")]
    subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        check=True,
        env=os.environ | {"PYTHONPATH": path},
    )
