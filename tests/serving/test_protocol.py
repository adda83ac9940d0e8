"""What a connection may send before anybody has looked at it."""

import asyncio

import pytest
import uvicorn
from uvicorn.server import ServerState

from rag_jax.serving import protocol
from rag_jax.serving.protocol import HEAD, Bounded

BEGIN = b"POST / HTTP/1.1\r\nhost: localhost\r\n"


class Transport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self):
        super().__init__()
        self.written, self.closed, self.reading, self.unread = b"", False, True, [0]

    def write(self, data):
        self.written += data

    def pause_reading(self):
        self.reading = False

    def resume_reading(self):
        self.reading = True

    def get_write_buffer_size(self):
        return self.unread.pop(0) if self.unread[1:] else self.unread[0]

    def is_closing(self):
        return self.closed

    def close(self):
        self.closed = True

    abort = close


def connected(parts):
    """A connection that these parts come by: the connection, its transport, the tasks that answer,
    and the bodies that have been read."""
    bodies, state, transport = [], ServerState(), Transport()

    async def app(scope, receive, send):
        body, more = b"", True
        while more:
            part = await receive()
            body, more = body + part.get("body", b""), part.get("more_body", False)
        await asyncio.sleep(0)  # of an answer that takes time
        bodies.append(body)
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    connection = Bounded(uvicorn.Config(app, log_level="critical"), state, {})
    connection.connection_made(transport)
    for part in parts:
        connection.data_received(part)
    if transport.closed:
        connection.connection_lost(None)
    return connection, transport, state.tasks, bodies


def sent(*parts):
    """The bodies that an application reads, and what is written to the client."""
    async def run():
        _, transport, tasks, bodies = connected(parts)
        while tasks:
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


OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAEAAEA\r\nUpgrade: h2c\r\n"
ONE = OFFER + b"content-length: 1\r\n\r\n1"


@pytest.mark.parametrize("parts, bodies", [
    ([BEGIN + ONE], [b"1"]), ([BEGIN + OFFER, b"content-length: 1\r\n\r\n", b"1"], [b"1"]),
    ([BEGIN + b"connection: close, upgrade\r\nupgrade: x\r\ncontent-length: 1\r\n\r\n1"], [b"1"]),
    ([(BEGIN + ONE) * 1000], [b"1"] * 1000), ([BEGIN + OFFER + b"\r\n", BEGIN + ONE], [b"", b"1"]),
    ([BEGIN + OFFER + b"content-length: %d\r\n\r\n" % (2 * HEAD) + b"x" * 2 * HEAD],
     [b"x" * 2 * HEAD])],
    ids=["at once", "in parts", "the last", "many", "without a body", "a long body"])
def test_what_offers_another_protocol_is_read_as_if_it_did_not(parts, bodies):
    """Java's clients offer HTTP/2 with their first request: its body was lost, and refused."""
    found, written = sent(*parts)
    assert found == bodies and written.count(b"HTTP/1.1 204 ") == len(bodies)
    assert b"HTTP/1.1 4" not in written


@pytest.mark.parametrize("parts, closed", [
    ([], True), ([BEGIN], True), ([BEGIN + b"\r\n", BEGIN], True),
    ([BEGIN + b"\r\n"] * 2 + [BEGIN], True),
    ([BEGIN + b"content-length: 2\r\n\r\n1"], False),
    ([BEGIN + b"\r\n", BEGIN + b"content-length: 2\r\n\r\n1"], False)],
    ids=["nothing", "half a head", "after a request", "after two", "a body", "a second body"])
def test_a_connection_that_asks_for_nothing_is_closed(parts, closed, monkeypatch):
    """As many as the server has were held for ever by who knew no token, and others got 503; a
    request that is being read or answered has a limit of its own."""
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0)

    async def run():
        _, transport, tasks, bodies = connected(parts)
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(tasks) == (not closed)
        for task in tasks:
            task.cancel()
        return transport.closed

    assert asyncio.run(run()) == closed


def test_of_what_is_sent_ahead_little_is_read_and_all_is_answered():
    """A client that read no answer made the server's memory grow by a gigabyte in 20 seconds: every
    request that began let 256 KiB of others in."""
    many, most = 20_000, protocol.MOST_AHEAD + protocol.PART // len(BEGIN)

    async def run():
        connection, transport, tasks, bodies = connected([])
        ahead, received = (BEGIN + b"\r\n") * many, 0
        while len(bodies) < many:
            if transport.reading and ahead:
                part, ahead = ahead[:2**18], ahead[2**18:]
                connection.data_received(part)
                received += len(part)
            await asyncio.sleep(0)
            assert len(connection.pipeline) <= most
            unanswered = received - len(bodies) * len(BEGIN + b"\r\n")
            assert unanswered < 2**19, "more was read than one part beside what waits"
        return transport.written.count(b"HTTP/1.1 204 ")

    assert asyncio.run(run()) == many


@pytest.mark.parametrize("answered", [0, 1])
@pytest.mark.parametrize("waiting", [0, 2])
def test_a_client_that_leaves_is_noticed_by_the_request_that_is_answered(answered, waiting):
    """If others of its connection waited, it was computed to its end, and its answer written to a
    connection that was closed."""
    async def run():
        told, transport, state = [], Transport(), ServerState()

        async def app(scope, receive, send):
            number = int(scope["path"][1:])
            while number >= answered and (await receive())["type"] != "http.disconnect":
                pass
            told.append(number)
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body", "body": b""})

        connection = Bounded(uvicorn.Config(app, log_level="critical"), state, {})
        connection.connection_made(transport)
        for number in range(answered + 1 + waiting):
            connection.data_received(b"GET /%d HTTP/1.1\r\nhost: localhost\r\n\r\n" % number)
        for _ in range(20):
            await asyncio.sleep(0)
        transport.close()
        connection.connection_lost(None)
        for _ in range(20):
            await asyncio.sleep(0)
        assert not connection.pipeline and not state.tasks
        return told, transport.written.count(b"HTTP/1.1 204 ")

    assert asyncio.run(run()) == ([*range(answered + 1)], answered)


@pytest.mark.parametrize("whole", [False, True], ids=["a part", "the end"])
@pytest.mark.parametrize("unread, resumed, closed", [
    ([9, 9], False, True), ([9, 8, 7, 7], False, True), ([9, 8, 7, 6], True, False)],
    ids=["nothing", "no more", "slowly, and all"])
def test_a_connection_whose_client_does_not_read_is_closed(
        unread, resumed, closed, whole, monkeypatch):
    """As many as the server has were held for ever; a slow client gets all of its answer."""
    monkeypatch.setattr(protocol, "UNREAD_SECONDS", 0)

    async def run(resumed=resumed):
        connection, transport, tasks, _ = connected(
            [BEGIN + (b"\r\n" if whole else b"content-length: 2\r\n\r\n1")])
        transport.unread = [*unread]
        while whole and tasks:
            await asyncio.sleep(0)
        if not whole:
            connection.pause_writing()
        for _ in range(20):
            if resumed and len(transport.unread) == 1:
                transport.unread = [0 if whole else 3]  # of a stream a little may stay
                if not whole:
                    connection.resume_writing()
                resumed = False
            await asyncio.sleep(0)
        assert transport.closed == closed
        connection.connection_lost(None)

    asyncio.run(run())


def test_what_is_left_of_a_whole_answer_once_writing_goes_on_is_watched_too(monkeypatch):
    """The client read until there was room, and no more."""
    monkeypatch.setattr(protocol, "UNREAD_SECONDS", 0)

    async def run():
        connection, transport, tasks, _ = connected([BEGIN + b"\r\n"])
        while tasks:
            await asyncio.sleep(0)
        transport.unread = [3]
        connection.pause_writing()
        connection.resume_writing()
        for _ in range(20):
            await asyncio.sleep(0)
        assert transport.closed
        connection.connection_lost(None)

    asyncio.run(run())
