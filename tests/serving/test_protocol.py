"""What a connection may send before anybody has looked at it."""

import asyncio

import pytest
import uvicorn
from uvicorn.server import ServerState

from rag_jax.serving.protocol import HEAD, Bounded

BEGIN = b"POST / HTTP/1.1\r\nhost: localhost\r\n"


class Transport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self):
        super().__init__()
        self.written, self.closed = b"", False

    def write(self, data):
        self.written += data

    def pause_reading(self):
        pass

    resume_reading = pause_reading

    def is_closing(self):
        return self.closed

    def close(self):
        self.closed = True


def sent(*parts):
    """The bodies that an application reads, and what is written to the client."""
    bodies = []

    async def app(scope, receive, send):
        body, more = b"", True
        while more:
            part = await receive()
            body, more = body + part.get("body", b""), part.get("more_body", False)
        bodies.append(body)
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def run():
        state, transport = ServerState(), Transport()
        protocol = Bounded(uvicorn.Config(app, log_level="critical"), state, {})
        protocol.connection_made(transport)
        for part in parts:
            protocol.data_received(part)
        if transport.closed:
            protocol.connection_lost(None)
        while state.tasks:
            await asyncio.sleep(0)
        return bodies, transport.written

    return asyncio.run(run())


@pytest.mark.parametrize("parts", [
    [BEGIN + b"a: " + b"x" * HEAD], [BEGIN + b"a: ", *[b"x" * 1000] * 70],
    [b"GET /" + b"x" * HEAD], [BEGIN + b"a: b\r\n" * HEAD + b"\r\n"],
    [BEGIN + b"content-length: 1\r\n\r\n1", BEGIN + b"a: " + b"x" * HEAD],
    [BEGIN + b"transfer-encoding: chunked\r\n\r\n1\r\n1\r\n0\r\n" + b"a: b\r\n" * HEAD]],
    ids=["at once", "in parts", "a path", "whole", "the second", "after a body"])
def test_a_head_without_end_is_refused(parts):
    """Hundreds of megabytes of it were kept, of a client without a token."""
    bodies, written = sent(*parts)
    assert b"HTTP/1.1 431 " in written and written.endswith(b"less than 65536 bytes")
    assert len(bodies) <= 1


@pytest.mark.parametrize("parts, bodies", [
    ([BEGIN + b"a: " + b"x" * (HEAD - 100), b"\r\ncontent-length: 1\r\n\r\n1"], [b"1"]),
    ([BEGIN + b"content-length: %d\r\n\r\n" % (4 * HEAD) + b"x" * 4 * HEAD], [b"x" * 4 * HEAD]),
    ([BEGIN + b"transfer-encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * HEAD, b"0\r\n\r\n"],
     [b"x" * HEAD]),
    ([BEGIN + b"\r\n"] * 2000, [b""] * 2000)],
    ids=["a long head", "a long body", "a body in parts", "many requests"])
def test_nothing_else_is_refused(parts, bodies):
    found, written = sent(*parts)
    assert found == bodies and written.count(b"HTTP/1.1 204 ") == len(bodies)
