"""What the user can mend is a UserError; any other error is a defect of this package."""

import difflib
from collections.abc import Iterable, Sequence


class UserError(Exception):
    """A mistake in what was given: its message says what is wrong, what is allowed, what to do."""


class DataError(UserError, ValueError):
    """A data file, or a record in it, that cannot be used: the message names the place."""


class NotFiniteError(UserError):
    """What the model computed is NaN, infinite, or too large to go on with."""


class Preempted(Exception):
    """A signal asked the process to stop; what is done is saved, and the same command goes on."""


def first_of(names: Sequence[str], most: int) -> str:
    """The first so many names of a list, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def near_matches(word: str, words: Iterable[str], cutoff: float = 0.5) -> str:
    """The advice for a name that does not exist: the likely ones, or all that there are."""
    words = list(words)
    close = difflib.get_close_matches(word, words, 3, cutoff)
    return f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(words)}"
