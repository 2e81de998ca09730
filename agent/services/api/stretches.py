"""Long work on the event loop, divided into stretches."""

import asyncio
import time

# Time without a break for other tasks of the loop.
_STRETCH_SECONDS = 0.005


class Stretches:
    """Divides long work into stretches, between which other tasks of the loop run."""

    def __init__(self) -> None:
        self._until = time.monotonic() + _STRETCH_SECONDS

    async def step(self) -> None:
        if time.monotonic() >= self._until:
            await asyncio.sleep(0)
            self._until = time.monotonic() + _STRETCH_SECONDS
