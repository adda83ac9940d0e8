"""Who may open a workdir while another process writes into it."""

import contextlib
import errno
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

import rag_jax
from rag_jax import hosts, locks
from rag_jax.config import Config, ConfigError, EvalConfig, overrides
from rag_jax.data.prepare import prepare
from rag_jax.data.question_files import Example
from rag_jax.errors import UserError
from rag_jax.evaluation import evaluate
from rag_jax.retrieval.protocol import RetrievalError
from rag_jax.steps import warn_of_unfinished
from rag_jax.training import run, workdir
from rag_jax.training.clock import Clock
from rag_jax.training.run import open_job, train
from tests.data.test_prepare import own_config
from tests.test_locks import HOLDER
from tests.training import small_workdir


@pytest.fixture
def held(tmp_path):
    """(config, workdir, pid): data are prepared, and another process holds the workdir."""
    config, work = own_config(tmp_path), tmp_path / "work"
    prepare(config, work)
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(work)], text=True,
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline() == "held\n"
    yield config, work, process.pid
    process.communicate()


def test_opening_waits_for_nobody_and_writes_nothing(held):
    """evaluate and generate beside a training that lasts for days."""
    config, work, _ = held
    before = sorted((path, path.stat().st_mtime_ns) for path in work.rglob("*"))
    assert len(open_job(config, work).prepared.splits["train"]) == 2
    assert sorted((path, path.stat().st_mtime_ns) for path in work.rglob("*")) == before


def test_what_would_write_is_refused(held):
    """Two that prepared data at once left workdirs that no command could open any more."""
    config, work, pid = held
    refused = pytest.raises(locks.InUseError, match=f"{work}: process {pid} on .* is writing here")
    with refused:
        train(config, work)
    assert not (work / "config.json").exists()
    (work / "data" / "names.txt").unlink()
    with refused:
        open_job(config, work, check=True)


def test_all_processes_take_from_process_0_what_a_workdir_has_trained(tmp_path, monkeypatch):
    """Where one did not see config.json yet, the others waited for it at the first checkpoint."""
    answers = iter([[None, None],  # process 0 could read config.json
                    [[["rag_token", "frozen"], 4], None],
                    [[], []], [[4], []], [[], []], [[3], []]])  # steps, at first with scores
    monkeypatch.setattr(hosts, "index", lambda: 1)
    monkeypatch.setattr(hosts, "exchange", lambda value: next(answers))
    assert run._trained(tmp_path, ()) == ["rag_token"] and not [*answers]


def test_a_run_that_is_not_finished_is_named(tmp_path, capsys):
    """The report left it out, and generate answered by it, without a word."""
    config, work = small_workdir.make(tmp_path)
    capsys.readouterr()
    assert config.train.steps > 3 and run._trained(work, ("frozen",)) == []
    assert capsys.readouterr().err == (
        f"warning: {work}/rag_token: has taken 3 of {config.train.steps} steps, and is left out of "
        "the report; to finish it, give the command again that began it\n")
    assert run._trained(work, ("rag_token",)) == [] and not capsys.readouterr().err
    for steps in (3, 4):
        warn_of_unfinished(work / "rag_token", steps)
    warned = capsys.readouterr().err
    assert warned.startswith(f"warning: {work}/rag_token: has taken 3 of 4 steps; to finish it")
    assert warned.count("\n") == 1


def test_checkpoints_without_a_configuration_are_named(tmp_path, capsys):
    """Another configuration went on with them, without a word."""
    config, work = small_workdir.make(tmp_path)
    (work / "config.json").unlink()
    workdir.start(config, work)
    assert f"warning: {work} has checkpoints, and its config.json is missing" in (
        capsys.readouterr().err)
    workdir.start(config, work)
    workdir.start(config, tmp_path / "new")
    assert not capsys.readouterr().err


def test_errors_about_what_training_has_made_say_how_to_have_it_made_again(tmp_path):
    """The only advice was another path, which train has not."""
    with pytest.raises(RetrievalError, match=f"/a: is damaged. Or remove {tmp_path}/indexes and g"):
        with run._made_again(tmp_path / "indexes"):
            raise RetrievalError(f"{tmp_path}/indexes/a: is damaged.")
    with pytest.raises(RetrievalError, match="^elsewhere: is damaged.$"):
        with run._made_again(tmp_path / "indexes"):
            raise RetrievalError("elsewhere: is damaged.")


def test_a_workdir_whose_name_is_not_utf8_is_refused(tmp_path):
    """Its sound tokenizer was called damaged, after the data were made."""
    path = tmp_path / os.fsdecode(b"caf\xe9")
    with pytest.raises(ConfigError, match="the name is not UTF-8; name another folder"):
        train(Config(), path)
    assert not path.exists()


def test_all_processes_take_from_process_0_which_stages_are_done(tmp_path, monkeypatch):
    config = overrides.replace(Config(), {"train.batch_size": 6, "generator_warmup.batch_size": 6,
                                          "retriever_warmup.batch_size": 6})
    with pytest.raises(ConfigError, match="config.train.batch_size=6: must be a multiple of 8"):
        run.check_batches(config, tmp_path)
    monkeypatch.setattr(hosts, "exchange", lambda value: [[10**9 for _ in value], value])
    run.check_batches(config, tmp_path)


@pytest.mark.parametrize("changes, refused", [
    ({"pairs": "crops"}, True), ({"hard_negatives": 0}, True), ({}, False),
    ({"pairs": "crops", "steps": 0}, False)])
def test_a_warm_up_needs_a_passage_to_tell_from_the_right_one(
        tmp_path, monkeypatch, changes, refused):
    """A loss of 0 was trained on, with an accuracy of 100 %. What has begun goes on."""
    config = overrides.replace(Config(), {
        "retriever_warmup.batch_size": 1,
        **{f"retriever_warmup.{name}": value for name, value in changes.items()}})
    monkeypatch.setattr(run.parallel, "shards", lambda mesh, axis: 1)
    with pytest.raises(ConfigError, match="batch_size=1: the passages of a batch") if (
            refused) else contextlib.nullcontext():
        run.check_batches(config, tmp_path)
    run.check_batches(overrides.replace(config, {"runs": ("bm25",)}), tmp_path)
    (tmp_path / "retriever" / "1").mkdir(parents=True)
    run.check_batches(config, tmp_path)


def test_an_index_that_cannot_be_made_is_met_before_anything_is_trained(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "scann", None)
    config = overrides.replace(own_config(tmp_path), {"retrieval.index": "scann"})
    with pytest.raises(ConfigError, match="config.retrieval.index=scann: ScaNN cannot be imported"):
        train(config, tmp_path / "work")
    assert not (tmp_path / "work" / "data").exists()


def interrupted(*args):
    raise KeyboardInterrupt


def test_questions_that_cannot_be_scored_are_met_before_anything_is_trained(tmp_path, monkeypatch):
    """All steps until the first evaluation were lost."""
    config = overrides.replace(own_config(tmp_path), {
        "eval.metrics": ("qa", "regex"), "retrieval.k": 2})
    monkeypatch.setattr(run, "warm_up_retriever", None)
    with pytest.raises(ConfigError, match="metrics=regex: no question has regular expressions"):
        train(config, tmp_path / "work")
    plain = Example("1", "Who?", ("Lima",), titles=("Peru",))
    none = Example("2", "Who?", ("No Answer Present.",))
    pattern, paged = plain._replace(regex=True), plain._replace(evidence=("1\tPeru",))
    for metrics, pages, dev, test, told in (
            ("regex", "title", [pattern], [plain], "metrics=regex"),
            ("regex", "title", [pattern], [plain._replace(answers=())], None),
            ("ms_marco", "title", [plain], [none], "metrics=ms_marco: every answer is"),
            ("kilt", "id", [paged], [plain], "kilt_pages=id: question '1' has titles"),
            ("kilt", "title", [paged], [plain], None), ("qa", "id", [plain], [none], None),
            ("regex", "title", [plain, pattern], [pattern], "metrics=regex")):
        asked = overrides.replace(Config(), {"eval.metrics": (metrics,), "eval.kilt_pages": pages,
                                             "eval.max_examples": 1})
        job = SimpleNamespace(config=asked, workdir=tmp_path, prepared=SimpleNamespace(
            splits={"dev": dev, "test": test}))
        with pytest.raises(ConfigError, match=told) if told else contextlib.nullcontext():
            run.check_scores(job)
    asked = overrides.replace(asked, {"eval.metrics": ("kilt",), "eval.kilt_pages": "id"})
    for runs, taken, splits, told in (
            (("rag_token",), 0, {"dev": [plain], "test": [paged]}, "dev questions: .*kilt_pages"),
            (("rag_token",), 10**6, {"dev": [plain], "test": [paged]}, None),
            (("rag_token",), 0, {"dev": [paged], "test": [plain]}, "test questions: .*kilt_p"),
            (("rag_token",), 0, {"dev": [paged, plain]}, "dev questions: .*kilt_pages"),
            (("closed_book",), 0, {"dev": [plain], "test": [plain]}, None),
            (("closed_book", "rag_token"), 0, {"dev": [plain]}, "dev questions: .*kilt_pages"),
            (("rag_token", "closed_book"), {"rag_token": 10**6}, {"dev": [plain]}, None)):
        monkeypatch.setattr(run, "steps_taken", lambda folder, taken=taken: (
            taken.get(folder.name, 0) if isinstance(taken, dict) else taken))
        job = SimpleNamespace(config=overrides.replace(asked, {"runs": runs}), workdir=tmp_path,
                              prepared=SimpleNamespace(splits=splits))
        with pytest.raises(ConfigError, match=told) if told else contextlib.nullcontext():
            run.check_scores(job)
    monkeypatch.setattr(run, "steps_taken", lambda folder: 10**6)
    run.check_scores(SimpleNamespace(
        config=overrides.replace(asked, {"eval.metrics": ("regex",)}), workdir=tmp_path,
        prepared=SimpleNamespace(splits={"dev": [plain], "test": [pattern]})))
    with pytest.raises(ConfigError, match="metrics=regex"):  # before they are answered
        evaluate(SimpleNamespace(index=None), {}, SimpleNamespace(examples=[plain]),
                 how=EvalConfig(metrics=("regex",)))
    by_id = EvalConfig(metrics=("kilt",), kilt_pages="id")
    for index, told in ((None, KeyboardInterrupt), ("an index", ConfigError)):
        with pytest.raises(told):
            evaluate(SimpleNamespace(index=index, retrieve=interrupted), {},
                     SimpleNamespace(examples=[plain]), how=by_id)


def test_a_field_that_the_runs_have_otherwise_is_said(tmp_path, monkeypatch, capsys):
    """A Config built in Python trained a closed book, and said nothing of its five passages."""
    def stop(config, path):
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "warm_up", stop)
    for runs, told in ((("closed_book",), 1), (("closed_book", "rag_token"), 0)):
        with pytest.raises(KeyboardInterrupt):
            train(overrides.replace(own_config(tmp_path), {"runs": runs, "retrieval.k": 7}),
                  tmp_path / "work")
        assert capsys.readouterr().out.count(
            "config.retrieval.k=7: run 'closed_book' sets config.retrieval.k=0; the value") == told
    with pytest.raises(ConfigError, match="no run 'rag_tokn'; did you mean rag_token"):
        train(overrides.replace(own_config(tmp_path), {"runs": ("rag_tokn",)}), tmp_path / "work")


def test_a_mesh_that_does_not_fit_is_refused_before_anything_is_written(tmp_path):
    """It was after the tokenizers, and left a workdir of that mesh."""
    config = overrides.replace(own_config(tmp_path), {"mesh.data": 3})
    with pytest.raises(ConfigError, match="config.mesh: data=3 .* does not fit 8 devices"):
        train(config, tmp_path / "work")
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize("field,value,message", [
    ("retriever_warmup.batch_size", 12, r"retriever_warmup.batch_size=12: .* multiple of 8 "),
    ("generator_warmup.batch_size", 12, r"generator_warmup.batch_size=12: .* multiple of 8 "),
    ("train.batch_size", 12, r"train.batch_size=12: .* multiple of 8 "),
    ("train.optimizer.accumulate", 4, r"train.batch_size=16: .* multiple of 32 ")])
def test_batches_that_cannot_be_split_are_refused_before_anything_is_trained(
        tmp_path, field, value, message):
    """Fine-tuning refused its own after both warm-ups and the index, or ended in a traceback."""
    config, work = overrides.replace(own_config(tmp_path), {
        "retriever_warmup.batch_size": 16, "generator_warmup.batch_size": 16,
        "train.batch_size": 16, field: value}), tmp_path / "work"
    with pytest.raises(ConfigError, match=message):
        train(config, work)
    assert not (work / "config.json").exists()
    for folder in ("retriever", "generator", *config.runs):  # done, on other devices
        (work / folder / "1000000").mkdir(parents=True)
    run.check_batches(config, work)


@pytest.mark.parametrize("changes, message", [
    ({"eval.exact_nodes": 10}, "eval.exact_nodes=10: is for one process, and there are 2"),
    ({"retrieval.retriever": "hybrid", "retrieval.index": "scann", "retrieval.scann_parts": 2},
     "retrieval.scann_parts=2: each of 2 processes would hold a share")])
def test_what_one_process_alone_does_is_refused_to_several(monkeypatch, changes, message):
    """It was said after both warm-ups and the index, with advice that the workdir refused."""
    config = overrides.replace(Config(), changes)
    run.check_processes(config, {"hybrid"})
    monkeypatch.setattr(run.hosts, "count", lambda: 2)
    with pytest.raises(ConfigError, match=message):
        run.check_processes(config, {"hybrid"})
    monkeypatch.setattr(run.hosts, "count", lambda: 3)
    if "eval.exact_nodes" not in changes:
        run.check_processes(config, {"hybrid"})


def test_a_folder_of_others_is_no_workdir(tmp_path):
    """Somebody's documents got tokenizers, checkpoints and a lock between them."""
    config, work = own_config(tmp_path), tmp_path / "work"
    (work / "notes").mkdir(parents=True)
    (work / "thesis.tex").write_text("years")
    for use in (lambda: train(config, work), lambda: rag_jax.ingest(tmp_path, work)):
        with pytest.raises(UserError, match="has notes, thesis.tex, .* name a new or an empty"):
            use()
    (work / "config.json").write_text('{"a": 1}')
    with pytest.raises(ConfigError, match="config.json is damaged, or not of this version"):
        train(config, work)
    assert sorted(path.name for path in work.iterdir()) == ["config.json", "notes", "thesis.tex"]


def test_times_that_cannot_be_written_hide_no_error(tmp_path, monkeypatch):
    """On a full disk, a checkpoint that could not be saved was not told of."""
    def full(*given):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr("rag_jax.training.clock.write_sealed", full)
    with pytest.raises(UserError, match="Saving a checkpoint"), Clock(tmp_path).time("rag_token"):
        raise UserError("Saving a checkpoint failed")
    with pytest.raises(OSError, match="full"), Clock(tmp_path).time("rag_token"):
        pass


def test_what_is_done_again_counts_once(tmp_path):
    """The time of a finished training grew with every command that worked out its report."""
    clock = Clock(tmp_path)
    clock.secs = {"report": 100.0, "rag_token": 100.0}
    with clock.time("report", anew=True), clock.time("rag_token"):
        pass
    kept = Clock(tmp_path).secs
    assert kept["report"] < 100 <= kept["rag_token"]


@pytest.mark.parametrize(("there", "required"), [
    ((), True), (("data/names.txt",), True), (("generator/5/x",), True),
    (("data/names.txt", "generator/5/x"), False), (("data/names.txt", "indexes/2018/x"), False)])
def test_a_source_needs_a_tokenizer_until_something_is_made_of_the_data(
        tmp_path, monkeypatch, there, required):
    """A source without one, which a corrected command named, was read by a tokenizer that was
    trained on the passages."""
    for name in there:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.setattr(run, "prepare", lambda config, path, folders, world: folders("generator"))
    monkeypatch.setattr(run.pretrained, "tokenizer_folder",
                        lambda config, tower, required: (tower, required))
    assert run._prepare(Config(), tmp_path) == ("generator", required)


def test_the_times_of_a_workdir_that_was_moved_are_not_written_into_the_next(tmp_path):
    """The training that had begun at the old name got the times of the one before."""
    work, other = tmp_path / "work", tmp_path / "other"
    other.mkdir()
    with Clock(other).time("index"):
        pass
    theirs, clock = Clock(other).secs, Clock(work)
    with pytest.raises(KeyboardInterrupt), locks.exclusive(work), clock.time("rag_token"):
        work.rename(tmp_path / "moved")
        other.rename(work)
        with pytest.raises(UserError, match="work: was moved"), clock.time("report"):
            raise AssertionError("the report was made in the other's workdir")
        raise KeyboardInterrupt
    assert Clock(work).secs == theirs
