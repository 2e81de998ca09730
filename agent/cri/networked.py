"""Sandboxes that have just got their network, where the runtime reports these.

What it misses, the list of sandboxes has some milliseconds later.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from agent.cri.client import CriError, CriUnimplementedError, Runtime
from agent.cri.models import NetworkedSandbox

# If the cause of an error persists, the next list reports it.
_RETRY_SECONDS = 1.0
# For a runtime without these events, in case it is replaced by one with them.
_UNIMPLEMENTED_SECONDS = 300.0


async def follow(
    runtime: Callable[[], Runtime | None],
    is_added: Callable[[str], bool],
    add: Callable[[NetworkedSandbox], Awaitable[None]],
    set_open: Callable[[bool], None],
) -> None:
    """Add each sandbox until cancelled. runtime: None while there is no connection; is_added: as
    of `networked_sandboxes`; set_open: called with whether the runtime has reported one and still
    reports."""
    while True:
        seconds = _RETRY_SECONDS
        try:
            if found := runtime():
                async with contextlib.aclosing(found.networked_sandboxes(is_added)) as sandboxes:
                    async for sandbox in sandboxes:
                        set_open(True)
                        await add(sandbox)
        except CriUnimplementedError:
            seconds = _UNIMPLEMENTED_SECONDS
        except CriError:
            pass
        finally:
            set_open(False)
        await asyncio.sleep(seconds)
