"""HTTP as uvicorn speaks it, with bounds on what a connection may keep and on how long it may take
before it has asked for something."""

import asyncio

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD = 2**16  # bytes
HEAD_SECONDS = 20.0
_ANSWER = (b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: text/plain\r\n"
           b"content-length: %d\r\nconnection: close\r\n\r\n%b")
_TOLD = b"the head of a request has less than %d bytes" % HEAD


class _Parser(httptools.HttpRequestParser):
    """Tells of a head that offers another protocol, which ends all that it reads.

    Attributes:
      rest: what has followed such a head; None = there was none.
    """

    def __init__(self, protocol: "Bounded"):
        super().__init__(protocol)
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own
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


class Bounded(HttpToolsProtocol):
    """Refuses a head, or what follows the last part of a body, of HEAD bytes or more, and closes a
    connection on which nothing has been asked for HEAD_SECONDS.

    The parser keeps all of a head until it ends, before anybody has looked at a token; of itself it
    has no limit. A body is counted where it is read (`Server._body`).

    What offers another protocol is read as if it did not, as HTTP allows: Java's clients offer
    HTTP/2 with their first request, and its body would be read as that.
    """

    _kept = 0  # bytes since the last request, or the last part of its body, was complete
    _deadline: asyncio.TimerHandle  # of the next head

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self.parser = _Parser(self)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._deadline.cancel()

    def data_received(self, data: bytes) -> None:
        while data and not self.transport.is_closing():
            room = HEAD - self._kept
            part, data = data[:room], data[room:]
            self._kept += len(part)
            super().data_received(part)
            if self.parser.rest is not None:
                data = self._head_without_offer() + self.parser.rest + data
                self.parser, self._kept = _Parser(self), 0
            elif self._kept >= HEAD and not self.transport.is_closing():
                self.transport.write(_ANSWER % (len(_TOLD), _TOLD))
                self.transport.close()

    def on_headers_complete(self) -> None:
        if not self.parser.offers:
            self._deadline.cancel()
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._kept = 0

    def on_message_complete(self) -> None:
        if not self.parser.offers:
            super().on_message_complete()
            self._kept = 0

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete:  # no request has been sent ahead
            self._expect_head()

    def _expect_head(self) -> None:
        self._deadline = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _head_without_offer(self) -> bytes:
        """The head that has been read, without the offer."""
        version = self.parser.get_http_version().encode("ascii")
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version),
                 *(b"%b: %b" % header for header in self.headers if header[0] != b"upgrade")]
        return b"".join(b"%b\r\n" % line for line in (*lines, b""))
