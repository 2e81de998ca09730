"""The interface of a proxy's backend."""

from typing import Protocol

from agent.errors import PodgateError
from agent.linux.nft_monitor import Deleted
from agent.services.proxy.frontends import FrontendChange


class BackendError(PodgateError):
    """The kernel could not be changed, or only in part."""


class Backend(Protocol):
    """Installs services in the kernel, where they stay when the process exits."""

    is_polled: bool
    """Whether what is missing can be missing without a message, so that `repair` is due now and
    then."""

    async def apply(self, change: FrontendChange) -> None:
        """Raises `BackendError`; the next change then includes this one.

        The first change is the whole state: it replaces what a previous process installed.
        """

    def is_concerned(self, deleted: Deleted) -> bool:
        """Whether something of this backend's may be among what was deleted from nftables."""

    async def repair(self) -> bool:
        """Compare what was installed with the kernel, and install again what is missing.

        Returns whether something was. Not beside `apply`. Raises `BackendError`.
        """

    async def close(self) -> None: ...
