"""HTTP as uvicorn speaks it, with a bound on what a connection may have kept before it is read."""

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD = 2**16  # bytes
_ANSWER = (b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: text/plain\r\n"
           b"content-length: %d\r\nconnection: close\r\n\r\n%b")
_TOLD = b"the head of a request has less than %d bytes" % HEAD


class Bounded(HttpToolsProtocol):
    """Refuses a head, or what follows the last part of a body, of HEAD bytes or more.

    The parser keeps all of it until it ends, before anybody has looked at a token; of itself it has
    no limit. A body is counted where it is read (`Server._body`).
    """

    _kept = 0  # bytes since the last request, or the last part of its body, was complete

    def data_received(self, data: bytes) -> None:
        while data and not self.transport.is_closing():
            room = HEAD - self._kept
            part, data = data[:room], data[room:]
            self._kept += len(part)
            super().data_received(part)
            if self._kept >= HEAD and not self.transport.is_closing():
                self.transport.write(_ANSWER % (len(_TOLD), _TOLD))
                self.transport.close()

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._kept = 0

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._kept = 0
