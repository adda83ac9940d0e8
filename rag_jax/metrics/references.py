"""Checks of lists of texts: the letters of a string in a list's place would be scored."""

from collections.abc import Sequence
from typing import Any


def refuse_string(given: Any, subject: str, expected: str = "a list of strings") -> None:
    """Raises TypeError, "SUBJECT the string ...: expected ...", for a string in a list's place."""
    if isinstance(given, str):
        raise TypeError(f"{subject} the string {given!r}: expected {expected}")


def checked_references(references: Sequence[str]) -> Sequence[str]:
    """The texts.

    Raises:
        ValueError: there are none.
        TypeError: they are one string.
    """
    refuse_string(references, "references is")
    if len(references) == 0:
        raise ValueError("no references: expected at least one for each prediction")
    return references


def check_tokens(prediction: Sequence[str], references: Sequence[Sequence[str]]) -> None:
    """Checks a text and its references, as the tokens of each.

    Raises:
        ValueError: there are no references.
        TypeError: they, or one text, are one string.
    """
    for tokens in (prediction, *checked_references(references)):
        refuse_string(tokens, "a text is", "a list of its tokens")
