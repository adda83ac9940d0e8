"""uvicorn's HTTP protocol, with bounds on the memory that a connection may take, on the time in
which it has to send the head of a request, and on that for which it may leave an answer unread."""

import asyncio

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

HEAD = 2**16  # bytes
HEAD_SECONDS = 20.0
UNREAD_SECONDS = 60.0
MOST_AHEAD = 16  # requests that wait for the answers to earlier ones of their connection
PART = 2**12  # bytes that are parsed at once: the requests in them may be more than MOST_AHEAD
_ANSWER = (b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: text/plain\r\n"
           b"content-length: %d\r\nconnection: close\r\n\r\n%b")
_TOO_LARGE = b"the head of a request has less than %d bytes" % HEAD


class _Parser(httptools.HttpRequestParser):
    """A parser that also recognises a head that offers another protocol. The parser stops after it.

    Attributes:
      rest: the bytes after such a head; None = there was no such head.
    """

    def __init__(self, protocol: "Bounded"):
        super().__init__(protocol)
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self.rest: bytes | None = None

    @property
    def offers(self) -> bool:
        """Whether the head that has been read offers another protocol."""
        return self.should_upgrade() and self.get_method() != b"CONNECT"

    def feed_data(self, data: bytes) -> None:
        try:
            super().feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if not self.offers:
                raise
            self.rest = data[upgrade.args[0]:]


class _Flow(FlowControl):
    """Also uvicorn's, which resumes reading for every request whose turn it is.

    Attributes:
      full: enough requests wait, so that nothing more is read.
    """

    full = False

    def resume_reading(self) -> None:
        if not self.full:
            super().resume_reading()


class Bounded(HttpToolsProtocol):
    """Refuses a head, or trailers after a body, of HEAD bytes or more, and closes a connection when
    its next head is not complete after HEAD_SECONDS, or when its client has read nothing of an
    answer for UNREAD_SECONDS.

    The parser keeps a head in memory until its end, before any token is checked, without any limit.
    `Server._body` limits bodies. A request that comes before an earlier one is answered waits in
    memory; while MOST_AHEAD wait, no more of their connection is read. When a client leaves, the
    request that is being answered is told; uvicorn tells the last one that has come.

    A request that offers another protocol is read as if it did not, as HTTP allows: Java's clients
    offer HTTP/2 with their first request, and uvicorn would read its body as another protocol.
    """

    _answered: RequestResponseCycle | None = None  # `cycle` is the last that has come
    _kept = 0  # bytes since the end of the last request, or of the last part of its body
    _later = b""  # received, and not parsed yet, as enough requests wait
    _deadline: asyncio.TimerHandle  # closes the connection if the next head is not complete
    _unread: asyncio.TimerHandle | None = None  # closes it if nothing of an answer is read

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self.parser, self.flow = _Parser(self), _Flow(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._answered is not None:
            self._answered.disconnected = not self._answered.response_complete
            self._answered.message_event.set()
        self.pipeline.clear()
        self._deadline.cancel()
        if self._unread:
            self._unread.cancel()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reading(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unread.cancel()
        if self.cycle is None or self.cycle.response_complete:  # what is left may never be read
            self._expect_reading(self.transport.get_write_buffer_size())

    def data_received(self, data: bytes) -> None:
        self._later += data
        while self._later and not self.transport.is_closing():
            self.flow.full = len(self.pipeline) >= MOST_AHEAD
            if self.flow.full:
                self.flow.pause_reading()
                break
            room = min(HEAD - self._kept, PART)
            part, self._later = self._later[:room], self._later[room:]
            self._kept += len(part)
            super().data_received(part)
            if self.parser.rest is not None:
                self._later = self._head_without_offer() + self.parser.rest + self._later
                self.parser, self._kept = _Parser(self), 0
            elif self._kept >= HEAD and not self.transport.is_closing():
                self.transport.write(_ANSWER % (len(_TOO_LARGE), _TOO_LARGE))
                self.transport.close()

    def on_headers_complete(self) -> None:
        if not self.parser.offers:
            self._deadline.cancel()
            super().on_headers_complete()
            if not self.pipeline:
                self._answered = self.cycle

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._kept = 0

    def on_message_complete(self) -> None:
        if not self.parser.offers:
            super().on_message_complete()
            self._kept = 0

    def on_response_complete(self) -> None:
        if self.pipeline:
            self._answered = self.pipeline[-1][0]
        super().on_response_complete()
        if not self.flow.write_paused:  # what is left may be too little for a pause
            self._expect_reading(self.transport.get_write_buffer_size())
        if self.cycle.response_complete:  # else the client has already sent the next request
            self._expect_head()
        self.data_received(b"")  # there is room again for what came earlier

    def _expect_head(self) -> None:
        self._deadline = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _expect_reading(self, unread: int) -> None:
        """Closes the connection after UNREAD_SECONDS if by then no fewer bytes are unread."""
        def check() -> None:
            now = self.transport.get_write_buffer_size()
            if now >= unread:
                self.transport.abort()
            else:
                self._expect_reading(now)

        if self._unread:
            self._unread.cancel()
        if unread:
            self._unread = self.loop.call_later(UNREAD_SECONDS, check)

    def _head_without_offer(self) -> bytes:
        """The head that was read, without the offer of another protocol."""
        version = self.parser.get_http_version().encode("ascii")
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version),
                 *(b"%b: %b" % header for header in self.headers if header[0] != b"upgrade")]
        return b"".join(b"%b\r\n" % line for line in (*lines, b""))
