"""Says to the gates that the agent is there, and what they do when it no longer is."""

import asyncio

from bpf.node_config import NodeConfig

_PERIOD_SECONDS = 1.0

# An agent that is restarted or upgraded is back within some seconds. After this the kubelet may
# have been restarted into another cgroup and nobody followed it, so what pods declare is opened to
# the node's processes: a healthy pod must not restart for want of an agent.
STALE_AFTER_SECONDS = 15.0


class Heartbeat:
    """Beats once a second. Each beat is one small system call, so it runs on the event loop."""

    def __init__(self, config: NodeConfig, *, dead_man_hours: float) -> None:
        """dead_man_hours: after so long without a beat everything passes; 0: never."""
        self._config = config
        self._dead_man_seconds = dead_man_hours * 3600

    async def run(self) -> None:
        """Beat for ever. The first beat is before the first wait."""
        self._config.set_limits(
            stale_after_seconds=STALE_AFTER_SECONDS, dead_man_seconds=self._dead_man_seconds
        )
        while True:
            self._config.beat()
            await asyncio.sleep(_PERIOD_SECONDS)
