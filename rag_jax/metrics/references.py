"""References as metrics take them: the letters of a string in a list's place would be scored."""

from collections.abc import Sequence


def checked_references(references: Sequence[str]) -> Sequence[str]:
    """The texts.

    Raises:
        ValueError: there are none.
        TypeError: they are one string.
    """
    if isinstance(references, str):
        raise TypeError(f"references is the string {references!r}: expected a list of strings")
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
        if isinstance(tokens, str):
            raise TypeError(f"a text is the string {tokens!r}: expected a list of its tokens")
