"""The guard against retrieval collapse: what it counts, when it acts, what resuming keeps of it."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from rag_jax import hosts, parallel
from rag_jax.config import MeshConfig, OptimizerConfig, TrainConfig
from rag_jax.data import order
from rag_jax.metrics.retrieval import effective_passages
from rag_jax.models import rag
from rag_jax.training import collapse, fine_tuning, optim
from rag_jax.training.checkpoint import Checkpointer
from rag_jax.training.collapse import CollapseGuard
from rag_jax.training.loop import PureSource, Stage, TrainingError, run_stage
from rag_jax.training.on_device import QuestionSource
from rag_jax.training.step import TrainState, init_state, make_train_step, rag_loss
from rag_jax.types import Batch

WINDOW, STEPS, COLLAPSE = 3, 14, 7  # from step 7 on, every question gets passages 0 and 1
ROWS, K = 6, 2


def test_effective_passages_is_the_exponential_of_the_entropy():
    assert effective_passages(np.array([[4, 9], [4, 9]])) == pytest.approx(2)
    assert effective_passages(np.arange(7)) == pytest.approx(7)
    counts = np.array([5, 1, 2])
    p = counts / counts.sum()
    ids = np.repeat([3, 8, 1], counts)
    assert effective_passages(np.append(ids, -1)) == pytest.approx(np.exp(-(p * np.log(p)).sum()))
    assert effective_passages(np.full((2, 2), -1)) == 0


def retrieved(step):
    """int32[ROWS, K] of a step, with some padding."""
    rng = np.random.default_rng(step)
    ids = rng.integers(0, 40, (ROWS, K)) if step < COLLAPSE else np.tile([0, 1], (ROWS, 1))
    ids[-1, 1] = -1
    return ids.astype(np.int32)


def window(first):
    """Effective passages of the window that begins with step `first`, by counting."""
    ids = [i for step in range(first, first + WINDOW) for i in retrieved(step).ravel() if i >= 0]
    p = np.array([ids.count(i) for i in set(ids)]) / len(ids)
    return np.exp(-(p * np.log(p)).sum())


def run_guard(guard, start=0, stop=STEPS):
    return {step + 1: found for step in range(start, stop)
            if (found := guard.note(step + 1, retrieved(step))) is not None}


def test_windows_are_counted_and_compared_with_the_first():
    guard = CollapseGuard("stop", WINDOW, 0.25)
    found = run_guard(guard)
    assert found == pytest.approx({n: window(n - WINDOW) for n in (3, 6, 9, 12)})
    assert found[9] > 0.25 * found[3] > found[12], "step 6 of the third window is still healthy"
    assert guard.collapsed_at == 12
    assert str(guard) == ("retrieval has collapsed at step 12: 3 steps retrieved 1.99 effective "
                          "passages, at the start 19.9")


def test_a_healthy_run_is_left_alone():
    guard = CollapseGuard("stop", WINDOW, 0.25)
    for step in range(30):
        guard.note(step + 1, retrieved(step % COLLAPSE))
    assert guard.collapsed_at is None


@pytest.mark.parametrize("cut", range(STEPS))
def test_the_state_goes_through_json(cut):
    whole, first, second = (CollapseGuard("stop", WINDOW, 0.25) for _ in range(3))
    run_guard(whole)
    run_guard(first, stop=cut)
    second.restore(json.loads(json.dumps(first.state())))
    run_guard(second, start=cut)
    assert second.state() == whole.state()


def test_the_state_of_a_checkpoint_that_does_not_say_whether_its_window_is_whole_is_read():
    """Those of earlier versions do not."""
    whole, again = (CollapseGuard("stop", WINDOW, 0.25) for _ in range(2))
    run_guard(whole, stop=2)
    again.restore({name: value for name, value in whole.state().items() if name != "whole"})
    assert run_guard(again, start=2) == run_guard(whole, start=2)


# --- in the loop: two numbers train, "encoder" and "generator" ------------------------------------


def first_state():
    return TrainState({"encoder": jnp.float32(1), "generator": jnp.float32(1)},
                      {"count": jnp.int32(0)})


def stage(directory, action="freeze", die_at=None, **changes):
    """A stage whose steps retrieve as `retrieved` says; names the steps that it took."""
    taken = []

    def make(frozen):
        def take(state, batch, number):
            if number == die_at:
                raise KeyboardInterrupt
            taken.append((int(number), frozen))
            p = state.params
            params = {"encoder": p["encoder"] * (1 if frozen else jnp.float32(1.1)),
                      "generator": p["generator"] * jnp.float32(1.01) + p["encoder"]}
            metrics = {"nll": jnp.float32(1), "doc_ids": jnp.asarray(retrieved(int(number)))}
            return TrainState(params, {"count": state.opt_state["count"] + 1}), metrics

        return take

    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), first_state())
    values = dict(
        name="toy", directory=directory, steps=STEPS + 4, log_every=5, save_every=5,
        make_state=first_state, abstract_state=abstract, train_step=make(False),
        frozen_step=make(True), guarded=("encoder",), source=PureSource(lambda n: None), meta={},
        tensorboard=False, guard=CollapseGuard(action, WINDOW, 0.25))
    return Stage(**{**values, **changes}), taken


def same(one, other):
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


def monitored(directory):
    lines = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["toy/effective_passages"] for line in lines
            if "toy/effective_passages" in line}


def test_a_checkpoint_that_guarded_nothing_is_gone_on_from(tmp_path):
    """Where ranks retrieve, no encoder trains: a guard kept the towers of none, and the same
    command said that its own checkpoint was another configuration's."""
    made, _ = stage(tmp_path, "rollback", guard=None, guarded=())
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(5, made.make_state().params, {
            "state": made.make_state().opt_state, "sound": {}}, {"pending": {}})
    resumed, taken = stage(tmp_path, "rollback", guard=None, guarded=())
    run_stage(resumed)
    assert taken[0] == (5, False)


def test_freeze_takes_the_frozen_step_from_the_collapse_on(tmp_path, capsys):
    made, taken = stage(tmp_path)
    run_stage(made)
    assert taken == [(n, n >= 12) for n in range(18)]
    assert "toy: retrieval has collapsed at step 12" in capsys.readouterr().out
    expected = {n: window(n - WINDOW) for n in (3, 6, 9, 12, 15, 18)}
    assert monitored(tmp_path) == pytest.approx(expected)


def test_a_warning_is_given_once_and_training_goes_on(tmp_path, capsys):
    made, taken = stage(tmp_path, "warn")
    run_stage(made)
    assert taken == [(n, False) for n in range(18)]
    said = capsys.readouterr().out
    assert said.count("has collapsed") == 1
    assert "toy: retrieval has collapsed at step 12" in said and "; training goes on" in said
    assert list(monitored(tmp_path)) == [3, 6, 9, 12, 15, 18]
    run_stage(stage(tmp_path, "warn", steps=24)[0])
    assert "has collapsed" not in capsys.readouterr().out, "said before"


class Elsewhere:
    """An array of which this process has every second part; another process has the others."""

    is_fully_addressable, dtype = False, np.dtype(np.int32)

    def __init__(self, x, first):
        self.size = x.size
        self.addressable_shards = [shard for shard in x.addressable_shards
                                   if (shard.index[0].start or 0) // 2 % 2 == first]


@pytest.fixture
def placed():
    """What seven steps read: rows split over data and fsdp, and copied over model."""
    mesh = parallel.make_mesh(MeshConfig(2, 2, 2))
    rows = np.random.default_rng(0).integers(-1, 40, (7, 8, 3)).astype(np.int32)
    return [parallel.put_batch(each, mesh) for each in rows]


def test_every_process_is_told_all_that_was_read(monkeypatch, placed):
    """Each row once, in their order."""
    rows = np.concatenate(placed)
    np.testing.assert_array_equal(collapse.gathered_rows(placed), rows)
    said = []
    monkeypatch.setattr(hosts, "exchange", lambda value: said.append(value) or [value])
    for first in (0, 1):
        collapse.gathered_rows([Elsewhere(x, first) for x in placed])
    assert [len(parts) for parts in said] == [2 * len(placed)] * 2
    sent = json.loads(json.dumps(said))
    monkeypatch.setattr(hosts, "exchange", lambda value: [sent[1], value])
    found = collapse.gathered_rows([Elsewhere(x, 0) for x in placed])
    np.testing.assert_array_equal(found, rows)
    assert found.dtype == rows.dtype


@pytest.mark.parametrize("at_a_time,told", [(100_000, [3, 6, 7]), (30, [2, 3, 5, 6, 7])])
def test_processes_tell_each_other_at_the_end_of_a_window_and_for_a_checkpoint(
        monkeypatch, placed, at_a_time, told):
    """Or before, where a window would be too long a message."""
    alone, guard = (CollapseGuard("stop", WINDOW, 0.25) for _ in range(2))
    monkeypatch.setattr(collapse, "_IDS_AT_A_TIME", at_a_time)
    turns = []

    def exchange(own):
        turns.append(done)
        begins = {(i, start) for i, start, _ in own}
        return [own, [part for part in parts(placed[turns_from(turns):done])
                      if tuple(part[:2]) not in begins]]

    def turns_from(turns):
        return ([0] + turns)[-2]

    def parts(arrays):
        return [[i, start, np.asarray(x)[start : start + 2].tolist()]
                for i, x in enumerate(arrays) for start in range(0, len(x), 2)]

    monkeypatch.setattr(hosts, "exchange", exchange)
    for done, x in enumerate(placed, 1):
        assert guard.note(done, Elsewhere(x, 0)) == alone.note(done, np.asarray(x))
    assert guard.state() == alone.state() and guard.state()["ids"]
    assert turns == told


def test_a_rollback_goes_on_with_the_retriever_of_the_last_sound_window(tmp_path, capsys):
    """Of step 9: not with what the collapse at step 12 left, and not with what training began."""
    made, taken = stage(tmp_path, "rollback")
    params = run_stage(made).params
    assert taken == [(n, n >= 12) for n in range(18)]
    sound = jnp.float32(1)
    for _ in range(9):
        sound *= jnp.float32(1.1)
    assert same(params["encoder"], sound)
    ends_there = run_stage(stage(tmp_path / "twelve", "rollback", steps=12)[0])
    assert same(ends_there.params["encoder"], sound), "before it is saved"
    assert "toy: retrieval has collapsed at step 12" in (said := capsys.readouterr().out)
    assert "the retriever goes back to where the last sound window ended" in said


def test_after_a_rollback_all_passages_are_embedded_by_the_encoder_that_it_brings(tmp_path):
    """With those of the collapsed one every question would still find the same passages."""
    embedded = []

    class Refresher:
        next = 0

        def refresh(self, params, step, passages=0):
            embedded.append((step, passages, float(params["encoder"])))

    class Source(QuestionSource):
        def finish(self, step):
            return None

    source = Source(None, None, ROWS, 0, Refresher(), every=5, passages=2)
    made, _ = stage(tmp_path, "rollback", source=source)
    encoder = float(run_stage(made).params["encoder"])
    assert [each[:2] for each in embedded] == [(0, 0), (5, 2), (10, 2), (12, 0), (15, 2)]
    assert embedded[3][2] == encoder != embedded[2][2]


@pytest.mark.parametrize("trains, action, guarded", [
    ("query_encoder", "warn", True), ("document_encoder", "warn", True),
    ("query_encoder", "off", False), ("generator", "warn", False), (rag.FUSION, "warn", False)])
def test_every_run_that_trains_an_encoder_is_guarded(trains, action, guarded):
    """A document encoder that trains alone can give all passages one vector, too; ranks have no
    gradient, so that a run that retrieves by them trains the generator alone."""
    rates = {**dict.fromkeys((*rag.TOWERS, rag.FUSION)), trains: 1.0}
    guard = fine_tuning._collapse_guard(TrainConfig(collapse_guard=action), rates)
    assert (guard is not None) == guarded


@pytest.mark.parametrize("die_at", [None, 11])
def test_a_stage_of_a_retriever_alone_ends_with_the_rollback(tmp_path, capsys, die_at):
    """A third of the steps would search and read passages, and change nothing."""
    alone = {"action": "rollback", "frozen_step": None}
    if die_at is not None:
        with pytest.raises(KeyboardInterrupt):
            run_stage(stage(tmp_path, die_at=die_at, **alone)[0])
    made, taken = stage(tmp_path, **alone)
    params = run_stage(made).params
    assert taken == [(n, False) for n in range(0 if die_at is None else 10, 12)]
    nine = run_stage(stage(tmp_path / "nine", "rollback", steps=9)[0]).params
    assert same(params["encoder"], nine["encoder"])
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert [line["step"] for line in lines if "toy/nll" in line] == [5, 10, 12]
    assert ("toy: nothing but the retriever trains, so training ends at step 12 of 18"
            in capsys.readouterr().out)
    made, taken = stage(tmp_path, **alone)
    assert same(run_stage(made).params, params) and not taken, "a finished stage is only opened"


@pytest.mark.parametrize("other", ["freeze", "off"])
def test_a_checkpoint_opens_whatever_the_guard_is_then(tmp_path, other, capsys):
    """One of a run without a sound copy under a guard that keeps one, and the other way round; and
    nobody reads then that a retriever goes back which cannot."""
    for actions in (("rollback", other), (other, "rollback")):
        ends = tmp_path / actions[0]
        for action, stop_at in zip(actions, (11, None), strict=True):
            off = {"guard": None} if action == "off" else {"action": action}
            made, taken = stage(ends, die_at=stop_at, **off)
            if stop_at is None:
                run_stage(made)
            else:
                with pytest.raises(KeyboardInterrupt):
                    run_stage(made)
        assert taken[0][0] == 10
    assert "goes back" not in (said := capsys.readouterr().out)
    assert ("collapsed at step 12" in said and "trains no further" in said) == (other == "freeze")


@pytest.mark.parametrize("other", ["freeze", "rollback"])
def test_a_retriever_that_another_guard_freezes_is_not_frozen_without_a_word(
        tmp_path, capsys, other):
    """What `warn` advised, to set rollback, rolled nothing back: there was no sound copy."""
    with pytest.raises(KeyboardInterrupt):
        run_stage(stage(tmp_path, "warn", die_at=16)[0])
    said = capsys.readouterr().out
    assert "name another --workdir" in said and "trains no further" not in said
    made, taken = stage(tmp_path, other)
    run_stage(made)
    assert taken == [(n, True) for n in range(15, 18)]
    assert ("toy: retrieval has collapsed at step 12: 3 steps retrieved 1.99 effective passages, "
            "at the start 19.9; the retriever trains no further\n") in capsys.readouterr().out
    run_stage(stage(tmp_path, other)[0])
    assert "collapsed" not in capsys.readouterr().out, "a finished stage is only opened"


@pytest.mark.parametrize("action", ["freeze", "rollback"])
@pytest.mark.parametrize("die_at", [4, 7, 11, 12, 13, 16])
def test_a_frozen_run_that_was_killed_ends_bitwise_as_one_that_was_not(tmp_path, die_at, action):
    """Killed within a window, at its end, and after the freezing; checkpoints every 5 steps."""
    straight = run_stage(stage(tmp_path / "a", action)[0])
    with pytest.raises(KeyboardInterrupt):
        run_stage(stage(tmp_path / "b", action, die_at=die_at)[0])
    made, taken = stage(tmp_path / "b", action)
    assert same(run_stage(made), straight)
    assert taken == [(n, n >= 12) for n in range(die_at // 5 * 5, 18)]
    assert monitored(tmp_path / "b") == monitored(tmp_path / "a")


def test_stop_keeps_a_checkpoint_and_stops_again(tmp_path):
    for again in (False, True):
        made, taken = stage(tmp_path, "stop")
        with pytest.raises(TrainingError) as error:
            run_stage(made)
        assert [n for n, _ in taken] == ([] if again else list(range(12)))
        assert "toy: retrieval has collapsed at step 12" in str(error.value)
        assert f"with checkpoint 12 in {tmp_path}" in str(error.value)
    with Checkpointer(tmp_path, read_only=True) as checkpointer:
        assert checkpointer.latest_step() == 12


def test_where_the_retriever_alone_trains_nobody_is_told_to_freeze_it(tmp_path):
    """The configuration refuses that."""
    for frozen_step, told in ((None, "=off;"), (lambda *step: step, "=freeze or off;")):
        made, _ = stage(tmp_path, "stop", frozen_step=frozen_step)
        with pytest.raises(TrainingError, match=f"config.train.collapse_guard{told}"):
            run_stage(made)


def test_a_collapse_that_the_last_window_shows_is_said_where_there_is_nothing_to_stop(
        tmp_path, capsys):
    """The run ended as a sound one does, and nobody was told."""
    run_stage(stage(tmp_path, "stop", steps=12)[0])
    assert ("toy: retrieval has collapsed at step 12: 3 steps retrieved 1.99 effective passages, "
            "at the start 19.9; training stops here") in capsys.readouterr().out


@pytest.mark.parametrize("action", ["freeze", None])
def test_a_stopped_run_goes_on_when_told_otherwise(tmp_path, action):
    with pytest.raises(TrainingError):
        run_stage(stage(tmp_path, "stop")[0])
    made, taken = stage(tmp_path, **({"action": action} if action else {"guard": None}))
    run_stage(made)
    assert taken == [(n, action == "freeze") for n in range(12, 18)]


def test_a_guard_switched_on_within_a_window_begins_with_the_next(tmp_path):
    """One step of fifty retrieved few passages, and no collapse was below a quarter of them."""
    with pytest.raises(KeyboardInterrupt):
        run_stage(stage(tmp_path, guard=None, die_at=6)[0])
    made, taken = stage(tmp_path)
    run_stage(made)
    assert taken[0] == (5, False) and made.guard.first == pytest.approx(window(6))
    assert list(monitored(tmp_path)) == [9, 12, 15, 18]


# --- a run that collapses -------------------------------------------------------------------------


class World:
    """Questions and passages of random tokens: nothing that is retrieved helps to answer."""

    passages, questions, rows, lookahead = 48, 64, 16, 0

    def __init__(self):
        rng = np.random.default_rng(0)
        self.model = tiny.rag_model(generator={"vocab_size": 16})
        self.params = tiny.rag_params(self.model)
        self.mesh = parallel.make_mesh(MeshConfig(1, 1), jax.devices()[:1])
        self.embed = tiny.jit(functools.partial(rag.embed, self.model))
        self.ids = rng.integers(0, 16, (self.questions, 6)).astype(np.int32)
        self.targets = rng.integers(3, 16, (self.questions, 2)).astype(np.int32)
        self.texts = rng.integers(0, 16, (self.passages, 5)).astype(np.int32)
        # What all questions have in common finds nothing: each has passages of its own.
        common = np.asarray(self.queries(self.params, np.arange(self.questions))).mean(axis=0)
        table = rng.normal(size=(self.passages, tiny.BERT.width))
        table -= np.outer(table @ common, common) / (common @ common)
        self.table = table.astype(np.float32)

    def queries(self, params, rows):
        return self.embed(params["query_encoder"], self.ids[rows], np.ones((len(rows), 6), bool))

    def begin(self, step, params):
        rows = order.batch_indices(self.questions, self.rows, 0, step)
        scores = np.asarray(self.queries(params, rows)) @ self.table.T
        found = np.argsort(-scores, axis=1, kind="stable")[:, :K].astype(np.int32)
        asked = np.repeat(self.ids[rows][:, None], K, axis=1)
        source = np.concatenate([self.texts[found], asked], axis=2)  # -> [B, K, S]
        self.batch = Batch(
            self.ids[rows], np.ones((self.rows, 6), bool), source, np.ones(source.shape, bool),
            self.table[found], np.ones(found.shape, bool), self.targets[rows],
            np.ones((self.rows, 2), bool), np.ones(self.rows, np.float32), doc_ids=found)

    def finish(self, step):
        return parallel.put_batch(self.batch, self.mesh)

    def pending(self):
        return {}

    def restore(self, pending):
        pass

    def stage(self, directory, query_encoder_rate):
        rates = {"query_encoder": query_encoder_rate, "generator": 1.0}
        config = OptimizerConfig(learning_rate=3e-3, warmup_steps=10, schedule="constant",
                                 update_ratios=False)
        optimizer, trained = optim.make_optimizer(config, 30, rates), tuple(rates)
        _, abstract, shardings = init_state(
            self.model, rag.TOWERS, optimizer, 0, self.mesh)
        run = make_train_step(
            rag_loss(self.model), optimizer, shardings,
            show=lambda batch: {"doc_ids": batch.doc_ids})
        self.begin(0, self.params)
        compiled = run.lower(abstract, self.finish(0), np.int32(0)).compile(
            compiler_options={"xla_backend_optimization_level": 0})

        def first():
            params = jax.tree.map(jnp.copy, self.params)
            return TrainState(params, optimizer.init({t: params[t] for t in trained}))

        return Stage(name="toy", directory=directory, steps=30, log_every=5, save_every=30,
                     make_state=first, abstract_state=abstract, train_step=compiled, source=self,
                     meta={}, tensorboard=False, guard=CollapseGuard("stop", 5, 0.25))


def test_a_rate_that_is_too_high_collapses_and_is_stopped_and_a_sound_one_is_not(tmp_path):
    """Appendix H on a small scale: every question ends with the same K passages."""
    world = World()
    run_stage(world.stage(tmp_path / "sound", 0.3))
    with pytest.raises(TrainingError, match="toy: retrieval has collapsed at step "):
        run_stage(world.stage(tmp_path / "wild", 10.0))  # above 15, roundings decide when
    sound, wild = (monitored(tmp_path / name) for name in ("sound", "wild"))
    assert list(sound) == [5, 10, 15, 20, 25, 30]
    assert min(sound.values()) > 0.7 * sound[5] > 10
    assert wild[max(wild)] < 0.25 * wild[5] and max(wild) < 30
