"""The same comparison as test_goldens.py, live; needs torch (the [parity] extra)."""

import argparse
import dataclasses
import functools
import json
import pathlib
import re

import checkpoints
import jax
import numpy as np
import parity
import pytest
import tiny

torch = pytest.importorskip("torch")
pytest.importorskip("sentence_transformers")

import reference  # noqa: E402
import sentences  # noqa: E402
import transformers  # noqa: E402

from rag_jax.config import CausalConfig  # noqa: E402
from rag_jax.data.text import Tokenizer  # noqa: E402
from rag_jax.data.tokenizer_training import train_bart_tokenizer, train_bert_tokenizer  # noqa: E402
from rag_jax.decoding.answer import decode  # noqa: E402
from rag_jax.decoding.settings import Decoding  # noqa: E402
from rag_jax.hub.card import Provenance, model_card  # noqa: E402
from rag_jax.hub.config_json import Architecture  # noqa: E402
from rag_jax.hub.families import FAMILIES, class_of  # noqa: E402
from rag_jax.hub.load import load  # noqa: E402
from rag_jax.hub.save import save  # noqa: E402
from rag_jax.hub.tensors import open_tensors  # noqa: E402
from rag_jax.models import rag  # noqa: E402
from rag_jax.models.causal_lm import CausalLM  # noqa: E402
from rag_jax.models.dpr import DprEncoder  # noqa: E402
from rag_jax.models.likelihood import class_logits  # noqa: E402

CASES = reference.CASES


def exported(folder: pathlib.Path) -> pathlib.Path:
    """Our export of a checkpoint of transformers."""
    found = load(folder)
    family = found.family.replace("ForMaskedLM", "Model")
    save(folder / "exported", family, found.params, found)
    return folder / "exported"


# Legal there, and once refused here: another decoder than encoder; and what has no golden.
MORE = {"bart_unequal": reference.Case("BartForConditionalGeneration", {}, {
    "decoder_attention_heads": 4, "decoder_ffn_dim": 20}),
    "mt5": reference.Case("MT5ForConditionalGeneration", t5={**reference.UNTIED, "d_ff": 5})}


@pytest.mark.parametrize("name", [*CASES, *MORE])
@pytest.mark.parametrize("seed", [7])
def test_import_and_export_agree_with_transformers(name, seed, tmp_path):
    case = {**CASES, **MORE}[name]
    model = reference.build(case, seed)
    inputs = reference.make_inputs(case, seed + 1)
    model.save_pretrained(tmp_path)
    pretrained = parity.assert_same(reference.record(model, case, inputs), tmp_path)

    folder = exported(tmp_path)
    kind = case.model.replace("ForMaskedLM", "Model")
    again, info = getattr(transformers, kind).from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    theirs, ours = model.state_dict(), again.state_dict()
    for key in ours:
        if "pooler" not in key:
            body = "bert." if hasattr(model, "bert") else "roberta."
            source = f"{body}{key}" if kind != case.model else key
            assert torch.equal(theirs[source], ours[key]), key
    record = reference.record(again.eval(), dataclasses.replace(case, model=kind), inputs)
    assert parity.assert_same(record, folder).ids == pretrained.ids


# One layer of the real widths: all-MiniLM-L6-v2, roberta-base, ModernBERT-base,
# multilingual-e5-large.
REAL = {"bert_mean": {"hidden_size": 384, "intermediate_size": 1536, "num_attention_heads": 12},
        "roberta_mean_dense": {"hidden_size": 768, "intermediate_size": 3072,
                               "num_attention_heads": 12},
        "modernbert_cls": {"hidden_size": 768, "intermediate_size": 1152,
                           "num_attention_heads": 12},
        "xlm_roberta_cls": {"hidden_size": 1024, "intermediate_size": 4096,
                            "num_attention_heads": 16}}


@pytest.mark.parametrize("name,size,tolerance", [
    *((name, {}, 1e-5) for name in sentences.CASES),
    *((name, {**size, "num_hidden_layers": 1, "scale": 0.05}, 1e-4)
      for name, size in REAL.items())])
def test_sentence_encoders_agree_with_sentence_transformers(name, size, tolerance, tmp_path):
    case = dataclasses.replace(sentences.CASES[name], shard="5GB") if size else (
        sentences.CASES[name])
    expected = sentences.vectors(sentences.build(case, tmp_path / "in", seed=7, **size))
    found = load(tmp_path / "in")
    for part, value in parity.sentence_vectors(found).items():
        scale = max(1.0, np.abs(expected[part]).max())
        np.testing.assert_allclose(value, expected[part], rtol=0, atol=tolerance * scale,
                                   err_msg=part)
    save(tmp_path / "out", found.family, found.params, found, tokenizers={
        "bert": Tokenizer.load(found.tokenizers["bert"])})
    again = sentences.vectors(sentences.opened(tmp_path / "out"))
    for part, value in again.items():
        np.testing.assert_array_equal(value, expected[part], err_msg=part)
    _, info = getattr(transformers, case.model).from_pretrained(
        tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info


@pytest.mark.parametrize("passage", ["passage", "corpus"])
def test_prompts_that_sentence_transformers_passes_over(passage, tmp_path):
    case = dataclasses.replace(sentences.CASES["bert_mean"], settings={
        "prompts": {"query": "query: ", passage: "passage: "}})
    sentences.build(case, tmp_path)
    edit = tmp_path / "config_sentence_transformers.json"
    settings = json.loads(edit.read_text())
    edit.write_text(json.dumps({**settings, "prompts": case.settings["prompts"]}))
    expected, found = sentences.vectors(sentences.opened(tmp_path)), load(tmp_path)
    for part, value in parity.sentence_vectors(found).items():
        np.testing.assert_allclose(value, expected[part], rtol=0, atol=1e-5, err_msg=part)


@pytest.mark.parametrize("name", ["dpr_question", "bart_generation", "rag_sequence"])
@pytest.mark.parametrize("old", [True, False])
def test_files_of_torch_itself(name, old, tmp_path):
    """torch.save's two formats, float32 and bfloat16, tied copies included."""
    model = reference.build(CASES[name])
    model.config.save_pretrained(tmp_path)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        state = model.to(dtype).state_dict()
        torch.save(state, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=not old)
        tensors = open_tensors(tmp_path)
        assert set(tensors) == set(state)
        for key, value in state.items():
            read = tensors.read(key).astype(np.float32)
            np.testing.assert_array_equal(read, value.float().numpy(), err_msg=key)
        load(tmp_path)


def test_the_loss_begins_with_the_start_token_of_the_checkpoint(tmp_path, monkeypatch):
    """RAG's loss there feeds whatever its labels begin with, <s> in its own training: with <s> as
    the start token it is ours."""
    monkeypatch.setattr(reference, "START", 0)
    case = CASES["rag_sequence"]
    model = reference.build(case, 3)
    model.config.generator.decoder_start_token_id = 0
    model.save_pretrained(tmp_path)
    record = reference.record(model, case, reference.make_inputs(case, 4))
    found = parity.assert_same(record, tmp_path)
    assert found.generator.start_token == found.ids.start == 0
    again = load(exported(tmp_path))
    assert (again.ids, again.generator) == (found.ids, found.generator)


def test_generation_settings_come_through(tmp_path):
    model = reference.build(CASES["bart_generation"])
    model.generation_config.forced_bos_token_id = 0
    model.generation_config.forced_eos_token_id = 2
    model.save_pretrained(tmp_path)
    ids = load(tmp_path).ids
    assert (ids.start, ids.end, ids.pad, ids.forced_bos, ids.forced_eos) == (2, 2, 1, 0, 2)
    again = transformers.BartForConditionalGeneration.from_pretrained(exported(tmp_path))
    kept = again.generation_config
    assert (kept.forced_bos_token_id, kept.forced_eos_token_id) == (0, 2)
    assert (kept.decoder_start_token_id, kept.pad_token_id, kept.eos_token_id) == (2, 1, 2)


@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize("forced", [
    {"forced_bos": 5}, {"forced_eos": True}, {"forced_bos": 7, "forced_eos": True},
    {"min_length": 4, "no_repeat_ngram_size": 2}, {"bad_words": ((9,), (4, 11))}])
def test_options_of_generation(beams, forced, tmp_path):
    """RAG-Token's answers under the usual options, token for token."""
    case = CASES["rag_token"]
    model, inputs = reference.build(case, 3), reference.make_inputs(case, 4)
    model.save_pretrained(tmp_path)
    x = {k: torch.from_numpy(v) for k, v in inputs.items()}
    with torch.no_grad():
        query = model.rag.question_encoder(x["question_ids"], attention_mask=x["question_mask"])[0]
    names = {"forced_bos": "forced_bos_token_id", "bad_words": "bad_words_ids",
             "min_length": "min_length", "no_repeat_ngram_size": "no_repeat_ngram_size"}
    options = {names[k]: v for k, v in forced.items() if k in names}
    if "bad_words" in forced:
        options["bad_words_ids"] = [list(word) for word in forced["bad_words"]]
    model.generation_config.forced_eos_token_id = reference.END if "forced_eos" in forced else None
    expected = model.generate(
        context_input_ids=x["source_ids"].flatten(0, 1),
        context_attention_mask=x["source_mask"].flatten(0, 1).long(),
        doc_scores=torch.einsum("be,bke->bk", query, x["doc_embeddings"]),
        n_docs=reference.PASSAGES, num_beams=beams, do_sample=False, length_penalty=0.0,
        max_length=reference.ANSWER + 1, **options,
        **({"early_stopping": "never"} if beams > 1 else {}))[:, 1:].tolist()
    found = load(tmp_path)
    settings = Decoding(strategy="thorough", num_beams=beams, max_length=reference.ANSWER, **forced)
    run = tiny.jit(functools.partial(decode, parity.rag_model(found), settings))
    with jax.default_matmul_precision("highest"):
        ours = run(found.params, parity.batch(inputs))
    for mine, theirs in zip(np.asarray(ours.best.tokens).tolist(), expected, strict=True):
        assert mine[: len(theirs)] == theirs
        assert set(mine[len(theirs) :]) <= {reference.PAD}
    assert "forced_bos" not in forced or {row[0] for row in expected} == {forced["forced_bos"]}


def test_fewer_documents_than_configured(tmp_path):
    """There RAG-Sequence's generate(n_docs=) does not reach the re-scoring; here the number of
    passages is the batch's."""
    case = CASES["rag_sequence"]
    model, inputs = reference.build(case, 3), reference.make_inputs(case, 4)
    model.save_pretrained(tmp_path)
    x = {k: torch.from_numpy(v[:, :1]) for k, v in inputs.items()
         if k in ("source_ids", "source_mask")}
    with pytest.raises(Exception, match="n_docs|size|shape"):
        model.generate(context_input_ids=x["source_ids"].flatten(0, 1),
                       context_attention_mask=x["source_mask"].flatten(0, 1).long(),
                       doc_scores=torch.zeros(reference.QUESTIONS, 1), n_docs=1)
    found = load(tmp_path)
    batch = parity.batch({**inputs, **{k: v.numpy() for k, v in x.items()},
                          "doc_embeddings": inputs["doc_embeddings"][:, :1]})
    settings = Decoding(strategy="thorough", num_beams=2, max_length=4)
    one = tiny.jit(functools.partial(decode, parity.rag_model(found), settings))(
        found.params, batch)
    np.testing.assert_allclose(one.best.posterior, 1, rtol=1e-6)


def test_the_classification_head_is_barts(tmp_path):
    """One text to encoder and decoder, as transformers does it, ended rows of other lengths."""
    model = reference.build(reference.Case(
        "BartForSequenceClassification", bart={"num_labels": 3}))
    rng = np.random.default_rng(0)
    ids = np.full((3, 7), reference.PAD, np.int32)
    for row, length in zip(ids, (7, 3, 5), strict=True):
        row[:length] = [0, *rng.integers(3, 27, length - 2), reference.END]
    mask = ids != reference.PAD
    with torch.no_grad():
        expected = model(torch.from_numpy(ids).long(), torch.from_numpy(mask).long()).logits
    model.model.save_pretrained(tmp_path)
    found = load(tmp_path)
    head = {ours: {"kernel": theirs.weight.detach().numpy().T, "bias": theirs.bias.detach().numpy()}
            for ours, theirs in (("dense", model.classification_head.dense),
                                 ("out", model.classification_head.out_proj))}
    built = rag.RagModel(tiny.BERT, found.generator, "token", reference.START, reference.END,
                         reference.PAD, classes=3)
    batch = tiny.class_batch(3, passages=1)._replace(
        source_ids=ids[:, None], source_mask=mask[:, None], decoder_ids=ids, decoder_mask=mask)
    with jax.default_matmul_precision("highest"):
        logits = tiny.jit(functools.partial(class_logits, built))(
            {**found.params, "classifier": head}, batch)
    np.testing.assert_allclose(logits[:, 0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["t5/gated", "t5/plain"])
def test_an_atlas_checkpoint_as_its_authors_save_it(name, tmp_path, monkeypatch):
    """The whole state of a training run: the fused reader and Contriever's means are theirs."""
    monkeypatch.setattr(reference, "START", 0)
    case = dataclasses.replace(CASES[name], t5={
        **CASES[name].t5, "relative_attention_max_distance": 128})
    bert = reference.Case("BertModel", {"hidden_size": 128})
    reader, contriever = reference.build(case, 5), reference.build(bert, 6)
    x = reference.make_inputs(bert)
    rows = {k: torch.from_numpy(v) for k, v in x.items()}
    fused = reference._bart(reader, rows, True)["fused"]
    states = contriever(rows["question_ids"], rows["question_mask"].long()).last_hidden_state
    mask = rows["question_mask"][:, :, None]
    means = (states * mask).sum(1) / mask.sum(1)
    fused.sum().backward()
    optimizer = torch.optim.AdamW(reader.parameters(), 0.0)
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    model = torch.nn.ModuleDict({
        "reader": reader, "retriever": torch.nn.ModuleDict({"contriever": contriever})})
    torch.save({"step": 1, "model": model.state_dict(), "optimizer": optimizer.state_dict(),
                "retr_optimizer": None, "scheduler": scheduler.state_dict(),
                "retr_scheduler": None, "opt": argparse.Namespace(
                    device=torch.device("cuda", 0), passages=["p.jsonl"], lr=4e-5, main=True)},
               tmp_path / "model.pth.tar")
    found = load(tmp_path)
    with jax.default_matmul_precision("highest"):
        ours = tiny.jit(functools.partial(
            parity.outputs, dataclasses.replace(found, retriever=None), x))(found.params)["fused"]
        vectors = tiny.jit(DprEncoder(found.retriever).apply)(
            {"params": found.params["bert"]}, x["question_ids"], x["question_mask"])
    for value, expected in ((ours, fused), (vectors, means)):
        expected = expected.detach().numpy()
        np.testing.assert_allclose(value, expected, rtol=0,
                                   atol=1e-5 * max(1.0, np.abs(expected).max()))


BASE = {
    "dpr_base": reference.Case("DPRQuestionEncoder", {
        "vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 12,
        "num_attention_heads": 12, "intermediate_size": 3072, "max_position_embeddings": 512}),
    "bart_base": reference.Case("BartForConditionalGeneration", {}, {
        "vocab_size": 50265, "d_model": 768, "encoder_layers": 6, "decoder_layers": 6,
        "encoder_attention_heads": 12, "decoder_attention_heads": 12, "encoder_ffn_dim": 3072,
        "decoder_ffn_dim": 3072, "max_position_embeddings": 1024}),
    "flan_t5_base_layer": reference.Case("T5ForConditionalGeneration", t5={
        **reference.UNTIED, "vocab_size": 32128, "d_model": 768, "d_kv": 64, "num_heads": 12,
        "d_ff": 2048, "num_layers": 1, "num_decoder_layers": 1,
        "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BASE)
def test_base_size(name, tmp_path):
    case = BASE[name]
    model = reference.build(case, scale=0.03)
    record = reference.record(model, case, reference.make_inputs(case))
    model.save_pretrained(tmp_path)
    del model
    parity.assert_same(record, tmp_path, tolerance=1e-4)


# One layer (of Gemma 3 one of each kind) of the real widths and positions: Llama 3.2 1B, Mistral
# 7B (and Llama 3 8B), Qwen2.5 0.5B, Qwen3 0.6B, OLMo 2 1B, Gemma 2 2B,
# Gemma 3 1B.
WIDTHS = {
    "llama": (2048, 8192, 32, 8, 64, {"rope_parameters": reference.rope(
        "llama3", 5e5, factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=8192)}),
    "mistral": (4096, 14336, 32, 8, 128, {"rope_parameters": reference.rope(theta=1e6)}),
    "qwen2": (896, 4864, 14, 2, 64, {"rope_parameters": reference.rope(theta=1e6)}),
    "qwen3": (1024, 3072, 16, 8, 128, {"rope_parameters": reference.rope(theta=1e6)}),
    "olmo2": (2048, 8192, 16, 16, 128, {"rope_parameters": reference.rope(theta=5e5)}),
    "gemma2": (2304, 9216, 8, 4, 256, {
        "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0, "rope_parameters": reference.rope(theta=1e4)}),
    "gemma3": (1152, 6912, 4, 1, 256, {
        "query_pre_attn_scalar": 256, "layer_types": ["sliding_attention", "full_attention"],
        "num_hidden_layers": 2, "rope_parameters": {
            "full_attention": reference.rope(theta=1e6),
            "sliding_attention": reference.rope(theta=1e4)}}),
}


@pytest.mark.parametrize("name", WIDTHS)
def test_decoder_only_layers_of_real_widths(name, tmp_path):
    """Guards against what tiny sizes cannot show: heads whose width is not the model's share, and
    sums of thousands in another order or dtype."""
    *sizes, fields = WIDTHS[name]
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
             "head_dim")
    case = dataclasses.replace(CASES[name], causal={
        **CASES[name].causal, **dict(zip(names, sizes, strict=True)), "num_hidden_layers": 1,
        **fields})
    model, x = reference.build(case, scale=0.03), reference.make_inputs(case)
    with torch.no_grad():
        expected = reference.causal(model, {k: torch.from_numpy(v) for k, v in x.items()})
    model.save_pretrained(tmp_path)
    del model
    found = load(tmp_path)
    with jax.default_matmul_precision("highest"):
        ours = tiny.jit(functools.partial(parity.outputs, found, x))(found.params)
    for part, value in expected.items():
        np.testing.assert_allclose(ours[part], value, rtol=0, err_msg=part,
                                   atol=1e-4 * max(1.0, value.abs().max()))


@pytest.mark.parametrize("variant,fields", [
    ("gemma2", {}), ("gemma3", {"window": 3, "global_every": 2}), ("mistral", {"window": 3}),
    ("gemma3", {"window": 3, "rope_type": "linear", "rope_factor": 2.0, "rope_local_theta": 9.0})])
def test_what_was_trained_from_random_weights_computes_the_same_there(variant, fields, tmp_path):
    """Fields that stand as ours leave them, which no checkpoint's do, were exported as others."""
    config = CausalConfig(variant=variant, vocab_size=38, width=16, decoder_layers=3, heads=4,
                          kv_heads=2, head_size=4, mlp_width=10, init_std=0.3, rope_theta=100.0,
                          max_positions=64, **fields)
    module, ids = CausalLM(config), np.random.default_rng(0).integers(0, 38, (2, 9), np.int32)
    given = ids[:, :4], np.ones((2, 4), bool), ids[:, 4:]
    params = tiny.perturbed(tiny.jit(module.init)(jax.random.key(0), *given)["params"])
    save(tmp_path / "out", class_of(config), {"generator": params}, Architecture(None, config))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", attn_implementation="eager")
    with torch.no_grad():
        expected = model(torch.from_numpy(ids).long()).logits[:, 4:]
    with jax.default_matmul_precision("highest"):
        ours = tiny.jit(module.apply)({"params": params}, *given)
    np.testing.assert_allclose(ours, expected, atol=1e-4)


@pytest.mark.parametrize("family", ["RagTokenForGeneration", "DPRContextEncoder"])
def test_the_code_of_a_model_card_opens_the_checkpoint(family, tmp_path):
    """Whoever gets the folder alone has its card to go by."""
    texts = ["Paris is the capital of France."] * 3
    pieces, words = train_bart_tokenizer(texts, 300), train_bert_tokenizer(texts, 100)
    card = model_card(FAMILIES[family], Provenance("", {}, {}, {}))
    folder, _ = checkpoints.written(tmp_path, family, card=card, tokenizers={
        "query_encoder": words, "document_encoder": words, "generator": pieces})
    blocks = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.S)
    names: dict = {}
    for block in blocks:
        exec(block.replace("PATH_TO_THIS_FOLDER", str(folder)), names)
    assert len(blocks) == 2 and names["checkpoint"].family == family
    assert type(names["model"]).__name__ == family and names["tokenizer"]
