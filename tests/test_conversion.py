"""`convert` both ways, and what it says to a source or target that cannot be used."""

import dataclasses
import json
import os
import shutil

import jax
import numpy as np
import pytest
import tiny

import rag_jax
from rag_jax import conversion
from rag_jax.config import CausalConfig, Config, ConfigError, overrides
from rag_jax.config.config_files import load_file as load_config
from rag_jax.data.tokenizer_training import train_bart_tokenizer, train_bert_tokenizer
from rag_jax.files import FolderError
from rag_jax.hub import families
from rag_jax.hub import load as hub
from rag_jax.hub.card import Provenance, model_card
from rag_jax.hub.config_json import Architecture
from rag_jax.hub.save import save
from rag_jax.hub.stored import HubError
from rag_jax.training import workdir
from tests.end_to_end.commands import SMALLEST

TEXTS = ["What is the capital of Peru?", "Lima is the capital of Peru, and Paris of France."]


@pytest.fixture(scope="module")
def tokenizers():
    words, pieces = train_bert_tokenizer(TEXTS, 100), train_bart_tokenizer(TEXTS, 300)
    return {"query_encoder": words, "document_encoder": words, "bert": words, "generator": pieces}


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tokenizers):
    """A Hugging Face folder of each family that a workdir can become again."""
    retriever = {"vocab_size": tokenizers["bert"].vocab_size, "max_positions": 64}
    generator = {"vocab_size": tokenizers["generator"].vocab_size, "max_positions": 128}
    model = tiny.rag_model("sequence", {**retriever, "projection": 8}, generator)
    params = tiny.rag_params(model)
    plain = tiny.rag_model(retriever=retriever)
    params["bert"] = tiny.rag_params(plain, seed=3)["query_encoder"]
    bare = {"bert": plain.retriever, "roberta": dataclasses.replace(
        plain.retriever, model_type="roberta", max_positions=62)}
    root = tmp_path_factory.mktemp("hugging_face")
    for name, family in (("rag", "RagSequenceForGeneration"), ("question", "DPRQuestionEncoder"),
                         ("context", "DPRContextEncoder"), ("bert", "BertModel"),
                         ("roberta", "RobertaModel"), ("bart", "BartForConditionalGeneration")):
        save(root / name, family, params,
             Architecture(bare.get(name, model.retriever), model.generator),
             tokenizers=tokenizers)
    return root


def files(folder):
    return {str(path.relative_to(folder)): path.read_bytes()
            for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", ["rag", "question", "context", "bert", "roberta", "bart"])
def test_there_and_back_gives_the_same_files(folders, tmp_path, name):
    """Weights bitwise; configuration, special tokens and tokenizers included."""
    conversion.convert(str(folders / name), str(tmp_path / "workdir"))
    assert workdir.exists(tmp_path / "workdir")
    conversion.convert(str(tmp_path / "workdir"), str(tmp_path / "back"))
    found, expected = files(tmp_path / "back"), files(folders / name)
    card = found.pop("README.md").decode()
    assert "license: unknown" in card and f"`{name}`" in card, "it says what it started from"
    assert found.keys() == expected.keys()
    assert [n for n in found if found[n] != expected[n]] == []


def test_a_converted_workdir_is_opened_by_nobody_and_stays_as_it_is(folders, tmp_path):
    """To ask it put tokenizers of the countries in the place of its own, for good."""
    path = tmp_path / "workdir"
    conversion.convert(str(folders / "rag"), str(path))
    before = files(path)
    with pytest.raises(ConfigError, match="checkpoints alone: name it as config.model.rag"):
        rag_jax.load(path)
    with pytest.raises(ConfigError, match="checkpoints alone"):
        rag_jax.build_index(tmp_path / "p.tsv", tmp_path / "index", path)
    assert files(path) == before and not (tmp_path / "index").exists()


@pytest.mark.parametrize("family", [
    {"family": "t5", "relative_buckets": 8},
    {"family": "causal", "kv_heads": 1, "head_size": 8, "decoder_layers": 1, "max_positions": 128}])
@pytest.mark.usefixtures("compiled_with_less_effort")
def test_from_random_weights_an_export_answers_as_what_was_trained(family, tmp_path):
    """Its first token, form of inputs, prompt and tokenizer were those of its family."""
    asked = {**{f"model.generator.{name}": value for name, value in family.items()},
             "runs": ("rag_sequence",), "train.steps": 0, "generator_warmup.steps": 0,
             "retriever_warmup.steps": 0, "model.generator.init_std": 0.3}
    if family["family"] == "causal":
        asked |= {"data.source_format": "prompt", "data.prompt": "{passage} Q {question} A:"}
    config = overrides.replace(load_config(str(SMALLEST)), asked)
    rag_jax.train(config, tmp_path / "trained")
    trained = rag_jax.load(tmp_path / "trained")
    question, answer = "What is the capital of Peru?", "Lima"
    conversion.convert(str(tmp_path / "trained"), str(tmp_path / "out"))
    changes = {f"model.{tower}.pretrained": str(tmp_path / "out" / tower)
               for tower in ("query_encoder", "document_encoder", "generator")}
    changes |= {f"data.{name}": getattr(config.data, name) for name in (
        "max_question_length", "max_passage_length", "max_source_length", "max_target_length",
        "length_buckets")}
    index = next(path for path in (tmp_path / "trained" / "indexes").iterdir() if path.is_dir())
    back = rag_jax.load(index=index, run="rag_sequence", config={
        **changes, "retrieval.k": 2, "model.retriever.dropout": config.model.retriever.dropout})
    assert back.log_likelihood(question, answer) == pytest.approx(
        trained.log_likelihood(question, answer), abs=1e-4)


@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.usefixtures("compiled_with_less_effort")
def test_an_export_forces_the_tokens_that_its_run_forces(trained, tmp_path, forced, capsys):
    """Every BART's export named a forced </s>: it cut long answers otherwise than its run. A run
    that was not finished was exported, and opened, without a word."""
    shutil.copytree(trained, tmp_path / "trained")
    config = workdir.read(trained)
    workdir.write(overrides.replace(config, {"train.steps": 99}), tmp_path / "trained/config.json")
    before = workdir.eval_of(trained, "rag_token")
    workdir.begin_run(tmp_path / "trained", "rag_token", dataclasses.replace(
        before, forced_bos=forced or None, forced_eos=forced or None))
    conversion.convert(str(tmp_path / "trained"), str(tmp_path / "out"))
    assert "rag_token: has taken 10 of 99 steps; to finish it" in capsys.readouterr().err
    written = json.loads((tmp_path / "out" / "config.json").read_text())["generator"]
    for token in ("bos", "eos"):
        expected = written[f"{token}_token_id"] if forced else None
        assert written[f"forced_{token}_token_id"] == expected
    ours = rag_jax.load(tmp_path / "trained", "rag_token")
    assert "rag_token: has taken 10 of 99 steps; to finish it" in capsys.readouterr().err
    back = rag_jax.load(tmp_path / "out", index=ours.index.path, config={
        f"data.{name}": getattr(ours.job.config.data, name) for name in (
            "max_question_length", "max_passage_length", "max_source_length", "max_target_length",
            "length_buckets")} | {"retrieval.k": 2})
    for settings in ({"num_beams": 1}, {"num_beams": 2}):
        (a,), (b,) = (rag.ask(["What is the capital of Peru?"], **settings) for rag in (ours, back))
        assert (a.text, a.finished, a.certified) == (b.text, b.finished, b.certified)
        assert a.log_prob == pytest.approx(b.log_prob, abs=1e-4)


def test_an_export_of_a_chat_stops_where_it_was_trained_to(tmp_path):
    """A base model's generation_config.json named its own end alone, which the chat never gives."""
    tokenizer = train_bart_tokenizer([*TEXTS, "user assistant"], 300)
    tokenizer.config["chat_template"] = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<mask>\n{% endfor %}")
    generator = CausalConfig(vocab_size=300)
    for form, ends in (("chat", (tokenizer.mask, tokenizer.end)), ("prompt", ())):
        config = overrides.replace(Config(), {"data.source_format": form})
        found = conversion._with_ends(generator, config, {"generator": tokenizer})
        assert found.end_tokens == ends
    assert conversion._with_ends(generator, config, {}) == generator


def test_a_workdir_of_all_towers_becomes_rag_and_a_document_encoder(folders, tmp_path):
    """The document encoder has no place in a RAG checkpoint, and must not get lost."""
    conversion.convert(str(folders / "rag"), str(tmp_path / "workdir"))
    conversion.convert(str(folders / "context"), str(tmp_path / "context"))
    (tmp_path / "context" / "document_encoder").rename(tmp_path / "workdir" / "document_encoder")
    file = tmp_path / "workdir" / "config.json"
    earlier = json.loads(file.read_text())  # of a version that kept the kind as a field
    del earlier["sha256"]
    file.write_text(json.dumps({**earlier, "runs": ["rag_token"],
                                "model": {**earlier["model"], "kind": "sequence"}}))
    said = conversion.convert(str(tmp_path / "workdir"), str(tmp_path / "back"))
    assert "RagSequenceForGeneration" in said and "DPRContextEncoder" in said
    for name, place in (("rag", "."), ("context", "document_encoder")):
        found = hub.load(tmp_path / "back" / place).params
        expected = hub.load(folders / name).params
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(a, b)


def test_a_card_says_what_the_workdir_knows(tmp_path):
    """Weights whose data and scores nobody can tell are of no use to others; paths of one machine
    are of none either."""
    config = overrides.replace(Config(), {
        "data.passages": "/home/somebody/wiki.tsv", "data.train": "task:nq:train",
        "model.generator.pretrained": "facebook/bart-large"})
    for split, em in (("dev", 41.25), ("test", 44.5)):
        folder = tmp_path / "rag_token" / "evaluation" / split
        folder.mkdir(parents=True)
        (folder / "metrics.json").write_text(json.dumps({"em": em, "f1": 50}))
    provenance = conversion._provenance(tmp_path, config, "rag_token", config.model.sources, {})
    card = model_card(families.FAMILIES["RagTokenForGeneration"], provenance)
    for line in ("run `rag_token`", "- generator: `facebook/bart-large`",
                 "- train: `task:nq:train`", "- passages: `wiki.tsv`",
                 "| metric | dev | test |", "| em | 41.25 | 44.5 |",
                 "license: unknown", "RagTokenForGeneration.from_pretrained"):
        assert line in card
    assert "somebody" not in card
    unknown = Provenance("", {}, {}, {})
    assert "trained from scratch" in model_card(families.FAMILIES["BartModel"], unknown)


def test_an_export_says_that_its_reranker_is_not_in_it(tmp_path):
    """Its card listed the scores of reranked passages as those of the exported model."""
    config = overrides.replace(Config(), {"model.reranker.pretrained": "BAAI/bge-reranker-base"})
    said, card = told(tmp_path, config, "frozen")
    for text in (said, card):
        assert "the reranker" in text
        assert "config.model.reranker.pretrained=BAAI/bge-reranker-base" in text
    alone = overrides.replace(config, {"retrieval.k": 0})
    for each, run in ((alone, "closed_book"), (config, None), (Config(), "frozen")):
        assert told(tmp_path, each, run) == ("", told(tmp_path, Config(), run)[1])


@pytest.mark.parametrize("fields, learned, settings", [
    ({}, None, []), ({}, 0.31415926, ["bm25_weight=0.3142"]),
    ({"bm25_weight": 0.123456}, None, ["bm25_weight=0.123456"]),
    ({"fusion": "reciprocal_rank", "bm25_language": "german"}, None,
     ["fusion=reciprocal_rank", "bm25_language=german"])])
def test_an_export_says_that_its_words_are_not_in_it(tmp_path, fields, learned, settings):
    """That of a hybrid run found other passages than the run whose scores its card lists."""
    config = overrides.replace(Config(), {
        "retrieval.retriever": "hybrid", **{f"retrieval.{n}": v for n, v in fields.items()}})
    for text in told(tmp_path, config, "rag_token", learned):
        assert "the words of passages" in text and "bm25_k1" not in text
        for setting in ("retriever=hybrid", *settings):
            assert f"config.retrieval.{setting}" in text
        assert ("bm25_weight" in text) == ("weight" in str(settings))


def told(folder, config, run, learned=None):
    """The message of an export and its model card, about what is not in it."""
    beyond = conversion._beyond(config, run, learned)
    card = model_card(families.FAMILIES["RagTokenForGeneration"],
                      conversion._provenance(folder, config, run, {}, beyond))
    return "; ".join(conversion._left_out({}, beyond)), card


@pytest.mark.parametrize("family, field", [
    ("RagSequenceForGeneration", "rag"), ("DPRContextEncoder", "document_encoder"),
    ("DPRQuestionEncoder", "query_encoder"), ("BertModel", "retriever"),
    ("T5ForConditionalGeneration", "generator")])
def test_a_card_names_the_field_that_takes_the_folder(family, field):
    """That of a document encoder named others, which refuse it."""
    card = model_card(families.FAMILIES[family], Provenance("", {}, {}, {}))
    assert f"`config.model.{field}.pretrained`" in card and card.count(".pretrained`") == 1


def test_an_export_that_fails_leaves_nothing_and_can_be_made_again(folders, tmp_path, monkeypatch):
    """Its first folders stayed, and were in the way of the next."""
    for name, into in (("rag", "workdir"), ("context", "other")):
        conversion.convert(str(folders / name), str(tmp_path / into))
    (tmp_path / "other" / "document_encoder").rename(tmp_path / "workdir" / "document_encoder")
    shutil.rmtree(tmp_path / "other")

    def fails(folder, name, *others, **more):
        if name == "DPRContextEncoder":
            raise HubError("no room")
        save(folder, name, *others, **more)

    with monkeypatch.context() as patched, pytest.raises(HubError, match="no room"):
        patched.setattr(conversion, "save", fails)
        conversion.convert(str(tmp_path / "workdir"), str(tmp_path / "back"))
    assert [path.name for path in tmp_path.iterdir()] == ["workdir"]
    said = conversion.convert(str(tmp_path / "workdir"), str(tmp_path / "back"))
    assert f"DPRContextEncoder in {tmp_path / 'back' / 'document_encoder'}" in said


def test_documents_are_exported_by_what_was_trained_on_them(folders, tmp_path):
    """Its error advised to train the workdir, which train refuses."""
    conversion.convert(str(folders / "bart"), str(tmp_path / "documents" / "trained"))
    (tmp_path / "documents" / "ingest.json").write_text("{}")
    shutil.copy(tmp_path / "documents" / "trained" / "config.json", tmp_path / "documents")
    for run in (None, "rag_token"):
        with pytest.raises(ConfigError, match="documents has no trained run.*rag_jax.ingest --tr"):
            conversion.convert(str(tmp_path / "documents"), str(tmp_path / "out"), run=run)
    (tmp_path / "documents" / "trained" / "rag_token" / "1").mkdir(parents=True)
    (tmp_path / "documents" / "trained" / "rag_token" / "eval.json").write_text("{}")
    with pytest.raises(ConfigError, match="documents/trained/rag_token: no checkpoint"):
        conversion.convert(str(tmp_path / "documents"), str(tmp_path / "out"))


def test_another_class_can_be_asked_for(folders, tmp_path):
    conversion.convert(str(folders / "rag"), str(tmp_path / "workdir"))
    conversion.convert(str(tmp_path / "workdir"), str(tmp_path / "back"),
                       family="RagTokenForGeneration")
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["architectures"] == ["RagTokenForGeneration"]


def test_a_class_for_towers_that_share_no_folder_is_refused(folders, tmp_path, monkeypatch):
    """Or each would be written as its own class, and --family would be for nothing."""
    conversion.convert(str(folders / "rag"), str(tmp_path / "workdir"))
    monkeypatch.setattr(families, "class_of", lambda generator: "T5ForConditionalGeneration")
    with pytest.raises(ConfigError, match="written as its own class; leave --family out"):
        conversion.convert(str(tmp_path / "workdir"), str(tmp_path / "back"),
                           family="RagTokenForGeneration")
    assert not (tmp_path / "back").exists()


def test_a_folder_with_something_in_it_is_left_alone(folders, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="exists and is no empty folder"):
        conversion.convert(str(folders / "rag"), str(tmp_path))
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_place_that_cannot_be_written_to_is_refused_before_anything_is_read(
        folders, tmp_path, monkeypatch):
    """The error came after minutes, and named a hidden folder."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    monkeypatch.setattr(conversion.hub, "load", None)
    with pytest.raises(ConfigError, match="link exists and is no empty folder"):
        conversion.convert(str(folders / "rag"), str(tmp_path / "link"))
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    for target in ("away/new", "empty"):
        with pytest.raises(FolderError, match=f"{target}: .* may not be written into"):
            conversion.convert(str(folders / "rag"), str(tmp_path / target))


@pytest.mark.parametrize("odd", [None, "", "a" * 300, "a\0b"])
def test_what_names_no_folder_is_refused(odd, folders, tmp_path):
    """They were errors of the operating system, or of Python, without the argument's name."""
    with pytest.raises(ConfigError, match="^--from="):
        conversion.convert(odd, str(tmp_path / "out"))
    with pytest.raises(ConfigError, match="^--to="):
        conversion.convert(str(folders / "bart"), odd)


def test_a_folder_that_is_not_there_is_no_name_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(HubError, match=r"no checkpoint '\./org/gen': there is no such folder, and"):
        conversion.convert("./org/gen", str(tmp_path / "out"))


def test_a_damaged_source_leaves_nothing_behind(folders, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for path in (folders / "bart").iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    weights = source / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(HubError, match="model.safetensors"):
        conversion.convert(str(source), str(tmp_path / "out"))
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_options_of_the_other_direction_are_refused(folders, tmp_path):
    with pytest.raises(ConfigError, match="exporting a workdir"):
        conversion.convert(str(folders / "rag"), str(tmp_path / "out"), run="rag_token")


def test_a_workdir_without_weights_says_so(folders, tmp_path):
    conversion.convert(str(folders / "bart"), str(tmp_path / "workdir"))
    (tmp_path / "workdir" / "generator").rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="no checkpoint to export"):
        conversion.convert(str(tmp_path / "workdir"), str(tmp_path / "out"))
    with pytest.raises(ConfigError, match="--run=rag_token: .* has no run, .*leave --run out"):
        conversion.convert(str(tmp_path / "workdir"), str(tmp_path / "out"), run="rag_token")
    with pytest.raises(ConfigError, match="has the runs rag_token"):
        conversion.convert(str(tmp_path / "workdir"), str(tmp_path / "out"), run="frozen")
