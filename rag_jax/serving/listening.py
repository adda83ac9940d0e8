"""What the devices' thread tells of answers while they grow, heard in the event loop."""

import asyncio
from collections.abc import AsyncIterator

from rag_jax.answering import Beginning


class Listener:
    """Hears of the answers to one request.

    Args:
      deadline: by the event loop's clock, after which nobody waits.

    Attributes:
      left: whether nobody listens any more.
    """

    def __init__(self, deadline: float):
        self._loop, self._deadline, self.left = asyncio.get_running_loop(), deadline, False
        self._told: asyncio.Queue[tuple[int, Beginning] | None] = asyncio.Queue()

    def tell(self, place: int, begun: Beginning) -> None:
        """What there is of the answer in this place; called in any thread."""
        if not self.left:
            self._loop.call_soon_threadsafe(self._told.put_nowait, (place, begun))

    def end(self) -> None:
        """Nothing more will be told; called in the event loop."""
        self._told.put_nowait(None)

    async def __aiter__(self) -> AsyncIterator[tuple[int, Beginning]]:
        """What is told, until the end.

        Raises:
          TimeoutError: that takes too long.
        """
        while True:
            async with asyncio.timeout_at(self._deadline):
                told = await self._told.get()
            if told is None:
                return
            yield told
