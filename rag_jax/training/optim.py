"""AdamW as the configuration describes it, with a learning rate for each tower."""

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import traverse_util

from rag_jax.config import OptimizerConfig
from rag_jax.types import Params

_UNSCALED: Mapping[str, Any] = types.MappingProxyType({})


class Optimizer(NamedTuple):
    """An optax.GradientTransformation (`init`, `update`) that knows which towers it trains."""

    init: Callable[[Params], Any]
    update: Callable[..., tuple[Params, Any]]
    towers: tuple[str, ...]
    # The learning rate of each tower in the update of a step, which may be traced: float32[].
    learning_rates: Callable[[jax.Array], dict[str, jax.Array]]
    # (parameters, state, scales), after an update -> the parameters before it, but for rounding.
    before: Callable[..., Params]
    # Whether the update ratios of a step, which may be traced, are measured: bool[]; None = never.
    measured: Callable[[jax.Array], jax.Array] | None
    # The metrics of a step -> factors float32[] of the updates of some towers.
    scales: Callable[[Mapping[str, jax.Array]], dict[str, jax.Array]] = lambda metrics: {}


def schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Learning rate by step: linear warm-up to the peak, then the configured decay to the end."""
    peak, warm = config.learning_rate, min(config.warmup_steps, steps)
    rest, end = max(steps - warm, 1), config.learning_rate * config.end_fraction
    decay = {
        "constant": lambda: optax.constant_schedule(peak),
        "linear": lambda: optax.linear_schedule(peak, end, rest),
        "cosine": lambda: optax.cosine_decay_schedule(peak, rest, config.end_fraction),
        "polynomial": lambda: optax.polynomial_schedule(peak, end, config.power, rest),
    }[config.schedule]()
    if not warm:
        return decay
    # The first update already moves: warm-up runs from peak / warm, not from 0.
    return optax.join_schedules([optax.linear_schedule(peak / warm, peak, warm), decay], [warm])


def decays(params: Params) -> Any:
    """True where weight decay applies: matrices, but no biases (as those of T5's relative
    positions), LayerNorm parameters and scales."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: not path[-1].key.endswith(("bias", "scale", "logit")), params)


def vectors_joined(trees: Any) -> Any:
    """Trees of parameters anywhere in `trees`, with the vectors of each tower that do not decay as
    one, named as one that does not decay; other parameters are named by their paths, a/b/kernel.

    Two in three parameters of a transformer are vectors, and XLA compiles as many operations for a
    vector as for a matrix: norms of all take half the time to compile so.
    """
    def joined(params: Params) -> Params:
        flat = traverse_util.flatten_dict(params, sep="/")
        decayed = decays(flat)
        rest: dict[str, dict] = {tower: {} for tower in params}
        vectors: dict[str, list] = {tower: [] for tower in params}
        for name, leaf in flat.items():
            tower = name.split("/")[0]
            if leaf.ndim == 1 and not decayed[name]:
                vectors[tower].append(leaf)
            else:
                rest[tower][name] = leaf
        return {tower: {**leaves, "bias": jnp.concatenate(vectors[tower])}
                if vectors[tower] else leaves for tower, leaves in rest.items()}

    def is_params(node: Any) -> bool:
        return isinstance(node, dict)

    return jax.tree.map(lambda node: joined(node) if is_params(node) else node, trees,
                        is_leaf=is_params)


def make_optimizer(config: OptimizerConfig, steps: int, rates: Mapping[str, float | None],
                   log_every: int = 1) -> Optimizer:
    """AdamW with clipping by the global norm over all towers that train.

    Args:
      config: the settings.
      steps: length of the whole stage, for the schedule.
      rates: tower name -> learning rate relative to the schedule, None where the tower is frozen.
        The parameters given to the optimiser have exactly the other towers at the top: a frozen
        tower is kept out of the differentiated tree.
      log_every: update ratios are measured every so many steps, and in the last one.
    """
    rates = {tower: rate for tower, rate in rates.items() if rate is not None}
    rate_at = schedule(config, steps)
    # The state, which checkpoints hold, is optax's. The update is not: optax would write a copy of
    # all parameters after each of these transformations.
    clip = [optax.clip_by_global_norm(config.clip_norm)] if config.clip_norm else []
    chain = optax.chain(
        *clip,
        optax.scale_by_adam(config.b1, config.b2, config.eps),
        optax.add_decayed_weights(config.weight_decay, mask=decays),
        optax.identity(),  # stands for the towers' rates, so that the state keeps its structure
        optax.scale_by_learning_rate(rate_at),
    )

    def learning_rates(step: jax.Array) -> dict[str, jax.Array]:
        return {tower: jnp.float32(rate_at(step) * rate) for tower, rate in rates.items()}

    def measured(step: jax.Array) -> jax.Array:
        return ((step + 1) % log_every == 0) | (step + 1 == steps)

    update, before = _adamw(config, rate_at, rates)
    return Optimizer(chain.init, update, tuple(rates), learning_rates, before,
                     measured if config.update_ratios else None)


def _adamw(config: OptimizerConfig, rate_at: optax.Schedule, rates: Mapping[str, float]
           ) -> tuple[Callable, Callable]:
    """`Optimizer.update` and `Optimizer.before`."""

    def update(grads: Params, state: Any, params: Params, scales: Mapping[str, Any] = _UNSCALED
               ) -> tuple[Params, Any]:
        if set(grads) != set(rates):
            raise ValueError(f"towers {sorted(grads)} need learning rates; given {sorted(rates)}")
        adam, scheduled = parts(state)
        shrink = _shrink(grads, config.clip_norm)
        mu = jax.tree.map(lambda m, g: config.b1 * m + (1 - config.b1) * (shrink * g),
                          adam.mu, grads)
        nu = jax.tree.map(lambda v, g: config.b2 * v + (1 - config.b2) * (shrink * g) ** 2,
                          adam.nu, grads)
        state = tuple(
            optax.ScaleByAdamState(optax.safe_increment(part.count), mu, nu) if part is adam else
            optax.ScaleByScheduleState(optax.safe_increment(part.count)) if part is scheduled else
            part for part in state)
        return jax.tree.map(lambda p, step, decay: step - decay * p, params,
                            *adam_steps(params, state, scales)), state

    def parts(state: Any) -> tuple[optax.ScaleByAdamState, optax.ScaleByScheduleState]:
        kinds = (optax.ScaleByAdamState, optax.ScaleByScheduleState)
        leaves = jax.tree.leaves(state, is_leaf=lambda part: isinstance(part, kinds))
        return tuple(next(part for part in leaves if isinstance(part, kind)) for kind in kinds)

    def adam_steps(params: Params, state: Any, scales: Mapping[str, Any]) -> tuple[Params, Any]:
        """Adam's steps that led to a state, and the shares by which weight decay shrinks the
        parameters."""
        adam, scheduled = parts(state)
        correct_mu, correct_nu = (1 / (1 - b**adam.count) for b in (config.b1, config.b2))

        def step(rate: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
            return rate * m / (jnp.sqrt(correct_nu * v) + config.eps)

        by_tower = {tower: rate_at(scheduled.count - 1) * rates[tower] * scales.get(tower, 1.0)
                    for tower in params}
        shrunk = {tower: jax.tree.map(
            lambda decayed, rate=rate: rate * config.weight_decay if decayed else 0.0,
            decays(params[tower])) for tower, rate in by_tower.items()}
        return {tower: jax.tree.map(functools.partial(step, -rate * correct_mu), adam.mu[tower],
                                    adam.nu[tower]) for tower, rate in by_tower.items()}, shrunk

    def before(params: Params, state: Any, scales: Mapping[str, Any] = _UNSCALED) -> Params:
        return jax.tree.map(lambda p, step, decay: (p - step) / (1 - decay), params,
                            *adam_steps(params, state, scales))

    return update, before


def _shrink(grads: Params, clip_norm: float) -> jax.Array | float:
    """The factor by which clipping shortens a gradient, float32[]."""
    if not clip_norm:
        return 1.0
    norm = optax.global_norm(grads)
    return jnp.where(norm < clip_norm, 1.0, clip_norm / norm)
