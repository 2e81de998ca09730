"""Container runtime events. An event only triggers an earlier relist; the list is authoritative.

Streams break, lose events, and do not exist in every runtime.
"""

import asyncio
import contextlib
from collections.abc import Callable

import structlog

from agent.backoff import Backoff, no_jitter
from agent.cri.client import CriError, CriUnimplementedError, Runtime
from agent.logs import Event

log = structlog.get_logger(__name__)

# A stream that is rejected or disabled (CRI-O) ends at once; one that is open after this delivers.
_OPEN_SECONDS = 1.0
_RETRY_SECONDS = 1.0
_MAX_RETRY_SECONDS = 60.0
# For a runtime without events, in case it is replaced by one with them.
_UNIMPLEMENTED_SECONDS = 300.0


class RuntimeEvents:
    """Follows a runtime's event stream and opens it again when it ends."""

    def __init__(self, runtime: Callable[[], Runtime | None], on_hint: Callable[[], None]) -> None:
        """on_hint: is called for each event, and whenever events may have been missed."""
        self._runtime = runtime
        self._on_hint = on_hint
        self.is_open = False
        """Whether a stream is open."""

    async def run(self) -> None:
        """Follow until cancelled."""
        retry = Backoff(
            base_seconds=_RETRY_SECONDS, cap_seconds=_MAX_RETRY_SECONDS, jitter=no_jitter
        )
        while True:
            seconds = _RETRY_SECONDS
            try:
                if runtime := self._runtime():
                    if await self._listen(runtime):
                        retry.reset()
                    else:
                        seconds = retry.next_seconds()
            except CriUnimplementedError:
                log.info(Event.RUNTIME_EVENTS_UNSUPPORTED)
                seconds = _UNIMPLEMENTED_SECONDS
            except CriError:
                # If the cause persists, the next list reports it.
                seconds = retry.next_seconds()
            await asyncio.sleep(seconds)

    async def _listen(self, runtime: Runtime) -> bool:
        """Hint until the stream ends; returns whether it was open for a while."""
        timer = asyncio.get_running_loop().call_later(_OPEN_SECONDS, self._mark_open)
        try:
            async with contextlib.aclosing(runtime.events()) as events:
                async for _ in events:
                    self._on_hint()
            return self.is_open
        finally:
            timer.cancel()
            if self.is_open:
                self.is_open = False
                self._on_hint()

    def _mark_open(self) -> None:
        self.is_open = True
        self._on_hint()
