"""The loop: resumes where it stopped, stops where it must, keeps what is best."""

import dataclasses
import itertools
import json
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rag_jax import hosts, locks
from rag_jax.decoding.results import ScoreError
from rag_jax.errors import UserError
from rag_jax.retrieval.protocol import VectorError
from rag_jax.training import loop
from rag_jax.training.checkpoint import Checkpointer
from rag_jax.training.loop import (
    BEST_METRIC,
    Losses,
    Preempted,
    PureSource,
    Stage,
    TrainingError,
    run_stage,
)
from rag_jax.training.step import TrainState

RATE = 0.1


class Killed(Exception):
    """Stands for a process that ends without a word."""


def first_state():
    return TrainState({"w": jnp.array([1.0, -2.0])}, {"sum": jnp.zeros(2)})


def descend(state, batch, step):
    """One step of gradient descent on |w - batch|^2, with a trace of the gradients."""
    gradient = 2 * (state.params["w"] - batch)
    nll = jnp.sum((state.params["w"] - batch) ** 2)
    return TrainState({"w": state.params["w"] - RATE * gradient},
                      {"sum": state.opt_state["sum"] + gradient}), {
                          "nll": nll, "step": step, "update_ratio/w": step}


def target(step):
    return jnp.array([np.sin(step), np.cos(step)], jnp.float32)


def stage(directory, steps=10, log_every=3, save_every=4, at=None, **changes):
    """A stage; at = {step: function(metrics) called after that step, may replace the metrics}."""
    ran = []

    def train_step(state, batch, step):
        ran.append(int(step))
        state, metrics = descend(state, batch, step)
        return state, (at or {}).get(int(step), lambda m: m)(metrics)

    state = first_state()
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    values = dict(
        name="toy", directory=directory, steps=steps, log_every=log_every, save_every=save_every,
        make_state=first_state, abstract_state=abstract, train_step=train_step,
        source=PureSource(target), meta={"kind": "toy"}, tensorboard=False)
    return Stage(**{**values, **changes}), ran


def raises(error):
    def call(metrics):
        raise error

    return call


def with_nan(metrics):
    return {**metrics, "nll": jnp.float32(np.nan)}


def terminate(metrics):
    os.kill(os.getpid(), signal.SIGTERM)
    return metrics


def lines(directory):
    """The lines of metrics.jsonl without the step's time, which no two runs share."""
    read = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "toy/step_secs"}
            for line in read]


def same(one, other):
    leaves = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in leaves)


def saved(directory):
    with Checkpointer(directory, read_only=True) as checkpointer:
        return checkpointer.all_steps()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """(state, metrics lines) of an uninterrupted run."""
    directory = tmp_path_factory.mktemp("whole")
    made, ran = stage(directory)
    state = run_stage(made)
    assert ran == list(range(10))
    return state, lines(directory)


def test_the_state_is_that_of_the_steps_taken_one_after_the_other(whole):
    state = first_state()
    for step in range(10):
        state, _ = descend(state, target(step), step)
    assert same(state, whole[0])


def test_metrics_are_means_over_the_window(whole):
    state, nlls = first_state(), []
    for step in range(10):
        state, metrics = descend(state, target(step), step)
        nlls.append(float(metrics["nll"]))
    assert [line["step"] for line in whole[1]] == [3, 6, 9, 10]
    means = [np.mean(nlls[a:b]) for a, b in ((0, 3), (3, 6), (6, 9), (9, 10))]
    assert np.allclose([line["toy/nll"] for line in whole[1]], means, rtol=1e-6)


def test_what_is_measured_in_logged_steps_alone_is_no_mean(whole):
    """A mean with the zeros of the other steps would be too small."""
    assert [line["toy/update_ratio/w"] for line in whole[1]] == [2, 5, 8, 9]


@pytest.mark.parametrize("died, resumed", [(2, 0), (4, 4), (5, 4), (7, 4), (9, 8)])
def test_a_killed_run_resumes_at_its_last_checkpoint_and_ends_the_same(
        tmp_path, whole, died, resumed):
    """A line that was written after the checkpoint, as of step 6, must not stand there twice."""
    made, _ = stage(tmp_path, at={died: raises(Killed())})
    with pytest.raises(Killed):
        run_stage(made)
    made, ran = stage(tmp_path)
    state = run_stage(made)
    assert ran == list(range(resumed, 10))
    assert same(state, whole[0])
    if resumed == 0:  # otherwise the first window after the checkpoint is shorter
        assert lines(tmp_path) == whole[1]
    assert [line["step"] for line in lines(tmp_path)] == [3, 6, 9, 10]


def test_a_finished_stage_returns_its_state_without_a_step(tmp_path, whole):
    run_stage(stage(tmp_path)[0])
    made, ran = stage(tmp_path, make_state=raises(AssertionError("made anew")))
    assert same(run_stage(made), whole[0]) and ran == []
    assert lines(tmp_path) == whole[1]


def test_a_checkpoint_has_all_earlier_points_on_the_disk(tmp_path, monkeypatch):
    """After a kill -9, TensorBoard lacked some for ever that metrics.jsonl has."""
    def read():
        return b"".join(file.read_bytes() for file in (tmp_path / "tensorboard").iterdir())

    seen, save = {}, Checkpointer.save
    monkeypatch.setattr(Checkpointer, "save", lambda self, step, *given: (
        seen.update({step: read().count(b"toy/nll")}), save(self, step, *given)))
    run_stage(stage(tmp_path, log_every=1, tensorboard=True)[0])
    assert seen == {4: 4, 8: 8, 10: 10}


def test_zero_steps_leave_the_first_state(tmp_path):
    made, ran = stage(tmp_path, steps=0)
    assert same(run_stage(made), first_state()) and ran == []


@pytest.mark.parametrize("bad, window, last", [
    (6, "steps 6 to 6", "step 4"),
    (5, "steps 3 to 5", "step 4"),
    (8, "steps 6 to 8", "step 8"),
    (7, "steps 6 to 7", "step 4"),  # its own step is to be saved: the check comes first
    (9, "steps 9 to 9", "step 8"),
])
def test_nan_stops_with_its_window_and_the_last_good_checkpoint(tmp_path, bad, window, last):
    made, _ = stage(tmp_path, at={bad: with_nan})
    with pytest.raises(TrainingError) as error:
        run_stage(made)
    text = str(error.value)
    assert f"nll became NaN or infinite in step {bad} ({window}" in text
    assert f"the last good checkpoint is {last} in {tmp_path}" in text
    assert f"step {max(saved(tmp_path))}" == last
    assert all(np.isfinite(line["toy/nll"]) for line in lines(tmp_path))


def test_nan_before_the_first_checkpoint_says_that_there_is_none(tmp_path):
    made, _ = stage(tmp_path, at={1: with_nan})
    with pytest.raises(TrainingError, match="step 1 .*no checkpoint was saved before"):
        run_stage(made)


def test_infinity_in_any_metric_stops(tmp_path):
    made, _ = stage(tmp_path, at={2: lambda m: {**m, "gradient_norm": jnp.float32(np.inf)}})
    with pytest.raises(TrainingError, match="toy: gradient_norm became"):
        run_stage(made)


def test_a_run_stopped_by_nan_goes_on_from_the_good_checkpoint(tmp_path, whole):
    made, _ = stage(tmp_path, at={6: with_nan})
    with pytest.raises(TrainingError):
        run_stage(made)
    assert same(run_stage(stage(tmp_path)[0]), whole[0])


@pytest.mark.parametrize("signalled", [0, 3, 5])
def test_sigterm_saves_the_next_step_and_the_rest_ends_the_same(tmp_path, whole, signalled):
    made, ran = stage(tmp_path, at={signalled: terminate})
    with pytest.raises(Preempted, match=f"toy: stopped at step {signalled + 1}, checkpoint saved"):
        run_stage(made)
    assert ran == list(range(signalled + 1)) and max(saved(tmp_path)) == signalled + 1
    made, ran = stage(tmp_path)
    assert same(run_stage(made), whole[0]) and ran == list(range(signalled + 1, 10))


def test_sigterm_in_the_last_step_stops_with_the_stage_finished(tmp_path, whole):
    """Going on to the next stage, the process would be killed when its time is up."""
    made, _ = stage(tmp_path, at={9: terminate})
    with pytest.raises(Preempted, match="toy: stopped after its last step, checkpoint saved"):
        run_stage(made)
    assert saved(tmp_path) == [10]
    made, ran = stage(tmp_path)
    assert same(run_stage(made), whole[0]) and not ran


@pytest.mark.parametrize("at, told", [({}, "after its last step"), ({5: terminate}, "at step 6")])
def test_a_signal_while_the_last_save_ends_does_not_break_it_off(tmp_path, monkeypatch, at, told):
    """A second SIGTERM killed the process before its checkpoint was there."""
    class Signalled(Checkpointer):
        def close(self):
            terminate(None)
            super().close()

    former, handled = signal.getsignal(signal.SIGTERM), []
    monkeypatch.setattr(loop, "Checkpointer", Signalled)
    signal.signal(signal.SIGTERM, lambda *_: handled.append(True))
    try:
        with pytest.raises(Preempted, match=f"toy: stopped {told}, checkpoint saved"):
            run_stage(stage(tmp_path, at=at)[0])
    finally:
        signal.signal(signal.SIGTERM, former)
    assert not handled


def test_sigterm_while_a_finished_stage_is_read_is_not_lost(tmp_path, whole):
    """What came while its checkpoint was read, for minutes perhaps, was forgotten."""
    run_stage(stage(tmp_path)[0])
    made, _ = stage(tmp_path)
    restore = made.source.restore
    made.source.restore = lambda pending: (terminate(None), restore(pending))
    with pytest.raises(Preempted, match="toy: stopped, its checkpoint is there"):
        run_stage(made)


def test_a_process_that_does_not_see_its_last_checkpoint_yet_stops_with_the_others(
        tmp_path, monkeypatch):
    """Process 0 had stopped; this one saved the step again, waited alone, and was aborted."""
    def of_process_0():
        return sorted(int(name) for name in os.listdir(tmp_path) if name.isdigit())

    monkeypatch.setattr(Checkpointer, "_steps", lambda self: [])
    monkeypatch.setattr(hosts, "exchange", lambda value: [
        of_process_0() if value == [] else value])
    with pytest.raises(Preempted, match="toy: stopped at step 4, checkpoint saved"):
        run_stage(stage(tmp_path, at={3: terminate})[0])


def test_nan_found_while_stopping_is_not_saved(tmp_path):
    def both(metrics):
        return with_nan(terminate(metrics))

    made, _ = stage(tmp_path, at={5: both})
    with pytest.raises(TrainingError, match="in step 5"):
        run_stage(made)
    assert saved(tmp_path) == [4]


def test_the_best_checkpoint_is_chosen_by_the_score_on_dev(tmp_path):
    """By EM, a task that EM does not measure would keep another one."""
    seen = []
    scores = {2: 10.0, 4: 50.0, 6: 30.0, 7: 20.0}

    def evaluate(params):
        seen.append(params["w"])
        value = list(scores.values())[len(seen) - 1]
        return {"em": -value, "score": value}

    made, _ = stage(tmp_path, steps=7, save_every=100, eval_every=2, evaluate=evaluate)
    run_stage(made)
    with Checkpointer(tmp_path, read_only=True, best_metric=BEST_METRIC) as checkpointer:
        assert (checkpointer.best_step(), checkpointer.latest_step()) == (4, 7)
        params, meta = checkpointer.restore_params(4, made.abstract_state.params)
    assert same(params["w"], seen[1]) and meta["kind"] == "toy"
    dev = {line["step"]: line["dev/score"] for line in lines(tmp_path)
           if "dev/score" in line}
    assert dev == scores, "the last step is evaluated even off the schedule"


def test_scores_of_other_settings_do_not_choose_the_best_checkpoint(tmp_path):
    """A command that resumed with all dev questions kept the step that had answered the only one of
    the command before."""
    for measured, steps, scores in (({"max_examples": "1"}, 4, [100.0, 0.0]),
                                    ({}, 8, [30.0, 20.0])):
        left = iter(scores)
        made, _ = stage(tmp_path, steps=steps, save_every=100, eval_every=2, keep=9,
                        evaluate=lambda params, left=left: {"em": next(left)}, measured=measured)
        run_stage(made)
    with Checkpointer(tmp_path, read_only=True, best_metric=BEST_METRIC) as checkpointer:
        assert checkpointer.all_steps() == [2, 4, 6, 8] and checkpointer.best_step() == 6


def test_evaluation_sees_the_parameters_of_its_step(tmp_path):
    seen = {}

    def evaluate(params):
        seen[len(seen)] = params["w"]
        return {"em": 0.0}

    made, _ = stage(tmp_path, steps=4, eval_every=4, evaluate=evaluate)
    state = run_stage(made)
    assert len(seen) == 1 and same(seen[0], state.params["w"])


def test_checkpoints_carry_the_meta_data_of_the_stage(tmp_path):
    made, _ = stage(tmp_path)
    run_stage(made)
    with Checkpointer(tmp_path, read_only=True) as checkpointer:
        _, meta = checkpointer.restore_params(10, made.abstract_state.params)
    first, recent = meta.pop("losses")
    assert meta == {"kind": "toy", "pending": {}} and [first, len(recent)] == [recent[0], 10]


def test_a_workdir_that_is_moved_is_not_made_again(tmp_path):
    """Its checkpoints went on in a folder of the old name, without a configuration."""
    work = tmp_path / "work"

    def move(metrics):
        work.rename(tmp_path / "moved")
        return metrics

    made, _ = stage(work / "toy", at={5: move})
    with locks.exclusive(work), pytest.raises(UserError, match="work: was moved, or replaced"):
        run_stage(made)
    assert saved(tmp_path / "moved" / "toy") == [4]
    assert not work.exists()


def test_as_many_checkpoints_are_kept_as_asked(tmp_path):
    run_stage(stage(tmp_path, save_every=2, keep=3)[0])
    assert saved(tmp_path) == [6, 8, 10]


class Recorder:
    """A source that notes with which parameters each batch was begun."""

    def __init__(self, lookahead):
        self.lookahead, self.begun, self.order = lookahead, {}, []

    def begin(self, step, params):
        assert step not in self.begun, "begun twice"
        self.begun[step] = float(params["w"][0])
        self.order.append((step, self.begun[step]))

    def finish(self, step):
        return target(step) + self.begun.pop(step)

    def pending(self):
        return {str(step): value for step, value in self.begun.items()}

    def restore(self, pending):
        self.begun = {int(step): value for step, value in pending.items()}


@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_batches_are_begun_as_far_ahead_as_the_source_asks(tmp_path, lookahead):
    source = Recorder(lookahead)
    weights = []

    def train_step(state, batch, step):
        weights.append(float(state.params["w"][0]))
        return descend(state, batch, step)

    run_stage(stage(tmp_path, steps=6, source=source, train_step=train_step)[0])
    assert [step for step, _ in source.order] == list(range(6))
    assert source.order == [(t, weights[max(t - lookahead, 0)]) for t in range(6)]
    assert source.begun == {}


@pytest.mark.parametrize("lookahead", [1, 2])
@pytest.mark.parametrize("stop", [raises(Killed()), terminate], ids=["killed", "terminated"])
def test_what_was_begun_ahead_survives_an_interruption(tmp_path, lookahead, stop):
    """Begun anew with later parameters, the resumed run would train on other passages."""
    straight = run_stage(stage(tmp_path / "a", source=Recorder(lookahead))[0])
    made, _ = stage(tmp_path / "b", source=Recorder(lookahead), at={5: stop})
    with pytest.raises((Killed, Preempted)):
        run_stage(made)
    assert same(run_stage(stage(tmp_path / "b", source=Recorder(lookahead))[0]), straight)


def test_what_a_source_does_not_take_up_again_is_begun_with_the_restored_state(tmp_path):
    class Forgetful(Recorder):
        def restore(self, pending):
            super().restore({})

    made, _ = stage(tmp_path, source=Recorder(2), at={5: raises(Killed())})
    with pytest.raises(Killed):
        run_stage(made)
    source = Forgetful(2)
    run_stage(stage(tmp_path, source=source)[0])
    assert [step for step, _ in source.order] == list(range(4, 10))
    assert source.order[0][1] == source.order[1][1], "both by the parameters of step 4"


def damage(step):
    file = step / "meta" / "metadata"
    file.write_text(file.read_text().replace('"toy"', '"boy"'))


@pytest.mark.parametrize("damaged, resumed", [((8,), 4), ((4, 8), 0)])
def test_a_damaged_latest_step_is_set_aside_and_training_ends_the_same(
        tmp_path, whole, capsys, damaged, resumed):
    """It stopped the run for good, with the advice to use --step, which train has not."""
    made, _ = stage(tmp_path, keep=2, at={9: raises(Killed())})
    with pytest.raises(Killed):
        run_stage(made)
    capsys.readouterr()
    for step in damaged:
        damage(tmp_path / str(step))
    made, ran = stage(tmp_path, keep=2)
    assert same(run_stage(made), whole[0]) and ran == list(range(resumed, 10))
    warned = capsys.readouterr().err
    for step in damaged:
        assert f"step {step} in {tmp_path} is damaged" in warned and "--step" not in warned
        assert (tmp_path / f"damaged-{step}" / "params").is_dir()
    assert saved(tmp_path) == [8, 10]


def test_damaged_arrays_of_the_latest_step_are_met_when_they_are_read(tmp_path, whole, capsys):
    made, _ = stage(tmp_path, keep=2, at={9: raises(Killed())})
    with pytest.raises(Killed):
        run_stage(made)
    for file in (tmp_path / "8" / "params").rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    made, ran = stage(tmp_path, keep=2)
    assert same(run_stage(made), whole[0]) and ran == list(range(4, 10))
    assert "going on from step 4, the last sound one" in capsys.readouterr().err


def test_parameters_that_are_not_finite_are_never_saved(tmp_path):
    """The loss may be finite still: of a word that no batch has held since."""
    def spoil(state, batch, step):
        state, metrics = descend(state, batch, step)
        if step == 5:
            state = TrainState({"w": state.params["w"].at[0].set(np.inf)}, state.opt_state)
        return state, {**metrics, "nll": jnp.float32(1.0)}

    with pytest.raises(TrainingError, match="parameter w is NaN or infinite after 8 steps; the "
                                            "last good checkpoint is step 4"):
        run_stage(stage(tmp_path, train_step=spoil)[0])
    assert saved(tmp_path) == [4]


def of_loss(*losses):
    """Of `stage`, what makes these the losses of the first steps, and the last that of the rest."""
    at = dict.fromkeys(range(10), losses[-1]) | dict(enumerate(losses))
    return {step: lambda metrics, nll=nll: {**metrics, "nll": jnp.float32(nll)}
            for step, nll in at.items()}


def test_a_checkpoint_where_the_loss_has_grown_is_not_called_good(tmp_path, capsys):
    """All that trained from it had a loss of 1e12, as the message had advised."""
    grown = of_loss(2.0, 3.0, 1e6)
    with pytest.raises(TrainingError, match=(
            f"the last checkpoint is step 4 in {tmp_path}/a, and the loss had grown by then, from "
            "2 in the first step to 5e[+]05. Begin again in another --workdir, with a lower config"
            "[.]train[.]optimizer[.]learning_rate")):
        run_stage(stage(tmp_path / "a", at=grown | {6: with_nan})[0])
    assert "warning" not in capsys.readouterr().err
    with pytest.raises(TrainingError, match="the last checkpoint is step 4 .*from 2 in the first"):
        run_stage(stage(tmp_path / "a", at=grown | {4: with_nan})[0])  # of the run before
    with pytest.raises(TrainingError, match=f"again with the same command, once {tmp_path}/g is "):
        run_stage(stage(tmp_path / "g", name="generator", at=grown | {6: with_nan})[0])
    with pytest.raises(TrainingError, match="the last good checkpoint is step 4.*goes on from "
                       "there. If that ends so at once, begin again in another --workdir"):
        run_stage(stage(tmp_path / "b", at=of_loss(2.0, 6.5) | {6: with_nan})[0])


def test_of_a_run_whose_first_loss_nobody_kept_none_has_grown():
    """Its checkpoint is of an earlier version."""
    losses = Losses().noted(7, 1.0)
    assert losses.first is None and not losses.noted(8, 99.0).have_grown


def test_a_loss_that_has_grown_at_the_end_is_told(tmp_path, capsys):
    run_stage(stage(tmp_path / "a", at=of_loss(2.0, 3.0, 9.0))[0])
    assert capsys.readouterr().err.endswith(
        "warning: toy: the loss has grown, from 2 in the first step to 7.7; begin again with a "
        "lower learning rate, in another --workdir\n")
    for name, losses in (("b", (2.0, 7.5)), ("c", (0.01, 0.9)), ("d", (9.0, 1.0))):
        run_stage(stage(tmp_path / name, at=of_loss(*losses))[0])
    assert "warning" not in capsys.readouterr().err


@pytest.mark.parametrize("name, section", [("generator", "generator_warmup"), ("fid", "train")])
def test_a_stop_at_nan_is_noted_and_says_what_may_change(tmp_path, name, section):
    with pytest.raises(TrainingError, match=rf"config\.{section}\.optimizer\.learning_rate"):
        run_stage(stage(tmp_path, name=name, at={6: with_nan})[0])
    noted = json.loads((tmp_path / "stopped.json").read_text())
    assert (noted["step"], noted["checkpoint"]) == (6, 4)


class Failing(PureSource):
    """Retrieval that meets a query vector with NaN."""

    def finish(self, step):
        if step == 5:
            raise VectorError("query 0 holds nan")
        return super().finish(step)


def test_numbers_that_retrieval_or_evaluation_cannot_use_stop_the_stage_as_nan_does(tmp_path):
    """They are met before the metrics of the step are read; another rate was refused then."""
    def score(params):
        raise ScoreError("question 1: not finite")

    for name, changes in (("retrieval", {"source": Failing(target)}),
                          ("evaluation", {"evaluate": score, "eval_every": 5})):
        with pytest.raises(TrainingError, match="(query 0|question 1).*the last good checkpoint is "
                                                "step 4.*learning_rate"):
            run_stage(stage(tmp_path / name, **changes)[0])
        noted = json.loads((tmp_path / name / "stopped.json").read_text())
        assert noted["checkpoint"] == 4
    with pytest.raises(TrainingError, match="nll became NaN or infinite in step 4"):
        run_stage(stage(tmp_path / "both", at={4: with_nan}, source=Failing(target))[0])


def test_a_process_that_alone_meets_such_a_number_asks_the_others_nothing(tmp_path, monkeypatch):
    """They are in a search, and would take its question for their passages."""
    class Alone(Failing):
        def finish(self, step):
            if step == 5:
                monkeypatch.setattr(hosts, "exchange", raises(AssertionError("asked")))
            return super().finish(step)

    with pytest.raises(TrainingError, match="query 0.*the last good checkpoint is step 4"):
        run_stage(stage(tmp_path, source=Alone(target))[0])


class OnDevice:
    """A metric on a device: whoever takes its value but by jax.device_get transfers it alone."""

    def __init__(self, value):
        self._held = value

    def block_until_ready(self):
        return self


def test_metrics_come_in_one_transfer_for_each_logged_step(tmp_path, monkeypatch, whole):
    """One for every metric of every step was some thirty waits for an accelerator."""
    transfers = []

    def device_get(metrics):
        transfers.append(len(metrics))
        return [{name: np.asarray(metric._held) for name, metric in step.items()}
                for step in metrics]

    def train_step(state, batch, step):
        state, metrics = descend(state, batch, step)
        return state, {name: OnDevice(value) for name, value in metrics.items()}

    made, _ = stage(tmp_path, train_step=train_step, save_every=100)
    with monkeypatch.context() as patch:
        patch.setattr(loop.jax, "device_get", lambda tree: device_get(tree) if isinstance(
            tree, list) else get(tree))
        run_stage(made)
    assert transfers == [3, 3, 3, 1]
    assert lines(tmp_path) == whole[1]


get = jax.device_get


@pytest.mark.parametrize("platform, order", [
    ("cpu", "take 0, wait 0, take 1, wait 1, take 2, wait 2"),
    ("tpu", "take 0, take 1, wait 0, take 2, wait 1, wait 2")])
def test_on_cpus_no_step_is_taken_before_the_last_one_is_done(
        tmp_path, monkeypatch, platform, order):
    """Its buffers would lie in RAM beside the other's; an accelerator would wait for the host."""
    events, waits = [], itertools.count()

    def train_step(state, batch, step):
        events.append(f"take {int(step)}")
        return descend(state, batch, step)

    made, _ = stage(tmp_path, train_step=train_step, save_every=100, steps=3)
    monkeypatch.setattr(loop.jax, "default_backend", lambda: platform)
    monkeypatch.setattr(loop.jax, "block_until_ready",
                        lambda metrics: events.append(f"wait {next(waits)}"))
    run_stage(made)
    assert ", ".join(events) == order


def test_the_loop_transfers_nothing_that_it_does_not_name(tmp_path, whole):
    """A number given to a jitted step as numpy, say, waits for its way to every device."""
    def train_step(state, batch, step):
        state, metrics = jax.jit(descend)(state, batch, step)
        return state, metrics

    targets = [np.asarray(target(step)) for step in range(10)]
    source = PureSource(lambda step: jax.device_put(targets[step]))
    made, _ = stage(tmp_path, train_step=train_step, source=source)
    first = first_state()
    made = dataclasses.replace(made, make_state=lambda: first)
    with jax.transfer_guard("disallow"):
        state = run_stage(made)
    np.testing.assert_allclose(state.params["w"], whole[0].params["w"], rtol=1e-6)


def test_a_line_says_how_fast_it_goes(tmp_path, monkeypatch):
    """Evaluation and saving count as no step's time: they would look like slow steps."""
    now = [100.0]
    monkeypatch.setattr(loop.time, "perf_counter", lambda: now[0])

    def train_step(state, batch, step):
        now[0] += 2.0
        state, metrics = descend(state, batch, step)
        return state, {**metrics, "tokens": jnp.float32(30)}

    def evaluate(params):
        now[0] += 1000.0
        return {"em": 0.0}

    run_stage(stage(tmp_path, steps=6, log_every=2, evaluate=evaluate, eval_every=2,
                    train_step=train_step)[0])
    read = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    timed = [(line["toy/step_secs"], line["toy/tokens_per_sec"]) for line in read
             if "toy/step_secs" in line]
    assert timed == [(2.0, 15.0)] * 3


@pytest.mark.parametrize("profile, died, traced, text", [
    ((1, 2), None, [4, 5], "the profile of steps from 4 on is in"),
    ((1, 9), 6, [4, 5], "the profile of steps from 4 on is in"),  # ended before the trace
    ((8, 1), None, [], "no step was profiled: training ended within 8 steps"),
])
def test_the_steps_asked_for_are_traced(tmp_path, monkeypatch, capsys, profile, died, traced,
                                        text):
    """Counted from where this command begins; a trace that is never stopped is never written."""
    calls = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder, **_: calls.append(folder))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append("stop"))
    inside = []

    def note(metrics):
        inside.extend([int(metrics["step"])] * (len(calls) == 1))
        return metrics

    with pytest.raises(Killed):
        run_stage(stage(tmp_path, save_every=3, at={4: raises(Killed())})[0])
    at = dict.fromkeys(range(10), note)
    if died:
        at[died] = raises(Killed())
    try:
        run_stage(stage(tmp_path, at=at, profile=profile)[0])
    except Killed:
        assert died
    assert inside == traced
    assert calls == ([tmp_path / "profile", "stop"] if traced else [])
    assert text in capsys.readouterr().out
    if not died:  # asked for again when all is done, it was ignored without a word
        run_stage(stage(tmp_path, profile=(0, 1))[0])
        assert "no step was profiled: toy has taken all of its" in capsys.readouterr().out
