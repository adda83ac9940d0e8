"""The sockets that the server listens with."""

import contextlib
import errno
import socket

from rag_jax.config import ConfigError

# Bytes of an answer that the system keeps for a client. It takes more only once a third of them is
# read, by which the server sees that a client reads: of as many as usual, 4 MiB, too seldom.
KEPT = 2**18


def bound(host: str, port: int) -> list[socket.socket]:
    """A bound socket, which does not listen yet, for each address of the host, all on one port.

    Raises:
      ConfigError: no socket can be bound there.
    """
    if not 0 <= port < 2**16:  # some systems take it modulo 65536
        raise ConfigError(f"--port={port}: must be 0 (a free one) to 65535")
    listening, lacking = [], None
    try:
        for family, kind, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            try:
                listening.append(_listener(family, kind, (address[0], port, *address[2:])))
            except OSError as error:  # localhost may have an address that this machine lacks
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                lacking = error
                continue
            port = listening[-1].getsockname()[1]
        if not listening:
            raise lacking
    except (OSError, UnicodeError) as error:  # UnicodeError: `host` can be no host's name
        for each in listening:
            each.close()
        raise _refusal(host, port, error) from None
    return listening


def listen(sockets: list[socket.socket]) -> list[socket.socket]:
    """The bound sockets, which listen now.

    Raises:
      ConfigError: another server does, that has bound the same port before any of them listened.
    """
    for each in sockets:
        try:
            each.listen()
        except OSError as error:
            raise _refusal(*each.getsockname()[:2], error) from None
    return sockets


def _refusal(host: str, port: int, error: Exception) -> ConfigError:
    return ConfigError(f"--host={host} --port={port}: nothing can listen there ({error}); name an "
                       "address and a free port of this machine")


def _listener(family: int, kind: int, address: tuple) -> socket.socket:
    with contextlib.ExitStack() as unless_bound:
        listener = unless_bound.enter_context(socket.socket(family, kind))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, KEPT)  # of its connections too
        if family == socket.AF_INET6:  # or else it would also take the port of IPv4
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
        unless_bound.pop_all()
    return listener
