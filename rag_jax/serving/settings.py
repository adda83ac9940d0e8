"""The settings of a server."""

import dataclasses
import ipaddress
import re
import socket

from rag_jax.config import ConfigError


@dataclasses.dataclass(frozen=True)
class Settings:
    """Limits and names of a server.

    Attributes:
      model: name of the model in /v1/models.
      host: name or address to listen at.
      token: what clients must send as "Authorization: Bearer TOKEN", in ASCII; "" = nothing.
      memory_token: the same for changes by /memory, which change everybody's answers; "" = `token`,
        and if that is "" too, nobody can make them.
      batch_sizes: how many questions are answered at a time; a batch is filled up to the next of
        these sizes. Sixteen clients that each ask again when they are answered soon become two
        groups of eight that take turns.
      max_waiting: questions, and texts to embed, that may wait; more are refused with 429.
      max_question: characters of a question, or of a text to embed; more are refused with 422.
      max_texts: texts to embed or to rank in a request, passages to add, delete or retrieve (422).
      max_choices: answers to a question (422).
      max_body: bytes of the body of a request (413).
      timeout: seconds that a request may take (504).
      grace: seconds that requests still have once the server has been asked to end.
    """

    model: str
    host: str = "127.0.0.1"
    token: str = ""
    memory_token: str = ""
    batch_sizes: tuple[int, ...] = (1, 4, 8, 16)
    max_waiting: int = 256
    max_question: int = 4000
    max_texts: int = 128
    max_choices: int = 16
    max_body: int = 2**20
    timeout: float = 60.0
    grace: float = 10.0

    def __post_init__(self) -> None:
        sizes = self.batch_sizes
        if not sizes or min(sizes) < 1 or list(sizes) != sorted(set(sizes)):
            raise ConfigError(f"batch_sizes={sizes}: must be whole numbers from 1, ascending")
        if self.max_waiting < max(sizes):
            raise ConfigError(f"max_waiting={self.max_waiting}: must be at least the largest of "
                              f"batch_sizes={sizes}")
        for name, token in (("RAG_JAX_TOKEN", self.token),
                            ("RAG_JAX_MEMORY_TOKEN", self.memory_token)):
            # Clients send other letters as UTF-8 or as Latin-1, or not at all.
            if token and not re.fullmatch(r"[!-~]+( +[!-~]+)*", token):
                raise ConfigError(f"{name}: must be letters, digits and signs of ASCII, without "
                                  "space around them; choose another, or unset it for none")

    @property
    def local(self) -> bool:
        """Whether all addresses that `host` names can be reached from this machine alone."""
        try:
            addresses = socket.getaddrinfo(self.host, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):  # nothing can listen there
            return False
        return all(ipaddress.ip_address(address[0]).is_loopback for *_, address in addresses)
