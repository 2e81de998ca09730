"""Writes the agent's heartbeat, its limits and the pods' cgroup to the gates' configuration."""

from agent import tasks
from agent.linux.pods_cgroup import PodsCgroup
from bpf.node_config import NodeConfig

_PERIOD_SECONDS = 1.0

# An agent that is restarted or upgraded is back within some seconds. After this, where the kernel
# cannot follow the kubelet (`bpf/kubelet_unit.py`), it may have been restarted into another cgroup,
# so declared ports are opened to host processes: a healthy pod must not restart because the agent
# is missing.
STALE_AFTER_SECONDS = 15.0


class Heartbeat:
    """Beats once a second. Each beat is one small system call, so it runs on the event loop."""

    def __init__(
        self, config: NodeConfig, pods_cgroup: PodsCgroup, *, dead_man_hours: float
    ) -> None:
        """dead_man_hours: after this time without a beat everything passes; 0: never."""
        self._config = config
        self._pods_cgroup = pods_cgroup
        self._dead_man_seconds = dead_man_hours * 3600

    async def run(self) -> None:
        """Beat until cancelled. The first beat is before the first wait."""
        self._config.set_limits(
            stale_after_seconds=STALE_AFTER_SECONDS, dead_man_seconds=self._dead_man_seconds
        )
        while True:
            self._config.beat()
            # The kubelet creates it at its first start.
            if pods := self._pods_cgroup.identity():
                self._config.set_pods(*pods)
            await tasks.tick(_PERIOD_SECONDS)
