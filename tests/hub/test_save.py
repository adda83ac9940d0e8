"""Saving: nothing half-written, nothing lost in silence, tokenizers that transformers opens."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import tiny
from checkpoints import BART, BERT, IDS, TOWERS, params, written

from rag_jax.data.text import Tokenizer
from rag_jax.data.tokenizer_training import train_bart_tokenizer, train_bert_tokenizer
from rag_jax.hub.config_json import Architecture
from rag_jax.hub.load import load
from rag_jax.hub.save import save, save_tokenizer
from rag_jax.hub.stored import HubError

TEXTS = ["Paris is the capital of France.", "Who wrote Hamlet, then? 1601!"] * 3


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Tokenizer]:
    return {"query_encoder": train_bert_tokenizer(TEXTS, 200),
            "generator": train_bart_tokenizer(TEXTS, 300)}


def test_an_existing_folder_is_not_overwritten(tmp_path):
    written(tmp_path, "BertModel")
    before = (tmp_path / "BertModel" / "model.safetensors").stat()
    with pytest.raises(HubError, match="exists and is not empty"):
        written(tmp_path, "BertModel")
    assert (tmp_path / "BertModel" / "model.safetensors").stat() == before


def test_a_failed_save_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("rag_jax.hub.save._write_json", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        written(tmp_path, "BertModel")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("family,changes,message", [
    ("BertForMaskedLM", {}, "cannot be written; choose one of BertModel, DPRQuestionEncoder"),
    ("Nothing", {}, "cannot be written"),
    ("BartModel", {"params": {"bert": {}}}, r"needs params\['generator'\]; there are bert"),
    ("BertModel", {"retriever": None}, "needs the configuration of its retriever"),
    ("RagModel", {"generator": None}, "needs the configuration of its generator"),
    ("BertModel", {"retriever": dataclasses.replace(BERT, projection=3)}, "has no projection"),
    ("BartModel", {"params": params("BartForConditionalGeneration")},
     "no final_logits_bias, and this one is not zero"),
    ("BertModel", {"retriever": dataclasses.replace(BERT, layers=3)},
     "lack bert/bert/encoder/layers/attention|lack bert/bert/encoder/layer_2"),
    ("BertModel", {"retriever": dataclasses.replace(BERT, layers=1)}, "does not ask for"),
    ("BertModel", {"retriever": dataclasses.replace(BERT, vocab_size=12)},
     r"token_embedding is \(11, 8\), the configuration asks for \(12, 8\)"),
])
def test_what_does_not_fit_is_refused(family, changes, message, tmp_path):
    given = {"retriever": BERT, "generator": BART, "ids": IDS,
             "params": params(family) if family in TOWERS else {}, **changes}
    tree = given.pop("params")
    with pytest.raises(HubError, match=message):
        save(tmp_path / "out", family, tree, Architecture(**given))
    assert not list(tmp_path.iterdir())


def test_scanned_parameters_are_written_like_looped_ones(tmp_path):
    folder, _ = written(tmp_path, "RagModel")
    scan = {"scan_layers": True}
    found = load(folder, retriever=scan, generator=scan)
    save(tmp_path / "out", "RagModel", found.params, found)
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()


def test_the_added_pooler_is_the_identity(tmp_path):
    import safetensors.numpy

    folder, _ = written(tmp_path, "BertModel")
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    np.testing.assert_array_equal(tensors["pooler.dense.weight"], np.eye(BERT.width))
    assert not tensors["pooler.dense.bias"].any()


def test_special_ids_come_from_the_tokenizer_or_the_arguments(tmp_path, tokenizers):
    generator = dataclasses.replace(BART, vocab_size=tokenizers["generator"].vocab_size)
    tree = params("BartForConditionalGeneration", bart=generator)
    save(tmp_path / "a", "BartForConditionalGeneration", tree, Architecture(None, generator),
         tokenizers=tokenizers)
    t = tokenizers["generator"]
    ids = load(tmp_path / "a").ids
    assert (ids.start, ids.end, ids.pad, ids.bos) == (t.end, t.end, t.pad, t.start)
    written(tmp_path, "RagTokenForGeneration", fields={"n_docs": 7})
    config = json.loads((tmp_path / "RagTokenForGeneration" / "config.json").read_text())
    assert config["n_docs"] == 7 and config["retrieval_vector_size"] == BERT.width
    assert load(tmp_path / "RagTokenForGeneration").ids == IDS


def test_tokenizers_are_opened_by_transformers_with_the_same_ids(tmp_path, tokenizers):
    import transformers

    written(tmp_path, "RagTokenForGeneration", tokenizers=tokenizers)
    folder = tmp_path / "RagTokenForGeneration"
    both = transformers.RagTokenizer.from_pretrained(folder)
    for tower, theirs in (("query_encoder", both.question_encoder), ("generator", both.generator)):
        ours = tokenizers[tower]
        for text, row in zip(TEXTS, ours.encode(TEXTS), strict=True):
            assert theirs(text)["input_ids"] == [ours.start, *row, ours.end]
            assert theirs.decode(row, skip_special_tokens=True).strip() == ours.decode(row)
        a, b = ours.encode(["Paris", "Hamlet"])
        middle = [ours.end] * (2 if tower == "generator" else 1)
        assert theirs("Paris", "Hamlet")["input_ids"] == [ours.start, *a, *middle, *b, ours.end]
        assert (theirs.pad_token_id, theirs.mask_token_id) == (ours.pad, ours.mask)
        assert (theirs.cls_token_id, theirs.sep_token_id) == (ours.start, ours.end)
    assert both.generator.eos_token_id == tokenizers["generator"].end
    assert both.question_encoder.model_max_length == BERT.max_positions
    found = load(folder).tokenizers
    assert set(found) == {"query_encoder", "generator"}
    for tower, place in found.items():
        assert Tokenizer.load(place).encode(TEXTS) == tokenizers[tower].encode(TEXTS)


@pytest.mark.parametrize("prompts", [False, True])
def test_a_tokenizer_with_names_of_its_own_keeps_them(tmp_path, prompts):
    """Gemma's, whose vocabulary has HTML's </s>: an export said that a tag ends its texts."""
    import transformers

    own = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    ours = Tokenizer(tiny.html_tokenizer(), own)
    save_tokenizer(tmp_path, ours, 64, prompts=prompts)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert own.items() <= theirs.special_tokens_map.items()
    around = ([], []) if prompts else ([ours.start], [ours.end])
    assert theirs("a b")["input_ids"] == [*around[0], *ours.encode(["a b"])[0], *around[1]]
    assert (theirs.mask_token, theirs.sep_token) == (
        (None, None) if prompts else ("<mask>", "<eos>")), "a prompt has neither"


def test_a_post_processor_that_adds_nothing_is_replaced(tmp_path):
    """transformers' TokenizersBackend writes one, and the export read texts without [CLS]."""
    import transformers

    train_bert_tokenizer(TEXTS, 99).save(tmp_path / "given")
    (tmp_path / "given" / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast"}')
    ours = Tokenizer.load(tmp_path / "given")
    save_tokenizer(tmp_path / "out", ours, 64)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs(TEXTS)["input_ids"] == [
        [ours.start, *ids, ours.end] for ids in ours.encode(TEXTS)]


def test_parameters_sharded_over_devices_are_written_whole(tmp_path):
    from rag_jax import parallel
    from rag_jax.config import MeshConfig

    folder, tree = written(tmp_path, "DPRContextEncoder")
    found = load(folder, mesh=parallel.make_mesh(MeshConfig(data=4, model=2)))
    save(tmp_path / "out", found.family, found.params, found)
    again = load(tmp_path / "out").params
    assert jax.tree.all(jax.tree.map(lambda a, b: np.array_equal(a, b), again, tree))
