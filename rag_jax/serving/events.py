"""A stream of server-sent events."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send


class Events(StreamingResponse):
    """Chunks of an answer as events. After an error, the last event describes the error.

    Args:
      first, chunks: the first of the chunks, and the generator of the others.
      failure: error -> the response whose body describes it.
    """

    def __init__(self, first: dict[str, Any], chunks: AsyncGenerator[dict[str, Any]],
                 failure: Callable[[BaseException], Response]):
        super().__init__(self._events(), media_type="text/event-stream",
                         headers={"Cache-Control": "no-cache"})
        self._first, self._chunks, self._failure = first, chunks, failure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self._chunks):  # closed at once when the client leaves
            # The server's end cancels this; the last event has then said so.
            with contextlib.suppress(asyncio.CancelledError):
                await super().__call__(scope, receive, send)

    async def _events(self) -> AsyncIterator[str]:
        yield _event(self._first)
        try:
            async for chunk in self._chunks:
                yield _event(chunk)
        except ClientDisconnect:
            return
        except (Exception, asyncio.CancelledError) as error:
            yield _event(json.loads(self._failure(error).body))
        else:
            yield "data: [DONE]\n\n"


def _event(data: dict[str, Any]) -> str:
    """One event. Its JSON is ASCII, as some clients also end a line at U+2028 and the like."""
    return f"data: {json.dumps(data)}\n\n"
