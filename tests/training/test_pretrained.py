"""Pretrained towers named in a configuration: architecture, weights, tokenizers."""

import dataclasses
import json
import pathlib
import shutil
import types

import jax
import numpy as np
import pytest
import tiny

from rag_jax import conversion, hosts, parallel
from rag_jax.api import build_index, load
from rag_jax.config import BartConfig, Config, ConfigError, DataConfig, T5Config, overrides, rules
from rag_jax.data.text import Tokenizer
from rag_jax.data.tokenizer_training import train_bart_tokenizer, train_bert_tokenizer
from rag_jax.hub import load as hub
from rag_jax.hub.config_json import Architecture, SpecialIds
from rag_jax.hub.families import FAMILIES
from rag_jax.hub.generator_inputs import (
    FID_INPUTS,
    OUR_INPUTS,
    OWN,
    RELEASED_INPUTS,
    inputs,
    inputs_json,
)
from rag_jax.hub.save import save
from rag_jax.models.generator import in_dtype
from rag_jax.retrieval.protocol import Passage, RetrievalError
from rag_jax.training import pretrained, workdir
from rag_jax.training.answer_settings import decoding_settings
from rag_jax.training.run import open_job, train

TEXTS = ["What is the capital of Peru?", "Lima is the capital of Peru, and Paris of France."]
PASSAGES = "id\ttitle\ttext\n1\tPeru\tLima is the capital of Peru.\n2\tFrance\tParis is that.\n"
QUESTION = {"question": "What is the capital of Peru?", "answers": ["Lima"], "positive_ids": ["1"]}
WORDS, PIECES = train_bert_tokenizer(TEXTS, 100), train_bart_tokenizer(TEXTS, 300)
TOKENIZERS = {"query_encoder": WORDS, "document_encoder": WORDS, "bert": WORDS,
              "generator": PIECES}
RETRIEVER = {"vocab_size": WORDS.vocab_size, "max_positions": 48, "layers": 2}
MODEL = tiny.rag_model("token", RETRIEVER, {"vocab_size": PIECES.vocab_size, "max_positions": 96})


@pytest.fixture(scope="module")
def params():
    found = tiny.rag_params(MODEL)
    return {**found, "bert": tiny.rag_params(MODEL, seed=9)["query_encoder"]}


@pytest.fixture(scope="module")
def sources(tmp_path_factory, params):
    """Folders of RAG, both DPR encoders and a plain BERT, and the converted RAG."""
    root = tmp_path_factory.mktemp("sources")
    for name, family in (("rag", "RagTokenForGeneration"), ("question", "DPRQuestionEncoder"),
                         ("context", "DPRContextEncoder"), ("bert", "BertModel")):
        save(root / name, family, params, Architecture(MODEL.retriever, MODEL.generator),
             tokenizers=TOKENIZERS)
    conversion.convert(str(root / "rag"), str(root / "converted"))
    return {path.name: str(path) for path in root.iterdir()}


def test_a_source_without_a_tokenizer_is_refused_where_a_tower_reads_with_it(tmp_path, params):
    """A tokenizer was trained on the passages: each row of the checkpoint's token table became that
    of another word, and nothing was said."""
    for name, family in (("bert", "BertModel"), ("bart", "BartForConditionalGeneration")):
        save(tmp_path / name, family, params, Architecture(MODEL.retriever, MODEL.generator))
    bare = overrides.replace(Config(), {"model.retriever.pretrained": str(tmp_path / "bert"),
                                        "model.generator.pretrained": str(tmp_path / "bart")})
    for tower, field in (("query_encoder", "retriever"), ("generator", "generator")):
        with pytest.raises(ConfigError, match=f"no tokenizer; .*config.data.{field}_tokenizer"):
            pretrained.tokenizer_folder(bare, tower)
        assert pretrained.tokenizer_folder(bare, tower, required=False) is None, "it has its own"
    words = overrides.replace(bare, {"runs": ("bm25",)})
    assert pretrained.tokenizer_folder(words, "query_encoder") is None, "it is not read"


def config(sources, lengths=(24, 32, 64, 8), **named):
    names = ("max_question_length", "max_passage_length", "max_source_length", "max_target_length")
    base = Config(data=DataConfig(**dict(zip(names, lengths, strict=True)), length_buckets=64),
                  tensorboard=False)
    return rules.validate(overrides.replace(base, {
        f"model.{section}.pretrained": sources[name] for section, name in named.items()}))


def test_processes_that_read_different_files_of_a_source_are_refused(sources, monkeypatch):
    """Their commands and weights were the same: they trained with different prompts, and one took
    the other's index away."""
    asked = config(sources, rag="rag", document_encoder="context")
    assert pretrained.resolve(asked).model.retriever.query_prefix is None
    monkeypatch.setattr(hosts, "connected", lambda: True)
    monkeypatch.setattr(hosts, "exchange", lambda value: [value, value and {
        **value, "--config.model.retriever.query_prefix": "query: "}])
    with pytest.raises(ConfigError, match="different values of --config.model.retriever.query_pre"):
        pretrained.resolve(asked)


def test_the_architecture_is_taken_over_and_how_to_compute_is_kept(sources):
    asked = overrides.replace(config(sources, rag="rag", document_encoder="context"), {
        "model.generator.dtype": "bfloat16", "model.retriever.dropout": "0.3"})
    found = pretrained.resolve(asked).model
    assert dataclasses.replace(found.retriever, dropout=0.0) == dataclasses.replace(
        MODEL.retriever, init_std=found.retriever.init_std, attention_dropout=0.1)
    assert found.retriever.dropout == 0.3 and found.generator.dtype == "bfloat16"
    assert (found.generator.width, found.generator.max_positions) == (16, 96)


@pytest.mark.parametrize("generator, usual", [
    (BartConfig(vocab_size=320), (0.1, 0.0, 0.0)), (T5Config(vocab_size=320), (0.1, 0.1, 0.1))])
def test_a_dropout_rate_that_is_set_is_kept_whatever_family_the_checkpoint_has(
        monkeypatch, generator, usual):
    """One that is BART's own was taken for unset, and dropped, where T5 has another."""
    names = ("dropout", "attention_dropout", "activation_dropout")
    found = types.SimpleNamespace(generator=generator, towers=("generator",), inputs={})
    monkeypatch.setattr(pretrained, "described", lambda source: found)
    for name, other in zip(names, (0.3, 0.0, 0.0), strict=True):
        asked = overrides.replace(Config(), {
            "model.generator.pretrained": "x", f"model.generator.{name}": other})
        resolved = pretrained.resolve(asked).model.generator
        expected = dict(zip(names, usual, strict=True)) | {name: other}
        assert {each: getattr(resolved, each) for each in names} == expected
    assert pretrained.resolve(Config()).model.generator.attention_dropout == 0


@pytest.mark.parametrize("source", ["rag", "converted"])
@pytest.mark.parametrize("chosen,expected", [
    ({}, ("hugging_face", "uncased_roundtrip")),
    ({"data.question_text": "raw"}, ("hugging_face", "raw")),
    ({"data.source_format": "question_kept", "data.question_text": "raw"},
     ("question_kept", "raw"))])
def test_a_released_rag_reads_what_it_was_trained_on(sources, source, chosen, expected):
    """Its generator was never shown our form of the input; what the user asks for goes first."""
    asked = overrides.replace(config(sources, rag=source, document_encoder="context"), chosen)
    resolved = pretrained.resolve(asked)
    assert (resolved.data.source_format, resolved.data.question_text) == expected
    lines = " ".join(pretrained.notes(asked, resolved))
    for name, value in zip(("source_format", "question_text"), expected, strict=True):
        was_set = f"data.{name}" not in chosen
        assert (f"config.data.{name}={value}" in lines) == was_set
    from_bart = pretrained.resolve(config(sources, generator="rag"))
    assert from_bart.data.source_format == "hugging_face", "the generator decides"
    assert pretrained.resolve(Config()).data.question_text == "raw"


def test_what_a_checkpoint_says_of_generation_holds_where_it_answers_as_it_is(sources, tmp_path):
    """Its start token is the model's, and its forced tokens are the answers', unless the user sets
    others or trains it further."""
    folder = tmp_path / "bart"
    ids = SpecialIds(start=PIECES.start, end=PIECES.end, pad=PIECES.pad, bos=PIECES.start,
                              forced_bos=PIECES.start, forced_eos=PIECES.end)
    params = tiny.rag_params(MODEL)
    save(folder, "BartForConditionalGeneration", params,
         Architecture(None, MODEL.generator, ids), tokenizers=TOKENIZERS)
    asked = config({**sources, "bart": str(folder)}, generator="bart")

    def resolved(**changes):
        chosen = overrides.replace(asked, {"train.steps": 0, **changes})
        found = pretrained.resolve(chosen)
        return found, (found.eval.forced_bos, found.eval.forced_eos), " ".join(
            pretrained.notes(chosen, found))

    found, forced, lines = resolved()
    assert found.model.generator.start_token == PIECES.start and forced == (True, True)
    assert "eval.forced_bos=True" in lines and "eval.forced_eos=True" in lines
    assert resolved(**{"eval.forced_bos": False})[1] == (False, True)
    assert resolved(**{"eval.prefix": "the"})[1] == (None, True)
    assert resolved(**{"train.steps": 5})[1] == (None, None)
    own = resolved(**{"model.generator.start_token": PIECES.end})[0]
    assert own.model.generator.start_token == PIECES.end
    ends = resolved(**{"model.generator.end_tokens": (PIECES.end, 9)})[0]
    assert ends.model.generator.end_tokens == (PIECES.end, 9), "they were dropped without a word"
    assert pretrained.resolve(found) == found, "what is stored in a workdir stays as it is"


SAID = {"num_beams": 4, "length_penalty": 2.0, "no_repeat_ngram_size": 3, "min_length": 5}


@pytest.mark.parametrize("where", ["generation_config.json", "generator", "converted"])
def test_how_a_checkpoint_searches_holds_where_it_answers_as_it_is(sources, where, tmp_path):
    """A released summariser that searches with four beams was searched greedily; the forced tokens
    of a converted one were forgotten."""
    folder = tmp_path / "rag"
    shutil.copytree(sources["rag"], folder)
    described, said = json.loads((folder / "config.json").read_text()), SAID | {"max_length": 12}
    described["generator"] |= {"forced_bos_token_id": PIECES.start, "num_beams": 7}
    if where == "generation_config.json":
        forced = {"forced_bos_token_id": PIECES.start, "forced_eos_token_id": PIECES.end}
        (folder / where).write_text(json.dumps(said | forced))
    else:
        described["generator"] |= said
    (folder / "config.json").write_text(json.dumps(described))
    source = str(folder)
    if where == "converted":
        conversion.convert(source, source := str(tmp_path / "converted"))
    asked = config({**sources, "rag": source}, (24, 32, 64, 32), rag="rag",
                   document_encoder="context")

    def resolved(**changes):
        chosen = overrides.replace(asked, {"train.steps": 0, **changes})
        found = pretrained.resolve(chosen)
        own = {name: getattr(found.eval, name) for name in SAID}
        return found, own, " ".join(pretrained.notes(chosen, found))

    found, own, lines = resolved()
    assert own == SAID and (found.eval.forced_bos, found.eval.forced_eos) == (True, True)
    assert all(f"config.eval.{name}={value}" in lines for name, value in SAID.items())
    assert "config.data.max_target_length=11" in lines, "the start token is none of ours"
    decoding = decoding_settings(found, PIECES)
    assert {name: getattr(decoding, name) for name in SAID} == SAID and decoding.max_length == 11
    assert pretrained.resolve(found) == found, "what is stored in a workdir stays as it is"

    chosen = {"num_beams": 1, "length_penalty": 0.0, "no_repeat_ngram_size": 0, "min_length": 0}
    found, own, lines = resolved(**{f"eval.{name}": value for name, value in chosen.items()},
                                 **{"data.max_target_length": 8})
    assert own == chosen and found.data.max_target_length == 8
    assert "num_beams" not in lines and "max_target_length" not in lines
    found, own, _ = resolved(**{"train.steps": 5})
    assert set(own.values()) == {None} and found.data.max_target_length == 32
    assert resolved(**{"data.max_target_length": 4})[1] == SAID | {"min_length": None}
    for ours in ({"eval.strategy": "fast"}, {"eval.exact_nodes": 9}):
        assert resolved(**ours)[1] == SAID | {"length_penalty": None}, "it means another thing"
    found, own, _ = resolved(**{"eval.labels": ("Lima", "Paris")})
    assert set(own.values()) == {None} and found.data.max_target_length == 32


def test_the_start_token_is_the_models(sources, tmp_path):
    asked = config(sources, (24, 32, 64, 8), rag="rag", document_encoder="context")
    for token, expected in ((-1, PIECES.end), (PIECES.start, PIECES.start)):
        chosen = overrides.replace(asked, {"model.generator.start_token": token})
        job = open_job(with_files(pretrained.resolve(chosen), tmp_path), tmp_path / "work",
                       check=True)
        assert job.model.start_id == expected
    chosen = overrides.replace(asked, {"model.generator.start_token": 10**6})
    job = open_job(with_files(pretrained.resolve(chosen), tmp_path), tmp_path / "work", check=True)
    with pytest.raises(ConfigError, match="start_token=1000000: must be below"):
        job.model  # noqa: B018


def test_encoders_of_different_origins_are_said(sources, tmp_path):
    """Encoders trained apart give meaningless scores, which no fingerprint notices."""
    def named(name, tower, changes, card=""):
        folder = tmp_path / name
        shutil.copytree(sources[tower], folder)
        described = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**described, **changes}))
        (folder / "README.md").write_text(card)
        return str(folder)

    question = {"_name_or_path": "facebook/dpr-question_encoder-single-nq-base"}
    rag_section = json.loads((pathlib.Path(sources["rag"]) / "config.json").read_text())
    found = {
        **sources,
        "nq": named("nq", "question", question),
        "card": named("card", "rag", {}, "the base `facebook/dpr-question_encoder-single-nq-base`"),
        "rag_nq": named("rag_nq", "rag", {
            "question_encoder": {**rag_section["question_encoder"], **question}}),
        "multiset": named("dpr-ctx_encoder-multiset-base", "context", {}),
        "single": named("single", "context", {
            "_name_or_path": "facebook/dpr-ctx_encoder-single-nq-base"})}
    for towers, warns in (({"query_encoder": "nq", "document_encoder": "multiset"}, True),
                          ({"rag": "rag_nq", "document_encoder": "multiset"}, True),
                          ({"rag": "card", "document_encoder": "multiset"}, True),
                          ({"rag": "rag_nq", "document_encoder": "single"}, False),
                          ({"rag": "rag", "document_encoder": "multiset"}, False)):
        asked = config(found, **towers)
        lines = " ".join(pretrained.notes(asked, pretrained.resolve(asked)))
        assert ("single-nq" in lines and "multiset" in lines) == warns, towers


OWN_PROMPT = {"source_format": "prompt", "prompt": "{passage} Q: {question} A:"}


@pytest.mark.parametrize("family", ["RagTokenForGeneration", "BartForConditionalGeneration",
                                    "T5ForConditionalGeneration", "LlamaForCausalLM"])
@pytest.mark.parametrize("asked", [
    {}, {"source_format": "hugging_face"}, RELEASED_INPUTS, FID_INPUTS,
    OWN_PROMPT], ids=str)
def test_an_export_says_how_its_inputs_are_written(tmp_path, family, asked):
    """Ours, imported again, is not taken for one that was trained as its family usually is."""
    written = FAMILIES[family]
    said = inputs_json(DataConfig(**asked), written, tmp_path)
    found = {**OUR_INPUTS, **inputs(said, written, tmp_path)}
    assert found == {**OUR_INPUTS, **asked}


@pytest.mark.parametrize("family, read", [("bart", "question_kept"), ("causal", "prompt")])
def test_a_generator_of_random_weights_reads_as_its_family_does(family, read):
    """A decoder-only one read no prompts, and one that was set was refused for that."""
    asked = overrides.replace(Config(), {"model.generator.family": family})
    resolved = pretrained.resolve(asked)
    assert resolved.data.source_format == read
    assert pretrained.notes(asked, resolved) == []


def test_what_a_config_json_says_of_inputs_is_not_taken_on_trust(tmp_path):
    rag, encoder = (FAMILIES[name] for name in ("RagModel", "DPRQuestionEncoder"))
    for own in ({"source_format": [1]}, {"source_format": "x"}, {"prompt": 3}, [], "question_kept"):
        assert inputs({OWN: own}, rag, tmp_path) == RELEASED_INPUTS
        assert not inputs({OWN: own}, encoder, tmp_path)


@pytest.mark.parametrize("source", ["rag", "converted"])
def test_every_tower_gets_the_weights_of_its_source(sources, params, source, tmp_path):
    resolved = pretrained.resolve(config(sources, rag=source, document_encoder="context"))
    assert pretrained.is_retriever(resolved)
    job = open_job(with_files(resolved, tmp_path), tmp_path / "work", check=True)
    loaded = pretrained.load(job, ("query_encoder", "document_encoder", "generator"))
    for tower, tree in loaded.items():
        for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(params[tower]), strict=True):
            np.testing.assert_array_equal(a, b, err_msg=tower)
    halved = dataclasses.replace(job, config=overrides.replace(job.config, {
        "model.generator.dtype": "bfloat16", "model.generator.param_dtype": "bfloat16"}))
    whole, kept = (pretrained.load(halved, ("generator",), answers)["generator"]
                   for answers in (False, True))
    for tree, expected in ((whole, loaded["generator"]),
                           (kept, in_dtype(loaded["generator"], "bfloat16"))):
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b, strict=True), tree, expected)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(kept)} == {"bfloat16", "float32"}
    assert job.prepared.retriever_tokenizer.encode(TEXTS) == WORDS.encode(TEXTS)
    assert job.prepared.generator_tokenizer.encode(TEXTS) == PIECES.encode(TEXTS)


def test_a_plain_bert_starts_both_encoders_and_is_no_retriever(sources, params, tmp_path):
    """It has to be warmed up: its [CLS] ranks nothing."""
    resolved = pretrained.resolve(config(sources, retriever="bert", generator="rag"))
    assert not pretrained.is_retriever(resolved)
    job = open_job(with_files(resolved, tmp_path), tmp_path / "work", check=True)
    loaded = pretrained.load(job, pretrained.ENCODERS)
    for tower in pretrained.ENCODERS:
        for a, b in zip(jax.tree.leaves(loaded[tower]), jax.tree.leaves(params["bert"]),
                        strict=True):
            np.testing.assert_array_equal(a, b)


def test_bm25_takes_the_generator_of_a_rag_checkpoint_alone(sources, params, tmp_path):
    """It demanded a document encoder that no run of it reads."""
    base = Config(runs=("bm25",), tensorboard=False,
                  data=DataConfig(max_source_length=64, max_target_length=8, length_buckets=64,
                                  max_question_length=24, max_passage_length=32))
    asked = rules.validate(overrides.replace(base, {"model.rag.pretrained": sources["rag"]}))
    resolved = with_files(pretrained.resolve(asked), tmp_path)
    job = open_job(resolved, tmp_path / "work", check=True).of_run("bm25")
    assert set(job.model.towers) == {"generator"}
    loaded = pretrained.load(job, job.model.towers)
    for a, b in zip(jax.tree.leaves(loaded["generator"]), jax.tree.leaves(params["generator"]),
                    strict=True):
        np.testing.assert_array_equal(a, b)


def test_weights_land_where_the_rules_table_says(sources, tmp_path):
    """A large model must not pass through one device as a whole."""
    resolved = overrides.replace(
        pretrained.resolve(config(sources, rag="rag", document_encoder="context")),
        {"mesh.model": 2, "eval.batch_size": 8})
    job = open_job(with_files(resolved, tmp_path), tmp_path / "work", check=True)
    kernel = pretrained.load(job, ("generator",))["generator"]["encoder"]["layer_0"]["mlp"]["wi"][
        "kernel"]
    assert {shard.data.shape for shard in kernel.addressable_shards} == {(16, 16)}
    assert kernel.sharding.spec == parallel.spec(("embed", "mlp"))


def test_layers_that_a_workdir_keeps_in_the_other_form_are_named(uninterrupted):
    """Every parameter was said to be missing."""
    asked = overrides.replace(workdir.read(uninterrupted), {
        "model.generator.pretrained": str(uninterrupted), "model.generator.scan_layers": True})
    job = dataclasses.replace(open_job(workdir.read(uninterrupted), uninterrupted), config=asked)
    with pytest.raises(ConfigError, match="set config.model.generator.scan_layers=False"):
        pretrained.load(job, ("generator",))


def test_scanned_layers_hold_the_same_weights(sources, params, tmp_path):
    scanned = overrides.replace(config(sources, rag="rag", document_encoder="context"),
                                {"model.retriever.scan_layers": True})
    job = open_job(with_files(pretrained.resolve(scanned), tmp_path), tmp_path / "work", check=True)
    tree = pretrained.load(job, ("query_encoder",))["query_encoder"]["bert"]["encoder"]["layers"]
    for number in range(2):
        expected = params["query_encoder"]["bert"]["encoder"][f"layer_{number}"]
        for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(a[number], b)


def test_a_workdir_gives_its_towers_from_before_its_runs(sources, uninterrupted, tmp_path):
    """Somebody who named what he had trained got the warm-up, without a word; and a workdir that
    had none was said to have lost it, after the data were prepared."""
    source = str(uninterrupted)
    asked = overrides.replace(workdir.read(uninterrupted), {
        f"model.{tower}.pretrained": source for tower in ("generator", "retriever")})
    assert f"{source}: its towers are those from before rag_token trained; for what a run tr" in (
        " ".join(pretrained.notes(asked, pretrained.resolve(asked))))
    shutil.copytree(uninterrupted, tmp_path / "copy", ignore=shutil.ignore_patterns("rag_token"))
    asked = overrides.replace(asked, {f"model.{tower}.pretrained": str(tmp_path / "copy")
                            for tower in ("generator", "retriever")})
    assert "from before" not in " ".join(pretrained.notes(asked, pretrained.resolve(asked)))
    begun = tmp_path / "begun"
    workdir.start(overrides.replace(
        Config(), {"model.generator.pretrained": "facebook/bart-base"}), begun)
    asked = config({**sources, "begun": str(begun)}, generator="begun")
    with pytest.raises(ConfigError, match="no checkpoint of the generator, not in generator/, as "
                       "it began with that of facebook/bart-base: name facebook/bart-base$"):
        pretrained.resolve(asked)
    (begun / "rag_token" / "7").mkdir(parents=True)
    with pytest.raises(ConfigError, match="name facebook/bart-base, or, for what a run trained, a "
                       "folder that rag_jax.convert --from .*begun wrote"):
        pretrained.resolve(asked)


@pytest.mark.parametrize(("named", "message"), [
    ({"rag": "rag"}, "model.document_encoder.pretrained: the other encoder comes from"),
    ({"query_encoder": "question"}, "model.document_encoder.pretrained"),
    ({"retriever": "context"}, "has no query_encoder"),
    ({"generator": "bert"}, "has no generator"),
])
def test_a_tower_that_nothing_gives_is_named(sources, named, message):
    with pytest.raises(ConfigError, match=message):
        pretrained.resolve(config(sources, **named))


def test_encoders_of_two_architectures_are_refused(sources, tmp_path, params):
    other = dataclasses.replace(MODEL.retriever, layers=1)
    tree = tiny.rag_params(tiny.rag_model("token", {**RETRIEVER, "layers": 1}))
    save(tmp_path / "shallow", "DPRContextEncoder", tree, Architecture(other))
    named = {**sources, "shallow": str(tmp_path / "shallow")}
    with pytest.raises(ConfigError, match="differ in layers"):
        pretrained.resolve(config(named, query_encoder="question", document_encoder="shallow"))


def test_lengths_beyond_the_positions_of_the_checkpoint_are_refused(sources):
    asked = config(sources, (24, 49, 64, 8), rag="rag", document_encoder="context")
    with pytest.raises(ConfigError, match="max_passage_length=49: the model has 48 positions"):
        pretrained.resolve(asked)


def with_files(config, folder):
    (folder / "passages.tsv").write_text(PASSAGES)
    (folder / "questions.jsonl").write_text(json.dumps(QUESTION) + "\n")
    return overrides.replace(config, {
        "data.passages": str(folder / "passages.tsv"), "retrieval.k": 2,
        "data.train": str(folder / "questions.jsonl"), "data.dev": str(folder / "questions.jsonl")})


def test_without_a_training_step_the_checkpoint_answers_as_it_is(sources, params, tmp_path):
    """steps=0: index own passages with a released model, and ask."""
    asked = overrides.replace(
        with_files(config(sources, rag="rag", document_encoder="context"), tmp_path),
        {"train.steps": 0, "eval.batch_size": 8})
    train(asked, tmp_path / "work")
    trained = load(tmp_path / "work", config=pretrained.resolve(asked))
    for tower, tree in trained.params.items():
        for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(params[tower]), strict=True):
            np.testing.assert_array_equal(a, b, err_msg=tower)
    assert {"1", "2"} == set(trained.ask(["Who?"])[0].passage_ids)
    conversion.convert(str(tmp_path / "work"), str(tmp_path / "back"))
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (
        open(f"{sources['rag']}/model.safetensors", "rb").read())
    assert Tokenizer.load(tmp_path / "back" / "generator_tokenizer").encode(TEXTS) == (
        PIECES.encode(TEXTS))


SENTENCE = {"pooling": "mean", "normalize": True, "scale": 8.0, "query_prefix": "what: ",
            "passage_prefix": "is: ", "titles": "joined"}


@pytest.fixture(scope="module")
def sentence_encoder(tmp_path_factory, params):
    """A folder of sentence-transformers."""
    folder = tmp_path_factory.mktemp("sentence") / "encoder"
    encoder = dataclasses.replace(MODEL.retriever, **SENTENCE)
    save(folder, "BertModel", params, Architecture(encoder, longest=32),
         tokenizers=TOKENIZERS)
    return str(folder)


def test_a_sentence_encoder_is_a_retriever_and_what_is_set_by_hand_goes_first(
        sources, sentence_encoder):
    """A MiniLM that was warmed up for 1000 steps on a handful of questions was no MiniLM any more;
    and a bare folder says nothing of pooling."""
    named = {**sources, "sentence": sentence_encoder}
    found = pretrained.resolve(config(named, retriever="sentence", generator="rag"))
    assert pretrained.is_retriever(found)
    assert {name: getattr(found.model.retriever, name) for name in SENTENCE} == SENTENCE
    assert pretrained.resolve(found) == found
    by_hand = {"model.retriever.pooling": "cls", "model.retriever.query_prefix": "",
               "model.retriever.scale": 3.0}
    asked = overrides.replace(config(named, retriever="sentence", generator="rag"), by_hand)
    set_here = pretrained.resolve(asked).model.retriever
    assert {name: getattr(set_here, name) for name in SENTENCE} == {
        **SENTENCE, "pooling": "cls", "query_prefix": "", "scale": 3.0}
    bare = overrides.replace(config(named, retriever="bert", generator="rag"), {
        "model.retriever.pooling": "mean", "model.retriever.normalize": True})
    assert pretrained.resolve(bare).model.retriever.logit_scale == 20


def test_passages_longer_than_an_encoder_is_said_to_read_are_told(
        sources, sentence_encoder, tmp_path, capsys):
    """sentence-transformers cuts them, so that its vectors are others; nothing was said."""
    named = {**sources, "sentence": sentence_encoder}
    for passage, told in ((33, True), (32, False)):
        asked = config(named, (24, passage, 64, 8), retriever="sentence", generator="rag")
        lines = " ".join(pretrained.notes(asked, pretrained.resolve(asked)))
        assert ("says that it reads 32" in lines) == told
        fields = {"model.generator.pretrained": sources["rag"],
                  "model.retriever.pretrained": sentence_encoder,
                  **{f"data.{name}": getattr(asked.data, name) for name in (
                      "max_question_length", "max_passage_length", "max_source_length",
                      "max_target_length")}}
        with pytest.raises(RetrievalError, match="nowhere.tsv"):
            build_index(tmp_path / "nowhere.tsv", tmp_path / "index", config=fields)
        assert ("says that it reads 32" in capsys.readouterr().out) == told
    conversion.convert(sentence_encoder, str(tmp_path / "converted"))
    assert pretrained.described(str(tmp_path / "converted")).longest == 32


def test_a_sentence_encoder_goes_the_whole_way(sources, sentence_encoder, tmp_path):
    """Convert, index, train with a scale that learns, resume, ask, evaluate, export."""
    conversion.convert(sentence_encoder, str(tmp_path / "converted"))
    named = {**sources, "sentence": str(tmp_path / "converted")}
    asked = overrides.replace(
        with_files(config(named, retriever="sentence", generator="rag"), tmp_path),
        {"train.steps": 2, "train.batch_size": 8, "train.save_every": 1, "eval.batch_size": 8,
         "train.optimizer.learning_rate": 0.1, "model.retriever.learn_scale": True})
    work = tmp_path / "work"
    train(asked, work)
    once = load(work).params
    shutil.rmtree(work / "rag_token" / "2")
    (work / "report.json").unlink()
    train(asked, work)
    rag = load(work)
    tiny.assert_trees_close(rag.params, once, rtol=0, atol=0)
    learned = float(rag.params["query_encoder"]["scale"])
    assert learned != 0 and "scale" not in rag.encoder("document_encoder")
    question = QUESTION["question"]
    answer, = rag.ask([question])
    asked_BE = rag.embed_queries([question])
    texts = [Passage("1", "Peru", "Lima is the capital of Peru."),
             Passage("2", "France", "Paris is that.")]
    logits = asked_BE @ rag.embed_passages(texts).T
    np.testing.assert_allclose(np.linalg.norm(asked_BE), 8 * np.exp(learned), rtol=1e-5)
    expected = np.exp(logits[0]) / np.exp(logits[0]).sum()
    prior = {passage.id: passage.prior for passage in answer.passages}
    np.testing.assert_allclose([prior["1"], prior["2"]], expected, rtol=1e-4)
    assert rag.evaluate("dev").metrics
    conversion.convert(str(work), str(tmp_path / "back"))
    asks, reads = (hub.load(tmp_path / "back" / tower) for tower in pretrained.ENCODERS)
    assert asks.retriever.scale == pytest.approx(8 * np.exp(learned), rel=1e-6)
    assert (asks.family, asks.longest, asks.retriever.passage_prefix) == ("BertModel", 32, "is: ")
    first = hub.load(sentence_encoder).params["bert"]
    tiny.assert_trees_close(reads.params["bert"], first, rtol=0, atol=0)
    del rag.params["query_encoder"]["scale"]
    tiny.assert_trees_close(asks.params["bert"], rag.params["query_encoder"], rtol=0, atol=0)
    assert hub.load(tmp_path / "back" / "generator").family == "BartForConditionalGeneration"
