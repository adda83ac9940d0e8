"""The configuration: overrides of every type, errors that name field and remedy, round trips."""

import dataclasses
import json
import pathlib
import shutil
import sys

import numpy as np
import pytest

from rag_jax import config as configs
from rag_jax.config import (
    BART_PRESETS,
    BERT_PRESETS,
    Config,
    ConfigError,
    ModelConfig,
    WarmupConfig,
    config_files,
    fields,
    overrides,
    towers,
)
from rag_jax.config.overrides import replace, value
from rag_jax.config.rules import check_prompt, validate

ROOT = pathlib.Path(__file__).parents[2]
CONFIG_FILES = sorted((ROOT / "configs").glob("*.py"))
OWN_DATA = {"data.passages": "p.tsv", "data.train": "t.jsonl", "data.dev": "d.jsonl"}


@pytest.mark.parametrize("module", [fields, towers])
def test_every_class_is_imported_from_the_configuration(module):
    """TransformerConfig was lost when towers got a file of their own."""
    for name, thing in vars(module).items():
        if isinstance(thing, type) and thing.__module__ == module.__name__:
            assert getattr(configs, name) is thing


@pytest.mark.parametrize("name, text, expected", [
    ("seed", "7", 7),
    ("mesh.data", "-1", -1),
    ("train.optimizer.learning_rate", "3e-5", 3e-5),
    ("train.optimizer.learning_rate", "1", 1.0),
    ("tensorboard", "false", False),
    ("tensorboard", "True", True),
    ("model.generator.scan_layers", "1", True),
    ("model.generator.scan_layers", "0", False),
    ("retrieval.num_leaves", "none", None),
    ("retrieval.num_leaves", "None", None),
    ("retrieval.num_leaves", "12", 12),
    ("train.query_encoder_rate", "none", None),
    ("train.query_encoder_rate", "0.5", 0.5),
    ("retrieval.where", "device", "device"),
    ("model.retriever.remat", "none", "none"),  # a choice, not a missing value
    ("runs", "rag_token,frozen", ("rag_token", "frozen")),
    ("runs", "frozen", ("frozen",)),
    ("eval.labels", "Ulm, Bern ,", ("Ulm", "Bern")),
    ("runs", "", ()),
    ("data.passages", "none", "none"),  # a path may be called so
    ("data.passages", "", ""),
])
def test_an_override_becomes_the_type_of_its_field(name, text, expected):
    """A "false" kept as text is true; a "none" kept as text is a path."""
    found = value(replace(Config(), {name: text}), name)
    assert found == expected and type(found) is type(expected)


@pytest.mark.parametrize("name, text, told", [
    ("seed", "x", "config.seed='x': expected int"),
    ("seed", "1.5", "config.seed='1.5': expected int"),
    ("train.optimizer.b1", "fast", "config.train.optimizer.b1='fast': expected float"),
    ("tensorboard", "yes", "config.tensorboard='yes': expected bool (true or false)"),
    ("retrieval.num_leaves", "auto", "config.retrieval.num_leaves='auto': expected int|none"),
    ("retrieval.retriever", "bm-25", "expected dpr|bm25|hybrid (did you mean bm25?)"),
    ("model.generator.dtype", "int8", "expected float32|bfloat16"),
])
def test_text_of_another_type_is_refused_with_field_value_and_type(name, text, told):
    with pytest.raises(ConfigError) as error:
        replace(Config(), {name: text})
    assert told in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name, told", [
    ("trian", "config.trian: no such field; did you mean train"),
    ("train.step", "config.train.step: no such field; did you mean steps"),
    ("train.optimizer.learning_rat", "config.train.optimizer.learning_rat: no such field; "
     "did you mean learning_rate"),
    ("model.generator.heds", "config.model.generator.heds: no such field; did you mean heads"),
    ("mesh.qqqq", "config.mesh.qqqq: no such field; known: data, fsdp, model"),
    ("train.learning_rate", "config.train.learning_rate: no such field; did you mean "
     "config.train.optimizer.learning_rate?"),
    ("retrieval.num_beams", "no such field; did you mean config.eval.num_beams?"),
    ("eval.beams", "config.eval.beams: no such field; did you mean num_beams or labels"),
    ("optimizer.learning_rate", "config.optimizer: no such field; did you mean "
     "config.train.optimizer.learning_rate or config."),
    ("config.train.steps", "config.config: no such field; leave out 'config.'"),
    ("seed.x", "config.seed is a single value and has no field 'x'"),
    ("model.kind", "config.model.kind: no field any more: the run decides it; set config.runs"),
    ("retriever_warmup.mask_ratio", "it did nothing there; set config.generator_warmup.mask_ratio"),
    ("generator_warmup.hard_negatives", "set config.retriever_warmup.hard_negatives"),
])
def test_an_unknown_field_names_its_place_and_near_matches(name, told):
    with pytest.raises(ConfigError) as error:
        replace(Config(), {name: "1"})
    assert told in str(error.value) and "\n" not in str(error.value)


def test_an_override_changes_its_field_alone():
    changed = replace(Config(), {"train.optimizer.eps": "0.5"})
    before, after = (dataclasses.asdict(c) for c in (Config(), changed))
    assert after["train"]["optimizer"].pop("eps") == 0.5
    before["train"]["optimizer"].pop("eps")
    assert before == after


def test_a_section_can_be_given_as_a_dictionary_of_fields():
    """Its other fields were those of the default, or the dictionary was taken for the section."""
    config = replace(Config(), {"train.steps": "3", "train": {"keep": "9", "optimizer": {"b1": 0}}})
    assert (config.train.steps, config.train.keep, config.train.optimizer.b1) == (3, 9, 0)
    with pytest.raises(ConfigError, match="config.train.optimizer.b9: no such field"):
        replace(Config(), {"train": {"optimizer": {"b9": 0}}})


@pytest.mark.parametrize("section, presets", [("retriever", BERT_PRESETS),
                                              ("generator", BART_PRESETS)])
def test_a_tower_can_be_set_to_a_preset_and_changed_further(section, presets):
    for name, preset in presets.items():
        config = replace(Config(), {f"model.{section}": name, f"model.{section}.dropout": "0.25"})
        assert getattr(config.model, section) == dataclasses.replace(preset, dropout=0.25)


def test_every_preset_is_a_valid_tower():
    for section, presets in (("retriever", BERT_PRESETS), ("generator", BART_PRESETS)):
        for name in presets:
            validate(replace(Config(), {f"model.{section}": name}))


def test_presets_have_the_published_sizes():
    large = BART_PRESETS["bart-large"]
    assert (large.width, large.encoder_layers, large.heads, large.mlp_width) == (1024, 12, 16, 4096)
    base = BART_PRESETS["bart-base"]
    assert (base.vocab_size, base.width, base.decoder_layers) == (50265, 768, 6)
    bert = BERT_PRESETS["bert-base"]
    assert (bert.vocab_size, bert.width, bert.layers, bert.layer_norm_eps) == (
        30522, 768, 12, 1e-12)


@pytest.mark.parametrize("name, text, told", [
    ("model.generator", "bart-lagre", "bart-large"),
    ("model.retriever", "bart-base", "bert-base"),
    ("train", "5", "config.train='5': a section; set its fields (config.train.NAME=...)"),
])
def test_a_section_set_to_something_else_is_refused(name, text, told):
    with pytest.raises(ConfigError, match=f"^config.{name}=") as error:
        replace(Config(), {name: text})
    assert told in str(error.value)


@pytest.mark.parametrize("name, given, expected", [
    ("runs", ["rag_token"], ("rag_token",)), ("runs", np.array(["rag_token"]), ("rag_token",)),
    ("eval.num_beams", np.int64(2), 2), ("eval.length_penalty", np.float32(0.5), 0.5),
    ("tensorboard", np.bool_(False), False), ("data.data_dir", pathlib.Path("a/b"), "a/b"),
    ("eval.strategy", np.str_("fast"), "fast"),
])
def test_what_notebooks_have_is_taken_as_what_it_means(name, given, expected):
    """Lists, numpy's numbers and paths were "expected str,..."."""
    found = value(validate(replace(Config(), {name: given})), name)
    assert found == expected and type(found) is type(expected)


@pytest.mark.parametrize("changes, told", [
    ({"seed": 1.5}, "config.seed=1.5: expected int"),
    ({"seed": True}, "config.seed=True: expected int"),
    ({"seed": None}, "config.seed=None: expected int"),
    ({"tensorboard": 1}, "config.tensorboard=1: expected bool"),
    ({"train.optimizer.b1": True}, "config.train.optimizer.b1=True: expected float"),
    ({"runs": [2]}, "config.runs=(2,): expected str,..."),
    ({"runs": (1,)}, "config.runs=(1,): expected str,..."),
    ({"retrieval.num_leaves": 0.5}, "config.retrieval.num_leaves=0.5: expected int|none"),
    ({"data.passages": None}, "config.data.passages=None: expected str"),
    ({"model.generator.family": ["x"]},
     "config.model.generator.family=['x']: expected bart|t5|causal"),
    ({"eval": ["num_beams"]}, "config.eval=['num_beams']: a section; set its fields (config.eval."
     "NAME=...) or be one of paper-qa-token, paper-qa-sequence, paper-generation"),
    ({"train": {1}}, "config.train={1}: a section; set its fields (config.train.NAME=...)"),
])
def test_a_python_value_of_another_type_is_refused(changes, told):
    """Config files are python: what they set does not pass through the parser."""
    with pytest.raises(ConfigError) as error:
        validate(replace(Config(), changes))
    assert str(error.value) == told


@pytest.mark.parametrize("config, told", [
    (Config(retriever_warmup=WarmupConfig()),
     "config.retriever_warmup: a WarmupConfig; expected "
     "RetrieverWarmupConfig(...)"),
    (Config(model=ModelConfig(generator=BERT_PRESETS["tiny"])),
     "config.model.generator: a BertConfig; expected GeneratorConfig(...)"),
    (Config(train=None), "config.train: a NoneType; expected TrainConfig"),
])
def test_the_section_of_another_is_refused(config, told):
    """A config file of before the stages had fields of their own ended as a defect of ours."""
    with pytest.raises(ConfigError) as error:
        validate(config)
    assert told in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name, text, told", [
    ("seed", "-1", "config.seed=-1: must be at least 0"),
    ("seed", str(2**32), "config.seed=4294967296: must be below 2**32"),
    ("eval.length_penalty", "nan", "config.eval.length_penalty=nan: must be a finite number"),
    ("model.retriever.scale", "inf", "config.model.retriever.scale=inf: must be a finite number"),
    ("eval.num_beams", "99999999999", "config.eval.num_beams=99999999999: must be at most 10000"),
    ("mesh.model", "-2", "config.mesh.model=-2: must be at least -1"),
    ("train.batch_size", "0", "config.train.batch_size=0: must be at least 1"),
    ("retrieval.recall_target", "0", "config.retrieval.recall_target=0.0: must be at least 0.01"),
    ("retrieval.num_leaves", "0", "config.retrieval.num_leaves=0: must be at least 1"),
    ("model.retriever.heads", "0", "config.model.retriever.heads=0: must be at least 1"),
    ("train.optimizer.learning_rate", "nan", "learning_rate=nan: must be a finite number"),
    ("train.optimizer.eps", "1e300", "eps=1e+300: must be a finite number of float32"),
    ("data.generator_vocab", "1000000000", "generator_vocab=1000000000: must be at most 10000000"),
    ("data.retriever_vocab", "1000000000", "retriever_vocab=1000000000: must be at most 10000000"),
    ("retriever_warmup.hard_negatives", "1001", "hard_negatives=1001: must be at most 1000"),
    ("retrieval.reorder", "2147483648", "reorder=2147483648: must be at most 2147483647"),
    ("generator_warmup.mask_ratio", "1.5", "mask_ratio=1.5: must be at most 1"),
    ("model.generator.dropout", "30", "config.model.generator.dropout=30.0: must be at most 1"),
    # It was refused after hours of warm-ups, and the workdir then took no other.
    ("retrieval.bm25_k1", "1e7", "config.retrieval.bm25_k1=10000000.0: must be at most"),
    ("train.label_smoothing", "2", "config.train.label_smoothing=2.0: must be at most 1"),
    ("eval.length_penalty", "-6", "config.eval.length_penalty=-6.0: must be at least -5"),
])
def test_a_value_out_of_bounds_is_refused(name, text, told):
    with pytest.raises(ConfigError) as error:
        validate(replace(Config(), {name: text}))
    assert told in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("changes", [
    {"train.label_smoothing": 0}, {"generator_warmup.mask_ratio": 1}, {"retrieval.k": 0},
    {"train.query_encoder_rate": None}, {"retrieval.num_leaves": None}, OWN_DATA,
    {"runs": tuple(configs.RUNS), "model.null_document": "bias", "train.collapse_guard": "stop",
     "train.retriever_objective": "pdist"},
    {"runs": ("fid_joint", "frozen", "bm25"), "train.retriever_objective": "adist"},
    {"train.generator_rate": None, "train.retriever_objective": "pdist"},
    {"eval.length_penalty": -5.0},
    {"model.generator.family": "t5", "model.generator.relative_distance": 17},
    {"runs": ("rag_token", "frozen", "bm25", "closed_book"), "retrieval.retriever": "hybrid",
     "train.bm25_weight_rate": 10.0},
    {"runs": ("bm25",), "retrieval.where": "device"},
    {"runs": ("fid",), "model.null_document": "bias"},
    {"model.head": "classification", "eval.labels": ("yes", "no")},
    {"model.head": "label_token", "eval.labels": ("yes", "no")},
    {"train.generator_rate": None, "train.collapse_guard": "freeze", "model.null_document": "mlp"},
])
def test_the_ends_of_the_bounds_and_none_are_allowed(changes):
    validate(replace(Config(), changes))


def test_a_null_document_is_one_to_tell_from_a_passage():
    validate(replace(Config(), {"model.null_document": "mlp", "retrieval.k": 1,
                                "train.retriever_objective": "loop"}), trains=True)


@pytest.mark.parametrize("changes, told", [
    ({"model.generator.heads": 5}, "config.model.generator.heads=5: must divide "
     "config.model.generator.width=768"),
    ({"model.retriever.width": 100}, "must divide config.model.retriever.width=100"),
    ({"runs": ("rag_tokens",)}, "config.runs: no run 'rag_tokens'; did you mean rag_token"),
    ({"runs": ()}, "config.runs: name at least one run"),
    ({"runs": ("frozen", "frozen")}, "config.runs: name at least one run, each once"),
    ({"data.train": "t.jsonl"}, "config.data.train is set but config.data.passages is empty"),
    ({**OWN_DATA, "data.dev": ""}, "config.data.passages is set but config.data.dev is empty"),
    ({"data.test": "t.jsonl"}, "config.data.test is set but config.data.passages is empty"),
    ({"data.max_question_length": 513},
     "config.data.max_question_length=513: the model has 512 positions"),
    ({"data.max_passage_length": 600}, "config.data.max_passage_length=600: the model has 512"),
    ({"data.max_source_length": 1025}, "config.data.max_source_length=1025: the model has 1024"),
    ({"model.generator.max_positions": 20, "data.max_source_length": 20},
     "config.data.max_target_length=32: the model has 20 positions"),
    ({"model.generator.family": "t5", "model.generator.relative_distance": 16},
     "config.model.generator.relative_distance=16: must be more than half of config.model.generator"
     ".relative_buckets=32"),
    ({"model.retriever.model_type": "modernbert", "model.retriever.heads": 256,
      "model.retriever.scan_layers": False}, "config.model.retriever.heads=256: heads of a Modern"),
    ({"model.generator.family": "causal", "model.generator.max_positions": 300,
      "model.head": "classification", "eval.labels": ("yes", "no"), "data.max_target_length": 8},
     "config.data.max_source_length=256 and max_question_length=64: the question continues the"),
    ({"model.generator.family": "causal", "model.generator.max_positions": 280,
      "model.head": "classification", "eval.labels": ("yes", "no"), "data.max_question_length": 8},
     "config.data.max_source_length=256 and max_target_length=32: the answer continues the prompt"),
    ({"model.generator.family": "causal", "model.generator.max_positions": 280},
     "config.data.max_source_length=256 and max_target_length=32: the answer continues the prompt"),
    ({"model.head": "classification", "eval.labels": ("yes",)},
     "config.eval.labels: config.model.head=classification chooses among them; name the classes"),
    ({"model.head": "label_token"}, "config.eval.labels: config.model.head=label_token chooses"),
    ({"model.head": "classification", "eval.labels": ("yes", "no"), "data.max_source_length": 50,
      "data.max_target_length": 9, "model.generator.max_positions": 50},
     "config.data.max_question_length=64: the model has 50 positions"),
    ({"retriever_warmup.optimizer.accumulate": 2},
     "config.retriever_warmup.optimizer.accumulate: the passages of a batch"),
    ({"generator_warmup.batch_size": 10, "generator_warmup.optimizer.accumulate": 4},
     "config.generator_warmup.batch_size=10: must be a multiple of optimizer.accumulate=4"),
    ({"train.batch_size": 10, "train.optimizer.accumulate": 4},
     "config.train.batch_size=10: must be a multiple of optimizer.accumulate=4"),
    ({"retrieval.retriever": "bm25", "runs": ("rag_token", "bm25")},
     "config.retrieval.retriever=bm25: run 'rag_token' has no query encoder to train; name the "
     "run bm25 or bm25_sequence"),
    ({"retrieval.retriever": "bm25", "retrieval.where": "device",
      "train.query_encoder_rate": None}, "words are searched on the host"),
    ({"model.null_document": "mlp", "runs": ("rag_token", "bm25")},
     "config.model.null_document=mlp: run 'bm25' retrieves by BM25 and has no query vector"),
    ({"model.null_document": "bias", "retrieval.k": 0, "runs": ("rag_token", "rag_sequence")},
     "config.model.null_document=bias: without passages"),
    ({"train.bm25_weight_rate": 1.0}, "config.train.bm25_weight_rate=1: what is learned is w of "
     "config.retrieval.retriever=hybrid and fusion=convex"),
    ({"train.bm25_weight_rate": 1.0, "retrieval.retriever": "hybrid",
      "retrieval.fusion": "reciprocal_rank"}, "config.train.bm25_weight_rate=1: what is learned"),
    ({"train.bm25_weight_rate": 1.0, "retrieval.retriever": "hybrid", "retrieval.bm25_weight": 1.0},
     "from a bm25_weight above 0 and below 1 on; set these, or none"),
    ({"train.collapse_guard": "freeze", "train.generator_rate": None},
     "config.train.collapse_guard=freeze: with config.train.generator_rate=none nothing"),
    ({"runs": ("rag_token", "fid_joint"), "train.retriever_objective": "adist"},
     "config.train.retriever_objective=adist: run 'rag_token' decodes with each passage alone"),
    ({"runs": ("fid_joint",), "train.retriever_objective": "adist",
      "model.generator.family": "causal"},
     "config.train.retriever_objective=adist: run 'fid_joint' has a decoder-only generator"),
    ({"train.retriever_objective": "pdist", "train.query_encoder_rate": None},
     "config.train.retriever_objective=pdist: run 'rag_token' has no encoder that trains"),
    ({"model.generator.param_dtype": "bfloat16"}, "config.model.generator.param_dtype=bfloat16: "
     "what is multiplied in float32 would be rounded; set config.model.generator.dtype=bfloat16"),
    ({"eval.prefix_mib": 64}, "config.eval.prefix_mib=64: what is kept of a passage must not"),
    ({"model.generator.family": "causal", "model.generator.rope_factor": 0.0},
     "config.model.generator.rope_factor=0.0, config.model.generator.rope_low=1.0"),
    *(({name: text}, f"config.{name}='\\udcff': is not UTF-8") for name, text in (
        ("data.prompt", "\udcff"), ("eval.prefix", "\udcff"), ("eval.labels", ("a", "\udcff")),
        ("eval.bad_words", ("\udcff",)), ("model.retriever.query_prefix", "\udcff"),
        ("model.retriever.passage_prefix", "\udcff"))),
])
def test_fields_that_contradict_each_other_are_refused(changes, told):
    with pytest.raises(ConfigError) as error:
        validate(replace(Config(), changes))
    assert told in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("changes, told", [
    ({"runs": ("fid_joint",)}, "config.train.retriever_objective=marginal: run 'fid_joint' sums no "
     "documents out, so its likelihood says nothing of the retriever; set adist, pdist, emdr2 or"),
    ({"train.retriever_objective": "emdr2", "retrieval.retriever": "hybrid",
      "retrieval.fusion": "reciprocal_rank"},
     "config.train.retriever_objective=emdr2: run 'rag_token' has no encoder that trains: the "
     "ranks of config.retrieval.fusion=reciprocal_rank have no gradient; set fusion=convex"),
    ({"train.retriever_objective": "loop", "retrieval.k": 1},
     "config.train.retriever_objective=loop: run 'rag_token' has one passage at most")])
def test_what_an_objective_needs_is_asked_for_where_it_trains(changes, told):
    """A run that was trained by it could not be asked otherwise."""
    config = replace(Config(), changes)
    with pytest.raises(ConfigError) as error:
        validate(config, trains=True)
    assert told in str(error.value) and "\n" not in str(error.value)
    assert validate(config) == config


def test_a_decay_that_takes_all_parameters_away_is_refused_where_it_trains():
    config = replace(Config(), {"retriever_warmup.optimizer.learning_rate": 0.01,
                                "retriever_warmup.optimizer.weight_decay": 100.0})
    with pytest.raises(ConfigError, match="config.retriever_warmup.optimizer.weight_decay=100.0: "
                       "with learning_rate=0.01"):
        validate(config, trains=True)
    assert validate(config) == config, "it can be opened"
    validate(replace(config, {"retriever_warmup.steps": 0}), trains=True)


@pytest.mark.parametrize("changes", [
    {}, {"retrieval.where": "device", "retrieval.k": 0},
    {"retrieval.retriever": "hybrid"}])
def test_a_document_encoder_trains_on_the_devices_and_answers_anywhere(changes):
    """A run that was trained so could be searched by words only with one of its own settings
    changed, which its own checkpoint refuses."""
    config = replace(Config(), {"train.document_encoder": "refresh", **changes})
    assert validate(config) == config
    with pytest.raises(ConfigError, match="the passages are embedded again on the devices; set "
                       "config.retrieval.where=device and config.retrieval.k above 0, or "):
        validate(config, trains=True)


def test_what_a_step_does_with_stale_passages_is_no_matter_to_answers():
    config = replace(Config(), {"retrieval.where": "device", "retrieval.staleness": 1})
    assert validate(config) == config
    with pytest.raises(ConfigError, match="config.retrieval.staleness=1: with config.retrieval.whe"
                       "re=device the step retrieves"):
        validate(config, trains=True)


@pytest.mark.parametrize("changes, read", [
    ({}, False), ({"data.source_format": "question_first"}, False),
    ({"data.source_format": "prompt"}, True), ({"model.generator.family": "causal"}, True),
    ({"model.generator.family": "causal", "data.source_format": "question_kept"}, False),
    ({"model.generator.pretrained": "its/config.json/says"}, True),
])
def test_a_prompt_is_refused_where_none_will_be_read(changes, read):
    """It was ignored, and so was what it asked for."""
    config = replace(Config(), {"data.prompt": "{passage} Q: {question} A:", **changes})
    assert validate(config) == config, "a workdir of an earlier version may have one"
    assert validate(config, trains=True) == config, "it may be trained on, too"
    if read:
        check_prompt(config)
        return
    with pytest.raises(ConfigError, match="config.data.prompt='{passage} Q: .*: none is read with "
                       f"config.data.source_format={config.data.source_format}; set"):
        check_prompt(config)


def test_without_passages_a_closed_book_trains_alone():
    """Others were warmed up, and then ended in an error of ours."""
    validate(replace(Config(), {"runs": ("closed_book",), "retrieval.k": 0}), trains=True)
    with pytest.raises(ConfigError, match="config.retrieval.k=0: run 'frozen' reads passages"):
        validate(replace(Config(), {"runs": ("frozen",), "retrieval.k": 0}), trains=True)


@pytest.mark.parametrize("changes, told", [
    ({"runs": ("rag_token", "fid")}, "run 'fid', whose config.train.query_encoder_rate is none"),
    ({"train.query_encoder_rate": None}, "run 'rag_token', whose config.train.query_encoder_rate"),
    ({"retrieval.retriever": "hybrid", "retrieval.fusion": "reciprocal_rank"}, "run 'rag_token', "
     "for the ranks of config.retrieval.fusion=reciprocal_rank have no gradient; set")])
def test_a_run_that_trains_nothing_is_refused_before_any_stage_begins(changes, told):
    """It was refused after both warm-ups and the index, by a rate that was set."""
    config = replace(Config(), {"train.generator_rate": None, **changes})
    with pytest.raises(ConfigError, match=f"=none: nothing is left to train in {told}"):
        validate(config, trains=True)
    validate(config)  # to answer
    validate(replace(config, {"train.steps": 0}), trains=True)  # as the weights are
    validate(replace(config, {"train.generator_rate": 1.0}), trains=True)


def test_positions_of_an_encoder_that_no_run_reads_are_not_checked():
    longer = replace(Config(), {"data.max_passage_length": 1024})
    validate(replace(longer, {"runs": ("bm25",)}))
    with pytest.raises(ConfigError, match="config.data.max_passage_length=1024: the model has 512"):
        validate(longer)


@pytest.mark.parametrize("changes", [
    {}, {"model.null_document": "bias", "train.query_encoder_rate": None},
    {"model.head": "classification", "eval.labels": ("yes", "no"), "runs": ("frozen",)},
    {"train.query_encoder_rate": None, "retrieval.retriever": "hybrid",
     "train.bm25_weight_rate": 1.0},
    {"train.query_encoder_rate": None, "train.document_encoder": "refresh",
     "retrieval.where": "device"}])
def test_a_run_whose_generator_is_frozen_may_train_what_else_there_is(changes):
    validate(replace(Config(), {"train.generator_rate": None, **changes}), trains=True)


def test_everything_that_is_wrong_is_told_at_once():
    with pytest.raises(ConfigError) as error:
        validate(replace(Config(), {"seed": -1, "train.steps": -1, "mesh.data": 1.5}))
    assert len(str(error.value).splitlines()) == 3


def test_no_field_lacks_help_or_has_a_default_of_another_type():
    for name, field in overrides.fields().items():
        assert field.metadata["doc"] and overrides.type_name(field.type), name
        assert replace(Config(), {name: field.default}) is not None
    validate(Config())


def test_json_round_trip_keeps_every_value_and_type():
    changed = {"runs": ("frozen", "closed_book"), "retrieval.num_leaves": 3, "tensorboard": False,
               "train.query_encoder_rate": None, "model.generator": "tiny",
               "train.optimizer.learning_rate": 1e-7, "data.data_dir": "ü/none"}
    config = replace(Config(), changed)
    assert config_files.from_json(config_files.to_json(config)) == config
    assert config_files.from_json(config_files.to_json(Config())) == Config()


def test_none_of_an_open_text_is_no_text():
    """Every question began with the word none, where the prompts of a folder were meant."""
    config = replace(Config(), {"model.retriever.query_prefix": "none",
                                "model.retriever.passage_prefix": "nones"})
    assert config.model.retriever.query_prefix is None
    assert config.model.retriever.passage_prefix == "nones"


def test_json_with_an_unknown_or_a_wrong_field_is_refused():
    tree = json.loads(config_files.to_json(Config()))
    with pytest.raises(ConfigError, match="config.train.stepps: no such field; did you mean steps"):
        config_files.from_json(json.dumps({**tree, "train": {"stepps": 1}}))
    with pytest.raises(ConfigError, match="config.seed=-1"):
        config_files.from_json(json.dumps({**tree, "seed": -1}))


def test_json_of_an_earlier_version_opens_without_the_fields_that_are_gone():
    tree = json.loads(config_files.to_json(replace(Config(), {"runs": ("rag_sequence",)})))
    tree["model"]["kind"] = "token"
    tree["retriever_warmup"] |= {"mask_ratio": 0.9, "span_length": 1, "permute_sentences": 0}
    tree["generator_warmup"]["hard_negatives"] = 3
    config = config_files.from_json(json.dumps(tree))
    assert config.kind == "sequence" and config == replace(Config(), {"runs": ("rag_sequence",)})


def test_a_workdir_from_before_answers_taught_otherwise_goes_on_as_it_was():
    """Its retriever would from then on learn by another loss and in other steps, unsaid."""
    tree = json.loads(config_files.to_json(Config()))
    del tree["train"]["full_information"], tree["train"]["in_batch_negatives"]
    train = config_files.from_json(json.dumps(tree)).train
    assert train.full_information == 0 and train.in_batch_negatives is False


@pytest.mark.parametrize("run, made", configs.RUNS.items())
def test_a_run_changes_its_own_fields_alone(run, made):
    """Its name and kind, too, are said by its configuration: the same function leaves it alone."""
    whole = replace(Config(), {"runs": tuple(configs.RUNS)})
    config = overrides.for_run(whole, run)
    assert all(value(config, name) == new for name, new in made.sets.items())
    assert replace(config, {n: value(whole, n) for n in (*made.sets, "runs")}) == whole
    assert config.kind == made.kind and overrides.for_run(config, run) == config


def test_the_configuration_of_a_run_is_not_that_of_another():
    """Opened as rag_sequence it decoded as RAG-Token."""
    token = overrides.for_run(replace(Config(), {"runs": ("rag_token", "frozen")}), "rag_token")
    with pytest.raises(ConfigError, match="config.runs=rag_token: run 'frozen' is not one of them"):
        overrides.for_run(token, "frozen")


@pytest.mark.parametrize("run", configs.RUNS)
def test_every_run_can_be_trained(run):
    """Also where the document encoder trains, and by a classification head; Fusion-in-Decoder's
    retriever by one of the objectives that it has."""
    objective = {"train.retriever_objective": "pdist"} if run == "fid_joint" else {}
    refresh = {"train.document_encoder": "refresh", "retrieval.where": "device"}
    head = {"model.head": "classification", "eval.labels": ("yes", "no")}
    for changes in (objective, {**objective, **refresh}, {**objective, **head}):
        validate(overrides.for_run(replace(Config(), {**changes, "runs": (run,)}), run))


@pytest.mark.parametrize("file", CONFIG_FILES, ids=lambda file: file.name)
def test_every_config_file_loads_and_can_be_run(file):
    cell = ":table1/nq/rag_token" if file.name == "paper.py" else ""
    config = config_files.load_file(f"{file}{cell}")
    if file.name == "own_data.py":
        config = replace(config, OWN_DATA)
    validate(config)
    assert config_files.from_json(config_files.to_json(config)) == config


def test_there_are_config_files():
    assert {"quickstart.py", "own_data.py"} <= {file.name for file in CONFIG_FILES}


def written(tmp_path, body, name="mine.py"):
    file = tmp_path / name
    file.write_text("from rag_jax.config import *\n" + body)
    return str(file)


def test_an_argument_after_the_path_reaches_get_config(tmp_path):
    file = written(tmp_path, "def get_config(name='3'): return Config(seed=int(name))\n")
    assert config_files.load_file(file).seed == 3
    assert config_files.load_file(f"{file}:8").seed == 8
    folder = tmp_path / "2026-11-27T05:20"  # of a run, by its time; it was "no such file"
    folder.mkdir()
    shutil.copy(file, folder)
    for argument, seed in (("", 3), (":8", 8)):
        assert config_files.load_file(f"{folder}/mine.py{argument}").seed == seed


def test_a_config_may_have_a_dataclass_whose_types_are_strings(tmp_path, monkeypatch):
    """dataclasses look for their names in a module that was gone when get_config was called."""
    body = """import dataclasses
from rag_jax.config.config_files import load_file
def get_config():
    {}
    @dataclasses.dataclass
    class Mine:
        seed: "int" = 3
    return Config(seed=Mine().seed)
"""
    before, file = set(sys.modules), written(tmp_path, body.format(""))
    reads = written(tmp_path, body.format(f"load_file({file!r})"), "reads.py")
    monkeypatch.chdir(tmp_path)
    assert config_files.load_file("mine.py").seed == config_files.load_file(reads).seed == 3
    assert set(sys.modules) == before


@pytest.mark.parametrize("name, body, argument, told", [
    ("mine.py", "x = 1\n", "", "the file defines no get_config()"),
    ("mine.py", "def get_config(): return {}\n", "", "must return a rag_jax.config.Config"),
    ("mine.py", "def get_config(): return Config()\n", ":big", "takes no argument; drop ':big'"),
    ("mine.txt", "def get_config(): return Config()\n", "", "ends in .py"),
])
def test_a_file_that_is_no_config_is_refused(tmp_path, name, body, argument, told):
    path = written(tmp_path, body, name) + argument
    with pytest.raises(ConfigError) as error:
        config_files.load_file(path)
    assert path in str(error.value) and told in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_file_is_named():
    """For nope.py, paper.py was suggested: "configs/" and ".py" counted as alike."""
    for name in ("configs/nowhere.py", "configs/nope.py"):
        with pytest.raises(ConfigError, match=f"--config={name}: no such file .*; known: configs/"):
            config_files.load_file(name)
    with pytest.raises(ConfigError, match="; did you mean configs/own_data.py[?]$"):
        config_files.load_file("own-data.py:argument")


def test_a_shipped_file_is_found_from_any_folder_unless_there_is_one_of_its_name(
        tmp_path, monkeypatch):
    """README's names are those of a checkout; an installed program runs elsewhere."""
    monkeypatch.chdir(tmp_path)
    config = config_files.load_file("configs/quickstart.py")
    assert config == config_files.load_file(str(ROOT / "configs" / "quickstart.py"))
    assert config_files.load_file("configs/paper.py:nq/frozen").runs == ("frozen",)
    with pytest.raises(ConfigError, match="configs/quikstart.py: no such file here, .* did you "
                       "mean configs/quickstart.py"):
        config_files.load_file("configs/quikstart.py")
    with pytest.raises(ConfigError, match="a: no such file here"):
        config_files.load_file("a" * 300)
    (tmp_path / "configs").mkdir()
    written(tmp_path / "configs", "def get_config(): return Config(seed=77)\n", "quickstart.py")
    assert config_files.load_file("configs/quickstart.py").seed == 77


def test_runs_by_words_need_no_document_encoder():
    """BM25 with a released RAG checkpoint demanded the encoder that nothing would read."""
    rag = replace(Config(), {"model.rag.pretrained": "some/rag"})
    assert validate(replace(rag, {"runs": ("bm25", "bm25_sequence")}))
    for runs in (("rag_token",), ("bm25", "rag_token"), ("bm25", "nonsense")):
        with pytest.raises(ConfigError):
            validate(replace(rag, {"runs": runs}))
