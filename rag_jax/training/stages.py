"""How a stage of training is put together: optimiser, sharded first state, jitted steps."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from rag_jax import process
from rag_jax.config import OptimizerConfig
from rag_jax.models.rag import FUSION
from rag_jax.training import step
from rag_jax.training.job import Job
from rag_jax.training.loop import Stage
from rag_jax.training.optim import make_optimizer
from rag_jax.training.pretrained import ENCODERS

RETRIEVER = (*ENCODERS, FUSION)  # towers that decide what is retrieved


def build_stage(job: Job, name: str, rates: Mapping[str, float | None], loss: step.LossFunction,
                optimizer: OptimizerConfig, initial: Callable[[], Any] | None = None,
                complete: step.Completion | None = None, **settings: Any) -> Stage:
    """The stage of a loss, with AdamW over the towers that have a rate.

    Args:
      job: with the configuration of the stage's run.
      name: the stage's name, and its folder in the workdir.
      rates: the learning rate of every tower that the loss reads, relative to the schedule; None
        where the tower is frozen.
      loss: what is minimised.
      optimizer: settings of AdamW.
      initial: makes the parameters to start from; None = drawn with the configuration's seed.
      complete: as for `step.make_train_step`.
      settings: further fields of `Stage`.

    Where the loss has the metric INFORMATION, the updates of RETRIEVER shrink in proportion to it
    while it is below config.train.full_information times the entropy of p(z | x).
    """
    process.give_back_after_compiling()
    model, full = job.model, job.config.train.full_information
    adamw = make_optimizer(optimizer, settings["steps"], rates, settings["log_every"])
    if "guard" in settings:  # where it is None now, earlier checkpoints may hold guarded towers
        settings["guarded"] = tuple(t for t in RETRIEVER if t in adamw.towers)
    guard = settings.get("guard")

    def scales(metrics: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        if not full or step.INFORMATION not in metrics:
            return {}
        entropy = metrics["prior_entropy"]
        enough = full * jnp.maximum(entropy, 1e-9)
        scale = jnp.clip(metrics[step.INFORMATION] / enough, 0.0, 1.0)  # rounding may give < 0
        scale = jnp.where(entropy == 0, 1.0, scale)  # one passage: there is nothing to tell apart
        return {tower: scale for tower in RETRIEVER if tower in adamw.towers}

    adamw = adamw._replace(scales=scales)
    make, abstract, shardings = step.init_state(
        model, tuple(rates), adamw, job.config.seed, job.mesh)

    def first_state() -> step.TrainState:
        if initial is None:
            state = make()
            make.clear_cache()  # it runs once, and its program takes 0.3 GB of a base model's
            return state
        params = jax.tree.map(jnp.copy, initial())  # the step donates its state
        first = {tower: params[tower] for tower in adamw.towers}
        opt_state = jax.jit(adamw.init, out_shardings=shardings.opt_state)(first)
        return step.TrainState(params, opt_state)

    dropout = dropout_of(job) if step.uses_dropout(model) else None
    show = None if guard is None else lambda batch: {"doc_ids": batch.doc_ids}

    def make_step(frozen: tuple[str, ...] = ()) -> Callable:
        return step.make_train_step(
            loss, adamw, shardings, optimizer.accumulate, dropout, complete, frozen, show)

    if guard is not None and set(settings["guarded"]) != set(adamw.towers):
        settings["frozen_step"] = make_step(settings["guarded"])
    return Stage(name=name, directory=job.workdir / name, make_state=first_state,
                 abstract_state=abstract, train_step=make_step(),
                 tensorboard=job.config.tensorboard, **settings)


def dropout_of(job: Job) -> step.DropoutKeys:
    """How dropout masks are drawn on the devices of a job's mesh, by config.dropout_keys."""
    chosen, platform = job.config.dropout_keys, job.mesh.devices.flat[0].platform
    if chosen == "auto":
        chosen = "unsafe_rbg" if platform == "tpu" else "threefry2x32"
    return step.DropoutKeys(job.config.seed, chosen)
