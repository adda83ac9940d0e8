"""Loading: strict names, configurations, families, damage, placement, memory."""

import dataclasses
import json
import pathlib
import re
import tracemalloc

import checkpoints
import flax.linen as nn
import jax
import numpy as np
import pytest
from checkpoints import BART, BERT, IDS, edit_config, edit_weights, params, written

from rag_jax import hosts, parallel
from rag_jax.config import CausalConfig, ConfigError, MeshConfig
from rag_jax.data.tokenizer_training import (
    BERT_SPECIALS,
    train_bart_tokenizer,
    train_bert_tokenizer,
)
from rag_jax.hub import families
from rag_jax.hub.config_json import Architecture, SpecialIds, causal_json, special_ids
from rag_jax.hub.load import abstract, describe, load, locate
from rag_jax.hub.save import save
from rag_jax.hub.sentence import LIBRARY_ARGUMENTS
from rag_jax.hub.stored import HubError
from rag_jax.models.rag import RagModel
from rag_jax.models.stack import unstack_layers

QUESTION, BART_CG, TOKEN = (
    "DPRQuestionEncoder", "BartForConditionalGeneration", "RagTokenForGeneration")


@pytest.mark.parametrize("family", checkpoints.TOWERS)
@pytest.mark.parametrize("shard_bytes", [10**9, 3000])
def test_export_and_import_keep_every_bit(family, shard_bytes, tmp_path):
    bert = dataclasses.replace(BERT, projection=0 if family == "BertModel" else 5)
    folder, tree = written(tmp_path, family, bert, shard_bytes=shard_bytes)
    assert (folder / "model.safetensors").exists() == (shard_bytes == 10**9)
    found = load(folder)
    checkpoints.assert_equal(found.params, tree)
    assert found.family == family
    assert found.retriever == (None if family.startswith("Bart") else bert)
    assert found.generator == (BART if "generator" in tree else None)
    assert found.ids == (IDS if "generator" in tree else None)
    assert found.kind == {"RagTok": "token", "RagSeq": "sequence"}.get(family[:6])


def test_parameters_have_the_structure_of_the_models_own(tmp_path):
    folder, _ = written(tmp_path, TOKEN)
    model = RagModel(BERT, BART, "token", 2, 2, 1)
    expected = jax.eval_shape(lambda: nn.meta.unbox(
        model.init(jax.random.key(0), ("query_encoder", "generator"))))
    found = load(folder).params
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), found) == jax.tree.map(
        lambda x: (x.shape, x.dtype), expected)


@pytest.mark.parametrize("family", [QUESTION, BART_CG])
def test_scanned_layers_are_stacked_in_order_and_saved_the_same(family, tmp_path):
    folder, tree = written(tmp_path, family)
    scan = {"scan_layers": True}
    found = load(folder, retriever=scan, generator=scan)
    checkpoints.assert_equal(unstack_layers(found.params), tree)
    again, _ = written(tmp_path / "again", family)
    assert (again / "model.safetensors").read_bytes() == (
        folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize("scan", [False, True])
def test_parameters_go_straight_to_their_shardings(scan, tmp_path):
    folder, tree = written(tmp_path, TOKEN, bart=dataclasses.replace(BART, vocab_size=14))
    mesh = parallel.make_mesh(MeshConfig(data=4, model=2))
    settings = {"scan_layers": scan}
    found = load(folder, mesh=mesh, retriever=settings, generator=settings)
    model = RagModel(found.retriever, found.generator, "token", 2, 2, 1)
    boxed = jax.eval_shape(lambda: model.init(jax.random.key(0), ("query_encoder", "generator")))
    shardings = parallel.param_shardings(boxed, mesh)
    assert jax.tree.map(lambda x: x.sharding, found.params) == shardings
    assert found.params["generator"]["embedding"].addressable_shards[0].data.shape == (7, 8)
    checkpoints.assert_equal(unstack_layers(jax.device_get(found.params)), tree)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_files_become_float32(dtype, tmp_path):
    folder, tree = written(tmp_path, BART_CG)
    edit_weights(folder, lambda t: {k: v.astype(dtype) for k, v in t.items()})
    expected = jax.tree.map(lambda x: np.asarray(x).astype(dtype).astype(np.float32), tree)
    checkpoints.assert_equal(load(folder).params, expected)


def test_memory_stays_near_one_copy(tmp_path):
    """Reading is tensor by tensor: the host's numpy never holds a second copy of the model."""
    bart = dataclasses.replace(BART, vocab_size=3000, width=64, mlp_width=256, encoder_layers=6,
                               decoder_layers=6)
    folder, tree = written(tmp_path, BART_CG, bart=bart)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
    del tree
    load(folder)
    tracemalloc.start()
    load(folder)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.5 * size  # with what the device arrays borrow


def rename(old: str, new: str):
    return lambda tensors: {re.sub(old, new, k): v for k, v in tensors.items()}


@pytest.mark.parametrize("family,old,new", [
    ("BertModel", "^", "bert."),
    ("BertModel", r"LayerNorm\.weight$", "LayerNorm.gamma"),
    ("BertModel", r"LayerNorm\.bias$", "LayerNorm.beta"),
    (QUESTION, r"^question_encoder\.bert_model\.", ""),
    (BART_CG, r"^model\.", ""),
    (BART_CG, r"shared", "encoder.embed_tokens"),
    (BART_CG, r"model\.shared", "lm_head"),
    ("BartModel", "^", "model."),
    (TOKEN, r"^rag\.", ""),
    ("RagModel", "^", "rag."),
    (TOKEN, r"question_encoder\.question_encoder\.bert_model", "question_encoder"),
])
def test_other_names_of_the_same_tensors(family, old, new, tmp_path):
    """Prefixes depend on the class that saved the file, and old files call norms otherwise."""
    folder, tree = written(tmp_path, family)
    edit_weights(folder, rename(old, new))
    checkpoints.assert_equal(load(folder).params, tree)


def test_an_end_to_end_checkpoint_brings_its_document_encoder(tmp_path):
    folder, tree = written(tmp_path, TOKEN)

    def edit(tensors):
        question = "rag.question_encoder.question_encoder."
        return {**tensors, **{k.replace(question, "rag.ctx_encoder.ctx_encoder."): v + 1
                              for k, v in tensors.items() if k.startswith(question)}}

    edit_weights(folder, edit)
    found = load(folder).params
    checkpoints.assert_equal(found["document_encoder"],
                             jax.tree.map(lambda x: x + 1, tree["query_encoder"]))


def test_known_buffers_and_heads_are_left_out(tmp_path):
    folder, tree = written(tmp_path, "BertModel")
    x = np.zeros((2, 2), np.float32)
    edit_weights(folder, lambda t: {
        **{f"bert.{k}": v for k, v in t.items()}, "bert.embeddings.position_ids": np.arange(6),
        "cls.predictions.bias": x, "cls.predictions.decoder.weight": x,
        "cls.seq_relationship.weight": x})
    edit_config(folder, architectures=["BertForMaskedLM"])
    checkpoints.assert_equal(load(folder).params, tree)


@pytest.mark.parametrize("family, name", [
    (BART_CG, "lm_head.bias"), (BART_CG, "model.rotary_emb.inv_freq"),
    (BART_CG, "decoder.bias"), ("BertModel", "decoder.bias"), ("BertModel", "encoder.version"),
    (QUESTION, "lm_head.dense.weight")])
def test_what_does_no_harm_in_one_model_is_refused_in_another(family, name, tmp_path):
    """The bias of an output layer is nothing to RoBERTa's states, and all to a generator's."""
    folder, _ = written(tmp_path, family)
    edit_weights(folder, lambda tensors: {**tensors, name: np.ones(3, np.float32)})
    with pytest.raises(HubError, match=f"1 tensors that no parameter takes: {re.escape(name)}"):
        load(folder)


def test_final_logits_bias_may_be_absent_and_is_zero(tmp_path):
    folder, tree = written(tmp_path, BART_CG)
    edit_weights(folder, lambda t: {k: v for k, v in t.items() if k != "final_logits_bias"})
    assert not np.asarray(load(folder).params["generator"]["final_logits_bias"]).any()


def test_tied_copies_are_taken_when_equal_and_refused_when_not(tmp_path):
    folder, tree = written(tmp_path, BART_CG)
    names = ("lm_head.weight", "model.encoder.embed_tokens.weight",
             "model.decoder.embed_tokens.weight")
    edit_weights(folder, lambda t: {**t, **{n: t["model.shared.weight"].copy() for n in names}})
    checkpoints.assert_equal(load(folder).params, tree)
    other, _ = written(tmp_path / "half", BART_CG)  # the same numbers in another type
    edit_weights(other, lambda t: {**t, names[0]: t["model.shared.weight"].astype(np.float16),
                                   "model.shared.weight": t["model.shared.weight"].astype(
                                       np.float16).astype(np.float32)})
    assert load(other).params["generator"]["embedding"].dtype == np.float32
    for name in names:
        other, _ = written(tmp_path / name, BART_CG)
        edit_weights(other, lambda t, name=name: {
            **t, name: np.nextafter(t["model.shared.weight"], np.float32(9))})
        with pytest.raises(HubError, match=f"model.shared.weight and {name} differ"):
            load(other)


@pytest.mark.parametrize("edit,message", [
    (lambda t: {k: v for k, v in t.items() if not k.endswith("fc1.bias")},
     r"3 missing tensors: model\.encoder\.layers\.0\.fc1\.bias"),
    (lambda t: {**t, "model.encoder.extra.weight": np.zeros(2, np.float32)},
     r"1 tensors that no parameter takes: model\.encoder\.extra\.weight"),
    (rename(r"encoder\.layers\.0\.fc1\.bias", "encoder.layers.0.fc_1.bias"),
     r"missing tensors: \S*fc1\.bias \(near: \S*fc_1\.bias\).*takes: \S*fc_1\.bias \(near: "),
    (lambda t: {**t, "model.shared.weight": np.zeros((40, 8), np.float32)},
     r"model\.shared\.weight is \(40, 8\), the config asks for \(13, 8\)"),
    (lambda t: {k: v.reshape(-1)[:-1] if k.endswith("bias") else v for k, v in t.items()},
     r"tensors of another shape: .* and \d+ more"),
    (lambda t: {**t, "final_logits_bias": t["final_logits_bias"][0]},
     r"final_logits_bias is \(13,\), the config asks for \(1, 13\)"),
])
def test_every_tensor_is_used_once_and_every_parameter_filled(edit, message, tmp_path):
    folder, _ = written(tmp_path, BART_CG)
    edit_weights(folder, edit)
    with pytest.raises(HubError, match=message) as error:
        load(folder)
    assert str(folder / "model.safetensors") in str(error.value)


def test_weights_of_another_type_are_refused(tmp_path):
    folder, _ = written(tmp_path, QUESTION)
    edit_weights(folder, lambda t: {k: v.astype(np.float64) for k, v in t.items()})
    with pytest.raises(HubError, match="dtype F64.*F32, F16, BF16"):
        load(folder)


@pytest.mark.parametrize("family,changes,message", [
    (BART_CG, {"d_model": None}, r"config\.json: lacks d_model"),
    (QUESTION, {"hidden_act": None, "vocab_size": None}, "lacks vocab_size, hidden_act"),
    (QUESTION, {"hidden_act": "gelu_new"}, "hidden_act = 'gelu_new'.*allowed: gelu, relu"),
    (BART_CG, {"activation_function": "swish"}, "'swish'.*allowed: gelu, relu"),
    (BART_CG, {"decoder_ffn_dim": 24}, r"decoder\.layers\.0\.fc1\.weight is \(12, 8\).*\(24, 8\)"),
    (BART_CG, {"decoder_attention_heads": 3}, "3 attention heads do not divide"),
    (BART_CG, {"encoder_attention_heads": 3, "decoder_attention_heads": 3}, "do not divide"),
    (BART_CG, {"d_model": "8"}, "d_model = '8' should be of type int"),
    (BART_CG, {"scale_embedding": 1}, "scale_embedding = 1 should be of type bool"),
    (BART_CG, {"normalize_before": True}, "normalize_before = True is another architecture"),
    (BART_CG, {"is_causal": False}, "is_causal = False is another architecture"),
    (BART_CG, {"decoder_attention_heads": None}, "lacks decoder_attention_heads"),
    (QUESTION, {"position_embedding_type": "relative_key"}, "another architecture"),
    (QUESTION, {"projection_dim": 3}, "2 missing tensors: question_encoder.encode_proj.weight"),
    (BART_CG, {"vocab_size": 99}, r"is \(13, 8\), the config asks for \(99, 8\)"),
    (BART_CG, {"decoder_layers": 3}, "26 missing tensors: model.decoder.layers.2"),
    (BART_CG, {"decoder_layers": 1}, "26 tensors that no parameter takes"),
    (BART_CG, {"decoder_layers": 10**9}, "1000000000 layers, and model.safetensors has"),
    (BART_CG, {"decoder_layers": -1}, "decoder_layers = -1 is out of its bounds: at least 1"),
    (QUESTION, {"num_attention_heads": 0}, "num_attention_heads = 0 is out of its bounds"),
    (QUESTION, {"vocab_size": 1e400}, "vocab_size = inf should be of type int"),
    (BART_CG, {"dropout": float("nan")}, "dropout = nan should be of type float"),
    ("BartModel", {"decoder_start_token_id": 13}, "decoder_start_token_id = 13 is no token"),
    ("BartModel", {"eos_token_id": []}, "eos_token_id = .* is no token"),
    ("BartModel", {"eos_token_id": [2, True]}, "eos_token_id = True is no token"),
    ("BartModel", {"eos_token_id": [2] * 65}, "eos_token_id has 65 tokens; at most 64"),
    ("BartModel", {"num_beams": "4"}, "num_beams = '4' should be of type int"),
    (TOKEN, {"max_length": -1}, "max_length = -1 is out of its bounds"),
    (BART_CG, {"architectures": ["T5ForConditionalGeneration"]}, "T5.*known: BertModel"),
    (BART_CG, {"architectures": None, "model_type": "longt5"}, "'longt5' are not known"),
    (TOKEN, {"generator": {"model_type": "t5"}}, "generator is 't5'.*bart"),
    (TOKEN, {"generator": None}, "generator is None"),
])
def test_a_config_that_does_not_fit_is_one_clear_error(family, changes, message, tmp_path):
    folder, _ = written(tmp_path, family)
    edit_config(folder, **changes)
    with pytest.raises(HubError, match=message):
        load(folder)


def test_settings_of_generation_come_from_where_transformers_takes_them(tmp_path):
    """Beside a RAG checkpoint, generation_config.json was not read at all."""
    folder, _ = written(tmp_path, TOKEN)
    assert not describe(folder).search
    section = json.loads((folder / "config.json").read_text())["generator"]
    edit_config(folder, num_beams=3, generator={
        **section, "num_beams": 4, "length_penalty": 2, "min_length": None, "max_length": 2})
    found = describe(folder)
    assert found.search == {"num_beams": 3, "length_penalty": 2.0} and found.ids == IDS
    (folder / "generation_config.json").write_text('{"max_length": 21, "forced_eos_token_id": 2}')
    found = describe(folder)
    assert found.search == {"max_length": 20}, "without the start token"
    assert found.ids == dataclasses.replace(IDS, forced_bos=None, forced_eos=2), "it alone forces"
    (folder / "generation_config.json").write_text('{"length_penalty": "long"}')
    with pytest.raises(HubError, match=r"generation_config\.json: length_penalty = 'long'"):
        load(folder)
    (folder / "generation_config.json").write_text('{"pad_token_id": -1}')
    with pytest.raises(HubError, match=r"generation_config\.json: pad_token_id = -1 is no token"):
        describe(folder)


def test_several_end_tokens_go_in_and_out(tmp_path):
    """An export kept one of them, and generation then ran past the others."""
    folder, tree = written(tmp_path, BART_CG)
    assert describe(folder).generator.end_tokens == ()
    edit_config(folder, eos_token_id=[4, 2])
    assert describe(folder).generator.end_tokens == (), "generation_config.json goes first"
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 2, 5]}')
    found = describe(folder)
    assert (found.generator.end_tokens, found.ids.end) == ((5, 2), 5)
    save(tmp_path / "out", BART_CG, tree, Architecture(None, found.generator, found.ids))
    for file in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "out" / file).read_text())["eos_token_id"] == [5, 2]
    assert causal_json(CausalConfig(end_tokens=(5, 2)), IDS)["eos_token_id"] == [5, 2]


def test_the_only_end_of_a_decoder_only_model_counts_where_its_tokenizer_has_another(tmp_path):
    """Its answers did not end there, but ran on to the longest length."""
    tokenizer = train_bart_tokenizer(["Lima is the capital of Peru"], 300)
    config = CausalConfig(variant="qwen2", vocab_size=300, max_positions=32, width=8, heads=2,
                          kv_heads=1, head_size=4, mlp_width=8, decoder_layers=1)
    for end, expected in ((tokenizer.end, ()), (7, (7,))):
        architecture = Architecture(None, config, SpecialIds(end, end, tokenizer.pad, None))
        folder = tmp_path / str(end)
        tree = jax.tree.map(lambda x: np.zeros(x.shape, np.float32), nn.meta.unbox(
            abstract(["generator"], architecture)))
        save(folder, "Qwen2ForCausalLM", tree, architecture, tokenizers={"generator": tokenizer})
        assert describe(folder).generator.end_tokens == expected
        (folder / "tokenizer.json").write_text("{")
        assert describe(folder).generator.end_tokens == (), "told where it is read"


def test_contriever_is_a_bert_whose_vectors_are_means(tmp_path):
    """Its config.json names a class that is not of transformers, and it was refused for that."""
    folder, _ = written(tmp_path, "BertModel")
    edit_config(folder, architectures=["Contriever"])
    found = describe(folder)
    edit_config(folder, architectures=["BertModel"])
    bare = describe(folder).retriever
    assert bare.pooling == "auto"
    assert found.retriever == dataclasses.replace(
        bare, pooling="mean", normalize=False, titles="joined")


@pytest.mark.parametrize("model_type, field", [("llama", "eos_token_id"), ("t5", "pad_token_id")])
def test_a_token_that_is_none_is_told_by_the_field_that_has_it(model_type, field):
    """A Llama's eos_token_id was told as a decoder_start_token_id, which its file does not have."""
    with pytest.raises(HubError, match=f"config.json: {field} = -1 is no token"):
        special_ids({"model_type": model_type, "vocab_size": 9, field: -1}, {},
                    pathlib.Path("config.json"))


TRANSFORMER, POOLING, DENSE, NORMALIZE = (
    {"path": path, "type": f"sentence_transformers.models.{name}"} for path, name in (
        ("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Dense", "Dense"),
        ("2_Normalize", "Normalize")))
PLAIN = [TRANSFORMER, POOLING]
CLS, MEAN = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, {
    "pooling_mode": "mean"}


def sentence_folder(folder, modules, pooling, settings, **more):
    """A BertModel with files of sentence-transformers around it."""
    folder, _ = written(folder, "BertModel")
    (folder / "1_Pooling").mkdir()
    for name, value in (("modules.json", modules), ("1_Pooling/config.json", pooling),
                        ("config_sentence_transformers.json", settings), *more.items()):
        (folder / name).write_text(json.dumps(value))
    return folder


@pytest.mark.parametrize("modules,pooling,settings,expected", [
    (PLAIN, CLS, {}, {"pooling": "cls", "normalize": False}),
    (PLAIN, MEAN, {"similarity_fn_name": None}, {"pooling": "mean", "normalize": False}),
    (PLAIN, {"pooling_mode_mean_tokens": True}, {"similarity_fn_name": "cosine"},
     {"pooling": "mean", "normalize": True, "logit_scale": 20.0}),
    ([*PLAIN, NORMALIZE], CLS, {"similarity_fn_name": "dot", "prompts": {
        "query": "query: ", "document": "passage: ", "passage": "p: ", "clustering": "c: "}},
     {"normalize": True, "query_prefix": "query: ", "passage_prefix": "passage: "}),
    (PLAIN, CLS, {"prompts": {"passage": "p: ", "corpus": "c: "}}, {"passage_prefix": ""}),
    (PLAIN, CLS, {"prompts": {"document": "", "passage": "p: "}}, {"passage_prefix": ""}),
])
def test_what_sentence_transformers_says_is_taken_over(modules, pooling, settings, expected,
                                                       tmp_path):
    """Read as [CLS] and inner products, a mean-pooled model found 75 of 95 answers."""
    found = describe(sentence_folder(tmp_path, modules, pooling, settings)).retriever
    expected = {"titles": "joined", "scale": None, **expected}
    assert {name: getattr(found, name) for name in expected} == expected


@pytest.mark.parametrize("modules,pooling,settings,message", [
    (PLAIN, {"pooling_mode_cls_token": True, "pooling_mode_max_tokens": True}, {},
     r"1_Pooling/config\.json: its pooling is cls_token, max_tokens"),
    (PLAIN, {"pooling_mode": "lasttoken"}, {}, "its pooling is lasttoken, .*: cls and mean are"),
    (PLAIN, {}, {}, "its pooling is not said"),
    (PLAIN, {**MEAN, "include_prompt": False}, {"prompts": {"query": "q: "}}, "include_prompt"),
    ([*PLAIN, {**DENSE, "type": "m.LSTM"}], CLS, {}, "go through Transformer, Pooling, LSTM"),
    ([*PLAIN, NORMALIZE, DENSE], CLS, {}, "Normalize, Dense; .* in this order"),
    ([TRANSFORMER], {}, {}, "go through Transformer; known here"),
    ([TRANSFORMER, {**POOLING, "path": "../1_Pooling"}], {}, {}, "paths '', '../1_Pooling'"),
    ([TRANSFORMER, {**POOLING, "path": "a\0b"}], {}, {}, r"paths '', 'a\\x00b'"),
    ([TRANSFORMER, {**POOLING, "path": "\ud800"}], {}, {}, r"paths '', '\\ud800'"),
    ([{**TRANSFORMER, "path": "0_BERT"}, POOLING], {}, {}, "has to be the folder itself"),
    ("x", {}, {}, "no list of modules"),
    ([*PLAIN, DENSE], CLS, {}, r"2_Dense/config\.json: activation_function = 'torch.nn.ReLU'"),
    ([*PLAIN, {**DENSE, "path": "3_Dense"}], CLS, {}, r"3_Dense/config\.json: use_residual = True"),
    (PLAIN, CLS, {"similarity_fn_name": "euclidean"}, "similarity_fn_name = 'euclidean'"),
    (PLAIN, CLS, {"prompts": {"query": 3}}, "prompts = .*3"),
    (PLAIN, CLS, {"truncate_dim": 4}, "truncate_dim = 4 is not known"),
])
def test_what_sentence_transformers_has_more_is_refused(modules, pooling, settings, message,
                                                        tmp_path):
    """Vectors that went another way than the model was trained for retrieve something else."""
    folder = sentence_folder(tmp_path, modules, pooling, settings)
    for path, more in (("2_Dense", {"activation_function": "torch.nn.ReLU"}),
                       ("3_Dense", {"use_residual": True})):
        (folder / path).mkdir()
        (folder / path / "config.json").write_text(json.dumps(
            {"in_features": 8, "out_features": 3, **more}))
    with pytest.raises(HubError, match=message):
        describe(folder)


def test_lower_case_that_the_tokenizer_does_not_see_to_is_refused(tmp_path):
    folder = sentence_folder(tmp_path, PLAIN, CLS, {}, **{
        "sentence_bert_config.json": {"max_seq_length": 5, "do_lower_case": True}})
    assert describe(folder).longest == 5
    train_bert_tokenizer(["the two"], 60).save(folder)
    describe(folder)
    train_bart_tokenizer(["the two"], 300).save(folder)
    with pytest.raises(HubError, match="do_lower_case = true"):
        describe(folder)
    (folder / "tokenizer.json").unlink()  # old folders have a list of words alone
    (folder / "vocab.txt").write_text("\n".join([*BERT_SPECIALS, "the", "two", "The", "Two"]))
    for lower in (True, False):
        (folder / "tokenizer_config.json").write_text(json.dumps({
            "do_lower_case": lower, "tokenizer_class": "BertTokenizer", "model_max_length": 5}))
        if lower:
            describe(folder)
    with pytest.raises(HubError, match="do_lower_case = true"):
        describe(folder)


@pytest.mark.parametrize("name", LIBRARY_ARGUMENTS)
def test_what_the_library_is_to_change_of_a_model_is_refused(tmp_path, name):
    """Such as the number of its layers: the vectors were those of another model."""
    for number, value in enumerate(({}, None, {"num_hidden_layers": 1})):
        (tmp_path / str(number)).mkdir()
        folder = sentence_folder(tmp_path / str(number), PLAIN, CLS, {}, **{
            "sentence_bert_config.json": {"max_seq_length": 5, name: value}})
        if value:
            with pytest.raises(HubError, match=f"{name} = .'num_hidden_layers': 1. is not known"):
                describe(folder)
        else:
            assert describe(folder).longest == 5


@pytest.mark.parametrize("changes,message", [
    ({"pad_token_id": 0}, "pad_token_id = 0 is another architecture"),
    ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
    ({"hidden_act": "gelu_new"}, "hidden_act")])
def test_another_roberta_is_refused_by_field(changes, message, tmp_path):
    """Its positions count from the number of its padding token."""
    encoder = dataclasses.replace(BERT, model_type="roberta")
    save(tmp_path / "out", "RobertaModel", params("BertModel", encoder), Architecture(encoder))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["max_position_embeddings"], config["pad_token_id"]) == (8, 1)
    assert describe(tmp_path / "out").retriever.max_positions == 6
    edit_config(tmp_path / "out", **changes)
    with pytest.raises(HubError, match=message):
        describe(tmp_path / "out")


def test_a_missing_or_broken_config(tmp_path):
    folder, _ = written(tmp_path, QUESTION)
    (folder / "config.json").write_text("{")
    with pytest.raises(HubError, match=r"config\.json: not JSON"):
        load(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(HubError, match="not a JSON object"):
        load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(HubError, match=r"config\.json: missing"):
        load(folder)
    (folder / "config.json").mkdir()
    with pytest.raises(HubError, match=r"config\.json: cannot be read \(Is a directory\)"):
        load(folder)


@pytest.mark.parametrize("family", checkpoints.TOWERS)
def test_the_family_is_found_without_architectures(family, tmp_path):
    folder, tree = written(tmp_path, family)
    edit_config(folder, architectures=None)
    found = load(folder)
    assert found.family == ("RagModel" if family.startswith("Rag") else family)
    checkpoints.assert_equal(found.params, tree)


@pytest.mark.parametrize("model_type", ["roberta", "xlm-roberta", "modernbert"])
def test_the_class_alone_says_the_architecture(model_type, tmp_path):
    """A RoBERTa without model_type was read as a BERT, whose positions begin two rows before."""
    encoder = dataclasses.replace(BERT, model_type=model_type)
    family = families.BARE[model_type]
    save(tmp_path / "out", family, params("BertModel", encoder), Architecture(encoder))
    expected = describe(tmp_path / "out")
    assert expected.retriever.model_type == model_type and expected.family == family
    edit_config(tmp_path / "out", model_type=None)
    assert describe(tmp_path / "out") == expected


def test_old_configs_without_the_later_fields_mean_their_defaults(tmp_path):
    folder, _ = written(tmp_path, QUESTION)
    edit_config(folder, projection_dim=None, layer_norm_eps=None, type_vocab_size=None)
    assert load(folder).retriever == BERT


def test_some_towers_only(tmp_path):
    folder, tree = written(tmp_path, TOKEN)
    checkpoints.assert_equal(load(folder, towers=["generator"]).params,
                             {"generator": tree["generator"]})
    with pytest.raises(HubError, match="holds query_encoder, generator, not document_encoder"):
        load(folder, towers=["document_encoder"])


def test_description_is_the_checkpoint_without_parameters(tmp_path):
    folder, _ = written(tmp_path, TOKEN)
    assert describe(folder) == dataclasses.replace(load(folder), params={})


def test_settings_of_how_to_compute_are_added(tmp_path):
    folder, _ = written(tmp_path, TOKEN)
    found = load(folder, retriever={"dropout": 0.0}, generator={"remat": "dots"})
    assert found.retriever == dataclasses.replace(BERT, dropout=0.0)
    assert found.generator == dataclasses.replace(BART, remat="dots")


def test_tokenizer_folders_are_found_where_they_are(tmp_path):
    folder, _ = written(tmp_path, TOKEN)
    assert load(folder).tokenizers == {}
    (folder / "generator_tokenizer").mkdir()
    (folder / "generator_tokenizer" / "vocab.json").touch()
    assert load(folder).tokenizers == {"generator": folder / "generator_tokenizer"}
    folder, _ = written(tmp_path, QUESTION)
    (folder / "vocab.txt").touch()
    assert load(folder).tokenizers == {"query_encoder": folder}
    (folder / "vocab.txt").rename(folder / "tokenizer.model")  # Llama 2's: it was none
    assert load(folder).tokenizers == {"query_encoder": folder}


def test_a_folder_is_located_as_it_is(tmp_path):
    assert locate(tmp_path) == tmp_path


@pytest.mark.parametrize("source", ["/no/such/folder", "a/b/c", "../nowhere", ""])
def test_a_source_that_can_be_no_name_of_the_hub(source):
    with pytest.raises(HubError, match="no such folder, and it is no name of the hub"):
        locate(source)


def test_a_name_that_is_not_in_the_cache_offline(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match="'facebook/none'.*not in the cache"):
        locate("facebook/none")
    (tmp_path / "quickstart").mkdir()
    (tmp_path / "quickstar.txt").write_text("no folder")
    with pytest.raises(HubError, match="no workdir and .*did you mean .*/quickstart[?]$"):
        locate(tmp_path / "quickstrat")  # only the hub was spoken of


@pytest.mark.parametrize("file,calls", [("model.safetensors", 1), ("pytorch_model.bin", 2)])
def test_safetensors_are_preferred_and_other_formats_never_asked_for(
        file, calls, tmp_path, monkeypatch):
    asked = []

    def download(name, allow_patterns):
        asked.append(allow_patterns)
        if any(pathlib.PurePath(file).match(pattern) for pattern in allow_patterns):
            (tmp_path / file).touch()
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert locate("facebook/some") == tmp_path
    assert (tmp_path / file).exists() and len(asked) == calls
    patterns = json.dumps(asked)
    assert not re.search(r"h5|msgpack|\.ot|\"\*\"", patterns)
    assert "config.json" in asked[0] and "generator_tokenizer/*" in asked[0]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("family", [QUESTION, BART_CG])
def test_weights_that_are_not_finite_are_refused_by_name(family, bad, tmp_path):
    """A single NaN made every answer empty, and of probability 1."""
    folder, _ = written(tmp_path, family)

    def spoil(tensors):
        name = sorted(name for name in tensors if name.endswith("fc1.weight") or name.endswith(
            "intermediate.dense.weight"))[0]
        tensors[name] = tensors[name].copy()
        tensors[name].flat[3] = bad
        return tensors

    edit_weights(folder, spoil)
    with pytest.raises(HubError, match=r"(fc1|dense)\.weight \(\w+/\S+ here\) holds NaN or inf"):
        load(folder)


def test_processes_with_other_files_of_a_checkpoint_are_refused(tmp_path, monkeypatch):
    """They trained a mixture to its end, and its checkpoint was called damaged."""
    folder, tree = written(tmp_path, BART_CG)
    told, others = [], []
    monkeypatch.setattr(hosts, "connected", lambda: True)
    monkeypatch.setattr(hosts, "exchange", lambda mine: told.append(mine) or [mine, *others])
    checkpoints.assert_equal(load(folder).params, tree)
    others += told
    (folder / "trainer_state.json").write_text("{}")  # which nothing reads
    checkpoints.assert_equal(load(folder).params, tree)
    edit_weights(folder, lambda tensors: {name: 2 * array for name, array in tensors.items()})
    with pytest.raises(ConfigError, match=f"values of model.safetensors of {folder}; start all"):
        load(folder)
