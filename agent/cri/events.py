"""A runtime's own word that something changed: a hint to list again, and never more.

Streams are cut, lose events, and are not there with every runtime.
"""

import asyncio
import contextlib
from collections.abc import Callable

import structlog

from agent.cri.client import CriError, CriUnimplementedError, Runtime

log = structlog.get_logger(__name__)

# A stream that is refused, or switched off (CRI-O), ends at once; one that still stands will tell.
_LISTENING_SECONDS = 1.0
_RETRY_SECONDS = (1.0, 60.0)
# What a runtime without events is asked again for, in case it was replaced by one with them.
_UNIMPLEMENTED_SECONDS = 300.0


class RuntimeEvents:
    """Follows a runtime's events for as long as it runs."""

    def __init__(self, runtime: Callable[[], Runtime | None], on_hint: Callable[[], None]) -> None:
        """on_hint: called at each event, and whenever some may have been missed."""
        self._runtime = runtime
        self._on_hint = on_hint
        self.are_coming = False
        """Whether a stream stands."""

    async def run(self) -> None:
        """Follow until cancelled."""
        failures = 0
        while True:
            seconds = growing(_RETRY_SECONDS, failures)
            try:
                if runtime := self._runtime():
                    failures = 0 if await self._listen(runtime) else failures + 1
            except CriUnimplementedError:
                log.info("container runtime tells of no changes; it is asked again and again")
                seconds = _UNIMPLEMENTED_SECONDS
            except CriError:
                # The next list says what is wrong, if it still is.
                failures += 1
            await asyncio.sleep(seconds)

    async def _listen(self, runtime: Runtime) -> bool:
        """Hint until the stream ends; whether it stood for a while."""
        standing = asyncio.get_running_loop().call_later(_LISTENING_SECONDS, self._mark_open)
        try:
            async with contextlib.aclosing(runtime.events()) as events:
                async for _ in events:
                    self._on_hint()
            return self.are_coming
        finally:
            standing.cancel()
            if self.are_coming:
                self.are_coming = False
                self._on_hint()

    def _mark_open(self) -> None:
        self.are_coming = True
        self._on_hint()


def growing(bounds: tuple[float, float], failures: int) -> float:
    """How long to wait after so many failures in a row: the first bound, doubled up to the last."""
    first, most = bounds
    return min(first * 2.0 ** min(failures, 16), most)
