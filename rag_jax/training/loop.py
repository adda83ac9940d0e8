"""The loop that runs every training stage: resume, train, watch, evaluate, save.

The order within a step is fixed. A state is saved before the next step begins, and the batch of a
step depends on (seed, step) and, for RAG, on the parameters at that step alone.
"""

import abc
import contextlib
import dataclasses
import math
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from rag_jax import hosts, locks, parallel, steps
from rag_jax.errors import NotFiniteError, Preempted, UserError
from rag_jax.training import tree_record
from rag_jax.training.checkpoint import BEST_METRIC, Checkpointer
from rag_jax.training.collapse import CollapseGuard
from rag_jax.training.log import MetricWriter, Progress
from rag_jax.training.preemption import preemption_noticed
from rag_jax.training.profiling import Profiler
from rag_jax.training.step import TrainState
from rag_jax.types import Params

RECENT = 10  # steps of which the mean is the loss now
GROWN = 3.0  # times the first loss that this mean exceeds, and more than 1 above that, has diverged


class TrainingError(UserError, RuntimeError):
    """Training cannot go on; the message says from which step it can be resumed."""


class BatchSource(abc.ABC):
    """Device batches by step. RAG retrieves with the parameters; warm-up stages do not use them.

    Attributes:
      lookahead: how many steps before its use a batch is begun (retrieval staleness).
    """

    lookahead = 0

    def begin(self, step: int, params: Any) -> None:  # noqa: B027 (some have nothing to begin)
        """Starts on the batch of `step` with the current parameters; returns without waiting."""

    @abc.abstractmethod
    def finish(self, step: int) -> Any:
        """The batch of `step`, placed on the mesh."""

    def pending(self) -> dict:
        """What was begun and not yet used, as JSON: it belongs to a checkpoint."""
        return {}

    def restore(self, pending: dict) -> None:  # noqa: B027 (or to restore)
        """The inverse of `pending`, but for what is of no use any more."""


class PureSource(BatchSource):
    """A source whose batches are a function of the step alone."""

    def __init__(self, make: Callable[[int], Any]):
        self._make = make

    def finish(self, step: int) -> Any:
        return self._make(step)


@dataclasses.dataclass(frozen=True)
class Stage:
    """One training stage.

    Attributes:
      name: shown in progress and metrics.
      directory: of its checkpoints and metrics.
      steps, log_every, save_every, eval_every, keep: counts of steps; eval_every 0 = never.
      make_state, abstract_state: the first state, and its shapes and shardings.
      apart: abstract parameters that the state does not have, but the checkpoints of earlier
        versions.
      train_step: (state, batch, step) -> (state, metrics).
      source: batches.
      evaluate: params -> metrics.
      best_metric: names of the metric that chooses the best checkpoint, as for `Checkpointer`.
      measured: the settings of `evaluate`, as for `Checkpointer`.
      meta: JSON that is saved with the checkpoints, such as the encoder's fingerprint.
      guard: against retrieval collapse; train_step then returns the retrieved rows as the metric
        "doc_ids".
      guarded: the towers that a collapse may roll back; None = no stage of this kind has a guard.
      frozen_step: replaces train_step once the guard has frozen the retriever; None = nothing else
        trains, and the stage ends then.
      profile: (start, steps): steps of this command before a trace begins, and steps in it.
    """

    name: str
    directory: pathlib.Path
    steps: int
    log_every: int
    save_every: int
    make_state: Callable[[], TrainState]
    abstract_state: TrainState
    train_step: Callable
    source: BatchSource
    meta: Mapping[str, Any]
    eval_every: int = 0
    evaluate: Callable[[Any], Mapping[str, float]] | None = None
    best_metric: tuple[str, ...] = BEST_METRIC
    measured: Mapping[str, str] | None = None
    keep: int = 1
    tensorboard: bool = True
    guard: CollapseGuard | None = None
    guarded: tuple[str, ...] | None = None
    frozen_step: Callable | None = None
    apart: Mapping[str, Params] = dataclasses.field(default_factory=dict)
    profile: tuple[int, int] | None = None

    def number_on_devices(self, step: int) -> jax.Array:
        """int32[], the number of a step on the devices of the state, where jit would otherwise
        transfer it implicitly."""
        sharding = jax.tree.leaves(self.abstract_state)[0].sharding
        if isinstance(sharding, NamedSharding):
            sharding = parallel.replicated(sharding.mesh)
        return parallel.put_number(step, sharding)


_ACTIONS = {
    "rollback": "the retriever goes back to where the last sound window ended, and trains no "
    "further",
    "freeze": "the retriever trains no further",
    "warn": "training goes on, but the passages may no longer help; to begin again, name another "
    "--workdir and a lower config.train.query_encoder_rate or learning rate, or "
    "config.train.collapse_guard=rollback",
    "stop": "training stops here, and the passages may no longer help",
}


def run_stage(stage: Stage) -> TrainState:
    """Runs a stage to its end, from its last checkpoint if it has one.

    Returns:
      The state after the last step.

    Raises:
      Preempted: SIGTERM, SIGHUP or Ctrl-C; the state has been saved and the same command goes on.
      TrainingError: a loss became NaN or infinite, or the guard stops at a retrieval collapse.
    """
    with preemption_noticed() as requested:  # until the last save has ended
        state = _run(stage, requested)
        if any(hosts.exchange(requested())):
            raise Preempted(f"{stage.name}: stopped after its last step, checkpoint saved")
    return state


def _run(stage: Stage, requested: Callable[[], bool]) -> TrainState:
    """As `run_stage`; `requested` says whether this process is asked to stop."""
    best = stage.best_metric if stage.evaluate else ()
    with (
        Checkpointer(stage.directory, keep=stage.keep, best_metric=best,
                     measured=stage.measured, apart=tuple(stage.apart)) as checkpointer,
        MetricWriter(
            stage.directory, tensorboard=stage.tensorboard, active=hosts.leads()) as writer,
    ):
        loop = _Loop(stage, checkpointer, writer)
        state, start = loop.resume()
        if start >= stage.steps:
            if not stage.steps:  # nothing to train, but something to answer with
                loop.save(0, state)
            if stage.profile:
                hosts.say(f"no step was profiled: {stage.name} has taken all of its {stage.steps} "
                          "steps")
            if any(hosts.exchange(requested())):
                raise Preempted(f"{stage.name}: stopped, its checkpoint is there")
            return state
        with (Progress(stage.steps, start, stage.name, stage.log_every, active=hosts.leads())
              as progress, Profiler(stage.directory / "profile", stage.profile, start) as profiler):
            watch = loop.watch = _Watch(loop, start, progress)
            for step in range(start, stage.steps):
                if any(hosts.exchange(requested())):  # all stop at the same step
                    watch.settle()
                    loop.save(step, state)
                    raise Preempted(f"{stage.name}: stopped at step {step}, checkpoint saved")
                train_step = loop.next_step(step, state)
                if train_step is None:
                    loop.end_early(step, state)
                    break
                profiler.begin(step)
                with loop.stopped_by_numbers(step):
                    with jax.profiler.StepTraceAnnotation(stage.name, step_num=step):
                        ahead = step + stage.source.lookahead
                        if ahead < stage.steps:
                            stage.source.begin(ahead, state.params)
                        batch = stage.source.finish(step)
                        state, metrics = train_step(state, batch, stage.number_on_devices(step))
                        watch.note(step, metrics)
                        state = loop.rolled_back(step + 1, state)
                    profiler.end(step, state)
                    loop.evaluate_and_save(step + 1, state)
    if loop.losses.have_grown:
        hosts.warn(f"{stage.name}: the loss has grown, {loop.losses}; begin again with a lower "
                   "learning rate, in another --workdir")
    return state


class Losses(NamedTuple):
    """The loss of a stage at its beginning, and now.

    Attributes:
      first: the nll of its first step; None = not known.
      recent: of the last steps, RECENT at most.
    """

    first: float | None = None
    recent: Sequence[float] = ()

    def noted(self, step: int, nll: float) -> "Losses":
        """These and the nll of one more step."""
        return Losses(nll if step == 0 else self.first, [*self.recent, nll][-RECENT:])

    @property
    def have_grown(self) -> bool:
        """Whether the loss is now much larger than batches of one model differ."""
        return self.first is not None and bool(self.recent) and (
            np.mean(self.recent) > GROWN * abs(self.first) + 1)

    def __str__(self) -> str:
        return f"from {self.first:.3g} in the first step to {np.mean(self.recent):.3g}"


class _Loop:
    """What happens between the steps of a stage: resuming, evaluating, saving, stopping."""

    watch: "_Watch"

    def __init__(self, stage: Stage, checkpointer: Checkpointer, writer: MetricWriter):
        self.stage, self.checkpointer, self.writer = stage, checkpointer, writer
        self.sound: Params | None = None  # the guarded towers as the last sound window left them
        self.losses = Losses()
        self.saved_losses = self.losses  # those of the last checkpoint

    def resume(self) -> tuple[TrainState, int]:
        """The state to go on from, and the number of steps that it has taken."""
        stage = self.stage
        start, state, meta = self._restored() or (0, stage.make_state(), {"pending": {}})
        self.writer.truncate_after(start)
        if stage.guard is not None and "guard" in meta:  # it may have been off until now
            stage.guard.restore(meta["guard"])
            if stage.guard.freezes and start < stage.steps:  # its action may have been another
                hosts.say(f"{stage.name}: {stage.guard}; {_ACTIONS['freeze']}")
        if "losses" in meta:  # earlier versions did not keep them
            self.losses = self.saved_losses = Losses(*meta["losses"])
        stage.source.restore(meta["pending"])
        if not stage.source.pending():
            for step in range(start, min(start + stage.source.lookahead, stage.steps)):
                stage.source.begin(step, state.params)
        return state, start

    def _restored(self) -> tuple[int, TrainState, Mapping[str, Any]] | None:
        """The last checkpoint; a sound retriever in it is kept for a rollback."""
        abstract, guard = self.stage.abstract_state, self.stage.guard
        forms = []
        if (guarded := self.stage.guarded) is not None:
            forms = [{"state": abstract.opt_state,
                      "sound": {tower: abstract.params[tower] for tower in guarded}}]
        restored = self.checkpointer.restore_latest(
            {**abstract.params, **self.stage.apart}, *forms, abstract.opt_state)
        if restored is None:
            return None
        step, params, opt_state, meta = restored
        params = {tower: params[tower] for tower in abstract.params}
        if jax.tree.structure(opt_state) != jax.tree.structure(abstract.opt_state):
            if guard is not None and guard.action == "rollback":
                self.sound = opt_state["sound"]
            opt_state = opt_state["state"]
        return step, TrainState(params, opt_state), meta

    def rolled_back(self, done: int, state: TrainState) -> TrainState:
        """The state after `done` steps. Where a window ends there that shows a collapse, and the
        guard rolls back, its retriever is that of the end of the last sound window."""
        stage, guard = self.stage, self.stage.guard
        if guard is None or not guard.due(done):
            return state
        self.watch.settle()
        if guard.action != "rollback":
            return state
        if guard.collapsed_at is None:  # a copy: the step donates its state
            self.sound = jax.tree.map(jnp.copy, {t: state.params[t] for t in stage.guarded})
        elif self.sound is not None:
            state = TrainState({**state.params, **self.sound}, state.opt_state)
            self.sound = None
            stage.source.restore(stage.source.pending())  # the collapsed encoder's index is stale
        return state

    def next_step(self, done: int, state: TrainState) -> Callable | None:
        """The function of the step after `done` steps; None = nothing is left to train.

        Raises:
          TrainingError: retrieval has collapsed, and the guard stops training.
        """
        stage, guard = self.stage, self.stage.guard
        if guard is None or guard.collapsed_at is None or guard.action == "warn":
            return stage.train_step
        if guard.freezes:
            return stage.frozen_step
        self.save(done, state)
        others = "freeze or off" if stage.frozen_step is not None else "off"
        raise TrainingError(
            f"{stage.name}: {guard}; stopped, with checkpoint {done} in {stage.directory}. To go "
            f"on from there, run the same command with config.train.collapse_guard={others}; "
            "to begin again, name another --workdir and a lower config.train.query_encoder_rate or "
            "learning rate, and look whether the passages help to answer at all."
        )

    def end_early(self, done: int, state: TrainState) -> None:
        """Ends the stage after `done` steps, as the others would change nothing."""
        stage = self.stage
        hosts.say(f"{stage.name}: nothing but the retriever trains, so training ends at step "
                  f"{done} of {stage.steps}")
        self.watch.log_rest(done)
        self.evaluate_and_save(stage.steps, state)

    def evaluate_and_save(self, done: int, state: TrainState) -> None:
        """Evaluates and saves after `done` steps, if either is due."""
        stage, last = self.stage, done == self.stage.steps
        metrics = None
        if stage.evaluate and stage.eval_every and (done % stage.eval_every == 0 or last):
            self.watch.settle()
            metrics = dict(stage.evaluate(state.params))
            self.writer.write(done, {f"dev/{name}": value for name, value in metrics.items()})
        if metrics is not None or done % stage.save_every == 0 or last:
            self.watch.settle()
            self.save(done, state, metrics)
            self.watch.begin_step()

    def save(self, step: int, state: TrainState, metrics: Mapping[str, float] | None = None
             ) -> None:
        """Saves the state after `step` steps, unless that is saved already."""
        hosts.lead(lambda: locks.check_held(self.stage.directory.parent))
        if step in self.checkpointer.all_steps():
            return
        self.writer.flush()  # a run that goes on from this checkpoint writes no earlier metrics
        if bad := tree_record.non_finite(state.params):
            raise self.diverged(step, f"parameter {bad[0]} is NaN or infinite after {step} steps")
        self.saved_losses = self.losses
        meta = {**self.stage.meta, "pending": self.stage.source.pending(), "losses": self.losses}
        if self.stage.guard is not None:
            meta["guard"] = self.stage.guard.state()
        opt_state = state.opt_state
        if self.sound is not None:
            opt_state = {"state": opt_state, "sound": self.sound}
        self.checkpointer.save(step, state.params, opt_state, meta, metrics)

    def diverged(self, step: int, what: str) -> TrainingError:
        """The error for numbers that became NaN or infinite, recorded in the stage's folder."""
        stage, name = self.stage, self.stage.name
        section = f"{name}_warmup" if name in ("retriever", "generator") else "train"
        last = self.checkpointer.latest_here()  # waits for a save under way
        if hosts.leads():
            steps.stop(stage.directory, step, what, last)
        rates = f"a lower config.{section}.optimizer.learning_rate, or a longer warmup_steps"
        # Of a run, other runs of the workdir have the rate, too.
        again = "in another --workdir" if section == "train" else (
            f"with the same command, once {stage.directory} is removed")
        if last is not None and self.saved_losses.have_grown:
            return TrainingError(
                f"{name}: {what}; the last checkpoint is step {last} in {stage.directory}, and the "
                f"loss had grown by then, {self.saved_losses}. Begin again {again}, with {rates}.")
        before, then = "no checkpoint was saved before", ""
        if last is not None:
            before = f"the last good checkpoint is step {last} in {stage.directory}"
            then = f". If that ends so at once, begin again {again}"
        return TrainingError(
            f"{name}: {what}; {before}. Run the same command with {rates}: both may change now, "
            f"and training goes on from there{then}.")

    @contextlib.contextmanager
    def stopped_by_numbers(self, step: int) -> Iterator[None]:
        """Raises a TrainingError where retrieval or evaluation meets a number that is not finite,
        which may be before the metrics are read."""
        try:
            yield
        except NotFiniteError as error:
            self.watch.settle()
            raise self.diverged(step, str(error).rstrip(".")) from None


class _Watch:
    """Waits for the steps that run, and reads their metrics in one transfer for each logged step.

    At most one step is dispatched before the one that runs has ended, so that a signal or a
    checkpoint waits for two steps at most. On CPUs no step is: the host would gain no time, and its
    buffers, 2.6 GB for a base model, would be in RAM beside those of the running step.
    """

    def __init__(self, loop: _Loop, start: int, progress: Progress):
        self.loop, self.stage, self.progress = loop, loop.stage, progress
        self.waiting: tuple[int, Any] | None = None
        self.first = start  # the first step of the window
        self.window: list[dict[str, float]] = []  # metrics of the steps since the last logged one
        self.unread: list[dict[str, jax.Array]] = []  # of the steps after those in the window
        self.secs = 0.0  # of the window's steps
        self.begin_step()

    def begin_step(self) -> None:
        """Starts the time of a step again, so that it does not include evaluation and saving."""
        self.since = time.perf_counter()

    def note(self, step: int, metrics: Any) -> None:
        """Takes the device metrics of `step` and waits for the step before; on CPUs also for it."""
        self._finish_step()
        self.waiting = (step, metrics)
        if jax.default_backend() == "cpu":
            self._finish_step()

    def settle(self) -> None:
        """Waits for the last step noted, and stops at NaN and infinity in any step until now."""
        self._finish_step()
        self._read()

    def log_rest(self, done: int) -> None:
        """Writes the means of the steps since the last logged one, of which there may be none. Of
        these no update ratio was measured."""
        self.settle()
        self.window = [{name: value for name, value in metrics.items()
                        if not name.startswith("update_ratio/")} for metrics in self.window]
        if self.window:
            self._log(done)

    def _finish_step(self) -> None:
        if self.waiting is None:
            return
        (step, metrics), self.waiting = self.waiting, None
        jax.block_until_ready(metrics)
        now = time.perf_counter()
        self.secs, self.since = self.secs + now - self.since, now
        doc_ids = metrics.pop("doc_ids", None)
        self.unread.append(metrics)
        done, shown = step + 1, {"nll": metrics["nll"]}
        if self.stage.guard is not None:
            self._guard(done, doc_ids)
        if done % self.stage.log_every == 0 or done == self.stage.steps:
            self._read()
            shown = self._log(done)
        self.progress.update(done, shown)

    def _guard(self, done: int, doc_ids: jax.Array) -> None:
        guard, name = self.stage.guard, self.stage.name
        before, effective = guard.collapsed_at, guard.note(done, doc_ids)
        if effective is not None:
            self.loop.writer.write(done, {f"{name}/effective_passages": effective})
        action = guard.action
        if action == "rollback" and self.loop.sound is None:
            action = "freeze"  # the guard's action was another when the last sound window ended
        if guard.collapsed_at != before:
            hosts.say(f"{name}: {guard}; {_ACTIONS[action]}")

    def _read(self) -> None:
        """Moves the metrics of all unread steps into the window.

        Raises:
          TrainingError: one of them is not finite.
        """
        if not self.unread:
            return
        unread, self.unread = jax.device_get(self.unread), []
        for metrics in unread:
            step = self.first + len(self.window)
            self.window.append({name: float(value) for name, value in metrics.items()})
            bad = [name for name, value in self.window[-1].items() if not math.isfinite(value)]
            if bad:  # those of single towers are named only where there is no other
                named = [name for name in bad if "/" not in name] or bad
                raise self.loop.diverged(
                    step, f"{', '.join(named)} became NaN or infinite in step {step} (steps "
                    f"{self.first} to {step} were being averaged)")
            self.loop.losses = self.loop.losses.noted(step, self.window[-1]["nll"])

    def _log(self, done: int) -> dict[str, float]:
        """Writes the window's means and begins the next window; returns the metrics to show."""
        means = {name: float(np.mean([m[name] for m in self.window]))
                 if not name.startswith("update_ratio/") else last  # measured in logged steps alone
                 for name, last in self.window[-1].items()}
        means["step_secs"] = self.secs / len(self.window)
        if "tokens" in means:
            means["tokens_per_sec"] = means["tokens"] / max(means["step_secs"], 1e-9)
        self.loop.writer.write(
            done, {f"{self.stage.name}/{name}": value for name, value in means.items()})
        self.first, self.window, self.secs = done, [], 0.0
        return {"nll": means["nll"]}
