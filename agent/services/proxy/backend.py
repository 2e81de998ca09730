"""The interface of a proxy's backend."""

from typing import Protocol

from agent.errors import PodgateError
from agent.services.proxy.frontends import FrontendChange


class BackendError(PodgateError):
    """The kernel could not be changed, or only in part."""


class Backend(Protocol):
    """Installs services in the kernel, where they stay when the process exits."""

    async def apply(self, change: FrontendChange) -> None:
        """Raises `BackendError`; the next change then includes this one.

        The first change is the whole state: it replaces what a previous process installed.
        """

    async def close(self) -> None: ...
