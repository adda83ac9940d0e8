"""Schedules, and AdamW against a naive float64 loop."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from rag_jax.config import OptimizerConfig
from rag_jax.training.optim import decays, make_optimizer, schedule, vectors_joined

STEPS, PEAK = 30, 2.0


@pytest.mark.parametrize("name,decay", [
    ("constant", lambda x: 1.0),
    ("linear", lambda x: 1 - 0.9 * x),
    ("cosine", lambda x: 0.1 + 0.9 * (1 + np.cos(np.pi * x)) / 2),
    ("polynomial", lambda x: 0.1 + 0.9 * (1 - x) ** 3),
])
def test_schedule_values(name, decay):
    """Warm-up from peak / warm, the peak right after it, the end fraction at the last step."""
    config = OptimizerConfig(PEAK, name, end_fraction=0.1, power=3.0, warmup_steps=10)
    rate = schedule(config, STEPS)
    for step in (0, 1, 5, 10, 11, 17, 25, 30, 40):
        if step < 10:
            expected = PEAK / 10 + (PEAK - PEAK / 10) * step / 10
        else:
            expected = PEAK * decay(min((step - 10) / 20, 1))
        np.testing.assert_allclose(rate(step), expected, rtol=1e-5, err_msg=f"step {step}")


def test_without_warmup_the_first_step_has_the_peak_rate():
    rate = schedule(OptimizerConfig(PEAK, "linear", warmup_steps=0), STEPS)
    np.testing.assert_allclose([rate(0), rate(15), rate(30)], [PEAK, PEAK / 2, 0], atol=1e-6)


def test_a_warmup_longer_than_the_stage_ends_with_it():
    rate = schedule(OptimizerConfig(PEAK, "linear", warmup_steps=100), 5)
    values = [float(rate(step)) for step in range(6)]
    assert values == sorted(values) and max(values) <= PEAK and values[0] > 0


def tree(seed):
    """Two towers with a matrix, a bias, a norm and BART's logits bias."""
    rng = np.random.default_rng(seed)

    def leaf(*shape):
        return jnp.float32(rng.normal(size=shape))

    return {tower: {"mlp": {"kernel": leaf(3, 2), "bias": leaf(2)},
                    "norm": {"norm": {"scale": leaf(3), "bias": leaf(3)}},
                    "embedding": leaf(4, 3), "final_logits_bias": leaf(4),
                    "encoder_bias": leaf(4, 2)}
            for tower in ("query_encoder", "generator")}


def test_decay_is_for_matrices_only():
    decayed = {jax.tree_util.keystr(path) for path, yes
               in jax.tree_util.tree_leaves_with_path(decays(tree(0)["generator"])) if yes}
    assert decayed == {"['mlp']['kernel']", "['embedding']"}


def naive_adamw(params, gradients, config, rates):
    """Paths to float64 arrays after the steps; clipped over both towers together."""
    flat = [{jax.tree_util.keystr(p): np.float64(x)
             for p, x in jax.tree_util.tree_leaves_with_path(t)} for t in (params, *gradients)]
    values, gradients = flat[0], flat[1:]
    first = {name: np.zeros_like(x) for name, x in values.items()}
    second = {name: np.zeros_like(x) for name, x in values.items()}
    for number, gradient in enumerate(gradients):
        norm = np.sqrt(sum((g**2).sum() for g in gradient.values()))
        shrink = min(1.0, config.clip_norm / norm) if config.clip_norm else 1.0
        rate = float(schedule(config, STEPS)(number))
        for name, g in gradient.items():
            g = g * shrink
            first[name] = config.b1 * first[name] + (1 - config.b1) * g
            second[name] = config.b2 * second[name] + (1 - config.b2) * g**2
            step = (first[name] / (1 - config.b1 ** (number + 1))) / (
                np.sqrt(second[name] / (1 - config.b2 ** (number + 1))) + config.eps)
            if name.endswith(("['kernel']", "['embedding']")):
                step = step + config.weight_decay * values[name]
            tower = "generator" if name.startswith("['generator']") else "query_encoder"
            values[name] = values[name] - rates[tower] * rate * step
    return values


@pytest.mark.parametrize("clip_norm", [0.0, 0.5, 1e6])
def test_adamw_matches_a_naive_loop(clip_norm):
    """Moments, bias correction, decoupled decay, rates by tower, clipping by the global norm."""
    config = OptimizerConfig(0.1, "linear", warmup_steps=2, weight_decay=0.3, clip_norm=clip_norm,
                             eps=1e-2)
    rates = {"query_encoder": 0.25, "generator": 1.0}
    optimizer = make_optimizer(config, STEPS, rates)
    params, gradients = tree(0), [tree(seed) for seed in (1, 2, 3)]
    expected = naive_adamw(params, gradients, config, rates)
    update, state = jax.jit(optimizer.update), optimizer.init(params)
    for gradient in gradients:
        updates, state = update(gradient, state, params)
        old, params = params, optax.apply_updates(params, updates)
        tiny.assert_trees_close(optimizer.before(params, state), old, rtol=1e-5, atol=1e-6)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(leaf, expected[name], rtol=1e-4, atol=1e-5, err_msg=name)


def test_the_update_and_its_state_are_those_of_optax():
    """Checkpoints hold optax's state: another tree would not be restored, other moments or counts
    would train on from elsewhere."""
    config = OptimizerConfig(0.1, "linear", warmup_steps=2, weight_decay=0.3, clip_norm=0.5)
    reference = optax.chain(
        optax.clip_by_global_norm(0.5), optax.scale_by_adam(config.b1, config.b2, config.eps),
        optax.add_decayed_weights(0.3, mask=decays),
        optax.GradientTransformation(lambda params: optax.EmptyState(), optax.identity().update),
        optax.scale_by_learning_rate(schedule(config, STEPS)))
    optimizer = make_optimizer(config, STEPS, {"query_encoder": 1.0, "generator": 1.0})
    params, state, expected = tree(0), optimizer.init(tree(0)), reference.init(tree(0))
    for seed in (1, 2, 3):
        updates, state = jax.jit(optimizer.update)(tree(seed), state, params)
        wanted, expected = reference.update(tree(seed), expected, params)
        tiny.assert_trees_close((updates, state), (wanted, expected), rtol=2e-5, atol=1e-7)
        assert jax.tree.structure(state) == jax.tree.structure(expected)
        params = optax.apply_updates(params, wanted)


def test_a_scaled_tower_moves_by_that_share_and_its_moments_are_the_same():
    """Weight decay too: a retriever that nothing is known of would shrink meanwhile."""
    optimizer = make_optimizer(OptimizerConfig(0.1, warmup_steps=0, weight_decay=0.3), STEPS,
                               {"query_encoder": 0.5, "generator": 1.0})
    params, scales = tree(0), {"query_encoder": jnp.float32(0.3)}
    updates, state = optimizer.update(tree(1), optimizer.init(params), params)
    scaled, same = optimizer.update(tree(1), optimizer.init(params), params, scales)
    expected = {**updates, "query_encoder": jax.tree.map(
        lambda u: 0.3 * u, updates["query_encoder"])}
    tiny.assert_trees_close(scaled, expected, rtol=1e-5, atol=1e-8)
    tiny.assert_trees_close(same, state, rtol=0, atol=0)
    moved = optax.apply_updates(params, scaled)
    tiny.assert_trees_close(optimizer.before(moved, same, scales), params, rtol=1e-5, atol=1e-6)


def test_joined_vectors_go_back_as_each_of_them_would():
    """Update ratios are measured so; a vector that took part in weight decay would be another."""
    optimizer = make_optimizer(OptimizerConfig(0.1, warmup_steps=0, weight_decay=0.3), STEPS,
                               {"query_encoder": 0.5, "generator": 1.0})
    def with_vector(seed):  # that decays, as that of a missing passage does
        return {tower: {**leaves, "null": jnp.full(3, 0.1)} for tower, leaves in tree(seed).items()}

    params = with_vector(0)
    updates, state = optimizer.update(with_vector(1), optimizer.init(params), params)
    joined, state = vectors_joined((optax.apply_updates(params, updates), state))
    before = optimizer.before(joined, state)
    for tower, leaves in before.items():
        assert len(leaves) < len(jax.tree.leaves(params[tower])), "vectors are one"
        np.testing.assert_allclose(leaves[f"{tower}/null"], 0.1, rtol=1e-5)
        np.testing.assert_allclose(optax.global_norm(leaves), optax.global_norm(params[tower]),
                                   rtol=1e-5)
        assert sum(x.size for x in leaves.values()) == sum(
            x.size for x in jax.tree.leaves(params[tower]))


def test_movement_is_measured_where_the_loop_logs():
    """The loop takes the figure of a window's last step, also of one that the last step cuts."""
    measured = make_optimizer(OptimizerConfig(), 8, {"generator": 1.0}, log_every=3).measured
    assert [step for step in range(8) if measured(step)] == [2, 5, 7]
    off = OptimizerConfig(update_ratios=False)
    assert make_optimizer(off, 8, {"generator": 1.0}).measured is None


def test_rate_zero_stands_still_even_with_decay():
    config = OptimizerConfig(0.1, warmup_steps=0, weight_decay=0.3)
    optimizer = make_optimizer(config, STEPS, {"query_encoder": 0.0, "generator": 1.0})
    updates, _ = jax.jit(optimizer.update)(tree(1), optimizer.init(tree(0)), tree(0))
    assert not any(np.asarray(u).any() for u in jax.tree.leaves(updates["query_encoder"]))
    assert all(np.asarray(u).any() for u in jax.tree.leaves(updates["generator"]))


@pytest.mark.parametrize("rates", [{"generator": 1.0},
                                   {"generator": 1.0, "query_encoder": 1.0, "reader": 1.0}])
def test_every_tower_needs_exactly_one_rate(rates):
    optimizer = make_optimizer(OptimizerConfig(), STEPS, rates)
    with pytest.raises(ValueError, match="generator.*query_encoder.*learning rates"):
        optimizer.update(tree(1), optimizer.init(tree(0)), tree(0))
