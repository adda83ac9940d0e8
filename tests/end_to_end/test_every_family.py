"""Every family of sentence encoders and of decoder-only generators the whole way: convert, index,
ask, train two steps, go on, evaluate, export. BART is in `test_commands.py`, T5 in
`test_t5_commands.py`, Gemma 3 and DPR in `test_causal_commands.py`."""

import json
import shutil
from typing import Any

import jax
import numpy as np
import pytest

import rag_jax
from rag_jax.cli import build_index, convert, evaluate, train
from rag_jax.config import BertConfig, CausalConfig, ConfigError
from rag_jax.data.tokenizer_training import train_bart_tokenizer, train_bert_tokenizer
from rag_jax.hub.config_json import Architecture, SpecialIds
from rag_jax.hub.load import abstract, load
from rag_jax.hub.save import save
from rag_jax.retrieval.index import PassageIndex
from tests.end_to_end.commands import SMALLEST

SENTENCE = {"vocab_size": 320, "max_positions": 64, "width": 16, "layers": 1, "heads": 2,
            "mlp_width": 32, "normalize": True, "titles": "joined"}
DECODER = {"vocab_size": 420, "max_positions": 128, "width": 16, "heads": 2, "kv_heads": 1,
           "head_size": 8, "mlp_width": 24, "decoder_layers": 1}
GEMMA = {"activation": "gelu_new", "attention_cap": 50.0, "final_cap": 30.0, "window": 16,
         "global_every": 2}
# By the class of the encoder, that of the generator, and what they have of their own.
PAIRS = {
    ("BertModel", "LlamaForCausalLM"): ({"pooling": "mean", "query_prefix": "query: "}, {
        "rope_type": "llama3", "rope_factor": 4.0, "rope_positions": 32, "tied": False}),
    ("RobertaModel", "MistralForCausalLM"): ({"pooling": "mean", "projection": 6}, {
        "window": 24, "tied": False}),
    ("XLMRobertaModel", "Qwen2ForCausalLM"): ({"pooling": "cls", "type_vocab_size": 1}, {}),
    ("ModernBertModel", "Qwen3ForCausalLM"): ({"pooling": "cls", "global_every": 1}, {}),
    ("BertModel", "Olmo2ForCausalLM"): ({"pooling": "mean"}, {"tied": False}),
    ("BertModel", "Gemma2ForCausalLM"): ({"pooling": "cls", "normalize": False}, GEMMA),
}
TYPES = {"BertModel": "bert", "RobertaModel": "roberta", "XLMRobertaModel": "xlm-roberta",
         "ModernBertModel": "modernbert"}
FROZEN = ("LlamaForCausalLM",)  # the query encoder trains alone
QUESTIONS = [f"Where does place {i} lie?" for i in range(8)]


@pytest.fixture(autouse=True)
def compiled_with_less_effort(one_device):
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A folder with passages.tsv, train.jsonl and dev.jsonl, and tokenizers for all towers."""
    folder = tmp_path_factory.mktemp("sources")
    texts = [f"Place {i} lies in region {i % 3}." for i in range(12)]
    (folder / "passages.tsv").write_text("id\ttitle\ttext\n" + "".join(
        f"{i}\tPlace {i}\t{text}\n" for i, text in enumerate(texts)))
    for name in ("train", "dev"):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({
            "id": f"{name}{i}", "question": question, "answers": [f"region {i % 3}"]}) + "\n"
            for i, question in enumerate(QUESTIONS)))
    return folder, train_bart_tokenizer(texts, 320), train_bert_tokenizer(texts, 200)


def checkpoint(folder, family, tower, architecture, tokenizer):
    """A folder of Hugging Face with random weights."""
    rng = np.random.default_rng(0)
    boxes = abstract([tower], architecture)
    params = jax.tree.map(lambda box: np.float32(0.2 * rng.normal(size=box.value.shape)), boxes,
                          is_leaf=lambda leaf: hasattr(leaf, "value"))
    save(folder, family, params, architecture, tokenizers={tower: tokenizer})
    return str(folder)


def asked(index, fields: dict[str, Any]) -> list[tuple[str, float]]:
    """What the towers of `fields` answer without a workdir."""
    answers = rag_jax.load(index=index, config=fields).ask(QUESTIONS)
    return [(answer.text, answer.log_prob) for answer in answers]


def answered(path, sources, encoder: str, generator: str
             ) -> tuple[list[tuple[str, float]], dict[str, Any]]:
    """Answers of the towers by their names, from an index that they have without a workdir; by
    the command and by the function; and the fields that say all this."""
    fields = {"model.retriever.pretrained": encoder, "model.generator.pretrained": generator,
              "model.retriever.dropout": 0.0, "model.retriever.attention_dropout": 0.0,
              "retrieval.k": 2, "data.max_source_length": 64, "data.max_target_length": 8,
              "data.max_passage_length": 32, "data.max_question_length": 16,
              "data.length_buckets": 64, "eval.batch_size": 8}
    passages = sources / "passages.tsv"
    with pytest.raises(ConfigError, match="name the source of the generator"):
        rag_jax.build_index(passages, path / "i", config={"model.retriever.pretrained": encoder})
    rag_jax.build_index(passages, path / "i", config=fields)
    build_index.main([f"--passages={passages}", f"--out={path / 'j'}",
                      *(f"--config.{name}={value}" for name, value in fields.items())])
    np.testing.assert_array_equal(*(PassageIndex.open(path / name).embeddings(np.arange(12))
                                    for name in "ij"))
    return asked(path / "i", fields), fields


@pytest.mark.parametrize("encoder, generator", PAIRS)
def test_the_whole_way(encoder, generator, sources, tmp_path, capsys):
    """Guards against a stage that takes all encoders for BERT, or all generators for BART: by
    their classes, their tokenizers, their first positions or their names in config.json."""
    folder, pieces, words = sources
    own, decoder = PAIRS[encoder, generator]
    architecture = Architecture(
        BertConfig(**{**SENTENCE, "model_type": TYPES[encoder], **own}),
        CausalConfig(variant=generator.removesuffix("ForCausalLM").lower(), **DECODER, **decoder),
        SpecialIds(pieces.end, pieces.end, pieces.pad, None))
    named = checkpoint(tmp_path / "e", encoder, "bert", architecture,
                       pieces if "Roberta" in encoder else words)
    answers = checkpoint(tmp_path / "g", generator, "generator", architecture, pieces)
    first, fields = answered(tmp_path, folder, named, answers)
    for source, target in ((named, "encoder"), (answers, "generator")):
        convert.main([f"--from={source}", f"--to={tmp_path / target}"])
    fields |= {"model.retriever.pretrained": str(tmp_path / "encoder"),
               "model.generator.pretrained": str(tmp_path / "generator")}
    assert asked(tmp_path / "j", fields) == first, "converted"

    workdir = tmp_path / "w"
    begun = [f"--workdir={workdir}", f"--config={SMALLEST}",
             *(f"--config.data.{name}={folder / name}.{kind}" for name, kind in (
                 ("passages", "tsv"), ("train", "jsonl"), ("dev", "jsonl"))),
             *(f"--config.{name}={value}" for name, value in fields.items()),
             "--config.train.steps=2", "--config.train.save_every=1",
             "--config.train.full_information=0", "--config.train.query_encoder_rate=1",
             f"--config.train.generator_rate={'none' if generator in FROZEN else 1}"]
    train.main(begun)
    predictions = workdir / "rag_token" / "evaluation" / "dev" / "predictions.jsonl"
    expected = predictions.read_text()
    shutil.rmtree(workdir / "rag_token" / "2")
    shutil.rmtree(workdir / "rag_token" / "evaluation")
    train.main(begun)  # the last step again
    assert predictions.read_text() == expected
    evaluate.main([f"--workdir={workdir}", "--split=dev"])
    assert predictions.read_text() == expected

    capsys.readouterr()
    convert.main([f"--from={workdir}", f"--to={tmp_path / 'out'}"])
    said = capsys.readouterr().out
    assert said.count(f"{encoder} in ") == 2 and f"{generator} in " in said
    rag = rag_jax.load(workdir)
    trained = {**rag.params, "document_encoder": rag.encoder("document_encoder")}
    for tower, source in (("query_encoder", named), ("document_encoder", named),
                          ("generator", answers)):
        before, after = load(source), load(tmp_path / "out" / tower)
        assert (after.family, after.generator) == (before.family, before.generator)
        mine, start = (next(iter(found.params.values())) for found in (after, before))
        jax.tree.map(np.testing.assert_array_equal, mine, trained[tower])
        moved = jax.tree.map(lambda a, b: bool((np.asarray(a) != np.asarray(b)).any()), mine, start)
        still = tower == "document_encoder" or tower == "generator" and generator in FROZEN
        assert any(jax.tree.leaves(moved)) != still
