"""T5 the whole way: convert, index, train, go on, evaluate, ask, export."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
import tiny

from rag_jax.cli import convert, evaluate, generate, train
from rag_jax.data.text import Tokenizer
from rag_jax.data.tokenizer_training import train_bert_tokenizer
from rag_jax.hub import load as hub
from rag_jax.hub.config_json import Architecture
from rag_jax.hub.save import save
from tests.end_to_end.commands import SMALLEST, data_flags, write_sources

pytestmark = pytest.mark.usefixtures("compiled_with_less_effort")
PASSAGES = [f"Place {i} lies in region {i % 3}." for i in range(8)]
RUN = "rag_sequence"


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    """Flags that name passages, questions and Hugging Face folders of all towers."""
    folder = tmp_path_factory.mktemp("sources")
    files = write_sources(
        folder, [(f"Place {i}", text) for i, text in enumerate(PASSAGES)],
        [(f"Where is Place {i}?", f"region {i % 3}") for i in range(8)])
    words, pieces = train_bert_tokenizer(PASSAGES, 100), Tokenizer(tiny.t5_tokenizer(PASSAGES))
    generator = dataclasses.replace(tiny.T5, vocab_size=pieces.vocab_size + 3, start_token=0)
    model = tiny.rag_model(
        "sequence", {"vocab_size": words.vocab_size, "max_positions": 64}, generator)
    params, parts = tiny.rag_params(model), Architecture(model.retriever, model.generator)
    for name, family in (("query_encoder", "DPRQuestionEncoder"),
                         ("document_encoder", "DPRContextEncoder"),
                         ("generator", "T5ForConditionalGeneration")):
        save(folder / name, family, params, parts, tokenizers={
            "query_encoder": words, "document_encoder": words, "generator": pieces})
    named = [f"--config.model.{name}.pretrained={folder / name}"
             for name in ("query_encoder", "document_encoder")]
    return [f"--config={SMALLEST}", *named, *data_flags(files), f"--config.runs={RUN}",
            "--config.generator_warmup.steps=0", "--config.train.steps=2",
            "--config.train.save_every=1", "--config.eval.num_beams=2",
            "--config.model.generator.dropout=0"]


def test_every_command_takes_a_t5(flags, tmp_path, capsys):
    """Guards against a tower that one of the commands takes for BART: its class, its tokenizer
    without <s>, its first token, or its fields in config.json."""
    source = flags[1].partition("=")[2].replace("query_encoder", "generator")
    convert.main([f"--from={source}", f"--to={tmp_path / 'converted'}"])
    here, workdir = [f"--workdir={tmp_path / 'w'}"], tmp_path / "w"
    trained = [*here, *flags, f"--config.model.generator.pretrained={tmp_path / 'converted'}"]
    train.main(trained)
    config = json.loads((workdir / "config.json").read_text())
    assert config["model"]["generator"]["family"] == "t5"
    assert config["model"]["generator"]["start_token"] == 0
    assert config["data"]["source_format"] == "question_first"
    predictions = workdir / RUN / "evaluation" / "dev" / "predictions.jsonl"
    first = predictions.read_text()
    shutil.rmtree(workdir / RUN / "2")
    shutil.rmtree(workdir / RUN / "evaluation")
    train.main(trained)  # the last step again
    assert predictions.read_text() == first
    evaluate.main([*here, "--split=dev"])
    capsys.readouterr()
    generate.main([*here, "Where is Place 3?"])
    assert "log p = -" in capsys.readouterr().out
    convert.main([f"--from={workdir}", f"--to={tmp_path / 'out'}"])
    back, original = hub.load(tmp_path / "out" / "generator"), hub.load(source)
    assert back.family == "T5ForConditionalGeneration" and back.generator == original.generator
    assert Tokenizer.load(tmp_path / "out" / "generator").start is None
    moved = [np.abs(np.asarray(a) - np.asarray(b)).max() for a, b in zip(
        jax.tree.leaves(back.params), jax.tree.leaves(original.params), strict=True)]
    assert max(moved) > 0, "it has trained"
