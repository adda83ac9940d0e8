"""A workdir belongs to one configuration: a second command with another one must not mix in."""

import contextlib
from types import SimpleNamespace

import pytest

from rag_jax import hosts, steps
from rag_jax.config import Config, ConfigError, overrides
from rag_jax.config.overrides import replace
from rag_jax.data.inputs import DONE
from rag_jax.errors import UserError
from rag_jax.retrieval.protocol import RetrievalError
from rag_jax.training import changes, workdir
from rag_jax.training.run import check_k


def test_a_new_workdir_keeps_its_configuration(tmp_path):
    config = replace(Config(), {"seed": 3, "runs": ("frozen",), "retrieval.num_leaves": 7})
    path = workdir.start(config, tmp_path / "a" / "b")
    assert path.is_absolute() and workdir.read(path) == config
    assert [f.name for f in path.iterdir()] == ["config.json"]


def test_the_same_configuration_goes_on(tmp_path):
    workdir.start(Config(), tmp_path)
    assert workdir.start(Config(), tmp_path) == tmp_path
    assert workdir.read(tmp_path) == Config()


@pytest.mark.parametrize("labels, told", [
    (("+1", "0", "-1"), "'[+]1' and '-1' are one ans"), (("x", "y", "x"), "'x' and 'x' are one")])
def test_labels_that_would_be_scored_as_one_are_refused_before_the_training(tmp_path, labels, told):
    """A wrong class counted as right. A workdir that has them can still be opened."""
    config = overrides.replace(Config(), {"eval.labels": labels})
    with pytest.raises(ConfigError, match=f"config.eval.labels: {told}"):
        workdir.start(config, tmp_path / "work")
    assert not (tmp_path / "work").exists()
    workdir.write(config, tmp_path / "config.json")
    assert workdir.read(tmp_path).eval.labels == labels


def test_until_its_data_are_there_a_workdir_may_be_started_otherwise(tmp_path):
    """A mistyped --config.data.passages left a workdir that refused the right one."""
    def start(passages):
        workdir.start(replace(Config(), {"data.passages": passages, "data.train": "train.tsv",
                                         "data.dev": "dev.tsv"}), tmp_path)

    start("nosuch.tsv")
    start("passages.tsv")
    assert workdir.read(tmp_path).data.passages == "passages.tsv"
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / DONE).touch()
    with pytest.raises(ConfigError, match="config.data.passages: 'passages.tsv' there"):
        start("other.tsv")


def changed_value(name):
    field = overrides.fields()[name]
    default, kind = field.default, overrides.type_name(field.type)
    if "bool" in kind:
        return not default
    if isinstance(default, str) and kind != "str":
        return next(v for v in kind.split("|") if v != default)
    if isinstance(default, str):
        return "other"
    if isinstance(default, tuple):
        return ("kilt",) if name == "eval.metrics" else ("frozen",)
    if isinstance(default, float) and default:
        return default / 2  # some are shares, at most 1
    return (default or 0) + 1


STAGES = ("retriever", "generator", "rag_token")


@pytest.mark.parametrize("name", [n for n in overrides.fields() if not changes.always(n)])
def test_another_value_of_a_field_that_shapes_the_model_is_refused(tmp_path, name):
    """Silently going on would train the rest of a run with other data, sizes or rates."""
    base = Config()
    workdir.start(base, tmp_path)
    for stage in STAGES:
        (tmp_path / stage / "100").mkdir(parents=True)
    changed = replace(base, {name: changed_value(name)})
    with pytest.raises(ConfigError) as error:
        workdir.start(changed, tmp_path)
    earlier, now = overrides.value(base, name), overrides.value(changed, name)
    assert f"config.{name}: {earlier!r} there, {now!r} now" in str(error.value)
    assert str(tmp_path) in str(error.value)
    assert str(error.value).endswith("a link to it will do") is name.endswith(".pretrained")
    assert workdir.read(tmp_path) == base, "the refused command must leave no trace"


@pytest.mark.parametrize("name", [n for n in overrides.fields() if changes.always(n)
                                  and n != "eval.prefix_mib"])  # of decoder-only generators
def test_fields_that_change_no_result_of_earlier_stages_may_differ(tmp_path, name):
    workdir.start(Config(), tmp_path)
    changed = replace(Config(), {name: changed_value(name)})
    workdir.start(changed, tmp_path)
    runs = ("rag_token", "frozen") if name == "runs" else changed.runs
    assert workdir.read(tmp_path) == replace(changed, {"runs": runs})


def test_runs_of_one_workdir_add_up(tmp_path):
    """After the second of the paper's runs, no command opened the first."""
    for runs in (("rag_sequence",), ("frozen", "rag_token"), ("rag_token",)):
        workdir.start(replace(Config(), {"runs": runs}), tmp_path)
    assert workdir.read(tmp_path).runs == ("rag_sequence", "frozen", "rag_token")


def test_encoders_come_with_the_first_run_that_has_them(tmp_path):
    """BM25 has none, so that a run by DPR beside it, or it beside such a run, was refused."""
    words = replace(Config(), {"runs": ("bm25",)})
    dense = replace(Config(), {"runs": ("rag_token",), "model.retriever.layers": 2,
                               "model.query_encoder.pretrained": "a",
                               "model.document_encoder.pretrained": "b"})
    workdir.start(words, tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / DONE).touch()
    (tmp_path / "generator" / "100").mkdir(parents=True)
    with pytest.raises(ConfigError, match="config.model.generator.layer_norm_eps"):
        workdir.start(replace(dense, {"model.generator.layer_norm_eps": 1.0}), tmp_path)
    workdir.start(dense, tmp_path)
    assert workdir.read(tmp_path) == replace(dense, {"runs": ("bm25", "rag_token")})
    workdir.start(words, tmp_path)
    assert workdir.read(tmp_path) == replace(dense, {"runs": ("bm25", "rag_token")})
    with pytest.raises(ConfigError, match="config.model.retriever.layers: 2 there, 12 now"):
        workdir.start(replace(words, {"runs": ("bm25", "rag_sequence")}), tmp_path)


@pytest.mark.parametrize("made", [None, "retriever/100", "indexes/2018", "data is a link",
                                  "data/memories is a link"])
@pytest.mark.parametrize("name, value", [
    ("model.generator.vocab_size", 10), ("retrieval.scann_parts", 2), ("train.batch_size", 3),
    ("model.head", "classification"), ("model.generator.family", "t5")])
def test_until_something_is_made_of_the_data_a_refused_command_can_be_corrected(
        tmp_path, name, value, made):
    """A table smaller than its tokenizer was refused, and then so was a larger one."""
    base = replace(Config(), {"eval.labels": ("yes", "no")})
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / DONE).touch()
    if made == "data is a link":
        (tmp_path / "data").rename(tmp_path / "other")
        (tmp_path / "data").symlink_to(tmp_path / "other")
    elif made == "data/memories is a link":
        (tmp_path / "data" / "memories").symlink_to(tmp_path)
    elif made:
        (tmp_path / made).mkdir(parents=True)
    (tmp_path / "index").mkdir()
    workdir.write(replace(base, {name: value}), tmp_path / "config.json")
    if name.startswith("train.") or made is None and name in ("model.generator.vocab_size",
                                                              "retrieval.scann_parts"):
        workdir.start(base, tmp_path)
        assert workdir.read(tmp_path) == base
    else:
        with pytest.raises(ConfigError, match=f"config.{name}: .* there"):
            workdir.start(base, tmp_path)


@pytest.mark.parametrize("begun, made", [(None, None), ("eval.json", None), ("7", None),
                                         (None, "retriever/100"), (None, "indexes/2018")])
@pytest.mark.parametrize("first, fields", [
    ("closed_book", {"retrieval.k": 3}), ("bm25", {"model.retriever.passage_prefix": "passage: "})])
def test_a_run_that_was_refused_before_it_began_can_be_corrected(
        tmp_path, first, fields, begun, made):
    """What it had named was kept, so that nothing else was taken."""
    workdir.start(replace(Config(), {"runs": (first,)}), tmp_path)
    (tmp_path / first / "5").mkdir(parents=True)
    workdir.start(replace(Config(), {"runs": ("rag_token",), **fields}), tmp_path)
    if begun:
        (tmp_path / "rag_token" / begun).mkdir(parents=True)
    if begun == "eval.json":
        (tmp_path / "rag_token" / begun).rmdir()
        workdir.begin_run(tmp_path, "rag_token", Config().eval)
    if made:
        (tmp_path / made).mkdir(parents=True)
    name, = fields
    again = replace(Config(), {"runs": ("rag_token",)})
    if begun is None and (made is None or name == "retrieval.k"):
        workdir.start(again, tmp_path)
        assert workdir.read(tmp_path) == replace(again, {"runs": (first, "rag_token")})
    elif begun == "eval.json" and name == "retrieval.k":
        workdir.start(again, tmp_path)  # until its first checkpoint
    else:
        with pytest.raises(ConfigError, match=f"config.{name}: .* there"):
            workdir.start(again, tmp_path)


def test_each_run_is_evaluated_as_its_own_last_command_says(tmp_path):
    """Of the paper's, RAG-Token reads 15 passages and RAG-Sequence 50, in one workdir."""
    for run, preset in (("rag_token", "paper-qa-token"), ("rag_sequence", "paper-qa-sequence")):
        config = replace(Config(), {"runs": (run,), "eval": preset})
        workdir.begin_run(workdir.start(config, tmp_path), run, config.eval)
    assert workdir.read_run(tmp_path) == replace(Config(), {"eval": "paper-qa-token"})
    found = workdir.read_run(tmp_path, "rag_sequence")
    assert found == config and found.eval.k == 50
    (tmp_path / "rag_token" / "eval.json").unlink()  # of an earlier version
    assert workdir.read_run(tmp_path, "rag_token").eval == config.eval
    (tmp_path / "rag_token" / "eval.json").write_text("{")
    with pytest.raises(ConfigError, match="eval.json is damaged"):
        workdir.read_run(tmp_path, "rag_token")


def test_what_has_a_rule_is_a_field_or_a_section():
    """The rule of a renamed field would silently be that of its section."""
    names = {*overrides.fields()}
    sections = {name[:end] for name in names for end, c in enumerate(name) if c == "."}
    rates = {f"train.optimizer.{name}" for name in changes.RATES}
    for name in ({*changes.RULES} | rates) - names - sections:  # said of all towers alike
        assert name.rpartition(".")[0] in ("model.retriever", "model.reranker")
        assert f"model.generator.{name.rpartition('.')[2]}" in names
    assert {name.partition(".")[0] for name in names} <= {*changes.RULES}


def test_seed_data_sizes_and_steps_are_not_changeable():
    for name in ("seed", "data.passages", "model.generator.width", "train.steps", "retrieval.k",
                 "train.batch_size", "retrieval.staleness", "train.optimizer.learning_rate"):
        assert not changes.always(name)


def test_every_changed_field_is_told(tmp_path):
    workdir.start(Config(), tmp_path)
    (tmp_path / "rag_token" / "3").mkdir(parents=True)
    with pytest.raises(ConfigError) as error:
        workdir.start(replace(Config(), {"seed": 1, "train.steps": 5, "eval.num_beams": 3}),
                      tmp_path)
    assert "config.seed" in str(error.value) and "config.train.steps" in str(error.value)
    assert "num_beams" not in str(error.value)


def test_a_prompt_that_nobody_reads_keeps_no_begun_workdir_from_going_on(tmp_path):
    """An earlier version took it; then it could neither be kept nor left out."""
    unread = replace(Config(), {"data.prompt": "{passage} Q: {question} A:"})
    with pytest.raises(ConfigError, match="config.data.prompt=.*: none is read"):
        workdir.start(unread, tmp_path)
    workdir.start(Config(), tmp_path)
    workdir.write(unread, tmp_path / "config.json")
    (tmp_path / "rag_token" / "3").mkdir(parents=True)
    workdir.start(unread, tmp_path)


def test_a_folder_that_is_no_workdir_is_named(tmp_path):
    with pytest.raises(ConfigError, match="no config.json; name .*.train or rag_jax.ingest"):
        workdir.read(tmp_path)
    with pytest.raises(ConfigError, match="nowhere: there is no such folder; name a workdir"):
        workdir.read(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text('{"architectures": ["RagTokenForGeneration"]}')
    with pytest.raises(ConfigError, match="of Hugging Face, and no workdir.*model.rag.pretrained"):
        workdir.read(tmp_path)  # it was called damaged


@pytest.mark.parametrize("field, value, stage", [
    ("retrieval.k", 3, "rag_token"), ("train.batch_size", 7, "rag_token"),
    ("retriever_warmup.steps", 7, "retriever"), ("generator_warmup.batch_size", 7, "generator")])
def test_the_fields_of_a_stage_may_change_until_its_first_checkpoint(
        tmp_path, field, value, stage):
    """k above the number of passages was met after the warm-ups, and could not be changed then."""
    workdir.start(Config(), tmp_path)
    for other in STAGES:
        (tmp_path / other / ("damaged-1" if other == stage else "100")).mkdir(parents=True)
    changed = replace(Config(), {field: value})
    workdir.start(changed, tmp_path)
    assert workdir.read(tmp_path) == changed
    (tmp_path / stage / "1").mkdir()
    with pytest.raises(ConfigError, match=field):
        workdir.start(Config(), tmp_path)


def test_of_several_processes_the_first_alone_looks_whether_a_workdir_fits(tmp_path, monkeypatch):
    """One that saw an earlier config.json, or no checkpoint yet, ended while the others waited."""
    workdir.start(Config(), tmp_path)
    (tmp_path / "rag_token" / "1").mkdir(parents=True)
    monkeypatch.setattr(hosts, "index", lambda: 1)
    said = []
    monkeypatch.setattr(hosts, "exchange", lambda value: said.append(value) or [None, value])
    assert workdir.start(replace(Config(), {"seed": 7}), tmp_path) == tmp_path
    assert said == [None] and workdir.read(tmp_path) == Config()
    monkeypatch.setattr(hosts, "exchange", lambda value: ["process 0: ConfigError: no", value])
    with pytest.raises(UserError, match="process 0: ConfigError: no"):
        workdir.start(Config(), tmp_path)


def test_a_stage_that_stopped_at_nan_may_go_on_with_another_rate(tmp_path):
    """The message advised it, and the workdir refused it."""
    runs = ("rag_sequence", "rag_token")
    base = replace(Config(), {"runs": runs, "train.steps": 9})
    lower = {"train.optimizer.learning_rate": 1e-9, "train.optimizer.warmup_steps": 3}
    workdir.start(base, tmp_path)
    (tmp_path / "rag_sequence" / "9").mkdir(parents=True)  # is done
    (tmp_path / "rag_token" / "4").mkdir(parents=True)
    with pytest.raises(ConfigError, match="learning_rate"):
        workdir.start(replace(base, lower), tmp_path)
    steps.stop(tmp_path / "rag_token", 7, "nll became NaN", 4)
    for field, value in (("train.batch_size", 2), ("train.optimizer.clip_norm", 0.5),
                         ("retriever_warmup.optimizer.learning_rate", 1.0)):
        (tmp_path / "retriever" / "6").mkdir(parents=True, exist_ok=True)
        with pytest.raises(ConfigError, match=field):
            workdir.start(replace(base, {field: value}), tmp_path)
    workdir.start(replace(base, lower), tmp_path)
    assert workdir.read(tmp_path) == replace(base, lower)
    (tmp_path / "rag_sequence" / "9").rename(tmp_path / "rag_sequence" / "8")  # on its way
    with pytest.raises(ConfigError, match="learning_rate"):
        workdir.start(base, tmp_path)
    (tmp_path / "rag_sequence" / "8").rename(tmp_path / "rag_sequence" / "9")
    (tmp_path / "rag_token" / "5").mkdir()  # saved with the new rate
    with pytest.raises(ConfigError, match="learning_rate"):
        workdir.start(base, tmp_path)
    (tmp_path / "rag_token" / "stopped.json").write_text("{")
    with pytest.raises(RetrievalError, match="stopped.json is damaged"):
        workdir.start(base, tmp_path)


def test_rates_of_a_training_that_has_ended_stay(tmp_path):
    base = replace(Config(), {"train.steps": 9})
    workdir.start(base, tmp_path)
    (tmp_path / "rag_token" / "9").mkdir(parents=True)
    with pytest.raises(ConfigError, match="learning_rate"):
        workdir.start(replace(base, {"train.optimizer.learning_rate": 1e-9}), tmp_path)


@pytest.mark.parametrize("head, refused", [("classification", True), ("none", False)])
def test_labels_are_the_classes_of_a_head(tmp_path, head, refused):
    base = replace(Config(), {"model.head": head, "eval.labels": ("yes", "no")})
    workdir.start(base, tmp_path)
    (tmp_path / "rag_token" / "9").mkdir(parents=True)
    other = replace(base, {"eval.labels": ("yes", "maybe")})
    with (pytest.raises(ConfigError, match="config.eval.labels: .* there")
          if refused else contextlib.nullcontext()):
        workdir.start(other, tmp_path)


@pytest.mark.parametrize("field", ["retrieval.k", "eval.k"])
def test_more_passages_than_there_are_is_met_before_any_training(field):
    """It was met when the first batch was searched for, after hours of warm-ups."""
    prepared = SimpleNamespace(stores={"2016": range(9), "2018": range(8)})

    def check(k, runs):
        check_k(SimpleNamespace(config=replace(Config(), {field: k, "runs": runs}),
                                prepared=prepared))

    check(8, ("rag_token", "closed_book"))
    check(9, ("closed_book",))
    with pytest.raises(ConfigError, match=f"config.{field}=9: 2018 has 8 passages"):
        check(9, ("closed_book", "rag_token"))


def test_a_run_keeps_settings_that_its_own_generator_alone_allows(tmp_path):
    """Its eval.json was read beside a BART's configuration, and called damaged."""
    config = replace(Config(), {"model.generator.family": "causal", "eval.prefix_mib": 10,
                                "runs": ("rag_token",)})
    workdir.start(config, tmp_path)
    workdir.begin_run(tmp_path, "rag_token", config.eval)
    assert workdir.read_run(tmp_path).eval.prefix_mib == 10
