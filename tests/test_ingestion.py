"""From a folder of documents to passages and answers that cite them, and again when it changes."""

import errno
import json
import os
import pathlib
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from tokenizers import normalizers

import rag_jax
from rag_jax import conversion, hosts, ingest_config, ingestion, locks
from rag_jax.cli import evaluate, generate, ingest, verify
from rag_jax.config import (
    BartConfig,
    BertConfig,
    Config,
    ConfigError,
    TrainConfig,
    config_files,
    overrides,
)
from rag_jax.data import tokenizer_file
from rag_jax.data.inputs import DONE
from rag_jax.data.prepared import has_tokens_of
from rag_jax.data.question_files import Example
from rag_jax.data.text import Tokenizer, encoder_input
from rag_jax.data.tokenizer_training import train_bart_tokenizer, train_bert_tokenizer
from rag_jax.documents import workdir as record_files
from rag_jax.documents.chunks import Chunking
from rag_jax.documents.document import ReaderLost
from rag_jax.documents.readers import Readers
from rag_jax.errors import DataError, UserError
from rag_jax.hub.config_json import Architecture, SpecialIds
from rag_jax.hub.load import abstract
from rag_jax.hub.save import save
from rag_jax.retrieval import publish
from rag_jax.retrieval.device import DeviceIndex
from rag_jax.retrieval.editing import edit_words
from rag_jax.retrieval.hybrid import HybridIndex
from rag_jax.retrieval.json_files import JSON_BYTES, write_sealed
from rag_jax.retrieval.manifest import open_folder
from rag_jax.retrieval.passages import PassageStore
from rag_jax.retrieval.protocol import RetrievalError
from rag_jax.retrieval.versions import current
from rag_jax.training import ingested
from rag_jax.training import workdir as workdirs
from rag_jax.training.ingested import Maker

TEXTS = {"peru.md": "# Peru\n\nPeru has many hills.\n\n## Lima\n\nLima is the capital of Peru.",
         "sub/norway.html": "<title>Norway</title><p>Oslo is the capital of Norway.",
         "towns.csv": "town,river\nBonn,Rhine\nCairo,Nile\n", "kenya.txt": "Nairobi is in Kenya."}


@pytest.fixture
def folder(tmp_path):
    return written(tmp_path / "documents", TEXTS)


def written(folder: pathlib.Path, texts: dict[str, str]) -> pathlib.Path:
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def stored(workdir: pathlib.Path) -> list:
    store = PassageStore.open(current(workdir / "index") / "passages")
    return [(store[row], store.source(row)) for row in range(len(store))]


def test_a_folder_is_found_by_its_words_and_cited(folder, tmp_path):
    (folder / "photo.jpg").write_bytes(b"x")
    (folder / "empty.txt").write_text(" ")
    done = rag_jax.ingest(folder, tmp_path / "run")
    assert (done.files, done.passages, done.embedded, done.lexical, done.answers) == (
        4, 4, 0, True, False)
    assert done.read == tuple(sorted(TEXTS)) and done.removed == ()
    assert done.skipped["empty.txt"] == "it is empty"
    assert "of this kind" in done.skipped["photo.jpg"]
    rag = rag_jax.load(tmp_path / "run")
    (best, *others), = rag.retrieve("What is the capital of Norway?")
    assert len(others) == 3, "all four passages, where five would be read"
    assert best.text == "Oslo is the capital of Norway." and best.title == "Norway"
    assert best.source.file == "sub/norway.html" and best.prior > 0.5
    peru = next(p for p in (best, *others) if p.source.file == "peru.md")
    assert peru.source.headings == ("Peru", "Peru > Lima")
    assert TEXTS["peru.md"][slice(*peru.source.span)] == TEXTS["peru.md"]
    for answers in (lambda: rag.ask("What is it?"), lambda: rag.log_likelihood("What?", "Oslo"),
                    lambda: rag.evaluate([Example("1", "What?", ("Oslo",))])):
        with pytest.raises(ConfigError, match="no generator is named"):
            answers()
    with pytest.raises(ConfigError, match="no query encoder: it has no encoder at all"):
        rag.embed_queries("What is it?")
    with pytest.raises(ConfigError, match="^the workdir has no questions; name a file by --q"):
        evaluate.main([f"--workdir={tmp_path / 'run'}"])


def test_another_index_is_read_as_far_as_it_goes(folder, tmp_path):
    """Of one that has grown, as many passages were read as the first had; and one that has shrunk
    could not be opened."""
    rag_jax.ingest(folder, tmp_path / "four")
    written(folder, {f"{n}.txt": f"Town {n} has a capital of its own." for n in range(3)})
    rag_jax.ingest(folder, tmp_path / "seven")
    rag = rag_jax.load(tmp_path / "four")
    for name, count in (("seven", 5), ("four", 4)):
        rag.swap(tmp_path / name / "index")
        assert len(rag.retrieve("What is the capital?")[0]) == count
    rag.delete([passage.id for passage in rag.retrieve("What is the capital?")[0][1:]])
    assert len(rag.retrieve("What is the capital?")[0]) == 1
    with pytest.raises(ConfigError, match="config.eval.k=5: the index has 1 passages"):
        rag.retrieve("What is the capital?", k=5)


@pytest.fixture
def reads(monkeypatch):
    """The names of the files that readers have been given."""
    names, read = [], Readers.read

    def spy(self, name, content):
        names.append(name)
        return read(self, name, content)

    monkeypatch.setattr(Readers, "read", spy)
    return names


def test_a_second_run_reads_what_has_changed_alone(folder, tmp_path, reads):
    (folder / "scanned.pdf").write_bytes(b"no pdf")
    rag_jax.ingest(folder, tmp_path / "run")
    version = current(tmp_path / "run" / "index")
    reads.clear()
    again = rag_jax.ingest(folder, tmp_path / "run")
    assert reads == [] and again.read == () and current(tmp_path / "run" / "index") == version
    assert "damaged" in again.skipped["scanned.pdf"], "what is not read is listed each time"
    written(folder, {"new.md": "# New\n\nA new town.", "kenya.txt": "Mombasa is in Kenya, too."})
    (folder / "towns.csv").unlink()
    os.utime(folder / "peru.md")  # another time, and the same content
    changed = rag_jax.ingest(folder, tmp_path / "run")
    assert sorted(reads) == ["kenya.txt", "new.md"]
    assert changed.read == ("kenya.txt", "new.md") and changed.removed == ("towns.csv",)
    rag_jax.ingest(folder, tmp_path / "fresh")
    assert stored(tmp_path / "run") == stored(tmp_path / "fresh")
    best = rag_jax.load(tmp_path / "run").retrieve("Where is Mombasa?")[0][0]
    assert best.source.file == "kenya.txt"
    (folder / "scanned.pdf").rename(folder / "scanned.txt")  # nothing else
    assert rag_jax.ingest(folder, tmp_path / "run").read == ("scanned.txt",)


def test_files_with_remarks_are_named_by_every_run(folder, tmp_path, capsys):
    """The second run said nothing of a text that is read by a guess, or in part."""
    argv, once = [str(folder), "--workdir", str(tmp_path / "run")], "a.csv: 1 row has more fields"
    written(folder, {"a.csv": "a\n1,2\n"})
    ingest.main(argv)
    printed = capsys.readouterr().out
    assert once in printed and "before" not in printed
    ingest.main(argv)
    printed = capsys.readouterr().out
    assert ("1 file that was read before has remarks (in Python, rag_jax.ingest(...).remarks):"
            ) in printed
    assert "\n  a.csv\n" in printed and once not in printed
    written(folder, {"b.csv": "a\n1,2\n", "c.csv": "a\n1,2\n"})
    ingest.main(argv)
    written(folder, {"c.csv": "a\n1,2,3\n"})
    capsys.readouterr()
    ingest.main(argv)
    printed = capsys.readouterr().out
    assert "2 files that were read before have" in printed and "\n  a.csv, b.csv\n" in printed
    assert once.replace("a.csv", "c.csv") in printed
    (folder / "b.csv").unlink()
    for name in "a.csv", "c.csv":
        written(folder, {name: "a\n1\n"})
    ingest.main(argv)
    assert " remarks; " not in capsys.readouterr().out


def test_passages_of_files_that_cannot_be_opened_for_now_stay(
        folder, tmp_path, monkeypatch, capsys):
    """Without permission, or on a file system that is away, a file is not gone."""
    for name in ("locked.txt", "away/one.txt", "away/deep/two.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"An otter is in {name}.")
    work, away = tmp_path / "work", folder / "away"
    rag_jax.ingest(folder, work)
    passages = stored(work)
    listed, opened = os.scandir, os.open

    def scandir(path):
        if str(path) == str(away):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return listed(path)

    def open_file(path, *flags, **more):
        if str(path).endswith("locked.txt"):
            raise OSError(errno.EIO, "Input/output error", str(path))
        return opened(path, *flags, **more)

    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", scandir)
        patched.setattr(os, "open", open_file)
        done = rag_jax.ingest(folder, work)
        assert done.removed == done.read == () and stored(work) == passages
        assert dict(done.stay) == {
            "away/deep/two.txt": "its files cannot be listed: Permission denied",
            "away/one.txt": "its files cannot be listed: Permission denied",
            "locked.txt": "it cannot be read: Input/output error"}
        assert "away" in done.skipped and "locked.txt" not in done.skipped
        (folder / "new.txt").write_text("A beaver is new.")  # so that an index is made
        ingest.main([str(folder), "--workdir", str(work)])
        assert len(stored(work)) == len(passages) + 1
        printed = capsys.readouterr().out
        assert ("not read now, so that their passages of before stay, it cannot be read: "
                "Input/output error:\n  locked.txt") in printed
        divided = rag_jax.ingest(folder, work, chunking={"words": 50})  # cannot be divided anew
        assert set(divided.removed) == {"away/deep/two.txt", "away/one.txt", "locked.txt"}
        assert not divided.stay and "locked.txt" in divided.skipped
    assert len(rag_jax.ingest(folder, work).read) == 3
    (folder / "locked.txt").unlink()
    assert rag_jax.ingest(folder, work).removed == ("locked.txt",)


@pytest.mark.parametrize("edited", [False, True])
def test_a_changed_file_that_cannot_be_opened_once_more_keeps_its_passages(
        edited, folder, tmp_path, request, monkeypatch, capsys):
    """It has been looked at, and then the disk went away: its old text was found no more."""
    config = {}
    if edited:
        fields = request.getfixturevalue("towers")
        config = {**SMALL, "model.retriever.pretrained": fields["model.retriever.pretrained"]}
    work = tmp_path / "work"
    rag_jax.ingest(folder, work, config=config)

    def indexed(workdir):
        store = open_folder(current(workdir / "index")).passages
        rows = map(store.row_of, sorted(store.ids()))
        return [(store[row], store.source(row)) for row in rows]

    before = indexed(work)[0]
    written(folder, {"kenya.txt": "Mombasa is in Kenya.", "towns.csv": "town,river\nRome,Tiber\n"})
    looked_at, opened, away = ingestion._Ingestion._looked_at, os.open, []

    def then_away(ingestion):
        found = looked_at(ingestion)
        away.append("kenya.txt")
        return found

    def open_file(path, *flags, **more):
        if away and str(path).endswith("kenya.txt"):
            raise OSError(errno.EIO, "Input/output error", str(path))
        return opened(path, *flags, **more)

    with monkeypatch.context() as patched:
        patched.setattr(ingestion._Ingestion, "_looked_at", then_away)
        patched.setattr(os, "open", open_file)
        done = rag_jax.ingest(folder, work)
        assert (done.read, done.removed, done.files) == (("towns.csv",), (), 4)
        assert dict(done.stay) == {"kenya.txt": "it cannot be read: Input/output error"}
        assert indexed(work)[0] == before and before[1].file == "kenya.txt"
        patched.setattr(ingestion._Ingestion, "_looked_at", looked_at)
        assert rag_jax.ingest(folder, work).stay == done.stay
    assert rag_jax.ingest(folder, work).read == ("kenya.txt",)
    rag_jax.ingest(folder, tmp_path / "fresh", config=config)
    assert indexed(work) == indexed(tmp_path / "fresh")


def test_a_folder_is_the_same_however_it_is_spelled(folder, tmp_path, reads):
    """It was refused, with the advice to name it."""
    rag_jax.ingest(folder, tmp_path / "run")
    reads.clear()
    other = tmp_path / "other"
    other.mkdir()
    assert rag_jax.ingest(other / ".." / folder.name, tmp_path / "run").read == ()
    assert reads == []


def test_a_reader_that_was_too_slow_once_is_tried_again(folder, tmp_path, monkeypatch, reads):
    """A busy machine must not leave a document out for ever."""
    read = Readers.read

    def slow(self, name, content):
        if name == "peru.md":
            raise ReaderLost("to read it took more than 120 seconds")
        return read(self, name, content)

    with monkeypatch.context() as patched:
        patched.setattr(Readers, "read", slow)
        assert "120 seconds" in rag_jax.ingest(folder, tmp_path / "run").skipped["peru.md"]
    reads.clear()
    assert rag_jax.ingest(folder, tmp_path / "run").read == ("peru.md",) and reads == ["peru.md"]


def test_verify_reads_all_of_a_workdir_of_documents(folder, tmp_path, capsys):
    path = tmp_path / "run"
    rag_jax.ingest(folder, path)
    assert verify.main([str(path)]) == 0
    assert "list of documents" in (printed := capsys.readouterr().out) and "4 passages" in printed
    for file in (path / "ingest.json", current(path / "index") / "passages" / "citations.blob"):
        whole = file.read_bytes()
        file.write_bytes(whole.replace(b"peru", b"Peru"))
        assert verify.main([str(path)]) == 1 and file.name in "".join(capsys.readouterr())
        file.write_bytes(whole)


def test_what_is_never_opened_is_in_no_record(folder, tmp_path, monkeypatch):
    """Of very many files the record grew beyond what is read, and no run came after the first."""
    (folder / "photo.jpg").write_bytes(b"x")
    (folder / "bad.pdf").write_bytes(b"x")
    rag_jax.ingest(folder, tmp_path / "run")
    record = record_files.read(tmp_path / "run")
    assert record.files.keys() == {*TEXTS, "bad.pdf"}
    earlier = {"sha256": "", "reason": "files of this kind are not read"}
    write_sealed(tmp_path / "run" / "ingest.json", {
        **record._asdict(), "files": {**record.files, "photo.jpg": earlier}})
    again = rag_jax.ingest(folder, tmp_path / "run")
    assert again.read == () and again.skipped.keys() == {"photo.jpg", "bad.pdf"}
    assert record_files.read(tmp_path / "run") == record, "as of an earlier version, and rewritten"
    largest, size = record_files.LARGEST, (tmp_path / "run" / "ingest.json").stat().st_size
    monkeypatch.setattr(record_files, "LARGEST", size - 1)
    with pytest.raises(UserError, match=f"at most {size - 1} are read"):
        rag_jax.ingest(folder, tmp_path / "run")
    assert size < JSON_BYTES < largest, "it has a bound of its own"


@pytest.mark.parametrize("name", ["passages/text.blob", "bm25/data.csc.index.npy",
                                  "manifest.json"])
def test_a_damaged_index_is_made_again(name, folder, tmp_path, caplog):
    """Making it again was advised, and failed by the damage."""
    rag_jax.ingest(folder, tmp_path / "run")
    file = current(tmp_path / "run" / "index") / name
    file.write_bytes(file.read_bytes()[:-3] + b"xyz")
    assert len(rag_jax.ingest(folder, tmp_path / "run").read) == 4, "though no document has changed"
    assert file.name in caplog.text and "made again now, of all documents" in caplog.text
    assert len(rag_jax.load(tmp_path / "run").retrieve("Where is Lima?", k=4)[0]) == 4
    assert rag_jax.ingest(folder, tmp_path / "run").read == ()


def test_a_folder_that_was_renamed_is_the_same(folder, tmp_path, reads):
    """It was refused, with the advice to name the one that is gone."""
    rag_jax.ingest(folder, tmp_path / "run")
    reads.clear()
    other = written(tmp_path / "other", {"kenya.txt": "Another text."})
    with pytest.raises(ConfigError, match="was made from .*documents; name that folder"):
        rag_jax.ingest(other, tmp_path / "run")
    moved = folder.rename(tmp_path / "moved")
    with pytest.raises(ConfigError, match="which is gone, and .*other has none of its files"):
        rag_jax.ingest(other, tmp_path / "run")
    assert rag_jax.ingest(moved, tmp_path / "run").read == () and reads == []
    written(folder, {"new.txt": "Of another folder under the name of the first."})
    assert rag_jax.ingest(moved, tmp_path / "run").read == ()
    with pytest.raises(ConfigError, match="was made from .*moved; name that folder"):
        rag_jax.ingest(folder, tmp_path / "run")


@pytest.mark.parametrize("fields, told", [
    ({"data.chunk_words": 3}, "data.chunk_words=3: would change nothing: .*--words"),
    ({"data.passages": "a", "data.train": "b", "data.dev": "c"}, "data.passages=a: would change"),
    ({"generator_warmup.steps": 9}, "generator_warmup.steps=9: would change nothing"),
    ({"generator_warmup.log_every": 3}, "generator_warmup.log_every=3: would change nothing"),
    ({"data.prompt": "{passage} {question}"}, "config.data.prompt=.*: none is read with"),
    ({"runs": "fid"}, "config.runs=fid: a workdir of documents has the runs rag_token, rag_seq"),
    ({"runs": 5}, "config.runs=5: a workdir of documents has the runs"),
    ({"runs": ("rag_token", "bm25")}, "config.runs=rag_token,bm25: a workdir of documents has"),
    ({"train.document_encoder": "refresh", "retrieval.where": "device"},
     "document_encoder=refresh: the encoder of passages stays as it is.* set frozen")])
def test_fields_that_would_change_nothing_or_too_much_are_refused(folder, tmp_path, fields, told):
    """They were ignored; and what had trained the encoder of passages could not be opened."""
    with pytest.raises(ConfigError, match=told):
        rag_jax.ingest(folder, tmp_path / "run", config=fields)
    assert not (tmp_path / "run" / "index").exists()


def test_no_warm_up_is_what_there_is_and_a_workdir_of_train_is_told_as_one(folder, tmp_path):
    rag_jax.ingest(folder, tmp_path / "run", config={"retriever_warmup.steps": 0})
    workdirs.start(Config(), tmp_path / "trained")
    with pytest.raises(ConfigError, match="is a workdir of rag_jax.train; name another"):
        ingest_config.base_config(tmp_path / "trained")


def test_an_ingest_starts_from_the_settings_of_the_training_since(tmp_path):
    workdirs.start(overrides.replace(Config(), {"train.batch_size": 3}), tmp_path / "trained")
    assert ingest_config.base_config(tmp_path).train.batch_size == 3


def test_settings_may_change_until_something_is_trained(tmp_path):
    """Told to read fewer passages than k, the same command was refused, with no way on."""
    base = overrides.replace(Config(), {"retrieval.k": 5})
    for folder in (tmp_path, tmp_path / "trained"):
        workdirs.start(base, folder)
    (tmp_path / "trained" / "data").mkdir()
    (tmp_path / "trained" / "data" / DONE).touch()
    fewer, shorter = (overrides.replace(base, field) for field in (
        {"retrieval.k": 2}, {"data.max_source_length": 99}))
    ingest_config.check_trained(fewer, tmp_path)
    with pytest.raises(ConfigError, match="config.data.max_source_length: .*was trained with"):
        ingest_config.check_trained(shorter, tmp_path)
    (tmp_path / "trained" / "rag_token" / "5").mkdir(parents=True)
    with pytest.raises(ConfigError, match="config.retrieval.k: .*was trained with 5; leave it"):
        ingest_config.check_trained(fewer, tmp_path)


def test_settings_of_words_are_those_of_the_index(folder, tmp_path):
    """They were ignored where it was opened, and so was an encoder."""
    rag_jax.ingest(folder, tmp_path / "run", config={"train.steps": 50, "retrieval.bm25_b": 0.3})
    assert ingest_config.base_config(tmp_path / "run").train.steps == 50
    for name, given in (("retrieval.bm25_k1", 5.0), ("retrieval.bm25_language", "german"),
                        ("model.retriever.pretrained", "no/such")):
        with pytest.raises(ConfigError, match=f"{name}={given}: .*run rag_jax.ingest with it"):
            rag_jax.load(tmp_path / "run", config={name: given, "seed": 7})
    assert rag_jax.load(tmp_path / "run", config=workdirs.read(tmp_path / "run")).answers is False
    rag = rag_jax.load(tmp_path / "run", config={"retrieval.bm25_b": 0.3, "eval.k": 1})
    assert rag.index.settings.b == 0.3
    assert rag.job.config.train.steps == 0, "until they are taken, checkpoints answer as they say"


@pytest.mark.parametrize(("fields", "told"), [
    ({"retrieval.retriever": "hybrid"}, "run 'bm25' sets config.retrieval.retriever=bm25; leave"),
    ({"model.null_document": "bias"}, "config.model.null_document=bias: it is learned"),
    ({"data.prompt": "{passage} {question}"}, "config.data.prompt=.*: none is read with"),
    ({"retrieval.k": 0}, "config.retrieval.k=0: .*run answers from its documents; set 1 or"),
    ({"retrieval.bm25_weight": 0.9}, "bm25_weight=0.9: .*run was indexed with 0.5, and this would"),
    ({"train.optimizer.b1": 0.5}, "optimizer.b1=0.5: .*run was indexed with 0.9, and this would"),
    ({"generator_warmup.steps": 7}, "generator_warmup.steps=7: .*, and this would change nothing"),
    ({"model.head": "classification", "eval.labels": ("yes", "no")},
     "config.model.head=classification: it is learned, and nothing has been trained here")])
def test_documents_are_opened_with_what_is_there(folder, tmp_path, fields, told):
    """Questions ended in a KeyError, and another retriever was ignored."""
    rag_jax.ingest(folder, tmp_path / "run")
    with pytest.raises(ConfigError, match=told):
        rag_jax.load(tmp_path / "run", config=fields)


@pytest.mark.parametrize("fields", [{"model.null_document": "bias"}, {
    "model.head": "classification", "eval.labels": ("Oslo", "Rabat")}])
def test_what_only_training_makes_is_no_part_of_a_workdir_before_it(folder, tmp_path, towers,
                                                                    fields):
    """A workdir that was to be trained with it could not be asked until then."""
    rag_jax.ingest(folder, tmp_path / "run", config={**SMALL, **towers, **fields})
    rag = rag_jax.load(tmp_path / "run", config={"eval.k": 2})
    answer, = rag.ask("Oslo?")
    assert len(answer.passages) == 2
    assert (rag.config.model.null_document, rag.config.model.head) == ("none", "none")
    assert workdirs.read(tmp_path / "run").model.null_document == fields.get(
        "model.null_document", "none"), "training has it"


def test_a_source_without_a_tokenizer_is_read_by_the_one_that_is_named(folder, tmp_path, towers):
    source = pathlib.Path(towers["model.generator.pretrained"])
    shutil.copytree(source, tmp_path / "bare")
    (tmp_path / "bare" / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    bare = {**SMALL, **towers, "model.generator.pretrained": str(tmp_path / "bare")}
    with pytest.raises(ConfigError, match="no tokenizer; name one with config.data.generator_to"):
        rag_jax.ingest(folder, tmp_path / "run", config=bare)
    rag_jax.ingest(folder, tmp_path / "run", config={
        **bare, "data.generator_tokenizer": str(tmp_path / "tokenizer.json")})
    rag_jax.ingest(folder, tmp_path / "other", config={**SMALL, **towers})
    answers = [rag_jax.load(tmp_path / name).ask("Oslo?")[0] for name in ("run", "other")]
    assert answers[0].text == answers[1].text and answers[0].log_prob == answers[1].log_prob


def test_a_run_that_has_nothing_to_do_does_not_wait_for_jax(folder, tmp_path):
    """Its import takes most of the three seconds that such a run may take."""
    rag_jax.ingest(folder, tmp_path / "run")
    program = ("import sys; from rag_jax.cli import ingest; ingest.main(sys.argv[1:]);"
               "assert not {'jax', 'transformers'} & sys.modules.keys()")
    subprocess.run([sys.executable, "-c", program, str(folder), "--workdir",
                    str(tmp_path / "run")], check=True, timeout=300)


def test_other_chunks_are_made_of_all_files_and_kept_by_the_next_run(folder, tmp_path):
    rag_jax.ingest(folder, tmp_path / "run", chunking=Chunking(words=4))
    assert max(len(p.text.split()) for p, _ in stored(tmp_path / "run")) <= 4
    written(folder, {"new.txt": "one two three four five six"})
    assert rag_jax.ingest(folder, tmp_path / "run").read == ("new.txt",)
    done = rag_jax.ingest(folder, tmp_path / "run", chunking=Chunking())
    assert len(done.read) == 5 == done.passages


def test_an_index_is_not_built_by_what_nobody_trained(folder, tmp_path):
    """The workdir was said to have no passages, and training the way out, which refused it."""
    rag_jax.ingest(folder, tmp_path / "run")
    with pytest.raises(ConfigError, match="rag_jax.ingest, where nothing is trained"):
        rag_jax.build_index(tmp_path / "p.tsv", tmp_path / "index", tmp_path / "run")


def test_a_run_that_was_killed_before_its_record_is_made_good(folder, tmp_path, monkeypatch):
    """The record of the version before would take other rows for a file's."""
    rag_jax.ingest(folder, tmp_path / "run")
    written(folder, {"a first.txt": "First of all."})
    with monkeypatch.context() as patched:
        patched.setattr(record_files, "write", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            rag_jax.ingest(folder, tmp_path / "run")
    written(folder, {"b second.txt": "Second."})
    assert len(rag_jax.ingest(folder, tmp_path / "run").read) == 6
    rag_jax.ingest(folder, tmp_path / "fresh")
    assert stored(tmp_path / "run") == stored(tmp_path / "fresh")


@pytest.mark.parametrize("words_first", [True, False])
def test_who_opens_what_an_interrupted_run_left_is_told_to_run_it_again(
        folder, tmp_path, towers, monkeypatch, words_first):
    """It was told to build an index by build_index, which refuses workdirs of ingest."""
    encoder = {"model.retriever.pretrained": towers["model.retriever.pretrained"]}
    first, then = [{}, encoder][:: 1 if words_first else -1]
    rag_jax.ingest(folder, tmp_path / "run", config={**SMALL, **first})
    with monkeypatch.context() as patched:
        patched.setattr(ingestion._Ingestion, "_write_config", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            rag_jax.ingest(folder, tmp_path / "run", config={
                **dict.fromkeys(encoder, ""), "runs": ("rag_token" if then else "bm25",), **then})
    for fields in ({}, {"eval.num_beams": 2, "retrieval.k": 4}):
        with pytest.raises(ConfigError, match="interrupted after it had made its index of "
                           f"{'vectors' if words_first else 'words'}, .*; run it again"):
            rag_jax.load(tmp_path / "run", config=fields)
    with pytest.raises(RetrievalError, match="no index here"):
        rag_jax.load(tmp_path / "run", index=tmp_path / "other")


def test_who_opens_the_index_of_another_encoder_is_told_to_run_it_again(
        folder, tmp_path, towers, monkeypatch):
    """The advice was to build the index again, which build_index refuses here."""
    other = shutil.copytree(towers["model.retriever.pretrained"], tmp_path / "other")
    (other / "1_Pooling" / "config.json").write_text(json.dumps({
        "word_embedding_dimension": 16, "pooling_mode_cls_token": True}))
    rag_jax.ingest(folder, tmp_path / "run", config={
        **SMALL, "model.retriever.pretrained": towers["model.retriever.pretrained"]})
    with monkeypatch.context() as patched:
        patched.setattr(ingestion._Ingestion, "_write_config", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            rag_jax.ingest(folder, tmp_path / "run", config={
                "model.retriever.pretrained": str(other)})
    with pytest.raises(ConfigError, match="built by the encoder .*run rag_jax.ingest again on"):
        rag_jax.load(tmp_path / "run")


def test_a_model_may_have_moved_to_another_folder():
    """A name that was not there before, or is not now, is of another model."""
    before = overrides.replace(Config(), {
        "model.reranker.pretrained": "a", "model.rag.pretrained": "b"})
    after = overrides.replace(before, {
        "model.reranker.pretrained": "c", "model.rag.pretrained": "",
        "model.generator.pretrained": "d"})
    assert ingest_config.renamed_sources(before, after) == {"model.reranker.pretrained": "c"}


def test_an_edited_index_that_is_damaged_is_called_that(folder, tmp_path):
    """To run ingest again, which takes the edits away, was the advice for every error."""
    rag_jax.ingest(folder, tmp_path / "run")
    rag_jax.load(tmp_path / "run").add([("n", "Cuba", "Havana is in Cuba.")])
    file = current(tmp_path / "run" / "index") / "passages" / "text.blob"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(RetrievalError, match="text.blob differs from its sha256"):
        rag_jax.load(tmp_path / "run")


def test_an_edit_that_was_killed_before_its_pointer_is_made_good(
        folder, tmp_path, towers, monkeypatch):
    """The next edit was planned for the version before: what it had added was found for good."""
    config = {**SMALL, "model.retriever.pretrained": towers["model.retriever.pretrained"]}
    rag_jax.ingest(folder, tmp_path / "run", config=config)
    before = (folder / "kenya.txt").read_text()
    written(folder, {"secret.txt": "A secret.", "kenya.txt": "Mombasa is in Kenya."})
    with monkeypatch.context() as patched:
        patched.setattr(publish, "point", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            rag_jax.ingest(folder, tmp_path / "run")
    (folder / "secret.txt").unlink()
    written(folder, {"kenya.txt": before, "new.txt": "Rome is in Italy."})
    rag_jax.ingest(folder, tmp_path / "run")
    rag_jax.ingest(folder, tmp_path / "fresh", config=config)
    assert stored(tmp_path / "run") == stored(tmp_path / "fresh")


def test_a_first_call_that_was_killed_at_once_is_given_again(folder, tmp_path, monkeypatch):
    """Its workdir had an index folder without an index, and was refused for ever."""
    with monkeypatch.context() as patched:
        patched.setattr(publish, "point", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            rag_jax.ingest(folder, tmp_path / "run")
    (tmp_path / "run" / "index").mkdir(exist_ok=True)
    (tmp_path / "run" / "index" / ".lock").touch()
    assert rag_jax.ingest(folder, tmp_path / "run").read
    (tmp_path / "other" / "photos").mkdir(parents=True)
    (tmp_path / "other" / "photos" / "1.jpg").touch()
    with pytest.raises(UserError, match="has photos, and nothing of rag_jax's"):
        rag_jax.ingest(folder, tmp_path / "other")


def test_what_cannot_be_removed_yet_is_removed_later(folder, tmp_path, monkeypatch):
    """On NFS, which keeps a mapped file under another name, its folder is not empty."""
    remove = publish.files.remove_folder

    def kept(path):
        if path.parent.name == "versions":
            raise OSError(errno.ENOTEMPTY, "Directory not empty")
        remove(path)

    rag_jax.ingest(folder, tmp_path / "run")
    with monkeypatch.context() as patched:
        patched.setattr(publish.files, "remove_folder", kept)
        for number in range(2):
            written(folder, {f"{number}.txt": "More."})
            assert rag_jax.ingest(folder, tmp_path / "run").read == (f"{number}.txt",)
    written(folder, {"last.txt": "More."})
    rag_jax.ingest(folder, tmp_path / "run")
    versions = [path.name for path in (tmp_path / "run" / "index" / "versions").glob("[0-9]*")]
    assert versions == [current(tmp_path / "run" / "index").name]


@pytest.mark.parametrize("named", ["documents", "link"])
def test_the_workdir_may_lie_in_the_folder(folder, named):
    (folder.parent / "link").symlink_to(folder)
    rag_jax.ingest(folder.parent / named, folder / "run")
    (folder / "run" / "notes.md").write_text("none of the documents")
    assert rag_jax.ingest(folder.parent / named, folder / "run").read == ()


def test_what_cannot_be_ingested_says_why(folder, tmp_path):
    def fails(match, source=folder, workdir=tmp_path / "run", **how):
        with pytest.raises(UserError, match=match):
            rag_jax.ingest(source, workdir, **how)

    fails("no such folder", tmp_path / "nothing")
    fails("is the folder of the documents", workdir=folder)
    (tmp_path / "photos").mkdir()
    fails("photos: none of its 0 files", tmp_path / "photos")
    (tmp_path / "photos" / "a.pdf").write_bytes(b"x")
    fails("photos: none of its 1 files has a text that can be read .a.pdf: it is damaged",
          tmp_path / "photos")
    fails("of which encoder", chunking=Chunking(tokens=64))
    fails("--words=10 and --tokens=64: .*name one of them", chunking={"words": 10, "tokens": 64})
    rag_jax.ingest(folder, tmp_path / "run")
    fails("was made from .*documents; name that folder", tmp_path / "photos")
    (tmp_path / "trained").mkdir()
    shutil.copy(tmp_path / "run" / "config.json", tmp_path / "trained")
    fails("a workdir of rag_jax.train", workdir=tmp_path / "trained")
    with pytest.raises(ConfigError, match="step=3"):
        rag_jax.load(tmp_path / "run", step=3)
    with pytest.MonkeyPatch.context() as patched:  # names with other letters were "removed"
        patched.setattr(sys, "getfilesystemencoding", lambda: "ascii")
        fails("names, which are taken for ascii here: set LC_ALL=C.UTF-8")
    record = tmp_path / "run" / "ingest.json"
    content = json.loads(record.read_text())
    del content["sha256"]
    write_sealed(record, {**content, "skipped": {"photo.heic": "it is of no kind that is read"}})
    assert record_files.read(record.parent)._asdict() == content, "of an earlier version"
    for damaged in ({**content, "files": {"a": 3}}, {"folder": "x"}):
        record.write_text(json.dumps(damaged))
        fails("ingest.json: is damaged; remove it, and run rag_jax.ingest again")
    record.write_text(record.read_text()[:-9])
    fails("ingest.json.* Or remove it, and run rag_jax.ingest again")
    record.unlink()
    file = tmp_path / "run" / "config.json"
    for text in (file.read_text()[:-9], ""):
        file.write_text(text)
        fails("config.json is damaged.*; or remove it, and run rag_jax.ingest again with")


def test_of_a_folder_without_any_text_the_index_stays_and_that_is_said(folder, tmp_path):
    """It went on with what was gone, and said that none of 0 files can be read."""
    rag_jax.ingest(folder, tmp_path / "run")
    before = stored(tmp_path / "run")
    shutil.rmtree(folder)
    folder.mkdir()
    for text in ("none of its 0 files", "none of its 1 files"):
        with pytest.raises(UserError, match=f"{text} .*the index is as it was.* or remove the wor"):
            rag_jax.ingest(folder, tmp_path / "run")
        (folder / "empty.txt").write_text("")
    assert stored(tmp_path / "run") == before


def test_a_workdir_whose_record_was_removed_is_made_again(folder, tmp_path):
    """The error about a damaged record advises it; then, the workdir was called one of train."""
    path = tmp_path / "run"
    rag_jax.ingest(folder, path, config={"retrieval.k": 2})
    (path / "ingest.json").unlink()
    assert len(rag_jax.ingest(folder, path).read) == 4
    assert ingest_config.base_config(path).retrieval.k == 2


SMALL = {"data.max_source_length": 64, "data.max_target_length": 8, "data.max_passage_length": 16,
         "data.max_question_length": 16, "retrieval.k": 2}


@pytest.fixture(scope="module")
def towers(tmp_path_factory, one_device):
    """Fields that name a tiny sentence encoder and a tiny BART."""
    folder, rng = tmp_path_factory.mktemp("towers"), np.random.default_rng(0)
    texts = list(TEXTS.values())
    encoder = BertConfig(vocab_size=300, max_positions=64, width=16, layers=1, heads=2,
                         mlp_width=32, pooling="mean", normalize=True, titles="joined")
    generator = BartConfig(vocab_size=320, max_positions=80, width=16, encoder_layers=1,
                           decoder_layers=1, heads=2, mlp_width=32)
    bart = train_bart_tokenizer(texts, 320)
    for name, family, tower, architecture, tokenizer in (
            ("retriever", "BertModel", "bert", Architecture(encoder),
             train_bert_tokenizer(texts, 300)),
            ("generator", "BartForConditionalGeneration", "generator",
             Architecture(None, generator, SpecialIds(bart.end, bart.end, bart.pad)), bart)):
        boxes = abstract([tower], architecture)
        params = jax.tree.map(lambda box: np.float32(0.3 * rng.normal(size=box.value.shape)),
                              boxes, is_leaf=lambda leaf: hasattr(leaf, "value"))
        save(folder / name, family, params, architecture, tokenizers={tower: tokenizer})
    return {f"model.{name}.pretrained": str(folder / name) for name in ("retriever", "generator")}


def test_settings_by_which_nothing_could_be_answered_are_refused_before(folder, tmp_path, towers):
    """They were kept, and every later command failed, whatever it set."""
    with pytest.raises(ConfigError, match="retrieval.k=0: .* answers from its passages; set 1 or"):
        rag_jax.ingest(folder, tmp_path / "run", config={"retrieval.k": 0})
    generator = {"model.generator.pretrained": towers["model.generator.pretrained"]}
    too_many = {"eval.num_return_sequences": 3}
    with pytest.raises(ConfigError, match="num_return_sequences=3: must be at most num_beams=1"):
        rag_jax.ingest(folder, tmp_path / "run", config={**SMALL, **generator, **too_many})
    assert not (tmp_path / "run" / "config.json").exists()
    rag_jax.ingest(folder, tmp_path / "run", config={**SMALL, **generator})
    with pytest.raises(ConfigError, match="num_return_sequences=3: must be at most num_beams=1"):
        rag_jax.ingest(folder, tmp_path / "run", config=too_many)
    rag_jax.ingest(folder, tmp_path / "run", config={**too_many, "eval.num_beams": 3})
    assert len(rag_jax.load(tmp_path / "run").ask("Who?")[0].alternatives) == 2


def test_settings_are_judged_by_the_models_that_answer(folder, tmp_path, towers, monkeypatch):
    """A classifier with long labels, and what trained models can do, were refused, by the settings
    of the checkpoint; what they cannot was taken."""
    source = shutil.copytree(towers["model.generator.pretrained"], tmp_path / "generator")
    (source / "generation_config.json").write_text(json.dumps({"max_length": 6, "num_beams": 4}))
    base = Config(runs=ingest_config.LEXICAL, train=TrainConfig(steps=0))
    config = overrides.replace(base, {
        **SMALL, "data.max_target_length": Config().data.max_target_length,
        "model.generator.pretrained": str(source)})

    def judged(**fields):
        Maker(overrides.replace(config, fields), tmp_path / "run")

    few, late = {"eval.num_return_sequences": 3}, {"eval.min_length": 7}
    judged(**few)
    judged(**late)  # they may be trained yet
    judged(**late, **{"train.steps": 5})
    long = ("Lima in Peru, where it lies on the coast of the sea", "Oslo in Norway")
    judged(**{"model.head": "classification", "eval.labels": long})
    with pytest.raises(ConfigError, match="min_length=99: must be at most .*length=32"):
        judged(**{"eval.min_length": 99})
    trained = tmp_path / "run" / "trained"
    (trained / "data").mkdir(parents=True)
    Tokenizer.load(str(source)).save(trained / "data" / "generator_tokenizer")
    workdirs.write(overrides.replace(config, {"train.steps": 5}), trained / "config.json")
    monkeypatch.setattr(ingested, "answering", lambda path: trained)
    judged(**late)
    with pytest.raises(ConfigError, match="num_return_sequences=3: must be at most num_beams=1"):
        judged(**few)
    workdirs.write(overrides.replace(config, {"runs": ("bm25_sequence",), "train.steps": 5}),
                   trained / "config.json")
    judged()  # this run may be trained there next
    with pytest.raises(ConfigError, match="num_return_sequences=3: must be at most num_beams=1"):
        judged(**few)


def test_passages_are_asked_by_the_tokenizer_that_embedded_them(folder, tmp_path, towers):
    """Other passages were found, and vectors of other tokens added to the index."""
    written(folder, {"a.txt": "The first passage is longer than what is read below."})
    rag_jax.ingest(folder, tmp_path / "run", config={**SMALL, **towers})
    encoder, index = towers["model.retriever.pretrained"], tmp_path / "run" / "index"
    train_bert_tokenizer(["Another town is in another country."] * 3, 200).save(tmp_path / "other")
    told = "embedded from other tokens than config.data.retriever_tokenizer=.*other gives"
    other = {"data.retriever_tokenizer": str(tmp_path / "other")}
    with pytest.raises(RetrievalError, match=told):
        rag_jax.load(tmp_path / "run", config=other)
    with pytest.raises(RetrievalError, match=told):
        rag_jax.load(index=index, config={**SMALL, **towers, **other})
    own = {"data.retriever_tokenizer": encoder, "data.max_passage_length": 8}
    rag = rag_jax.load(tmp_path / "run", config=own)
    assert rag.retrieve("Oslo?") == rag_jax.load(tmp_path / "run").retrieve("Oslo?")
    (tmp_path / "towns.tsv").write_text("id\ttitle\ttext\n" + "".join(
        f"{n}\tTown {n}\tIt is in Norway.\n" for n in range(3)))
    rag_jax.build_index(tmp_path / "towns.tsv", tmp_path / "towns", config={
        **SMALL, **towers, **other})
    with pytest.raises(RetrievalError, match="embedded from other tokens than .*=.*retriever gi"):
        rag.swap(tmp_path / "towns")


def test_an_encoder_finds_a_generator_answers_and_nothing_is_embedded_twice(
        folder, tmp_path, towers):
    alone = {**SMALL, "model.retriever.pretrained": towers["model.retriever.pretrained"]}
    done = rag_jax.ingest(folder, tmp_path / "run", config=alone)
    size = done.passages
    assert size == done.embedded > 4, "Peru's text is more than the 16 tokens that are read"
    assert (done.lexical, done.answers) == (False, False)
    rag = rag_jax.load(tmp_path / "run")
    assert rag.index.passages.tokens("document_encoder").lengths.max() <= 16
    assert len(rag.retrieve("Oslo?", k=4)[0]) == 4
    with pytest.raises(ConfigError, match="no generator is named"):
        rag.ask("Oslo?")
    for fields in ({"model.retriever.pretrained": ""},
                   {"retrieval.retriever": "bm25", "train.query_encoder_rate": None}):
        name, value = next(iter(fields.items()))
        with pytest.raises(ConfigError, match=f"config.{name}={value}: .* was indexed with "):
            rag_jax.load(tmp_path / "run", config=fields)
    before = {rag.index.passages[row].id: rag.index.embeddings([row])[0] for row in range(size)}
    written(folder, {"added.txt": "Accra is in Ghana."})
    added = rag_jax.ingest(folder, tmp_path / "run")
    assert added.read == ("added.txt",) and (added.passages, added.embedded) == (size + 1, 1)
    named = rag_jax.ingest(folder, tmp_path / "run", config=towers)
    assert named.read == () and named.embedded == 0 and named.answers
    rag = rag_jax.load(tmp_path / "run")
    for row in range(size + 1):
        passage, vector = rag.index.passages[row], rag.index.embeddings([row])[0]
        assert passage.id == "added.txt#1" or (vector == before[passage.id]).all()
        np.testing.assert_allclose(rag.embed_passages([passage])[0], vector, rtol=1e-4, atol=1e-5)
    assert rag_jax.load(tmp_path / "run", config=rag.config).retrieve("Oslo?") == (
        rag.retrieve("Oslo?"))
    answer, = rag.ask("Which town is in Ghana?")
    assert answer.text is not None and len(answer.passages) == 2
    for passage in answer.passages:
        text = (folder / passage.source.file).read_text()
        assert passage.source.file.endswith((".html", ".csv")) or passage.text == " ".join(
            text[slice(*passage.source.span)].split())
    (folder / "peru.md").rename(folder / "moved.md")
    moved = rag_jax.ingest(folder, tmp_path / "run")
    assert (moved.read, moved.embedded) == (("moved.md",), 0), "its passages are as they were"
    del rag
    rag_jax.ingest(folder, tmp_path / "run", chunking={"words": 99})
    assert len(list((tmp_path / "run" / "index" / "versions").iterdir())) == 1
    written(folder, {"kenya.txt": "Mombasa is in Kenya."})
    (folder / "towns.csv").unlink()
    changed = rag_jax.ingest(folder, tmp_path / "run")
    assert changed.embedded == 1 and changed.removed == ("towns.csv",)
    rag, fresh = rag_jax.load(tmp_path / "run"), tmp_path / "fresh"
    rag_jax.ingest(folder, fresh, config={**SMALL, **towers})
    found, = rag.retrieve("Mombasa?", k=rag.index.size)
    assert sorted((p.id, p.title, p.text, p.source) for p in found) == sorted(
        (*passage, source) for passage, source in stored(fresh))
    with pytest.raises(ConfigError, match="the runs rag_token, rag_sequence"):
        rag_jax.load(tmp_path / "run", "bm25")
    assert rag_jax.load(tmp_path / "run", "rag_sequence").job.model.kind == "sequence"


def test_a_folder_of_words_becomes_hybrid_in_one_command(folder, tmp_path, towers):
    """The command was refused for the runs of before, which it replaces."""
    encoder = f"--config.model.retriever.pretrained={towers['model.retriever.pretrained']}"
    argv = [str(folder), f"--workdir={tmp_path / 'run'}",
            *(f"--config.{name}={value}" for name, value in SMALL.items())]
    ingest.main(argv)
    with pytest.raises(ConfigError, match="config.runs=rag_token: a workdir of documents has"):
        ingest.main([*argv, "--config.runs=rag_token"])
    ingest.main([*argv, encoder, "--config.retrieval.retriever=hybrid"])
    rag = rag_jax.load(tmp_path / "run")
    assert isinstance(rag.index, HybridIndex)
    assert {passage.source.file for passage in rag.retrieve("Norway?", k=6)[0]} == {*TEXTS}


def test_the_run_that_is_named_is_trained_and_asked(folder, tmp_path, towers, monkeypatch):
    """It was told nothing, and the other one was."""
    asked = []
    monkeypatch.setattr("rag_jax.training.run.train", lambda config, path: asked.append(config))
    config = {**SMALL, **towers}
    assert rag_jax.ingest(folder, tmp_path / "run", config=config).embedded
    with monkeypatch.context() as patched:  # the index is that of both
        patched.delattr(ingestion._Ingestion, "_make")
        ingest.main([str(folder), f"--workdir={tmp_path / 'run'}", "--config.runs=rag_sequence"])
    rag = rag_jax.load(tmp_path / "run")
    assert (rag.run, rag.job.model.kind) == ("rag_sequence", "sequence")
    assert rag_jax.load(tmp_path / "run", "rag_token").job.model.kind == "token"
    for changes in ({}, {"runs": ("rag_token",)}):
        ingestion.fine_tune(tmp_path / "run", "train.jsonl", "dev.jsonl", config=changes)
    assert [config.runs for config in asked] == [("rag_sequence",), ("rag_token",)]
    with pytest.raises(ConfigError, match="config.runs=bm25: .* name one of those that are there"):
        ingest.main([str(folder), f"--workdir={tmp_path / 'run'}", "--config.runs=bm25"])


def test_an_encoder_alone_finds_on_the_devices_and_a_damaged_index_is_embedded_again(
        folder, tmp_path, towers):
    """The devices wanted the tokens of a generator, once all was embedded; and no later run got
    over the damage."""
    named = {**SMALL, "model.retriever.pretrained": towers["model.retriever.pretrained"],
             "retrieval.where": "device"}
    size = rag_jax.ingest(folder, tmp_path / "run", config=named).passages
    rag = rag_jax.load(tmp_path / "run")
    found = [passage.id for passage in rag.retrieve("Oslo?", k=4)[0]]
    assert isinstance(rag.index, DeviceIndex) and len(found) == 4
    file = current(tmp_path / "run" / "index") / "embeddings.f32"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert rag_jax.ingest(folder, tmp_path / "run").embedded == size
    again = rag_jax.load(tmp_path / "run").retrieve("Oslo?", k=4)[0]
    assert [passage.id for passage in again] == found


def test_towers_may_come_from_workdirs(folder, tmp_path, towers):
    """`ingest` took them, and what it had made could not be opened."""
    named = {}
    for name, source in towers.items():
        named[name] = str(tmp_path / name)
        conversion.convert(source, named[name])
    rag_jax.ingest(folder, tmp_path / "run", config={**SMALL, **named})
    answer, = rag_jax.load(tmp_path / "run").ask("Oslo?")
    rag_jax.ingest(folder, tmp_path / "other", config={**SMALL, **towers})
    assert answer == rag_jax.load(tmp_path / "other").ask("Oslo?")[0]


def test_words_find_for_a_generator(folder, tmp_path, towers, capsys):
    """And both commands as a user types them."""
    named = f"--config.model.generator.pretrained={towers['model.generator.pretrained']}"
    ingest.main([str(folder), f"--workdir={tmp_path / 'run'}", "--words=50", named,
                 *(f"--config.{name}={value}" for name, value in SMALL.items())])
    printed = capsys.readouterr().out
    assert "4 passages of 4 files; 4 files read" in printed and "(BM25)" in printed
    assert "no generator" not in printed
    generate.main([f"--workdir={tmp_path / 'run'}", "What is the capital of Norway?"])
    printed = capsys.readouterr().out
    assert "log p = " in printed and "sub/norway.html  Oslo is the capital" in printed
    assert "no passage has a word" not in printed
    rag = rag_jax.load(tmp_path / "run")
    assert rag.matches("Norway?") and not rag.matches("Zzz?")
    with pytest.raises(DataError, match="expected a text"):
        rag.matches(["Norway?"])
    generate.main([f"--workdir={tmp_path / 'run'}", "Zzz?"])
    assert "(no passage has a word of this question: those below" in capsys.readouterr().out


def test_an_index_is_swapped_in_where_it_has_the_generators_tokens(folder, tmp_path, towers):
    """One that was made without a generator was taken, and every answer failed from then on; and
    where nothing answers, one that was made for a generator was refused."""
    named = {name: towers[name] for name in ("model.generator.pretrained",)}
    rag_jax.ingest(folder, tmp_path / "answers", config={**SMALL, **named})
    rag_jax.ingest(folder, tmp_path / "finds")
    rag = rag_jax.load(tmp_path / "answers")
    before = rag.index
    with pytest.raises(ConfigError, match="finds/index: was made without a generator"):
        rag.swap(tmp_path / "finds" / "index")
    assert rag.index is before
    finds = rag_jax.load(tmp_path / "finds")
    finds.swap(tmp_path / "answers" / "index")
    assert finds.retrieve("What is the capital of Norway?", k=1)[0][0].title == "Norway"


def test_an_edit_adds_no_passage_in_the_tokens_of_another_generator(folder, tmp_path, towers):
    """The index had been made again for another generator while this one was open: it got passages
    in the tokens of both, and answered from them."""
    named = {"model.generator.pretrained": towers["model.generator.pretrained"]}
    rag_jax.ingest(folder, tmp_path / "run", config={**SMALL, **named})
    rag = rag_jax.load(tmp_path / "run")
    train_bart_tokenizer(["Another town is in another country."] * 3, 300).save(tmp_path / "other")
    rag_jax.ingest(folder, tmp_path / "run", config={
        "data.generator_tokenizer": str(tmp_path / "other")})
    with pytest.raises(ConfigError, match="not in the tokens of this .*: open the model again"):
        rag.add([("n", "Cuba", "Havana is in Cuba.")])
    assert "n" not in {*rag_jax.load(tmp_path / "run").index.passages.ids()}


def test_an_edit_is_refused_where_the_index_was_made_again_without_a_generator(
        folder, tmp_path, towers):
    """It was taken, and every answer of the open model failed from then on."""
    named = {"model.generator.pretrained": towers["model.generator.pretrained"]}
    rag_jax.ingest(folder, tmp_path / "run", config={**SMALL, **named})
    rag = rag_jax.load(tmp_path / "run")
    rag_jax.ingest(folder, tmp_path / "run", config={"model.generator.pretrained": ""})
    before = rag.index
    with pytest.raises(ConfigError, match="made without a generator.*: open the model again"):
        rag.add([("n", "Cuba", "Havana is in Cuba.")])
    assert rag.index is before


def test_an_edit_adds_no_passage_in_the_tokens_of_another_retriever(folder, tmp_path, towers):
    """Afterwards nobody could open the index."""
    encoder = {"model.retriever.pretrained": towers["model.retriever.pretrained"]}
    rag_jax.ingest(folder, tmp_path / "run", config={**SMALL, **encoder})
    rag = rag_jax.load(tmp_path / "run")
    train_bert_tokenizer(["Another town is in another country."] * 3, 200).save(tmp_path / "other")
    rag_jax.ingest(folder, tmp_path / "run", config={
        "data.retriever_tokenizer": str(tmp_path / "other")})
    with pytest.raises(RetrievalError, match="from other tokens than .*: open the model again"):
        rag.add([("n", "Cuba", "Havana is in Cuba.")])
    assert "n" not in {*rag_jax.load(tmp_path / "run").index.passages.ids()}


@pytest.mark.parametrize("busy", ["run", "beside"])
def test_an_edit_by_another_name_of_the_index_is_refused_while_ingest_runs(folder, tmp_path, busy):
    """While ingest ran, one came through a link, and was kept as if ingest had made it."""
    for name in ("run", "beside"):
        rag_jax.ingest(folder, tmp_path / name)
    (tmp_path / "beside" / "link").symlink_to(tmp_path / "run" / "index")
    rag = rag_jax.load(tmp_path / "run", index=str(tmp_path / "beside" / "link"))
    with ThreadPoolExecutor(1) as other, locks.own(tmp_path / busy), pytest.raises(
            locks.InUseError, match=f"{busy}: another thread of this process is writing here"):
        other.submit(rag.add, [("n", "Cuba", "Havana is in Cuba.")]).result()


def test_what_is_published_after_the_index_of_an_ingest_is_not_taken_for_its_own(
        folder, tmp_path, monkeypatch):
    """A passage of no document stayed, and one of a document was missing, as long as no document
    changed."""
    write = ingestion._Ingestion._write_config

    def edited(self):
        edit_words(self.path / "index", None, ["kenya.txt#1"])
        write(self)

    monkeypatch.setattr(ingestion._Ingestion, "_write_config", edited)
    rag_jax.ingest(folder, tmp_path / "run")
    monkeypatch.undo()
    rag_jax.ingest(folder, tmp_path / "run")
    assert "kenya.txt#1" in {*rag_jax.load(tmp_path / "run").index.passages.ids()}


@pytest.mark.parametrize("stream", [None, SimpleNamespace(write=print, flush=print)])
def test_a_program_may_have_put_a_stream_of_its_own_in_the_place_of_stderr(
        folder, tmp_path, monkeypatch, stream):
    """It ended with "object has no attribute 'isatty'", as notebooks and services have streams."""
    monkeypatch.setattr(sys, "stderr", stream)
    assert rag_jax.ingest(folder, tmp_path / "run").files == 4


def test_what_is_trained_on_questions_answers_from_the_documents(folder, tmp_path, towers, capsys):
    """And from what is added to them afterwards."""
    for name in ("train", "dev"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({
            "question": f"What is the capital of {land}?", "answers": [town]}) + "\n"
            for land, town in (("Peru", "Lima"), ("Norway", "Oslo"))))
    argv = [str(folder), f"--workdir={tmp_path / 'run'}", f"--dev={tmp_path / 'dev.jsonl'}",
            f"--train={tmp_path / 'train.jsonl'}", "--config.train.steps=2",
            "--config.train.batch_size=2", "--config.tensorboard=false",
            *(f"--config.{name}={value}" for name, value in {**SMALL, **towers}.items())]
    written(folder, {"gone.txt": "Gone is in Nowhere."})
    rag_jax.ingest(folder, tmp_path / "run", config={**SMALL, **towers})
    (folder / "gone.txt").unlink()
    with pytest.raises(OSError, match="typo"):
        ingestion.fine_tune(tmp_path / "run", "typo.jsonl", str(tmp_path / "dev.jsonl"), steps=2,
                            config={"train.batch_size": 2})
    written(folder, {"late.txt": "Rabat is in Morocco."})
    ingest.main(argv)
    texts = (tmp_path / "run" / "passages.jsonl").read_text()
    assert "Rabat" in texts and "Oslo" in texts and "Gone" not in texts
    untrained = rag_jax.ingest(folder, tmp_path / "other", config={**SMALL, **towers})
    written(folder, {"added.txt": "Accra is in Ghana."})
    assert rag_jax.ingest(folder, tmp_path / "run").embedded == 1
    rag = rag_jax.load(tmp_path / "run")
    assert rag.job.workdir == tmp_path / "run" / "trained" and rag.index.size == (
        untrained.passages + 1)
    assert all(passage.source for passage in rag.ask("Accra?", k=4)[0].passages)
    own = jax.tree.leaves(rag_jax.load(tmp_path / "other").params["generator"])
    assert any((a != b).any() for a, b in zip(own, jax.tree.leaves(rag.params["generator"]),
                                              strict=True))
    capsys.readouterr()
    generate.main([f"--workdir={tmp_path / 'run'}", "Accra?"])
    assert "log p = " in capsys.readouterr().out
    ingest.main([*argv[:2], "--config.eval.k=1"])  # no document has changed
    assert ingest_config.base_config(tmp_path / "run").eval.k == 1
    assert len(rag_jax.load(tmp_path / "run").ask("Accra?")[0].passages) == 1
    ingest.main(argv[:4])  # again, with the steps of before
    assert ingest_config.base_config(tmp_path / "run").train.steps == 2
    ingest.main([*argv[:4], "--config.runs=rag_sequence"])
    assert rag_jax.load(tmp_path / "run").run == "rag_sequence"
    ingest.main([*argv[:2], "--config.runs=rag_token"])
    assert rag_jax.load(tmp_path / "run").run == "rag_token"
    moved = (tmp_path / "run").rename(tmp_path / "moved")  # its passages.jsonl, too
    for other in (False, True):
        if other:  # where it was, there is another workdir by now
            written(tmp_path / "run", {"passages.jsonl": "{}"})
        ingest.main([argv[0], f"--workdir={moved}", *argv[2:4]])
    shutil.rmtree(tmp_path / "run")
    moved.rename(tmp_path / "run")
    with pytest.raises(ConfigError, match="max_passage_length: .*was trained with 16"):
        ingest.main([*argv[:2], "--config.data.max_passage_length=31"])
    elsewhere = {name: shutil.copytree(source, tmp_path / name) for name, source in towers.items()}
    again = [f"--config.{name}={source}" for name, source in elsewhere.items()]
    questions = [str(tmp_path / f"{name}.jsonl") for name in ("train", "dev")]
    capsys.readouterr()
    ingest.main([*argv[:2], *again])
    assert " 0 passages embedded" in capsys.readouterr().out
    ingest.main([*argv[:4], *again])
    assert workdirs.read(tmp_path / "run" / "trained").model.sources == {
        tower: str(elsewhere[f"model.{part}.pretrained"]) for tower, part in (
            ("query_encoder", "retriever"), ("document_encoder", "retriever"),
            ("generator", "generator"))}
    other = shutil.copytree(elsewhere["model.retriever.pretrained"], tmp_path / "pooled otherwise")
    pooling = other / "1_Pooling" / "config.json"
    pooling.write_text(json.dumps({
        name: not value if name in ("pooling_mode_cls_token", "pooling_mode_mean_tokens") else value
        for name, value in json.loads(pooling.read_text()).items()}))
    for called in (ingest.main, lambda argv: ingestion.fine_tune(
            tmp_path / "run", *questions, config={"model.retriever.pretrained": str(other)})):
        with pytest.raises(ConfigError, match=(
                "retriever.pretrained: .*was trained with .*, where pooling is mean; .* remove ")):
            called([*argv[:2], *again, f"--config.model.retriever.pretrained={other}"])
    ingest.main([*argv[:4], *argv[-len(again):]])  # as they were
    for source in elsewhere.values():
        file = source / "model.safetensors"
        content = file.read_bytes()
        file.write_bytes(content[:-1] + b"x")
        before = workdirs.read(tmp_path / "run" / "trained")
        for called in (lambda: ingest.main([*argv[:2], *again]), lambda: ingestion.fine_tune(
                tmp_path / "run", *questions, config={n: str(f) for n, f in elsewhere.items()})):
            with pytest.raises(ConfigError, match="trained: .* were made from other weights than"):
                called()
        assert workdirs.read(tmp_path / "run" / "trained") == before
        file.write_bytes(content)
    file = pathlib.Path(towers["model.retriever.pretrained"]) / "model.safetensors"
    content, index = file.read_bytes(), current(tmp_path / "run" / "index")
    try:  # the index would be of an encoder that the trained model does not have
        file.write_bytes(content[:-1] + b"x")
        with pytest.raises(ConfigError, match="trained: .* were made from other weights than"):
            ingest.main(argv[:2])
    finally:
        file.write_bytes(content)
    assert current(tmp_path / "run" / "index") == index
    with pytest.raises(DataError, match="cannot tell the format of the question source 'nofile'"):
        ingest.main([argv[0], f"--workdir={tmp_path / 'new'}", *argv[2:], "--dev=nofile"])
    assert not (tmp_path / "new").exists(), "all documents were read and embedded first"
    with pytest.raises(ConfigError, match="no generator that could learn"):
        ingestion.fine_tune(tmp_path / "run", "", "", config={"model.generator.pretrained": ""})
    written(folder, {"late.txt": "Rabat."})
    for name in (*TEXTS, "added.txt"):
        (folder / name).unlink()
    rag_jax.ingest(folder, tmp_path / "run")
    answer, = rag_jax.load(tmp_path / "run", config={"eval.k": 0}).ask("Rabat?")
    assert len(answer.passages) == 1 < SMALL["retrieval.k"]


def test_passages_are_no_longer_than_the_positions_of_their_encoder(
        folder, tmp_path, towers, capsys):
    """The default length was refused, which nobody had set."""
    config = {"model.retriever.pretrained": towers["model.retriever.pretrained"]}
    written(folder, {"long.txt": "Oslo is a town. " * 90})
    done = rag_jax.ingest(folder, tmp_path / "run", config=config)
    assert rag_jax.ingest(folder, tmp_path / "run").read == ()
    rag = rag_jax.load(tmp_path / "run")
    lengths = rag.index.passages.tokens("document_encoder").lengths
    assert done.passages == len(lengths) > 8 and 32 < lengths.max() <= 64
    rag.add([("more", "", "Accra is in Ghana. " * 50)])
    assert "max_passage_length=64" in capsys.readouterr().out
    for length in 65, 300:
        with pytest.raises(ConfigError, match=f"max_passage_length={length}: the model has 64 pos.*"
                           r"; set 64 or less"):
            rag_jax.ingest(folder, tmp_path / "new", config={
                **config, "data.max_passage_length": length})


def test_the_commands_show_passages_where_nothing_answers(folder, tmp_path, capsys, monkeypatch):
    (folder / "bad \x1b[31m.pdf").write_bytes(b"x")
    ingest.main([str(folder), f"--workdir={tmp_path / 'run'}"])
    printed = capsys.readouterr().out
    assert "not read, it is damaged" in printed and "bad \\x1b[31m.pdf" in printed
    assert "model.generator.pretrained" in printed and "model.retriever.pretrained" in printed
    generate.main([f"--workdir={tmp_path / 'run'}", "What is the capital of Peru?", "zzz"])
    printed = capsys.readouterr().out
    assert "peru.md, Peru to Peru > Lima  # Peru Peru has" in printed
    assert "zzz\n  (no passage has a word of this question)" in printed, "no passage is likelier"
    assert "no generator is named" in printed
    with pytest.raises(ConfigError, match="--out, --heatmap and --exact are of answers"):
        generate.main([f"--workdir={tmp_path / 'run'}", "What?", f"--out={tmp_path / 'a.jsonl'}"])
    monkeypatch.setattr(hosts, "leads", lambda: False)  # one of several processes
    generate.main([f"--workdir={tmp_path / 'run'}", "What is the capital of Peru?"])
    assert not capsys.readouterr().out, "process 0 shows them"


def test_a_plain_bert_is_no_retriever(folder, tmp_path, towers):
    plain = tmp_path / "plain"
    shutil.copytree(towers["model.retriever.pretrained"], plain)
    (plain / "modules.json").unlink()
    config = {**SMALL, **towers, "model.retriever.pretrained": str(plain)}
    with pytest.raises(ConfigError, match="is no retriever"):
        rag_jax.ingest(folder, tmp_path / "run", config=config)
    with pytest.raises(ConfigError, match="is no retriever"):
        rag_jax.build_index(tmp_path / "p.tsv", tmp_path / "index", config=config)


def test_a_plain_bert_is_what_the_configuration_says_it_is(folder, tmp_path, towers, monkeypatch):
    """The error advised to set its pooling, and came again; training on its documents would have
    warmed it up, away from its index."""
    plain = tmp_path / "plain"
    shutil.copytree(towers["model.retriever.pretrained"], plain)
    (plain / "modules.json").unlink()
    config = {**SMALL, "model.retriever.pretrained": str(plain), "model.retriever.pooling": "mean",
              "model.generator.pretrained": towers["model.generator.pretrained"]}
    assert rag_jax.ingest(folder, tmp_path / "run", config=config).embedded
    assert len(rag_jax.load(tmp_path / "run").retrieve("Lima?", 2)[0]) == 2
    asked = []
    monkeypatch.setattr("rag_jax.training.run.train", lambda config, path: asked.append(config))
    ingestion.fine_tune(tmp_path / "run", "train.jsonl", "dev.jsonl")
    assert asked[0].retriever_warmup.steps == 0


@pytest.mark.parametrize("given, told", [
    ({"folder": None}, "folder=None: expected the name of a folder"),
    ({"folder": ["a.txt"]}, "folder=.*: expected the name of a folder"),
    ({"chunking": {"overlaps": 5}}, "chunking: no field 'overlaps'; did you mean overlap"),
    ({"chunking": {"words": "5"}}, "words, tokens and overlap are integers"),
])
def test_arguments_of_another_type_are_refused_by_name(folder, tmp_path, given, told):
    """They were a TypeError from somewhere inside."""
    with pytest.raises(UserError, match=told):
        rag_jax.ingest(**{"folder": folder, "workdir": tmp_path / "run", **given})


def test_weights_that_have_changed_embed_again(folder, tmp_path, towers):
    """Vectors of two encoders in one index have no order."""
    own = tmp_path / "own"
    shutil.copytree(towers["model.retriever.pretrained"], own)
    named = {**SMALL, "model.retriever.pretrained": str(own)}
    rag_jax.ingest(folder, tmp_path / "run", config=named)
    stamp = ingestion.stamps(ingest_config.base_config(tmp_path / "run"))
    weights = own / "model.safetensors"
    content, times = bytearray(weights.read_bytes()), weights.stat()
    content[len(content) // 2] ^= 1
    weights.write_bytes(bytes(content))
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))  # as an archive sets it
    assert ingestion.stamps(ingest_config.base_config(tmp_path / "run")) != stamp
    again = rag_jax.ingest(folder, tmp_path / "run")
    assert again.embedded == again.passages
    rag_jax.load(tmp_path / "run").retrieve("Oslo?")


def test_another_way_of_reading_tokenizers_reads_again(folder, tmp_path, towers, monkeypatch):
    """Passages of before stayed in the tokens of before, and questions came in others."""
    rag_jax.ingest(folder, tmp_path / "words")
    assert "tokenizers" not in record_files.read(tmp_path / "words").made_by, "words have none"
    lexical = {"model.generator.pretrained": towers["model.generator.pretrained"]}
    rag_jax.ingest(folder, tmp_path / "lexical", config={**SMALL, **lexical})
    first = rag_jax.ingest(folder, tmp_path / "run", config={**SMALL, **towers})
    monkeypatch.setattr(tokenizer_file, "WAY", "another")
    assert rag_jax.ingest(folder, tmp_path / "lexical").read == (), "its texts stay, in new tokens"
    assert record_files.read(tmp_path / "lexical").made_by["tokenizers"]["rag_jax"] == "another"
    opened, (lost, late, *others), tries = os.open, first.read, []

    def open_file(path, *flags, **more):
        tries.append(str(path).endswith(late))
        if str(path).endswith(lost) or tries[-1] and sum(tries) > 1:
            raise OSError(errno.EIO, "Input/output error", str(path))
        return opened(path, *flags, **more)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", open_file)
        again = rag_jax.ingest(folder, tmp_path / "run")
    assert (again.read, again.embedded, again.removed) == (tuple(others), 0, ()), "as it was"
    assert set(again.stay) == {lost, late} and again.passages == first.passages
    assert rag_jax.ingest(folder, tmp_path / "run").read == (lost, late), "in the tokens of now"
    assert rag_jax.ingest(folder, tmp_path / "run").read == ()


@pytest.mark.parametrize("trained", [True, False])
def test_passages_have_the_tokens_of_the_models_that_answer(
        folder, tmp_path, towers, monkeypatch, trained):
    """Read in another way later, the sources' tokenizers made an index that no trained model reads;
    where training had no checkpoint yet, its tokenizers did."""
    work, file = tmp_path / "run", tmp_path / "questions.jsonl"
    first = rag_jax.ingest(folder, work, config={**SMALL, **towers})
    file.write_text(json.dumps({"question": "What is Oslo?", "answers": ["Oslo"]}) + "\n")
    ingestion.fine_tune(work, str(file), str(file), steps=1, config={"train.batch_size": 1})
    if not trained:
        shutil.rmtree(next((work / "trained").glob("*/eval.json")).parent)
    passages, read = stored(work), tokenizer_file.read

    def otherwise(source):
        backend, *rest = read(source)
        if str(source) in towers.values():
            backend.normalizer = normalizers.Replace("a", "e")
        return backend, *rest

    monkeypatch.setattr(tokenizer_file, "read", otherwise)
    monkeypatch.setattr(tokenizer_file, "WAY", "another")
    again = rag_jax.ingest(folder, work)
    assert again.read == (() if trained else first.read)
    assert stored(work) == passages or not trained
    written(folder, {"added.txt": "Accra is in Ghana."})
    assert rag_jax.ingest(folder, work).read == ("added.txt",)
    rag = rag_jax.load(work)
    store, prepared = rag.index.passages, rag.job.prepared
    assert has_tokens_of(store, prepared.format)
    for row in range(len(store)):
        expected, = encoder_input(prepared.retriever_tokenizer, [store[row].title],
                                  [store[row].text], 16, encoder=rag.job.config.model.retriever)
        assert list(store.tokens("document_encoder").row(row)) == expected


def test_tokens_of_any_passage_are_found_to_be_others(folder, tmp_path, towers):
    rag_jax.ingest(folder, tmp_path / "run", config={**SMALL, **towers})
    rag = rag_jax.load(tmp_path / "run")
    store, layout = rag.index.passages, rag.job.prepared.format
    assert has_tokens_of(store, layout)
    for text in (store[0].text, store[len(store) - 1].text):
        other = SimpleNamespace(passages=lambda titles, texts, text=text: [
            [*layout.passages(titles, texts)[0], *([9] * (texts == [text]))]])
        assert not has_tokens_of(store, other)


def test_until_training_has_a_checkpoint_the_models_answer_as_they_are(folder, tmp_path):
    """Killed before, it answered no more; and `train` there wrote over its configuration."""
    rag_jax.ingest(folder, tmp_path / "run")
    run = tmp_path / "run" / "trained" / "bm25"
    run.mkdir(parents=True)
    (run / "eval.json").write_text("{}")
    assert record_files.answering(tmp_path / "run") == tmp_path / "run"
    (run / "3").mkdir()
    assert record_files.answering(tmp_path / "run") == tmp_path / "run" / "trained"
    quickstart = str(config_files.CONFIGS / "quickstart.py")
    with pytest.raises(ConfigError, match="is a workdir of rag_jax.ingest"):
        rag_jax.train(quickstart, tmp_path / "run")


def test_a_part_of_how_documents_are_divided_leaves_the_rest(folder, tmp_path):
    """--overlap alone went back to 100 words."""
    for given in ("--words=4", "--overlap=2"):
        ingest.main([str(folder), f"--workdir={tmp_path / 'run'}", given])
    assert record_files.read(tmp_path / "run").divided_by["chunking"] == {
        "words": 4, "tokens": 0, "overlap": 2}
