"""A signal sets the flag and nothing else, and the former handlers come back."""

import contextlib
import itertools
import os
import signal
import threading

import pytest

from rag_jax.errors import Preempted, UserError
from rag_jax.training.preemption import preemption_noticed, stopped_at_once


@pytest.fixture(autouse=True)
def usual_handlers():
    """Those of a terminal: a job in the background of a shell starts with SIGINT ignored, and one
    under nohup with SIGHUP."""
    usual = {signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL,
             signal.SIGINT: signal.default_int_handler}
    outer = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield usual
    for number, handler in outer.items():
        signal.signal(number, handler)


def send(number):
    """Delivers a signal to this process; the handler has run when this returns."""
    signal.raise_signal(number)


def test_sigterm_sets_the_flag_and_the_process_lives_on():
    with preemption_noticed() as requested:
        assert not requested()
        os.kill(os.getpid(), signal.SIGTERM)
        assert requested()


def test_first_interrupt_sets_the_flag_and_the_second_interrupts(capfd):
    """The first said nothing, though a step that compiles ends after half a minute."""
    with preemption_noticed() as requested:
        send(signal.SIGINT)
        assert requested()
        assert "stopping after this step" in capfd.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


def test_handlers_are_restored_also_after_an_error():
    seen = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: seen.append(received))
    with pytest.raises(ZeroDivisionError), preemption_noticed() as requested:
        send(signal.SIGINT)
        raise ZeroDivisionError
    assert requested() and seen == []
    send(signal.SIGTERM)
    send(signal.SIGINT)
    assert seen == [signal.SIGTERM, signal.SIGINT]


@pytest.mark.parametrize("context, call", [
    *((preemption_noticed, call) for call in range(1, 7)),
    *((stopped_at_once, call) for call in range(1, 4))])
@pytest.mark.parametrize("first", [True, False])
def test_ctrl_c_while_handlers_change_leaves_none_behind(
        monkeypatch, usual_handlers, context, call, first):
    """It became a KeyError, and the handler of SIGTERM stayed."""
    calls, change = itertools.count(1), signal.signal

    def interrupted(number, handler):
        due = next(calls) == call
        if due and first:
            send(signal.SIGINT)
        former = change(number, handler)
        if due and not first:
            send(signal.SIGINT)
        return former

    with monkeypatch.context() as patches:
        patches.setattr(signal, "signal", interrupted)
        with contextlib.suppress(KeyboardInterrupt, Preempted), context():
            pass
    assert {number: signal.getsignal(number) for number in usual_handlers} == usual_handlers


@pytest.mark.parametrize("context", [preemption_noticed, stopped_at_once])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_that_is_ignored_stays_ignored(context, number):
    """A job in the background of a shell stopped at a Ctrl-C that was meant for another."""
    signal.signal(number, signal.SIG_IGN)
    with context() as requested:
        send(number)
        assert not (requested and requested())
    assert signal.getsignal(number) is signal.SIG_IGN


@pytest.mark.parametrize("handler", [signal.SIG_DFL, signal.SIG_IGN])
def test_a_terminal_that_is_closed_stops_training_unless_nohup_says_otherwise(handler):
    """All since the last checkpoint was lost; and a bar drawn on a terminal that is gone fails."""
    outer, kept = signal.signal(signal.SIGHUP, handler), os.dup(1)
    there, terminal = os.openpty()
    other, pipe = os.pipe()
    for end in (there, other):  # they go first
        os.close(end)
    try:
        for stream in (terminal, pipe):
            os.dup2(stream, 1)
            with preemption_noticed() as requested:
                send(signal.SIGHUP)
                assert requested() == (handler is signal.SIG_DFL)
                fails = pytest.raises(OSError)
                with contextlib.nullcontext() if requested() else fails:
                    os.write(1, b"20/100")
            assert signal.getsignal(signal.SIGHUP) is handler
    finally:
        os.dup2(kept, 1)
        for descriptor in (terminal, pipe, kept):
            os.close(descriptor)
        signal.signal(signal.SIGHUP, outer)


def test_a_signal_that_comes_twice_does_not_break_into_what_the_first_began():
    """Some shells send SIGHUP twice."""
    cleaned = []
    with pytest.raises(Preempted), stopped_at_once():
        try:
            send(signal.SIGTERM)
        finally:
            send(signal.SIGTERM)
            cleaned.append(True)
    assert cleaned


def test_guard_is_inert_outside_the_main_thread():
    results = []

    def enter():
        with preemption_noticed() as requested:
            results.append(requested())

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert results == [False]
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("becomes", [KeyboardInterrupt, RuntimeError])
def test_a_signal_between_stages_ends_the_command_as_one_that_goes_on(number, becomes):
    """Its status was that of a killed process, and a script that repeats the command gave up; once
    the compiler made an error of it that was called a defect."""
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with pytest.raises(Preempted, match="stopped"), stopped_at_once():
        try:
            send(number)
        except KeyboardInterrupt as interrupt:
            raise becomes from interrupt
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_a_library_swallows_is_not_lost(number):
    """Python drops what is raised while it collects an object; training went on until it was
    killed."""
    with pytest.raises(Preempted, match="stopped"), stopped_at_once():
        with contextlib.suppress(KeyboardInterrupt):
            send(number)


def test_within_a_stage_a_signal_is_noticed_and_no_other_error_is_changed():
    with pytest.raises(UserError, match="wrong"), stopped_at_once():
        with preemption_noticed() as requested:
            send(signal.SIGTERM)
            assert requested()
        raise UserError("wrong")
