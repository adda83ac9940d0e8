"""What Orbax raises is told apart: damage of what it read, and trouble of the machine."""

import errno

import jax
import pytest

from rag_jax.training import orbax_errors


def wrapped(error):
    """As Orbax does it."""
    try:
        try:
            raise error
        except BaseException as cause:
            raise Exception("Encountered error while reading") from cause
    except Exception as outer:
        return outer


@pytest.mark.parametrize("error, told", [
    (MemoryError(), "MemoryError"),
    (TimeoutError("barrier"), "TimeoutError: barrier"),
    (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"), "JaxRuntimeError: RES"),
    (RuntimeError("can't start new thread"), "RuntimeError: can't start"),
    *[(OSError(number, "x"), f"Error: [Errno {number}] x") for number in (
        errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM, errno.ESTALE)],
    (ValueError("PERMISSION_DENIED: no 'zarr' driver [os_error_code='13'] [x]"),
     "Permission denied"),
])
def test_trouble_of_the_machine_is_found_under_what_wraps_it(error, told):
    """A sound checkpoint was put aside for it."""
    for raised in (error, wrapped(error), wrapped(wrapped(error))):
        assert told in orbax_errors.of_machine(raised)


@pytest.mark.parametrize("error", [
    FileNotFoundError("one of params, meta is missing"), FileNotFoundError(errno.ENOENT, "x"),
    NotADirectoryError(errno.ENOTDIR, "x"), ValueError("the stored bytes have changed"),
    ValueError("NOT_FOUND: no 'zarr' driver [os_error_code='2']"), KeyError("w")])
def test_damage_is_no_trouble_of_the_machine(error):
    assert orbax_errors.of_machine(wrapped(error)) is None
    assert not orbax_errors.is_interrupt(wrapped(error))


@pytest.mark.parametrize("error, vain", [
    (TimeoutError("Timed out while waiting for async_write_complete barrier."), True),
    (jax.errors.JaxRuntimeError("UNAVAILABLE: Connection reset by peer"), True),
    (jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: Barrier timed out"), True),
    (TimeoutError(errno.ETIMEDOUT, "Connection timed out"), False),
    (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"), False),
    (OSError(errno.ENOSPC, "No space left on device"), False)])
def test_waiting_for_another_process_is_told_from_trouble_of_the_disk(error, vain):
    for raised in (error, wrapped(error)):
        assert orbax_errors.is_vain_wait(raised) == vain


def test_errors_that_lead_to_each_other_come_to_an_end():
    """What is caught and raised again can be its own context."""
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__context__ = other, one
    assert not orbax_errors.is_interrupt(one)
    assert orbax_errors.is_interrupt(wrapped(KeyboardInterrupt()))
    assert orbax_errors.is_bad_disk(wrapped(OSError(errno.EIO, "x")))
