"""Atlas's checkpoints, written by hand as its authors' code saves them."""

import argparse
import collections
import dataclasses

import flax.linen as nn
import jax
import numpy as np
import pytest
from checkpoints import BERT, assert_equal
from flax.traverse_util import flatten_dict
from test_tensors import _Evil, _global, _Rebuilt, _Storage, fake_torch, write_zip  # noqa: F401

from rag_jax.config import T5Config
from rag_jax.conversion import convert
from rag_jax.data.tokenizer_training import train_bert_tokenizer
from rag_jax.hub import atlas, names
from rag_jax.hub.config_json import Architecture, SpecialIds
from rag_jax.hub.generator_inputs import FID_INPUTS
from rag_jax.hub.load import abstract, describe, load, plan
from rag_jax.hub.save import save_tokenizer
from rag_jax.hub.stored import HubError
from rag_jax.training import workdir

READER = T5Config(vocab_size=13, width=8, heads=2, head_size=3, mlp_width=12, encoder_layers=2,
                  decoder_layers=1, relative_buckets=8)
CONTRIEVER = dataclasses.replace(BERT, heads=1, max_positions=8)
BODIES = {"bert": "retriever.contriever.", "query_encoder": "retriever.query_contriever.",
          "document_encoder": "retriever.passage_contriever.", "generator": "reader."}
TIED, UNTIED = ("bert", "generator"), ("query_encoder", "document_encoder", "generator")
pytestmark = pytest.mark.usefixtures("fake_torch")


def made(towers=TIED, reader=READER):
    """(parameters, the state dictionary of Atlas's model that holds them)."""
    parts, rng = Architecture(CONTRIEVER, reader), np.random.default_rng(0)
    params = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32),
                          nn.meta.unbox(abstract(towers, parts)))
    places = {tower: names.Place(BODIES[tower], BODIES[tower]) for tower in towers}
    values = flatten_dict(params)
    return params, {name: names.to_theirs(values[weight.path], weight.form)
                    for weight in plan(places, parts) for name in weight.names
                    if "encoder.encoder" not in name and "gamma" not in name
                    and "beta" not in name}


def write(folder, state, **entries):
    """model.pth.tar with its options, the trainer's numbers and an optimiser's state."""
    storages = [_Storage("FloatStorage", str(i), np.ascontiguousarray(value))
                for i, value in enumerate(state.values())]
    model = collections.OrderedDict(
        (name, _Rebuilt(storage, 0, value.shape, [s // 4 for s in storage.values.strides]))
        for (name, value), storage in zip(state.items(), storages, strict=True))
    for rebuilt in model.values():
        rebuilt.state = (*rebuilt.state[:3], tuple(rebuilt.state[3]), *rebuilt.state[4:])
    options = argparse.Namespace(
        name="a", lr=4e-5, passages=["p.jsonl"], target_maxlength=None, train_retriever=True,
        device=_Evil((_global("torch", "device"), ("cuda", 0))))
    moments = {"step": 3, "exp_avg": next(iter(model.values()), None)}
    write_zip(folder / atlas.FILE, {
        "step": 3, "model": model, "retr_optimizer": None,
        "optimizer": {"state": {0: moments}, "param_groups": [{"params": [0], "betas": (.9, .99)}]},
        "scheduler": {"warmup": 5, "lr_lambdas": [{}]}, "opt": options, **entries}, storages)


@pytest.mark.parametrize("towers", [TIED, UNTIED, UNTIED[2:], TIED[:1]])
@pytest.mark.parametrize("wrapped", [False, True])
def test_reader_and_retriever_are_known_by_their_tensors(towers, wrapped, tmp_path):
    """Guards against encoders that are mixed up, and vectors of [CLS]."""
    params, state = made(towers)
    buffer = {f"{BODIES[towers[0]]}embeddings.position_ids": np.zeros((1, 6), np.float32)
              } if len(towers) > 1 else {}
    write(tmp_path, {name.replace("ver.", "ver.module.", 1).replace("reader.", "reader.module.")
                     if wrapped else name: value for name, value in (state | buffer).items()})
    found = load(tmp_path)
    assert_equal(found.params, params)
    assert found.towers == towers and found.family == "Atlas"
    if "generator" in towers:
        assert found.generator == dataclasses.replace(READER, start_token=0)
        assert (found.ids, found.kind) == (SpecialIds(0, 1, 0, None), "fid")
        assert found.inputs == FID_INPUTS
    if len(towers) > 1:
        assert found.retriever == dataclasses.replace(
            CONTRIEVER, pooling="mean", normalize=False, titles="joined", scale=100 / 8**0.5)


def test_a_reader_of_the_first_t5_has_one_table(tmp_path):
    config = dataclasses.replace(READER, gated=False, activation="relu", tied=True,
                                 scale_output=True)
    params, state = made(("generator",), config)
    write(tmp_path, state)
    found = load(tmp_path)
    assert_equal(found.params, params)
    assert found.generator == dataclasses.replace(config, start_token=0)


@pytest.mark.parametrize("lost, message", [
    ("reader.lm_head.weight", "1 missing tensors: reader.lm_head.weight"),
    ("retriever.contriever.encoder.layer.1.output.dense.bias", "1 missing tensors: retriever.con"),
    ("reader.shared.weight", "lacks the matrix reader.shared.weight"),
    ("", "1 tensors that no parameter takes: reader.extra"),
])
def test_tensors_that_are_missing_or_too_many_are_named(lost, message, tmp_path):
    state = made()[1]
    state.pop(lost, None)
    write(tmp_path, state if lost else state | {"reader.extra": np.zeros((2, 2), np.float32)})
    with pytest.raises(HubError, match=message):
        load(tmp_path)


@pytest.mark.parametrize("entries, message", [
    ({"opt": _Evil((eval, ("1",)))}, "eval, which is no part .* nothing was run"),
    ({"model": argparse.Namespace(a=1)}, "flat dictionary of tensors"),
    ({"model": {0: _Rebuilt(_Storage("FloatStorage", "0", np.zeros(1)), 0, (1,), (1,))}},
     "flat dictionary of tensors"),
    ({"model": {}}, r"neither reader\.\* nor retriever\.contriever\.\*"),
])
def test_what_is_no_such_checkpoint_is_refused_and_nothing_run(entries, message, tmp_path):
    write(tmp_path, {}, **entries)
    with pytest.raises(HubError, match=f"(?s){atlas.FILE}.*{message}"):
        describe(tmp_path)


def test_a_converted_checkpoint_is_fusion_in_decoder(tmp_path):
    """Both encoders start from its one, and tokenizers come from the folders beside it."""
    write(tmp_path, made()[1])
    for folder in ("question_encoder_tokenizer", "generator_tokenizer"):
        (tmp_path / folder).mkdir()
        save_tokenizer(tmp_path / folder, train_bert_tokenizer(["a b"] * 3, 40), 6)
    assert convert(str(tmp_path), str(tmp_path / "out")).startswith("Atlas: bert, generator in")
    config = workdir.read(tmp_path / "out")
    assert (config.runs, config.model.retriever.pooling) == (("fid",), "mean")
    assert config.data.source_format == "question_first"
    assert {path.name for path in (tmp_path / "out" / "data").iterdir()} >= {
        "retriever_tokenizer", "generator_tokenizer"}
