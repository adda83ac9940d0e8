"""A request's JSON, checked field by field; every error names the field and what is allowed."""

import json
import re
from collections.abc import Collection
from typing import Any

from rag_jax.data.records import Record
from rag_jax.errors import UserError, near_matches


class Refused(UserError):
    """A request that is not answered.

    Attributes:
      status: the HTTP status of the response.
      field: the wrong field, if it is one.
    """

    def __init__(self, message: str, status: int = 422, field: str | None = None):
        super().__init__(message)
        self.status, self.field = status, field


class Fields(Record):
    """One JSON object of a request; null counts as absent.

    Raises (all methods):
      Refused: a field is missing or wrong.
    """

    def __init__(self, where: str, value: Any):
        if not isinstance(value, dict):
            raise Refused(f"{where}: expected a JSON object")
        super().__init__(where, value)

    def error(self, key: str, expected: str) -> Refused:
        try:
            return Refused(str(super().error(key, expected)), field=key)
        except RecursionError:  # json.loads could read the value, and json.dumps cannot write it
            return Refused(f"{self.where}: \"{key}\" is nested too deeply: expected {expected}",
                           400, key)

    def only(self, known: Collection[str], neutral: dict[str, Collection[Any]] | None = None
             ) -> None:
        """Refuses unknown fields, and fields that ask for something the server does not do.

        neutral: such fields, with the values that ask for nothing and so are allowed.
        """
        for key in filter(self.has, self.fields):
            if neutral and key in neutral:
                value = self.fields[key]  # never true or false, though 1 == True in Python
                if value not in neutral[key] or isinstance(value, bool):
                    raise Refused(f"{self.where}: \"{key}\" is not supported: leave it out",
                                  field=key)
            elif key not in known:
                begins = key[:60]  # comparing a long name with the known ones takes seconds
                raise Refused(f"{self.where}: no field {begins!r}; {near_matches(begins, known)}",
                              field=begins)

    def number(self, key: str, default: Any, least: float, most: float, whole: bool = False) -> Any:
        """A number in these bounds; a whole one as an int."""
        if not self.has(key):
            return default
        value = self.fields[key]
        if (type(value) not in ((int,) if whole else (int, float))
                or not least <= value <= most):
            raise self.error(key, f"a {'whole ' * whole}number from {least} to {most}")
        return value

    def optional(self, key: str) -> str | None:
        """A string with some text in it; None where it is absent."""
        return self.text(key) if self.has(key) else None

    def filled(self, key: str) -> bool:
        """Whether the field is present and not an empty list."""
        return self.fields.get(key) not in (None, [])

    def flag(self, key: str) -> bool:
        """true or false; absent is false."""
        if self.has(key) and not isinstance(self.fields[key], bool):
            raise self.error(key, "true or false")
        return bool(self.fields.get(key))

    def strings(self, key: str, most: int, longest: int) -> tuple[str, ...]:
        """A string, or a list of up to `most` of them, each with 1 to `longest` characters."""
        value = self.fields.get(key)
        texts = [value] if isinstance(value, str) else value
        if (not isinstance(texts, list) or not 1 <= len(texts) <= most or not all(
                isinstance(text, str) and 1 <= len(text) <= longest for text in texts)):
            raise self.error(key, f"a string, or a list of 1 to {most} strings, of 1 to {longest} "
                             "characters each")
        return tuple(texts)

    def choice(self, key: str, default: str, allowed: Collection[str]) -> str:
        """One of some strings."""
        value = self.fields[key] if self.has(key) else default
        if not isinstance(value, str) or value not in allowed:
            raise self.error(key, f"one of {', '.join(sorted(allowed))}")
        return value

    def objects(self, key: str, most: int) -> list["Fields"]:
        """A list of up to `most` objects."""
        value = self.fields.get(key)
        if not isinstance(value, list) or not 1 <= len(value) <= most:
            raise self.error(key, f"a list of 1 to {most} objects")
        return [Fields(f"{self.where}: {key}[{number}]", each) for number, each in enumerate(value)]


def parse(body: bytes) -> Fields:
    """The object of a request.

    Raises:
      Refused: 400, it is not JSON, or holds a text that is not Unicode; 422, it is no object.
    """
    def refuse_constant(name: str) -> Any:
        raise ValueError(f"{name} is no number of JSON")

    try:
        value = json.loads(body.decode("utf-8"), parse_constant=refuse_constant)
        if re.search(rb"\\u[dD][89a-fA-F]", body):  # half of a surrogate pair
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        raise Refused(f"request: not JSON in UTF-8 ({error!s:.100})", 400) from None
    return Fields("request", value)
