"""The training step: losses against naive loops, accumulation, frozen towers, dropout keys."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import naive
import numpy as np
import optax
import pytest
import tiny

from rag_jax import parallel
from rag_jax.config import MeshConfig, OptimizerConfig
from rag_jax.models import rag
from rag_jax.models.likelihood import log_likelihood
from rag_jax.training import optim, step
from rag_jax.types import RetrieverBatch, Seq2SeqBatch

MODEL = tiny.rag_model("token", generator={"dropout": 0.1})
SMOOTHED = step.rag_loss(MODEL, 0.1)
ROWS = 8


@pytest.fixture(scope="module")
def params():
    return tiny.rag_params(MODEL)


def batch_of(rows=ROWS):
    batch = tiny.rag_batch(seed=3, questions=rows)
    return batch._replace(weight=np.float32([1, 1, 1, 0, 1, 0, 0, 1])[:rows])


# Compiled as in training: with less effort, 2 rows and 8 are rounded further apart than allowed.
@functools.partial(jax.jit, static_argnames="pieces")
def gradients(params, batch, pieces):
    """Of the mean loss, with respect to query encoder and generator."""
    frozen = {"document_encoder": params["document_encoder"]}
    trained = {t: params[t] for t in ("query_encoder", "generator")}
    return step.accumulated_gradients(SMOOTHED, trained, frozen, batch, None, pieces)


def test_accumulation_is_one_big_batch(params):
    """Micro-batches of unequal weight: of 2 rows, two, one, one and one are real."""
    grads, metrics = gradients(params, batch_of(), 1)
    split_grads, split_metrics = gradients(params, batch_of(), 4)
    tiny.assert_trees_close(split_metrics, metrics, rtol=1e-5)
    tiny.assert_trees_close(split_grads, grads, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["token", "sequence", "fid"])
def test_metrics_are_means_over_real_rows(params, kind):
    """Under label smoothing "nll" and the posterior would be those of no likelihood."""
    batch = batch_of()
    model, of_answers = (tiny.rag_model(k) for k in (kind, {"token": "sequence"}.get(kind, kind)))

    @tiny.jit
    def measured(params):
        smoothed = log_likelihood(model, params, batch, label_smoothing=0.1)["objective"]
        return (log_likelihood(model, params, batch), smoothed,
                log_likelihood(of_answers, params, batch)["posterior"],
                step.rag_loss(model, 0.1)(params, batch, None))

    out, smoothed, post, (total, count, sums) = measured(params)
    metrics = {name: value / count for name, value in sums.items()}
    if kind == "token":  # as the step gives them
        tiny.assert_trees_close(gradients(params, batch, 1)[1], metrics, rtol=1e-5)
    real = batch.weight > 0

    def entropy(p):
        p = np.float64(p)[real]
        return -(p * np.log(np.where(p > 0, p, 1))).sum(axis=1).mean()

    np.testing.assert_allclose(metrics["nll"], -np.float64(out["log_p"])[real].mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["loss"], -np.float64(smoothed)[real].mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["loss"], total / count, rtol=1e-6)
    assert abs(metrics["loss"] - metrics["nll"]) > 0.01
    np.testing.assert_allclose(metrics["prior_entropy"], entropy(out["prior"]), rtol=1e-5)
    np.testing.assert_allclose(metrics["posterior_entropy"], entropy(out["posterior"]), rtol=1e-5)
    post, prior = np.float64(post), np.float64(out["prior"])  # of whole answers, by any kind
    ratio = np.where(post > 0, post, 1) / np.where(post > 0, prior, 1)
    explained = np.exp(np.float64(out["log_p"]) / batch.target_mask.sum(axis=1))
    information = (explained * (post * np.log(ratio)).sum(axis=1))[real].mean()
    np.testing.assert_allclose(metrics[step.INFORMATION], information, rtol=1e-4, atol=1e-7)
    assert kind == "fid" or information > 1e-6


@pytest.mark.parametrize("kind", ["token", "sequence"])
def test_a_question_teaches_the_retriever_as_far_as_its_answer_is_explained(params, kind):
    """A weight on the wrong tower, or on the value, would be another objective."""
    model, batch = tiny.rag_model(kind), batch_of()
    row = int(batch.doc_mask.sum(axis=1).argmax())  # others have one passage, and nothing to learn
    batch = jax.tree.map(lambda x: x[row : row + 1], batch)

    @tiny.jit
    def measured(params):
        def value(params, weigh):
            return log_likelihood(model, params, batch, weigh_explained=weigh)["objective"][0]
        return [jax.value_and_grad(value)(params, weigh) for weigh in (True, False)]

    (weighted, grads), (value, plain) = measured(params)
    explained = np.exp(value / batch.target_mask.sum())
    assert weighted == value and 0 < explained < 0.9
    tiny.assert_trees_close(grads["generator"], plain["generator"], rtol=1e-5, atol=1e-7)
    scaled = jax.tree.map(lambda g: g * explained, plain["query_encoder"])
    assert not tiny.is_zero(scaled)
    tiny.assert_trees_close(grads["query_encoder"], scaled, rtol=1e-4, atol=1e-8)


def test_a_row_of_weight_0_is_nobodys_negative(params):
    """It fills up a batch, and its passages were in the normaliser of all others."""
    batch = batch_of()
    batch = batch._replace(doc_ids=np.arange(batch.doc_mask.size, dtype=np.int32).reshape(
        batch.doc_mask.shape))
    empty = np.flatnonzero(np.asarray(batch.weight) == 0)
    vectors = np.array(batch.doc_embeddings)
    vectors[empty] *= 3
    loss = tiny.jit(step.rag_loss(tiny.rag_model("token"), in_batch_negatives=True))
    one, other = (loss(params, rows, None)[0] for rows in (
        batch, batch._replace(doc_embeddings=vectors)))
    assert len(empty) and batch.doc_mask[empty].any() and one == other


@pytest.mark.parametrize("kind, null", [
    ("token", "none"), ("sequence", "none"), ("fid", "none"), ("sequence", "mlp")])
def test_in_batch_negatives_add_the_share_of_a_questions_own_passages(params, kind, null):
    """Added to the likelihood, or once a token, it would train the generator or count long answers
    for more; and it moves the encoders alone. The null document is every question's own."""
    model = dataclasses.replace(tiny.rag_model(kind), null_document=null)
    params = {**tiny.rag_params(model), **params}
    batch = batch_of()
    ids = np.arange(batch.doc_mask.size, dtype=np.int32).reshape(batch.doc_mask.shape)
    vectors = np.array(batch.doc_embeddings)
    ids[1, 0], vectors[1, 0] = ids[0, 0], vectors[0, 0]
    batch = batch._replace(doc_ids=np.where(batch.doc_mask, ids, -1), doc_embeddings=vectors)
    if null != "none":  # its input is the last
        batch = batch._replace(
            source_ids=np.concatenate([batch.source_ids, batch.source_ids[:, :1]], axis=1),
            source_mask=np.concatenate([batch.source_mask, batch.source_mask[:, :1]], axis=1))

    @tiny.jit
    def measured(params):
        def value(params, **settings):
            out = log_likelihood(model, params, batch, **settings)
            return out["objective"].sum(), out
        return [jax.grad(functools.partial(value, **settings), has_aux=True)(params)
                for settings in ({}, {"in_batch_negatives": True},
                                 {"in_batch_negatives": True, "weigh_explained": True})]

    (plain, without), (grads, out), (_, weighted) = measured(params)
    queries = rag.embed_queries(MODEL, params["query_encoder"], batch.question_ids,
                                batch.question_mask)
    share = []
    for b, query in enumerate(np.float64(queries)):
        scores = {}
        for at in np.ndindex(batch.doc_mask.shape):
            if batch.doc_mask[at] and batch.weight[at[0]]:
                scores.setdefault(int(batch.doc_ids[at]), np.exp(query @ batch.doc_embeddings[at]))
        mine = [scores[int(i)] for i in batch.doc_ids[b] if i >= 0 and batch.weight[b]]
        if null != "none" and batch.weight[b]:
            prior = np.float64(without["prior"][b])  # which has it as its last
            scores["null"] = sum(mine) * prior[-1] / prior[:-1].sum()
            mine.append(scores["null"])
        share.append(np.log(sum(mine) / sum(scores.values())) if mine else 0.0)
    added = np.float64(out["objective"]) - np.float64(without["objective"])
    np.testing.assert_allclose(added, share, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(weighted["objective"] - without["objective"],
                               out["explained"] * np.array(share), rtol=1e-4, atol=1e-5)
    for name in ("log_p", "prior", "posterior", "explained"):
        np.testing.assert_array_equal(out[name], without[name])
    tiny.assert_trees_close(grads["generator"], plain["generator"], rtol=1e-5, atol=1e-7)
    assert not tiny.is_zero(jax.tree.map(
        jnp.subtract, grads["query_encoder"], plain["query_encoder"]))


def test_a_batch_of_fillers_alone_gives_zero_gradients(params):
    batch = batch_of()._replace(weight=np.zeros(ROWS, np.float32))
    grads, metrics = gradients(params, batch, 1)
    assert tiny.is_zero(grads) and all(np.isfinite(m) for m in metrics.values())


def test_a_question_without_passages_counts_for_nothing(params):
    """Its likelihood would be that of nothing: 1e30 nats, and a gradient of empty sources."""
    batch = batch_of()
    doc_mask = np.array(batch.doc_mask)
    doc_mask[2] = False
    expected = gradients(params, batch._replace(
        weight=batch.weight * (np.arange(ROWS) != 2)), 1)
    grads, metrics = gradients(params, batch._replace(doc_mask=doc_mask), 1)
    tiny.assert_trees_close((grads, metrics), expected, rtol=1e-6)
    assert step._batch_metrics(batch._replace(doc_mask=jnp.asarray(doc_mask)))[
        "without_passages"] == 1 and metrics["nll"] < 100


def test_micro_batches_draw_their_own_dropout():
    """A loss that only reports its random draw: two micro-batches, two draws."""
    def loss(params, batch, key):
        draw = jax.random.uniform(key)
        return params["w"] * 1.0, jnp.float32(1), {"draw": draw, "square": draw**2}

    _, metrics = step.accumulated_gradients(
        loss, {"w": jnp.float32(1)}, {}, np.zeros((4, 1), np.float32), jax.random.key(0), 2)
    assert float(metrics["square"] - metrics["draw"] ** 2) > 1e-4


def test_retriever_loss_against_a_naive_loop(params):
    """In-batch and hard negatives; a passage that is the positive once more is no negative."""
    rng = np.random.default_rng(0)
    same = np.zeros((3, 6), bool)
    same[0, 4] = same[1, 2] = same[2, 1] = True
    batch = RetrieverBatch(
        rng.integers(0, 30, (3, 5)).astype(np.int32), tiny.ragged_mask(rng, 3, 5),
        rng.integers(0, 30, (6, 5)).astype(np.int32), tiny.ragged_mask(rng, 6, 5), same)
    run = tiny.jit(functools.partial(step.retriever_loss(MODEL), key=None))
    total, count, metrics = run(params, batch)

    def vector(tower, ids, mask):
        return naive.bert(params[tower]["bert"], ids, mask, np.zeros_like(ids), heads=2)[0]

    queries = [vector("query_encoder", *row) for row in zip(*batch[:2], strict=True)]
    passages = [vector("document_encoder", *row) for row in zip(*batch[2:4], strict=True)]
    nll, right = 0.0, 0
    for i, query in enumerate(queries):
        scores = {j: query @ passages[j] for j in range(6) if not same[i, j]}
        best = max(scores.values())
        nll += best + np.log(sum(np.exp(s - best) for s in scores.values())) - scores[i]
        right += scores[i] == best
    np.testing.assert_allclose(total, nll, rtol=1e-4)
    np.testing.assert_allclose([count, metrics["nll"], metrics["accuracy"]], [3, nll, right],
                               rtol=1e-4)
    unmasked, _, _ = run(params, batch._replace(same_passage=np.zeros_like(same)))
    assert unmasked > total + 1e-3


def test_retriever_loss_trains_both_encoders(params):
    rng = np.random.default_rng(0)
    ids, mask = rng.integers(0, 30, (3, 5)).astype(np.int32), np.ones((3, 5), bool)
    batch = RetrieverBatch(ids, mask, ids[:, ::-1], mask, np.zeros((3, 3), bool))
    loss = step.retriever_loss(MODEL)
    grads = tiny.jit(jax.grad(lambda p: loss(p, batch, None)[0]))(params)
    assert not tiny.is_zero(grads["query_encoder"]) and not tiny.is_zero(grads["document_encoder"])
    assert tiny.is_zero(grads["generator"])


def test_seq2seq_loss_is_the_sum_over_real_target_tokens(params):
    rng = np.random.default_rng(1)
    batch = Seq2SeqBatch(
        rng.integers(0, 38, (3, 6)).astype(np.int32), tiny.ragged_mask(rng, 3, 6),
        rng.integers(0, 38, (3, 5)).astype(np.int32), tiny.ragged_mask(rng, 3, 5))
    total, count, _ = tiny.jit(functools.partial(step.seq2seq_loss(MODEL), key=None))(params, batch)
    nll = 0.0
    for ids, mask, targets, real in zip(*batch[:4], strict=True):
        decoder_ids = np.concatenate([[tiny.END], targets[:-1]])
        log_p = naive.log_softmax(
            naive.bart_logits(params["generator"], ids, mask, decoder_ids, heads=2))
        nll -= log_p[np.arange(5), targets][real].sum()
    np.testing.assert_allclose(total, nll, rtol=1e-5)
    assert count == batch.target_mask.sum()


@pytest.fixture(scope="module")
def training():
    """(make, step) of a run that trains the generator alone, with dropout."""
    mesh = parallel.make_mesh(MeshConfig(1, 1), jax.devices()[:1])
    config = OptimizerConfig(learning_rate=0.03, warmup_steps=0, schedule="constant",
                             update_ratios=False)
    optimizer = optim.make_optimizer(config, 10, {"generator": 1.0})
    make, abstract, shardings = step.init_state(
        MODEL, rag.TOWERS, optimizer, 0, mesh)
    run = step.make_train_step(
        step.rag_loss(MODEL), optimizer, shardings, 1, step.DropoutKeys(5))
    batch = parallel.put_batch(batch_of(), mesh)
    compiled = run.lower(abstract, batch, np.int32(0)).compile(
        compiler_options={"xla_backend_optimization_level": 0})
    return make, lambda state, number: compiled(state, batch, np.int32(number))


def test_states_of_another_shape_than_their_parameters_lie_whole_on_each_device():
    """Adafactor's, which are sums over rows and columns, could not be split as what they sum."""
    mesh, transformation = parallel.make_mesh(MeshConfig(2, 2, 2)), optax.adafactor(0.1)
    optimizer = tiny.descent(("generator",))._replace(
        init=transformation.init, update=transformation.update)
    _, abstract, shardings = step.init_state(MODEL, rag.TOWERS, optimizer, 0, mesh)
    states, params = abstract.opt_state[0], jax.tree.leaves(abstract.params["generator"])
    for own, whole in zip(jax.tree.leaves(states.v), params, strict=True):
        assert own.shape == whole.shape and own.sharding == whole.sharding
    assert not all(own.sharding.is_fully_replicated for own in jax.tree.leaves(states.v))
    for own, whole in zip(jax.tree.leaves(states.v_row), params, strict=True):
        assert own.shape != whole.shape and own.sharding.is_fully_replicated
    assert shardings.opt_state[0].count.is_fully_replicated


def test_parameters_are_drawn_one_after_the_other(training):
    """XLA drew the random bits of all of them first: 1.9 GB beside a state of 3.4."""
    make, _ = training
    compiled = make.lower().compile().memory_analysis()
    assert compiled.temp_size_in_bytes < compiled.output_size_in_bytes / 10


def test_frozen_towers_stay_bitwise_and_have_no_optimiser_state(training):
    make, run = training
    state = make()
    before = jax.device_get(state.params)
    for number in range(3):
        state, _ = run(state, number)
    for tower in ("query_encoder", "document_encoder"):
        tiny.assert_trees_close(state.params[tower], before[tower], rtol=0, atol=0)
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.params["generator"]):
        name = jax.tree_util.keystr(path)
        old = functools.reduce(lambda node, key: node[key.key], path, before["generator"])
        assert (np.asarray(leaf) != old).any(), name
    names = [jax.tree_util.keystr(p) for p, _
             in jax.tree_util.tree_leaves_with_path(state.opt_state)]
    assert any("generator" in name for name in names)
    assert not any("encoder']['bert" in name for name in names)


def test_the_old_state_is_donated(training):
    make, run = training
    state = make()
    new, _ = run(state, 0)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.params["generator"]))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(new))


def test_dropout_is_a_function_of_the_step_number(training):
    """Resuming at step n draws what the uninterrupted run drew."""
    make, run = training
    nll = [float(run(make(), number)[1]["nll"]) for number in (0, 1, 0)]
    assert nll[0] == nll[2] != nll[1]


def test_the_loss_falls(training):
    make, run = training
    state, nll = make(), []
    for number in range(15):
        state, metrics = run(state, number)
        nll.append(float(metrics["nll"]))
        assert np.isfinite(float(metrics["grad_norm"])) and float(metrics["grad_norm"]) > 0
    assert not any(name.startswith("update_ratio") for name in metrics), "they are not measured"
    assert np.mean(nll[-3:]) < 0.7 * np.mean(nll[:3])


def test_uses_dropout_sees_every_rate():
    assert not step.uses_dropout(tiny.rag_model())
    for tower, field in [("retriever", "dropout"), ("retriever", "attention_dropout"),
                         ("generator", "dropout"), ("generator", "attention_dropout"),
                         ("generator", "activation_dropout")]:
        assert step.uses_dropout(tiny.rag_model(**{tower: {field: 0.1}})), (tower, field)


def assert_metrics_measure(before, after, metrics, trained):
    """Gradients before clipping, the update of the parameters, and the rate that it was made at."""
    size = np.linalg.norm
    by_tower = [float(metrics[f"grad_norm/{tower}"]) for tower in trained]
    np.testing.assert_allclose(size(by_tower), metrics["grad_norm"], rtol=1e-6)
    assert min(by_tower) > 0.01, "clipped to 0.01 all together"
    assert "grad_norm/document_encoder" not in metrics
    for tower in trained:
        old, new = (params[tower]["kernel"] for params in (before, after))
        np.testing.assert_allclose(metrics[f"update_ratio/{tower}"], size(new - old) / size(old),
                                   rtol=1e-5)
        np.testing.assert_allclose(metrics[f"learning_rate/{tower}"], 0.03, rtol=1e-6)


def test_a_tower_that_begins_at_0_has_no_update_ratio():
    """It was 1e27, and the axis of the plot with it: the logit of bm25_weight=0.5 begins so."""
    rates = {"fusion": 100.0, "generator": 1.0}
    adamw = optim.make_optimizer(OptimizerConfig(learning_rate=1e-3, warmup_steps=0), 10, rates)
    before = {"fusion": {"logit": jnp.float32(0)}, "generator": {"kernel": jnp.float32(2)}}
    grads = {"fusion": {"logit": jnp.float32(0.3)}, "generator": {"kernel": jnp.float32(0.2)}}
    updates, state = adamw.update(grads, adamw.init(before), before)
    after = jax.tree.map(jnp.add, before, updates)
    found = step._update_ratios(adamw, 0, after, state, {})
    assert found["update_ratio/fusion"] == 0
    np.testing.assert_allclose(found["update_ratio/generator"], 5.1e-4, rtol=1e-3)


def test_towers_frozen_in_a_step_stay_bitwise_and_the_others_train_as_if_they_were_frozen():
    """Also where they would have moved without a gradient: by momentum, decay and clipping."""
    mesh = parallel.make_mesh(MeshConfig(1, 1), jax.devices()[:1])
    config = OptimizerConfig(learning_rate=0.03, warmup_steps=0, schedule="constant",
                             weight_decay=0.1, clip_norm=0.01)
    rng = np.random.default_rng(0)
    batch = parallel.put_batch(rng.normal(size=(4, 3)).astype(np.float32), mesh)
    towers = {name: {"kernel": rng.normal(size=3).astype(np.float32)}
              for name in ("query_encoder", "document_encoder", "generator")}

    def loss(params, batch, key):
        said = sum(batch @ tower["kernel"] for tower in params.values())
        total = (said**2).sum()
        return total, jnp.float32(len(batch)), {"nll": total}

    def make(trained, frozen=()):
        optimizer = optim.make_optimizer(config, 10, dict.fromkeys(trained, 1.0))
        first = step.TrainState(jax.tree.map(jnp.array, towers),
                                optimizer.init({t: towers[t] for t in trained}))
        shardings = jax.tree.map(lambda _: parallel.replicated(mesh), first)
        return first, step.make_train_step(
            loss, optimizer, shardings, 2, frozen=frozen,
            show=lambda batch: {"rows": batch})

    both = ("query_encoder", "generator")
    start, moving = make(both)
    held, _ = make(both, ("query_encoder",))[1](start, batch, np.int32(0))
    frozen, _ = (run := make(("generator",)))[1](run[0], batch, np.int32(0))
    np.testing.assert_array_equal(held.params["generator"]["kernel"],
                                  frozen.params["generator"]["kernel"])
    state, metrics = moving(make(both)[0], batch, np.int32(0))
    np.testing.assert_array_equal(metrics["rows"], batch)
    assert_metrics_measure(towers, jax.device_get(state.params), metrics, both)
    before = jax.device_get(state.params)
    state, _ = make(both, ("query_encoder",))[1](state, batch, np.int32(1))
    after = jax.device_get(state.params)
    still = {t: (before[t]["kernel"] == after[t]["kernel"]).all() for t in towers}
    assert still == {"query_encoder": True, "document_encoder": True, "generator": False}
    assert (before["query_encoder"]["kernel"] != towers["query_encoder"]["kernel"]).all()
