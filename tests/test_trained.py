"""A trained run opened from Python: the run decides its configuration, not who opens it."""

import types

import pytest

from rag_jax import overrides, trained
from rag_jax.config import Config, ConfigError
from rag_jax.training import pretrained, workdir
from rag_jax.training.job import Job


class Opened(str):
    """An index of 70 passages, by its name."""

    size = 70

    def check_encoder(self, fingerprint):
        assert fingerprint == "f"


@pytest.fixture
def path(tmp_path, monkeypatch):
    """A workdir with three runs, whose parameters and indexes are stubs."""
    runs = ("rag_token", "rag_sequence", "closed_book")
    workdir.start(overrides.replace(Config(), {"runs": runs}), tmp_path)

    def open_job(config, path):
        prepared = types.SimpleNamespace(memories={"now": None}, format=None)
        return Job(config, path, prepared, None)

    monkeypatch.setattr(Job, "model", types.SimpleNamespace(lexical=False))
    monkeypatch.setattr(trained, "open_job", open_job)
    monkeypatch.setattr(pretrained, "load_params", lambda job, run, step: (
        f"parameters of {run}", {"encoder_fingerprint": "f"}))
    monkeypatch.setattr(trained.PassageIndex, "open", lambda folder, *_, **__: Opened(folder.name))
    monkeypatch.setattr(trained.on_device, "open_index", lambda *given: given[-1])
    return tmp_path


@pytest.mark.parametrize("run, kind, k, index", [
    (None, "token", 5, "now"), ("rag_sequence", "sequence", 5, "now"),
    ("closed_book", "token", 0, None)])
def test_the_workdirs_configuration_opens_each_run_as_what_it_is(path, run, kind, k, index):
    """rag_sequence decoded as RAG-Token, and closed_book read five passages."""
    config = workdir.read(path)
    for given in (config, overrides.for_run(config, run or "rag_token")):
        opened = trained.open_trained(given, path, run)
        found = opened.job.config
        assert (found.runs, found.kind, found.retrieval.k, opened.index) == (
            (run or "rag_token",), kind, k, index)
        assert opened.run == found.runs[0] and opened.params == f"parameters of {opened.run}"


def test_a_run_answers_as_it_was_trained_to_unless_other_settings_are_given(path):
    config = workdir.read(path)
    workdir.begin_run(path, "rag_sequence", overrides.replace(config, {"eval.k": 50}).eval)
    assert trained.open_trained(config, path, "rag_sequence").job.config.eval.k == 50
    for k in (0, 7):
        given = overrides.replace(config, {"eval.k": k, "eval.num_beams": 2})
        assert trained.open_trained(given, path, "rag_sequence").job.config.eval == given.eval


@pytest.mark.parametrize("k, index, told", [
    (71, None, r"config.eval.k=71: .*now has 70 passages"),
    (5, "nosuch", r"--index=nosuch: no such folder, and .*indexes has older")])
def test_a_wrong_index_fails_before_the_model_is_read(path, monkeypatch, k, index, told):
    """k above the number of passages, and a misspelt --index, were told after the checkpoint."""
    monkeypatch.setattr(pretrained, "load_params", lambda *_: pytest.fail("the model is read"))
    (path / "indexes" / "older").mkdir(parents=True)
    config = overrides.replace(workdir.read(path), {"eval.k": k})
    with pytest.raises(ConfigError, match=told):
        trained.open_trained(config, path, "rag_token", index=index)


def test_the_first_run_that_began_is_opened_where_none_is_named(path):
    (path / "rag_sequence").mkdir()
    assert trained.open_trained(workdir.read(path), path).run == "rag_sequence"


def test_one_runs_configuration_does_not_open_another(path):
    with pytest.raises(ConfigError, match="--run=rag_sequence: .* has the runs rag_token"):
        trained.open_trained(overrides.for_run(workdir.read(path), "rag_token"), path,
                             "rag_sequence")


def test_an_index_is_built_for_a_run_as_it_is(path, monkeypatch):
    asked = []
    monkeypatch.setattr(trained, "job_of_file", lambda job, *_: asked.append(job.config) or job)
    monkeypatch.setattr(trained.pretrained, "restore_run",
                        lambda *given: (asked.append(given[0]), {}))
    monkeypatch.setattr(trained, "index_stores", lambda *given: {"out": "index"})
    (path / "out.passages").mkdir()  # somebody's, as good as any name
    trained.index_passages(workdir.read(path), path, path / "p.tsv", path / "out",
                           run="rag_sequence")
    assert (path / "out.passages").is_dir()
    assert asked[0].kind == "sequence" and asked[1] == path / "rag_sequence"
    with pytest.raises(FileNotFoundError, match=r"none\.jsonl"):  # it was after all was written
        trained.index_passages(workdir.read(path), path, path / "p.tsv", path / "other",
                               str(path / "none.jsonl"), run="rag_sequence")
    assert not (path / "other").exists()
