"""What a proxy's backend is to the process that feeds it."""

from typing import Protocol

from agent.errors import PodgateError
from agent.proxy.frontends import Change


class BackendError(PodgateError):
    """The kernel was not changed, or in part; the message is one sentence."""


class Backend(Protocol):
    """Puts services into the kernel, where they stay when the process ends."""

    async def change(self, change: Change) -> None:
        """Raises `BackendError`; then the same comes again, with what has changed since.

        The first change is everything: what an earlier process left goes.
        """

    async def close(self) -> None: ...
