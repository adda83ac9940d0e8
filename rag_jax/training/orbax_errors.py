"""What an error that Orbax raises stands for: damage of what it read, or trouble of the machine.

Orbax wraps whatever comes while it reads an array, a Ctrl-C and MemoryError too, in an Exception.
TensorStore gives the number of what the operating system refuses in its text alone.
"""

import errno
import os
import re
from collections.abc import Iterator

import jax

# What says of a file that it is not the one that was saved. Any other number is the machine's.
_OF_DAMAGE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EINVAL,
              errno.ENAMETOOLONG}
_NUMBERS = re.compile(r"\[os_error_code='(\d+)'\]")
_SHORT_OF = re.compile("RESOURCE_EXHAUSTED|can't start new thread|Too many open files|"
                       "Cannot allocate memory")
_NO_ANSWER = re.compile("UNAVAILABLE|DEADLINE_EXCEEDED")


def is_interrupt(error: BaseException) -> bool:
    """Whether it began with a Ctrl-C, or with a signal that was made one."""
    return any(isinstance(known, KeyboardInterrupt) for known in _chain(error))


def of_machine(error: BaseException) -> str | None:
    """In one line what the machine lacked or refused, as memory, open files or permission; None
    where what was read may well be damaged."""
    for known in _chain(error):
        if (isinstance(known, MemoryError | TimeoutError | jax.errors.JaxRuntimeError)
                or _numbers(known) - _OF_DAMAGE or _SHORT_OF.search(str(known))):
            return of_system(known)
    return None


def is_bad_disk(error: BaseException) -> bool:
    """Whether the disk could not read what lies on it."""
    return any(errno.EIO in _numbers(known) for known in _chain(error))


def is_vain_wait(error: BaseException) -> bool:
    """Whether it came of waiting for the other processes of the job, as their barriers do."""
    return any(isinstance(known, TimeoutError) and known.errno is None  # else it is the disk's
               or isinstance(known, jax.errors.JaxRuntimeError) and _NO_ANSWER.search(str(known))
               for known in _chain(error))


def of_system(error: BaseException) -> str:
    """What the operating system says, where TensorStore gives its number; else the first line."""
    found = _NUMBERS.search(str(error))
    return os.strerror(int(found[1])) if found else first_line(error)


def first_line(error: BaseException, limit: int = 200) -> str:
    """The type of an error and the first line of what it says."""
    text = str(error).strip().splitlines()
    line = f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
    return line if len(line) <= limit else line[:limit] + "..."


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, what it was made of or met beside, and so on."""
    seen: list[BaseException] = []
    while error is not None and not any(error is known for known in seen):
        seen.append(error)
        yield error
        error = error.__cause__ or error.__context__


def _numbers(error: BaseException) -> set[int]:
    """Of the operating system."""
    own = [error.errno] if isinstance(error, OSError) and error.errno is not None else []
    return {*own, *(int(number) for number in _NUMBERS.findall(str(error)))}
