"""A stored result is a cell's only where its configuration is; and what is said of who made it."""

import dataclasses
import json
import subprocess

import pytest

from rag_jax.cli import reproduce
from rag_jax.config import Config, overrides
from rag_jax.files import quick_digest as digest
from rag_jax.reproduction import run
from rag_jax.reproduction.cells import Cell, File, Measurement
from rag_jax.reproduction.provenance import commit, made_by, stale
from rag_jax.reproduction.toy import Toy


def cell(**changes):
    return Cell("a", overrides.replace(Config(), changes), "rag_token")


def recorded(one, root):
    return json.loads(json.dumps(made_by(one, root)))


@pytest.mark.parametrize(("changes", "told"), [
    ({"train.steps": 4}, "config.train.steps: 4 there, 1000 now"),
    ({"seed": 1}, "config.seed: 1 there, 0 now"),
    ({"eval.k": 3}, "config.eval.k: 3 there, 0 now"),  # changeable for training, not for a result
    ({"eval.metrics": ("fever",)}, "config.eval.metrics: ('fever',) there, ('qa',) now"),
    ({"data.world_task": "claims", "retrieval.k": 1}, "'claims' there, 'questions' now; config."),
    ({"runs": ("frozen",), "train.log_every": 1, "mesh.fsdp": 2, "tensorboard": False}, ""),
    ({"model.generator.attention_dropout": 0.0}, ""),  # as earlier versions wrote it
    ({"model.generator.attention_dropout": 0.1}, "attention_dropout: 0.1 there, 0.0 now"),
])
def test_a_result_of_another_configuration_is_stale(tmp_path, changes, told):
    found = stale(recorded(cell(**changes), tmp_path), cell(), tmp_path)
    assert told in found and bool(told) == bool(found)


def test_a_result_without_a_record_or_of_another_version_is_stale(tmp_path):
    assert "no record" in stale(None, cell(), tmp_path)
    made = recorded(cell(), tmp_path)
    made["configs"][0]["dropped_field"] = 1
    assert "another version" in stale(made, cell(), tmp_path)


def test_the_models_that_a_cell_starts_from_count_too(tmp_path):
    def later(**changes):
        return Cell("b", Config(), "rag_token", first=cell(), start=cell(**changes))

    made = recorded(later(**{"train.steps": 4}), tmp_path)
    assert stale(made, later(**{"train.steps": 4}), tmp_path) == ""
    assert "train.steps: 4 there" in stale(made, later(), tmp_path)
    assert stale(recorded(later(**{"eval.k": 9}), tmp_path), later(), tmp_path) == ""
    assert "other models" in stale(made, cell(), tmp_path)


def test_results_stay_those_of_their_cells_when_their_folder_is_moved(tmp_path):
    before, after = tmp_path / "before", tmp_path / "after"
    made = recorded(Toy(before).cells("nq", "rag_token")[1], before)
    moved = Toy(after).cells("nq", "rag_token")[1]
    assert str(before) not in json.dumps(made) and moved.config.model.generator.pretrained
    assert stale(made, moved, after) == ""


def test_results_of_the_reduced_form_are_not_those_of_the_full_one(tmp_path):
    for task in ("nq", "jeopardy", "fever3"):
        short, = Toy(tmp_path, seeds=1, reduced=True).cells(task, "rag_token")
        full, = Toy(tmp_path, seeds=1).cells(task, "rag_token")
        assert short.folder == full.folder
        assert "config.train.steps: 4 there" in stale(recorded(short, tmp_path), full, tmp_path)
        assert stale(recorded(full, tmp_path), full, tmp_path) == ""


def test_a_result_of_other_files_is_stale(tmp_path):
    """Other questions at the same path, or another dump, must not pass for those measured."""
    paths = {name: tmp_path / name for name in ("asked.jsonl", "dump.xml.bz2")}
    for path in paths.values():
        path.write_text("first")
    asked, dump = (File(str(path), "") for path in paths.values())
    files = {"data.passages": "own.tsv", "data.train": "t.jsonl", "data.dev": "d.jsonl"}
    one = dataclasses.replace(cell(**files), questions={"asked": asked},
                              indexes={"old": dump, "own": File("own.tsv", "")})
    swapped, plain = Measurement("asked", index="old"), Measurement("asked", index="own")
    made, of_own = (json.loads(json.dumps(made_by(one, tmp_path, w))) for w in (swapped, plain))
    assert list(made["files"]) == ["asked", "old"] and list(of_own["files"]) == ["asked"]
    assert stale(made, one, tmp_path, swapped) == stale(of_own, one, tmp_path, plain) == ""
    assert "is another file now" in stale(of_own, one, tmp_path, swapped)
    paths["dump.xml.bz2"].write_text("other")  # of the same size
    assert stale(made, one, tmp_path, swapped) == f"{dump.path} is another file now"
    assert stale(of_own, one, tmp_path, plain) == ""
    paths["dump.xml.bz2"].unlink()
    assert stale(made, one, tmp_path, swapped) == "", "the 13 GB may go, the result stays"
    paths["asked.jsonl"].write_text("other")
    assert stale(made, one, tmp_path, swapped) == f"{asked.path} is another file now"
    del made["files"]  # as earlier versions recorded
    assert stale(made, one, tmp_path, swapped) == f"{asked.path} is another file now"


def test_a_result_of_other_questions_of_the_configuration_is_stale(tmp_path):
    """Training takes a changed test file, and old numbers passed for those of its questions."""
    path, what = tmp_path / "test.jsonl", Measurement()
    path.write_text("first")
    for source in (str(path), f"kilt:{path}"):
        one = cell(**{"data.passages": "p.tsv", "data.train": "t.jsonl", "data.dev": "d.jsonl",
                      "data.test": source})
        made = json.loads(json.dumps(made_by(one, tmp_path, what)))
        assert list(made["files"]) == ["test"] and stale(made, one, tmp_path, what) == ""
        path.write_text("other")
        assert stale(made, one, tmp_path, what) == f"{path} is another file now"
        made["files"].clear()  # as earlier versions recorded
        assert stale(made, one, tmp_path, what) == ""
        path.write_text("first")
    assert made_by(cell(**{"data.passages": "p.tsv", "data.test": "task:nq:test"}), tmp_path,
                   what)["files"] == made_by(one, tmp_path, Measurement("dev"))["files"] == {}


@pytest.mark.parametrize(("place", "seen"), [(0, True), (-1, True), (1 << 21, False)])
def test_large_files_are_told_apart_by_their_ends_and_size(tmp_path, place, seen):
    path, content = tmp_path / "dump.xml.bz2", bytearray(1 << 22)
    path.write_bytes(content)
    before = digest(str(path))
    content[place] = 1
    path.write_bytes(content)
    assert (digest(str(path)) != before) == seen
    path.write_bytes(content + b"\0")
    assert digest(str(path)) != before, "the ends are the same, the size is not"


@pytest.mark.parametrize(("flags", "folder"), [
    (["--reduced"], "reproduce-toy-reduced"), ([], "reproduce-toy"),
    (["--scale=paper"], "paper"), (["--workdir=mine", "--reduced"], "mine")])
def test_the_reduced_form_has_a_folder_of_its_own(tmp_path, monkeypatch, flags, folder):
    asked = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "reproduce", lambda names, root, scale, work: asked.append(root))
    reproduce.main(["table1", *flags])
    assert [root.name for root in asked] == [folder]


def test_sources_that_git_does_not_know_are_changes(tmp_path):
    def git(*arguments):
        subprocess.run(["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b",
                        *arguments], check=True, capture_output=True)

    git("init")
    (tmp_path / "rag_jax").mkdir()
    (tmp_path / "rag_jax" / "a.py").write_text("a")
    git("add", ".")
    git("commit", "-m", "first")
    (tmp_path / "notes.txt").write_text("no source")
    clean = commit(tmp_path)
    assert len(clean) == len("commit ") + 40
    (tmp_path / "rag_jax" / "b.py").write_text("b")
    assert commit(tmp_path) == f"{clean} with changes"
    (tmp_path / "rag_jax" / "b.py").unlink()
    (tmp_path / "rag_jax" / "a.py").write_text("other")
    assert commit(tmp_path) == f"{clean} with changes"
    assert not commit(tmp_path / "rag_jax").startswith("commit")
