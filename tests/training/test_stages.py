"""Settings of decoding from `config.eval`, and how a stage is put together."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from rag_jax import parallel
from rag_jax.config import EVAL_PRESETS, Config, ConfigError, MeshConfig, OptimizerConfig
from rag_jax.data.text import train_bart_tokenizer
from rag_jax.models import rag
from rag_jax.overrides import replace
from rag_jax.training import stages
from rag_jax.training.collapse import CollapseGuard
from rag_jax.training.loop import PureSource
from rag_jax.training.stages import decoding_settings

TOKENIZER = train_bart_tokenizer(["Lima is the capital of Peru, and Paris of France."] * 3, 300)


def test_texts_become_the_ids_that_they_have_inside_an_answer():
    """A bad word without the space in front would forbid tokens that no answer has."""
    config = replace(Config(), {"eval.bad_words": ("Lima", "Paris of"), "eval.prefix": "Peru",
                                "eval.num_beams": 3, "data.max_target_length": 9})
    found = decoding_settings(config, TOKENIZER)
    inside = TOKENIZER.encode(["a Lima"])[0]
    assert inside[-len(found.bad_words[0]):] == list(found.bad_words[0])
    assert TOKENIZER.decode(found.bad_words[1]) == "Paris of"
    assert TOKENIZER.decode(found.prefix) == "Peru"
    assert (found.num_beams, found.max_length, found.forced_bos) == (3, 9, None)
    classes = decoding_settings(replace(Config(), {"eval.labels": ("Lima", "Peru")}), TOKENIZER)
    assert [TOKENIZER.decode(label) for label in classes.labels] == ["Lima", "Peru"]
    assert {label[-1] for label in classes.labels} == {TOKENIZER.end}, "as targets end"
    told = decoding_settings(replace(Config(), {
        "eval.labels": ("Lima", "Peru"), "model.head": "label_token"}), TOKENIZER)
    at = [a != b for a, b in zip(*classes.labels, strict=False)].index(True)
    assert told.labels == tuple(label[at:at + 1] for label in classes.labels)
    assert told.max_length == 1
    forced = decoding_settings(replace(Config(), {"eval.forced_bos": True}), TOKENIZER)
    assert forced.forced_bos == TOKENIZER.start


def test_the_presets_of_the_paper():
    """Appendix A: greedy QA with 15 or 50 documents; generation with 10, beam 4, fast."""
    found = {name: (e.k, e.num_beams, e.strategy) for name, e in EVAL_PRESETS.items()}
    assert found == {"paper-qa-token": (15, 1, "thorough"),
                     "paper-qa-sequence": (50, 1, "thorough"),
                     "paper-generation": (10, 4, "fast")}
    assert replace(Config(), {"eval": "paper-generation"}).eval.num_beams == 4


@pytest.mark.parametrize(("fields", "message"), [
    ({"eval.num_return_sequences": 3}, "num_return_sequences=3: must be at most num_beams=1"),
    ({"eval.temperature": 0.0, "eval.sample": True}, "temperature=0.0"),
    ({"eval.min_length": 40}, "min_length=40"),
    ({"model.head": "label_token", "eval.labels": ("Lima", "Peru", "Lima is")},
     "labels: config.model.head=label_token tells 'Lima', 'Peru', 'Lima is' by one token each"),
])
def test_settings_that_contradict_each_other_name_the_section(fields, message):
    with pytest.raises(ConfigError, match=f"config.eval: {message}"):
        decoding_settings(replace(Config(), fields), TOKENIZER)


def test_a_guarded_stage_shows_what_it_read_and_can_freeze_its_encoders(tmp_path):
    mesh = parallel.make_mesh(MeshConfig(2, 1, 2), jax.devices()[:4])
    job = types.SimpleNamespace(model=tiny.rag_model(), config=Config(), workdir=tmp_path,
                                mesh=mesh)

    def loss(params, batch, key):
        total = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))
        return total, batch.weight.sum(), {"nll": total}

    stage = stages._stage(
        job, "toy", rag.TOWERS, {"query_encoder": 1.0, "generator": 1.0}, loss,
        OptimizerConfig(warmup_steps=0), 10, PureSource(None), log_every=1, save_every=1, meta={},
        guard=CollapseGuard("freeze", 1, 0.5))
    ids = np.arange(12, dtype=np.int32).reshape(4, 3)
    batch = parallel.put_batch(tiny.rag_batch(questions=4)._replace(doc_ids=ids), mesh)
    for run, moving in ((stage.train_step, {"query_encoder", "generator"}),
                        (stage.frozen_step, {"generator"})):
        state = stage.make_state()
        before = jax.device_get(state.params)
        state, metrics = run(state, batch, np.int32(0))
        assert (np.asarray(metrics["doc_ids"]) == batch.doc_ids).all()
        assert metrics["doc_ids"].sharding.is_equivalent_to(batch.doc_ids.sharding, 2)
        assert metrics["nll"].sharding.is_fully_replicated
        after = jax.device_get(state.params)
        changed = {tower for tower in rag.TOWERS if any(
            (a != b).any() for a, b in zip(jax.tree.leaves(after[tower]),
                                           jax.tree.leaves(before[tower]), strict=True))}
        assert changed == moving
