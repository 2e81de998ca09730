"""What a scheduler reports to its owner; an owner that fails stops no probe."""

import asyncio
from collections.abc import Callable

from probes.engine.checks import Check
from probes.engine.targets import ProbeKey
from probes.results import ProbeOutcome, ProbeResult


class Callbacks:
    """The callbacks of `Scheduler`, which documents them."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        on_result: Callable[[ProbeKey, ProbeResult], None],
        on_probe: Callable[[ProbeKey, ProbeOutcome], None],
        on_check: Callable[[Check], None] | None,
        on_delay: Callable[[float], None] | None,
    ) -> None:
        self._loop = loop
        self.on_result = on_result
        self.on_probe = on_probe
        self.on_check = on_check
        self.on_delay = on_delay

    def guarded(self, call: Callable[..., None] | None, *args: object) -> None:
        """Call a callback, if there is one; an error is reported to the loop."""
        if call is None:
            return
        try:
            call(*args)
        except Exception as error:
            self._loop.call_exception_handler(
                {
                    "message": f"a callback of the probe scheduler failed: {error!r}",
                    "exception": error,
                }
            )
