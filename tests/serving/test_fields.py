"""Fields of requests that are refused, whatever is in them."""

import pytest

from rag_jax.serving import fields
from rag_jax.serving.fields import Fields, Refused, parse


def test_a_field_of_any_depth_is_refused():
    """At some depths a value could be read but not told, a defect of the server to its client."""
    for depth in range(1, 1100):
        with pytest.raises(Refused) as error:
            parse(b'{"question": ' + b"[" * depth + b"]" * depth + b"}").text("question")
        assert error.value.status in (400, 422)


def test_of_an_unknown_field_the_beginning_is_compared(monkeypatch):
    """A name of a megabyte kept everybody waiting for seconds."""
    monkeypatch.setattr(fields, "near_matches", lambda word, words: f"{len(word)} compared")
    with pytest.raises(Refused, match="; 60 compared$"):
        Fields("request", {"x" * 2**20: 1}).only(["question"])
