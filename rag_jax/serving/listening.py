"""How the thread that decodes answers passes their first tokens to the event loop."""

import asyncio
from collections.abc import AsyncIterator

from rag_jax.answering import Beginning


class Listener:
    """Receives the first tokens of the answers to one request while they are decoded.

    Args:
      deadline: when to stop waiting, by the clock of the event loop.

    Attributes:
      left: whether nobody waits for the answers any more.
    """

    def __init__(self, deadline: float):
        self._loop, self._deadline, self.left = asyncio.get_running_loop(), deadline, False
        self._queue: asyncio.Queue[tuple[int, Beginning] | None] = asyncio.Queue()

    def tell(self, number: int, begun: Beginning) -> None:
        """Passes on the first tokens of answer `number`; called from any thread."""
        if not self.left:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, (number, begun))

    def end(self) -> None:
        """Ends the iteration; called in the event loop."""
        self._queue.put_nowait(None)

    async def __aiter__(self) -> AsyncIterator[tuple[int, Beginning]]:
        """The number of an answer and its first tokens, as often as they grow, until the end.

        Raises:
          TimeoutError: the deadline has passed.
        """
        while True:
            async with asyncio.timeout_at(self._deadline):
                item = await self._queue.get()
            if item is None:
                return
            yield item
