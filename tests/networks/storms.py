"""A storm: agent, policy engine and kubelet end and start again, and the engine's rules or programs
are removed, while clients connect along all paths."""

import dataclasses
import signal
import time
from collections.abc import Callable

from tests.cluster.api import Json
from tests.cluster.deployment import Deployment
from tests.cluster.one_node import OneNode
from tests.cluster.workloads import Workloads
from tests.networks import traffic
from tests.networks.network import Network
from tests.networks.traffic import Path, Watch

ROUNDS = 2
_STEP_SECONDS = 10.0


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What was not as expected: connections by path, restarts by pod."""

    wrong: dict[str, list[str]]
    restarts: dict[str, int]
    summary: str


def storm(
    network: Network,
    node: OneNode,
    users: Workloads,
    pods: dict[str, Json],
    podgate: Deployment | None,
) -> Outcome:
    """Two rounds; without podgate its agent is no step, and the node reaches pods."""
    steps: list[Callable[[], object]] = [
        lambda: network.restart(signal.SIGKILL),
        lambda: _restart_kubelet(node),
        network.restart,
        network.flush,
    ]
    if podgate is not None:
        steps.insert(0, podgate.kill_agent)
    servers = [pods["web"], pods["tcp"]]
    addresses = [address for pod in servers for address in traffic.addresses(pod)]
    watch = Watch(
        Path("node", podgate is None, addresses),
        Path("pod", True, addresses, traffic.netns_of(pods["client"])),
        Path("outside", True, [one for one in addresses if ":" not in one], traffic.outside()),
    )
    with watch.running():
        for _ in range(ROUNDS):
            for step in steps:
                step()
                time.sleep(_STEP_SECONDS)
    restarts = users.restarts()
    return Outcome(watch.wrong, restarts, f"{watch.summary}, restarts {restarts or 'none'}")


def _restart_kubelet(node: OneNode) -> None:
    node.kubelet.restart()
    node.kubelet.wait_until_ready()
