"""How a stage is put together."""

import dataclasses
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from rag_jax import parallel
from rag_jax.config import Config, ConfigError, EvalConfig, MeshConfig, OptimizerConfig
from rag_jax.config.overrides import replace
from rag_jax.models import rag
from rag_jax.training import fine_tuning, optim, stages, step, warm_up
from rag_jax.training.collapse import CollapseGuard
from rag_jax.training.loop import PureSource
from rag_jax.training.run import open_job
from tests.end_to_end import smallest


class Matrices(rag.RagModel):
    """A model whose towers are a matrix each: what is compiled here is the update of every leaf."""

    def init(self, key, towers):
        return {tower: {"kernel": nn.LogicallyPartitioned(
            jax.random.normal(jax.random.fold_in(key, i), (4, 6)), ("embed", "mlp"))}
            for i, tower in enumerate(towers)}


def test_a_guarded_stage_shows_what_it_read_and_can_freeze_its_encoders(tmp_path):
    mesh = parallel.make_mesh(MeshConfig(2, 1, 2), jax.devices()[:4])
    job = types.SimpleNamespace(model=Matrices(**vars(tiny.rag_model())), config=Config(),
                                workdir=tmp_path, mesh=mesh)

    def loss(params, batch, key):
        total = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))
        return total, batch.weight.sum(), {"nll": total}

    stage = stages.build_stage(
        job, "toy", {"query_encoder": 1.0, "document_encoder": None, "generator": 1.0}, loss,
        OptimizerConfig(warmup_steps=0), source=PureSource(None), steps=10, log_every=1,
        save_every=1, meta={}, guard=CollapseGuard("freeze", 1, 0.5))
    alone = stages.build_stage(
        job, "toy", {"query_encoder": 1.0, "document_encoder": None, "generator": None}, loss,
        OptimizerConfig(warmup_steps=0), source=PureSource(None), steps=10, log_every=1,
        save_every=1, meta={}, guard=CollapseGuard("rollback", 1, 0.5))
    assert alone.frozen_step is None, "there is no step that would train nothing"
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
        frozen = {"query_encoder", "generator"} - moving
        assert {t for t in ("query_encoder", "generator")
                if not metrics[f"learning_rate/{t}"]} == frozen
        assert {t for t in rag.TOWERS if f"update_ratio/{t}" in metrics} == moving
        masks = [batch.question_mask, batch.source_mask, batch.target_mask]
        tokens, places = sum(int(m.sum()) for m in masks), sum(m.size for m in masks)
        assert metrics["tokens"] == tokens < places
        np.testing.assert_allclose(metrics["padding_share"], 1 - tokens / places, rtol=1e-6)
        after = jax.device_get(state.params)
        changed = {tower for tower in rag.TOWERS if any(
            (a != b).any() for a, b in zip(jax.tree.leaves(after[tower]),
                                           jax.tree.leaves(before[tower]), strict=True))}
        assert changed == moving


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A job of stages with dropout, which accumulate where they can; RAG also smooths labels."""
    config = replace(smallest.get_config(), {
        "generator_warmup.optimizer.accumulate": 2, "train.optimizer.accumulate": 2,
        "train.label_smoothing": 0.2, "seed": 3})
    job = open_job(config, tmp_path_factory.mktemp("job"), check=True)
    return dataclasses.replace(job, mesh=parallel.make_mesh(MeshConfig(), jax.devices()[:1]))


def by_hand(loss, update, rates, params, batch, *, seed, number, pieces):
    """Adam's first moments after one step, flat: pieces one after the other, their gradients added,
    one update."""
    trained, total, weights = {tower: params[tower] for tower in rates}, None, 0.0

    def value(trained, micro, key):
        return loss({**params, **trained}, micro, key)[:2]

    gradients = tiny.jit(jax.grad(value, has_aux=True))
    for piece in range(pieces):
        micro = jax.tree.map(lambda x, first=piece: x[first::pieces], batch)
        key = None
        if seed is not None:
            key = jax.random.fold_in(jax.random.key(seed), number)
            key = jax.random.fold_in(key, piece) if pieces > 1 else key
        grads, weight = gradients(trained, micro, key)
        total = grads if total is None else jax.tree.map(jnp.add, total, grads)
        weights += weight
    return first_moments(update(jax.tree.map(lambda g: g / weights, total), trained))


def first_moments(opt_state):
    """Of a first step: its clipped gradient, but for a factor."""
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(
        optax.tree_utils.tree_get(opt_state, "mu"))])


def test_a_retriever_trains_on_one_passage_of_each_question(job):
    """Of one passage there is no entropy to explain, and the query encoder stood still."""
    stage = fine_tuning.rag_stage(job, "rag_token", None, None, meta={})
    batch = parallel.put_batch(
        tiny.rag_batch(questions=4, passages=1, model=job.model), job.mesh)
    metrics = stage.train_step(stage.make_state(), batch, stage.number_on_devices(3))[1]
    assert metrics["prior_entropy"] == 0 < metrics["learning_rate/query_encoder"]


def test_dev_scores_are_told_apart_by_the_settings_that_change_them():
    """Memory and batch sizes change no score, and what is left open is what it means."""
    def measured(k=5, **settings):
        return fine_tuning.measured(EvalConfig(**settings), k)

    assert measured() == {"k": "5"} == measured(
        k=5, batch_size=3, memory_mib=0, prefix_mib=9, prompt_lookup=3, metrics=("kilt",),
        kilt_pages="id")
    for name, usual in fine_tuning.OPEN.items():
        assert measured(**{name: usual}) == measured(), name
    others = [{"max_examples": 1}, {"num_beams": 4}, {"labels": ("a", "b")}, {"nfd": True},
              {"forced_bos": True}, {"strategy": "fast"}, {"prefix": "the"}]
    texts = [measured(k=4), *(measured(**other) for other in others)]
    assert texts[1:4] == [{"k": "5", "max_examples": "1"}, {"k": "5", "num_beams": "4"},
                          {"k": "5", "labels": "a,b"}]
    assert all(texts.count(text) == 1 and text != measured() for text in texts)


@pytest.mark.parametrize("name", ["retriever", "generator", "rag"])
def test_a_stage_takes_the_step_that_its_configuration_says(job, monkeypatch, name):
    """Accumulation, dropout or label smoothing that got lost would show in no other test."""
    seen = []
    monkeypatch.setattr(warm_up, "run_stage",
                        lambda stage: seen.append(stage) or stage.make_state())
    config, towers = job.config, warm_up.ENCODERS
    if name == "retriever":
        warm_up.warm_up_retriever(job)
        settings, losses = config.retriever_warmup, [step.retriever_loss(job.model)] * 2
    elif name == "generator":
        warm_up.warm_up_generator(job)
        settings, towers = config.generator_warmup, ("generator",)
        losses = [step.seq2seq_loss(job.model)] * 2
    else:
        settings, towers = config.train, ("query_encoder", "generator")
        seen.append(fine_tuning.rag_stage(job, "rag_token", None, None, meta={}))
        both = {"weigh_explained": True, "in_batch_negatives": True}
        losses = [step.rag_loss(job.model, 0.2, **both), step.rag_loss(job.model, **both),
                  *(step.rag_loss(job.model, 0.2, **{**both, name: False}) for name in both)]
    stage, = seen
    if name == "rag":
        batch = parallel.put_batch(tiny.rag_batch(questions=4, model=job.model), job.mesh)
        rates = {"query_encoder": config.train.query_encoder_rate,
                 "generator": config.train.generator_rate}
    else:
        stage.source.begin(3, None)
        with jax.transfer_guard("disallow"):
            stage.source.finish(3)
        batch, rates = stage.source.finish(3), dict.fromkeys(towers, 1.0)
    params = jax.device_get(stage.make_state().params)
    optimizer = optim.make_optimizer(settings.optimizer, settings.steps, rates)
    update = tiny.jit(lambda g, p: optimizer.update(g, optimizer.init(p), p)[1])
    given = (update, rates, params, jax.device_get(batch))
    state = stage.make_state()
    with jax.transfer_guard("disallow"):
        state, metrics = stage.train_step(state, batch, stage.number_on_devices(3))
    found = first_moments(state.opt_state)
    at = {"seed": 3, "number": 3, "pieces": settings.optimizer.accumulate}
    expected = by_hand(losses[0], *given, **at)
    size = np.linalg.norm(expected)
    assert np.linalg.norm(found - expected) < 1e-5 * size
    others = {"dropout": by_hand(losses[0], *given, **{**at, "seed": None})}
    if name != "retriever":
        others["accumulation"] = by_hand(losses[0], *given, **{**at, "pieces": 1})
    if name == "rag":
        scale = min(1, metrics[step.INFORMATION] / metrics["prior_entropy"]
                    / settings.full_information)
        rate = optimizer.learning_rates(jnp.int32(3))["query_encoder"]
        np.testing.assert_allclose(metrics["learning_rate/query_encoder"], rate * scale, rtol=1e-5)
        assert 0 < scale < 1
        others["smoothing"] = by_hand(losses[1], *given, **at)
        others["what answers explain"] = by_hand(losses[2], *given, **at)
        others["passages of other questions"] = by_hand(losses[3], *given, **at)
    for what, without in others.items():
        assert np.linalg.norm(without - expected) > 1e-3 * size, f"{what} changes nothing"


@pytest.mark.parametrize("pairs", ["cloze", "crops", "words"])
def test_a_start_from_passages_reads_no_question(job, monkeypatch, pairs):
    """Its point is to need no question, answer or gold passage; and one passage tells nothing."""
    def forbidden(self, split):
        raise AssertionError("questions are read")

    monkeypatch.setattr(type(job), "tokens", forbidden)
    seen = []
    monkeypatch.setattr(warm_up, "run_stage",
                        lambda stage: seen.append(stage) or stage.make_state())
    job = dataclasses.replace(job, config=replace(job.config, {"retriever_warmup.pairs": pairs}))
    warm_up.warm_up_retriever(job)
    stage, = seen
    stage.source.begin(3, None)
    assert stage.source.finish(3).passage_ids.shape[0] == job.config.retriever_warmup.batch_size
    alone = dataclasses.replace(job.prepared, stores={"2018": [None]})
    with pytest.raises(ConfigError, match=f"pairs={pairs}: 2018 has one passage, and two are"):
        warm_up.warm_up_retriever(dataclasses.replace(job, prepared=alone))


def test_dropout_is_drawn_as_the_configuration_or_the_platform_says():
    """A TPU's own generator by default, and nowhere else: other devices' masks stay the same."""
    def chosen(platform, **changes):
        mesh = types.SimpleNamespace(
            devices=np.array([[types.SimpleNamespace(platform=platform)]]))
        return stages.dropout_of(types.SimpleNamespace(
            config=replace(Config(seed=7), changes), mesh=mesh))

    assert chosen("tpu") == step.DropoutKeys(7, "unsafe_rbg")
    assert chosen("cpu") == chosen("gpu") == step.DropoutKeys(7)
    assert chosen("cpu", dropout_keys="unsafe_rbg") == chosen("tpu")
    assert chosen("tpu", dropout_keys="threefry2x32") == chosen("cpu")
