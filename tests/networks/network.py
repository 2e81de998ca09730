"""What the tests of this directory need of a network plugin and its policy engine."""

import pathlib
import signal
from typing import Protocol

from tests.cluster.api import Api
from tests.cluster.daemons import Daemon


class Network(Protocol):
    """One cluster's. `install` before the first pod, then `start`."""

    version: str
    families: int
    """Of addresses that each pod has: 1 for IPv4 alone, 2 for both."""
    cgroup: pathlib.Path
    """The node's processes are below it, as far as the engine's connect hooks are concerned."""

    @property
    def api(self) -> Api: ...

    @property
    def engine(self) -> Daemon:
        """Enforces policies on this node."""

    @property
    def programmer(self) -> Daemon:
        """Without it no policy gets to new pods, which start all the same."""

    @property
    def has_programs(self) -> bool:
        """Whether it enforces by programs at pods' interfaces, instead of rules."""

    @property
    def translates(self) -> bool:
        """Whether it translates addresses of services at connect(2)."""

    def pod_addresses(self) -> set[str]:
        """Of all pods of the node, also of those that are being made."""

    def install(self) -> None: ...

    def start(self) -> None: ...

    def wait_until_ready(self) -> None: ...

    def restart(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End the engine by this signal, and start it again."""

    def flush(self) -> None:
        """Remove what the engine has installed, which it installs again: as a firewall's reload
        does, or its own update."""

    def remove(self) -> None:
        """End it, and leave nothing of it on the node but what goes with the node's pods."""
