"""AdamW as the configuration describes it, with a learning rate for each tower."""

from typing import Any

import jax
import optax

from rag_jax.config import OptimizerConfig
from rag_jax.types import Params


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
    """True where weight decay applies: matrices, but neither biases nor LayerNorm parameters."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: path[-1].key not in ("bias", "scale", "final_logits_bias"), params
    )


def make_optimizer(
    config: OptimizerConfig, steps: int, rates: dict[str, float]
) -> optax.GradientTransformation:
    """AdamW with clipping by the global norm over all towers that train.

    Args:
      config: the settings.
      steps: of the whole stage, for the schedule.
      rates: tower name -> learning rate relative to the schedule. The parameters given to the
        optimiser must have exactly these towers at the top: a frozen tower has no rate, and is
        kept out of the differentiated tree.
    """

    def scale_towers(updates: Params, state: Any, params: Params | None = None):
        del params
        if set(updates) != set(rates):
            raise ValueError(f"towers {sorted(updates)} need learning rates; given {sorted(rates)}")
        scaled = {
            tower: jax.tree.map(lambda u, r=rates[tower]: u * r, updates[tower])
            for tower in updates
        }
        return scaled, state

    clip = [optax.clip_by_global_norm(config.clip_norm)] if config.clip_norm else []
    return optax.chain(
        *clip,
        optax.scale_by_adam(config.b1, config.b2, config.eps),
        optax.add_decayed_weights(config.weight_decay, mask=decays),
        optax.GradientTransformation(lambda params: optax.EmptyState(), scale_towers),
        optax.scale_by_learning_rate(schedule(config, steps)),
    )
