"""A decoder-only generator through the entry points: from a checkpoint to answers and back."""

import json

import jax
import numpy as np
import pytest

import rag_jax
from rag_jax.cli import convert, train
from rag_jax.config import BertConfig, CausalConfig
from rag_jax.data.text import train_bart_tokenizer, train_bert_tokenizer
from rag_jax.hub.families import Architecture, SpecialIds
from rag_jax.hub.load import abstract, load
from rag_jax.hub.save import save
from tests.end_to_end.commands import SMALLEST

ROWS = [(f"Place {i}", f"Place {i} lies in region {i % 3}.") for i in range(12)]
GENERATOR = CausalConfig(variant="gemma3", vocab_size=420, max_positions=128, width=16, heads=2,
                         kv_heads=1, head_size=8, mlp_width=24, decoder_layers=2, window=16,
                         global_every=2, rope_local_theta=100.0, activation="gelu_new")
RETRIEVER = BertConfig(vocab_size=420, max_positions=64, width=16, layers=1, heads=2, mlp_width=32)


@pytest.fixture(autouse=True)
def compiled_with_less_effort(monkeypatch):
    """And for one device, as the commands of the other tests here."""
    first = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *_: first)
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


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


def test_convert_index_ask_train_resume_export(tmp_path):
    """Any of the stages that reads a start token, a prompt or a table as BART has them."""
    texts = [text for _, text in ROWS] * 2
    pieces, words = train_bart_tokenizer(texts, 400), train_bert_tokenizer(texts, 200)
    (tmp_path / "passages.tsv").write_text("id\ttitle\ttext\n" + "\n".join(
        f"{i}\t{title}\t{text}" for i, (title, text) in enumerate(ROWS)) + "\n")
    for name in ("train", "dev"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps({
            "id": f"{name}{i}", "question": f"Where does place {i} lie?",
            "answers": [f"region {i % 3}"]}) for i in range(12)) + "\n")
    generator = checkpoint(tmp_path / "g", "Gemma3ForCausalLM", "generator", pieces)
    convert.main([f"--from={generator}", f"--to={tmp_path / 'converted'}"])
    flags = [f"--config={SMALLEST}", "--config.retriever_warmup.steps=0",
             *(f"--config.data.{name}={tmp_path / file}" for name, file in (
                 ("passages", "passages.tsv"), ("train", "train.jsonl"), ("dev", "dev.jsonl"))),
             "--config.eval.batch_size=12", "--config.model.generator.dtype=float32"]
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
