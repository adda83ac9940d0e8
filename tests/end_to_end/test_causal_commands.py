"""A decoder-only generator through the entry points: from a checkpoint to answers and back."""

import json

import jax
import numpy as np
import pytest

import rag_jax
from rag_jax.cli import convert, generate, train
from rag_jax.config import BertConfig, CausalConfig, ConfigError
from rag_jax.config.config_files import load_file as load_config
from rag_jax.data.tokenizer_training import train_bart_tokenizer, train_bert_tokenizer
from rag_jax.hub.config_json import Architecture, SpecialIds
from rag_jax.hub.load import abstract, load
from rag_jax.hub.save import save
from rag_jax.retrieval.protocol import RetrievalError
from tests.end_to_end.commands import SMALLEST, data_flags, write_sources

pytestmark = pytest.mark.usefixtures("compiled_with_less_effort")
ROWS = [(f"Place {i}", f"Place {i} lies in region {i % 3}.") for i in range(12)]
GENERATOR = CausalConfig(variant="gemma3", vocab_size=420, max_positions=128, width=16, heads=2,
                         kv_heads=1, head_size=8, mlp_width=24, decoder_layers=2, window=16,
                         global_every=2, rope_local_theta=100.0, activation="gelu_new")
RETRIEVER = BertConfig(vocab_size=420, max_positions=64, width=16, layers=1, heads=2, mlp_width=32)


def checkpoint(folder, family, tower, tokenizer):
    """A folder as transformers writes it, with random weights."""
    architecture = Architecture(RETRIEVER, GENERATOR, SpecialIds(
        tokenizer.end, tokenizer.end, tokenizer.pad, None))
    rng = np.random.default_rng(0)
    shapes = jax.tree.map(lambda x: x.value.shape, abstract([tower], architecture),
                          is_leaf=lambda x: hasattr(x, "value"))
    params = jax.tree.map(lambda shape: np.float32(0.2 * rng.normal(size=shape)), shapes,
                          is_leaf=lambda x: isinstance(x, tuple))
    save(folder, family, params, architecture, tokenizers={tower: tokenizer})
    return str(folder)


def answers_without_a_workdir(path, expected):
    """Towers by their names, with the index that training made: by its fingerprint, an encoder with
    another dropout, which no checkpoint says, is another encoder."""
    index, data = path / "asked" / "indexes" / "passages", load_config(str(SMALLEST)).data
    changes = {f"model.{tower}.pretrained": str(path / folder) for tower, folder in (
        ("query_encoder", "query_encoder"), ("document_encoder", "document_encoder"),
        ("generator", "g"))}
    changes |= {f"data.{name}": getattr(data, name) for name in (
        "max_question_length", "max_passage_length", "max_source_length", "max_target_length",
        "length_buckets")}
    changes |= {"retrieval.k": 2, "model.retriever.dropout": 0.0}
    question, out = "Where does place 3 lie?", path / "answers.jsonl"
    found, = rag_jax.load(index=index, config=changes).ask([question], num_beams=2)
    assert (found.text, found.passage_ids, found.log_prob) == (
        expected.text, expected.passage_ids, pytest.approx(expected.log_prob, rel=1e-6))
    flags = [f"--config.{name}={value}" for name, value in changes.items()]
    generate.main([question, f"--index={index}", f"--out={out}", "--config.eval.num_beams=2",
                   *flags])
    assert json.loads(out.read_text())["answer"] == expected.text
    other = changes | {"model.retriever.normalize": True}
    for given, named, error, text in (
            (other, {"index": index}, RetrievalError, "built by the encoder"),
            (changes, {}, ConfigError, "name the folder of an index"),
            (changes, {"index": path / "g" / "no"}, ConfigError, "name the folder of an index"),
            (changes, {"index": index, "step": 3}, ConfigError, "step=3: for workdirs"),
            (changes, {"index": index, "run": "bm25"}, ConfigError, "run 'bm25': without a work"),
            ({"model.generator.pretrained": str(path / "g")}, {"index": index}, ConfigError,
             "name the source of the query_encoder and the document_encoder")):
        with pytest.raises(error, match=text):
            rag_jax.load(config=given, **named)


def test_convert_index_ask_train_resume_export(tmp_path):
    """Any of the stages that reads a start token, a prompt or a table as BART has them."""
    texts = [text for _, text in ROWS] * 2
    pieces, words = train_bart_tokenizer(texts, 400), train_bert_tokenizer(texts, 200)
    files = write_sources(tmp_path, ROWS, [
        (f"Where does place {i} lie?", f"region {i % 3}") for i in range(12)])
    generator = checkpoint(tmp_path / "g", "Gemma3ForCausalLM", "generator", pieces)
    convert.main([f"--from={generator}", f"--to={tmp_path / 'converted'}"])
    flags = [f"--config={SMALLEST}", "--config.retriever_warmup.steps=0",
             *data_flags(files), "--config.eval.batch_size=12",
             "--config.model.generator.dtype=float32"]
    for tower, family in (("query_encoder", "DPRQuestionEncoder"),
                          ("document_encoder", "DPRContextEncoder")):
        named = checkpoint(tmp_path / tower, family, tower, words)
        flags.append(f"--config.model.{tower}.pretrained={named}")

    def trained(name, source, *more):
        train.main([*flags, f"--workdir={tmp_path / name}",
                    f"--config.model.generator.pretrained={source}", *more])
        return rag_jax.load(tmp_path / name)

    first = trained("asked", generator, "--config.train.steps=0")
    assert first.config.data.source_format == "prompt"
    assert first.job.model.start_id == pieces.encode_written(":")[-1]
    answer, = first.ask(["Where does place 3 lie?"], num_beams=2)
    np.testing.assert_allclose(sum(answer.posterior), 1, rtol=1e-5)
    kept = [first.ask(["Where does place 3 lie?"], num_beams=2, prefix_mib=1)[0] for _ in range(2)]
    assert kept[0] == kept[1] and kept[0].text == answer.text
    np.testing.assert_allclose(kept[0].log_prob, answer.log_prob, rtol=1e-5)
    answers_without_a_workdir(tmp_path, answer)
    np.testing.assert_allclose(
        first.log_likelihood("Where does place 3 lie?", "region 0"), trained(
            "converted_asked", tmp_path / "converted", "--config.train.steps=0").log_likelihood(
            "Where does place 3 lie?", "region 0"), rtol=1e-6)

    steps = ["--config.train.steps=2", "--config.train.save_every=1"]
    second = trained("trained", generator, *steps)
    again = trained("trained", generator, *steps)  # nothing is left to do
    assert not np.array_equal(second.params["generator"]["embedding"],
                              first.params["generator"]["embedding"])
    np.testing.assert_array_equal(second.params["generator"]["embedding"],
                                  again.params["generator"]["embedding"])
    convert.main([f"--from={tmp_path / 'trained'}", f"--to={tmp_path / 'out'}"])
    exported = load(tmp_path / "out" / "generator")
    assert exported.family == "Gemma3ForCausalLM"
    jax.tree.map(np.testing.assert_array_equal, exported.params["generator"],
                 second.params["generator"])
