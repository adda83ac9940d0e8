"""Tells whether an error of Orbax means that a checkpoint is damaged, or that the machine failed.

Orbax wraps everything that is raised while it reads an array, a Ctrl-C and MemoryError too, in an
Exception. TensorStore gives the operating system's error number only in the text of its error.
"""

import errno
import os
import re
from collections.abc import Iterator

import jax

# Numbers that mean that a file is not the one that was saved; with others the machine failed.
_OF_DAMAGE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EINVAL,
              errno.ENAMETOOLONG}
_NUMBERS = re.compile(r"\[os_error_code='(\d+)'\]")
_SHORT_OF = re.compile("RESOURCE_EXHAUSTED|can't start new thread|Too many open files|"
                       "Cannot allocate memory")
_NO_ANSWER = re.compile("UNAVAILABLE|DEADLINE_EXCEEDED")


def is_interrupt(error: BaseException) -> bool:
    """Whether the cause is a Ctrl-C, or a signal that was turned into one."""
    return any(isinstance(known, KeyboardInterrupt) for known in _chain(error))


def of_machine(error: BaseException) -> str | None:
    """What the machine lacked or refused, such as memory, open files or permission, in one line;
    None = the checkpoint may be damaged."""
    for known in _chain(error):
        if (isinstance(known, MemoryError | TimeoutError | jax.errors.JaxRuntimeError)
                or _numbers(known) - _OF_DAMAGE or _SHORT_OF.search(str(known))):
            return of_system(known)
    return None


def is_bad_disk(error: BaseException) -> bool:
    """Whether the disk could not read its data (EIO)."""
    return any(errno.EIO in _numbers(known) for known in _chain(error))


def is_vain_wait(error: BaseException) -> bool:
    """Whether the error is a timeout of waiting for the other processes of the job."""
    return any(isinstance(known, TimeoutError) and known.errno is None  # else the disk's
               or isinstance(known, jax.errors.JaxRuntimeError) and _NO_ANSWER.search(str(known))
               for known in _chain(error))


def of_system(error: BaseException) -> str:
    """The operating system's message where TensorStore gives its number; else the first line."""
    number = _NUMBERS.search(str(error))
    return os.strerror(int(number[1])) if number else first_line(error)


def first_line(error: BaseException) -> str:
    """The type of an error and the first line of its text, at most 200 characters."""
    text = str(error).strip().splitlines()
    line = f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
    return line if len(line) <= 200 else line[:200] + "..."


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, its cause or context, the cause or context of that, and so on."""
    seen: list[BaseException] = []
    while error is not None and not any(error is known for known in seen):
        seen.append(error)
        yield error
        error = error.__cause__ or error.__context__


def _numbers(error: BaseException) -> set[int]:
    """The operating system's error numbers in an error."""
    own = [error.errno] if isinstance(error, OSError) and error.errno is not None else []
    return {*own, *(int(number) for number in _NUMBERS.findall(str(error)))}
