"""What a server may be told."""

import socket

import pytest

from rag_jax.config import ConfigError
from rag_jax.serving.settings import Settings


@pytest.mark.parametrize("name, said", [("token", "RAG_JAX_TOKEN"),
                                        ("memory_token", "RAG_JAX_MEMORY_TOKEN")])
def test_a_token_is_one_that_every_client_can_send(name, said):
    """The page sent é as Latin-1, and the server waited for UTF-8; and a blank one was none."""
    for token in ("né", " ", "\t", " padded", "padded\n", "two\nlines"):
        with pytest.raises(ConfigError, match=f"^{said}: must be .* ASCII"):
            Settings("rag_token", **{name: token})
    for token in ("", "x", "sk-~!", "two words"):
        Settings("rag_token", **{name: token})


@pytest.mark.parametrize("host, addresses, local", [
    ("127.0.0.2", ["127.0.0.2"], True), ("LOCALHOST", ["::1", "127.0.0.1"], True),
    ("mine", ["127.0.1.1"], True), ("mine", ["127.0.1.1", "192.0.2.1"], False),
    ("0.0.0.0", ["0.0.0.0"], False), ("nowhere", [], False)])
def test_what_listens_to_this_machine_alone_is_told_by_its_addresses(
        monkeypatch, host, addresses, local):
    """By its name: a server at LOCALHOST answered to the pages of others, by names of theirs."""
    def found(name, *_, **__):
        assert name == host
        if not addresses:
            raise socket.gaierror
        return [(0, 0, 0, "", (address, 0)) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", found)
    assert Settings("rag_token", host).local == local
