"""Checks of passages while they are read or written; every error names the place and the field."""

import re

from rag_jax.retrieval.protocol import Passage, RetrievalError


class SeenIds:
    """The ids met so far. Plain decimal ids (DPR's 21 million) cost one bit each, others a str."""

    def __init__(self):
        self._bits, self._others = bytearray(), set()

    def add(self, passage_id: str) -> bool:
        """Returns True when the id is new."""
        if not re.fullmatch(r"0|[1-9][0-9]{0,8}", passage_id, re.ASCII):
            before = len(self._others)
            self._others.add(passage_id)
            return len(self._others) > before
        byte, bit = divmod(int(passage_id), 8)
        if byte >= len(self._bits):
            self._bits.extend(bytes(max(byte + 1 - len(self._bits), len(self._bits), 1024)))
        new = not self._bits[byte] >> bit & 1
        self._bits[byte] |= 1 << bit
        return new


def check_passage(passage: Passage, seen: SeenIds, where: str) -> None:
    """Refuses an empty id or text, an id met before, and text that UTF-8 cannot hold."""
    for field in ("id", "text"):
        if not getattr(passage, field).strip():
            raise RetrievalError(
                f"{where}: field {field!r} is empty; give it a value or remove the passage.")
    try:
        "".join(passage).encode()
    except UnicodeEncodeError as error:
        raise RetrievalError(
            f"{where}: half of a surrogate pair cannot be stored as UTF-8 ({error})."
        ) from None
    if not seen.add(passage.id):
        raise RetrievalError(
            f"{where}: id {passage.id!r} occurs a second time; ids must be unique.")
